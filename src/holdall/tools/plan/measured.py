"""The needs of a run, from the measurements of a probe.

In:  a `Snapshot`.  Out: `RunNeeds`, and notes about figures that were not measured.
"""

from __future__ import annotations

from dataclasses import replace

from holdall.errors import HoldallError
from holdall.tools.plan.algorithms import count_observation_bytes, count_step_bytes, count_transition_bytes
from holdall.tools.plan.environments import space_from_dict
from holdall.tools.plan.needs import (
    PLAIN_LAYOUT,
    Experience,
    HoldallUse,
    MachineLimits,
    MemoryPart,
    RunNeeds,
    estimate_settled,
)
from holdall.tools.probe.snapshot import FoundBuffer, FoundEnvironment, FoundMemory, FoundModel, Snapshot, StoredSteps
from holdall.units import format_bytes, parse_bytes


class PlanError(HoldallError, RuntimeError):
    """A command cannot be planned: it has no buffer, or a change does not apply to it."""


def read_needs(snapshot: Snapshot, limits: MachineLimits) -> tuple[RunNeeds, list[str]]:
    """Return the needs of the run, and notes about figures that were not measured."""
    model = snapshot.models[0] if snapshot.models else None
    memory = find_memory(snapshot, model)
    buffer = None if memory is not None else find_main_buffer(snapshot, model)
    notes: list[str] = []
    if memory is not None:
        experience = _read_memory(memory, model, snapshot)
    elif buffer is not None:
        experience = _read_buffer(buffer, model)
    else:
        raise PlanError(_explain_missing_buffer(snapshot))
    base = snapshot.resident_bytes - snapshot.probe_bytes - sum(_count_resident(one) for one in snapshot.buffers)
    workers = [process for process in snapshot.processes if not process.is_reporter]
    others = [
        MemoryPart(f"{one.owner} ({one.kind})", one.bytes_on.get("cpu", 0), "exact" if one.is_exact else "estimate")
        for one in snapshot.buffers
        if one is not buffer and one.bytes_on.get("cpu", 0)
    ]
    for one in snapshot.memories:
        if one is not memory:
            nbytes = _count_full_bytes(one, model, snapshot, limits)
            others.append(MemoryPart(f"{one.owner} (holdall)", nbytes, "estimate"))
    environment = _find_environment(snapshot, model, experience.n_envs)
    needs = RunNeeds(
        experience=experience,
        base_bytes=max(base, 0),
        environment_bytes=0 if environment is None or environment.start_method else environment.nbytes_each,
        measured_envs=0 if environment is None else environment.n_envs,
        process_bytes=sum(process.unique_bytes for process in workers),
        processes=len(workers),
        stored=_read_stored(snapshot, model, buffer),
        holdall=None if memory is None else _read_use(memory),
        others=tuple(others),
        free_bytes=limits.free_bytes,
        batch_size=_read_batch(model, experience),
    )
    update = snapshot.update
    if update is not None:
        measured = replace(
            needs,
            update_bytes=max(update.peak_bytes - update.kept_bytes, 0),
            settled_bytes=update.kept_bytes,
            update_source="measured",
            measured_batch_size=update.batch_size,
            gpu_bytes=update.gpu_peak_bytes,
            gpu_reserved_bytes=update.gpu_reserved_bytes,
        )
        return measured, notes
    weights = model.parameter_bytes if model else sum(one.parameter_bytes for one in snapshot.optimizers)
    batch_bytes = 4 * needs.batch_size * round(experience.row_bytes / experience.n_envs)
    notes.append("No update was measured. Networks are estimated from their weights and the batch")
    return replace(needs, settled_bytes=estimate_settled(weights), update_bytes=batch_bytes), notes


def _read_stored(snapshot: Snapshot, model: FoundModel | None, buffer: FoundBuffer | None) -> StoredSteps | None:
    """Return the measured needs of holdall's memory, plus the further arrays of sb3-contrib's rollout buffers."""
    stored = snapshot.stored
    if stored is None or model is None or buffer is None or model.algorithm not in {"MaskablePPO", "RecurrentPPO"}:
        return stored
    if not (buffer.rows and model.observation_space and model.action_space):
        return stored
    spaces = (space_from_dict(model.observation_space), space_from_dict(model.action_space))
    further = buffer.nbytes / (buffer.rows * buffer.n_envs) - count_step_bytes(*spaces)  # Masks, or hidden states.
    return replace(stored, raw_bytes=stored.raw_bytes + max(further, 0.0))


def _explain_missing_buffer(snapshot: Snapshot) -> str:
    """Return the reason why a command without a buffer cannot be planned."""
    last_line = snapshot.error.strip().splitlines()[-1] if snapshot.error and snapshot.error.strip() else ""
    if snapshot.allocation is not None:
        size = format_bytes(snapshot.allocation.nbytes)
        return f"The command could not allocate {size}, shape {snapshot.allocation.shape}. {last_line}"
    if last_line:
        return f"The command failed before it trained: {last_line}"
    if snapshot.is_ready:
        return f"The command was stopped by {snapshot.stopped_by}, and it has no buffer of 16 MiB or more."
    advice = " Pass a larger --timeout." if snapshot.trigger == "timeout" else ""
    return f"Nothing was found to plan: {snapshot.stopped_by}.{advice}"


def find_memory(snapshot: Snapshot, model: FoundModel | None) -> FoundMemory | None:
    """Return holdall's memory that belongs to the model, or the largest one."""
    if model is not None:
        return snapshot.find_memory(model)
    return max(snapshot.memories, key=lambda memory: memory.capacity, default=None)


def _find_environment(snapshot: Snapshot, model: FoundModel | None, n_envs: int) -> FoundEnvironment | None:
    """Return the environment that fills the buffer: the model's, or one with as many lanes as the buffer."""
    if model is not None:
        return model.environment
    return next((one for one in snapshot.environments if one.n_envs == n_envs), None)


def find_main_buffer(snapshot: Snapshot, model: FoundModel | None) -> FoundBuffer | None:
    """Return the model's buffer, or the largest one."""
    if model is not None:
        return snapshot.find_buffer(model)
    return max(snapshot.buffers, key=lambda buffer: buffer.nbytes, default=None)


def _read_buffer(buffer: FoundBuffer, model: FoundModel | None) -> Experience:
    """Return the layout of a library's buffer. Arrays without one entry per row do not grow with the capacity."""
    rows = buffer.rows or max(buffer.items_now, 1)
    fixed = sum(array.nbytes for array in buffer.arrays if not array.shape or array.shape[0] != rows)
    total = None if model is None else model.total_timesteps
    return Experience(
        name=buffer.owner,
        library="SB3" if buffer.is_sb3 else buffer.class_name.rpartition(".")[2] or "NumPy",
        rows=rows,
        n_envs=buffer.n_envs,
        row_bytes=(buffer.nbytes - fixed) / rows,
        fixed_bytes=fixed,
        largest_array_share=_find_largest_share(buffer),
        copied_row_bytes=buffer.flattened_bytes / rows,
        is_rollout=buffer.kind == "rollout",
        is_exact=buffer.is_exact,
        max_rows=None if total is None else -(-total // buffer.n_envs),
    )


def _find_largest_share(buffer: FoundBuffer) -> float:
    """Return the share of the largest array in a buffer's bytes; 0 for lists, whose items are allocated one by one."""
    if not buffer.nbytes or buffer.kind in {"deque", "list"}:
        return 0.0
    return max((array.nbytes for array in buffer.arrays), default=buffer.nbytes) / buffer.nbytes


def _read_memory(memory: FoundMemory, model: FoundModel | None, snapshot: Snapshot) -> Experience:
    """Return the plain layout that one of holdall's memories replaces."""
    rows = max(memory.capacity // memory.n_envs, 1)
    is_rollout = "Rollout" in memory.class_name
    each = _count_plain_bytes(memory, model, snapshot, is_rollout=is_rollout)
    is_copied = is_rollout and model is not None and min(rows, memory.n_envs) > 1
    total = None if model is None else model.total_timesteps
    return Experience(
        name=memory.owner,
        library="SB3" if model is not None else PLAIN_LAYOUT,
        rows=rows,
        n_envs=memory.n_envs,
        row_bytes=each * memory.n_envs,
        # A plain replay buffer has two arrays of observations.
        largest_array_share=1.0 if is_rollout else 0.5,
        copied_row_bytes=_find_largest_observation(model) * memory.n_envs if is_copied else 0.0,
        is_rollout=is_rollout,
        is_exact=model is not None and not is_rollout,
        max_rows=None if total is None else -(-total // memory.n_envs),
    )


def _count_full_bytes(memory: FoundMemory, model: FoundModel | None, snapshot: Snapshot, limits: MachineLimits) -> int:
    """Return the bytes that one of holdall's memories takes when it is full."""
    experience = _read_memory(memory, model, snapshot)
    stored = snapshot.stored
    needs = RunNeeds(experience, 0, stored=stored, holdall=_read_use(memory), free_bytes=limits.free_bytes)
    return max(needs.buffer_bytes(), memory.held_bytes)


def _count_plain_bytes(memory: FoundMemory, model: FoundModel | None, snapshot: Snapshot, *, is_rollout: bool) -> float:
    """Return the bytes of one transition in the plain layout of the library."""
    if model is not None and model.observation_space and model.action_space:
        count = count_step_bytes if is_rollout else count_transition_bytes
        return count(space_from_dict(model.observation_space), space_from_dict(model.action_space))
    if memory.transitions:
        return memory.plain_bytes / memory.transitions
    return snapshot.stored.raw_bytes if snapshot.stored else 0.0


def _find_largest_observation(model: FoundModel | None) -> int:
    """Return the bytes of the largest array of one observation, which Stable-Baselines3 copies to flatten a rollout."""
    if model is None or not model.observation_space:
        return 0
    return max(count_observation_bytes(space_from_dict(model.observation_space)))


def _read_use(memory: FoundMemory) -> HoldallUse:
    is_auto = memory.budget == "auto"
    budget = None if is_auto or memory.budget is None else parse_bytes(memory.budget, "budget")
    return HoldallUse(budget, is_auto, memory.prefer or "balanced", memory.spill_dir)


def _count_resident(buffer: FoundBuffer) -> int:
    """Return the bytes of a buffer that were in RAM when the command was stopped."""
    if buffer.arrays:
        return sum(array.resident_bytes for array in buffer.arrays if array.device == "cpu" and not array.is_on_disk)
    return buffer.nbytes_now


def _read_batch(model: FoundModel | None, experience: Experience) -> int:
    if model is None:
        return 0
    batch = model.settings.get("batch_size")
    if isinstance(batch, int) and batch:
        return min(batch, experience.transitions) if experience.is_rollout else batch
    return experience.transitions if experience.is_rollout else 0
