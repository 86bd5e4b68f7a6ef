"""What would fit: the table of capacities, the profiles, the largest sizes, the cheapest change.

In:  a spec and everything known about it.  Out: records for people and JSON.
Invariant: every recommendation went through the same arithmetic as the run itself, and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdall.tools.plan.buffer_layout import ROLLOUTS_KEEP_DTYPES, installed_version
from holdall.tools.plan.phases import FitVerdict, PlanInputs, largest_phase
from holdall.tools.plan.spec import Spec
from holdall.units import format_bytes

_LARGEST_SIZE = 1 << 40
_MIB = 2**20
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
    sizes = sorted({max(int(size_of(spec) * share), 1) for share in _TABLE_SHARES}, reverse=True)
    return [_row(resized(spec, size), known) for size in sizes]


def _row(spec: Spec, known: PlanInputs) -> CapacityRow:
    layout = spec.layout()
    return CapacityRow(
        size_of(spec),
        layout.nbytes,
        known.verdict(spec, holdall=False),
        None if known.need is None else known.need.need(layout.transitions),
        None if known.need is None else known.verdict(spec, holdall=True),
    )


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
    if not fits(1):
        return 0
    good, bad = 1, 2
    while bad <= top and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, top + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


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
        yield SuggestedChange(f"{count} environments", "each takes memory of its own", spec.but(num_envs=count))


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
    """Return the line to paste."""
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
    lines.append(f'model = {algorithm.name}("{spec.policy_name}", env, {", ".join(settings)})')
    return "\n".join(lines)
