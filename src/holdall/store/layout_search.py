"""LayoutSearch: how the observations of the next segment are stored.

Small observations are stored as shared rows: the next observation is the row of the following tick. Large ones are cut
into slices along a window. `LayoutSearch` shows ticks to one `WindowDetector` per observation leaf, and reviews the
layouts when a segment is closed.
"""

from __future__ import annotations

from typing import Any

from holdall._native import Segment
from holdall.schema import Schema
from holdall.store.layouts import PAIRED, SHARED, Layout
from holdall.store.tuning import Tuning
from holdall.store.windows import Window, WindowDetector

_MAX_EXCEPTION_SHARE = 0.5
"""Above this share of next observations that are stored separately, it is cheaper to store all of them."""
_MAX_BROKEN_SHARE = 0.5
"""Above this share of transitions that do not fit the window, another window is searched for."""


class LayoutSearch:
    """The layouts of all observation leaves for the next segment. Not thread-safe: callers hold a lock.

    Args:
        schema: Spaces of all fields.
        tuning: Sizes and limits.
        row_layout: Layout of small observations.

    Attributes:
        layouts: Layout of each observation leaf in the next segment.
        windows: Window of each observation leaf in the next segment.
        is_searching: Whether a search is active, so that `look` must get the ticks.
        has_new_window: Whether a window was found that the next call of `adapt` will use.
    """

    def __init__(self, schema: Schema, tuning: Tuning, row_layout: Layout = SHARED) -> None:
        leaves = schema.observation.leaves
        self.windows = [Window.whole(leaf) for leaf in leaves]
        self.layouts: list[Layout] = [
            window.layout() if leaf.nbytes > tuning.small_field_bytes else row_layout
            for leaf, window in zip(leaves, self.windows, strict=True)
        ]
        self._schema = schema
        self._detectors = {
            i: WindowDetector(leaf, tuning) for i, leaf in enumerate(leaves) if leaf.nbytes > tuning.tiny_field_bytes
        }
        self._update_status()

    @property
    def sliceable_leaves(self) -> tuple[int, ...]:
        """Numbers of the observation leaves that may be cut into slices."""
        return tuple(self._detectors)

    def list_layouts(self, column_count: int) -> tuple[Layout | None, ...]:
        """Return the layouts of `column_count` columns for the native writer. Only observations have one."""
        return (*self.layouts, *[None] * (column_count - len(self.layouts)))

    def look(self, obs: Any, next_obs: Any) -> bool:
        """Show the detectors one tick, which the writer has accepted. Return whether `has_new_window` is now true."""
        obs_leaves = self._list_leaves(obs, "obs")
        next_obs_leaves = self._list_leaves(next_obs, "next_obs")
        for i, detector in self._detectors.items():
            shape = (self._schema.num_envs, *self._schema.observation.leaves[i].shape)
            detector.look(obs_leaves[i].reshape(shape), next_obs_leaves[i].reshape(shape))
        self._update_status()
        return self.has_new_window

    def adapt(self, closed: Segment) -> None:
        """Choose the layouts of the segment that follows `closed`. A call that was interrupted can be repeated.

        Windows that were found are used from now on. If shared rows did not fit most transitions of `closed`, pairs of
        rows replace them. If a window did not fit most of them, another window is searched for.
        """
        transitions = closed.ticks * closed.lanes
        for i, part in enumerate(closed.parts[: len(self.layouts)]):
            if part.kind == "shared" and part.exceptions > _MAX_EXCEPTION_SHARE * transitions:
                self.layouts[i] = PAIRED
            detector = self._detectors.get(i)
            if detector is None:
                continue
            if detector.window is not None and detector.window != self.windows[i]:
                # The window is assigned last, because it decides whether a repeated call assigns the layout again.
                self.layouts[i] = detector.window.layout()
                self.windows[i] = detector.window
            elif self.windows[i].count == 1 or part.broken > _MAX_BROKEN_SHARE * transitions:
                detector.end_segment()
        self._update_status()

    def restore(self, layouts: tuple[Layout, ...], windows: tuple[Window, ...]) -> None:
        """Continue with the layouts and windows of a snapshot. Fields with a window are not searched again."""
        self.layouts = list(layouts)
        self.windows = list(windows)
        for i, detector in self._detectors.items():
            if self.windows[i].count > 1:
                detector.is_searching = False
        self._update_status()

    def _update_status(self) -> None:
        """Set `is_searching` and `has_new_window`, which would take too long to compute for every tick."""
        self.is_searching = any(detector.is_searching for detector in self._detectors.values())
        self.has_new_window = any(
            detector.window is not None and detector.window != self.windows[i]
            for i, detector in self._detectors.items()
        )

    def _list_leaves(self, observation: Any, argument: str) -> Any:
        """Return the arrays of an observation that the writer accepted, in leaf order."""
        if isinstance(observation, tuple):
            return observation
        return self._schema.observation.flatten(observation, (self._schema.num_envs,), argument)
