"""The plan of one run: measure what may be measured, calculate the rest, and name it in words and units.

In:  a spec, and how much may be measured.  Out: a `Plan`, for the terminal, JSON and HTML, and the texts that the
terminal and the HTML page share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdall.machine import Limit, disk, largest_mapping, memory_limits, shared_memory
from holdall.tools.plan import recommend
from holdall.tools.plan.phases import (
    FitVerdict,
    HeapGrowth,
    HoldallNeed,
    LimitCheck,
    MachineLimits,
    MeasuredCosts,
    PlanInputs,
    RunPhase,
    UpdateBytes,
    largest_phase,
    vram_phases,
)
from holdall.tools.plan.recommend import CapacityRow, ShareProfile, SuggestedChange
from holdall.tools.plan.spec import Spec
from holdall.tools.plan.subprocess_probe import run_probe

SCHEMA = "holdall.plan/1"
Answer = Mapping[str, Any]  # of a measurement in another process
_GB, _GIB, _MB, _MIB = 10**9, 2**30, 10**6, 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, what there is, and what would fit."""

    spec: Spec
    known: PlanInputs
    checks: tuple[LimitCheck, ...]
    phases: tuple[RunPhase, ...]  # with Stable-Baselines3's buffer
    holdall_phases: tuple[RunPhase, ...]  # with holdall's; empty where its need is not known
    vram: tuple[RunPhase, ...]
    table: tuple[CapacityRow, ...]
    profiles: tuple[ShareProfile, ...]
    largest: Mapping[str, int | None]
    change: SuggestedChange | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> FitVerdict:
        """The worst of all checks."""
        return max(check.verdict for check in self.checks)

    @property
    def peak(self) -> RunPhase:
        """The phase that decides, with the buffer that the run uses."""
        return largest_phase(self.holdall_phases if self.spec.uses_holdall and self.holdall_phases else self.phases)

    @property
    def code(self) -> str:
        """The lines to paste: the run as it is if it fits, or the cheapest change that makes it fit."""
        change = self.change or SuggestedChange("", "", self.spec)
        spec, compressed = change.spec, self._compresses(change.spec)
        return recommend.code_to_paste(spec, holdall=spec.uses_holdall, setup=change.setup, compressed=compressed)

    @property
    def title(self) -> str:
        """The run in one line."""
        spec = self.spec
        size = f"{spec.rollout_steps:,} steps" if spec.on_policy else f"{spec.capacity:,} transitions"
        envs = f"{spec.num_envs} environment{'s' if spec.num_envs > 1 else ''}"
        called = f"{spec.name}: " if spec.name else ""
        return f"{called}{spec.algorithm.name}, {spec.policy_name}, {size}, {envs}, batches of {spec.batch:,}"

    @property
    def size_word(self) -> str:
        """What the table's sizes count."""
        return "steps" if self.spec.on_policy else "capacity"

    def largest_sizes(self) -> Iterator[tuple[str, str]]:
        """Name the largest sizes that fit, each if nothing else changes."""
        names = (f"{self.size_word} with SB3's buffer", f"{self.size_word} with holdall's", "batch", "environments")
        for name, found in zip(names, self.largest.values(), strict=True):
            if found is not None:
                yield name, f"{found:,}" if found else "none"

    def _compresses(self, spec: Spec) -> bool:
        """Whether a run with holdall's buffer fits only if all closed segments are compressed."""
        need = self.known.need
        if need is None or need.compressed_bytes is None:
            return False
        return need.raw_need(spec.layout().transitions) > self.known.limits.limit_bytes // 2

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; docs/plan.md describes them."""
        layout = self.spec.layout()
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "exit_code": self.verdict.value,
            "spec": self.spec.as_dict(),
            "buffer": {
                "class": layout.buffer_class,
                "transitions": layout.transitions,
                "bytes": layout.nbytes,
                "bytes_per_transition": layout.bytes_per_transition,
                "arrays": [array.as_dict() for array in layout.arrays],
            },
            "holdall": None if self.known.need is None else asdict(self.known.need),
            "checks": [check.as_dict() for check in self.checks],
            "limits": [asdict(limit) for limit in self.known.limits.memory],
            "phases": [phase.as_dict() for phase in self.phases],
            "holdall_phases": [phase.as_dict() for phase in self.holdall_phases],
            "vram_phases": [phase.as_dict() for phase in self.vram],
            "table": [row.as_dict() for row in self.table],
            "profiles": [asdict(profile) for profile in self.profiles],
            "largest": dict(self.largest),
            "change": None if self.change is None else {"title": self.change.title, "why": self.change.why},
            "code": self.code,
            "notes": list(self.notes),
        }


def make_plan(
    spec: Spec,
    *,
    budget_bytes: int | None = None, memory_bytes: int | None = None, vram_bytes: int | None = None,
    networks: bool = True, probe_steps: int = 0, prefer: str = "balanced", checkpoint_dir: Path | None = None,
    environment: Answer | None = None, notes: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Measure what may be measured, and work out the rest.

    Args:
        budget_bytes: A limit beside those of this machine.
        memory_bytes: What another machine has free, in place of all limits of this one.
        vram_bytes: What another GPU has free.
        networks: Trace an update; without it, buffers and libraries alone are counted.
        probe_steps: Steps of real training and of the real environment; 0: none.
        environment: What `measure_environment` found, if an environment was made.
        notes: What else is known of the run.
    """
    said = list(notes)
    limits = _machine_limits(budget_bytes, memory_bytes, checkpoint_dir)
    with ThreadPoolExecutor(1) as background:
        base = background.submit(run_probe, "baseline", spec=spec, networks=networks)
        from holdall.tools.plan.measure_memory import need_from_spaces  # noqa: PLC0415 loads while the probe runs

        made_up = None if probe_steps and spec.env_id else need_from_spaces(spec)
        measured, vram = _measure(spec, base.result(), networks, probe_steps, environment, said)
    if vram_bytes is not None:
        vram = Limit("--vram", vram_bytes, vram_bytes)
    need = made_up or HoldallNeed(**run_probe("experience", spec=spec, steps=probe_steps, prefer=prefer))
    if made_up is not None and not spec.on_policy:
        said.append("holdall's need is without compression, whose ratio is only measured with --env and --probe")
    return plan_from_inputs(spec, PlanInputs(measured, replace(limits, vram=vram), need), said)


def _machine_limits(budget_bytes: int | None, memory_bytes: int | None, checkpoint_dir: Path | None) -> MachineLimits:
    """Return the limits of this machine, or those that the user gives of another."""
    if memory_bytes is None:
        limits, mapping = memory_limits(budget_bytes), largest_mapping()
        return MachineLimits(tuple(limits), None, disk(checkpoint_dir or Path.cwd()), shared_memory(), mapping)
    limits = [Limit("--memory", memory_bytes, memory_bytes)]
    if budget_bytes is not None:
        limits.append(Limit("--budget", budget_bytes, budget_bytes))
    return MachineLimits(tuple(sorted(limits, key=lambda limit: limit.free_bytes)))


def plan_from_inputs(spec: Spec, known: PlanInputs, notes: list[str]) -> Plan:
    """Work out every part of a plan from what is known."""
    has_need = known.need is not None
    uses = spec.uses_holdall and has_need
    change = None if known.fits(spec, holdall=uses) else recommend.cheapest_change(spec, known)
    return Plan(
        spec,
        known,
        tuple(known.checks(spec, holdall=uses)),
        tuple(known.phases(spec, holdall=False)),
        tuple(known.phases(spec, holdall=True)) if has_need else (),
        tuple(vram_phases(spec, known.measured)),
        tuple(recommend.capacity_table(spec, known)),
        tuple(recommend.share_profiles(spec, known)),
        {
            "sb3_size": recommend.largest_size(spec, known, holdall=False),
            "holdall_size": recommend.largest_size(spec, known, holdall=True) if has_need else None,
            "batch_size": recommend.largest_batch(spec, known),
            "num_envs": recommend.largest_num_envs(spec, known),
        },
        change,
        tuple(notes),
    )


def _measure(
    spec: Spec, base: Answer, networks: bool, probe_steps: int, environment: Answer | None, notes: list[str]
) -> tuple[MeasuredCosts, Limit | None]:
    probe = run_probe("update", spec=spec, steps=probe_steps) if probe_steps and networks else None
    vram = base.get("vram")
    if environment is None and not probe:
        notes.append("the environment itself is not counted: name it with --env")
    if not networks:
        notes.append("networks are not counted: leave --no-networks out")
    if spec.device.startswith("cuda") and vram is None:
        notes.append("no GPU was found here: its need is calculated; give its free memory with --vram")
    env = environment or {}
    traces: dict[str, Any] = {}
    if traced := base.get("traced"):
        once, twice = UpdateBytes(*traced["once"]), UpdateBytes(*traced["twice"])
        traces = {"traced_batch": traced["batch"], "traced": once, "traced_twice": twice}
    measured = MeasuredCosts(
        libraries=base.get("updated", base["imported"]),
        libraries_anonymous=base["imported_anonymous"],
        **traces,
        growth=_growth(*base["growth"], base["kept"]) if "growth" in base else None,
        env_first=env.get("first_bytes"),
        env_first_anonymous=env.get("first_anonymous_bytes", 0),
        env_each=env.get("each_bytes", 0),
        probe=probe,
        vram_context=vram["context"] if vram else None,
    )
    return measured, Limit("free GPU memory", vram["free"], vram["total"]) if vram else None


def _growth(batch: int, nbytes: int, traced: Sequence[int], kept: int) -> HeapGrowth:
    return HeapGrowth(batch, nbytes, UpdateBytes(*traced), kept)


def both_units(count: int) -> str:
    """Write bytes in decimal and binary units, both named: `12.79 GB = 11.91 GiB`."""
    if count >= _GB / 10:
        return f"{count / _GB:.2f} GB = {count / _GIB:.2f} GiB"
    return f"{count / _MB:.1f} MB = {count / _MIB:.1f} MiB"


def count_or_dash(size: int) -> str:
    """Write a count; none is a dash."""
    return f"{size:,}" if size else "-"
