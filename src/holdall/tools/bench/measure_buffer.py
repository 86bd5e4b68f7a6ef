"""Measure one buffer in its own process: `python -m holdall.tools.bench.measure_buffer TASK`, the task as JSON.

Out: JSON lines, {"done", "total"} while it runs and {"result"} last. Bytes are the growth of the process's unique
memory, from before the buffer is made until it is full; libraries are imported and used before. Adding is timed by
blocks, sampling by batch, loading up to the first batch. Every row is compared with the oracle afterwards.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.machine import held_bytes
from holdall.testing import OracleMemory, as_array
from holdall.tools.bench.buffer_libraries import BUFFER_SETUPS, BufferAdapter, BufferSetup
from holdall.tools.bench.child_process import emit, measured_save
from holdall.tools.bench.trace import Trace, TraceStep

_AT_ONCE_BYTES = 32 * 2**20
BATCH = 256
_BLOCK = 50
_EMIT_EVERY = 20 * _BLOCK
_WARM_UP_STEPS = 64  # transitions of a first buffer, which is thrown away
_BATCHES = 60


@dataclass(slots=True)
class RowDifferences:
    """What was compared."""

    compared: int = 0
    wrong: int = 0
    fields: set[str] = field(default_factory=set)  # in which rows differ
    dtypes: set[str] = field(default_factory=set)  # fields that came back as another dtype

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"fields": sorted(self.fields), "dtypes": sorted(self.dtypes)}


def compare_rows(buffer: BufferAdapter, steps: Iterator[TraceStep], count: int) -> RowDifferences:
    """Compare the first `count` transitions, all of them."""
    found = RowDifferences()
    first = next(steps)
    steps = chain([first], steps)
    parts = first.obs.values() if isinstance(first.obs, dict) else [first.obs]
    rows = max(1, _AT_ONCE_BYTES // max(2 * sum(part.nbytes for part in parts), 1))
    while found.compared < count:
        few = list(islice(steps, min(rows, count - found.compared)))
        oracle = OracleMemory(capacity=len(few))
        for step in few:
            oracle.add(*step)
        ids = np.arange(len(few))
        _compare_fields(buffer.rows(found.compared + ids), oracle.gather(ids), len(few), found)
        found.compared += len(few)
    return found


def _compare_fields(rows: dict[str, Any], expected: Any, count: int, found: RowDifferences) -> None:
    wrong = np.zeros(count, np.bool_)
    for name, value in rows.items():
        wanted = expected.terminated | expected.truncated if name == "done" else getattr(expected, name)
        pairs = {f"{name}.{key}": (value[key], wanted[key]) for key in wanted} if isinstance(wanted, dict) else None
        for path, (got, want) in (pairs or {name: (value, wanted)}).items():
            differs = _differing(as_array(got), as_array(want), path, found)
            if differs.any():
                found.fields.add(path)
                wrong |= differs
    found.wrong += int(np.count_nonzero(wrong))


def _differing(got: NDArray[Any], want: NDArray[Any], path: str, found: RowDifferences) -> NDArray[np.bool_]:
    count = len(want)
    if got.size != want.size:
        return np.ones(count, np.bool_)
    got, want = got.reshape(count, -1), want.reshape(count, -1)
    if got.dtype == want.dtype:
        got, want = (np.ascontiguousarray(rows).view(np.uint8) for rows in (got, want))
    else:
        found.dtypes.add(f"{path} as {got.dtype}")
    return np.asarray((got != want).any(axis=1))


def measure(setup_name: str, file: str, transitions: int, *, checks: bool) -> dict[str, Any]:
    """Fill, sample, save, load, and compare."""
    setup = BUFFER_SETUPS[setup_name]
    importlib.import_module("torch")  # batches of every side are its tensors
    trace = Trace.load(Path(file))
    _warm_up(setup, trace)
    before = held_bytes().unique
    buffer = setup.open(trace.observation_space, trace.action_space, transitions + 1)
    found: dict[str, Any] = {"add_s": _time_adds(buffer, trace.repeated(), transitions)}
    found["bytes"] = held_bytes().unique - before
    found["sample_s"] = _time_samples(buffer)
    if checks:
        found["rows"] = compare_rows(buffer, trace.repeated(), transitions).as_dict()
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        saved = measured_save(buffer.save, Path(folder))
        found |= {"save_s": saved["seconds"], "save_extra_bytes": saved["extra"], "file_bytes": saved["bytes"]}
        reopen = buffer.load
        buffer.close()
        del buffer
        gc.collect()
        found |= _measure_load(reopen, Path(folder), trace, transitions if checks else 0)
    return found


def _warm_up(setup: BufferSetup, trace: Trace) -> None:
    """Use a small buffer once: whatever the library loads late is loaded then."""
    buffer = setup.open(trace.observation_space, trace.action_space, _WARM_UP_STEPS)
    for step in islice(trace.repeated(), _WARM_UP_STEPS // 2):
        buffer.add(buffer.prepare(step))
    buffer.sample(_WARM_UP_STEPS // 4)
    buffer.close()
    del buffer
    gc.collect()


def _time_adds(buffer: BufferAdapter, steps: Iterator[TraceStep], transitions: int) -> float:
    """Add everything; return the median over blocks of the seconds that one `add` takes."""
    blocks = []
    for begin in range(0, transitions, _BLOCK):
        prepared = [buffer.prepare(step) for step in islice(steps, min(_BLOCK, transitions - begin))]
        add = buffer.add
        start = time.perf_counter()
        for one in prepared:
            add(one)
        blocks.append((time.perf_counter() - start) / len(prepared))
        if begin % _EMIT_EVERY == 0:
            emit({"done": begin, "total": transitions})
    del prepared
    buffer.wait()
    return float(np.median(blocks))


def _time_samples(buffer: BufferAdapter) -> float:
    seconds = []
    batch = None  # as in training, the last batch is held until the next one was drawn
    for _ in range(_BATCHES):
        start = time.perf_counter()
        batch = buffer.sample(BATCH)
        seconds.append(time.perf_counter() - start)
    del batch
    return float(np.median(seconds))


def _measure_load(reopen: Any, folder: Path, trace: Trace, compared: int) -> dict[str, Any]:
    start = time.perf_counter()
    loaded: BufferAdapter = reopen(folder)
    loaded.sample(BATCH)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start}
    if compared:
        found["loaded_rows"] = compare_rows(loaded, trace.repeated(), compared).as_dict()
    return found


def main() -> None:
    """Read the task, measure, and print the result."""
    task = json.loads(sys.argv[1])
    emit({"done": 0, "total": task["transitions"]})
    warnings.simplefilter("ignore")  # what other libraries warn of is no figure
    emit({"result": measure(**task)})


if __name__ == "__main__":
    main()
