"""`holdall plan`: check whether a run fits in memory before it is started, and what would fit.

The plan is printed as tables, or written as JSON or as one self-contained HTML page.
Exit codes: 0 fits, 1 tight, 2 does not fit, 64 whatever was wrong with the command, or cannot be read or measured.
"""

from __future__ import annotations

import difflib
import json as json_format
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from holdall.cli import ERROR_CODE, AsJson, OptBool, OptPath, OptText, OptTexts, Verbose, option, writing
from holdall.errors import ArgumentError
from holdall.tools.plan.config import OPTIONS, parse_count, read_config_file, spec_from_settings
from holdall.tools.plan.phases import PhasePart, RunPhase, largest_phase
from holdall.tools.plan.planner import Plan, both_units, count_or_dash, make_plan
from holdall.tools.report import charts
from holdall.tools.report.charts import Child, Markup, joined, tag
from holdall.tools.report.document import card, cards, code, document, section, sentence, table, tile, tiles, toned_word
from holdall.units import format_bytes, parse_bytes

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
_BUFFERS_SPREAD = 1.25  # networks, libraries and environments come on top
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


RENAMED = {
    "buffer_size": "capacity", "n_envs": "num_envs", "n_timesteps": "total_timesteps", "timesteps": "total_timesteps",
    "memory_size": "capacity", "replay_size": "capacity", "num_steps": "n_steps", "replay_buffer_capacity": "capacity",
}  # fmt: skip
"""What other libraries call plan's settings."""


def plan(
    context: typer.Context,
    file: Annotated[OptPath, typer.Argument(help="A training script; or a TOML, YAML or rl-zoo file.")] = None,
    change: Annotated[OptTexts, option("Try another value: buffer_size=200000; may be repeated.", "--set")] = None,
    obs: Annotated[OptTexts, option("[NAME=]84x84x3:uint8, 31, discrete(4); repeat for a Dict.")] = None,
    action: Annotated[OptText, option("8 for eight numbers, discrete(4) for four choices.")] = None,
    algo: Annotated[OptText, option("dqn, ddpg, td3, sac, ppo, a2c, or one of sb3-contrib.")] = None,
    capacity: Annotated[OptText, option("Transitions of the replay buffer, as in 1e6.")] = None,
    num_envs: Annotated[OptText, option("Environments that step together.")] = None,
    n_steps: Annotated[OptText, option("Steps of a rollout, or of n-step returns.")] = None,
    batch_size: Annotated[OptText, option("Transitions in one update.")] = None,
    policy: Annotated[OptText, option("MlpPolicy, CnnPolicy or MultiInputPolicy.")] = None,
    net_arch: Annotated[OptText, option("Hidden layers, as in 256,256.")] = None,
    vec_env: Annotated[OptText, option("dummy, subproc or shared.")] = None,
    start_method: Annotated[OptText, option("fork, forkserver or spawn.")] = None,
    preload: Annotated[OptBool, option("The fork server imports torch once.", "--preload")] = None,
    device: Annotated[OptText, option("cpu or cuda.")] = None,
    timesteps: Annotated[OptText, option("Steps of the whole run: the buffer may never fill.")] = None,
    frame_stack: Annotated[OptText, option("Frames that are stacked onto the observation given.")] = None,
    buffer_class: Annotated[OptText, option("A buffer class of Stable-Baselines3, as HerReplayBuffer.")] = None,
    optimize_memory_usage: Annotated[bool | None, typer.Option("--optimize-memory-usage")] = None,
    no_timeouts: Annotated[OptBool, option("handle_timeout_termination=False.", "--no-timeouts")] = None,
    save_buffer: Annotated[OptBool, option("Checkpoints hold the buffer.", "--save-buffer")] = None,
    holdall: Annotated[OptBool, option("The run uses holdall's buffer.", "--holdall")] = None,
    sb3: Annotated[OptText, option("Version of Stable-Baselines3; the installed one by default.")] = None,
    env: Annotated[OptText, option("Environment, made in a throwaway process: ID or module:Class.")] = None,
    wrapper: Annotated[OptText, option("atari: Stable-Baselines3's AtariWrapper.")] = None,
    probe: Annotated[str, option("Steps of real training to measure; 0 for none.")] = "0",
    prefer: Annotated[str, option("holdall's preference when compression is measured.")] = "balanced",
    budget: Annotated[OptText, option('A further limit, as in "8GiB" or "16 GB".')] = None,
    memory: Annotated[OptText, option("Free memory of another machine, in place of this one's.")] = None,
    vram: Annotated[OptText, option("Free memory of a GPU that is not here.")] = None,
    checkpoint_dir: Annotated[OptPath, option("Where checkpoints go; the disk is checked.")] = None,
    networks: Annotated[bool, option("Trace an update, or count buffers and libraries alone.")] = True,
    json: AsJson = False,
    html: Annotated[OptPath, option("Write one self-contained page with plots.")] = None,
    verbose: Verbose = False,
) -> None:
    """Check whether a training run fits in memory before you start it, phase by phase, and see what would fit."""
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name in OPTIONS}
    given |= {
        "obs": obs or None, "preloads": preload, "total_timesteps": timesteps, "saves_buffer": save_buffer,
        "uses_holdall": holdall, "handle_timeout_termination": False if no_timeouts else None,
    }  # fmt: skip
    context.meta[ERROR_CODE] = 64  # 1 and 2 are verdicts of this command
    if net_arch is not None:
        given["policy_kwargs"] = {"net_arch": [parse_count(width, "net_arch") for width in net_arch.split(",")]}
    chosen = {name: value for name, value in given.items() if value is not None} | parse_changes(change or [])
    settings = _read_file(file, chosen) | chosen
    sizes = {name: settings.pop(name, None) for name in ("budget", "memory", "vram")}
    limits = {f"{name}_bytes": None if size is None else parse_bytes(size, name) for name, size in sizes.items()}
    spec, environment = spec_from_settings(settings)
    planned = make_plan(
        spec,
        **limits,
        networks=networks,
        probe_steps=parse_count(probe, "probe"),
        prefer=prefer,
        checkpoint_dir=checkpoint_dir,
        environment=environment,
        notes=(),
    )
    if html is not None:
        with writing("html", html):
            html.write_text(write_plan_page(planned), encoding="utf-8", errors="replace")
    if json:
        typer.echo(json_format.dumps(planned.as_dict(), indent=2))
    else:
        console = Console(markup=False)
        for part in plan_tables(planned):
            is_code = isinstance(part, Text) and bool(part.no_wrap)  # to paste: only the terminal breaks its lines
            console.print(part, highlight=False, soft_wrap=is_code)
            console.print()
    raise typer.Exit(planned.verdict.value)


def parse_changes(texts: list[str]) -> dict[str, Any]:
    """Read `buffer_size=200000` and the like."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        name = RENAMED.get(name, name)
        if not equals or name not in OPTIONS:
            known = sorted({*OPTIONS, *RENAMED})
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it knows {', '.join(known)}"
            raise ArgumentError(f"set ({text!r}) must be NAME=VALUE of a setting that plan knows; {hint}")
        changes[name] = value
    return changes


def _read_file(file: Path | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file."""
    if file is None:
        return {}
    if file.suffix == ".py":
        raise ArgumentError(f"file ({file}) is a script; write the command that runs it after --")
    return read_config_file(file, str(chosen.get("algo", "")).lower(), str(chosen.get("env", "")))


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield everything that is printed about a run, the verdict first; 80 columns are enough for all but code."""
    yield Text.assemble((plan.title, "bold"), "  ", _styled_verdict(plan.verdict))
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
    elif plan.verdict:
        yield Text("No single change makes it fit here.")
    yield Text(plan.code, style="cyan", no_wrap=True)
    if plan.notes:
        yield Text("\n".join(f"Note: {note}." for note in plan.notes), style="dim")


def _styled_verdict(verdict: object) -> Text:
    return Text(str(verdict), style=_STYLES[str(verdict)])


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        # Names give way where a terminal is narrow; figures and verdicts never do.
        first = number == 0
        table.add_column(head, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    return table


def _checks(plan: Plan) -> Table:
    table = _table("Need and limits", ("", "needs", "at most", "free", ""))
    for check in plan.checks:
        sizes = (check.need_bytes, check.most_bytes, check.limit.free_bytes)
        name = Text.assemble(check.what, (f"\n  of {check.limit.name}", "dim"))
        table.add_row(name, *map(format_bytes, sizes), _styled_verdict(check.verdict))
    return table


def _phases(title: str, phases: Sequence[RunPhase]) -> Table:
    table = _table(title, ("phase", "needs", "at most", "source"))
    peak = largest_phase(phases)
    for phase in phases:
        style = "bold" if phase is peak else ""
        name = phase.name if phase.happens else f"{phase.name} (not in this run)"
        table.add_row(name, format_bytes(phase.nbytes), format_bytes(phase.most_bytes), style=style)
        if phase is peak:
            for part in phase.parts:
                cells = (f"  {part.name}", format_bytes(part.nbytes), format_bytes(part.most_bytes), part.how)
                table.add_row(*cells, style="dim")
    return table


def _column_units(sizes: Iterable[int]) -> tuple[str, str]:
    """Choose the decimal and the binary unit in which the largest of the sizes is a handy number."""
    return ("GB", "GiB") if max(sizes, default=0) >= 10**8 else ("MB", "MiB")


def _in_units(count: int, units: tuple[str, str]) -> tuple[str, ...]:
    """Write a count of bytes in either unit, without its name: that is in the head of the column."""
    return tuple(f"{count / _UNITS[unit]:,.2f}" for unit in units)


def _capacities(plan: Plan) -> Table:
    units = _column_units(row.sb3_bytes for row in plan.table)
    heads = [plan.size_word, f"SB3, {units[0]}", units[1], "the run"]
    if plan.known.need is not None:
        heads += [f"holdall, {units[0]}", units[1], "the run"]
    table = _table("What fits", heads)
    for row in plan.table:
        cells: list[RenderableType] = [count_or_dash(row.size)]
        cells += [*_in_units(row.sb3_bytes, units), _styled_verdict(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [*_in_units(row.holdall_bytes, units), _styled_verdict(row.holdall_verdict)]
        table.add_row(*cells)
    return table


def _profiles(plan: Plan) -> Table:
    units = _column_units(profile.limit_bytes for profile in plan.profiles)
    heads = ("profile", "of limit", *units, "batch", "SB3 holds", "holdall holds")
    table = _table("Profiles, as shares of the limit", heads)
    for profile in plan.profiles:
        held = "" if profile.holdall_size is None else count_or_dash(profile.holdall_size)
        sizes = (count_or_dash(profile.batch_size), count_or_dash(profile.sb3_size), held)
        table.add_row(profile.name, f"{profile.share:.0%}", *_in_units(profile.limit_bytes, units), *sizes)
    return table


def _largest(plan: Plan) -> Table:
    table = _table("Largest that fits", ("if nothing else changes", ""))
    for name, size in plan.largest_sizes():
        table.add_row(name, size)
    return table


_TONES = {"fits": "good", "tight": "warning", "does not fit": "error"}
_COLOURS = {
    "CUDA": "c8", "holdall": "c0", "copied": "c7", "buffer": "c1", "libraries": "c5", "weights": "c4", "batch": "c2",
}  # fmt: skip
"""By a word in the name of a part; environments and processes have the one that is left."""
_PROVENANCE = "Each part names its source: exact, measured, traced, or an estimate."


def write_plan_page(plan: Plan) -> str:
    """Write the page."""
    sections = [_page_tiles(plan), _page_answer(plan), _page_checks(plan), *_page_phases(plan)]
    sections += [_page_capacities(plan), _page_profiles(plan)]
    if plan.notes:
        notes = tag("ul", *(tag("li", sentence(note)) for note in plan.notes), class_="notes")
        sections.append(section("Not included", notes))
    return document(plan.title, "plan", (), sections)


def _verdict_badge(verdict: object) -> Markup:
    return toned_word(str(verdict), _TONES[str(verdict)])


def _page_tiles(plan: Plan) -> Markup:
    check = max(plan.checks, key=lambda check: check.verdict)  # the one that decides
    verdict = tile("verdict", str(plan.verdict), check.what, _TONES[str(plan.verdict)])
    needs = tile("needs", format_bytes(check.need_bytes), f"at most {format_bytes(check.most_bytes)}")
    return tiles([verdict, needs, tile("free", format_bytes(check.limit.free_bytes), check.limit.name)])


def _page_answer(plan: Plan) -> Markup:
    found: list[Child] = []
    if plan.change is not None:
        found.append(cards(card("info", plan.change.title, sentence(plan.change.why))))
    elif plan.verdict:
        found.append(cards(card("error", "No single change makes it fit here", "")))
    title = "The cheapest change that makes it fit" if plan.change else "To paste"
    return section(title, *found, code(plan.code))


def _page_checks(plan: Plan) -> Markup:
    heads = ["", "", "needs", "at most", "free"]
    rows: list[list[Child]] = []
    for check in plan.checks:
        name = joined(check.what, tag("small", f"of {check.limit.name}"))
        sizes = map(both_units, (check.need_bytes, check.most_bytes, check.limit.free_bytes))
        rows.append([name, _verdict_badge(check.verdict), *sizes])
    lead = "It fits if even the upper bound of its largest phase is below the limit; it is tight if only the need is."
    return section("Need and limits", table(heads, rows, "Checks", words=2), lead=lead)


def _page_phases(plan: Plan) -> list[Markup]:
    limit = plan.checks[0].limit
    host = (*plan.phases, *plan.holdall_phases)
    scale = _scale_with_limit(limit.free_bytes, host)
    groups = [("With Stable-Baselines3's buffer", plan.phases), ("With holdall's memory", plan.holdall_phases)]
    drawn = [_chart(title, phases, scale, limit.free_bytes) for title, phases in groups if phases]
    lead = f"A run needs the largest of its phases, not their sum. {_PROVENANCE}"
    shown = [section("Memory by phase", *drawn, lead=lead)]
    if plan.vram:
        free = next((check.limit.free_bytes for check in plan.checks if check.what.startswith("GPU")), 0)
        chart = _chart("GPU memory", plan.vram, _scale_with_limit(free, plan.vram), free)
        shown.append(section("On the GPU", chart, lead=_PROVENANCE))
    return shown


def _scale_with_limit(limit: int, phases: Sequence[RunPhase]) -> charts.Scale:
    """Choose a scale that holds the limit, unless it is so far away that nothing else could be seen."""
    most = max(phase.nbytes for phase in phases)
    return charts.bytes_scale(limit if most <= limit <= 4 * most else most)


def _chart(title: str, phases: Sequence[RunPhase], scale: charts.Scale, limit: int) -> Markup:
    peak, rows = largest_phase(phases), []
    colours: dict[str, str] = {}
    for phase in phases:
        pieces = [_piece(phase, part) for part in phase.parts if part.nbytes]
        colours |= {part.name: _colour(part) for part in phase.parts if part.nbytes}
        said = "" if phase.happens else "not in this run"
        rows.append(charts.BarRow(phase.name, pieces, format_bytes(phase.nbytes), said, strong=phase is peak))
    named = (float(limit), f"limit {format_bytes(limit)}") if limit else None
    return tag("div", tag("h4", title), charts.bars(rows, scale, title, legend=list(colours.items()), limit=named))


def _piece(phase: RunPhase, part: PhasePart) -> charts.BarPiece:
    sizes = f"{both_units(part.nbytes)}, {part.how}\nat most {format_bytes(part.most_bytes)}"
    return charts.BarPiece(part.nbytes, _colour(part), f"{phase.name}: {part.name}\n{sizes}")


def _colour(part: PhasePart) -> str:
    """Give a part the same colour in every chart of the page."""
    return next((colour for word, colour in _COLOURS.items() if word in part.name), "c6")


def _page_capacities(plan: Plan) -> Markup:
    name = plan.size_word.capitalize()
    heads = [plan.size_word, "SB3's buffer", "the run"]
    holdall = plan.known.need is not None
    rows: list[list[Child]] = []
    for row in plan.table:
        cells: list[Child] = [count_or_dash(row.size), both_units(row.sb3_bytes), _verdict_badge(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [both_units(row.holdall_bytes), _verdict_badge(row.holdall_verdict)]
        rows.append(cells)
    figures = table(heads + (["holdall's", "the run"] if holdall else []), rows, f"{name} against memory")
    sizes = tiles(tile(f"largest {what}", size) for what, size in plan.largest_sizes())
    lead = (
        "Bytes are those of the buffer, verdicts those of the whole run. A largest size holds if nothing else changes."
    )
    return section(f"{name} against memory", sizes, _curves(plan), figures, lead=lead)


def _curves(plan: Plan) -> Markup:
    rows = sorted(plan.table, key=lambda row: row.size)
    sizes = np.array([0, *(row.size for row in rows)], np.float64)
    layers = [charts.PlotLayer("SB3's buffer", "c1", np.array([0, *(row.sb3_bytes for row in rows)], np.float64))]
    if plan.known.need is not None:
        ours = [plan.known.need.need(0), *(row.holdall_bytes or 0 for row in rows)]
        layers.append(charts.PlotLayer("holdall's memory", "c0", np.array(ours, np.float64)))
    limit = plan.known.limits.limit_bytes
    most = max(float(layer.values.max()) for layer in layers)
    scale = charts.bytes_scale(limit if most <= limit <= 2 * most else most)
    heads = [f"{plan.size_word} {size:,.0f}" for size in sizes]
    marked = {0, len(sizes) - 1, len(sizes) // 2}
    ticks = [(size / sizes[-1], f"{size:,.0f}") for at, size in enumerate(sizes) if at in marked]
    title, named = f"{plan.size_word.capitalize()} against memory", (float(limit), f"limit {format_bytes(limit)}")
    across = "steps of a rollout" if plan.spec.on_policy else "capacity, transitions"
    plot = charts.Plot(title, sizes / sizes[-1], heads, layers, scale, ticks, False, named, (), across, "buffer")
    return plot.markup()


def _page_profiles(plan: Plan) -> Markup:
    heads = ["profile", "of the limit", "for the run", "batch", "SB3 holds", "holdall holds"]
    rows: list[list[Child]] = []
    for profile in plan.profiles:
        counts = (profile.batch_size, profile.sb3_size, profile.holdall_size or 0)
        rows.append(
            [profile.name, f"{profile.share:.0%}", both_units(profile.limit_bytes), *map(count_or_dash, counts)]
        )
    return section("Profiles", table(heads, rows, "Profiles"), lead="Shares of the limit for the whole run.")
