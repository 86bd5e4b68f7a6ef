"""Vectors in which columns repeat for some time, compared with a plain list, bit for bit."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

RARE = {4: 0x7FA00001, 8: 0x7FF4000000000001}  # Signalling NaNs with a payload.
TERMS = 3
PAST = 4
KINDS = ("constant", "constant", "noise", "held", "sparse", "noise")


class Vectors:
    """An environment whose vectors repeat as robots' do: constants, goals, copies, histories. Patterns break at random.

    Args:
        breaks: Probability, per lane and step, that a column changes its value for one step or for all later steps.
    """

    def __init__(self, lanes: int, dtype: str, seed: int, ends: float, breaks: float, is_frame_by_frame: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.lanes = lanes
        self.dtype = np.dtype(dtype)
        self.ends = ends
        self.breaks = breaks
        self.is_frame_by_frame = is_frame_by_frame
        self.pads = bool(self.rng.integers(2))
        self.observation_space = spaces.Dict(
            {
                "state": box((len(KINDS),), dtype),
                "achieved": box((2,), dtype),
                "goal": box((2,), dtype),
                "past": box((TERMS * PAST,), dtype),
                "kind": spaces.Discrete(5),
            }
        )
        self.state = self._draw_noise(lanes, len(KINDS))
        self.state[:] = self.state[0]
        self.goal = self._draw_noise(lanes, 2)
        self.past = self._draw_noise(lanes, PAST, TERMS)
        for lane in range(lanes):
            self._reset(lane)
        self.seen = self._observe()

    def _draw_noise(self, *shape: int) -> NDArray[Any]:
        drawn: NDArray[Any] = self.rng.normal(size=shape).astype(self.dtype)
        return drawn

    def _reset(self, lane: int) -> None:
        self.goal[lane] = self._draw_noise(2)
        self.past[lane] = self._draw_noise(TERMS) if self.pads else 0

    def _step(self, lane: int) -> None:
        state = self.state[lane]
        rng = self.rng
        for i, kind in enumerate(KINDS):
            if kind == "noise" or (kind == "held" and rng.random() < 0.1):
                state[i] = self._draw_noise(1)[0]
            if kind == "sparse":
                state[i] = self._draw_noise(1)[0] if rng.random() < 0.2 else 0
        if rng.random() < self.breaks:
            state[rng.integers(len(KINDS))] = self._draw_noise(1)[0]
        self.past[lane, :-1] = self.past[lane, 1:]
        self.past[lane, -1] = self._draw_noise(TERMS)

    def _observe(self) -> dict[str, NDArray[Any]]:
        past = self.past if self.is_frame_by_frame else self.past.swapaxes(1, 2)
        seen: dict[str, NDArray[Any]] = {
            "achieved": self.state[:, [2, 5]],
            "goal": self.goal.copy(),
            "kind": np.full(self.lanes, 3),
            "past": past.reshape(self.lanes, -1).copy(),
            "state": self.state.copy(),
        }
        for lane in range(self.lanes):
            if self.rng.random() < self.breaks:
                self._spoil(seen[("state", "achieved", "goal", "past")[self.rng.integers(4)]][lane])
        return seen

    def _spoil(self, row: NDArray[Any]) -> None:
        """Change one value, often to one that compares as equal to the old one."""
        i = int(self.rng.integers(len(row)))
        bits = row.view(f"u{self.dtype.itemsize}")
        if self.rng.random() < 0.5:
            row[i] = -row[i] if self.rng.random() < 0.5 else -0.0
        else:
            bits[i] = RARE[self.dtype.itemsize] + self.rng.integers(2)

    def ticks(self, count: int) -> dict[str, Any]:
        """Return the next steps, with a leading time axis."""
        obs = []
        next_obs = []
        ended = np.zeros((count, self.lanes), np.bool_)
        for t in range(count):
            obs.append(self.seen)
            for lane in range(self.lanes):
                self._step(lane)
            next_obs.append(self._observe())
            ended[t] = self.rng.random(self.lanes) < self.ends
            for lane in np.flatnonzero(ended[t]).tolist():
                self._reset(lane)
            self.seen = self._observe() if ended[t].any() else next_obs[-1]
            if ended[t].any():  # Lanes that continue have the same observation as before.
                for key, rows in self.seen.items():
                    rows[~ended[t]] = next_obs[-1][key][~ended[t]]
        cut = self.rng.random(ended.shape) < 0.5
        stacked = [{key: np.stack([one[key] for one in seen]) for key in self.seen} for seen in (obs, next_obs)]
        return {
            "obs": stacked[0],
            "action": self.rng.integers(0, 3, (count, self.lanes)),
            "reward": self.rng.normal(size=(count, self.lanes)).astype(np.float32),
            "next_obs": stacked[1],
            "terminated": ended & cut,
            "truncated": ended & ~cut,
            "extras": {"value": self.rng.normal(size=(count, self.lanes)).astype(np.float32)},
        }


def _make_packing_tuning(segment_ticks: int) -> Tuning:
    """Return a tuning with which every few ticks are packed."""
    return Tuning(
        min_segment_ticks=segment_ticks,
        max_segment_ticks=segment_ticks,
        min_packed_rows=4,
        packed_search_interval=2,
        available_bytes=0,
    )


class Compared:
    """A memory and an oracle with the same steps."""

    def __init__(self, vectors: Vectors, capacity_ticks: int, device: str | None, tuning: Tuning) -> None:
        self.vectors = vectors
        capacity = capacity_ticks * vectors.lanes
        extras = {"value": box((), "f4")}
        self.memory = ReplayMemory(
            vectors.observation_space,
            spaces.Discrete(3),
            capacity,
            vectors.lanes,
            device=device,
            extras=extras,
            budget=None,
            _tuning=tuning,
        )
        self.tuning = tuning
        self.oracle = OracleMemory(capacity, vectors.lanes)
        self.device = device

    def extend(self, count: int, *, one_by_one: bool) -> None:
        given = self.vectors.ticks(count)
        if one_by_one:
            for t in range(count):
                tick = {key: _select_tick(value, t) for key, value in given.items()}
                self.memory.add(**tick)
                self.oracle.add(**tick)
        else:
            self.memory.extend(**given)
            self.oracle.extend(**given)

    def update(self, seed: int) -> None:
        ids = np.random.default_rng(seed).choice(self.oracle.ids, 7)
        values = np.arange(7, dtype=np.float32)
        self.memory.update(ids, value=values)
        self.oracle.update(ids, value=values)

    def replace_by_a_pickle(self) -> None:
        self.memory = pickle.loads(pickle.dumps(self.memory, protocol=5))

    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.memory.save(Path(folder) / "saved").result()
            self.memory.close()
            self.memory = ReplayMemory.load(
                Path(folder) / "saved", device=self.device, budget=None, _tuning=self.tuning
            )
            self.check(0)

    def check(self, seed: int) -> None:
        if not len(self.oracle):
            return
        ids = np.random.default_rng(seed).choice(self.oracle.ids, 50)
        for some in (ids, self.oracle.ids):
            assert_same_bits(self.memory.gather(some), self.oracle.gather(some))

    @property
    def packed_ticks(self) -> int:
        """Return the number of ticks in packed segments."""
        segments = self.memory.host_store.catalog.segments
        return sum(segment.ticks for segment in segments if segment.parts[0].kind == "packed")


def _select_tick(value: Any, t: int) -> Any:
    return {key: rows[t] for key, rows in value.items()} if isinstance(value, dict) else value[t]


ACTS = ("extend", "extend", "add", "add", "replace_by_a_pickle", "save_and_load", "update")


@pytest.mark.timeout(900)  # Hypothesis needs this time to shrink a failure.
@settings(max_examples=25, deadline=None)
@given(
    lanes=st.integers(1, 3),
    dtype=st.sampled_from(["f4", "f8"]),
    seed=st.integers(0, 2**32 - 1),
    ends=st.sampled_from([0.0, 0.02, 0.3]),
    breaks=st.sampled_from([0.0, 0.002, 0.05, 0.6]),
    is_frame_by_frame=st.booleans(),
    capacity_ticks=st.integers(16, 120),
    segment_ticks=st.sampled_from([4, 8, 40]),
    device=st.sampled_from([None, None, "cpu"]),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, 40)), min_size=2, max_size=8),
)
def test_vectors_come_back_bit_for_bit(
    lanes: int,
    dtype: str,
    seed: int,
    ends: float,
    breaks: float,
    is_frame_by_frame: bool,
    capacity_ticks: int,
    segment_ticks: int,
    device: str | None,
    acts: list[tuple[str, int]],
) -> None:
    """Meanwhile, extras are rewritten, and the memory is pickled, saved and loaded."""
    vectors = Vectors(lanes, dtype, seed, ends, breaks, is_frame_by_frame)
    compared = Compared(vectors, capacity_ticks, device, _make_packing_tuning(segment_ticks))
    compared.extend(50, one_by_one=False)
    for act, count in acts:
        if act in ("extend", "add"):
            compared.extend(count, one_by_one=act == "add")
        elif act == "update":
            compared.update(seed)
        else:
            getattr(compared, act)()
        compared.check(count)
    compared.memory.close()


@pytest.mark.parametrize("is_frame_by_frame", [True, False])
@pytest.mark.parametrize("lanes", [1, 3])
def test_columns_that_repeat_are_packed(lanes: int, is_frame_by_frame: bool) -> None:
    """Constants, copies, values that stay and histories take no memory. All closed segments are packed."""
    vectors = Vectors(lanes, "f8", 1, 0.02, 0.0, is_frame_by_frame)
    compared = Compared(vectors, 400, None, _make_packing_tuning(64))
    compared.extend(350, one_by_one=False)
    compared.check(0)
    assert compared.packed_ticks >= 256
    found = {field.name: field for field in compared.memory.report().fields}
    assert found["obs.past"].row_bytes < 0.6 * found["obs.past"].plain_bytes / 2
    assert compared.memory.report().total_bytes == sum(each.total_bytes for each in found.values())
    compared.extend(900, one_by_one=False)
    compared.check(1)
    assert 300 <= compared.packed_ticks <= 400 + 2 * 64, "packed segments are evicted with their ticks"
