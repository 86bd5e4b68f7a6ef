"""Blocks in files: records, the files that hold them, and the disk tier."""
