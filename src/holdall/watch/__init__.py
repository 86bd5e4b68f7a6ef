"""Watch: where a training process's memory is, where it is going, and why.

`start()` in the process itself, or `holdall watch` from outside. What takes time happens in another process; here are
only names and counters.
"""

from __future__ import annotations

from holdall.watch.public import Watch, start, track

__all__ = ["Watch", "start", "track"]
