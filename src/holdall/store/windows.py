"""Windows: how consecutive observations overlap, and how the overlap is found.

A stack of 4 frames repeats 3 frames of the stack before it. A market window of 504 days repeats 503 days. Both are a
shift along one axis by a fixed number of elements. A `Window` describes the shift, and a `WindowDetector` finds it in
the first steps of a field.

A window is a proposal. The writer compares every observation byte for byte and stores an observation whole if the
window does not hold for it. A wrong window costs memory, never correctness.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Leaf
from holdall.store.layouts import SlicedLayout
from holdall.store.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Window:
    """An observation seen as `count` slices along one axis.

    In memory, an observation consists of `outer` stretches. Each stretch has `run_bytes` contiguous bytes of every
    slice, in the order of the slices. A stack on the first axis has one stretch. A stack on the last axis has one
    stretch per pixel.
    """

    axis: int  # Axis along which observations shift.
    unit: int  # Elements of the axis in one slice.
    count: int  # Slices of an observation.
    outer: int  # Stretches of an observation.
    run_bytes: int  # Contiguous bytes of one slice in one stretch.
    shift: int  # Slices that are new in the next observation.

    @classmethod
    def whole(cls, leaf: Leaf) -> Window:
        """Return the window of an observation that is one slice. Only equal observations share memory."""
        return cls(axis=0, unit=1, count=1, outer=1, run_bytes=leaf.nbytes, shift=1)

    @classmethod
    def along(cls, leaf: Leaf, axis: int, step: int) -> Window:
        """Return the window of observations that shift by `step` elements along `axis`."""
        length = leaf.shape[axis]
        unit = gcd(step, length)
        inner_bytes = prod(leaf.shape[axis + 1 :]) * leaf.dtype.itemsize
        return cls(
            axis=axis,
            unit=unit,
            count=length // unit,
            outer=prod(leaf.shape[:axis]),
            run_bytes=unit * inner_bytes,
            shift=step // unit,
        )

    @classmethod
    def from_layout(cls, leaf: Leaf, layout: SlicedLayout) -> Window:
        """Return the window whose `layout` is given. Raise ValueError if `leaf` has no such window."""
        if layout.slice_count == 1:
            return cls.whole(leaf)
        for axis, length in enumerate(leaf.shape):
            if prod(leaf.shape[:axis]) != layout.outer or length % layout.slice_count != 0:
                continue
            window = cls.along(leaf, axis, layout.shift * (length // layout.slice_count))
            if window.layout() == layout:
                return window
        raise ValueError(f"Layout {layout} does not fit a field of shape {leaf.shape}.")

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice."""
        return self.outer * self.run_bytes

    @property
    def step(self) -> int:
        """Elements by which the next observation is shifted along the axis."""
        return self.shift * self.unit

    def layout(self) -> SlicedLayout:
        """Return the layout for the native writer."""
        return SlicedLayout("sliced", self.count, self.outer, self.run_bytes, self.shift)

    def describe(self) -> str:
        """Return a description for reports."""
        if self.count == 1:
            return "whole observations"
        return f"window of {self.count} along axis {self.axis}"

    def to_json(self) -> dict[str, int] | None:
        """Return the axis and the step, or None for whole observations. `from_json` restores the window."""
        if self.count == 1:
            return None
        return {"axis": self.axis, "step": self.step}

    @classmethod
    def from_json(cls, value: Any, leaf: Leaf) -> Window:
        """Return the window that `to_json` described. Raise DamageError if `value` does not fit `leaf`."""
        if value is None:
            return cls.whole(leaf)
        if not isinstance(value, dict) or set(value) != {"axis", "step"}:
            raise DamageError(f"Corrupt window {value!r}: expected an object with 'axis' and 'step', or null.")
        axis = value["axis"]
        step = value["step"]
        if type(axis) is not int or type(step) is not int:
            raise DamageError(f"Corrupt window {value!r}: 'axis' and 'step' must be whole numbers.")
        if not 0 <= axis < len(leaf.shape):
            raise DamageError(f"Corrupt window {value!r}: a field of shape {leaf.shape} has no axis {axis}.")
        if not 0 < step < leaf.shape[axis]:
            raise DamageError(
                f"Corrupt window {value!r}: the step must be between 1 and {leaf.shape[axis] - 1} "
                f"for a field of shape {leaf.shape}."
            )
        return cls.along(leaf, axis, step)


class WindowDetector:
    """The search for the window of one observation field.

    A search looks at pairs of an observation and its next observation until a window explains most pairs, or until
    `Tuning.detector_max_pairs` pairs were seen. Equal pairs fit every window and are skipped, so a static first screen
    only makes the search longer.

    A search that finds nothing is followed by a pause, counted in closed segments. Every further search without a
    result doubles the pause.

    Not thread-safe: callers hold the memory's lock.

    Attributes:
        window: Result of the last finished search. None if that search found nothing, or if no search has finished.
        is_searching: Whether a search is active, so that `look` must get the ticks.
    """

    def __init__(self, leaf: Leaf, tuning: Tuning) -> None:
        self.window: Window | None = None
        self._can_shift = leaf.nbytes > 0 and any(length > 1 for length in leaf.shape)
        self.is_searching = self._can_shift
        self._leaf = leaf
        self._tuning = tuning
        self._votes: Counter[tuple[int, int]] = Counter()  # Pairs that an (axis, step) explains.
        self._pair_count = 0
        self._failed_searches = 0
        self._pause_segments = 0  # Closed segments before the next search.

    def look(self, obs: NDArray[Any], next_obs: NDArray[Any]) -> bool:
        """Search the observations of one tick for a window. Return whether this tick ended the search.

        Both arrays have a leading lane axis. Does nothing if no search is active.
        """
        lanes = min(len(obs), self._tuning.detector_lanes)
        for lane in range(lanes):
            if not self.is_searching:
                return False
            before = _as_bytes(obs[lane])
            after = _as_bytes(next_obs[lane])
            if np.array_equal(before, after):
                continue
            self._count_pair(before, after)
            if self._conclude():
                return True
        return False

    def end_segment(self) -> None:
        """Count a closed segment whose field has no window that fits. Start a search if the pause is over."""
        if self.is_searching or not self._can_shift:
            return
        self._pause_segments -= 1
        if self._pause_segments > 0:
            return
        self._votes.clear()
        self._pair_count = 0
        self.is_searching = True

    def _count_pair(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        self._pair_count += 1
        for axis in range(len(self._leaf.shape)):
            for step in self._find_steps(before, after, axis):
                self._votes[axis, step] += 1

    def _find_steps(self, before: NDArray[np.uint8], after: NDArray[np.uint8], axis: int) -> list[int]:
        """Return the steps along `axis`, up to half of its length, by which `after` follows `before`."""
        length = self._leaf.shape[axis]
        if length < 2:
            return []
        outer = prod(self._leaf.shape[:axis])
        old = before.reshape(outer, length, -1)
        new = after.reshape(outer, length, -1)
        # The first element of the new observation must occur in the old one. Few positions pass this test, and only
        # these are compared in full.
        is_candidate = (old[:, 1 : length // 2 + 1] == new[:, :1]).all(axis=(0, 2))
        candidates = (np.flatnonzero(is_candidate)[: self._tuning.detector_max_steps] + 1).tolist()
        return [step for step in candidates if np.array_equal(old[:, step:], new[:, : length - step])]

    def _conclude(self) -> bool:
        """End the search if the evidence suffices. Return whether the search ended."""
        if self._pair_count < self._tuning.detector_min_pairs:
            return False
        best = self._choose_window()
        if best is None and self._pair_count < self._tuning.detector_max_pairs:
            return False
        self.window = best
        self.is_searching = False
        if best is None:
            self._failed_searches += 1
        else:
            self._failed_searches = 0
        self._pause_segments = 1 << min(self._failed_searches, self._tuning.detector_max_pause_doublings)
        return True

    def _choose_window(self) -> Window | None:
        """Return the window that explains the most pairs, or None if no window explains enough of them.

        Among equal ones, choose the step that is the smallest part of its axis.
        """
        min_votes = self._tuning.detector_agreement * self._pair_count
        ranked = [
            (-votes, step / self._leaf.shape[axis], axis, step)
            for (axis, step), votes in self._votes.items()
            if votes >= min_votes
        ]
        if not ranked:
            return None
        _, _, axis, step = min(ranked)
        return Window.along(self._leaf, axis, step)


def _as_bytes(row: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of one observation. Bytes are compared, not values, because NaN differs from itself."""
    return np.ascontiguousarray(row).reshape(-1).view(np.uint8)
