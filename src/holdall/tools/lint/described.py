"""Models and buffers of a run as the rules see them, made from a snapshot of the run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.tools.lint.finding import Place
from holdall.tools.lint.subjects import StoredField, TrainedBuffer, TrainedCallback, TrainedModel
from holdall.tools.probe.snapshot import (
    FailedAllocation,
    FoundArray,
    FoundBuffer,
    FoundEnvironment,
    FoundMemory,
    FoundModel,
    Plain,
    Snapshot,
)
from holdall.units import parse_bytes

_LIBRARIES = {
    "stable_baselines3": "sb3",
    "sb3_contrib": "sb3",
    "cleanrl_utils": "cleanrl",
    "torchrl": "torchrl",
    "holdall": "holdall",
}
"""Libraries by the package of a buffer's class."""
_ON_POLICY = frozenset({"A2C", "PPO", "TRPO", "MaskablePPO", "RecurrentPPO"})
_FLATTENED = frozenset({"observations", "actions", "values", "log_probs", "advantages", "returns"})
"""Arrays that `RolloutBuffer.get` of Stable-Baselines3 copies into one axis, one after the other."""
_STACK_SETTINGS = ("n_stack", "stack_size", "num_stack")


def describe_models(snapshot: Snapshot) -> list[TrainedModel]:
    """Return the models of a run. Models that `learn` was not called for are left out if there is one that was."""
    learning = [model for model in snapshot.models if model.total_timesteps is not None]
    buffers = {buffer.owner: buffer for buffer in snapshot.buffers}
    memories = {memory.owner: memory for memory in snapshot.memories}
    return [_describe_model(model, buffers, memories, snapshot) for model in learning or snapshot.models]


def describe_buffers(snapshot: Snapshot) -> list[TrainedBuffer]:
    """Return the buffers of a run: of its models, of other libraries, of the program's own, and one that failed."""
    models = describe_models(snapshot)
    found = [model.buffer for model in models if model.buffer is not None]
    owned = {model.buffer_owner for model in snapshot.models}
    for buffer in snapshot.buffers:
        if buffer.owner not in owned:
            title = f"{buffer.owner} ({buffer.class_name.rpartition('.')[2]})" if buffer.class_name else buffer.owner
            stack = _find_stack(snapshot.environments, buffer.arrays)
            found.append(_describe_buffer(buffer, title, Place(buffer.owner), None, stack))
    others = [memory for memory in snapshot.memories if memory.owner not in owned]
    found += [_describe_memory(memory, Place(memory.owner)) for memory in others]
    if snapshot.allocation is not None and snapshot.allocation.is_exact:
        found.append(_describe_allocation(snapshot.allocation))
    return found


def _describe_model(
    model: FoundModel, buffers: dict[str, FoundBuffer], memories: dict[str, FoundMemory], snapshot: Snapshot
) -> TrainedModel:
    is_on_policy = model.algorithm in _ON_POLICY
    place = Place(f"live {model.class_name.rpartition('.')[2]}")
    environment = model.environment
    settings = {} if environment is None else environment.settings
    # A run that is resumed counts on from where it stopped, so the steps of this call say little.
    is_new = not model.settings.get("num_timesteps")
    total_timesteps = model.total_timesteps if is_new else None
    buffer: TrainedBuffer | None = None
    if model.buffer_owner in buffers:
        found = buffers[model.buffer_owner]
        title = "the rollout" if is_on_policy else "the replay buffer"
        stack = _find_stack([] if environment is None else [environment], found.arrays)
        buffer = _describe_buffer(found, title, place, total_timesteps, stack)
    elif model.buffer_owner in memories:
        buffer = _describe_memory(memories[model.buffer_owner], place)
    return TrainedModel(
        algorithm=model.algorithm,
        place=place,
        is_on_policy=is_on_policy,
        settings=model.settings,
        policy=model.policy_class.rpartition(".")[2],
        n_envs=model.n_envs,
        device=model.device,
        observation=tuple(_describe_space(model.observation_space)),
        is_subprocess=environment is not None and bool(environment.start_method),
        frame_stack=1 if buffer is None else buffer.frame_stack,
        episode_steps=settings.get("_max_episode_steps"),
        total_timesteps=total_timesteps,
        callbacks=tuple(
            TrainedCallback(callback.class_name.rpartition(".")[2], callback.settings, callback.shares_env)
            for callback in snapshot.callbacks
            if callback.is_passed
        ),
        buffer=buffer,
        sb3_version=_parse_version(snapshot.versions.get("stable_baselines3", "")),
    )


def _describe_buffer(
    buffer: FoundBuffer, title: str, place: Place, steps: int | None, frame_stack: int
) -> TrainedBuffer:
    library = _LIBRARIES.get(buffer.class_name.partition(".")[0], "")
    devices = buffer.bytes_on
    return TrainedBuffer(
        title=title,
        place=place,
        kind=buffer.kind,
        library=library,
        capacity=buffer.transitions,
        nbytes=buffer.nbytes,
        n_envs=buffer.n_envs,
        steps=steps,
        fields=tuple(_describe_fields(buffer)),
        flatten_bytes=_count_flattened(buffer) if library == "sb3" else 0,
        frame_stack=frame_stack,
        is_exact=buffer.is_exact,
        device=max(devices, key=lambda device: devices[device]),
    )


def _describe_fields(buffer: FoundBuffer) -> Iterator[StoredField]:
    """Yield the arrays of a buffer without the axes that count steps and environments."""
    for array in buffer.arrays:
        dtype = _parse_dtype(array.dtype)
        if dtype is None or buffer.rows is None or array.shape[:1] != (buffer.rows,):
            continue
        has_lanes = buffer.kind != "arrays" and array.shape[1:2] == (buffer.n_envs,)
        yield StoredField(array.name, array.shape[2 if has_lanes else 1 :], dtype)


def _count_flattened(buffer: FoundBuffer) -> int:
    """Return the bytes of the largest copy of flattening. One environment or one step is flattened without a copy."""
    if buffer.kind != "rollout" or 1 in {buffer.n_envs, buffer.rows}:
        return 0
    return max((array.nbytes for array in buffer.arrays if array.name.partition(".")[0] in _FLATTENED), default=0)


def _find_stack(environments: Iterable[FoundEnvironment], arrays: Iterable[FoundArray]) -> int:
    """Return the frames that each stored observation consists of, if an axis of a stored array can contain them."""
    counts = {environment.settings.get(name) for environment in environments for name in _STACK_SETTINGS} - {None}
    count = counts.pop() if len(counts) == 1 else None
    if not isinstance(count, int) or count < 2:
        return 1
    largest = max(arrays, key=lambda array: array.nbytes, default=None)
    sides = () if largest is None else largest.shape[1:]
    return count if any(side % count == 0 for side in sides) else 1


def _describe_memory(memory: FoundMemory, place: Place) -> TrainedBuffer:
    budget = memory.budget
    budget_bytes = 0
    if isinstance(budget, int) or (isinstance(budget, str) and budget != "auto"):
        try:
            budget_bytes = parse_bytes(budget, "budget")
        except HoldallError:
            budget_bytes = 0
    return TrainedBuffer(
        title=f"the memory {memory.owner}",
        place=place,
        kind="memory",
        library="holdall",
        capacity=memory.capacity,
        nbytes=budget_bytes,
        n_envs=memory.n_envs,
        device=memory.store_device or "cpu",
    )


def _describe_allocation(allocation: FailedAllocation) -> TrainedBuffer:
    shape = f" of shape {allocation.shape} and dtype {allocation.dtype}" if allocation.shape else ""
    return TrainedBuffer(
        title=f"an array{shape}",
        place=Place("failed allocation"),
        kind="refused",
        library="",
        capacity=None,
        nbytes=allocation.nbytes,
    )


def _describe_space(space: Plain | None, name: str = "") -> Iterator[StoredField]:
    """Yield the parts of an observation space."""
    if space is None:
        return
    if space["kind"] == "dict":
        for key, child in space["spaces"].items():
            yield from _describe_space(child, key)
        return
    dtype = _parse_dtype(space.get("dtype", "int8"))
    if space["kind"] == "tuple" or dtype is None:
        return
    bounds = None
    if space.get("low") is not None and space.get("high") is not None:
        bounds = (float(space["low"]), float(space["high"]))
    counts = space.get("counts", ())
    shape = () if space["kind"] == "discrete" else (len(counts),)
    if space["kind"] == "multibinary":
        shape = tuple(counts)
    yield StoredField(name, tuple(space.get("shape", shape)), dtype, bounds)


def _parse_dtype(text: str) -> np.dtype[Any] | None:
    """Return a dtype of NumPy, or None for dtypes that only other libraries have."""
    try:
        return np.dtype(text)
    except TypeError:
        return None


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.8.0a3` is (2, 8, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
