"""A sum tree: positive numbers in slots, and slots drawn in proportion to them.

In:  slots and their numbers; points of [0, 1).  Out: the slots that the points fall on.
Invariant: every parent is its left child plus its right one, always recomputed, so a tree depends
on its leaves alone, to the last bit, and not on how they came to be.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
Numbers = NDArray[np.float64]

_REBUILD_SHARE = 16
"""From one changed leaf in so many on, adding up every level is quicker than following paths."""


class SumTree:
    """`slots` numbers of at least 0, all 0 at first.

    Node 1 is the root, the children of i are 2 i and 2 i + 1, and the leaves stand last.
    """

    def __init__(self, slots: int) -> None:
        self._leaves = 1 << max(0, slots - 1).bit_length()
        self._nodes = np.zeros(2 * self._leaves, np.float64)
        self._compiled = _compiled()

    def __getstate__(self) -> dict[str, Any]:
        return {"leaves": self._leaves, "nodes": self._nodes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._leaves, self._nodes = state["leaves"], state["nodes"]
        self._compiled = _compiled()

    @property
    def total(self) -> float:
        """The sum of all slots."""
        return float(self._nodes[1])

    def values(self, slots: Slots) -> Numbers:
        """Return the numbers in some slots."""
        return self._nodes.take(slots + self._leaves)

    def copy_to(self, values: Numbers) -> None:
        """Copy the numbers of the first slots, as many as `values` has room for."""
        values[:] = self._nodes[self._leaves : self._leaves + len(values)]

    def put(self, slots: Slots, values: Numbers | float) -> None:
        """Set the numbers in some slots; of equal slots the last one counts."""
        few = len(slots) * _REBUILD_SHARE < self._leaves
        if self._compiled is not None and few:
            one_for_all = np.ndim(values) == 0
            numbers, place = np.ascontiguousarray(values, np.float64), np.ascontiguousarray(slots, np.int64)
            self._compiled.put(
                _start(self._nodes), self._leaves, _start(place), _start(numbers), int(not one_for_all), len(place)
            )
            return
        self._nodes[slots + self._leaves] = values
        above, parents = self._leaves, slots + self._leaves
        if few:
            # Near the root most nodes change: there whole levels are added up.
            above = min(self._leaves, 1 << max(1, len(slots).bit_length()))
            for _ in range(self._leaves.bit_length() - above.bit_length()):
                parents = parents >> 1
                self._nodes[parents] = self._nodes.take(2 * parents) + self._nodes.take(2 * parents + 1)
        self._add_up_above(above)

    def tell(self, ids: Slots, values: Numbers, held: tuple[int, int, int], most: float) -> float | None:
        """Set the numbers of ids, which stand in slots modulo the capacity; of equal ids the last one counts.

        Return the largest number set, or None, with nothing changed, if an id was not added yet or a number is not
        above 0 and at most `most`.

        Args:
            held: First id held, next id to come, and the capacity; older ids are passed over.
        """
        first, end, capacity = held
        if self._compiled is None:
            if ids.size and not (ids.max() < end and values.min() > 0 and values.max() <= most):
                return None
            kept = ids >= first
            self.put(ids[kept] % capacity, values[kept])
            return float(values[kept].max(initial=0.0))
        largest = ctypes.c_double(0.0)
        named, numbers = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(values, np.float64)
        failed = self._compiled.tell(
            _start(self._nodes), self._leaves, _start(named), _start(numbers), len(named),
            first, end, capacity, most, ctypes.addressof(largest),
        )  # fmt: skip
        return largest.value if failed < 0 else None

    def find(self, points: Numbers) -> tuple[Slots, NDArray[np.float32]]:
        """Return the slots that points of [0, 1) fall on, and for each the lowest number found over its own.

        A slot that holds 0 is never found.
        """
        if self._compiled is None:
            slots = self._find(points * self._nodes[1])
            found = self.values(slots)
            return slots, (found.min(initial=np.inf) / found).astype(np.float32)
        place, shares = np.empty(len(points), np.int64), np.empty(len(points), np.float32)
        self._compiled.find(
            _start(self._nodes), self._leaves, _start(points), len(points), _start(place), _start(shares)
        )
        return place, shares

    def _find(self, left_over: Numbers) -> Slots:
        nodes, node = self._nodes, np.ones(len(left_over), np.int64)
        for _ in range(self._leaves.bit_length() - 1):
            left = 2 * node
            in_left, in_right = nodes.take(left), nodes.take(left + 1)
            # Rounding may leave a point just beyond the last number: it stays on a side that holds one.
            right = ((left_over >= in_left) & (in_right > 0)) | (in_left == 0)
            left_over = left_over - np.where(right, in_left, 0)
            node = left + right
        return node - self._leaves

    def _add_up_above(self, above: int) -> None:
        """Add up all levels above the one that begins with node `above`."""
        nodes = self._nodes
        while above > 1:
            nodes[above // 2 : above] = nodes[above : 2 * above : 2] + nodes[above + 1 : 2 * above : 2]
            above //= 2


def _start(array: NDArray[Any]) -> int:
    """Return where a contiguous array's first byte lies."""
    try:
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # a third of the cost of array.ctypes
    except (TypeError, ValueError):  # read-only or empty
        return int(array.ctypes.data)


class _Compiled:
    """sumtree.c through ctypes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.put = library.holdall_tree_put
        self.put.argtypes = [pointer, number, pointer, pointer, number, number]
        self.put.restype = None
        self.tell = library.holdall_tree_tell
        self.tell.argtypes = [pointer, number, pointer, pointer, *[number] * 4, ctypes.c_double, pointer]
        self.tell.restype = number
        self.find = library.holdall_tree_find
        self.find.argtypes = [pointer, number, pointer, number, pointer, pointer]
        self.find.restype = None


def _compiled() -> _Compiled | None:
    """Return the compiled loops if they were built, and not asked to be left out."""
    return None if os.environ.get("HOLDALL_KERNELS", "") == "portable" else _loaded()


@functools.cache
def _loaded() -> _Compiled | None:
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    try:
        return _Compiled(ctypes.CDLL(str(Path(__file__).parents[1] / "experience" / f"_kernels{suffix}")))
    except (OSError, AttributeError):
        return None
