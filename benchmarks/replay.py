"""Replay memory beside Stable-Baselines3's: bytes per transition, times, and wrong rows, on four workloads.

    python benchmarks/replay.py [--case atari|camera|market|vector|games|markets|all] [--quick] [--json FILE]

One JSON line per case, on stdout or in FILE; progress and a table on stderr. Every side's memory is measured in a
process of its own, times of all sides in one process, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import CASES, SIDES, Case
from process import commit, machine, versions
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
MIB = 2**20
FIXED_BAR_BYTES = 64 * MIB
COMPRESSED_ADD_BAR = 0.6
GAMES = ["montezumarevenge", "mspacman", "pong", "breakout"]
MARKETS = ["market20k", "market_noise"]
GROUPS = {name: [name] for name in CASES} | {
    "vector": ["vector1", "vector16"],
    "games": GAMES,
    "markets": MARKETS,
    "all": [name for name in CASES if name not in {*GAMES, *MARKETS}],
}


def measure(case: Case, wanted: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Measure one case on all sides."""
    memory: dict[str, Any] = {side: _child("footprint.py", case, wanted, progress, "--side", side) for side in SIDES}
    timed = _child("timing.py", case, wanted, progress)
    return {
        "benchmark": "replay",
        "case": case.name,
        "lanes": case.lanes,
        "compressed": wanted.compressed,
        "trace": None if wanted.trace is None else wanted.trace.name,
        "quick": wanted.quick,
        "sizes": asdict(case.sizes(wanted.quick)),
        "memory": memory,
        **timed,
        "bars": bars(case, memory, timed, wanted.compressed),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def bars(case: Case, memory: dict[str, Any], timed: dict[str, Any], prefer: str | None = None) -> list[dict[str, Any]]:
    """Hold the drop-in's figures against what is asked of them."""
    ours, theirs = memory["holdall"]["bytes_per_transition"], memory["sb3"]["bytes_per_transition"]
    rows: list[dict[str, Any]] = []

    def ask(what: str, unit: str, holdall: float, sb3: float | None, judged: float, bar: float) -> None:
        row = {"what": what, "unit": unit, "holdall": holdall, "sb3": sb3, "ratio": holdall / sb3 if sb3 else None}
        rows.append(row | {"bar": bar, "met": bool(judged <= bar)})

    bytes_bar, add_bar, sample_bar = case.bytes_bar, case.add_bar, case.sample_bar
    if prefer is not None and prefer in case.compressed:
        bytes_bar, sample_bar = case.compressed[prefer]
        add_bar = COMPRESSED_ADD_BAR
    if bytes_bar is not None:
        ask("bytes per transition", "B", ours, theirs, ours, bytes_bar)
    if case.bytes_ratio_bar is not None:
        ask("bytes per transition, of SB3's", "B", ours, theirs, ours / theirs, case.bytes_ratio_bar)
    fixed = memory["holdall"]["fixed_bytes"]
    ask("fixed cost", "B", fixed, memory["sb3"]["fixed_bytes"], fixed, FIXED_BAR_BYTES)
    for act, bar in (("add", add_bar), ("sample", sample_bar)):
        sides = timed["times"][act]
        kind = "mean_us" if act == "add" and prefer else "median_us"
        taken, plain = sides["holdall"][kind], sides["sb3"][kind]
        ask(f"{act}, of SB3's", "us", taken, plain, taken / plain, bar)
    wrong = sum(timed["rows"]["wrong"].values())
    ask("wrong rows", "", wrong, None, wrong, 0)
    return rows


def show(results: list[dict[str, Any]], console: Console) -> None:
    """Print what was found, a row for each bar, and below it what no bar is set for."""
    table = Table(title="holdall beside Stable-Baselines3's replay buffer", title_justify="left")
    table.add_column("case")
    table.add_column("figure")
    for name in ("holdall", "SB3", "ratio", "bar", "met"):
        table.add_column(name, justify="right")
    for result in results:
        for row in result["bars"]:
            verdict = "[green]yes[/]" if row["met"] else "[red]no[/]"
            numbers = [_number(row[name], row["unit"]) for name in ("holdall", "sb3")]
            is_relative = "of SB3's" in row["what"]
            bar = f"{row['bar']:.3g}" if is_relative else _number(row["bar"], row["unit"])
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}"
            table.add_row(result["case"], row["what"], *numbers, ratio, bar, verdict)
        for act in ("add_further", "add_wrapped"):
            if act in result["times"]:
                ours, theirs = result["times"][act]["holdall"], result["times"][act]["sb3"]
                numbers = [_number(side["median_us"], "us") for side in (ours, theirs)]
                table.add_row(result["case"], act.replace("_", ", "), *numbers, f"{ours['ratio_median']:.3g}", "", "")
        table.add_section()
    console.print(table)
    disturbed = [r["case"] for r in results if any(side["disturbed"] for side in r["memory"].values())]
    if disturbed:
        console.print(
            f"Bytes of {', '.join(disturbed)} were disturbed by another process that uses the same libraries; see "
            "anonymous_bytes_per_transition, or measure again on a quiet machine.",
            style="yellow",
        )


def main() -> None:
    """Read the command line, measure, print."""
    wanted = _arguments()
    console = Console(stderr=True)
    results = []
    names = GROUPS[wanted.case]
    out = sys.stdout if wanted.json is None else wanted.json.open("w", encoding="utf-8")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in names:
            results.append(measure(CASES[name], wanted, progress))
            print(json.dumps(results[-1]), file=out, flush=True)
    if wanted.json is not None:
        out.close()
    show(results, console)
    sys.exit(0 if all(row["met"] for result in results for row in result["bars"]) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=GROUPS, default="all")
    parser.add_argument("--quick", action="store_true", help="a few minutes' worth: for developing, not for reporting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON lines there instead of to stdout")
    parser.add_argument(
        "--compressed",
        choices=("speed", "balanced", "memory"),
        help="compress every full block, with this preference",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace instead of the case's own source")
    parser.add_argument("--passive", action="store_true", help="let torch's idle threads sleep (OMP_WAIT_POLICY)")
    wanted = parser.parse_args()
    if wanted.trace is not None and wanted.case not in {"atari", "camera"}:
        parser.error("--trace takes the place of one source: say --case atari or --case camera")
    if wanted.trace is not None and not wanted.trace.is_file():
        parser.error(f"--trace {wanted.trace}: there is no such file")
    return wanted


def _child(script: str, case: Case, wanted: argparse.Namespace, progress: Progress, *arguments: str) -> dict[str, Any]:
    """Run one measurement in a process of its own and return its result."""
    command = [sys.executable, str(HERE / script), "--case", case.name, *arguments]
    command += ["--quick"] if wanted.quick else []
    command += ["--compressed", wanted.compressed] if wanted.compressed else []
    command += ["--trace", str(wanted.trace)] if wanted.trace is not None else []
    environment = os.environ | ({"OMP_WAIT_POLICY": "PASSIVE"} if wanted.passive else {})
    task = progress.add_task(f"{case.name} {script.removesuffix('.py')} {' '.join(arguments[1:])}", total=None)
    result: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            message = json.loads(line)
            if "result" in message:
                result = message["result"]
            else:
                progress.update(task, completed=message["done"], total=message["total"])
        complaint = child.stderr.read()
    if child.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}:\n{complaint}")
    progress.update(task, total=1, completed=1)
    return result


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "B" and abs(value) >= 4 * MIB:
        return f"{value / MIB:,.1f} MiB"
    digits = 1 if abs(value) < 1_000 and unit else 0
    return f"{value:,.{digits}f} {unit}".strip()


if __name__ == "__main__":
    main()
