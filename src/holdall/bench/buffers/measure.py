"""One buffer in a process of its own: `python -m holdall.bench.buffers.measure --way holdall --trace FILE`.

Out: JSON lines on stdout, {"done", "total"} while it runs and {"result"} last.
Bytes are what the process's unique memory grows by, from before the buffer is made until it is full: some libraries
touch all of it at once, others as it fills. Libraries are imported and used before. Adding is timed by blocks, sampling
by batch, loading up to the first batch; the oracle is asked when its memory weighs on nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from holdall.bench.buffers.right import compare
from holdall.bench.buffers.ways import WAYS, Buffer, Way
from holdall.bench.child import emit
from holdall.bench.trace import Step, Trace
from holdall.machine import begin_peak, held_bytes, peak_bytes

BATCH = 256
_BLOCK = 50
_TELL_EVERY = 20 * _BLOCK
_TRIED = 64  # transitions of a first buffer, which is thrown away
_BATCHES = 60


def measure(way_name: str, file: Path, transitions: int, *, checks: bool) -> dict[str, Any]:
    """Fill, sample, save, load, and compare."""
    way = WAYS[way_name]
    importlib.import_module("torch")  # batches of every side are its tensors
    trace = Trace.load(file)
    _tried(way, trace)
    before = held_bytes().unique
    buffer = way.open(trace.observation_space, trace.action_space, transitions + 1)
    found: dict[str, Any] = {"add_s": _filled(buffer, trace.repeated(), transitions)}
    found["bytes"] = held_bytes().unique - before
    found["sample_s"] = _sampled(buffer)
    if checks:
        found["rows"] = compare(buffer, trace.repeated(), transitions).as_dict()
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        found |= _saved(buffer, Path(folder))
        reopen = buffer.load
        buffer.close()
        del buffer
        gc.collect()
        found |= _loaded(reopen, Path(folder), trace, transitions if checks else 0)
    return found


def _tried(way: Way, trace: Trace) -> None:
    """Use a small buffer once: whatever the library loads late is loaded then."""
    buffer = way.open(trace.observation_space, trace.action_space, _TRIED)
    for step in islice(trace.repeated(), _TRIED // 2):
        buffer.add(buffer.arranged(step))
    buffer.sample(_TRIED // 4)
    buffer.close()
    del buffer
    gc.collect()


def _filled(buffer: Buffer, steps: Iterator[Step], transitions: int) -> float:
    """Add everything; return the median over blocks of the seconds that one `add` takes."""
    blocks = []
    for begin in range(0, transitions, _BLOCK):
        arranged = [buffer.arranged(step) for step in islice(steps, min(_BLOCK, transitions - begin))]
        add = buffer.add
        start = time.perf_counter()
        for one in arranged:
            add(one)
        blocks.append((time.perf_counter() - start) / len(arranged))
        if begin % _TELL_EVERY == 0:
            emit({"done": begin, "total": transitions})
    del arranged
    buffer.settle()
    return float(np.median(blocks))


def _sampled(buffer: Buffer) -> float:
    seconds = []
    batch = None  # as in training, the last batch is held until the next one was drawn
    for _ in range(_BATCHES):
        start = time.perf_counter()
        batch = buffer.sample(BATCH)
        seconds.append(time.perf_counter() - start)
    del batch
    return float(np.median(seconds))


def _saved(buffer: Buffer, folder: Path) -> dict[str, Any]:
    resident = held_bytes().resident
    has_peak = begin_peak()
    start = time.perf_counter()
    buffer.save(folder)
    seconds = time.perf_counter() - start
    extra = max(peak_bytes() - resident, 0) if has_peak else None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"save_s": seconds, "save_extra_bytes": extra, "file_bytes": size}


def _loaded(reopen: Any, folder: Path, trace: Trace, compared: int) -> dict[str, Any]:
    start = time.perf_counter()
    loaded: Buffer = reopen(folder)
    loaded.sample(BATCH)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start}
    if compared:
        found["loaded_rows"] = compare(loaded, trace.repeated(), compared).as_dict()
    return found


def main() -> None:
    """Read the command line, measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m holdall.bench.buffers.measure")
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--transitions", type=int, required=True)
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    emit({"done": 0, "total": wanted.transitions})
    warnings.simplefilter("ignore")  # what other libraries warn of is no figure
    emit({"result": measure(wanted.way, wanted.trace, wanted.transitions, checks=wanted.check)})


if __name__ == "__main__":
    main()
