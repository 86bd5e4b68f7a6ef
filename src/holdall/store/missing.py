"""MissingStore: the object in place of a store that a memory does not have."""

from __future__ import annotations

from typing import Any, NoReturn

from holdall.errors import ClosedError, HoldallError
from holdall.memory_registry import PressureCheck

CLOSED = "The memory was closed. Make a new ReplayMemory."
FORKED = (
    "The memory was made before this process was forked, and belongs to the parent. Make a ReplayMemory here, or use "
    "holdall.ray to share one between processes."
)
ON_DEVICE = (
    "The memory keeps its transitions on a device, which has no store on the host. Make a ReplayMemory without "
    "store_device."
)


class MissingStore:
    """A store that raises an error whenever it is used.

    It fits where a `MemoryStore` or a `Store` is expected. Closing a memory replaces its store by such an object, so no
    method has to ask whether the memory is open.

    Args:
        reason: The text of the error.
        error: The class of the error.
    """

    held_count = 0
    """A closed memory holds nothing."""
    disk_bytes = 0
    """A closed memory has no files."""
    _reason: str
    _error: type[HoldallError]

    def __init__(self, reason: str = CLOSED, error: type[HoldallError] = ClosedError) -> None:
        # `__setattr__` of this class raises the error.
        object.__setattr__(self, "_reason", reason)
        object.__setattr__(self, "_error", error)

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Do nothing. A closed memory gets pressure checks until it is freed, but it does not grow."""

    def close(self) -> None:
        """Do nothing, because a memory may be closed twice."""

    def __getattr__(self, name: str) -> NoReturn:
        raise self._new_error()

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise self._new_error()

    def __len__(self) -> int:
        raise self._new_error()

    def _new_error(self) -> HoldallError:
        return self._error(self._reason)
