"""Prioritized sampling: transitions are drawn in proportion to priorities that the caller sets.

The scaled priorities are the numbers in the slots of a `SumTree`. Transition `id` has slot `id % capacity`. A change of
priorities is one call of the tree, so an interrupted call leaves the sampler as before the call or as after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall._native import SumTree
from holdall.batch import Draw, Ids
from holdall.checks import require_number
from holdall.errors import ArgumentError, DamageError, TransitionIdError
from holdall.sampling.held import Held
from holdall.sampling.sampler import State

_MAX_SCALED = 1e280
"""Largest scaled priority: the sum over any number of transitions stays finite."""


class Prioritized:
    """Sampler that draws transition i with probability s_i / sum(s), where s_i = (priority_i + floor) ** alpha.

    A new transition gets the highest priority seen so far. Weights are (s_min / s_i) ** beta, where s_min is the lowest
    scaled priority of the batch. They correct for the uneven draws and are at most 1.

    Args:
        alpha: How uneven the draws are. 0 is uniform.
        beta: How much of the unevenness the weights correct. 1 corrects all of it. May be changed at any time, for
            example by agents that anneal it.
        floor: Added to every priority, so that every transition can be drawn again.

    Examples:
        >>> sampler = holdall.Prioritized(alpha=0.6)
        >>> chosen = holdall.ReplayMemory(Box(-1, 1, (3,)), Discrete(2), capacity=100, sampler=sampler)
        >>> obs = np.zeros(3, np.float32)
        >>> for _ in range(10):
        ...     chosen.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        >>> batch = chosen.sample(4)
        >>> chosen.update_priorities(batch.ids, np.ones(4))  # TD errors
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, floor: float = 1e-6) -> None:
        self._alpha = require_number("alpha", alpha, 0.0)
        self.beta = beta
        self._floor = require_number("floor", floor, 1e-30)
        if not 0 < self._floor**self._alpha < _MAX_SCALED:
            raise ArgumentError(
                f"floor ({floor!r}) to the power of alpha ({alpha!r}) is not a number above 0. Raise floor."
            )
        # Scaled priority of new transitions until the tree exists. Afterwards it is `SumTree.highest`.
        self._first_highest: float = (1.0 + self._floor) ** self._alpha
        # Made by the first call that gets a `Held`, because the capacity is not known before.
        self._tree: SumTree | None = None
        # First id that was held when the tree was last brought up to date.
        self._first_id = 0
        # Id after the newest transition with a priority.
        self._next_id = 0
        # `flags_changed` of the memory when `_review_allowed` last compared the tree with it. None: not known.
        self._flags_changed: int | None = None

    @property
    def alpha(self) -> float:
        """How uneven the draws are."""
        return self._alpha

    @property
    def floor(self) -> float:
        """The number that is added to every priority."""
        return self._floor

    @property
    def beta(self) -> float:
        """How much of the unevenness the weights correct."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = require_number("beta", beta, 0.0)

    @property
    def highest(self) -> float:
        """The highest scaled priority so far, which new transitions get."""
        return self._first_highest if self._tree is None else self._tree.highest

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids in proportion to their scaled priorities."""
        tree = self._catch_up(held)
        if tree.total <= 0:
            raise ArgumentError("sampler: none of the transitions held may be drawn. Add more transitions first.")
        slots, shares = tree.find(generator.random(count))
        return Draw(_find_newest_ids(slots, held.next_id, tree.slots), shares ** np.float32(self._beta))

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set the priorities of transitions. If an id is given twice, the last priority counts."""
        tree = self._catch_up(held)
        self.check_update(ids, priorities)
        if not held.fields.all_valid:
            _require_valid(held, ids)
        scaled = self.scale(priorities)
        try:
            tree.update(ids, scaled, held.first_id, held.next_id, _MAX_SCALED)
        except IndexError:
            raise TransitionIdError(
                f"ids holds {ids.max()}, but next_id is {held.next_id}. Pass ids of transitions that were added."
            ) from None
        except ValueError:
            wrong = priorities[~((scaled > 0) & (scaled <= _MAX_SCALED))][0]
            raise ArgumentError(
                f"priorities holds {wrong}, which to the power of alpha ({self._alpha}) is beyond {_MAX_SCALED}. Pass "
                "smaller numbers."
            ) from None

    @staticmethod
    def check_update(ids: Ids, priorities: NDArray[Any]) -> Ids:
        """Return the transitions whose priorities are set: `ids`.

        Raise ArgumentError unless there is one finite priority of at least 0 for every id.
        """
        if ids.ndim != 1 or ids.shape != priorities.shape:
            raise ArgumentError(
                f"priorities has shape {priorities.shape} for ids of shape {ids.shape}. Pass one priority per row."
            )
        if priorities.dtype.kind not in "iuf":
            raise ArgumentError(f"priorities has dtype {priorities.dtype}. Pass integers or floating point numbers.")
        if priorities.size == 0:
            return ids
        is_in_range = priorities.min() >= 0 and priorities.max() < np.inf  # False if there is a NaN.
        if not is_in_range:
            wrong = priorities[~((priorities >= 0) & (priorities < np.inf))][0]
            raise ArgumentError(f"priorities holds {wrong}. Pass finite numbers of at least 0.")
        return ids

    def compute_total(self, held: Held) -> float:
        """Return the sum of all scaled priorities."""
        return self._catch_up(held).total

    def read_scaled(self, held: Held, ids: Ids) -> NDArray[np.float64]:
        """Return the scaled priorities of held ids."""
        tree = self._catch_up(held)
        return tree.values(ids % tree.slots)

    def raise_highest(self, held: Held, scaled: float) -> None:
        """Give transitions that are added from now on at least the scaled priority `scaled`."""
        if held.next_id > held.first_id:
            self._catch_up(held)
        if self._tree is None:
            self._first_highest = max(self._first_highest, scaled)
        else:
            self._tree.raise_highest(scaled)

    def scale(self, priorities: NDArray[Any]) -> NDArray[np.float64]:
        """Return (priorities + floor) ** alpha, computed in float32 for float32 priorities if that cannot overflow."""
        if priorities.dtype == np.float32 and self._alpha <= 1:
            powers = (priorities + np.float32(self._floor)) ** np.float32(self._alpha)
            return np.asarray(powers, np.float64)
        with np.errstate(over="ignore"):  # An infinite number is refused as too large.
            return np.asarray((priorities.astype(np.float64) + self._floor) ** self._alpha)

    def __getstate__(self) -> dict[str, Any]:
        # A copy may belong to a copy of the memory, whose `flags_changed` may count from another start.
        return {**self.__dict__, "_flags_changed": None}

    def state(self) -> State:
        """Return the scaled priorities by slot, and the numbers that new priorities depend on."""
        if self._tree is None:
            scaled = np.zeros(0)
        else:
            scaled = np.zeros(self._tree.slots)
            self._tree.copy_to(scaled[: self._next_id])  # Later slots are 0.
        return {"scaled": scaled, "highest": self.highest, "next_id": self._next_id, "beta": self._beta}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`."""
        try:
            scaled = np.asarray(state["scaled"], np.float64)
            highest = float(state["highest"])
            next_id = int(state["next_id"])
            beta = float(state["beta"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(
                f"The saved state of the sampler has {sorted(state)}, which is not a state of Prioritized ({error}). "
                "Pass a sampler of the kind that saved it."
            ) from error
        is_sound = scaled.ndim == 1 and ((scaled >= 0) & (scaled <= _MAX_SCALED)).all()
        if not is_sound or not np.isfinite(highest) or next_id < 0:
            raise DamageError("The saved priorities are not finite numbers of at least 0. Load an older checkpoint.")
        tree = None
        if scaled.size:
            tree = SumTree(scaled.size, highest)
            tree.put(np.arange(scaled.size), scaled)
        self.beta = beta
        self._first_highest = highest
        self._next_id = next_id
        self._flags_changed = None
        self._tree = tree

    def resize(self, capacity: int, first_id: int) -> None:
        """Change the capacity to that of a memory that holds the ids from `first_id` on."""
        old = self._tree
        if old is None or capacity == old.slots:
            return
        tree = _make_tree(capacity, old.highest)
        ids = np.arange(max(first_id, self._next_id - min(capacity, old.slots)), self._next_id)
        tree.put(ids % capacity, old.values(ids % old.slots))
        self._tree = tree

    def _catch_up(self, held: Held) -> SumTree:
        """Give transitions that were added since the last call their first priority, and evicted ones 0.

        Repeating an interrupted call gives the same result.
        """
        if self._tree is None:
            self._tree = _make_tree(held.capacity, self._first_highest)
        tree = self._tree
        if held.capacity != tree.slots or held.next_id < self._next_id:
            raise ArgumentError(
                f"sampler: the priorities belong to a memory with capacity {tree.slots} and next_id {self._next_id}, "
                f"but this memory has capacity {held.capacity} and next_id {held.next_id}. Make a new sampler, because "
                "every memory needs its own."
            )
        first_new = max(self._next_id, held.first_id)
        if first_new < held.next_id:
            ids = np.arange(first_new, held.next_id)
            priorities = tree.highest if held.can_draw_all else np.where(held.are_allowed(ids), tree.highest, 0.0)
            tree.put(ids % tree.slots, priorities)
            self._next_id = held.next_id
        first_old = max(self._first_id, held.next_id - tree.slots)
        if first_old < held.first_id:  # A budget may evict transitions before others take their slots.
            tree.put(np.arange(first_old, held.first_id) % tree.slots, 0.0)
        if held.restriction is not None:
            self._review_allowed(tree, held)
        self._first_id = held.first_id
        return tree

    def _review_allowed(self, tree: SumTree, held: Held) -> None:
        """Set the priorities of ids that may newly be drawn, and of those that may no longer be drawn.

        If flags were overwritten, this can change for all ids. Otherwise it can change only for ids whose previous step
        was evicted.
        """
        if held.fields.flags_changed != self._flags_changed:
            ids = np.arange(held.first_id, held.next_id)
        elif held.first_id != self._first_id:
            ids = held.find_ids_without_past(self._first_id)
        else:
            return
        is_allowed = held.are_allowed(ids)
        is_changed = is_allowed != (tree.values(ids % tree.slots) > 0)
        tree.put(ids[is_changed] % tree.slots, np.where(is_allowed[is_changed], tree.highest, 0.0))
        self._flags_changed = held.fields.flags_changed


def _require_valid(held: Held, ids: Ids) -> None:
    """Raise TransitionIdError if one of the held `ids` is not a transition."""
    known = ids[(ids >= held.first_id) & (ids < held.next_id)]
    is_valid = held.fields.are_valid(known)
    if not is_valid.all():
        raise TransitionIdError(f"ids holds {known[~is_valid][0]}, which was added with valid=False. Leave it out.")


def _find_newest_ids(slots: Ids, next_id: int, capacity: int) -> Ids:
    """Return the newest id in each of `slots`."""
    if next_id <= capacity:
        return slots
    round_number, next_slot = divmod(next_id, capacity)
    return slots + capacity * (round_number - (slots >= next_slot))


def _make_tree(capacity: int, highest: float) -> SumTree:
    """Return an empty tree. Raise ArgumentError if there is no memory for it."""
    try:
        return SumTree(capacity, highest)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"capacity ({capacity}) needs more memory for priorities than this machine has. Pass a lower capacity."
        ) from error
