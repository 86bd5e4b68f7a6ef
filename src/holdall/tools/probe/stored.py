"""Memory that holdall needs for some steps of a run. A real memory is filled with the steps, and its report is read.

In:  steps of an environment.  Out: bytes per transition, raw and compressed, and bytes that belong to no transition.
Every figure comes from a real memory's report or from the process. This module runs in a process of its own or in the
probed command, never in a training.
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
from holdall.tools.probe.snapshot import StoredSteps

_SEGMENTS = 4
"""Segments that the steps fill when compression is measured. All but the last segment are compressed."""
_SEGMENTS_OF_A_CAPACITY = 16
"""Segments into which a memory divides its capacity."""
_TRIALS = 2
_SETTLE_S = 30.0

StepArrays = tuple[Any, Any, Any, Any, Any, Any]
"""obs, action, reward, next_obs, terminated, truncated; leading axis: environments."""


class _Filled(NamedTuple):
    """What a memory reports after it was filled."""

    bytes_per_transition: float
    working_bytes: int


def fill_memories(steps: Sequence[StepArrays], *, is_rollout: bool = False, prefer: str = "balanced") -> dict[str, Any]:
    """Fill memories with `steps`. Return the fields of a `StoredSteps`."""
    lanes = len(np.asarray(steps[0][2]).reshape(-1))
    steps = [_with_lanes(step, lanes) for step in steps]
    observation = _read_space(steps[0][0])
    action = _read_space(np.asarray(steps[0][1]))
    if is_rollout:
        raw = _fill_rollout(observation, action, lanes, steps)
        found = StoredSteps(len(steps) * lanes, raw.bytes_per_transition, None, None, 0)
        return asdict(found)
    compressed = []
    if len(steps) >= 16 * _SEGMENTS:
        compressed = [_fill_replay(observation, action, lanes, steps, prefer) for _ in range(_TRIALS)]
    raw = _fill_replay(observation, action, lanes, steps, None)
    sizes = [min(one.bytes_per_transition, raw.bytes_per_transition) for one in compressed]
    found = StoredSteps(
        steps=len(steps) * lanes,
        raw_bytes=raw.bytes_per_transition,
        compressed_bytes=min(sizes) if sizes else None,
        worst_bytes=max(sizes) if sizes else None,
        working_bytes=max([one.working_bytes for one in [raw, *compressed]]),
    )
    return asdict(found)


def _fill_replay(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    lanes: int,
    steps: Sequence[StepArrays],
    prefer: str | None,
) -> _Filled:
    """Add three quarters of the steps, and compare the report with the one after the first quarter.

    Args:
        prefer: Preference of a memory that compresses everything; None: nothing is compressed.
    """
    ticks = len(steps)
    capacity = ticks * lanes
    settings: dict[str, Any] = {}
    if prefer is not None:
        settings = {"budget": None, "prefer": prefer}
        capacity = ticks // _SEGMENTS * _SEGMENTS_OF_A_CAPACITY * lanes
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
        working = held_bytes().anonymous - before - report.total_bytes
        del batch
    return _Filled(_compare(readings), max(working, 0))


def _fill_rollout(
    observation: spaces.Space[Any], action: spaces.Space[Any], lanes: int, steps: Sequence[StepArrays]
) -> _Filled:
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
    return _Filled(_compare(readings), 0)


def _compare(readings: list[tuple[int, int]]) -> float:
    """Return the bytes that each further transition takes, from the first and the last reading."""
    (held, taken), (held_later, taken_later) = readings[0], readings[-1]
    return max(taken_later - taken, 0) / max(held_later - held, 1)


def wait_until_compressed(memory: ReplayMemory) -> MemoryReport:
    """Wait until nothing is left to compress, and return the report."""
    end = time.monotonic() + _SETTLE_S
    report = memory.report()
    while report.backlog and time.monotonic() < end:
        time.sleep(0.01)
        report = memory.report()
    return report


# ---------------------------------------------------------------- arrays and spaces


def _with_lanes(step: StepArrays, lanes: int) -> StepArrays:
    """Return a step whose arrays all have a leading axis of environments."""
    obs, action, reward, next_obs, terminated, truncated = step
    flags = [np.asarray(flag, np.bool_).reshape(lanes) for flag in (terminated, truncated)]
    has_axis = np.ndim(reward) > 0
    actions = np.asarray(action) if has_axis else np.asarray(action)[None]
    rewards = np.asarray(reward, np.float32).reshape(lanes)
    return _add_lane_axis(obs, has_axis), actions, rewards, _add_lane_axis(next_obs, has_axis), flags[0], flags[1]


def _add_lane_axis(value: Any, has_axis: bool) -> Any:
    if isinstance(value, dict):
        return {key: _add_lane_axis(item, has_axis) for key, item in value.items()}
    return np.asarray(value) if has_axis else np.asarray(value)[None]


def _read_space(value: Any) -> spaces.Space[Any]:
    """Return a space with the shapes and dtypes of a batch of values."""
    if isinstance(value, dict):
        return spaces.Dict({key: _read_space(item) for key, item in value.items()})
    array = np.asarray(value)
    return stored_space(array.shape[1:], array.dtype)
