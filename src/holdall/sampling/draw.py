"""What a sampler sees of a memory, and what it answers.

In:  the ids that are held, and the fields that every transition has.  Out: the recipe of a batch.
A sampler that draws single transitions (Uniform, Prioritized) can be given to one that makes
something of them (NStep, Sequence, Hindsight) as its `by`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.errors import ArgumentError, DamageError, TransitionIdError
from holdall.schema import as_array

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
State = dict[str, Any]
"""Arrays and plain numbers by name."""


class SmallFields(Protocol):
    """The fields of a transition that are no observation, read for arrays of held ids of any shape."""

    @property
    def all_valid(self) -> bool:
        """Whether every lane made a transition in every tick held."""

    @property
    def flags_changed(self) -> int:
        """How often flags were set anew after they were added."""

    def are_valid(self, ids: Ids) -> Flags:
        """Tell real transitions from lanes that made none."""

    def are_ends(self, ids: Ids) -> Flags:
        """Tell the last transitions of episodes: terminated or truncated."""

    def rewards(self, ids: Ids) -> NDArray[Any]:
        """Return the rewards, in their own dtype."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a memory holds at the moment of a draw: the ids from `first_id` up to `next_id` - 1.

    The step after transition i in the same lane is i + `lanes`. `capacity` is the most ids that
    are ever held, so that i modulo `capacity` tells those held apart.
    """

    first_id: int
    next_id: int
    lanes: int
    capacity: int
    fields: SmallFields
    only: Callable[[Held, Ids], Flags] | None = None

    def limited(self, only: Callable[[Held, Ids], Flags]) -> Held:
        """Return the same, of which only some ids may be drawn."""
        return replace(self, only=only)

    @property
    def allows_all(self) -> bool:
        """Whether every id may be drawn."""
        return self.only is None and self.fields.all_valid

    def allows(self, ids: Ids) -> Flags:
        """Tell which of some held ids may be drawn."""
        valid = self.fields.are_valid(ids)
        return valid if self.only is None else valid & self.only(self, ids)

    def require(self, ids: Ids) -> None:
        """Refuse ids, of any shape, that are not held or of a lane that made no transition."""
        if ids.size and not self.first_id <= ids.min() <= ids.max() < self.next_id:
            outside = (ids < self.first_id) | (ids >= self.next_id)
            raise TransitionIdError(
                f"ids holds {int(ids[outside][0])}, but only ids from first_id ({self.first_id}) up to, and without, "
                f"next_id ({self.next_id}) are held: older ones were evicted, newer ones not added yet; ask for those"
            )
        if not self.fields.all_valid and not (valid := self.fields.are_valid(ids)).all():
            raise TransitionIdError(
                f"ids holds {int(ids[~valid][0])}, which was added with valid=False: that lane "
                "made no transition in that tick; leave it out"
            )

    def require_drawn(self, draw: Draw) -> None:
        """Refuse a recipe that names something else than what is held."""
        for ids in (draw.ids, draw.last_ids, None if draw.goals is None else draw.goals.ids):
            if ids is not None:
                self.require(ids)


class Sampler(Protocol):
    """Draws batches. Called under the memory's lock, so it must not call back into it.

    One sampler belongs to one memory. Those that learn from the caller also have
    `update_priorities(held, ids, priorities)`.
    """

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows, with replacement."""

    def state(self) -> State:
        """Return all that later draws depend on besides the memory and the generator.

        Arrays and plain numbers only, so that it can be saved without pickle. Settings that the
        constructor was given are not in it, unless they may be changed later.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned elsewhere; the next draws are those it would have made."""


class PrioritySampler(Sampler, Protocol):
    """A sampler that is told how much it would pay to see a transition again."""

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set priorities; ids that are no longer held are passed over."""


def as_ids(ids: Any) -> Ids:
    """Return `ids` as a flat array of them, or say why it is none."""
    array = as_array(ids, "ids")
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(f"ids has shape {array.shape} and dtype {array.dtype}; pass a flat array of integers")
    if array.dtype == np.uint64 and (most := int(array.max())) > np.iinfo(np.int64).max:
        raise TransitionIdError(f"ids holds {most}, more than were ever added; ask for ids below next_id")
    return array.astype(np.int64)


class Stateless:
    """A sampler whose draws depend on nothing but the memory and the generator."""

    def state(self) -> State:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take nothing over; refuse the state of another kind of sampler."""
        if state:
            raise DamageError(
                f"the saved state of a sampler holds {sorted(state)}, but {type(self).__name__} has none: another kind "
                "of sampler wrote it; pass one of that kind"
            )


def require_number(argument: str, value: Any, least: float, most: float = np.inf) -> float:
    """Return `value` as a finite number within bounds, or say why it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not least <= value <= most:
        bounds = f"from {least:g} to {most:g}" if np.isfinite(most) else f"of at least {least:g}"
        raise ArgumentError(f"{argument} ({value!r}) must be a number {bounds}; pass one")
    if not np.isfinite(value):
        raise ArgumentError(f"{argument} ({value!r}) must be finite; pass a finite number")
    return float(value)


def require_count(argument: str, value: Any, least: int) -> int:
    """Return `value` as a whole number of at least `least`, or say why it is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number of at least {least}; pass one")
    return int(value)


_TRIES = 50
"""Rounds of drawing again before all that may be drawn is listed: that takes time in proportion to the memory."""


class Uniform(Stateless):
    """Draw every transition with the same probability."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids; those that may not be drawn are drawn again."""
        ids = generator.integers(held.first_id, held.next_id, size=count)
        if not held.allows_all:
            ids = _drawn_again(ids, held, generator)
        return Draw(ids, np.ones(count, np.float32))


def _drawn_again(ids: Ids, held: Held, generator: np.random.Generator) -> Ids:
    """Replace what may not be drawn; every id that may stays as likely as any other."""
    for _ in range(_TRIES):
        missed = np.flatnonzero(~held.allows(ids))
        if missed.size == 0:
            return ids
        ids[missed] = generator.integers(held.first_id, held.next_id, size=missed.size)
    missed = np.flatnonzero(~held.allows(ids))
    everything = np.arange(held.first_id, held.next_id)
    allowed = everything[held.allows(everything)]
    if allowed.size == 0:
        raise ArgumentError("none of the transitions held may be drawn by this sampler; add more first")
    ids[missed] = generator.choice(allowed, missed.size)
    return ids
