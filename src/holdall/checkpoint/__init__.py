"""Checkpoints: a memory on disk or in an object store, complete or not at all.

snapshot -> records in data files -> manifest (the commit) -> collect what nothing names
"""
