"""Watch a training from inside with `start()`, and name its large objects with `track(...)`."""

from holdall.tools.watch.session import Watch, start, track

__all__ = ["Watch", "start", "track"]
