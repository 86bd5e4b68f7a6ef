"""The plan of one run: measure what may be measured, calculate the rest, and find what would fit.

In:  a spec, and how much may be measured.  Out: a `Plan`, for the terminal, JSON and HTML, with the table of
capacities, the profiles, the largest sizes and the cheapest change.
Invariant: every recommendation went through the same arithmetic as the run itself, and fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdall.codec.choice import PREFERENCES
from holdall.machine import Limit, disk, largest_mapping, memory_limits, shared_memory
from holdall.schema import require_choice, require_count
from holdall.tools.plan import phases
from holdall.tools.plan.environments import run_probe
from holdall.tools.plan.phases import FitVerdict, LimitCheck, MachineLimits, PlanInputs, RunPhase, largest_phase
from holdall.tools.plan.spec import ROLLOUTS_KEEP_DTYPES, Spec, installed_version
from holdall.units import counted, format_bytes

_LARGEST_SIZE = 1 << 40
_CODE_COLUMNS = 80
_GB, _GIB, _MB, _MIB = 10**9, 2**30, 10**6, 2**20
_LEAST_BUDGET = 256 * _MIB  # a memory works in segments of some megabytes each
PROFILES = {
    "memory-efficient": (0.25, 1), "fast": (0.4, 1), "balanced": (0.55, 1), "quality": (0.7, 1),
    "aggressive": (0.55, 4),
}  # fmt: skip
"""Share of this machine's limit that the whole run may take, and by how much the batch is larger."""
_TABLE_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One capacity: what either buffer takes, and whether the whole run fits."""

    size: int  # capacity, or steps of a rollout
    sb3_bytes: int
    sb3_verdict: FitVerdict
    holdall_bytes: int | None
    holdall_verdict: FitVerdict | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {name: str(one) if isinstance(one, FitVerdict) else one for name, one in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ShareProfile:
    """A share of this machine's limit, and what fits into it."""

    name: str
    share: float
    limit_bytes: int
    batch_size: int
    sb3_size: int  # 0: nothing fits
    holdall_size: int | None


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """Something to change so that a run fits."""

    title: str
    why: str
    spec: Spec  # the changed run
    setup: str = ""  # a line before the model is made


def size_of(spec: Spec) -> int:
    """Return the size that memory is spent on: a replay's capacity or a rollout's steps."""
    return spec.rollout_steps if spec.on_policy else spec.capacity


def resized(spec: Spec, size: int) -> Spec:
    """Return the run with another capacity, or other steps of a rollout."""
    return spec.but(n_steps=size) if spec.on_policy else spec.but(capacity=size)


def capacity_table(spec: Spec, known: PlanInputs) -> list[CapacityRow]:
    """Lay capacities beside each other, from the one that was asked for down."""
    rows = []
    for size in sorted({max(int(size_of(spec) * share), 1) for share in _TABLE_SHARES}, reverse=True):
        one = resized(spec, size)
        layout = one.layout()
        ours: tuple[int | None, FitVerdict | None] = (None, None)
        if known.need is not None:
            ours = known.need.need(layout.transitions), known.verdict(one, holdall=True)
        rows.append(CapacityRow(size, layout.nbytes, known.verdict(one, holdall=False), *ours))
    return rows


def share_profiles(spec: Spec, known: PlanInputs) -> list[ShareProfile]:
    """Fill each profile's share of the limit."""
    found = []
    for name, (share, times) in PROFILES.items():
        limit = int(known.limits.limit_bytes * share)
        inside = known.within(limit)
        wanted = spec.but(batch_size=spec.batch * times) if times > 1 and spec.algorithm.batch_size else spec
        holdall = largest_size(wanted, inside, holdall=True) if known.need is not None else None
        sb3 = largest_size(wanted, inside, holdall=False)
        found.append(ShareProfile(name, share, limit, wanted.batch, sb3, holdall))
    return found


def largest_size(spec: Spec, known: PlanInputs, *, holdall: bool) -> int:
    """Return the largest capacity (or rollout) that fits; 0 if none does."""
    most = largest_int(lambda size: known.fits(resized(spec, size), holdall=holdall))
    return most // spec.num_envs * spec.num_envs if not spec.on_policy and most > spec.num_envs else most


def largest_batch(spec: Spec, known: PlanInputs) -> int | None:
    """Return the largest batch that fits; None where the algorithm has none of its own, or no network was traced."""
    if spec.algorithm.batch_size is None or known.measured.traced is None:
        return None
    top = spec.rollout_steps * spec.num_envs if spec.on_policy else _LARGEST_SIZE
    return largest_int(lambda size: known.fits(spec.but(batch_size=size), holdall=spec.uses_holdall), top)


def largest_num_envs(spec: Spec, known: PlanInputs) -> int | None:
    """Return the most environments that fit, if nothing else changes; None where nothing grows with their number."""
    if not spec.on_policy and spec.vec_env == "dummy" and known.measured.env_first is None:
        return None
    top = _LARGEST_SIZE if spec.on_policy else max(spec.capacity, 1)
    return largest_int(lambda count: known.fits(spec.but(num_envs=count), holdall=spec.uses_holdall), top)


def largest_int(fits: Callable[[int], bool], top: int = _LARGEST_SIZE) -> int:
    """Return the largest number for which `fits` holds, if it holds up to there; 0 if not even for 1."""
    bad = 1
    while bad <= top and fits(bad):
        bad *= 2
    tried = range(bad // 2 + 1, min(bad, top + 1))  # what is up to half of `bad` fits
    return bad // 2 + bisect_left(tried, True, key=lambda size: not fits(size))


def cheapest_change(spec: Spec, known: PlanInputs) -> SuggestedChange | None:
    """Return the first change that makes the run fit, those first that do not alter what is learnt."""
    changes = _changes(spec, known)
    return next((change for change in changes if known.fits(change.spec, holdall=change.spec.uses_holdall)), None)


def _changes(spec: Spec, known: PlanInputs) -> Iterator[SuggestedChange]:
    sb3 = spec.sb3 or installed_version()
    if spec.on_policy and sb3 is not None and sb3 < ROLLOUTS_KEEP_DTYPES:
        newer = spec.but(sb3=ROLLOUTS_KEEP_DTYPES)
        yield SuggestedChange("upgrade Stable-Baselines3", "rollouts keep the observations' dtype from 2.7.1 on", newer)
    ours = None if spec.uses_holdall or known.need is None else spec.but(uses_holdall=True)
    if ours is not None:
        why = "each frame is kept once, nothing is copied to flatten it, and the samples are the same, bit for bit"
        yield SuggestedChange("keep the experience in holdall's buffer", why, ours)
        yield from _budgets(ours, known)
    if spec.vec_env != "dummy" and spec.method != "fork" and spec.num_envs > 1:
        setup = 'multiprocessing.set_forkserver_preload(["torch", "stable_baselines3"])'
        preloading = spec.but(start_method="forkserver", preloads=True)
        why = "the processes then share the libraries' pages"
        yield SuggestedChange("let the fork server import torch once", why, preloading, setup)
    if ours is not None:  # which then loses less than without it
        for change in _smaller_sizes(ours, known):
            yield replace(change, spec=change.spec.but(uses_holdall=False))  # enough by itself, at times
            yield replace(change, title=f"holdall's buffer, and {change.title}")
    yield from _smaller_sizes(spec, known)
    count = spec.num_envs
    while (count := count // 2) >= 1:
        yield SuggestedChange(counted(count, "environment"), "each takes memory of its own", spec.but(num_envs=count))


def _budgets(spec: Spec, known: PlanInputs) -> Iterator[SuggestedChange]:
    """Try to keep every transition: compressed first (a budget and `prefer`), then on disk beyond the budget."""
    if spec.on_policy or known.need is None:
        return
    around = largest_phase(known.phases(spec.but(holdall_budget=0), holdall=True)).most_bytes
    room = max(known.limits.limit_bytes - around, 0)
    unit = 2**30 // 10 if room >= 2**30 else _MIB // 10  # as format_bytes writes it
    budget = room // unit * unit
    if budget < _LEAST_BUDGET:
        return
    total = known.need.need(spec.layout().transitions)
    beyond = max(total - budget, 0)
    title = (
        f"holdall's buffer with budget={format_bytes(budget)!r}, prefer='memory' and a spill_dir: all "
        f"{size_of(spec):,} transitions stay, {format_bytes(beyond)} of them on disk before compression"
    )
    yield SuggestedChange(title, "nothing is dropped, and samples are the same", spec.but(holdall_budget=budget))


def _smaller_sizes(spec: Spec, known: PlanInputs) -> Iterator[SuggestedChange]:
    """Try less of what memory is spent on; whichever loses less of its size comes first."""
    tries = []
    if size := rounded_down(largest_size(spec, known, holdall=spec.uses_holdall)):
        name = "rollouts of {:,} steps" if spec.on_policy else "a capacity of {:,}"
        title, why = name.format(size), f"the largest that fits, of {size_of(spec):,}"
        tries.append((size / size_of(spec), SuggestedChange(title, why, resized(spec, size))))
    if batch := largest_batch(spec, known):
        batch = 1 << (batch.bit_length() - 1)
        title, why = f"batches of {batch:,}", f"activations grow with the batch, of {spec.batch:,}"
        tries.append((batch / spec.batch, SuggestedChange(title, why, spec.but(batch_size=batch))))
    yield from (change for share, change in sorted(tries, key=lambda found: -found[0]) if share < 1)


def rounded_down(count: int) -> int:
    """Return a number that people would write: two leading digits."""
    unit: int = 10 ** max(len(str(count)) - 2, 0)
    return count // unit * unit


def code_to_paste(spec: Spec, *, holdall: bool, setup: str = "", compressed: bool = False) -> str:
    """Return the lines to paste, each as short as a terminal."""
    algorithm = spec.algorithm
    settings = [f"n_steps={spec.rollout_steps}" if spec.on_policy else f"buffer_size={spec.capacity:_}"]
    if algorithm.batch_size is not None:
        settings.append(f"batch_size={spec.batch}")
    lines = [setup] if setup else []
    if holdall:
        kind = "rollout" if spec.on_policy else "replay"
        name = "HerReplayBuffer" if spec.sb3_buffer == "HerReplayBuffer" else f"{kind.title()}Buffer"
        lines.append(f"from holdall.sb3 import {name}")
        settings.append(f"{kind}_buffer_class={name}")
        kwargs: dict[str, Any] = {"n_steps": spec.rollout_steps} if spec.sb3_buffer == "NStepReplayBuffer" else {}
        if spec.holdall_budget is not None:
            kwargs |= {"budget": format_bytes(spec.holdall_budget), "prefer": "memory", "spill_dir": "/path/on/disk"}
        elif compressed:
            kwargs |= {"budget": None}
        if kwargs:
            kwargs_text = repr(kwargs).replace("'", '"')
            settings.append(f"replay_buffer_kwargs={kwargs_text}")
    elif spec.optimize_memory_usage:
        settings += ["optimize_memory_usage=True", 'replay_buffer_kwargs={"handle_timeout_termination": False}']
    first = f'"{spec.policy_name}", env'
    one_line = f"model = {algorithm.name}({', '.join([first, *settings])})"
    if len(one_line) > _CODE_COLUMNS:
        one_line = "\n    ".join([f"model = {algorithm.name}(", *(f"{part}," for part in (first, *settings))]) + "\n)"
    return "\n".join([*lines, one_line])


SCHEMA = "holdall.plan/1"
Answer = Mapping[str, Any]  # of a measurement in another process


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
        return code_to_paste(spec, holdall=spec.uses_holdall, setup=change.setup, compressed=compressed)

    @property
    def title(self) -> str:
        """The run in one line."""
        spec = self.spec
        size = counted(spec.rollout_steps, "step") if spec.on_policy else counted(spec.capacity, "transition")
        envs = counted(spec.num_envs, "environment")
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
                yield name, count_or_dash(found) if found else "none"

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
    require_choice("prefer", prefer, PREFERENCES)
    require_count("probe", probe_steps, least=0)
    said = list(notes)
    limits = _machine_limits(budget_bytes, memory_bytes, checkpoint_dir)
    with ThreadPoolExecutor(1) as background:
        base = background.submit(run_probe, "baseline", spec=spec, networks=networks)
        from holdall.tools.plan.measure_memory import need_from_spaces  # noqa: PLC0415 loads while the probe runs

        made_up = None if probe_steps and spec.env_id else need_from_spaces(spec)
        measured, vram = _measure(spec, base.result(), networks, probe_steps, environment, said)
    if vram_bytes is not None:
        vram = Limit("--vram", vram_bytes, vram_bytes)
    need = made_up or phases.HoldallNeed(**run_probe("experience", spec=spec, steps=probe_steps, prefer=prefer))
    if made_up is not None and not spec.on_policy:
        said.append("holdall's need is without compression, whose ratio is only measured with --env and --probe")
    if not spec.on_policy and spec.total_timesteps is not None and spec.total_timesteps < spec.capacity:
        said.append(f"the run ends after {counted(spec.total_timesteps, 'step')}, so its buffer is never fuller")
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
    change = None if known.fits(spec, holdall=uses) else cheapest_change(spec, known)
    return Plan(
        spec,
        known,
        tuple(known.checks(spec, holdall=uses)),
        tuple(known.phases(spec, holdall=False)),
        tuple(known.phases(spec, holdall=True)) if has_need else (),
        tuple(phases.vram_phases(spec, known.measured)),
        tuple(capacity_table(spec, known)),
        tuple(share_profiles(spec, known)),
        {
            "sb3_size": largest_size(spec, known, holdall=False),
            "holdall_size": largest_size(spec, known, holdall=True) if has_need else None,
            "batch_size": largest_batch(spec, known),
            "num_envs": largest_num_envs(spec, known),
        },
        change,
        tuple(notes),
    )


def _measure(
    spec: Spec, base: Answer, networks: bool, probe_steps: int, environment: Answer | None, notes: list[str]
) -> tuple[phases.MeasuredCosts, Limit | None]:
    probe = None
    if probe_steps and networks:
        probe = phases.TrainingProbe(**run_probe("update", spec=spec, steps=probe_steps))
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
        once, twice = phases.UpdateBytes(*traced["once"]), phases.UpdateBytes(*traced["twice"])
        traces = {"traced_batch": traced["batch"], "traced": once, "traced_twice": twice}
    if "growth" in base:
        batch, nbytes, same = base["growth"]
        traces["growth"] = phases.HeapGrowth(batch, nbytes, phases.UpdateBytes(*same), base["kept"], base["fixed"])
    measured = phases.MeasuredCosts(
        libraries=base.get("updated", base["imported"]),
        libraries_anonymous=base["imported_anonymous"],
        **traces,
        env_first=env.get("first_bytes"),
        env_first_anonymous=env.get("first_anonymous_bytes", 0),
        env_each=env.get("each_bytes", 0),
        probe=probe,
        vram_context=vram["context"] if vram else None,
    )
    return measured, Limit("free GPU memory", vram["free"], vram["total"]) if vram else None


def both_units(count: int) -> str:
    """Write bytes in decimal and binary units, both named: `12.79 GB = 11.91 GiB`."""
    if count >= _GB / 10:
        return f"{count / _GB:.2f} GB = {count / _GIB:.2f} GiB"
    return f"{count / _MB:.1f} MB = {count / _MIB:.1f} MiB"


def count_or_dash(size: int) -> str:
    """Write a count; none is a dash, and one that nothing limits is any."""
    return "any" if size > _LARGEST_SIZE // 2 else f"{size:,}" if size else "-"
