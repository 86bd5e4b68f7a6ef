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
from holdall.tools.plan.config import OPTIONS, parse_changes, parse_count, read_config_file
from holdall.tools.plan.needs import MARGIN, ROOM_BYTES, FitVerdict, HoldallUse, RunNeeds
from holdall.tools.plan.planner import TIMEOUT_S, Plan, find_limits, plan_command, plan_settings
from holdall.units import format_bytes, parse_bytes

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


PLAN_CLASS = CommandAfterDashes


def plan(
    context: typer.Context,
    file: Annotated[OptPath, typer.Argument(help="A TOML file. Or: -- COMMAND.")] = None,
    change: Annotated[OptTexts, option("Plan another value: buffer_size=200000; may be repeated.", "--set")] = None,
    timeout: Annotated[float, option("Seconds after which the command is stopped.")] = TIMEOUT_S,
    obs: Annotated[OptTexts, option("[NAME=]84x84x3:uint8, 31, discrete(4); repeat for a Dict.")] = None,
    action: Annotated[OptText, option("8 for eight numbers, discrete(4) for four choices.")] = None,
    algo: Annotated[OptText, option("dqn, ddpg, td3, sac, ppo, a2c, or one of sb3-contrib.")] = None,
    capacity: Annotated[OptText, option("Transitions of the replay buffer, as in 1e6.")] = None,
    num_envs: Annotated[OptText, option("Environments that step together.")] = None,
    n_steps: Annotated[OptText, option("Steps of a rollout.")] = None,
    batch_size: Annotated[OptText, option("Transitions in one update.")] = None,
    policy: Annotated[OptText, option("MlpPolicy, CnnPolicy or MultiInputPolicy.")] = None,
    net_arch: Annotated[OptText, option("Hidden layers, as in 256,256.")] = None,
    vec_env: Annotated[OptText, option("dummy or subproc.")] = None,
    start_method: Annotated[OptText, option("fork, forkserver or spawn.")] = None,
    device: Annotated[OptText, option("cpu or cuda.")] = None,
    timesteps: Annotated[OptText, option("Steps of the whole run, which may be too few to fill the buffer.")] = None,
    frame_stack: Annotated[OptText, option("Number of observations that are stacked into one.")] = None,
    holdall: Annotated[OptBool, option("The run uses holdall's buffer.", "--holdall")] = None,
    env: Annotated[OptText, option("Environment, by its ID or as module:Class.")] = None,
    wrapper: Annotated[OptText, option("atari: Stable-Baselines3's AtariWrapper.")] = None,
    budget: Annotated[OptText, option('A further limit, as in "8GiB" or "16 GB".')] = None,
    memory: Annotated[OptText, option("Free memory of another machine, in place of this one's.")] = None,
    vram: Annotated[OptText, option("Free memory of a GPU.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check whether a training run fits in memory before you start it, and see what would fit."""
    context.meta[ERROR_CODE] = 64  # 1 and 2 are verdicts of this command.
    command = context.meta.get(COMMAND_AFTER_DASHES)
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name in OPTIONS}
    given |= {"obs": obs or None, "total_timesteps": timesteps, "uses_holdall": holdall}
    if net_arch is not None:
        given["policy_kwargs"] = {"net_arch": [parse_count(width, "net_arch") for width in net_arch.split(",")]}
    settings = {name: value for name, value in given.items() if value is not None}
    changes = parse_changes(change or [])
    if command is not None and file is not None:
        raise ArgumentError(f"file ({file}) and a command after -- were given. Pass one of them.")
    if file is not None and file.suffix == ".py":
        raise ArgumentError(f"file ({file}) is a script. Write the command that runs it: holdall plan -- python {file}")
    if file is not None:
        settings = read_config_file(file) | settings
    sizes = {name: settings.pop(name, None) for name in ("budget", "memory", "vram")}
    given_sizes = {name: None if size is None else parse_bytes(size, name) for name, size in sizes.items()}
    limits = find_limits(given_sizes["budget"], given_sizes["memory"], given_sizes["vram"])
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
    holdall = plan.needs.holdall
    buffer = "holdall's buffer" if holdall is not None else plan.needs.experience.layout
    yield _make_parts(f"Memory at the peak, with {buffer}", plan.needs, holdall)
    if holdall is None and plan.needs.stored is not None:
        yield _make_parts("With holdall's buffer", plan.needs, plan.needs.candidate)
    yield _make_capacities(plan)
    yield _make_largest(plan)
    if plan.change is not None:
        yield Text(f"Cheapest change that makes it fit: {plan.change.title} ({plan.change.why}).")
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


def _make_parts(title: str, needs: RunNeeds, use: HoldallUse | None) -> Table:
    table = _make_table(title, ("part", "needs", "at most", "source"))
    for part in needs.parts(use):
        table.add_row(part.name, format_bytes(part.nbytes), format_bytes(part.most_bytes), part.source)
    total = format_bytes(needs.need_bytes(use))
    most = format_bytes(needs.most_bytes(use))
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
