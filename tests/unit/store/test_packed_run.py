"""PackedRun against plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall._native import PackedRun

TICKS = 60
LANES = 2


@dataclass(frozen=True)
class Plan:
    """What `PackedRun.pack` reads of a plan."""

    leaf_bytes: tuple[int, ...]
    groups: tuple[tuple[int, int, bool], ...]  # frame_bytes, window, is_dense
    pieces: tuple[tuple[tuple[int, int, int, int, int, int, bool], ...], ...]


PLAN = Plan(
    leaf_bytes=(12, 16),
    groups=((4, 1, True), (8, 1, False), (4, 4, False)),
    pieces=(
        ((0, 0, 4, 1, 0, 0, False), (1, 4, 8, 1, 0, 0, False)),  # A value that changes, and one that is held.
        ((2, 0, 4, 4, 0, 4, False),),  # The last four values of another one.
    ),
)


def rows_that_follow_the_plan(seed: int = 0, odd_rows: int = 0) -> list[NDArray[np.uint8]]:
    """Return the rows of both leaves, tick by tick: all lanes of a tick are neighbours."""
    rng = np.random.default_rng(seed)
    first = np.zeros((TICKS, LANES, 3), np.float32)
    second = np.zeros((TICKS, LANES, 4), np.float32)
    first[:, :, 0] = rng.standard_normal((TICKS, LANES))
    first[:, :, 1:] = (np.arange(TICKS) // 20)[:, None, None]
    history = rng.standard_normal((TICKS + 3, LANES)).astype(np.float32)
    for tick in range(TICKS):
        second[tick] = history[tick : tick + 4].T
    for _ in range(odd_rows):
        second[rng.integers(TICKS), rng.integers(LANES)] = rng.standard_normal(4)
    first[3, 0, 0] = np.array([0x7FC00123], np.uint32).view(np.float32)[0]
    return [leaf.reshape(TICKS * LANES, -1).view(np.uint8) for leaf in (first, second)]


def packed(rows: list[NDArray[np.uint8]]) -> Any:
    run = PackedRun.pack(PLAN, rows, TICKS, LANES, max_share=10.0)
    assert run is not None
    return run


@pytest.mark.parametrize("odd_rows", [0, 1, 5])
def test_rows_are_read_as_they_were_packed(odd_rows: int) -> None:
    rows = rows_that_follow_the_plan(odd_rows=odd_rows)
    for run in (packed(rows), PackedRun.from_bytes(packed(rows).to_bytes())):
        order = np.random.default_rng(1).permutation(TICKS * LANES)
        for leaf, expected in enumerate(rows):
            assert run.read(leaf, order).tobytes() == expected[order].tobytes()


def test_rows_that_follow_the_plan_take_less_memory() -> None:
    rows = rows_that_follow_the_plan()
    assert packed(rows).nbytes < 0.7 * sum(leaf.nbytes for leaf in rows)


def test_damaged_bytes_are_refused_or_read_without_a_crash() -> None:
    whole = bytearray(packed(rows_that_follow_the_plan(odd_rows=2)).to_bytes())
    rng = np.random.default_rng(2)
    order = np.arange(TICKS * LANES)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for position in rng.integers(0, min(len(whole), 400), rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        if rng.random() < 0.2:
            del damaged[rng.integers(len(damaged)) :]
        try:
            run = PackedRun.from_bytes(bytes(damaged))
        except ValueError:
            refused += 1
            continue
        for leaf in range(len(run.leaf_bytes)):
            if run.ticks * run.lanes == order.size:
                run.read(leaf, order)
    assert refused > 1000


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    rows = rows_that_follow_the_plan()
    for wrong in (
        Plan((12,), PLAN.groups, PLAN.pieces),
        Plan((12, 16), ((0, 1, True),), PLAN.pieces),
        Plan((12, 16), PLAN.groups, (PLAN.pieces[0], ((7, 0, 4, 4, 0, 4, False),))),
    ):
        with pytest.raises(ValueError, match="plan"):
            PackedRun.pack(wrong, rows, TICKS, LANES)
