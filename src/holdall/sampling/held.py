"""Held: the part of a memory that its sampler reads, which is the held ids and the small fields of their transitions.

A sampler never reads observations, so it works with every codec and with memories on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Flags, Ids, Validity, check_ids_of_any_shape, require_held
from holdall.errors import ArgumentError
from holdall.sampling.row_order import PLACES_PER_LANE, RowOrder

_INT64 = np.dtype(np.int64)


class SmallFields(Validity, Protocol):
    """The small fields of transitions. Methods take held ids of any shape and return arrays of that shape."""

    @property
    def flags_changed(self) -> int:
        """A number that changes whenever `terminated` and `truncated` of held transitions are overwritten."""

    def are_ends(self, ids: Ids) -> Flags:
        """Return which of `ids` are the last steps of episodes: terminated or truncated."""

    def rewards(self, ids: Ids) -> NDArray[Any]:
        """Return the rewards in the dtype in which they are stored."""


@dataclass(frozen=True, slots=True)
class Held:
    """The ids that a memory holds at the moment of a draw: from `first_id` to `next_id - 1`.

    The id of the next step of the same lane is `id + lanes`, unless the memory has an `order`. Methods that find steps
    take both cases into account.

    A place numbers a step by lane, and within a lane by time: `lane * PLACES_PER_LANE + tick`. The next step of the
    same lane has the next place.
    """

    # Lowest id that is held: the first one of a tick.
    first_id: int
    # Id after the highest one that is held. It is the first one of a tick, too.
    next_id: int
    # Number of lanes: transitions that are added in one tick.
    lanes: int
    # Largest number of ids that are ever held. No two held ids are equal modulo `capacity`.
    capacity: int
    # The small fields of the transitions.
    fields: SmallFields
    # Condition that ids must meet to be drawn, besides being transitions. None: all transitions may be drawn.
    restriction: Callable[[Held, Ids], Flags] | None = None
    # Order of the rows of a shard. None: ids are in the order of ticks and lanes. Only samplers for which
    # `has_likelihood` in `sampling/registry.py` is true ever get an order.
    order: RowOrder | None = None

    # ---------------------------------------------------------------- which ids may be drawn

    @property
    def can_draw_all(self) -> bool:
        """Whether every held id may be drawn."""
        return self.restriction is None and self.fields.all_valid

    def are_allowed(self, ids: Ids) -> Flags:
        """Return which of the held `ids` may be drawn."""
        is_valid = self.fields.are_valid(ids)
        if self.restriction is None:
            return is_valid
        return is_valid & self.restriction(self, ids)

    def restrict(self, restriction: Callable[[Held, Ids], Flags]) -> Held:
        """Return a copy in which only ids that meet `restriction` may be drawn."""
        return replace(self, restriction=restriction)

    # ---------------------------------------------------------------- steps of the same lane

    def find_steps(self, ids: Ids, first: int, stop: int) -> tuple[Ids, Flags]:
        """Return the ids `first` to `stop - 1` steps after each of `ids`, and which of them are held.

        Both arrays have shape (ids, steps). Either `first` is at least 0, or `stop` is at most 0. Entries that are not
        held are arbitrary numbers.
        """
        offsets = np.arange(first, stop)
        if self.order is not None:
            return self.order.find_ids(self.order.find_places(ids)[:, None] + offsets)
        steps = ids[:, None] + self.lanes * offsets
        if first >= 0:
            return steps, steps < self.next_id
        return steps, steps >= self.first_id

    def find_places(self, ids: Ids) -> Ids:
        """Return the places of held ids."""
        if self.order is not None:
            return self.order.find_places(ids)
        tick, lane = np.divmod(ids, self.lanes)
        return np.asarray(lane * PLACES_PER_LANE + tick)

    def find_ids(self, places: Ids) -> tuple[Ids, Flags]:
        """Return the ids at `places`, and which of them are held. The other ids are arbitrary numbers."""
        if self.order is not None:
            return self.order.find_ids(places)
        lane, tick = np.divmod(places, PLACES_PER_LANE)
        ids = tick * self.lanes + lane
        return ids, (ids >= self.first_id) & (ids < self.next_id)

    def find_pieces(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first and the last place of the held steps around each id that follow each other without a gap."""
        if self.order is not None:
            return self.order.find_pieces(ids)
        first_place = ids % self.lanes * PLACES_PER_LANE
        return first_place + self.first_id // self.lanes, first_place + (self.next_id // self.lanes - 1)

    def find_ids_without_past(self, first_id: int) -> Ids:
        """Return the held ids whose previous step may have been evicted since `first_id` was the lowest held id."""
        if self.order is not None:
            return self.order.find_ids_without_past(first_id)
        return np.arange(self.first_id, min(self.first_id + self.lanes, self.next_id))

    # ---------------------------------------------------------------- checks

    def require_ids(self, ids: Ids) -> None:
        """Raise TransitionIdError unless all `ids`, of any shape, are held and are transitions."""
        require_held(ids, self.first_id, self.next_id, self.fields)

    def check_draw(self, draw: Draw) -> Draw:
        """Return `draw` with ids that can be read: contiguous arrays of int64.

        Raise TransitionIdError unless all its transitions are held, ArgumentError if it is not a `Draw` with integers.
        """
        if not isinstance(draw, Draw):
            raise ArgumentError(
                f"draw ({draw!r}) is not a Draw. Pass a result of the method draw of a sampler or of a batch_source."
            )
        ids = self._check_ids(draw.ids)
        last_ids = None if draw.last_ids is None else self._check_ids(draw.last_ids)
        goals = draw.goals
        if goals is not None:
            goals = replace(goals, ids=self._check_ids(goals.ids))
        if ids is draw.ids and last_ids is draw.last_ids and goals is None:
            return draw
        return replace(draw, ids=ids, last_ids=last_ids, goals=goals)

    def _check_ids(self, ids: Ids) -> Ids:
        is_readable = type(ids) is np.ndarray and ids.dtype is _INT64 and ids.flags.c_contiguous
        checked = ids if is_readable else check_ids_of_any_shape(ids)
        self.require_ids(checked)
        return checked
