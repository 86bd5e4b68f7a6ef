"""Rows that came back wrong are found, whichever bit of whichever field it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.tools.bench.buffer_libraries import BufferAdapter
from holdall.tools.bench.compare_buffers import compare_rows
from holdall.tools.bench.trace import Trace, TraceStep

from .traces import LENGTHS, write

COUNT = sum(LENGTHS)


class ListBuffer(BufferAdapter):
    """Keeps steps in a list, and returns them as `spoil` leaves them."""

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
    assert found.as_dict() == {"compared": COUNT, "wrong": 0, "fields": [], "dtypes": []}


def test_one_bit_of_one_row_is_found(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        if 7 in ids:
            rows["next_obs"]["image"][ids.index(7), 0, 2, 2] ^= 1

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert (found.wrong, found.fields) == (1, {"next_obs.image"})


def test_a_negative_zero_is_not_a_zero(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        speed = rows["obs"]["speed"]
        speed[speed == 0] = 0.0

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert (found.wrong, found.fields) == (1, {"obs.speed"})  # the first frame holds 0 and -0


def test_another_dtype_is_noted_and_its_values_count(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        rows["reward"] = rows["reward"].astype(np.float64)
        rows["obs"]["speed"] = np.clip(rows["obs"]["speed"], 0, 255).astype(np.uint8)

    found = compare_rows(filled(trace, spoil), trace.steps(), COUNT)
    assert found.dtypes == {"reward as float64", "obs.speed as uint8"}
    assert (found.wrong, found.fields) == (COUNT - 1, {"obs.speed"})  # -0 is 0 in value


def test_ends_that_are_not_told_apart_are_compared_together(trace: Trace) -> None:
    def spoil(rows: dict[str, Any], ids: list[int]) -> None:
        rows["done"] = rows.pop("terminated") | rows.pop("truncated")

    assert compare_rows(filled(trace, spoil), trace.steps(), COUNT).wrong == 0
