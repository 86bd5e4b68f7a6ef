"""Watch: where the memory of a training process is, how it grows, and why.

`start()` watches this process from inside; `holdall watch` watches any process from outside. Slow work happens in
another process. The watched process only publishes names and counters. NumPy is not imported here. What serves and
records is imported when it is asked for, so that a training does not load an HTTP server.
"""
