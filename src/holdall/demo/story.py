"""The demo from beginning to end: plan, train, watch, checkpoint, kill -9, resume, compare.

In:  sizes, a limit, a folder for what is left behind.  Out: a Comparison; every chapter is told on a console.
Only the replay buffer differs between the two trainings, and the second one is killed half-way: whatever differs in the
end is the buffer's doing, or the crash's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holdall.bench.child import messages, module
from holdall.demo.comparison import TITLES, Comparison
from holdall.demo.fitting import Fit, fit
from holdall.demo.live import newest
from holdall.demo.result import Drawn, Result
from holdall.errors import ArgumentError, HoldallError, MissingPackageError
from holdall.page.report import read_report
from holdall.units import format_bytes

FEWEST_STEPS = 240
FEWEST_TRANSITIONS = 2_000  # below this a line through the memory readings means nothing
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def tell(steps: int, transitions: int, limit_bytes: int | None, folder: Path, console: Console) -> Comparison:
    """Run the whole story."""
    _check(steps, transitions)
    begun = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, record = folder / "checkpoint", folder / "watch.jsonl"
    shutil.rmtree(checkpoint, ignore_errors=True)

    _chapter(console, 1, f"Will {steps + transitions:,} transitions of a camera fit?")
    fitted = fit(steps + transitions, limit_bytes)
    console.print(f"  There is to be no more than {format_bytes(fitted.limit_bytes)}.")
    _tell_fit(console, fitted)

    _chapter(console, 2, "Train with Stable-Baselines3's replay buffer")
    sizes = ("--steps", steps, "--transitions", transitions)
    plain = _finished(_run(console, "sb3", module("demo.training", "--buffer", "sb3", *sizes)))

    _chapter(console, 3, "Train with holdall's, save a checkpoint half-way, and kill -9")
    own = ("--buffer", "holdall", *sizes, "--checkpoint", checkpoint)
    saved = _killed(console, module("demo.training", *own))

    _chapter(console, 4, "Resume, and watch the memory while it fills")
    told = _run(console, "holdall", module("demo.training", *own, "--resume", "--record", record), record)
    resumed = Drawn(**told["resumed"])
    same = "identical" if resumed.batches_sha256 == saved.batches_sha256 else "DIFFERENT"
    console.print(
        f"  loaded in {resumed.seconds:.1f} s at step {resumed.step}; the next batches are {same}, bit for bit"
    )
    if now := newest(record):
        console.print(f"  at the end {now}", soft_wrap=True)

    comparison = Comparison(fitted, plain, _finished(told), saved, resumed)
    page = _page(record, folder / "report.html")
    return dataclasses.replace(comparison, seconds=time.perf_counter() - begun, report=page)


def _chapter(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold]{number}[/]  [bold]{title}[/]")


def _tell_fit(console: Console, fitted: Fit) -> None:
    for buffer, (size, said) in fitted.rows().items():
        console.print(f"  {TITLES[buffer]:18} needs {format_bytes(size):>10}   [{_STYLES[said]}]{said}[/]")
    console.print("  [dim]libraries as measured here, and the buffer; the network is small and left out[/]")


def _run(console: Console, buffer: str, command: list[str], record: Path | None = None) -> dict[str, Any]:
    """Run one training to its end behind a bar; return what it said, by kind."""
    told: dict[str, Any] = {}
    with _bars(console) as bars:
        task = bars.add_task(TITLES[buffer], total=1.0, memory="")
        for message in messages(command):
            if "done" not in message:
                told |= message
                continue
            memory = "" if record is None else newest(record).partition(", torch")[0]
            bars.update(task, completed=message["done"] / message["total"], memory=memory)
    return told


def _killed(console: Console, command: list[str]) -> Drawn:
    """Run a training until its checkpoint is safe, and kill it some steps later."""
    saved: Drawn | None = None
    with _bars(console) as bars:
        task = bars.add_task(TITLES["holdall"], total=1.0, memory="")
        lines = messages(command)
        try:
            for message in lines:
                if "saved" in message:
                    saved = Drawn(**message["saved"])
                elif saved is not None and message.get("done", 0) > saved.step:
                    break  # it has learnt something that the checkpoint does not know
                elif "done" in message:
                    bars.update(task, completed=message["done"] / message["total"])
        finally:
            lines.close()  # kills the child, with SIGKILL
    if saved is None:
        raise HoldallError(f"The training ended before it saved a checkpoint; run `{' '.join(command)}` to see why.")
    size = format_bytes(saved.checkpoint_bytes)
    console.print(f"  checkpoint at step {saved.step}: {size}, safe on disk after {saved.seconds:.1f} s; then kill -9")
    return saved


def _finished(told: dict[str, Any]) -> Result:
    if "result" not in told:
        raise HoldallError("The training ended without a result; run `python -m holdall.demo.training` alone.")
    return Result(**told["result"])


def _bars(console: Console) -> Progress:
    columns = (TextColumn("  {task.description:18}"), BarColumn(12), TextColumn("{task.percentage:3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("[dim]{task.fields[memory]}"), console=console)


def _page(record: Path, target: Path) -> str:
    """Make the page of what the watch recorded, as `holdall report` does."""
    target.write_text(read_report(record).page(), encoding="utf-8")
    return str(target)


def _check(steps: int, transitions: int) -> None:
    if importlib.util.find_spec("stable_baselines3") is None:
        msg = "The demo trains with stable-baselines3, which is not installed; run `pip install holdall[sb3]`."
        raise MissingPackageError(msg)
    for name, value, least in (("steps", steps, FEWEST_STEPS), ("transitions", transitions, FEWEST_TRANSITIONS)):
        if value < least:
            msg = f"{name} ({value}) is too few to measure anything by; give at least {least}."
            raise ArgumentError(msg)
