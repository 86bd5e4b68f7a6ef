"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

settings.py and run.py measure and rank whole trainings; training.py is one of them. search.py looks for the best
settings. compare_buffers.py compares replay buffers alone; trace.py is the experience that they are given. Nothing is
imported here: a measured process must load nothing that it does not use.
"""
