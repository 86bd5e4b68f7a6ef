"""The plan of one run: the needs that a probe measured, the limits of a machine, and the sizes that would fit.

In:  a `Snapshot`.  Out: a `Plan`, for the terminal and JSON, with the parts of the peak, the table of capacities, the
largest sizes and a suggested change: the first one that fits, in a fixed order.
A suggested change is checked by the same arithmetic as the run itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdall.machine import Limit, disk, largest_mapping, memory_limits
from holdall.tools.plan.algorithms import ROLLOUTS_KEEP_DTYPES, parse_version
from holdall.tools.plan.code import write_code
from holdall.tools.plan.environments import has_images, space_from_dict
from holdall.tools.plan.measured import PlanError, read_needs
from holdall.tools.plan.needs import (
    FitVerdict,
    HoldallUse,
    LimitCheck,
    MachineLimits,
    RunNeeds,
    is_unlimited,
    largest_count,
)
from holdall.tools.plan.settings import SETTINGS, find_setting, list_changeable
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot
from holdall.units import count_noun, format_bytes

MEASURE_S = 10.0
TIMEOUT_S = 300.0
SCHEMA = "holdall.plan/2"
_TABLE_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the run's capacity for which the table has a row."""
_MIN_BUDGET = 256 * 2**20
"""Smallest budget that is suggested."""
_ROOM_PER_BUDGET = 1.2
"""Free bytes per byte of a suggested budget: `1 + MARGIN` for its upper bound, and a reserve, because the changed run
is measured anew."""
_MAX_ROWS_AFTER_FAILURE = 10_000
"""Capacity with which a run is measured if its own buffer could not be allocated."""


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
    """The run after the change."""


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
        """Return the lines to paste: the run with the suggested change, if there is one."""
        return write_code(self.snapshot, self.needs if self.change is None else self.change.needs)

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
            "need_bytes": self.needs.need_bytes(),
            "most_bytes": self.needs.most_bytes(),
            "parts": [asdict(part) for part in self.needs.parts()],
            "holdall_parts": [asdict(part) for part in self.needs.with_holdall_buffer().parts()],
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
        changes: Other values to plan with, by the name of a setting with `can_change`, such as `buffer_size`.
        limits: Limits that the run must fit into; those of this machine by default.
        is_noise: Whether the command's observations are made up.
    """
    snapshot = probe(command, timeout_s, measure_s=MEASURE_S, cwd=cwd)
    changes = dict(changes or {})
    if snapshot.allocation is not None and snapshot.models and snapshot.models[0].settings.get("buffer_size"):
        # The buffer could not be allocated. The run is measured with a smaller one and planned with the real size.
        changes = {"capacity": int(snapshot.models[0].settings["buffer_size"])} | changes
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
        gpu_bytes: Free memory of a GPU. None: the GPU is not checked.
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
    checks = tuple(needs.checks(limits))
    fits = all(check.verdict is FitVerdict.FITS for check in checks)
    change = None if fits else find_change(snapshot, needs, limits)
    size_word = _choose_size_word(needs)
    has_stored = needs.stored is not None
    largest: dict[str, int | None] = {
        f"{size_word} with {needs.experience.layout}": needs.with_library_buffer().largest_size(limits),
        f"{size_word} with holdall's": needs.with_holdall_buffer().largest_size(limits) if has_stored else None,
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
    """Return the run with one setting changed. `name` is any name of a setting that `--set` accepts."""
    setting = find_setting(name)
    if setting is None or not setting.can_change:
        raise PlanError(f"--set {name} is unknown. Use one of {list_changeable()}.")
    if value < 1:
        raise PlanError(f"--set {name} ({value}) must be at least 1.")
    experience = needs.experience
    if setting.name == "batch_size":
        return needs.with_batch(value)
    if setting.name == "num_envs":
        return needs.with_envs(value)
    if setting.name == "total_timesteps":
        return replace(needs, experience=replace(experience, max_rows=-(-value // experience.n_envs)))
    own_size, kind = ("n_steps", "a rollout") if experience.is_rollout else ("capacity", "a replay buffer")
    if setting.name == own_size:
        return needs.resized(value)
    words = " or ".join(SETTINGS[own_size].names)
    raise PlanError(f"--set {name} does not apply to this run. It has {kind}. Set {words} instead.")


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
        plain = run.with_library_buffer()
        held = run.with_holdall_buffer()
        full = replace(held, experience=replace(held.experience, max_rows=None))
        yield CapacityRow(
            size=size,
            plain_bytes=plain.experience.allocated_bytes,
            plain_verdict=plain.verdict(limits),
            holdall_bytes=full.buffer_bytes() if has_stored else None,
            holdall_verdict=held.verdict(limits) if has_stored else None,
        )


def largest_batch(needs: RunNeeds, limits: MachineLimits) -> int | None:
    """Return the largest batch that fits if nothing else changes, or None if no update was measured."""
    if not needs.batch_size or not needs.measured_batch_size or not needs.update_bytes:
        return None
    top = needs.experience.transitions
    return largest_count(lambda batch: needs.with_batch(batch).verdict(limits) is FitVerdict.FITS, top)


def find_change(snapshot: Snapshot, needs: RunNeeds, limits: MachineLimits) -> SuggestedChange | None:
    """Return the first change that makes the run fit. Changes that do not alter the training are tried first."""
    for change in _suggest_changes(snapshot, needs, limits):
        if change.needs.verdict(limits) is FitVerdict.FITS:
            return change
    return None


def _suggest_changes(snapshot: Snapshot, needs: RunNeeds, limits: MachineLimits) -> Iterator[SuggestedChange]:
    experience = needs.experience
    if experience.filled_rows < experience.rows:
        filled = experience.filled_rows * experience.n_envs
        why = f"the run ends after {count_noun(filled, 'step')}, so this buffer keeps all of them"
        yield SuggestedChange(f"a capacity of {filled:,}", why, needs.resized(filled))
    if needs.holdall is None and experience.is_rollout and _stores_images_as_floats(snapshot):
        smaller = replace(
            experience, row_bytes=experience.row_bytes / 4, copied_row_bytes=experience.copied_row_bytes / 4
        )
        why = "Stable-Baselines3 2.7.1 and later store the images of rollouts as uint8, a quarter of the bytes"
        yield SuggestedChange("upgrade Stable-Baselines3", why, replace(needs, experience=smaller))
    if needs.stored is not None:
        if needs.holdall is None:
            why = "each frame is stored once and compressed, and the samples are the same, bit for bit"
            yield SuggestedChange("keep the experience in holdall's buffer", why, needs.with_holdall_buffer())
        elif not experience.is_rollout and (needs.holdall.is_auto or needs.holdall.budget_bytes is not None):
            why = "all data is compressed from the start, and the samples are the same, bit for bit"
            unlimited = needs.with_holdall_buffer(HoldallUse(prefer=needs.holdall.prefer))
            yield SuggestedChange("budget=None for holdall's buffer", why, unlimited)
        if not experience.is_rollout:
            yield from _suggest_budget(needs, limits.free_bytes)
    size = round_down(needs.largest_size(limits))
    if 0 < size < experience.size:
        if experience.is_rollout:
            name = f"rollouts of {size:,} steps"
            why = f"the longest rollouts that fit; they have {experience.size:,} steps now"
        else:
            name = f"a capacity of {size:,}"
            why = f"the largest capacity that fits; it is {experience.size:,} now"
        yield SuggestedChange(name, why, needs.resized(size))
    batch = largest_batch(needs, limits)
    if batch:
        power = 1 << (batch.bit_length() - 1)
        why = f"activations grow with the batch, which is {needs.batch_size:,} now"
        yield SuggestedChange(f"batches of {power:,}", why, needs.with_batch(power))
    n_envs = experience.n_envs
    while n_envs > 1:
        n_envs //= 2
        why = "each environment takes memory of its own"
        yield SuggestedChange(count_noun(n_envs, "environment"), why, needs.with_envs(n_envs))


def _stores_images_as_floats(snapshot: Snapshot) -> bool:
    """Return whether rollouts of this version of Stable-Baselines3 store the model's images as float32."""
    version = snapshot.versions.get("stable_baselines3")
    if version is None or parse_version(version) >= ROLLOUTS_KEEP_DTYPES:
        return False
    space = snapshot.models[0].observation_space if snapshot.models else None
    return space is not None and has_images(space_from_dict(space))


def _suggest_budget(needs: RunNeeds, free: int) -> Iterator[SuggestedChange]:
    """Suggest a budget and a disk tier that together hold every transition."""
    nothing_held = needs.with_holdall_buffer(HoldallUse(budget_bytes=0, spill_dir="disk"))
    room = free - nothing_held.most_bytes()
    unit = 2**30 // 10 if room >= 2**30 else 2**20
    budget = int(room / _ROOM_PER_BUDGET) // unit * unit
    if budget < _MIN_BUDGET:
        return
    bounded = needs.with_holdall_buffer(HoldallUse(budget, prefer="memory", spill_dir="/path/on/disk"))
    title = f"holdall's buffer with budget={format_bytes(budget)!r}, prefer='memory' and a spill_dir"
    why = f"all {needs.experience.size:,} transitions stay, {format_bytes(bounded.disk_bytes())} of them on disk"
    yield SuggestedChange(title, why, bounded)


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
        yield f"The run ends after {count_noun(steps, 'step')}, so its buffer never holds more than that"
    if needs.stored is not None and needs.stored.compressed_bytes is None and not experience.is_rollout:
        yield "Compression was not measured, so holdall's need is that of uncompressed data"
    if needs.measured_envs and experience.n_envs > needs.measured_envs:
        yield "Memory that further environments take outside Python, such as that of a simulator, is not counted"
    if needs.gpu_reserved_bytes and needs.measured_batch_size:
        batch = f"batches of {needs.measured_batch_size:,}"
        yield f"The GPU's need was measured with {batch}. Its need with other batches is not known"
    if needs.held_transitions() < experience.transitions:
        held = format_count(round_down(needs.held_transitions()))
        yield f"The budget holds about {held} transitions of this data. Pass spill_dir to keep all of them"
    yield from (note.rstrip(".") for note in snapshot.notes)


def format_count(count: int) -> str:
    """Return a count as text: `none` for 0, and `any` if nothing limits it."""
    if is_unlimited(count):
        return "any"
    return f"{count:,}" if count else "none"
