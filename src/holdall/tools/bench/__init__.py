"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

settings.py says what is measured, and searches for the best settings; run.py measures and ranks whole trainings, of
which training.py is one. compare_buffers.py compares replay buffers alone; trace.py is the experience that they are
given. Nothing is imported here: a measured process must load nothing that it does not use.
"""
