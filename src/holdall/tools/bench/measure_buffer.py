"""One buffer in a process of its own: `python -m holdall.tools.bench.measure_buffer TASK`, with the task as JSON.

Out: messages, `ChildProgress` during the measurement and `RoundFigures` at the end. Bytes are the growth of the
process's unique memory, from the moment before the buffer is made until the buffer is full. The library is imported
and used before. Adds are timed in blocks, samples one by one, and loading until the first batch is drawn.
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
from holdall.tools.bench import measure_save
from holdall.tools.bench.buffer_libraries import BUFFER_SETUPS, BufferAdapter, BufferSetup
from holdall.tools.bench.child import ChildProgress, emit
from holdall.tools.bench.trace import Trace, TraceStep

_COMPARED_BYTES = 32 * 2**20
"""Bytes of observations that are compared at once."""
BATCH = 256
"""Transitions of a batch."""
_BLOCK = 50
"""Transitions whose adding is timed together."""
_EMIT_EVERY = 20 * _BLOCK
"""Transitions between two reports of progress."""
_WARM_UP_STEPS = 64
"""Capacity of the small buffer that is used before anything is measured."""
_BATCHES = 60
"""Batches whose sampling is timed."""


@dataclass(frozen=True, slots=True)
class BufferTask:
    """What is measured in one process."""

    setup_name: str
    file: str
    """File of the trace."""
    transitions: int
    has_comparison: bool
    """Whether every row is compared with the oracle."""


@dataclass(frozen=True, slots=True)
class RowComparison:
    """Result of comparing rows with the oracle."""

    compared: int
    wrong: int
    fields: list[str]
    """Fields in which rows differ."""
    dtypes: list[str]
    """Fields that were returned with another dtype."""


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Figures of one buffer in one process."""

    add_s: float
    nbytes: int
    sample_s: float
    save_s: float
    save_extra_bytes: int | None
    file_bytes: int
    load_s: float
    rows: RowComparison | None
    """None if rows were not compared."""
    loaded_rows: RowComparison | None
    """The same for the loaded buffer."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as it is written to a file of results."""
        values = asdict(self)
        values["bytes"] = values.pop("nbytes")
        if self.rows is None:
            del values["rows"], values["loaded_rows"]
        return values


@dataclass(slots=True)
class _Differences:
    """Differences that were found so far."""

    wrong: int = 0
    fields: set[str] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)


def compare_rows(buffer: BufferAdapter, steps: Iterator[TraceStep], count: int) -> RowComparison:
    """Compare every one of the first `count` transitions."""
    from holdall.testing import OracleMemory  # noqa: PLC0415  A process that does not compare needs no oracle.

    found = _Differences()
    first = next(steps)
    steps = chain([first], steps)
    parts = first.obs.values() if isinstance(first.obs, dict) else [first.obs]
    rows_at_once = max(1, _COMPARED_BYTES // max(2 * sum(part.nbytes for part in parts), 1))
    for begin in range(0, count, rows_at_once):
        added = list(islice(steps, min(rows_at_once, count - begin)))
        oracle = OracleMemory(capacity=len(added))
        for step in added:
            oracle.add(*step)
        ids = np.arange(len(added))
        _compare_fields(buffer.read_rows(begin + ids), oracle.gather(ids), len(added), found)
    return RowComparison(count, found.wrong, sorted(found.fields), sorted(found.dtypes))


def _compare_fields(rows: dict[str, Any], oracle_batch: Any, count: int, found: _Differences) -> None:
    """Compare `count` rows of a buffer with the rows of the oracle. Add the differences to `found`."""
    wrong = np.zeros(count, np.bool_)
    for name, value in rows.items():
        ends = oracle_batch.terminated | oracle_batch.truncated
        expected = ends if name == "done" else getattr(oracle_batch, name)
        pairs = {name: (value, expected)}
        if isinstance(expected, dict):
            pairs = {f"{name}.{key}": (value[key], expected[key]) for key in expected}
        for path, (read, wanted) in pairs.items():
            differs = _find_different_rows(np.asarray(read), np.asarray(wanted), path, found)
            if differs.any():
                found.fields.add(path)
                wrong |= differs
    found.wrong += int(np.count_nonzero(wrong))


def _find_different_rows(
    read: NDArray[Any], expected: NDArray[Any], path: str, found: _Differences
) -> NDArray[np.bool_]:
    """Return a flag for every row that differs. Rows of the same dtype are compared byte for byte."""
    count = len(expected)
    if read.size != expected.size:
        return np.ones(count, np.bool_)
    read = read.reshape(count, -1)
    expected = expected.reshape(count, -1)
    if read.dtype == expected.dtype:
        read = np.ascontiguousarray(read).view(np.uint8)
        expected = np.ascontiguousarray(expected).view(np.uint8)
    else:
        found.dtypes.add(f"{path} as {read.dtype}")
    return np.asarray((read != expected).any(axis=1))


def measure(task: BufferTask) -> RoundFigures:
    """Measure one setup: fill its buffer, sample, save and load."""
    setup = BUFFER_SETUPS[task.setup_name]
    importlib.import_module("torch")  # Every library returns batches of its tensors.
    trace = Trace.load(Path(task.file))
    _warm_up(setup, trace)
    before = held_bytes().unique
    buffer = setup.open(trace.observation_space, trace.action_space, task.transitions + 1)
    add_s = _time_adds(buffer, trace.repeat_steps(), task.transitions)
    nbytes = held_bytes().unique - before
    sample_s = _time_samples(buffer)
    rows = compare_rows(buffer, trace.repeat_steps(), task.transitions) if task.has_comparison else None
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        saved = measure_save(buffer.save, Path(folder))
        load = buffer.load
        buffer.close()
        del buffer
        gc.collect()
        start = time.perf_counter()
        loaded = load(Path(folder))
        loaded.sample(BATCH)
        load_s = time.perf_counter() - start
        loaded_rows = compare_rows(loaded, trace.repeat_steps(), task.transitions) if task.has_comparison else None
    return RoundFigures(
        add_s=add_s,
        nbytes=nbytes,
        sample_s=sample_s,
        save_s=saved.seconds,
        save_extra_bytes=saved.extra_bytes,
        file_bytes=saved.nbytes,
        load_s=load_s,
        rows=rows,
        loaded_rows=loaded_rows,
    )


def _warm_up(setup: BufferSetup, trace: Trace) -> None:
    """Use a small buffer once, so that the library loads all of its modules before anything is measured."""
    buffer = setup.open(trace.observation_space, trace.action_space, _WARM_UP_STEPS)
    for step in islice(trace.repeat_steps(), _WARM_UP_STEPS // 2):
        buffer.add(buffer.prepare(step))
    buffer.sample(_WARM_UP_STEPS // 4)
    buffer.close()
    del buffer
    gc.collect()


def _time_adds(buffer: BufferAdapter, steps: Iterator[TraceStep], transitions: int) -> float:
    """Add all transitions. Return the median over blocks of the seconds per `add`."""
    blocks = []
    for begin in range(0, transitions, _BLOCK):
        prepared = [buffer.prepare(step) for step in islice(steps, min(_BLOCK, transitions - begin))]
        add = buffer.add
        start = time.perf_counter()
        for one in prepared:
            add(one)
        blocks.append((time.perf_counter() - start) / len(prepared))
        if begin % _EMIT_EVERY == 0:
            emit(ChildProgress(begin, transitions))
    del prepared
    buffer.wait()
    return float(np.median(blocks))


def _time_samples(buffer: BufferAdapter) -> float:
    seconds = []
    batch = None  # As in training, the last batch is held until the next one is drawn.
    for _ in range(_BATCHES):
        start = time.perf_counter()
        batch = buffer.sample(BATCH)
        seconds.append(time.perf_counter() - start)
    del batch
    return float(np.median(seconds))


def main() -> None:
    """Read the task, measure, and print the result."""
    task = BufferTask(**json.loads(sys.argv[1]))
    emit(ChildProgress(0, task.transitions))
    warnings.simplefilter("ignore")  # Warnings of other libraries are not measured.
    emit(measure(task))


if __name__ == "__main__":
    main()
