"""StoreState: everything that a store holds at one moment.

A state shares its memory with its store, so making a state takes milliseconds. A state never changes: its segments are
closed, and the store copies a part of a segment before it rewrites rows of the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdall._native import Segment
from holdall.store.format import segments_from_arrays, segments_to_arrays
from holdall.store.layouts import Layout
from holdall.store.windows import Window


@dataclass(frozen=True, slots=True)
class StoreState:
    """The content of a store at one moment. Immutable."""

    first_tick: int  # Oldest tick that is held. The first segment may begin earlier.
    next_tick: int  # Tick after the newest one. May be above 0 even if no tick is held.
    segments: tuple[Segment, ...]  # Closed segments, oldest first, without gaps.
    layouts: tuple[Layout, ...]  # Layout of each observation leaf in the next segment.
    windows: tuple[Window, ...]  # Window of each observation leaf.
    reward_dtype: np.dtype[Any] | None  # Dtype of all rewards. None before the first one.

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state as arrays and plain values, for pickles and copies."""
        rest = (self.first_tick, self.next_tick, self.layouts, self.windows, self.reward_dtype)
        return _rebuild_state, (segments_to_arrays(self.segments), *rest)


def _rebuild_state(
    packed_segments: dict[str, Any],
    first_tick: int,
    next_tick: int,
    layouts: tuple[Layout, ...],
    windows: tuple[Window, ...],
    reward_dtype: np.dtype[Any] | None,
) -> StoreState:
    return StoreState(first_tick, next_tick, segments_from_arrays(packed_segments), layouts, windows, reward_dtype)
