"""The memories of this process. A fork closes them in the child, and a watch measures them and limits their growth.

One registry, `MEMORIES`, serves the whole process, because a process forks as a whole and has one limit on its RAM.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from holdall.report import MemoryReport

PressureCheck = Callable[[int], bool]
"""Function that gets the bytes by which a memory grew, and returns whether RAM is short. If it is, the thread that adds
waits until the memory has compressed and spilled all blocks in its queue."""


class RegisteredMemory(Protocol):
    """A memory, as a watch sees it."""

    @property
    def fill(self) -> float:
        """Fraction of the capacity that is filled, from 0 to 1."""

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field. Raise ClosedError after `close`."""


class Hooks(NamedTuple):
    """Functions of one kind of memory that only this package calls. Their first argument is the memory."""

    set_pressure_check: Callable[[Any, PressureCheck | None], None]  # Calls the check each time the memory grew.
    close_in_child: Callable[[Any], None]  # Closes the memory in a forked child. Called there, by its only thread.


class MemoryRegistry:
    """Weak references to memories, and the pressure check that each of them gets. Keeps no memory alive."""

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[RegisteredMemory, Hooks] = weakref.WeakKeyDictionary()
        self._pressure_check: PressureCheck | None = None

    def __iter__(self) -> Iterator[RegisteredMemory]:
        """Yield the memories that exist now."""
        return iter(list(self._hooks))

    def add(self, memory: RegisteredMemory, hooks: Hooks) -> None:
        """Add a new memory, and give it the pressure check."""
        self._hooks[memory] = hooks
        hooks.set_pressure_check(memory, self._pressure_check)

    def close_in_child(self) -> None:
        """Close every memory. Called in a forked child, by its only thread."""
        for memory, hooks in list(self._hooks.items()):
            hooks.close_in_child(memory)

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Give `check` to every memory, also to those that are added later. It replaces the present check."""
        self._pressure_check = check
        for memory, hooks in list(self._hooks.items()):
            hooks.set_pressure_check(memory, check)

    def clear_pressure_check(self, check: PressureCheck) -> None:
        """Remove `check`. Do nothing if another check has replaced it."""
        if self._pressure_check == check:
            self.set_pressure_check(None)


MEMORIES = MemoryRegistry()
"""The memories of this process. Each memory adds itself, and is removed when it is freed."""
