"""Train twice, each in a fresh process, and set the two beside each other.

In:  how many steps to train and how many transitions to hold.   Out: a Comparison, and its table.
Only the replay buffer differs between the two processes, so every difference in the table is the buffer's.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdall.demo.result import Result
from holdall.errors import ArgumentError, HoldallError, MissingPackageError
from holdall.units import format_bytes

TITLES = {"sb3": "Stable-Baselines3", "holdall": "holdall"}
FEWEST_STEPS = 200
FEWEST_TRANSITIONS = 2_000  # below this a line through the memory readings means nothing


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same training with either buffer."""

    sb3: Result
    holdall: Result

    @property
    def weights_identical(self) -> bool:
        """Whether both trainings ended with the same weights, bit for bit."""
        return self.sb3.weights_sha256 == self.holdall.weights_sha256

    def as_json(self) -> str:
        """Write the comparison as one JSON object."""
        return json.dumps({**dataclasses.asdict(self), "weights_identical": self.weights_identical})


def compare(steps: int, transitions: int, console: Console) -> Comparison:
    """Run both trainings, one after the other, behind a progress bar on `console`."""
    _check(steps, transitions)
    columns = (TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks = {buffer: bars.add_task(title, start=False, total=1.0) for buffer, title in TITLES.items()}
        results = {}
        for buffer, task in tasks.items():
            bars.start_task(task)
            results[buffer] = _train(buffer, steps, transitions, partial(_advance, bars, task))
    return Comparison(**results)


def _advance(bars: Progress, task: TaskID, done: float) -> None:
    bars.update(task, completed=done)


def table(comparison: Comparison) -> Table:
    """Lay the two trainings out as a table for people."""
    drawn = Table(title=f"SAC on a camera and a vector, {comparison.sb3.transitions:,} transitions held")
    drawn.add_column("replay buffer")
    for heading in ("bytes per transition", "peak memory", "steps per second"):
        drawn.add_column(heading, justify="right")
    for result in (comparison.sb3, comparison.holdall):
        drawn.add_row(
            TITLES[result.buffer],
            f"{result.bytes_per_transition:,.0f}",
            format_bytes(result.peak_bytes),
            f"{result.steps_per_second:.1f}",
        )
    return drawn


def verdict(comparison: Comparison) -> str:
    """Say whether the two policies are the same, and what the memory came to."""
    ratio = comparison.sb3.bytes_per_transition / comparison.holdall.bytes_per_transition
    if comparison.weights_identical:
        return f"Weights identical, bit for bit ({comparison.holdall.weights_sha256[:12]}); {ratio:.1f} x less memory."
    return (
        f"WEIGHTS DIFFER: {comparison.sb3.weights_sha256[:12]} with Stable-Baselines3's buffer, "
        f"{comparison.holdall.weights_sha256[:12]} with holdall's."
    )


def _check(steps: int, transitions: int) -> None:
    if importlib.util.find_spec("stable_baselines3") is None:
        msg = "The demo trains with stable-baselines3, which is not installed; run `pip install holdall[sb3]`."
        raise MissingPackageError(msg)
    for name, value, least in (("steps", steps, FEWEST_STEPS), ("transitions", transitions, FEWEST_TRANSITIONS)):
        if value < least:
            msg = f"{name} ({value}) is too few to measure anything by; give at least {least}."
            raise ArgumentError(msg)


def _train(buffer: str, steps: int, transitions: int, show: Callable[[float], None]) -> Result:
    """Run one training in a fresh process; tell `show` how far it is, from 0 to 1."""
    command = [sys.executable, "-m", "holdall.demo.training"]
    command += ["--buffer", buffer, "--steps", str(steps), "--transitions", str(transitions)]
    result = None
    for message in _messages(command):
        if "result" in message:
            result = Result(**message["result"])
        else:
            show(message["done"] / message["total"])
    if result is None:
        msg = f"The training ended without a result; run `{' '.join(command)}` to see why."
        raise HoldallError(msg)
    return result


def _messages(command: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that `command` prints; raise what it complained of if it fails."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8") as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        except BaseException:  # Ctrl-C, or nobody reads on: the training must not outlive its parent
            child.kill()
            raise
        if child.wait() != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["it said nothing"])[-1]
            msg = f"The training ended with exit code {child.returncode} ({last}); run `{' '.join(command)}` alone."
            raise HoldallError(msg)
