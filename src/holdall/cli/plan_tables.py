"""A plan in the terminal: tables of rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.plan.phases import Phase
from holdall.plan.planned import Plan
from holdall.plan.verdict import largest
from holdall.plan.words import Units, heading, largest_sizes, row_name, size_name
from holdall.units import format_bytes

_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield everything that is said about a run, the verdict first; 80 columns are enough for all but code."""
    yield Text.assemble((heading(plan), "bold"), "  ", _said(plan.verdict))
    yield _checks(plan)
    yield _phases("With Stable-Baselines3's buffer", plan.phases)
    if plan.holdall_phases:
        yield _phases("With holdall's", plan.holdall_phases)
    if plan.vram:
        yield _phases("On the GPU", plan.vram)
    yield _capacities(plan)
    yield _profiles(plan)
    yield _largest(plan)
    if plan.change is not None:
        yield Text(f"Cheapest change that makes it fit: {plan.change.title} ({plan.change.why}).")
    elif plan.verdict.value:
        yield Text("No single change makes it fit here.")
    yield Text(plan.code, style="cyan", no_wrap=True)
    if plan.notes:
        yield Text("\n".join(f"Note: {note}." for note in plan.notes), style="dim")


def _said(verdict: object) -> Text:
    return Text(str(verdict), style=_STYLES[str(verdict)])


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        # Names give way where a terminal is narrow; figures and verdicts never do.
        first = number == 0
        table.add_column(head, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    return table


def _checks(plan: Plan) -> Table:
    table = _table("Against what there is", ("", "needs", "at most", "free", ""))
    for check in plan.checks:
        sizes = (check.need_bytes, check.most_bytes, check.limit.free_bytes)
        name = Text.assemble(check.what, (f"\n  of {check.limit.name}", "dim"))
        table.add_row(name, *map(format_bytes, sizes), _said(check.verdict))
    return table


def _phases(title: str, phases: Sequence[Phase]) -> Table:
    table = _table(title, ("phase", "needs", "at most", "known by"))
    peak = largest(phases)
    for phase in phases:
        style = "bold" if phase is peak else ""
        name = phase.name if phase.happens else f"{phase.name}, if ever"
        table.add_row(name, format_bytes(phase.nbytes), format_bytes(phase.most_bytes), style=style)
        if phase is peak:
            for part in phase.parts:
                cells = (f"  {part.name}", format_bytes(part.nbytes), format_bytes(part.most_bytes), part.how)
                table.add_row(*cells, style="dim")
    return table


def _capacities(plan: Plan) -> Table:
    units = Units.for_largest(row.sb3_bytes for row in plan.table)
    heads = [row_name(plan.spec).lower(), f"SB3, {units.decimal}", units.binary, "the run"]
    if plan.known.experience is not None:
        heads += [f"holdall, {units.decimal}", units.binary, "the run"]
    table = _table("What fits", heads)
    for row in plan.table:
        cells: list[RenderableType] = [size_name(row.size), *units.both(row.sb3_bytes), _said(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [*units.both(row.holdall_bytes), _said(row.holdall_verdict)]
        table.add_row(*cells)
    return table


def _profiles(plan: Plan) -> Table:
    units = Units.for_largest(profile.limit_bytes for profile in plan.profiles)
    heads = ("profile", "of limit", units.decimal, units.binary, "batch", "SB3 holds", "holdall holds")
    table = _table("Profiles, as shares of the limit", heads)
    for profile in plan.profiles:
        held = "" if profile.holdall_size is None else size_name(profile.holdall_size)
        sizes = (size_name(profile.batch_size), size_name(profile.sb3_size), held)
        table.add_row(profile.name, f"{profile.share:.0%}", *units.both(profile.limit_bytes), *sizes)
    return table


def _largest(plan: Plan) -> Table:
    table = _table("Largest that fits", ("all else as it is", ""))
    for name, size in largest_sizes(plan):
        table.add_row(name, size)
    return table
