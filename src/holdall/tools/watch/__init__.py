"""Watch: where the memory of a training process is, how it grows, and why.

`start()` watches this process from inside; `holdall watch` watches any process from outside. Slow work happens in
another process. The watched process only publishes names and counters.
"""

from __future__ import annotations

from holdall.tools.watch.session import Watch, start, track

__all__ = ["Watch", "start", "track"]
