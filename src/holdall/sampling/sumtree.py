"""A sum tree: positive numbers in slots, and slots drawn in proportion to them.

In:  slots and their numbers; points below the total.  Out: the slots that the points fall on.
Invariant: every parent is its left child plus its right one, always recomputed, so a tree depends
on its leaves alone, to the last bit, and not on how they came to be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_REBUILD_SHARE = 16
"""From one changed leaf in so many on, adding up every level is quicker than following paths."""


class SumTree:
    """`slots` numbers of at least 0, all 0 at first."""

    def __init__(self, slots: int) -> None:
        self._leaves = 1 << max(0, slots - 1).bit_length()
        self._levels = self._leaves.bit_length() - 1
        # Node 1 is the root, the children of i are 2 i and 2 i + 1, and the leaves stand last.
        self._nodes = np.zeros(2 * self._leaves, np.float64)
        self._changed: list[NDArray[np.int64]] = []

    @property
    def total(self) -> float:
        """The sum of all slots."""
        self._add_up()
        return float(self._nodes[1])

    def values(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the numbers in some slots."""
        return self._nodes.take(slots + self._leaves)

    def put(self, slots: NDArray[np.int64], values: NDArray[np.float64] | float) -> None:
        """Set the numbers in some slots; sums follow when they are next needed."""
        nodes = slots + self._leaves
        self._nodes[nodes] = values
        self._changed.append(nodes)

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the slot that each point of [0, total) falls on; never one that holds 0."""
        self._add_up()
        nodes, node = self._nodes, np.ones(len(points), np.int64)
        left_over = points.copy()
        for _ in range(self._levels):
            left = 2 * node
            in_left, in_right = nodes.take(left), nodes.take(left + 1)
            # Rounding may leave a point just beyond the last number: it stays on a side that holds one.
            right = (left_over >= in_left) & (in_right > 0) | (in_left == 0)
            left_over -= np.where(right, in_left, 0)
            node = left + right
        return node - self._leaves

    def _add_up(self) -> None:
        """Recompute the sums above all changed leaves."""
        if not self._changed:
            return
        changed = np.concatenate(self._changed)
        self._changed = []
        nodes = self._nodes
        if len(changed) * _REBUILD_SHARE >= self._leaves:
            above = self._leaves
        else:
            # Near the root most nodes change: there whole levels are added up.
            above = min(self._leaves, 1 << max(1, len(changed).bit_length()))
            parents = changed
            for _ in range(self._levels - (above.bit_length() - 1)):
                parents = parents >> 1
                nodes[parents] = nodes.take(2 * parents) + nodes.take(2 * parents + 1)
        while above > 1:
            nodes[above // 2 : above] = nodes[above : 2 * above : 2] + nodes[above + 1 : 2 * above : 2]
            above //= 2
