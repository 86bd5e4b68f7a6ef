"""Replay buffers alone, each in processes of its own: bytes, times, and whether the data came back right.

ways.py names them; one module a library knows how it is used; measure.py is one process, compare.py all of them.
"""
