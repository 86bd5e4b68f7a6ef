"""`holdall plan`: check before a run whether it fits in memory, and which sizes would fit.

    holdall plan -- python train.py --my args     runs the command until it is about to train, and measures it
    holdall plan --algo sac --obs ... --action 8  runs and measures a stand-in for the run that options describe
    holdall plan run.toml                         runs and measures a stand-in for the run that a file describes

Exit codes: 0 fits, 1 tight, 2 does not fit, 64 any other failure, such as a misspelt option or a failing command.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from holdall.cli import (
    COMMAND_AFTER_DASHES,
    ERROR_CODE,
    AsJson,
    CommandAfterDashes,
    OptBool,
    OptPath,
    OptText,
    OptTexts,
    Verbose,
    option,
)
from holdall.errors import ArgumentError
from holdall.tools.plan.config import parse_changes, read_config_file
from holdall.tools.plan.needs import MARGIN, ROOM_BYTES, FitVerdict, RunNeeds
from holdall.tools.plan.planner import TIMEOUT_S, Plan, find_limits, plan_command, plan_settings
from holdall.tools.plan.settings import SETTINGS, parse_count
from holdall.units import format_bytes, parse_bytes

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


PLAN_CLASS = CommandAfterDashes


def _setting(name: str) -> Any:
    """Return the option of a setting. `tools/plan/settings.py` has its name and its help text."""
    return option(SETTINGS[name].help, SETTINGS[name].option_name)


def plan(
    context: typer.Context,
    file: Annotated[OptPath, typer.Argument(help="A TOML file. Or: -- COMMAND.")] = None,
    change: Annotated[OptTexts, option("Plan another value: buffer_size=200000; may be repeated.", "--set")] = None,
    timeout: Annotated[float, option("Seconds after which the command is stopped.")] = TIMEOUT_S,
    obs: Annotated[OptTexts, _setting("obs")] = None,
    action: Annotated[OptText, _setting("action")] = None,
    algo: Annotated[OptText, _setting("algo")] = None,
    capacity: Annotated[OptText, _setting("capacity")] = None,
    num_envs: Annotated[OptText, _setting("num_envs")] = None,
    n_steps: Annotated[OptText, _setting("n_steps")] = None,
    batch_size: Annotated[OptText, _setting("batch_size")] = None,
    policy: Annotated[OptText, _setting("policy")] = None,
    policy_kwargs: Annotated[OptText, _setting("policy_kwargs")] = None,
    vec_env: Annotated[OptText, _setting("vec_env")] = None,
    start_method: Annotated[OptText, _setting("start_method")] = None,
    device: Annotated[OptText, _setting("device")] = None,
    total_timesteps: Annotated[OptText, _setting("total_timesteps")] = None,
    frame_stack: Annotated[OptText, _setting("frame_stack")] = None,
    uses_holdall: Annotated[OptBool, _setting("uses_holdall")] = None,
    env: Annotated[OptText, _setting("env")] = None,
    wrapper: Annotated[OptText, _setting("wrapper")] = None,
    budget: Annotated[OptText, _setting("budget")] = None,
    memory: Annotated[OptText, _setting("memory")] = None,
    vram: Annotated[OptText, _setting("vram")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check whether a training run fits in memory before you start it, and see what would fit."""
    context.meta[ERROR_CODE] = 64  # 1 and 2 are verdicts of this command.
    command = context.meta.get(COMMAND_AFTER_DASHES)
    given = {name: value for name, value in context.params.items() if name in SETTINGS}
    given["obs"] = obs or None  # Without the option, some versions of typer give an empty list.
    settings = {name: value for name, value in given.items() if value is not None}
    if policy_kwargs is not None:
        settings["policy_kwargs"] = {"net_arch": [parse_count(width, "net_arch") for width in policy_kwargs.split(",")]}
    changes = parse_changes(change or [])
    if command is not None and file is not None:
        raise ArgumentError(f"file ({file}) and a command after -- were given. Pass one of them.")
    if file is not None and file.suffix == ".py":
        raise ArgumentError(f"file ({file}) is a script. Write the command that runs it: holdall plan -- python {file}")
    if file is not None:
        settings = read_config_file(file) | settings
    names = [name for name in ("budget", "memory", "vram") if name in settings]
    sizes = {name: parse_bytes(settings.pop(name), name) for name in names}
    limits = find_limits(sizes.get("budget"), sizes.get("memory"), sizes.get("vram"))
    if command is not None:
        if settings:
            raise ArgumentError(f"{', '.join(settings)} cannot be combined with a command. Use --set NAME=VALUE.")
        typer.echo(f"Running {' '.join(command)} until it is about to train. It is stopped then.", err=json)
        planned = plan_command(command, changes, limits, timeout_s=timeout)
    elif not settings:
        raise ArgumentError("No run was named. Write -- and the command that trains, or a file, or --algo and --obs.")
    else:
        planned = plan_settings(settings, limits, changes)
    _show(planned, as_json=json)
    raise typer.Exit(planned.verdict.value)


def _show(planned: Plan, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json_format.dumps(planned.as_dict(), indent=2))
        return
    console = Console(markup=False)
    for part in plan_tables(planned):
        is_code = isinstance(part, Text) and bool(part.no_wrap)  # Rich must not wrap code, so that it can be pasted.
        console.print(part, highlight=False, soft_wrap=is_code)
        console.print()


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield everything that is printed about a run, the verdict first. Only code may be wider than 80 columns."""
    yield Text.assemble((plan.title, "bold"), "  ", _style(plan.verdict))
    yield _make_checks(plan)
    has_holdall = plan.needs.holdall is not None
    buffer = "holdall's buffer" if has_holdall else plan.needs.experience.layout
    yield _make_parts(f"Memory at the peak, with {buffer}", plan.needs)
    if not has_holdall and plan.needs.stored is not None:
        yield _make_parts("With holdall's buffer", plan.needs.with_holdall_buffer())
    yield _make_capacities(plan)
    yield _make_largest(plan)
    if plan.change is not None:
        yield Text(f"A change that makes it fit: {plan.change.title} ({plan.change.why}).")
    elif plan.verdict:
        yield Text("No single change makes the run fit here.")
    yield Text(plan.code, style="cyan", no_wrap=True)
    bound = f"At most: exact parts, the other parts plus {MARGIN:.0%}, and {format_bytes(ROOM_BYTES)}."
    notes = [bound, *(f"Note: {note}." for note in plan.notes)]
    yield Text("\n".join(notes), style="dim")


def _style(verdict: FitVerdict) -> Text:
    return Text(str(verdict), style=_STYLES[str(verdict)])


def _make_table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        # Names are wrapped in a narrow terminal; figures and verdicts never are.
        is_name = number == 0
        table.add_column(head, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    return table


def _make_checks(plan: Plan) -> Table:
    table = _make_table("Need and limits", ("", "needs", "at most", "free", ""))
    for check in plan.checks:
        name = Text.assemble(check.what, (f"\n  of {check.limit.name}", "dim"))
        sizes = [format_bytes(size) for size in (check.need_bytes, check.most_bytes, check.limit.free_bytes)]
        table.add_row(name, *sizes, _style(check.verdict))
    return table


def _make_parts(title: str, needs: RunNeeds) -> Table:
    table = _make_table(title, ("part", "needs", "at most", "source"))
    for part in needs.parts():
        table.add_row(part.name, format_bytes(part.nbytes), format_bytes(part.most_bytes), part.source)
    total = format_bytes(needs.need_bytes())
    most = format_bytes(needs.most_bytes())
    table.add_row("together", total, most, "", style="bold")
    return table


def _make_capacities(plan: Plan) -> Table:
    largest = max((row.plain_bytes for row in plan.table), default=0)
    units = ("GB", "GiB") if largest >= 10**9 else ("MB", "MiB")
    heads = [plan.size_word, f"{plan.needs.experience.library}, {units[0]}", units[1], "the run"]
    if plan.needs.stored is not None:
        heads += [f"holdall, {units[0]}", units[1], "the run"]
    table = _make_table("What fits", heads)
    for row in plan.table:
        cells: list[RenderableType] = [f"{row.size:,}", *_write_units(row.plain_bytes, units)]
        cells.append(_style(row.plain_verdict))
        if row.holdall_bytes is not None and row.holdall_verdict is not None:
            cells += [*_write_units(row.holdall_bytes, units), _style(row.holdall_verdict)]
        table.add_row(*cells)
    return table


def _write_units(nbytes: int, units: Sequence[str]) -> list[str]:
    return [f"{nbytes / _UNITS[unit]:,.2f}" for unit in units]


def _make_largest(plan: Plan) -> Table:
    table = _make_table("Largest that fits", ("if nothing else changes", ""))
    for name, size in plan.largest_sizes():
        table.add_row(name, size)
    return table
