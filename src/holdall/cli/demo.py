"""`holdall demo`: plan, train, watch, checkpoint, kill and resume on the shipped environment, with a table at the end.

The two trainings differ only in their replay buffer, and the second one is killed half-way. So only the buffer or the
crash can cause a difference at the end.
Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 a promise does not hold.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdall.cli import AsJson, OptText, Verbose, option, writing
from holdall.errors import ArgumentError, MissingPackageError
from holdall.machine import Limit
from holdall.tools.bench.child import ChildProgress, make_module_command, run_child
from holdall.tools.demo import CheckpointFingerprint, DemoResult, DemoTask
from holdall.tools.plan.needs import HoldallUse, MachineLimits, RunNeeds
from holdall.tools.plan.planner import find_limits, plan_command
from holdall.tools.report import read_report
from holdall.units import format_bytes, parse_bytes

DIFFERENT_EXIT_CODE = 3
DemoMessage = CheckpointFingerprint | DemoResult
"""What a training of the demo reports, besides its progress."""
DemoMessageT = TypeVar("DemoMessageT", CheckpointFingerprint, DemoResult)


def demo(
    steps: Annotated[int, option("Environment steps to train for.")] = 500,
    transitions: Annotated[int, option("Transitions to hold while memory is measured.")] = 30_000,
    limit: Annotated[
        OptText, option("Memory limit of the plan. Default: half-way between the needs of both buffers.")
    ] = None,
    out: Annotated[Path, option("Folder of the checkpoint, the record and the page.")] = Path("holdall-demo"),
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan, train, watch, checkpoint, kill -9, resume, and compare with Stable-Baselines3's replay buffer."""
    story = Console(stderr=json, highlight=False)
    comparison = run_demo(steps, transitions, None if limit is None else parse_bytes(limit, "limit"), out, story)
    if json:
        typer.echo(comparison.as_json())
    else:
        story.print()
        story.print(draw_table(comparison))
        story.print(describe_verdict(comparison))
        story.print(f"Page of the watched training: {comparison.report}", soft_wrap=True, markup=False)
        story.print(f"The demo took {comparison.seconds:.0f} s.", style="dim")
    if not comparison.holds:
        raise typer.Exit(DIFFERENT_EXIT_CODE)


BUDGET = "48MiB"
"""Budget of holdall's memory in the demo."""
_USE = HoldallUse(parse_bytes(BUDGET), prefer="memory")
A_MILLION = 1_000_000
MIN_STEPS = 240
MIN_TRANSITIONS = 2_000  # Fewer transitions give too few memory readings for a line through them.
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}
_TAIL_BYTES = 65_536  # Bytes at the end of a record in which the newest reading is searched.
_OUT_FOLDERS = ("checkpoint", "spilled")
_OUT_FILES = ("watch.jsonl", "report.html")
_MARK = ".holdall-demo"  # File that marks the folder of an earlier demo, which may be overwritten.
_SHOWN_GROUPS = ("buffers", "torch", "python", "libraries")
TITLES = {"sb3": "Stable-Baselines3", "holdall": "holdall"}


def _prepare_folder(folder: Path) -> None:
    """Make the folder, and remove the folders of an earlier demo. Refuse to overwrite files that no demo wrote."""
    with writing("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
        endangered = sorted(names & {*_OUT_FOLDERS, *_OUT_FILES})
        if endangered and _MARK not in names:
            raise ArgumentError(f"out ({folder}) has {endangered[0]!r}, which no demo wrote. Name another folder.")
        (folder / _MARK).touch()
    for name in _OUT_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def run_demo(steps: int, transitions: int, limit_bytes: int | None, folder: Path, console: Console) -> Comparison:
    """Run all steps of the demo, and return the comparison."""
    _check_sizes(steps, transitions)
    started = time.perf_counter()
    _prepare_folder(folder)
    checkpoint = folder / "checkpoint"
    record = folder / "watch.jsonl"

    def print_heading(number: int, title: str) -> None:
        console.print(f"\n[bold]{number}[/]  [bold]{title}[/]")

    print_heading(1, f"Will {steps + transitions:,} transitions of a camera fit, and a million?")
    task = DemoTask("sb3", steps, transitions)
    fitted, million = plan_demo(task, limit_bytes)
    console.print(
        f"  A million: Stable-Baselines3's buffer needs {format_bytes(million.sb3_bytes)}, and this machine has "
        f"{format_bytes(million.limit_bytes)}: [{_STYLES[million.sb3]}]{million.sb3}[/]",
        soft_wrap=True,
    )
    console.print(f"  {steps + transitions:,}, with a limit of {format_bytes(fitted.limit_bytes)}:")
    for buffer, (size, fit) in fitted.rows().items():
        console.print(f"  {TITLES[buffer]:18} needs {format_bytes(size):>10}   [{_STYLES[fit]}]{fit}[/]")
    console.print("  [dim]the whole process, measured as `holdall plan` does: until the training begins[/]")

    print_heading(2, "Train with Stable-Baselines3's replay buffer")
    plain = _get_message(_train(console, task), DemoResult)

    print_heading(3, f"Train with holdall's under a budget of {BUDGET}, save a checkpoint half-way, and kill -9")
    settings = {"budget": BUDGET, "prefer": "memory", "spill_dir": str(folder / "spilled")}
    task = replace(task, buffer="holdall", checkpoint=str(checkpoint), buffer_kwargs=settings)
    saved = _get_message(_train(console, task, is_killed=True), CheckpointFingerprint)
    written = f"{format_bytes(saved.checkpoint_bytes)}, safe on disk after {saved.seconds:.1f} s"
    console.print(f"  checkpoint at step {saved.step}: {written}; then kill -9")

    print_heading(4, "Resume, and watch the memory while it fills")
    task = replace(task, is_resumed=True, record=str(record), limit_bytes=fitted.limit_bytes)
    messages = _train(console, task)
    resumed = _get_message(messages, CheckpointFingerprint)
    same = "identical" if resumed.batches_sha256 == saved.batches_sha256 else "DIFFERENT"
    console.print(
        f"  loaded in {resumed.seconds:.1f} s at step {resumed.step}; the next batches are {same}, bit for bit"
    )
    reading = describe_latest_reading(record)
    if reading:
        console.print(f"  at the end {reading}", soft_wrap=True)

    own = _get_message(messages, DemoResult)
    comparison = Comparison(fitted, plain, own, saved, resumed)
    page = folder / "report.html"
    page.write_text(read_report(record).page(), encoding="utf-8")
    return replace(comparison, seconds=time.perf_counter() - started, report=str(page))


def _train(console: Console, task: DemoTask, *, is_killed: bool = False) -> list[DemoMessage]:
    """Run one training with a progress bar. With `is_killed`, kill it after its checkpoint. Return its messages."""
    messages: list[DemoMessage] = []
    checkpoint_step: int | None = None
    columns = (TextColumn("  {task.description:18}"), BarColumn(12), TextColumn("{task.percentage:3.0f}%"))
    shown = Progress(*columns, TimeElapsedColumn(), TextColumn("[dim]{task.fields[memory]}"), console=console)
    command = make_module_command("tools.demo.training", json.dumps(asdict(task)))
    child: Generator[ChildProgress | DemoMessage, None, None] = run_child(command, CheckpointFingerprint, DemoResult)
    with shown as bars, closing(child):  # Closing ends the child with SIGKILL.
        bar = bars.add_task(TITLES[task.buffer], total=1.0, memory="")
        for message in child:
            if isinstance(message, ChildProgress):
                if is_killed and checkpoint_step is not None and message.done > checkpoint_step:
                    return messages  # The training has passed its checkpoint.
                reading = describe_latest_reading(Path(task.record)) if task.record else ""
                bars.update(bar, completed=message.share, memory=reading.partition(", torch")[0])
                continue
            messages.append(message)
            if isinstance(message, CheckpointFingerprint):
                checkpoint_step = message.step
        bars.update(bar, completed=1.0)
    return messages


def _get_message(messages: Iterable[DemoMessage], kind: type[DemoMessageT]) -> DemoMessageT:
    return next(message for message in messages if isinstance(message, kind))


def _check_sizes(steps: int, transitions: int) -> None:
    if importlib.util.find_spec("stable_baselines3") is None:
        raise MissingPackageError(
            "The demo trains with stable-baselines3, which is not installed. Run: pip install holdall[sb3]"
        )
    for name, value, minimum in (("steps", steps, MIN_STEPS), ("transitions", transitions, MIN_TRANSITIONS)):
        if value < minimum:
            raise ArgumentError(f"{name} ({value}) is too small to measure anything. Pass at least {minimum}.")


@dataclass(frozen=True, slots=True)
class DemoFit:
    """Needs and verdicts of both buffers."""

    limit_bytes: int
    sb3_bytes: int
    sb3: str  # Verdict: fits, tight or does not fit.
    holdall_bytes: int
    holdall: str

    def rows(self) -> dict[str, tuple[int, str]]:
        """Return need and verdict by buffer."""
        return {"sb3": (self.sb3_bytes, self.sb3), "holdall": (self.holdall_bytes, self.holdall)}


def plan_demo(task: DemoTask, limit_bytes: int | None) -> tuple[DemoFit, DemoFit]:
    """Plan the training of `task` with either buffer, as `holdall plan` would, and again with a million transitions.

    The first plan has the given limit, or else the middle between the needs of both buffers. The second plan has this
    machine's free memory as its limit.
    """
    steps = task.steps + task.transitions
    machine = find_limits()
    command = make_module_command("tools.demo.training", json.dumps(asdict(task)))
    needs = plan_command(command, {"total_timesteps": steps}, machine).needs
    if limit_bytes is None:
        both = needs.with_library_buffer().need_bytes() + needs.with_holdall_buffer(_USE).need_bytes()
        limit_bytes = both // 2
    limit = Limit("--limit", limit_bytes, limit_bytes)
    million = replace(needs, experience=replace(needs.experience, rows=A_MILLION, max_rows=None))
    return _compare_needs(needs, MachineLimits((limit,))), _compare_needs(million, machine)


def _compare_needs(needs: RunNeeds, limits: MachineLimits) -> DemoFit:
    with_sb3 = needs.with_library_buffer()
    with_holdall = needs.with_holdall_buffer(_USE)
    return DemoFit(
        limit_bytes=limits.free_bytes,
        sb3_bytes=with_sb3.need_bytes(),
        sb3=str(with_sb3.verdict(limits)),
        holdall_bytes=with_holdall.need_bytes(),
        holdall=str(with_holdall.verdict(limits)),
    )


def describe_latest_reading(record: Path) -> str:
    """Return the newest reading of a watch's record in words, or an empty text if there is none."""
    try:
        with record.open("rb") as file:
            file.seek(max(record.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with suppress(ValueError):  # The watch is still writing this line.
            reading = json.loads(line)
            if reading["kind"] == "reading":
                sizes = dict.fromkeys(_SHOWN_GROUPS, 0)
                for part in reading["parts"]:
                    if part["group"] in sizes:
                        sizes[part["group"]] += part["resident"]
                groups = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
                return f"{format_bytes(reading['pss'])}: {groups}"
    return ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same training with either buffer. The second one was killed half-way and resumed."""

    fit: DemoFit
    sb3: DemoResult
    holdall: DemoResult
    saved: CheckpointFingerprint
    resumed: CheckpointFingerprint
    seconds: float = 0.0
    report: str = ""  # File of the page.

    @property
    def weights_identical(self) -> bool:
        """Whether both trainings ended with the same weights, bit for bit."""
        return self.sb3.weights_sha256 == self.holdall.weights_sha256

    @property
    def batches_identical(self) -> bool:
        """Whether the resumed memory draws the batches that the killed one would have drawn."""
        return self.saved.batches_sha256 == self.resumed.batches_sha256

    @property
    def holds(self) -> bool:
        """Whether weights and batches are both identical."""
        return self.weights_identical and self.batches_identical

    def as_json(self) -> str:
        """Write the comparison as one JSON object."""
        answers = {"weights_identical": self.weights_identical, "batches_identical": self.batches_identical}
        return json.dumps(asdict(self) | answers)


def draw_table(comparison: Comparison) -> Table:
    """Return a table of the two trainings."""
    table = Table(title=f"SAC on a camera and a vector, {comparison.sb3.transitions:,} transitions held")
    table.add_column("replay buffer")
    for heading in ("bytes/transition", "peak memory", "within limit", "steps/s"):
        table.add_column(heading, justify="right")
    for result in (comparison.sb3, comparison.holdall):
        table.add_row(
            TITLES[result.buffer],
            f"{result.bytes_per_transition:,.0f}",
            format_bytes(result.peak_bytes),
            "yes" if result.peak_bytes < comparison.fit.limit_bytes else "no",
            f"{result.steps_per_second:.1f}",
        )
    return table


def describe_verdict(comparison: Comparison) -> str:
    """Return a sentence about the weights and the memory of both trainings."""
    ratio = comparison.sb3.bytes_per_transition / comparison.holdall.bytes_per_transition
    if not comparison.batches_identical:
        before = comparison.saved.batches_sha256[:12]
        after = comparison.resumed.batches_sha256[:12]
        return f"BATCHES DIFFER: {before} before the kill, {after} after it."
    sb3_weights = comparison.sb3.weights_sha256[:12]
    own_weights = comparison.holdall.weights_sha256[:12]
    if not comparison.weights_identical:
        return f"WEIGHTS DIFFER: {sb3_weights} with Stable-Baselines3's buffer, {own_weights} with holdall's."
    crash = "although holdall's training was killed and resumed"
    return f"Weights identical, bit for bit ({own_weights}), {crash}; {ratio:.1f} x less memory."
