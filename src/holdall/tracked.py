"""Memories that are alive, so that a watch can say by name where their bytes lie.

In:  every memory, as it is made.  Out: those that are still there.
Invariant: being listed keeps nothing alive and costs nothing while nobody watches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar


class Tracked(Protocol):
    """What a watch asks a memory for."""

    def arrays(self) -> Iterable[tuple[str, Any]]:
        """Return every array that the memory holds, under the name of its field; one name may have many arrays."""
        ...

    @property
    def fill(self) -> float:
        """How full the memory is, of 1."""
        ...


_living: weakref.WeakSet[Any] = weakref.WeakSet()

MemoryT = TypeVar("MemoryT", bound=Tracked)


def enlist(memory: MemoryT) -> None:
    """List a memory for as long as it lives."""
    _living.add(memory)


def living() -> list[Tracked]:
    """Return the memories that are alive."""
    return list(_living)
