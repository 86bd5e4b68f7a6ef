"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

buffers/ holds replay buffers alone against each other; trace.py is the experience that they are given.
"""
