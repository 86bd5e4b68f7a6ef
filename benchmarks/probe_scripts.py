"""Public training scripts, probed: are their large buffers exact, is nothing trained, does no process remain?

    python benchmarks/probe_scripts.py --checkouts DIR --python new=PATH --python old=PATH --json FILE
    python benchmarks/probe_scripts.py --docs    # measures nothing, and writes the figures of docs/benchmarks.md

`probe_scripts.toml` lists the scripts: the repository, the command and the environment that it needs. DIR has a
checkout of each repository; none of their code is part of holdall. `--only NAME` measures one script, or all scripts of
`NAME/`, and keeps the other rows of FILE. `--alone` says that no other program runs: only then is the time of the probe
compared with that of the script.

Each script runs twice:

1. The probe stops it when it is about to train. Processes are counted before and after.
2. It runs without the probe until it has trained for `TRAINING_S`. `large_blocks.c` records every large block that the
   process allocates, so the truth is what the allocator was asked for, and not what a walk over objects finds. A block
   that is live at two readings is persistent. `first_sign.py` notes when training begins, which is the script's own
   time, and the sizes of weights, which are no buffers.

A script is exact if the probe names as many arrays of each size as the allocator has persistent blocks of that size,
from `MIN_ARRAY_BYTES` on. Deques and lists have many small blocks. Their truth is `expected_bytes` in the list, which
is computed from the script's arguments. An allocation that fails is exact if the allocator was asked for its bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from process import commit, emit, machine

from holdall.tools import lint
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot

HERE = Path(__file__).parent
LIST = HERE / "probe_scripts.toml"
RESULTS = HERE / "results" / "probe_scripts.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
MIN_ARRAY_BYTES = 16 * 2**20
MIN_BUFFER_BYTES = 100 * 2**20
TRAINING_S = 5.0
TIMEOUT_S = 120.0
SIGN_S = 120.0
"""Seconds that the truth waits for the first sign of training. On-policy scripts may collect for longer."""


# ---------------------------------------------------------------- one script


def measure(script: dict[str, Any], checkouts: Path, python: str, library: Path) -> dict[str, Any]:
    """Probe a script, let it train, and compare."""
    checkout = checkouts / script["repository"].partition("/")[2]
    folder = checkout / script.get("folder", "")
    row: dict[str, Any] = {name: script[name] for name in ("name", "repository", "command", "environment")}
    with tempfile.TemporaryDirectory(prefix="probe-scripts-") as scratch, _keep_unchanged(folder):
        words = {"python": python}
        if "block" in script:
            block = Path(scratch) / "train.py"
            block.write_text(read_block(checkout, script["block"]), encoding="utf-8")
            words["BLOCK"] = str(block)
        command = [words.get(word, word) for word in shlex.split(script["command"])]
        before = _list_processes()
        snapshot = probe(command, TIMEOUT_S, cwd=folder)
        left = [process for process in _list_processes() - before if _is_ours(process)]
        row |= describe(snapshot) | {"processes_left": len(left)}
        truth = run_truth(command, folder, library, Path(scratch), script.get("training_s", TRAINING_S))
    row |= truth
    if snapshot.allocation is not None:
        row["exact"] = snapshot.allocation.nbytes in truth["failed_bytes"]
    elif snapshot.is_ready and truth["own_s"] is None and snapshot.trigger != "steps":
        row["exact"] = None  # The script itself did not begin to train in time, so there is no truth.
    elif snapshot.is_ready:
        row |= compare(snapshot, truth, script.get("expected_bytes"))
    row["findings"] = [{"rule": one.rule, "message": one.message} for one in lint.snapshot(snapshot)]
    row["commit"] = commit()
    return row


def read_block(checkout: Path, place: str) -> str:
    """Return a Python example of a documentation page."""
    page, _, number = place.rpartition(":")
    text = (checkout / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return blocks[int(number)]


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Return the row's part that comes from the probe."""
    return {
        "stopped_by": snapshot.stopped_by,
        "trigger": snapshot.trigger,
        "is_ready": snapshot.is_ready,
        "probe_s": round(snapshot.after_s, 2),
        "optimizer_state_bytes": sum(one.state_bytes for one in snapshot.optimizers),
        "error": snapshot.error.strip().splitlines()[-1] if snapshot.error and snapshot.error.strip() else None,
        "allocation_bytes": None if snapshot.allocation is None else snapshot.allocation.nbytes,
        "buffers": [
            {"owner": one.owner, "class": one.class_name, "kind": one.kind, "nbytes": one.nbytes, "exact": one.is_exact}
            for one in snapshot.buffers
        ],
        "memories": len(snapshot.memories),
        "notes": list(snapshot.notes),
    }


def compare(snapshot: Snapshot, truth: dict[str, Any], expected_bytes: int | None) -> dict[str, Any]:
    """Compare the arrays that the probe found with the blocks of the allocator."""
    arrays = [array for buffer in snapshot.buffers for array in buffer.arrays] + list(snapshot.arrays)
    found = Counter(array.nbytes for array in arrays if array.nbytes >= MIN_ARRAY_BYTES and not array.is_on_disk)
    real = Counter(nbytes for nbytes in truth["block_bytes"] if nbytes >= MIN_ARRAY_BYTES)
    missed = sorted((real - found).elements())
    invented = sorted((found - real).elements())
    largest = max((buffer.nbytes for buffer in snapshot.buffers), default=0)
    row: dict[str, Any] = {"found_bytes": largest, "missed": missed, "invented": invented}
    if expected_bytes is not None:
        row["expected_bytes"] = expected_bytes
        row["exact"] = largest == expected_bytes
        row["off_by"] = round(largest / expected_bytes - 1, 4)
    else:
        row["exact"] = not missed and not invented
    row["has_large_buffer"] = max(largest, sum(real.elements()), expected_bytes or 0) >= MIN_BUFFER_BYTES
    return row


# ---------------------------------------------------------------- the truth


def run_truth(command: list[str], folder: Path, library: Path, scratch: Path, training_s: float) -> dict[str, Any]:
    """Run a command until it has trained for a while. Return what the allocator says, and when it began to train."""
    blocks = scratch / "blocks"
    blocks.mkdir()
    startup = scratch / "startup"
    startup.mkdir()
    shutil.copy(HERE / "first_sign.py", startup / "sitecustomize.py")
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "BLOCKS_FOLDER": str(blocks),
        "PYTHONPATH": os.pathsep.join([str(startup), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WANDB_MODE": "disabled",
    }
    begun = time.monotonic()
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    sign = blocks / "sign"
    started_s = None
    try:
        while process.poll() is None and time.monotonic() - begun < SIGN_S and not sign.exists():
            time.sleep(0.05)
        if sign.exists():
            started_s = float(sign.read_text(encoding="ascii")) - begun
            _wait(process, training_s)
        first = _read_blocks(process, blocks)
        _wait(process, 2.0)
        second = _read_blocks(process, blocks) if process.poll() is None else first
    finally:
        _end_group(process)
    networks = {int(line) for line in _read_lines(blocks / "networks")}
    persistent = sorted(nbytes for place, nbytes in second.items() if first.get(place) == nbytes)
    failed = [
        int(line.split()[1]) for file in blocks.iterdir() for line in _read_lines(file) if line.startswith("failed")
    ]
    return {
        "own_s": None if started_s is None else round(started_s, 2),
        "block_bytes": [nbytes for nbytes in persistent if nbytes >= 2**20 and nbytes not in networks],
        "failed_bytes": sorted(set(failed)),
    }


def _read_blocks(process: subprocess.Popen[bytes], blocks: Path) -> dict[tuple[str, str], int]:
    """Ask all processes of a command for their tables. Return the bytes of each block of the one that has most."""
    known = set(blocks.iterdir())
    if process.poll() is None:
        for one in _list_group(process.pid):
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGUSR2)
        time.sleep(1.0)
    tables: dict[str, dict[tuple[str, str], int]] = {}
    for file in sorted(set(blocks.iterdir()) - known if process.poll() is None else blocks.iterdir()):
        pid, _, kind = file.name.partition(".")
        if not pid.isdigit() or kind.endswith("part"):
            continue
        lines = [line.split() for line in _read_lines(file)]
        tables[pid] = {(pid, address): int(nbytes) for address, nbytes in lines if address != "failed"}
    return max(tables.values(), key=lambda table: sum(table.values()), default={})


def _read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").splitlines() if file.exists() else []


def _list_group(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for one in _list_group(process.pid):
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)


@contextlib.contextmanager
def _keep_unchanged(folder: Path) -> Any:
    """Delete the files that a script wrote into its checkout, such as its runs."""
    yield
    subprocess.run(["git", "clean", "-fdxq", "."], cwd=folder, check=False)


def _list_processes() -> set[psutil.Process]:
    return set(psutil.process_iter())


def _is_ours(process: psutil.Process) -> bool:
    """Return whether a process still runs and belongs to a probe of this process."""
    with contextlib.suppress(psutil.Error):
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return bool(is_running and process.environ().get("HOLDALL_PROBE_PID") == str(os.getpid()))
    return False


# ---------------------------------------------------------------- all scripts


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all scripts."""
    reached = [row for row in rows if row["is_ready"]]
    large = [row for row in reached if row.get("has_large_buffer")]
    compared = [row for row in reached if row.get("exact") is not None]
    later = [row["probe_s"] - row["own_s"] for row in reached if row.get("is_alone") and row["own_s"] is not None]
    return {
        "scripts": len(rows),
        "reach_training": len(reached),
        "compared": len(compared),
        "exact_of_all": sum(1 for row in compared if row["exact"]),
        "failed_allocations": sum(1 for row in rows if row["allocation_bytes"]),
        "failed_allocations_exact": sum(1 for row in rows if row["allocation_bytes"] and row.get("exact")),
        "with_large_buffer": len(large),
        "exact": sum(1 for row in large if row["exact"]),
        "updated_weights": sum(1 for row in rows if row["optimizer_state_bytes"]),
        "processes_counted": sum(1 for row in rows if row["processes_left"] is not None),
        "processes_left": sum(row["processes_left"] or 0 for row in rows),
        "probe_later_s": {
            "scripts": len(later),
            "most": round(max(later, default=0.0), 2),
            "median": round(statistics.median(later), 2) if later else 0.0,
        },
    }


def write_summary(results: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    summary = results["summary"]
    later = summary["probe_later_s"]
    missed = sum(1 for row in results["scripts"] if not row["is_ready"])
    counted = summary["processes_counted"]
    return (
        f"No weight was updated. In the {counted} scripts in which processes were counted, "
        f"{summary['processes_left'] or 'none'} was left over. On an otherwise idle machine, "
        f"{later['scripts']} scripts reached training at most {later['most']:.1f} s later under the probe than without "
        f"it (median {later['median']:.1f} s). {summary['failed_allocations']} allocations failed, and "
        f"{summary['failed_allocations_exact']} were reported with their exact size.\n\n"
        f"{missed} scripts did not get as far as training here, most of them because they need packages or versions "
        "that the machine does not have. [The results](../benchmarks/results/probe_scripts.json) have each reason."
    )


def write_page(text: str, results: dict[str, Any]) -> str:
    """Return the page with the summary of the results."""
    begin = "<!-- probe -->"
    new = f"{begin}\n{write_summary(results)}\n<!-- end of probe -->"
    before, _, rest = text.partition("<!-- probe -->")
    _, _, after = rest.partition("<!-- end of probe -->")
    return before + new + after


def main() -> None:
    """Measure the scripts and print one line for each, or write the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, metavar="DIR")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    if args.checkouts is None or not args.python:
        parser.error("--checkouts and --python are needed to measure")
    os.environ |= {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    pythons = dict(text.split("=", 1) for text in args.python)
    scripts = tomllib.loads(LIST.read_text(encoding="utf-8"))["script"]
    rows: dict[str, dict[str, Any]] = {}
    if args.only and args.json and args.json.exists():
        rows = {row["name"]: row for row in json.loads(args.json.read_text(encoding="utf-8"))["scripts"]}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "large_blocks.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "large_blocks.c"], check=True)
        for script in scripts:
            if args.only and not any(name in (script["name"], script["name"].partition("/")[0]) for name in args.only):
                continue
            row = measure(script, args.checkouts, pythons[script["environment"]], library)
            row["is_alone"] = args.alone
            rows[script["name"]] = row
            states = {True: "exact", False: "WRONG", None: row["trigger"]}
            state = states[row.get("exact")]
            size = row.get("found_bytes") or row["allocation_bytes"] or 0
            print(
                f"{script['name']:34} {state:6} {size / 2**20:10,.1f} MiB {row['probe_s']:6.1f} s, own {row['own_s']} "
                f"{row['stopped_by'][:60]}",
                file=sys.stderr,
                flush=True,
            )
            for name in ("missed", "invented"):
                if row.get(name):
                    print(f"    {name}: {row[name]}", file=sys.stderr)
            if not row["is_ready"]:
                print(f"    {row['error']}", file=sys.stderr)
    ordered = [rows[script["name"]] for script in scripts if script["name"] in rows]
    summary = summarize(ordered)
    result = {"machine": machine(), "commit": commit(), "summary": summary, "scripts": ordered}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(summary)


if __name__ == "__main__":
    main()
