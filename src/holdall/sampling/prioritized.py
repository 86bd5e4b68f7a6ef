"""Prioritized sampling: a sum tree of priorities, and the sampler that draws in proportion to them.

In:  priorities of transitions, as the caller learns them.  Out: ids, and importance weights.
Invariant: every parent of the tree is its left child plus its right one, always recomputed, so a tree depends on its
leaves alone, to the last bit, and not on how they came to be.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.errors import ArgumentError, DamageError, TransitionIdError
from holdall.native import native_library
from holdall.sampling.draw import Held, State, own_sampler
from holdall.sampling.row_order import Ids
from holdall.schema import require_number
from holdall.storage import address, copy_held

Slots = NDArray[np.int64]
Numbers = NDArray[np.float64]

_REBUILD_SHARE = 16
"""If more than one leaf in so many changes, adding up every level is quicker than following paths."""


class SumTree:
    """`slots` numbers of at least 0, all 0 at first.

    Node 1 is the root, the children of i are 2 i and 2 i + 1, and the leaves stand last.
    """

    def __init__(self, slots: int) -> None:
        self._leaves = 1 << max(0, slots - 1).bit_length()
        self._nodes = np.zeros(2 * self._leaves, np.float64)
        self._is_summed = True  # an interrupt may leave sums that are not those of their leaves
        self._library = native_library()

    def __getstate__(self) -> dict[str, Any]:
        return {"leaves": self._leaves, "nodes": self._nodes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._leaves, self._nodes = state["leaves"], state["nodes"]
        self._is_summed = False
        self._library = native_library()

    def mend(self) -> None:
        """Add all sums up again if an interrupt came between them and their leaves."""
        if not self._is_summed:
            self._add_up_above(self._leaves)
            self._is_summed = True

    @property
    def total(self) -> float:
        """The sum of all slots."""
        return float(self._nodes[1])

    def values(self, slots: Slots) -> Numbers:
        """Return the numbers in some slots."""
        return self._nodes.take(slots + self._leaves)

    def copy_to(self, values: Numbers) -> None:
        """Copy the numbers of the first slots, as many as `values` has room for."""
        copy_held(self._nodes[self._leaves : self._leaves + len(values)], values)

    def put(self, slots: Slots, values: Numbers | float) -> None:
        """Set the numbers in some slots; of equal slots the last one counts."""
        few = len(slots) * _REBUILD_SHARE < self._leaves
        if few:
            one_for_all = np.ndim(values) == 0
            numbers, place = np.ascontiguousarray(values, np.float64), np.ascontiguousarray(slots, np.int64)
            self._library.holdall_tree_put(
                address(self._nodes), self._leaves, address(place), address(numbers), int(not one_for_all), len(place)
            )
            return
        self._is_summed = False
        self._nodes[slots + self._leaves] = values
        self._add_up_above(self._leaves)
        self._is_summed = True

    def update(self, ids: Slots, values: Numbers, held: tuple[int, int, int], most: float) -> float | None:
        """Set the numbers of ids, which stand in slots modulo the capacity; of equal ids the last one counts.

        Return the largest number set, or None, with nothing changed, if an id was not added yet or a number is not
        above 0 and at most `most`.

        Args:
            held: First id held, next id to come, and the capacity; older ids are ignored.
        """
        first, end, capacity = held
        largest = ctypes.c_double(0.0)
        named, numbers = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(values, np.float64)
        failed = self._library.holdall_tree_update(
            address(self._nodes), self._leaves, address(named), address(numbers), len(named),
            first, end, capacity, most, ctypes.addressof(largest),
        )  # fmt: skip
        return largest.value if failed < 0 else None

    def find(self, points: Numbers) -> tuple[Slots, NDArray[np.float32]]:
        """Return the slots that points of [0, 1) fall on, and for each the lowest number found over its own.

        A slot that holds 0 is never found.
        """
        place, shares = np.empty(len(points), np.int64), np.empty(len(points), np.float32)
        self._library.holdall_tree_find(
            address(self._nodes), self._leaves, address(points), len(points), address(place), address(shares)
        )
        return place, shares

    def _add_up_above(self, above: int) -> None:
        """Add up all levels above the one that begins with node `above`."""
        nodes = self._nodes
        while above > 1:
            nodes[above // 2 : above] = nodes[above : 2 * above : 2] + nodes[above + 1 : 2 * above : 2]
            above //= 2


_MOST = 1e280
"""Scaled priorities up to this can be added up for any memory."""


@own_sampler("alpha", "beta", "floor")
class Prioritized:
    """Draw transition i with probability p_i ** alpha / sum of all, p_i its priority.

    A new transition has the highest priority seen so far. Weights are (p_min / p_i) ** (alpha beta),
    p_min the lowest in the batch: the correction for drawing unevenly, at most 1.

    Args:
        alpha: How uneven draws are; 0 is uniform.
        beta: How much of it the weights correct; 1 is all. May be changed at any time, as agents
            that anneal it do.
        floor: Added to every priority, so that every transition can be drawn again.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, floor: float = 1e-6) -> None:
        self._alpha = require_number("alpha", alpha, 0.0)
        self.beta = beta
        self._floor = require_number("floor", floor, 1e-30)
        self._highest: float = (1.0 + self._floor) ** self._alpha  # of all priorities so far, scaled
        if not 0 < self._floor**self._alpha < _MOST:
            raise ArgumentError(
                f"floor ({floor!r}) to the power of alpha ({alpha!r}) is no number above 0; raise floor"
            )
        self._tree: SumTree | None = None
        self._capacity = 0
        self._first_id = 0  # of the first transition that may have one
        self._copied: NDArray[np.float64] = np.zeros(0)  # the memory of the last state
        self._last_state: weakref.ref[NDArray[np.float64]] | None = None
        self._next_id = 0  # of the first transition that has no priority yet
        self._unfinished: tuple[Ids, NDArray[np.float64], tuple[int, int, int]] | None = None  # update, interrupted
        self._flags_changed: int | None = None  # how often flags had been set again when it was last asked

    @property
    def alpha(self) -> float:
        """How uneven draws are."""
        return self._alpha

    @property
    def floor(self) -> float:
        """What is added to every priority."""
        return self._floor

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
        self.require(ids, priorities)
        if not held.fields.all_valid:
            self._require_valid(held, ids)
        scaled = self.scale(priorities)
        self._unfinished = (ids, scaled, (held.first_id, held.next_id, self._capacity))
        if not self._update(tree):
            raise self._refusal(held, ids, priorities, scaled)

    @staticmethod
    def require(ids: Ids, priorities: NDArray[Any]) -> Ids:
        """Return the ids; refuse priorities that are none, or not one for every id."""
        if ids.ndim != 1 or ids.shape != priorities.shape:
            raise ArgumentError(
                f"priorities has shape {priorities.shape} for ids of shape {ids.shape}; pass one for every row drawn"
            )
        if priorities.dtype.kind not in "iuf":
            raise ArgumentError(f"priorities has dtype {priorities.dtype}; pass integers or floating point numbers")
        if priorities.size and not (priorities.min() >= 0 and priorities.max() < np.inf):  # or NaN
            wrong = priorities[~((priorities >= 0) & (priorities < np.inf))][0]
            raise ArgumentError(f"priorities holds {wrong}; pass finite numbers of at least 0")
        return ids

    def _update(self, tree: SumTree) -> bool:
        """Set priorities, and the highest one, both or none; return whether they could be set."""
        if self._unfinished is None:
            return True
        largest = tree.update(*self._unfinished, _MOST)
        if largest is not None:
            self._highest = max(self._highest, largest)
        self._unfinished = None
        return largest is not None

    def mass(self, held: Held) -> float:
        """Return the sum of all scaled priorities: a transition is drawn with its own over this."""
        return self._caught_up(held).total

    def scaled(self, held: Held, ids: Ids) -> NDArray[np.float64]:
        """Return the scaled priorities of held ids."""
        return self._caught_up(held).values(ids % self._capacity)

    @property
    def highest(self) -> float:
        """The highest priority so far, scaled: what a new transition gets."""
        return self._highest

    def raise_highest(self, held: Held, scaled: float) -> None:
        """Give transitions that are added from now on at least this scaled priority: it was seen elsewhere."""
        if held.next_id > held.first_id:
            self._caught_up(held)
        self._highest = max(self._highest, scaled)

    def scale(self, priorities: NDArray[Any]) -> NDArray[np.float64]:
        """Add the floor, and raise to alpha; in float32 if that is what was given and is precise enough."""
        if priorities.dtype == np.float32 and self._alpha <= 1:
            powers = (priorities + np.float32(self._floor)) ** np.float32(self._alpha)
            return np.asarray(powers, np.float64)
        with np.errstate(over="ignore"):  # beyond the largest number is beyond the largest priority, too
            return np.asarray((priorities.astype(np.float64) + self._floor) ** self._alpha)

    @staticmethod
    def _require_valid(held: Held, ids: Ids) -> None:
        known = ids[(ids >= held.first_id) & (ids < held.next_id)]
        if not (valid := held.fields.are_valid(known)).all():
            raise TransitionIdError(f"ids holds {known[~valid][0]}, which was added with valid=False; leave it out")

    def _refusal(self, held: Held, ids: Ids, priorities: NDArray[Any], scaled: NDArray[np.float64]) -> Exception:
        if ids.max() >= held.next_id:
            return TransitionIdError(f"ids holds {ids.max()}, but nothing from {held.next_id} on was added yet")
        wrong = priorities[~((scaled > 0) & (scaled <= _MOST))][0]
        return ArgumentError(
            f"priorities holds {wrong}, which to the power of alpha ({self._alpha}) is beyond {_MOST}; pass smaller "
            "numbers"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copied": np.zeros(0), "_last_state": None, "_flags_changed": None}

    def state(self) -> State:
        """Return the scaled priorities by slot, and the numbers that new ones depend on."""
        # Memory that was written to before takes a copy in a tenth of the time: the last state's, once it is gone.
        if self._copied.size != self._capacity or (self._last_state is not None and self._last_state() is not None):
            self._copied = np.zeros(self._capacity)
        if self._tree is not None:
            self._update(self._tree)
        scaled = np.frombuffer(self._copied.data, np.float64)  # views refer to this array, not to the memory behind it
        self._last_state = weakref.ref(scaled)
        if self._tree is not None:  # slots that no transition had yet hold 0, there and here
            self._tree.copy_to(scaled[: self._next_id])
        return {"scaled": scaled, "highest": self._highest, "next_id": self._next_id, "beta": self._beta}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
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
        self._tree, self._flags_changed, self._copied = None, None, np.zeros(0)
        if leaves.size:
            self._tree = SumTree(len(leaves))
            self._tree.put(np.arange(len(leaves)), leaves)

    def _ids(self, slots: Ids, next_id: int) -> Ids:
        """Return the ids of the newest transitions in some slots."""
        if next_id <= self._capacity:
            return slots
        rounds, slot = divmod(next_id, self._capacity)
        return slots + self._capacity * (rounds - (slots >= slot))

    def resize(self, capacity: int, first_id: int) -> None:
        """Move to a memory of another capacity, which holds the ids from `first_id` on."""
        if self._tree is None or capacity == self._capacity:
            return
        ids = np.arange(max(first_id, self._next_id - min(capacity, self._capacity)), self._next_id)
        leaves = self._tree.values(ids % self._capacity)
        self._tree, self._capacity = SumTree(capacity), capacity
        self._tree.put(ids % capacity, leaves)

    def _caught_up(self, held: Held) -> SumTree:
        """Give transitions that were added since the last call their first priority, and evicted ones none."""
        if self._tree is None:
            self._capacity = held.capacity
            self._tree = SumTree(held.capacity)
        self._tree.mend()
        self._update(self._tree)
        if held.capacity != self._capacity or held.next_id < self._next_id:
            raise ArgumentError(
                f"sampler: these priorities belong to a memory of {self._capacity} transitions, up to id "
                f"{self._next_id}, not to this one ({held.capacity}, {held.next_id}); give every memory its own sampler"
            )
        first = max(self._next_id, held.first_id)
        if first < held.next_id:
            ids = np.arange(first, held.next_id)
            given = self._highest if held.allows_all else np.where(held.allows(ids), self._highest, 0.0)
            self._tree.put(ids % self._capacity, given)
            self._next_id = held.next_id
        oldest = max(self._first_id, held.next_id - self._capacity)
        if oldest < held.first_id:  # left before others took their slots: a budget in bytes may hold less
            self._tree.put(np.arange(oldest, held.first_id) % self._capacity, 0.0)
        if held.only is not None:
            self._ask_again(self._tree, held)
        self._first_id = held.first_id
        return self._tree

    def _ask_again(self, tree: SumTree, held: Held) -> None:
        """Ask which ids may be drawn, where that may have changed: all if flags were set, or those without a past."""
        if held.fields.flags_changed != self._flags_changed:
            ids = np.arange(held.first_id, held.next_id)
        elif held.first_id != self._first_id:
            ids = held.without_past(self._first_id)
        else:
            return
        self._flags_changed = held.fields.flags_changed
        before, allowed = tree.values(ids % self._capacity), held.allows(ids)
        changed = allowed != (before > 0)
        tree.put(ids[changed] % self._capacity, np.where(allowed[changed], self._highest, 0.0))
