"""What `holdall watch` promises: `python benchmarks/watch/promises.py [--case leak] [--json FILE]`.

    attributed  nearly all memory of three trainings has a name
    cost        the watch slows a training down by at most 0.5 %, and takes little itself
    leak        planted leaks are found, with their slope
    clean       trainings that leak nothing cause no alarm
    runout      the forecast of the step at which a control group is full
    disk        the same for a file system
    vram        the same for a GPU's memory, which is only measured if it is named
    note        the memory of a search over hyperparameters in one process has names

The limits under which trainings run out of memory are real: control groups of the kernel and a small file system, which
need root.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from holdall.machine import held_bytes
from holdall.tools.watch.exchange import read_agent_report, read_latest
from holdall.tools.watch.reading import BYTES_PER_PYTHON_OBJECT
from holdall.tools.watch.watcher import Watcher
from holdall.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, store

HERE = Path(__file__).parent
NAMED = "at least 95 % of the tree's PSS has a name"
COUNTED = "named buffers against touched pages, within 1 %"
SLOWER = "a watch costs at most 0.5 % of it"
WATCHER = "at most 3 % of a core and 40 MB"
LEAK = "found within 20,000 steps, its slope within 15 %"
CLEAN_RUNS = "no alarm in 20 trainings of 20,000 steps"
FORECAST = "the forecast half-way is within 10 % of the step of running out"
SEARCH = "at least 95 % of its PSS has a name"
ATTRIBUTION = 3
"""Version of the code that attributes memory to groups. Raise it when that code is rewritten."""
TRAININGS = str(HERE / "trainings.py")
FILLING = str(HERE / "filling.py")
FULL = 3
"""Exit code of `filling.py`."""
MIB = 2**20
CLEAN = ("dqn-vector", "ppo-vector", "td3-vector", "dqn-holdall", "sac-small")
GROUPS = Path("/sys/fs/cgroup/memory")
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@dataclass(frozen=True)
class Row:
    """One promise in one case: what was measured, and whether the promise holds."""

    promise: str
    case: str
    measured: str
    holds: bool
    parts: dict[str, int] = field(default_factory=dict)
    """Resident bytes by name, where a page shows them."""

    def figures(self) -> list[Figure]:
        """Return the figures of the row."""
        case = f"{self.case}: {self.promise}"
        return [
            Figure(case, "measured", "", self.measured),
            Figure(case, "holds", "", "yes" if self.holds else "no", "yes"),
            Figure(case, "attribution", "", ATTRIBUTION),
            *(Figure(case, name, "MiB", nbytes / MIB) for name, nbytes in self.parts.items()),
        ]


def attributed(_: argparse.Namespace) -> list[Row]:
    """Read three trainings once each. Compare the named buffers with the trainings' own count."""
    rows = []
    for model, steps in (("sac", 2000), ("ppo-workers", 2048), ("dqn-atari", 2500)):
        command = [sys.executable, TRAININGS, model, "--steps", str(steps), "--size", "5000", "--pause"]
        with subprocess.Popen(command, **PIPES) as child:
            truth = json.loads(_last_line(child))
            reading = Watcher(child.pid, 1.0).run_pass().reading
            child.communicate("\n")
        off = abs(reading.of("buffers") - truth["touched"]) / truth["touched"]
        rows.append(
            Row(
                NAMED,
                model,
                f"{100 * reading.attributed:.2f} % of {format_bytes(reading.pss)}",
                reading.attributed >= 0.95 and sum(part.resident for part in reading.parts) == reading.pss,
            )
        )
        rows.append(Row(COUNTED, model, f"off by {100 * off:.3f} %", off <= 0.01))
    return rows


def cost(wanted: argparse.Namespace) -> list[Row]:
    """Compare turns of one training with and without a watch, and measure the watcher."""
    command = [sys.executable, TRAININGS, "dqn-vector", "--rates", str(4 * wanted.rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    slower = {clock: _slower(turns, clock) for clock in ("cpu", "wall")}
    agent, share, pss, rss = _measure_watcher()
    return [
        Row(
            SLOWER,
            "step rate",
            f"{_percent(slower['cpu'])} of the training's own time, by turns; "
            f"{_percent(slower['wall'])} by the clock; the agent's own count {100 * agent:.2f} %",
            slower["cpu"][0] <= 0.005 and agent <= 0.005,
        ),
        Row(
            WATCHER,
            "the watcher",
            f"{100 * share:.1f} % of a core, {format_bytes(pss)} PSS, {format_bytes(rss)} resident",
            share <= 0.03 and rss <= 40e6,
        ),
    ]


def leak(wanted: argparse.Namespace) -> list[Row]:
    """Plant leaks while a buffer fills."""
    rows = []
    # Small objects are counted, and the training keeps some of its own, such as the returns of episodes.
    own_objects = _count_kept_objects("sac-small", 20_000, wanted.seed)
    for nbytes, planted, unit in ((512, 1.0 + own_objects, "objects"), (2048, 2048.0, "B")):
        verdicts = _leaks_of("sac-small", nbytes, 20_000, wanted.seed)
        slope = verdicts[-1]["evidence"]["slope"] if verdicts else None
        found_at = verdicts[0]["evidence"]["to"] if verdicts else None
        off = None if slope is None else slope / planted - 1.0
        measured = "not found"
        if slope is not None and off is not None:
            measured = f"found at step {found_at:,.0f}, {slope:,.4g} {unit} a step ({100 * off:+.1f} %)"
        rows.append(Row(LEAK, f"leak of {nbytes} B a step", measured, off is not None and abs(off) <= 0.15))
    return rows


def clean(wanted: argparse.Namespace) -> list[Row]:
    """Watch trainings that leak nothing."""
    alarms = 0
    for run in range(wanted.runs):
        model = CLEAN[run % len(CLEAN)]
        found = _leaks_of(model, 0, 20_000, run)
        alarms += bool(found)
        print(f"clean run {run} ({model}): {found[-1]['text'] if found else 'quiet'}", file=sys.stderr)
    measured = f"{alarms} alarms in {wanted.runs} runs"
    return [Row(CLEAN_RUNS, "no leak", measured, not alarms and wanted.runs >= 20)]


def runout(_: argparse.Namespace) -> list[Row]:
    """Run a training until the limit of its control group. Compare the forecast half-way with the end."""
    forecasts = Forecasts()
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "step"
        program = ["sac-small", "--steps", "400000", "--size", "400000", "--counter", str(counter)]
        code = _run_in_group(700 * MIB, [sys.executable, TRAININGS, *program], forecasts.listen)
        ended = int.from_bytes(counter.read_bytes(), "little")
    return [_forecasts_row("control group of 700 MiB", forecasts, ended, died=code == -9, how=_killed(code))]


def vram(_: argparse.Namespace) -> list[Row]:
    """Fill a GPU. Compare the forecast half-way with the end."""
    forecasts = Forecasts()
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "step"
        code = _run_and_listen([sys.executable, FILLING, "vram", str(counter)], forecasts.listen)
        ended = int(counter.read_text(encoding="ascii"))
    return [_forecasts_row("a GPU's memory", forecasts, ended, died=code == FULL, how="out of memory")]


def disk(_: argparse.Namespace) -> list[Row]:
    """Fill a disk of 768 MiB. Compare the forecast half-way with the end."""
    forecasts = Forecasts()
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "step"
        small = Path(folder) / "disk"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=768m", "tmpfs", str(small)], check=True)
        try:
            code = _run_and_listen([sys.executable, FILLING, "disk", str(counter), str(small)], forecasts.listen)
        finally:
            subprocess.run(["umount", str(small)], check=True)
        ended = int(counter.read_text(encoding="ascii"))
    return [_forecasts_row("a file system of 768 MiB", forecasts, ended, died=code == FULL, how="full")]


class Forecasts:
    """The forecasts of a watch: at a step, the step at which memory would run out."""

    def __init__(self) -> None:
        self.said: list[tuple[int, float]] = []

    def listen(self, pid: int) -> None:
        """Record the newest forecast of a process."""
        latest = read_latest(pid) or {"reading": {"step": None}, "verdicts": []}
        steps = [one["evidence"]["step"] for one in latest["verdicts"] if one["name"] == "running out"]
        if latest["reading"]["step"] is not None and steps:
            self.said.append((latest["reading"]["step"], steps[0]))


def _forecasts_row(case: str, forecasts: Forecasts, ended: int, *, died: bool, how: str) -> Row:
    at, predicted = min(forecasts.said, key=lambda one: abs(one[0] - ended / 2), default=(0, 0.0))
    off = predicted / ended - 1.0
    measured = f"ended at step {ended:,} ({how}); predicted at step {at:,}: {predicted:,.0f} ({100 * off:+.1f} %)"
    return Row(FORECAST, case, measured, abs(off) <= 0.1 and died and 0.45 <= at / ended <= 0.55)


def note(_: argparse.Namespace) -> list[Row]:
    """Build the process of note 003, and read it."""
    command = [sys.executable, str(HERE / "search.py")]
    with subprocess.Popen(command, **PIPES) as child:
        _last_line(child)
        reading = Watcher(child.pid, 1.0).run_pass().reading
        child.communicate("\n")
    measured = (
        f"{format_bytes(reading.pss)} with {reading.threads} threads; {100 * reading.attributed:.1f} % has a name"
    )
    parts = {f"{part.group}: {part.name}": part.resident for part in reading.parts}
    return [Row(SEARCH, "a search in one process", measured, reading.attributed >= 0.95, parts)]


CASES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "attributed": attributed,
    "cost": cost,
    "leak": leak,
    "clean": clean,
    "runout": runout,
    "vram": vram,
    "disk": disk,
    "note": note,
}


def _leaks_of(model: str, nbytes: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the leaks that were reported of a training."""
    return [line for line in _train(model, nbytes, steps, seed) if line["kind"] == "verdict" and line["name"] == "leak"]


def _count_kept_objects(model: str, steps: int, seed: int) -> float:
    """Return how many Python objects a training without a leak keeps for each step, in its second half."""
    readings = [
        line for line in _train(model, 0, steps, seed) if line["kind"] == "reading" and line["step"] > steps / 2
    ]
    first, last = (_count_objects(reading) for reading in (readings[0], readings[-1]))
    steps_between = float(readings[-1]["step"] - readings[0]["step"])
    return (last - first) / steps_between


def _count_objects(reading: dict[str, Any]) -> float:
    nbytes = sum(part["resident"] for part in reading["parts"] if part["name"].startswith("objects, estimated"))
    return float(nbytes / BYTES_PER_PYTHON_OBJECT)


def _train(model: str, nbytes: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train with a leak of `nbytes` a step, and return the lines of the watch's record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        command = [sys.executable, TRAININGS, model, "--steps", str(steps), "--size", str(steps), "--seed", str(seed)]
        subprocess.run([*command, "--leak", str(nbytes), "--record", str(record)], check=True)
        return _lines(record)


def _lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def _run_and_listen(command: list[str], listen: Callable[[int], None] | None) -> int:
    """Run a command, with `listen` called every half second with its process id. Return its exit code."""
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            if listen is not None:
                listen(child.pid)
            time.sleep(0.5)
    return child.returncode


def _run_in_group(limit_bytes: int, command: list[str], listen: Callable[[int], None] | None = None) -> int:
    """Run a command in a control group of its own, and return its exit code: negative if it was killed."""
    group = GROUPS / f"holdall-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        return _run_and_listen(["/bin/sh", "-c", enter, "sh", *command], listen)
    finally:
        for _ in range(50):  # a watcher beside it may still be on its way out
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.2)


def _killed(code: int) -> str:
    return "killed by the kernel" if code == -9 else "finished" if code == 0 else f"exit code {code}"


def _last_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _slower(turns: list[dict[str, Any]], clock: str) -> tuple[float, float]:
    """Return by how much watched turns are slower than their neighbours, and the error of that figure."""
    ratios = []
    for pair in zip(turns[::2], turns[1::2], strict=False):
        watched, plain = sorted(pair, key=lambda turn: not turn["watched"])
        ratios.append(watched[clock] / plain[clock] - 1.0)
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), float((high - low) / len(ratios) ** 0.5)


def _percent(slower: tuple[float, float]) -> str:
    return f"{100 * slower[0]:+.2f} % (give or take {100 * slower[1]:.2f})"


def _measure_watcher() -> tuple[float, float, int, int]:
    """Return the agent's share of a training's time, by its own count, and the watcher's CPU share, PSS and RSS."""
    command = [sys.executable, TRAININGS, "sac-small", "--steps", "6000", "--size", "6000", "--pause"]
    used = (0.0, 1.0)
    pss = 0
    rss = 0
    first: tuple[float, float] | None = None
    with subprocess.Popen(command, **PIPES) as child:
        assert child.stdout is not None
        while not select.select([child.stdout], [], [], 0.5)[0]:
            for process in _watchers(child.pid):
                times = process.cpu_times()
                held = held_bytes(process.pid)
                now = (times.user + times.system, time.monotonic())
                first = first or now  # from here on: importing came before
                used = (now[0] - first[0], now[1] - first[1])
                pss = max(pss, held.proportional)
                rss = max(rss, held.resident)
        told = read_agent_report(child.pid)
        wall = time.time() - psutil.Process(child.pid).create_time()
        child.communicate("\n")
    return (told.seconds_spent / wall if told else 1.0), used[0] / max(used[1], 1.0), pss, rss


def _watchers(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
        return [child for child in children if "holdall.tools.watch.watcher" in " ".join(child.cmdline())]
    except (psutil.Error, OSError):
        return []


def main() -> None:
    """Measure cases, print their rows, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all but vram")
    parser.add_argument("--runs", type=int, default=20, help="trainings of the case `clean` (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of four turns of the case `cost` (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    run = describe_run({"attribution": ATTRIBUTION})
    for name in wanted.case or [name for name in CASES if name != "vram"]:
        rows = CASES[name](wanted)
        for row in rows:
            print(f"{'holds' if row.holds else 'FAILS'}  {row.case}: {row.measured} [{row.promise}]", flush=True)
        if wanted.json is not None:
            store(wanted.json, [figure for row in rows for figure in row.figures()], run)


if __name__ == "__main__":
    main()
