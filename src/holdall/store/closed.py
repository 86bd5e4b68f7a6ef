"""ClosedStore: the object that replaces the store of a closed memory."""

from __future__ import annotations

from typing import Any

from holdall.errors import ClosedError

CLOSED = "The memory was closed. Make a new ReplayMemory."
FORKED = (
    "The memory was made before this process was forked, and belongs to the parent. Make a ReplayMemory here, or use "
    "holdall.ray to share one between processes."
)


class ClosedStore:
    """A store that raises ClosedError whenever it is used.

    Closing a memory replaces its store by this object in one assignment, so no method has to ask whether the memory is
    open.
    """

    held_count = 0
    """A closed memory holds nothing."""
    disk_bytes = 0
    """A closed memory has no files."""

    def __init__(self, reason: str = CLOSED) -> None:
        self._reason = reason

    def set_pressure_check(self, check: Any) -> None:
        """Do nothing. A closed memory gets pressure checks until it is freed, but it does not grow."""

    def close(self) -> None:
        """Do nothing, because a memory may be closed twice."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(self._reason)

    def __len__(self) -> int:
        raise ClosedError(self._reason)
