"""Prioritized sampling: transitions are drawn in proportion to what they are said to teach.

In:  priorities of transitions, as the agent learns of them.  Out: ids and importance weights.
Invariant: every transition held that may be drawn has a priority above 0, and no other has one.
A tree that was restored from its leaves draws as the saved one, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.errors import ArgumentError, DamageError, TransitionIdError
from holdall.sampling.draw import Held, Ids, State, require_number
from holdall.sampling.sumtree import SumTree

_MOST = 1e280
"""Scaled priorities up to this can be added up for any memory."""
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Prioritized:
    """Draw transition i with probability p_i ** alpha / sum of all, p_i its priority.

    A new transition has the highest priority seen so far. Weights are (p_min / p_i) ** (alpha beta),
    p_min the lowest in the batch: the correction for drawing unevenly, at most 1.

    Args:
        alpha: How uneven draws are; 0 is uniform.
        beta: How much of it the weights correct; 1 is all. May be set anew at any time, as agents
            that anneal it do.
        floor: Added to every priority, so that nothing is never drawn again.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, floor: float = 1e-6) -> None:
        self._alpha = require_number("alpha", alpha, 0.0)
        self.beta = beta
        self._floor = require_number("floor", floor, 1e-30)
        self._most = _MOST ** (1 / max(self._alpha, 1.0))
        self._highest = 1.0
        self._tree: SumTree | None = None
        self._capacity = 0
        self._first_id = 0  # of the first transition that may have one
        self._copied: NDArray[np.float64] = np.zeros(0)
        self._next_id = 0  # of the first transition that has no priority yet

    @property
    def alpha(self) -> float:
        """How uneven draws are."""
        return self._alpha

    @property
    def beta(self) -> float:
        """How much of it the weights correct."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = require_number("beta", beta, 0.0)

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids in proportion to their scaled priorities."""
        tree = self._caught_up(held)
        if tree.total <= 0:
            raise ArgumentError("none of the transitions held may be drawn by this sampler; add more first")
        slots, scaled = tree.find(generator.random(count))
        weights = (scaled.min() / scaled).astype(np.float32) ** np.float32(self._beta)
        return Draw(self._ids(slots, held.next_id), weights)

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set the priorities of transitions; of equal ids the last one counts."""
        tree = self._caught_up(held)
        if ids.ndim != 1 or ids.shape != priorities.shape:
            raise ArgumentError(
                f"priorities has shape {priorities.shape} for ids of shape {ids.shape}; pass one for every row drawn"
            )
        if priorities.dtype.kind not in "iuf":
            raise ArgumentError(f"priorities has dtype {priorities.dtype}; pass integers or floating point numbers")
        given = priorities if priorities.dtype in _FLOATS else priorities.astype(np.float64)
        if given.size and not (given.min() >= 0 and float(given.max()) <= self._most):
            wrong = given[~((given >= 0) & (given <= self._most))]
            raise ArgumentError(f"priorities holds {wrong[0]}; pass numbers from 0 to {self._most:g}")
        scaled = (given + given.dtype.type(self._floor)) ** given.dtype.type(self._alpha)
        if ids.size and ids.max() >= held.next_id:
            raise TransitionIdError(f"ids holds {ids.max()}, but nothing from {held.next_id} on was added yet")
        if ids.size and ids.min() < held.first_id:
            kept = ids >= held.first_id
            ids, given, scaled = ids[kept], given[kept], scaled[kept]
        if not held.fields.all_valid and not (valid := held.fields.are_valid(ids)).all():
            raise TransitionIdError(f"ids holds {ids[~valid][0]}, which was added with valid=False; leave it out")
        if ids.size:
            tree.put(ids if held.next_id <= self._capacity else ids % self._capacity, scaled)
            self._highest = max(self._highest, float(given.max()))

    def state(self) -> State:
        """Return the scaled priorities by slot, and the numbers that new ones depend on."""
        # Memory that was written to before takes a copy in a tenth of the time; the last state's, once nobody holds it.
        if self._copied.size != self._capacity or sys.getrefcount(self._copied) > 2:
            self._copied = np.zeros(self._capacity)
        if self._tree is not None:
            self._tree.copy_to(self._copied)
        return {"scaled": self._copied, "highest": self._highest, "next_id": self._next_id, "beta": self._beta}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned elsewhere."""
        try:
            leaves = np.asarray(state["scaled"], np.float64)
            highest, next_id, beta = float(state["highest"]), int(state["next_id"]), float(state["beta"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(
                f"the saved state of a sampler holds {sorted(state)}, which Prioritized cannot read ({error}); pass a "
                "sampler of the kind that wrote it"
            ) from error
        sound = leaves.ndim == 1 and np.isfinite(leaves).all() and (leaves >= 0).all() and (leaves <= _MOST).all()
        if not sound or not np.isfinite(highest) or next_id < 0:
            raise DamageError("the saved priorities are no finite numbers of at least 0; load an older checkpoint")
        self.beta = beta
        self._highest, self._next_id, self._capacity = highest, next_id, len(leaves)
        self._tree = None
        if leaves.size:
            self._tree = SumTree(len(leaves))
            self._tree.put(np.arange(len(leaves)), leaves)

    def _ids(self, slots: Ids, next_id: int) -> Ids:
        """Name the newest transitions that stand in some slots."""
        if next_id <= self._capacity:
            return slots
        rounds, slot = divmod(next_id, self._capacity)
        return slots + self._capacity * (rounds - (slots >= slot))

    def resize(self, capacity: int, first_id: int) -> None:
        """Belong to a memory of another capacity, which holds the ids from `first_id` on."""
        if self._tree is None or capacity == self._capacity:
            return
        ids = np.arange(max(first_id, self._next_id - min(capacity, self._capacity)), self._next_id)
        leaves = self._tree.values(ids % self._capacity)
        self._tree, self._capacity = SumTree(capacity), capacity
        self._tree.put(ids % capacity, leaves)

    def _caught_up(self, held: Held) -> SumTree:
        """Give transitions that were added since the last call their first priority; take it from those that left."""
        if self._tree is None:
            self._tree, self._capacity = SumTree(held.capacity), held.capacity
        if held.capacity != self._capacity or held.next_id < self._next_id:
            raise ArgumentError(
                f"sampler: these priorities belong to a memory of {self._capacity} transitions, up to id "
                f"{self._next_id}, not to this one ({held.capacity}, {held.next_id}); give every memory its own sampler"
            )
        first = max(self._next_id, held.first_id)
        if first < held.next_id:
            ids = np.arange(first, held.next_id)
            scaled = (self._highest + self._floor) ** self._alpha
            self._tree.put(ids % self._capacity, scaled if held.allows_all else np.where(held.allows(ids), scaled, 0.0))
            self._next_id = held.next_id
        left_early = np.arange(max(self._first_id, held.next_id - self._capacity), held.first_id)
        if left_early.size:  # before others took their slots: a budget in bytes may hold less than the capacity
            self._tree.put(left_early % self._capacity, 0.0)
        self._first_id = held.first_id
        return self._tree
