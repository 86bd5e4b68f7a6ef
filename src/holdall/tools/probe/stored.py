"""Memory that holdall needs for some steps of a run. Real memories are filled with the steps, and report their size.

In:  steps of an environment.  Out: bytes per transition, raw and compressed, and bytes that belong to no transition.
This module runs in the probed command or in the process of `holdall.plan.model`, never during a training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from holdall.machine import held_bytes
from holdall.memory import ReplayMemory
from holdall.report import MemoryReport
from holdall.rollout import RolloutMemory
from holdall.space_leaves import stored_space
from holdall.store.tuning import Tuning
from holdall.tools.probe.snapshot import StoredSteps

_SEGMENTS = 4
"""Parts that the steps are divided into. The sizes of a memory after the first and after the third are compared."""
_MIN_SEGMENT_TICKS = 16
"""Ticks of a segment from which on its compression is measured. Fewer ticks compress worse than those of a real run."""
_TRIALS = 2
_SETTLE_S = 30.0
"""Seconds to wait for the compactor."""

StepArrays = tuple[Any, Any, Any, Any, Any, Any]
"""obs, action, reward, next_obs, terminated, truncated; leading axis: environments."""


class _MemorySize(NamedTuple):
    """Size of a memory that was filled with the steps."""

    bytes_per_transition: float
    working_bytes: int


def fill_memories(steps: Sequence[StepArrays], *, is_rollout: bool = False, prefer: str = "balanced") -> dict[str, Any]:
    """Fill memories with `steps`. Return the fields of a `StoredSteps`. Raise ValueError for fewer than 4 steps."""
    if len(steps) < _SEGMENTS:
        raise ValueError(f"{len(steps)} vectorised steps are too few to measure. At least {_SEGMENTS} are needed.")
    lanes = len(np.asarray(steps[0][2]).reshape(-1))
    steps = [_add_lane_axes(step, lanes) for step in steps]
    observation = _read_space(steps[0][0])
    action = _read_space(np.asarray(steps[0][1]))
    if is_rollout:
        raw = _fill_rollout(observation, action, lanes, steps)
        stored = StoredSteps(
            steps=len(steps) * lanes,
            raw_bytes=raw.bytes_per_transition,
            compressed_bytes=None,
            worst_bytes=None,
            working_bytes=0,
        )
        return asdict(stored)
    compressed = []
    if len(steps) >= _MIN_SEGMENT_TICKS * _SEGMENTS:
        compressed = [_fill_replay(observation, action, lanes, steps, prefer) for _ in range(_TRIALS)]
    raw = _fill_replay(observation, action, lanes, steps, None)
    sizes = [min(size.bytes_per_transition, raw.bytes_per_transition) for size in compressed]
    stored = StoredSteps(
        steps=len(steps) * lanes,
        raw_bytes=raw.bytes_per_transition,
        compressed_bytes=min(sizes) if sizes else None,
        worst_bytes=max(sizes) if sizes else None,
        working_bytes=max(size.working_bytes for size in [raw, *compressed]),
    )
    return asdict(stored)


def _fill_replay(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    lanes: int,
    steps: Sequence[StepArrays],
    prefer: str | None,
) -> _MemorySize:
    """Add three quarters of the steps, and compare the report with the report after the first quarter.

    Args:
        prefer: Preference of a memory that compresses everything. None: a memory with the default budget.
    """
    ticks = len(steps)
    capacity = ticks * lanes
    settings: dict[str, Any] = {}
    if prefer is not None:
        settings = {"budget": None, "prefer": prefer}
        # With this capacity, a segment of the memory has a quarter of the ticks.
        capacity = ticks // _SEGMENTS * Tuning().segments_per_capacity * lanes
    first = ticks // _SEGMENTS
    last = ticks // _SEGMENTS * (_SEGMENTS - 1)
    readings = []
    before = held_bytes().anonymous
    with ReplayMemory(observation, action, capacity, lanes, **settings) as memory:
        for tick, step in enumerate(steps[: last + 1]):
            memory.add(*step)
            if tick in {first, last}:
                batch = memory.sample(max(first * lanes // 2, 1))
                report = wait_until_compressed(memory)
                readings.append((report.transitions, report.total_bytes))
        working_bytes = held_bytes().anonymous - before - report.total_bytes
        del batch
    return _MemorySize(_compute_bytes_per_transition(readings), max(working_bytes, 0))


def _fill_rollout(
    observation: spaces.Space[Any], action: spaces.Space[Any], lanes: int, steps: Sequence[StepArrays]
) -> _MemorySize:
    """Add all steps to a rollout, and compare its report after the first quarter with the report at the end."""
    first = len(steps) // _SEGMENTS
    last = len(steps) - 1
    readings = []
    estimate = np.zeros(lanes, np.float32)
    with RolloutMemory(observation, action, len(steps), lanes) as memory:
        for tick, (obs, actions, reward, _, terminated, truncated) in enumerate(steps):
            ended = np.asarray(terminated) | np.asarray(truncated)
            rewards = np.asarray(reward, np.float32)
            memory.add(obs, actions, rewards, ended, np.zeros_like(ended), estimate, estimate)
            if tick in {first, last}:
                report = memory.report()
                readings.append((report.transitions, report.total_bytes))
    return _MemorySize(_compute_bytes_per_transition(readings), 0)


def _compute_bytes_per_transition(readings: list[tuple[int, int]]) -> float:
    """Return the growth in bytes per transition between two readings of transitions and bytes."""
    (first_transitions, first_bytes), (last_transitions, last_bytes) = readings
    return max(last_bytes - first_bytes, 0) / max(last_transitions - first_transitions, 1)


def wait_until_compressed(memory: ReplayMemory) -> MemoryReport:
    """Wait until nothing is left to compress, and return the report."""
    end = time.monotonic() + _SETTLE_S
    report = memory.report()
    while report.backlog and time.monotonic() < end:
        time.sleep(0.01)
        report = memory.report()
    return report


# ---------------------------------------------------------------- arrays and spaces


def _add_lane_axes(step: StepArrays, lanes: int) -> StepArrays:
    """Return a step with a leading axis of environments in all arrays."""
    obs, action, reward, next_obs, terminated, truncated = step
    has_axis = np.ndim(reward) > 0
    return (
        _add_lane_axis(obs, has_axis),
        _add_lane_axis(action, has_axis),
        np.asarray(reward, np.float32).reshape(lanes),
        _add_lane_axis(next_obs, has_axis),
        np.asarray(terminated, np.bool_).reshape(lanes),
        np.asarray(truncated, np.bool_).reshape(lanes),
    )


def _add_lane_axis(value: Any, has_axis: bool) -> Any:
    if isinstance(value, dict):
        return {key: _add_lane_axis(item, has_axis) for key, item in value.items()}
    return np.asarray(value) if has_axis else np.asarray(value)[None]


def _read_space(value: Any) -> spaces.Space[Any]:
    """Return the space of one entry of a batch, from the shapes and dtypes of the batch."""
    if isinstance(value, dict):
        return spaces.Dict({key: _read_space(item) for key, item in value.items()})
    array = np.asarray(value)
    return stored_space(array.shape[1:], array.dtype)
