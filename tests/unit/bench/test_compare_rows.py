"""A row that differs from what was added is found, whichever bit of whichever field differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.tools.bench.buffer_libraries import BufferAdapter
from holdall.tools.bench.measure_buffer import RowComparison, compare_rows
from holdall.tools.bench.trace import Trace, TraceStep

from .traces import LENGTHS, write

COUNT = sum(LENGTHS)


class ListBuffer(BufferAdapter):
    """Keeps steps in a list. `spoil` may change the rows that it returns."""

    def __init__(self, spoil: Any = None) -> None:
        self.steps: list[TraceStep] = []
        self.spoil = spoil

    def prepare(self, step: TraceStep) -> Any:
        return step

    def add(self, prepared: Any) -> None:
        self.steps.append(prepared)

    def sample(self, batch_size: int) -> Any:
        return None

    def read_rows(self, ids: Any) -> dict[str, Any]:
        few = [self.steps[number] for number in ids]
        names = ("action", "reward", "terminated", "truncated")
        found: dict[str, Any] = {name: np.concatenate([getattr(step, name) for step in few]) for name in names}
        for side in ("obs", "next_obs"):
            keys = getattr(few[0], side)
            found[side] = {key: np.concatenate([getattr(step, side)[key] for step in few]) for key in keys}
        if self.spoil is not None:
            self.spoil(found, list(ids))
        return found

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> BufferAdapter:
        raise NotImplementedError


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    write(tmp_path / "trace.npz")
    return Trace.load(tmp_path / "trace.npz")


def filled(trace: Trace, spoil: Any = None) -> ListBuffer:
    buffer = ListBuffer(spoil)
    for step in trace.steps():
        buffer.add(step)
    return buffer


def test_a_buffer_that_returns_what_was_added_is_right(trace: Trace) -> None:
    found = compare_rows(filled(trace), trace.steps(), COUNT)
    assert found == RowComparison(compared=COUNT, wrong=0, fields=[], dtypes=[])


def test_one_bit_of_one_row_is_found(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        if 7 in ids:
            rows["next_obs"]["image"][ids.index(7), 0, 2, 2] ^= 1

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert (found.wrong, found.fields) == (1, ["next_obs.image"])


def test_a_negative_zero_is_not_a_zero(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        speed = rows["obs"]["speed"]
        speed[speed == 0] = 0.0

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert (found.wrong, found.fields) == (1, ["obs.speed"])  # The first frame has 0 and -0.


def test_another_dtype_is_noted_and_its_values_count(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        rows["reward"] = rows["reward"].astype(np.float64)
        rows["obs"]["speed"] = np.clip(rows["obs"]["speed"], 0, 255).astype(np.uint8)

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert found.dtypes == ["obs.speed as uint8", "reward as float64"]
    assert (found.wrong, found.fields) == (COUNT - 1, ["obs.speed"])  # As values, -0 and 0 are equal.


def test_a_buffer_with_one_flag_for_both_endings_is_compared_with_their_union(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        rows["done"] = rows.pop("terminated") | rows.pop("truncated")

    assert compare_rows(filled(trace, spoil), trace.steps(), COUNT).wrong == 0
