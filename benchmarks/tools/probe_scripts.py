"""Public training scripts, probed: are their large buffers exact, is nothing trained, does no process remain?

    python benchmarks/tools/probe_scripts.py --checkouts DIR --python new=PATH --python old=PATH --json FILE

`probe_scripts.toml` lists the scripts: the repository, the command and the environment that it needs. DIR has a
checkout of each repository. None of their code is part of holdall. Each script runs twice:

1. The probe stops it when it is about to train. Processes are counted before and after.
2. It runs without the probe until it has trained for some seconds. `large_blocks.c` records every large block that the
   process allocates, so the truth is what the allocator was asked for, and not what a walk over objects finds. A block
   that is live at two readings is persistent. `first_sign.py` notes when training begins, which is the script's own
   time, and the sizes of weights, which are no buffers.

A script is exact if the probe names as many arrays of each size as the allocator has persistent blocks of that size,
from 16 MiB on. Deques and lists have many small blocks. Their truth is `expected_bytes` in the list, which is computed
from the script's arguments. An allocation that fails is exact if the allocator was asked for its bytes.
"""

from __future__ import annotations

import argparse
import contextlib
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

from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, Value, describe_run, read_values, show, store

HERE = Path(__file__).parent
LIST = HERE / "probe_scripts.toml"
MIB = 2**20
MIN_ARRAY_BYTES = 16 * MIB
MIN_BUFFER_BYTES = 100 * MIB
TRAINING_S = 5.0
TIMEOUT_S = 120.0
SIGN_S = 120.0
"""Seconds that the truth waits for the first sign of training. On-policy scripts may collect for longer."""


# ---------------------------------------------------------------- one script


def measure(script: dict[str, Any], checkouts: Path, python: str, library: Path) -> dict[str, Any]:
    """Probe a script, let it train, and compare."""
    checkout = checkouts / script["repository"].partition("/")[2]
    folder = checkout / script.get("folder", "")
    row: dict[str, Any] = {}
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
        "is_ready": snapshot.is_ready,
        "probe_s": round(snapshot.after_s, 2),
        "optimizer_state_bytes": sum(one.state_bytes for one in snapshot.optimizers),
        "allocation_bytes": None if snapshot.allocation is None else snapshot.allocation.nbytes,
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


TOGETHER = "all scripts: "
"""The cases of the figures over all scripts begin with these words."""
ARE_EXACT = {True: "exact", False: "wrong", None: "not compared"}


def figures_of(name: str, row: dict[str, Any], *, is_alone: bool) -> list[Figure]:
    """Return the figures of one script."""
    has_large_buffer = bool(row["is_ready"] and row.get("has_large_buffer"))
    failed_bytes = row["allocation_bytes"]
    later_s = row["probe_s"] - row["own_s"] if is_alone and row["is_ready"] and row["own_s"] is not None else None
    return [
        Figure(name, "reached training", "", _yes(row["is_ready"])),
        Figure(name, "stopped by", "", row["stopped_by"]),
        Figure(name, "arrays", "", ARE_EXACT[row.get("exact")], "exact"),
        Figure(name, "largest buffer", "MiB", row.get("found_bytes", 0) / MIB),
        Figure(name, "buffer above 100 MiB", "", _yes(has_large_buffer)),
        Figure(name, "allocation that failed", "MiB", failed_bytes / MIB if failed_bytes else None),
        Figure(name, "weights updated", "", _yes(row["optimizer_state_bytes"] > 0), "no"),
        Figure(name, "processes left", "", row["processes_left"], "0"),
        Figure(name, "later under the probe", "s", later_s),
    ]


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "no"


def summarize(rows: list[dict[str, Value]]) -> list[Figure]:
    """Return the figures over all scripts, from the values of each by the names of its figures."""
    reached = [row for row in rows if row["reached training"] == "yes"]
    large = [row for row in reached if row["buffer above 100 MiB"] == "yes"]
    compared = [row for row in reached if row["arrays"] != "not compared"]
    failed = [row for row in rows if row["allocation that failed"] is not None]
    counted = [row for row in rows if row["processes left"] is not None]
    later = [float(row["later under the probe"]) for row in rows if row["later under the probe"] is not None]
    together: dict[str, Value] = {
        "probed": len(rows),
        "reached training on this machine": len(reached),
        "of these, compared with the allocator": len(compared),
        "of these, every array of 16 MiB and more was exact": _count_exact(compared),
        "reached training with a buffer above 100 MiB": len(large),
        "of these, every array was exact": _count_exact(large),
        "an allocation failed": len(failed),
        "of these, its size was exact": _count_exact(failed),
        "updated a weight under the probe": sum(row["weights updated"] == "yes" for row in rows),
        "had their processes counted": len(counted),
        "left a process behind": sum(row["processes left"] != 0 for row in counted),
        "were timed on an otherwise idle machine": len(later),
    }
    times = {
        "reached training later under the probe by, at most": max(later) if later else None,
        "reached training later under the probe by, median": statistics.median(later) if later else None,
    }
    return [
        *(Figure(TOGETHER + name, "measured", "", number) for name, number in together.items()),
        *(Figure(TOGETHER + name, "measured", "s", seconds) for name, seconds in times.items()),
    ]


def _count_exact(rows: list[dict[str, Value]]) -> int:
    return sum(row["arrays"] == "exact" for row in rows)


def main() -> None:
    """Measure the scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR", help="folder of the checkouts")
    parser.add_argument(
        "--python",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="interpreter of an environment of the list",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="one script, or all scripts of NAME/")
    parser.add_argument("--alone", action="store_true", help="no other program runs: compare times, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    args = parser.parse_args()
    os.environ |= {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    pythons = dict(text.split("=", 1) for text in args.python)
    scripts = tomllib.loads(LIST.read_text(encoding="utf-8"))["script"]
    run = describe_run({"is_alone": args.alone})
    rows: dict[str, dict[str, Value]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "large_blocks.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "large_blocks.c"], check=True)
        for script in scripts:
            name = script["name"]
            if args.only and not any(only in (name, name.partition("/")[0]) for only in args.only):
                continue
            row = measure(script, args.checkouts, pythons[script["environment"]], library)
            figures = figures_of(name, row, is_alone=args.alone)
            show(figures)
            for kind in ("missed", "invented"):
                if row.get(kind):
                    print(f"    {kind}: {row[kind]}", file=sys.stderr)
            rows[name] = {figure.figure: figure.value for figure in figures}
            if args.json is not None:
                store(args.json, figures, run)
    if args.json is not None:
        stored = read_values(args.json)
        rows = {script["name"]: stored[script["name"]] for script in scripts if script["name"] in stored}
    together = summarize(list(rows.values()))
    show(together)
    if args.json is not None:
        store(args.json, together, run)


if __name__ == "__main__":
    main()
