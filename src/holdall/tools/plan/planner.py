"""The plan of one run: the needs that a probe measured, the limits of a machine, and the sizes that would fit.

In:  a `Snapshot`.  Out: a `Plan`, for the terminal and JSON, with the parts of the peak, the table of capacities, the
largest sizes and the cheapest change.
A suggested change is checked by the same arithmetic as the run itself, and is shown only if it fits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdall.errors import HoldallError
from holdall.machine import Limit, disk, largest_mapping, memory_limits
from holdall.tools.plan.algorithms import (
    ROLLOUTS_KEEP_DTYPES,
    count_observation_bytes,
    count_step_bytes,
    count_transition_bytes,
    parse_version,
)
from holdall.tools.plan.environments import has_images, space_from_dict
from holdall.tools.plan.needs import (
    PLAIN_LAYOUT,
    Experience,
    FitVerdict,
    HoldallUse,
    LimitCheck,
    MachineLimits,
    MemoryPart,
    RunNeeds,
    estimate_settled,
    is_unlimited,
    largest_count,
)
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import FoundBuffer, FoundEnvironment, FoundMemory, FoundModel, Snapshot, StoredSteps
from holdall.units import count_noun, format_bytes, parse_bytes

MEASURE_S = 10.0
TIMEOUT_S = 300.0
SCHEMA = "holdall.plan/2"
_TABLE_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the run's capacity for which the table has a row."""
_MIN_BUDGET = 256 * 2**20
"""Smallest budget that is suggested."""
_CODE_COLUMNS = 80
_MAX_ROWS_AFTER_FAILURE = 10_000
"""Capacity with which a run is measured if its own buffer could not be allocated."""
_CHANGES = ("buffer_size", "n_steps", "batch_size", "n_envs", "total_timesteps")
"""Settings that `--set` changes."""
_OTHER_NAMES = {"capacity": "buffer_size", "num_envs": "n_envs", "timesteps": "total_timesteps"}


class PlanError(HoldallError, RuntimeError):
    """A command cannot be planned: it has no buffer, or a change does not apply to it."""


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One capacity: the bytes of the library's and of holdall's buffer, and whether the whole run fits with each."""

    size: int
    plain_bytes: int
    plain_verdict: FitVerdict
    holdall_bytes: int | None
    holdall_verdict: FitVerdict | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {name: str(one) if isinstance(one, FitVerdict) else one for name, one in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """Something to change so that a run fits."""

    title: str
    why: str
    needs: RunNeeds
    use: HoldallUse | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that a run needs, the limits of the machine, and the sizes that would fit."""

    title: str
    snapshot: Snapshot
    needs: RunNeeds
    limits: MachineLimits
    checks: tuple[LimitCheck, ...]
    table: tuple[CapacityRow, ...]
    largest: Mapping[str, int | None]
    change: SuggestedChange | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> FitVerdict:
        """Return the worst of all checks."""
        return max(check.verdict for check in self.checks)

    @property
    def size_word(self) -> str:
        """Return the word for the sizes in the table: `steps` of a rollout, or `capacity`."""
        return _choose_size_word(self.needs)

    @property
    def code(self) -> str:
        """Return the lines to paste: the run with the cheapest change that makes it fit, if there is one."""
        if self.change is None:
            return write_code(self.snapshot, self.needs, self.needs.holdall)
        return write_code(self.snapshot, self.change.needs, self.change.use)

    def largest_sizes(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each size and the largest value that fits if nothing else changes."""
        for name, count in self.largest.items():
            if count is not None:
                yield name, format_count(count)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; docs/plan.md describes them."""
        experience = self.needs.experience
        uses_holdall = self.needs.holdall is not None
        return {
            "schema": SCHEMA,
            "title": self.title,
            "verdict": str(self.verdict),
            "exit_code": self.verdict.value,
            "buffer": {
                "name": experience.name,
                "library": "holdall" if uses_holdall else experience.library,
                "transitions": experience.transitions,
                "rows": experience.rows,
                "num_envs": experience.n_envs,
                "plain_bytes": experience.allocated_bytes,
                "is_exact": experience.is_exact,
            },
            "need_bytes": self.needs.need_bytes(self.needs.holdall),
            "most_bytes": self.needs.most_bytes(self.needs.holdall),
            "parts": [asdict(part) for part in self.needs.parts(self.needs.holdall)],
            "holdall_parts": [asdict(part) for part in self.needs.parts(self.needs.candidate)],
            "stored": None if self.needs.stored is None else asdict(self.needs.stored),
            "checks": [check.as_dict() for check in self.checks],
            "limits": self.limits.as_list(),
            "table": [row.as_dict() for row in self.table],
            "largest": dict(self.largest),
            "change": None if self.change is None else {"title": self.change.title, "why": self.change.why},
            "code": self.code,
            "stopped_by": self.snapshot.stopped_by,
            "notes": list(self.notes),
        }


# ---------------------------------------------------------------- from a command to a plan


def plan_command(
    command: Sequence[str],
    changes: Mapping[str, int] | None = None,
    limits: MachineLimits | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    cwd: str | os.PathLike[str] | None = None,
    is_noise: bool = False,
) -> Plan:
    """Run `command` until it is about to train, measure it, and plan it.

    Args:
        changes: Other values to plan with: `buffer_size`, `n_steps`, `batch_size`, `n_envs`, `total_timesteps`.
        limits: Limits that the run must fit into; those of this machine by default.
        is_noise: Whether the command's observations are made up.
    """
    snapshot = probe(command, timeout_s, measure_s=MEASURE_S, cwd=cwd)
    changes = dict(changes or {})
    if snapshot.allocation is not None and snapshot.models and snapshot.models[0].settings.get("buffer_size"):
        # The buffer could not be allocated. The run is measured with a smaller one and planned with the real size.
        changes = {"buffer_size": int(snapshot.models[0].settings["buffer_size"])} | changes
        note = f"{snapshot.stopped_by}. The run was measured with a buffer of {_MAX_ROWS_AFTER_FAILURE:,} transitions"
        snapshot = probe(command, timeout_s, measure_s=MEASURE_S, cwd=cwd, max_buffer_size=_MAX_ROWS_AFTER_FAILURE)
        snapshot = replace(snapshot, notes=(note, *snapshot.notes))
    return plan_snapshot(snapshot, changes, limits, is_noise=is_noise)


def plan_settings(
    settings: Mapping[str, Any], limits: MachineLimits | None = None, changes: Mapping[str, int] | None = None
) -> Plan:
    """Plan a run that options or a file describe: a stand-in of it is run, measured and planned.

    The stand-in's buffer is small, so that it can always be allocated; the plan has the real size.
    """
    from holdall.tools.plan.stand_in import describe_run  # noqa: PLC0415  Only runs without a command need it.

    run = describe_run(settings)
    command = [sys.executable, "-P", "-m", "holdall.tools.plan.stand_in", json.dumps(run.arguments)]
    plan = plan_command(command, run.changes | dict(changes or {}), limits, is_noise=run.is_noise)
    notes = [*run.notes, *plan.notes]
    if str(settings.get("device", "")).startswith("cuda") and plan.snapshot.models[0].device == "cpu":
        notes.append("There is no GPU here. The update was measured on the CPU, and the GPU's need is not known")
    return replace(plan, title=f"{run.name}: {plan.title}" if run.name else plan.title, notes=tuple(notes))


def find_limits(
    budget_bytes: int | None = None,
    memory_bytes: int | None = None,
    gpu_bytes: int | None = None,
    directory: Path | None = None,
) -> MachineLimits:
    """Return the limits of this machine, or of another machine if the user gives its free memory.

    Args:
        budget_bytes: A further limit, in addition to the machine's own.
        memory_bytes: Free memory of another machine.
        gpu_bytes: Free memory of a GPU.
    """
    gpu = None if gpu_bytes is None else Limit("--vram", gpu_bytes, gpu_bytes)
    if memory_bytes is None:
        memory = memory_limits(budget_bytes)
        return MachineLimits(tuple(memory), gpu, disk(directory or Path.cwd()), largest_mapping())
    memory = [Limit("--memory", memory_bytes, memory_bytes)]
    if budget_bytes is not None:
        memory.append(Limit("--budget", budget_bytes, budget_bytes))
    return MachineLimits(tuple(sorted(memory, key=lambda limit: limit.free_bytes)), gpu)


def plan_snapshot(
    snapshot: Snapshot,
    changes: Mapping[str, int] | None = None,
    limits: MachineLimits | None = None,
    *,
    is_noise: bool = False,
) -> Plan:
    """Plan a run from the report of a probe."""
    limits = limits or find_limits()
    needs, notes = read_needs(snapshot, limits)
    needs = replace(needs, is_noise=is_noise)
    for name, value in (changes or {}).items():
        needs = change_needs(needs, name, value)
    use = needs.holdall
    checks = tuple(needs.checks(use, limits))
    fits = all(check.verdict is FitVerdict.FITS for check in checks)
    change = None if fits else find_change(snapshot, needs, limits)
    size_word = _choose_size_word(needs)
    has_stored = needs.stored is not None
    largest: dict[str, int | None] = {
        f"{size_word} with {needs.experience.layout}": needs.largest_size(None, limits),
        f"{size_word} with holdall's": needs.largest_size(needs.candidate, limits) if has_stored else None,
        "batch": largest_batch(needs, limits),
    }
    return Plan(
        title=_write_title(snapshot, needs),
        snapshot=snapshot,
        needs=needs,
        limits=limits,
        checks=checks,
        table=tuple(_make_table(needs, limits)),
        largest=largest,
        change=change,
        notes=(*notes, *_find_notes(snapshot, needs)),
    )


def change_needs(needs: RunNeeds, name: str, value: int) -> RunNeeds:
    """Return the run with one setting changed."""
    name = _OTHER_NAMES.get(name, name)
    experience = needs.experience
    if (name == "n_steps" and experience.is_rollout) or (name == "buffer_size" and not experience.is_rollout):
        return needs.resized(value)
    if name == "batch_size":
        return needs.with_batch(value)
    if name == "n_envs":
        return needs.with_envs(value)
    if name == "total_timesteps":
        return replace(needs, experience=replace(experience, max_rows=-(-value // experience.n_envs)))
    kind = "a rollout, which has n_steps" if experience.is_rollout else "a replay buffer, which has buffer_size"
    raise PlanError(f"--set {name} does not apply to this run. It has {kind}. Known names: {', '.join(_CHANGES)}.")


# ---------------------------------------------------------------- from a snapshot to needs


def read_needs(snapshot: Snapshot, limits: MachineLimits) -> tuple[RunNeeds, list[str]]:
    """Return the needs of the run, and notes about figures that were not measured."""
    model = snapshot.models[0] if snapshot.models else None
    memory = _find_memory(snapshot, model)
    buffer = None if memory is not None else _find_main_buffer(snapshot, model)
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


def _find_memory(snapshot: Snapshot, model: FoundModel | None) -> FoundMemory | None:
    """Return holdall's memory that belongs to the model, or the largest one."""
    if model is not None:
        return snapshot.find_memory(model)
    return max(snapshot.memories, key=lambda memory: memory.capacity, default=None)


def _find_environment(snapshot: Snapshot, model: FoundModel | None, n_envs: int) -> FoundEnvironment | None:
    """Return the environment that fills the buffer: the model's, or one with as many lanes as the buffer."""
    if model is not None:
        return model.environment
    return next((one for one in snapshot.environments if one.n_envs == n_envs), None)


def _find_main_buffer(snapshot: Snapshot, model: FoundModel | None) -> FoundBuffer | None:
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
    needs = RunNeeds(experience, 0, stored=snapshot.stored, free_bytes=limits.free_bytes)
    return max(needs.holdall_bytes(_read_use(memory)), memory.held_bytes)


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


# ---------------------------------------------------------------- titles, tables and suggested changes


def _choose_size_word(needs: RunNeeds) -> str:
    return "steps" if needs.experience.is_rollout else "capacity"


def _write_title(snapshot: Snapshot, needs: RunNeeds) -> str:
    """Return the run in one line."""
    experience = needs.experience
    if experience.is_rollout:
        size = f"rollouts of {count_noun(experience.rows, 'step')}"
    else:
        size = count_noun(experience.transitions, "transition")
    words = [snapshot.models[0].algorithm if snapshot.models else experience.name, size]
    words.append(count_noun(experience.n_envs, "environment"))
    if needs.batch_size:
        words.append(f"batches of {needs.batch_size:,}")
    return ", ".join(words)


def _make_table(needs: RunNeeds, limits: MachineLimits) -> Iterator[CapacityRow]:
    """Compare the library's and holdall's buffer at the run's capacity and at smaller ones."""
    has_stored = needs.stored is not None
    sizes = {max(int(needs.experience.size * share), 1) for share in _TABLE_SHARES}
    for size in sorted(sizes, reverse=True):
        run = needs.resized(size)
        full_run = replace(run, experience=replace(run.experience, max_rows=None))
        yield CapacityRow(
            size=size,
            plain_bytes=run.experience.allocated_bytes,
            plain_verdict=run.verdict(None, limits),
            holdall_bytes=full_run.holdall_bytes(run.candidate) if has_stored else None,
            holdall_verdict=run.verdict(run.candidate, limits) if has_stored else None,
        )


def largest_batch(needs: RunNeeds, limits: MachineLimits) -> int | None:
    """Return the largest batch that fits if nothing else changes, or None if no update was measured."""
    if not needs.batch_size or not needs.measured_batch_size or not needs.update_bytes:
        return None
    top = needs.experience.transitions
    return largest_count(lambda batch: needs.with_batch(batch).verdict(needs.holdall, limits) is FitVerdict.FITS, top)


def find_change(snapshot: Snapshot, needs: RunNeeds, limits: MachineLimits) -> SuggestedChange | None:
    """Return the first change that makes the run fit. Changes that do not alter the training are tried first."""
    for change in _suggest_changes(snapshot, needs, limits):
        if change.needs.verdict(change.use, limits) is FitVerdict.FITS:
            return change
    return None


def _suggest_changes(snapshot: Snapshot, needs: RunNeeds, limits: MachineLimits) -> Iterator[SuggestedChange]:
    experience = needs.experience
    if experience.filled_rows < experience.rows:
        filled = experience.filled_rows * experience.n_envs
        why = f"the run ends after {count_noun(filled, 'step')}, so this buffer keeps all of them"
        yield SuggestedChange(f"a capacity of {filled:,}", why, needs.resized(filled), needs.holdall)
    if needs.holdall is None and experience.is_rollout and _stores_images_as_floats(snapshot):
        smaller = replace(
            experience, row_bytes=experience.row_bytes / 4, copied_row_bytes=experience.copied_row_bytes / 4
        )
        why = "rollouts keep the dtype of images from 2.7.1 on, so they are four times smaller"
        yield SuggestedChange("upgrade Stable-Baselines3", why, replace(needs, experience=smaller), needs.holdall)
    if needs.stored is not None:
        if needs.holdall is None:
            why = "each frame is stored once and compressed, and the samples are the same, bit for bit"
            yield SuggestedChange("keep the experience in holdall's buffer", why, needs, HoldallUse())
        elif not experience.is_rollout and (needs.holdall.is_auto or needs.holdall.budget_bytes is not None):
            why = "all data is compressed from the start, and the samples are the same, bit for bit"
            use = HoldallUse(prefer=needs.holdall.prefer)
            yield SuggestedChange("budget=None for holdall's buffer", why, needs, use)
        if not experience.is_rollout:
            yield from _suggest_budget(needs, limits.free_bytes)
    size = round_down(needs.largest_size(needs.holdall, limits))
    if 0 < size < experience.size:
        name = f"rollouts of {size:,} steps" if experience.is_rollout else f"a capacity of {size:,}"
        why = f"the largest that fits, of {experience.size:,}"
        yield SuggestedChange(name, why, needs.resized(size), needs.holdall)
    batch = largest_batch(needs, limits)
    if batch:
        power = 1 << (batch.bit_length() - 1)
        why = f"activations grow with the batch, of {needs.batch_size:,}"
        yield SuggestedChange(f"batches of {power:,}", why, needs.with_batch(power), needs.holdall)
    n_envs = experience.n_envs
    while n_envs > 1:
        n_envs //= 2
        why = "each environment takes memory of its own"
        yield SuggestedChange(count_noun(n_envs, "environment"), why, needs.with_envs(n_envs), needs.holdall)


def _stores_images_as_floats(snapshot: Snapshot) -> bool:
    """Return whether rollouts of this version of Stable-Baselines3 store the model's images as float32."""
    version = snapshot.versions.get("stable_baselines3")
    if version is None or parse_version(version) >= ROLLOUTS_KEEP_DTYPES:
        return False
    space = snapshot.models[0].observation_space if snapshot.models else None
    return space is not None and has_images(space_from_dict(space))


def _suggest_budget(needs: RunNeeds, free: int) -> Iterator[SuggestedChange]:
    """Suggest a budget and a disk tier that together hold every transition."""
    room = free - needs.most_bytes(HoldallUse(budget_bytes=0, spill_dir="disk"))
    unit = 2**30 // 10 if room >= 2**30 else 2**20
    budget = int(room / 1.2) // unit * unit  # The bound of holdall's part is up to `MARGIN` above the budget.
    if budget < _MIN_BUDGET:
        return
    use = HoldallUse(budget, prefer="memory", spill_dir="/path/on/disk")
    title = f"holdall's buffer with budget={format_bytes(budget)!r}, prefer='memory' and a spill_dir"
    why = f"all {needs.experience.size:,} transitions stay, {format_bytes(needs.disk_bytes(use))} of them on disk"
    yield SuggestedChange(title, why, needs, use)


def round_down(count: int) -> int:
    """Return a number with two leading digits."""
    unit: int = 10 ** max(len(str(count)) - 2, 0)
    return count // unit * unit


def _find_notes(snapshot: Snapshot, needs: RunNeeds) -> Iterator[str]:
    experience = needs.experience
    if not snapshot.is_ready:
        yield f"The command was not about to train when it was stopped: {snapshot.stopped_by}"
    if experience.max_rows is not None and not experience.is_rollout and experience.max_rows < experience.rows:
        steps = experience.max_rows * experience.n_envs
        yield f"The run ends after {count_noun(steps, 'step')}, so its buffer is never fuller"
    if needs.stored is not None and needs.stored.compressed_bytes is None and not experience.is_rollout:
        yield "Compression was not measured, so holdall's need is that of uncompressed data"
    if needs.measured_envs and experience.n_envs > needs.measured_envs:
        yield "Memory that further environments take outside Python, such as that of a simulator, is not counted"
    use = needs.holdall
    if use is not None and needs.held_transitions(use) < experience.transitions:
        held = format_count(round_down(needs.held_transitions(use)))
        yield f"The budget holds about {held} transitions of this data. Pass spill_dir to keep all of them"
    yield from (note.rstrip(".") for note in snapshot.notes)


def write_code(snapshot: Snapshot, needs: RunNeeds, use: HoldallUse | None) -> str:
    """Return the lines to paste, at most 80 characters wide where that is possible."""
    if not snapshot.models:
        return _write_buffer_code(snapshot, needs, use)
    model = snapshot.models[0]
    has_batch = bool(model.settings.get("batch_size"))
    is_her = "Her" in str(model.settings.get("replay_buffer_class", ""))
    return write_model_code(model.algorithm, name_policy(model), needs, use, has_batch=has_batch, is_her=is_her)


def write_model_code(
    algorithm: str,
    policy: str,
    needs: RunNeeds,
    use: HoldallUse | None,
    *,
    has_batch: bool = True,
    is_her: bool = False,
) -> str:
    """Return the lines that make a model of Stable-Baselines3 with this buffer."""
    experience = needs.experience
    settings = [f"n_steps={experience.rows}" if experience.is_rollout else f"buffer_size={experience.size:_}"]
    if needs.batch_size and has_batch:
        settings.append(f"batch_size={needs.batch_size}")
    lines = []
    last = []
    if use is not None and algorithm == "RecurrentPPO":  # It has no argument for the class of its buffer.
        lines.append("from holdall.sb3.contrib import equip")
        last.append("equip(model)")
    elif use is not None:
        kind = "rollout" if experience.is_rollout else "replay"
        name = "HerReplayBuffer" if is_her else f"{kind.title()}Buffer"
        module = "holdall.sb3"
        if algorithm == "MaskablePPO":
            module = "holdall.sb3.contrib"
            name = "MaskableDictRolloutBuffer" if policy == "MultiInputPolicy" else "MaskableRolloutBuffer"
        lines.append(f"from {module} import {name}")
        settings.append(f"{kind}_buffer_class={name}")
        kwargs = _write_use(use) if kind == "replay" else {}
        if kwargs:
            text = ", ".join(f'"{name}": {_write_value(value)}' for name, value in kwargs.items())
            settings.append(f"replay_buffer_kwargs={{{text}}}")
    policy = json.dumps(policy)
    line = f"model = {algorithm}({', '.join([policy, 'env', *settings])})"
    if len(line) > _CODE_COLUMNS:
        arguments = [f"{policy}, env", *settings]
        line = "\n    ".join([f"model = {algorithm}(", *(f"{part}," for part in arguments)]) + "\n)"
    return "\n".join([*lines, line, *last])


def _write_use(use: HoldallUse) -> dict[str, Any]:
    """Return the keyword arguments that give holdall's memory these settings."""
    if use.is_auto:
        return {}
    if use.budget_bytes is None:
        return {"budget": None} if use.prefer == "balanced" else {"budget": None, "prefer": use.prefer}
    kwargs: dict[str, Any] = {"budget": format_bytes(use.budget_bytes), "prefer": use.prefer}
    if use.spill_dir is not None:
        kwargs["spill_dir"] = use.spill_dir
    return kwargs


def _write_value(value: Any) -> str:
    """Return a text, a number or None as Python code."""
    return "None" if value is None else json.dumps(value)


def _write_buffer_code(snapshot: Snapshot, needs: RunNeeds, use: HoldallUse | None) -> str:
    """Return the lines that make a buffer of a loop without a model."""
    experience = needs.experience
    if use is None:
        return f"# {experience.name}: a capacity of {experience.size:,}"
    found = _find_memory(snapshot, None) or _find_main_buffer(snapshot, None)
    library = "" if found is None else found.class_name
    settings = {} if experience.is_rollout else _write_use(use)
    written = [f"{name}={_write_value(value)}" for name, value in settings.items()]
    if library.startswith(("torchrl.", "holdall.torchrl.")):
        settings_text = ", ".join([f"{experience.size:_}", *written])
        return f"from holdall.torchrl import HoldallStorage\nstorage = HoldallStorage({settings_text})"
    if library.startswith(("stable_baselines3.", "cleanrl_utils.", "holdall.cleanrl.")) and not experience.is_rollout:
        lines = ["from holdall.cleanrl import ReplayBuffer", f"{experience.name} = ReplayBuffer("]
        arguments = [f"{experience.size:_},", "...,  # the other arguments stay", *(f"{one}," for one in written)]
        return "\n    ".join(["\n".join(lines), *arguments]) + "\n)"
    kind = "RolloutMemory" if experience.is_rollout else "ReplayMemory"
    size = f"num_steps={experience.rows}" if experience.is_rollout else f"capacity={experience.size:_}"
    arguments = ["observation_space", "action_space", size, f"num_envs={experience.n_envs}", *written]
    return "\n    ".join([f"memory = holdall.{kind}(", *(f"{one}," for one in arguments)]) + "\n)"


def name_policy(model: FoundModel) -> str:
    """Return the policy as users write it."""
    space = model.observation_space or {}
    if space.get("kind") == "dict":
        name = "MultiInputPolicy"
    else:
        name = "CnnPolicy" if "Cnn" in model.policy_class or len(space.get("shape", ())) == 3 else "MlpPolicy"
    return name.replace("Policy", "LstmPolicy") if model.algorithm == "RecurrentPPO" else name


def format_count(count: int) -> str:
    """Return a count as text: `none` for 0, and `any` if nothing limits it."""
    if is_unlimited(count):
        return "any"
    return f"{count:,}" if count else "none"
