"""A plan in the terminal: tables of rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.plan.phases import Phase
from holdall.plan.planned import Plan
from holdall.plan.verdict import largest
from holdall.plan.words import both_units, heading, row_name, size_name
from holdall.units import format_bytes

_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield everything that is said about a run, the verdict first."""
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
    yield Text(plan.code, style="cyan")
    for note in plan.notes:
        yield Text(f"Note: {note}.", style="dim")


def _said(verdict: object) -> Text:
    return Text(str(verdict), style=_STYLES[str(verdict)])


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _checks(plan: Plan) -> Table:
    table = _table("Against what there is", ("", "needs", "at most", "free", ""))
    for check in plan.checks:
        sizes = (check.need_bytes, check.most_bytes, check.limit.free_bytes)
        table.add_row(check.what, *map(format_bytes, sizes), _said(check.verdict))
        table.add_row(Text(f"  of {check.limit.name}", style="dim"))
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
    heads = [row_name(plan.spec).lower(), "SB3's buffer", "the run"]
    holdall = plan.known.experience is not None
    table = _table("What fits", heads + (["holdall's", "the run"] if holdall else []))
    for row in plan.table:
        cells: list[RenderableType] = [size_name(row.size), both_units(row.sb3_bytes), _said(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [both_units(row.holdall_bytes), _said(row.holdall_verdict)]
        table.add_row(*cells)
    return table


def _profiles(plan: Plan) -> Table:
    table = _table(
        "Profiles, as shares of the limit", ("profile", "of the limit", "batch", "SB3 holds", "holdall holds")
    )
    for profile in plan.profiles:
        held = "" if profile.holdall_size is None else size_name(profile.holdall_size)
        share = f"{profile.share:.0%}, {both_units(profile.limit_bytes)}"
        table.add_row(profile.name, share, size_name(profile.batch_size), size_name(profile.sb3_size), held)
    return table


def _largest(plan: Plan) -> Text:
    found = plan.largest
    size = row_name(plan.spec).lower()
    said = [f"{size} {size_name(found['sb3_size'] or 0)} with SB3's buffer"]
    if found["holdall_size"] is not None:
        said.append(f"{size} {size_name(found['holdall_size'])} with holdall's")
    if found["batch_size"] is not None:
        said.append(f"batch {size_name(found['batch_size'])}")
    said.append(f"environments {size_name(found['num_envs'] or 0)}")
    return Text(f"Largest that fits, all else as it is: {'; '.join(said)}.")
