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
        self._highest = (1.0 + self._floor) ** self._alpha  # of all told so far, scaled
        if not 0 < self._floor**self._alpha < _MOST:
            raise ArgumentError(
                f"floor ({floor!r}) to the power of alpha ({alpha!r}) is no number above 0; raise floor"
            )
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
        slots, shares = tree.find(generator.random(count))
        return Draw(self._ids(slots, held.next_id), shares ** np.float32(self._beta))

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set the priorities of transitions; of equal ids the last one counts."""
        tree = self._caught_up(held)
        if ids.ndim != 1 or ids.shape != priorities.shape:
            raise ArgumentError(
                f"priorities has shape {priorities.shape} for ids of shape {ids.shape}; pass one for every row drawn"
            )
        if priorities.dtype.kind not in "iuf":
            raise ArgumentError(f"priorities has dtype {priorities.dtype}; pass integers or floating point numbers")
        if not held.fields.all_valid:
            self._require_valid(held, ids)
        if priorities.size and priorities.min() < 0:
            raise ArgumentError(f"priorities holds {priorities.min()}; pass finite numbers of at least 0")
        scaled = self._scaled(priorities)
        told = tree.tell(ids, scaled, (held.first_id, held.next_id, self._capacity), _MOST)
        if told is None:
            raise self._refusal(held, ids, priorities, scaled)
        self._highest = max(self._highest, told)

    def mass(self, held: Held) -> float:
        """Return the sum of all scaled priorities: a transition is drawn with its own over this."""
        return self._caught_up(held).total

    def scaled(self, held: Held, ids: Ids) -> NDArray[np.float64]:
        """Return the scaled priorities of held ids."""
        return self._caught_up(held).values(ids % self._capacity)

    def _scaled(self, priorities: NDArray[Any]) -> NDArray[np.float64]:
        """Add the floor, and raise to alpha; in float32 if that is what was given and is precise enough."""
        if priorities.dtype == np.float32 and self._alpha <= 1:
            powers = (priorities + np.float32(self._floor)) ** np.float32(self._alpha)
            return np.asarray(powers, np.float64)
        with np.errstate(over="ignore"):  # beyond the largest number is beyond the largest priority, too
            return np.asarray((priorities + self._floor) ** self._alpha, np.float64)

    @staticmethod
    def _require_valid(held: Held, ids: Ids) -> None:
        known = ids[(ids >= held.first_id) & (ids < held.next_id)]
        if not (valid := held.fields.are_valid(known)).all():
            raise TransitionIdError(f"ids holds {known[~valid][0]}, which was added with valid=False; leave it out")

    @staticmethod
    def _refusal(held: Held, ids: Ids, priorities: NDArray[Any], scaled: NDArray[np.float64]) -> Exception:
        if ids.max() >= held.next_id:
            return TransitionIdError(f"ids holds {ids.max()}, but nothing from {held.next_id} on was added yet")
        wrong = priorities[~((scaled > 0) & (scaled <= _MOST))][0]
        return ArgumentError(f"priorities holds {wrong}; pass finite numbers of at least 0")

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
            first_told = self._highest
            given = first_told if held.allows_all else np.where(held.allows(ids), first_told, 0.0)
            self._tree.put(ids % self._capacity, given)
            self._next_id = held.next_id
        oldest = max(self._first_id, held.next_id - self._capacity)
        if oldest < held.first_id:  # left before others took their slots: a budget in bytes may hold less
            self._tree.put(np.arange(oldest, held.first_id) % self._capacity, 0.0)
        self._first_id = held.first_id
        return self._tree
