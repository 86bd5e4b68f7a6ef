"""The search for layouts uses a window in the segment after the one in which it was found, and gives up bad layouts."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall._native import Writer
from holdall.schema import Schema
from holdall.store.columns import Columns
from holdall.store.layout_search import LayoutSearch
from holdall.store.layouts import PAIRED, SHARED, SlicedLayout
from holdall.store.tuning import Tuning

STACK = spaces.Box(0, 255, (4, 40, 40), np.uint8)
VECTOR = spaces.Box(-9, 9, (3,), np.float32)
TUNING = Tuning(detector_min_pairs=2)


class Run:
    """A search, and a writer that uses its layouts as a store does."""

    def __init__(self, space: Any) -> None:
        self.schema = Schema.of(space, spaces.Discrete(2), None, 1)
        self.columns = Columns(self.schema)
        self.search = LayoutSearch(self.schema, TUNING)
        layouts = self.search.list_layouts(self.columns.flags + 1)
        self.writer = Writer(self.columns.list_columns(), self.columns.list_groups(), 1, 1000, 100, 2**20, layouts)
        self.writer.set_type(self.columns.reward, int(np.dtype(np.float64).num))

    def add(self, obs: Any, next_obs: Any) -> None:
        no = np.zeros(1, np.bool_)
        self.writer.append(obs, np.zeros(1, np.int64), np.zeros(1), next_obs, no, no)

    def close_segment(self) -> None:
        self.search.adapt(self.writer.catalog.last_segment)


def make_stacks(count: int, first: int = 0) -> list[Any]:
    frames = [np.random.default_rng(first + t).integers(0, 255, (40, 40), np.uint8) for t in range(count + 4)]
    return [np.stack(frames[t : t + 4])[None] for t in range(count + 1)]


def test_a_window_is_used_from_the_next_segment_on() -> None:
    run = Run(STACK)
    stacks = make_stacks(4)
    whole = run.search.layouts[0]
    found = []
    for obs, next_obs in itertools.pairwise(stacks):
        run.add(obs, next_obs)
        found.append(run.search.is_searching and run.search.look(obs, next_obs))
    assert found == [False, True, False, False]
    assert run.search.layouts == [whole]
    run.close_segment()
    assert run.search.windows[0].count == 4
    assert run.search.layouts == [run.search.windows[0].layout()]


def test_an_interrupted_change_of_layouts_can_be_repeated() -> None:
    def close_until(run: Run, line: int) -> bool:
        """Raise at this line of `adapt`. Return whether there was one."""
        passed = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal passed
            if frame.f_code is not LayoutSearch.adapt.__code__:
                return None
            passed += event == "line"
            if passed == line:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            run.close_segment()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    stacks = make_stacks(4)
    for line in itertools.count(1):
        run = Run(STACK)
        for obs, next_obs in itertools.pairwise(stacks):
            run.add(obs, next_obs)
            if run.search.is_searching:
                run.search.look(obs, next_obs)
        is_interrupted = close_until(run, line)
        run.close_segment()
        assert run.search.windows[0].count == 4, line
        assert run.search.layouts == [run.search.windows[0].layout()], line
        if not is_interrupted:
            assert line > 5
            return


def test_a_window_that_most_transitions_break_is_searched_for_again() -> None:
    run = Run(STACK)
    run.search.restore(
        (SlicedLayout("sliced", 4, 1, 1600, 1),), (run.search.windows[0].along(run.schema.observation.leaves[0], 0, 1),)
    )
    assert not run.search.is_searching
    layouts = run.search.list_layouts(run.columns.flags + 1)
    run.writer.roll(layouts)
    for t in range(4):
        run.add(make_stacks(0, 10 * t)[0], make_stacks(0, 10 * t + 5)[0])
    run.close_segment()
    assert run.search.is_searching


def test_small_observations_are_paired_once_most_next_observations_are_exceptions() -> None:
    run = Run(VECTOR)
    assert run.search.layouts == [SHARED]
    for t in range(8):
        run.add(np.full((1, 3), t, np.float32), np.full((1, 3), -t - 1, np.float32))
    run.close_segment()
    assert run.search.layouts == [PAIRED]
