"""What holdall's own memory needs: fill a memory of the run's spaces with a few steps, and read its report.

In:  a spec, and steps of its environment or made-up ones.  Out: bytes per transition, raw and compressed, and what a
memory takes in addition.
Invariant: bytes per transition come from a real memory's report, the rest from the process; compression ratios are
measured on real steps or not given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.machine import held_bytes
from holdall.memory import ReplayMemory
from holdall.rollout import RolloutMemory
from holdall.store.tuning import Tuning
from holdall.tools.plan.environments import has_images, make_single_env, random_steps
from holdall.tools.plan.phases import SEGMENTS_OF_A_CAPACITY, HoldallNeed
from holdall.tools.plan.spec import Spec

_NOISE_BYTES = 48 * 2**20
_NOISE_TICKS = 256
_SEGMENTS = 4  # a probe's memory is cut into this many segments, so that all but the last one are compressed
_SETTLE_S = 60.0
_TRIALS = 2
"""More than once: the least and the most that they take are the range that a plan gives."""
_LARGEST_SPREAD = 0.1
_TABLES_BYTES = 2**18

StepArrays = tuple[Any, Any, Any, Any, Any, Any]  # obs, action, reward, next_obs, terminated, truncated of all lanes


class FilledMemory(NamedTuple):
    """What a memory reports after a few steps were added."""

    bytes_per_transition: float
    beside_bytes: int  # that the process took, and no field of the memory counts
    findings: dict[str, str]


def need_from_spaces(spec: Spec) -> HoldallNeed:
    """Fill a memory with noise that overlaps as frame stacks do: an upper bound, if the environment overlaps too."""
    ticks = int(np.clip(_NOISE_BYTES // (spec.observation_bytes * spec.num_envs), 16, _NOISE_TICKS))
    filled = (_fill_rollout if spec.on_policy else _fill_replay)(spec, _noise_steps(spec), ticks)
    return HoldallNeed(filled.bytes_per_transition, None, _fixed_bytes(spec), 0, filled.findings)


def measure_need(spec: Spec, steps: int, prefer: str) -> dict[str, Any]:
    """Play the run's environment into two memories, one raw and one that compresses."""
    ticks = max(steps // spec.num_envs, 16 * _SEGMENTS)
    played, fixed = ticks * spec.num_envs, _fixed_bytes(spec)
    if spec.on_policy:
        raw = _fill_rollout(spec, environment_steps(spec), ticks)
        return asdict(HoldallNeed(raw.bytes_per_transition, None, fixed, played, raw.findings))
    # These first: what codecs work in is taken from a heap that nothing else has stretched yet.
    trials = [_fill_replay(spec, environment_steps(spec), ticks, prefer) for _ in range(_TRIALS)]
    sizes = [trial.bytes_per_transition for trial in trials]
    if max(sizes) / max(min(sizes), 1.0) - 1 > _LARGEST_SPREAD:
        trials.append(_fill_replay(spec, environment_steps(spec), ticks, prefer))
    sealed = min(trials, key=lambda trial: trial.bytes_per_transition)
    raw = _fill_replay(spec, environment_steps(spec), ticks)
    # A heap that was stretched before hides what is taken from it: never less than is known to be needed.
    found = HoldallNeed(
        raw.bytes_per_transition,
        min(sealed.bytes_per_transition, raw.bytes_per_transition),
        max(raw.beside_bytes, fixed),
        played,
        raw.findings | sealed.findings,
        max(trials[0].beside_bytes, fixed),
        Tuning().block_bytes,
        min(max(trial.bytes_per_transition for trial in trials), raw.bytes_per_transition),
    )
    return asdict(found)


def _fill_replay(spec: Spec, steps: Iterator[StepArrays], ticks: int, prefer: str | None = None) -> FilledMemory:
    """Add `ticks` steps, and compare the first quarter with the third.

    Where compression is measured, the memory is so small that a segment is closed and sealed at every quarter.
    """
    lanes = spec.num_envs
    settings: dict[str, Any] = {}
    capacity = max(spec.capacity, ticks * lanes)
    if prefer is not None:
        settings = {"budget": None, "prefer": prefer}
        capacity = ticks // _SEGMENTS * SEGMENTS_OF_A_CAPACITY * lanes
    first, last = _quarters(ticks)
    drawn = min(spec.batch, first * lanes)
    readings = []
    observation = stored_space(spec.observation)
    begin = next(steps)  # the environments are there now
    before = held_bytes().anonymous
    with ReplayMemory(observation, spec.action, capacity, lanes, **settings) as memory:
        for tick, step in zip(range(last + 1), chain([begin], steps), strict=False):
            memory.add(*step)
            if tick in {first, last}:
                batch = memory.sample(drawn)
                batch = memory.sample(drawn)  # a training loop lets go of a batch when it has the next one
                report = wait_until_compressed(memory)
                readings.append((report.transitions, report.total_bytes))
        beside = held_bytes().anonymous - before - report.total_bytes
        del batch
        findings = {field.name: field.finding for field in report.fields}
    return FilledMemory(_bytes_a_transition(readings), max(beside, 0), findings)


def _fill_rollout(spec: Spec, steps: Iterator[StepArrays], ticks: int) -> FilledMemory:
    """Do the same with a rollout, which keeps no next observations."""
    first, last = _quarters(ticks)
    readings = []
    estimate = np.zeros(spec.num_envs, np.float32)
    with RolloutMemory(stored_space(spec.observation), spec.action, last + 1, spec.num_envs) as memory:
        for tick, (obs, action, reward, _, terminated, truncated) in zip(range(last + 1), steps, strict=False):
            ended = terminated | truncated
            memory.add(obs, action, reward, ended, np.zeros_like(ended), estimate, estimate)
            if tick in {first, last}:
                report = memory.report()
                readings.append((report.transitions, report.total_bytes))
        findings = {field.name: field.finding for field in report.fields}
    return FilledMemory(_bytes_a_transition(readings), 0, findings)


def _quarters(ticks: int) -> tuple[int, int]:
    return ticks // _SEGMENTS, ticks // _SEGMENTS * (_SEGMENTS - 1)


def _bytes_a_transition(readings: list[tuple[int, int]]) -> float:
    (held, taken), (held_later, taken_later) = readings
    return (taken_later - taken) / (held_later - held)


def wait_until_compressed(memory: ReplayMemory) -> Any:
    """Wait until nothing is left to compress, and report."""
    end = time.monotonic() + _SETTLE_S
    while (report := memory.report()).backlog and time.monotonic() < end:
        time.sleep(0.01)
    return report


def _fixed_bytes(spec: Spec) -> int:
    """Bytes beside the transitions: tables, and batches.

    Of a replay memory these are two batches with next observations, one drawn while the last is used; of a rollout one.
    """
    return (1 if spec.on_policy else 4) * spec.batch * spec.observation_bytes + _TABLES_BYTES


def _noise_steps(spec: Spec) -> Iterator[StepArrays]:
    """Yield made-up steps: every new frame is noise, and shares with the stack before it."""
    rng = np.random.default_rng(0)
    lanes = spec.num_envs
    observation, stack = stored_space(spec.observation), spec.frame_stack
    obs = _map_space(lambda space: _random_values(rng, space, lanes), observation)
    while True:
        next_obs = _map_space(lambda space, old: _shift_frames(rng, space, old, stack), observation, obs)
        action = _random_values(rng, spec.action, lanes)
        flags = np.zeros(lanes, np.bool_)
        yield obs, action, np.zeros(lanes, np.float32), next_obs, flags, flags
        obs = next_obs


def environment_steps(spec: Spec) -> Iterator[StepArrays]:
    """Yield steps of the run's environment, one instance a lane, as Stable-Baselines3 would hand them over."""
    lanes = [_stacked_steps(spec, lane) for lane in range(spec.num_envs)]
    while True:
        obs, action, reward, next_obs, terminated, truncated = zip(*(next(lane) for lane in lanes), strict=True)
        before, after = _stack_envs(spec.observation, obs), _stack_envs(spec.observation, next_obs)
        ends = np.array(terminated), np.array(truncated)
        yield before, _stack_envs(spec.action, action), np.array(reward, np.float32), after, *ends


def _stacked_steps(spec: Spec, seed: int) -> Iterator[tuple[Any, ...]]:
    stack: Any = None
    env = make_single_env(spec.env_id, spec.wrapper)
    for obs, action, reward, next_obs, terminated, truncated in random_steps(env, seed):
        if stack is None:
            stack = _push_frame(None, _channels_first(obs), spec.frame_stack)
        following = _push_frame(stack, _channels_first(next_obs), spec.frame_stack)
        yield stack, action, reward, following, terminated, truncated
        stack = None if terminated or truncated else following


def _push_frame(stack: Any, frame: Any, frames: int) -> Any:
    """Push a frame in at the end; a new stack begins with zeros, as Stable-Baselines3's does."""
    if frames == 1:
        return frame
    if isinstance(frame, dict):
        return {key: _push_frame(None if stack is None else stack[key], value, frames) for key, value in frame.items()}
    axis = 0 if frame.ndim == 3 and frame.dtype == np.uint8 else -1
    if stack is None:
        stack = np.concatenate([np.zeros_like(frame)] * frames, axis)
    kept = np.delete(stack, np.s_[: frame.shape[axis]], axis)
    return np.concatenate([kept, frame], axis)


def _channels_first(obs: Any) -> Any:
    """Transpose images as Stable-Baselines3 does before it stores them."""
    if isinstance(obs, dict):
        return {key: _channels_first(value) for key, value in obs.items()}
    array = np.asarray(obs)
    is_image = array.ndim == 3 and array.dtype == np.uint8 and array.shape[-1] < array.shape[0]
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if is_image else array


def stored_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space as it is stored: Stable-Baselines3 puts the channels of images first."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stored_space(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Box) and has_images(space) and space.shape[-1] < space.shape[0]:
        return spaces.Box(0, 255, (space.shape[2], *space.shape[:2]), np.uint8)
    return space


def _stack_envs(space: spaces.Space[Any], values: tuple[Any, ...]) -> Any:
    return _map_space(lambda leaf, *each: np.stack([np.asarray(one, leaf.dtype) for one in each]), space, *values)


def _map_space(function: Callable[..., Any], space: spaces.Space[Any], *values: Any) -> Any:
    """Call a function for every plain space of a Dict, with the values under its key."""
    if isinstance(space, spaces.Dict):
        return {key: function(child, *(value[key] for value in values)) for key, child in space.spaces.items()}
    return function(space, *values)


def _random_values(rng: np.random.Generator, space: Any, lanes: int) -> NDArray[Any]:
    dtype = np.dtype(space.dtype)
    count = lanes * int(np.prod(space.shape or (), dtype=np.int64)) * dtype.itemsize
    bits: NDArray[Any] = np.frombuffer(rng.bytes(count), np.uint8)
    if dtype.kind == "b":
        bits = bits & 1
    return np.asarray(bits.view(dtype).reshape(lanes, *(space.shape or ())))


def _shift_frames(rng: np.random.Generator, space: Any, old: NDArray[Any], frames: int) -> NDArray[Any]:
    fresh = _random_values(rng, space, len(old))
    if frames == 1 or old.ndim < 2:
        return fresh
    axis = 1 if old.ndim == 4 else old.ndim - 1
    step = old.shape[axis] // frames
    moved = np.roll(old, -step, axis)
    newest = (slice(None),) * axis + (slice(-step, None),)
    moved[newest] = fresh[newest]
    return moved
