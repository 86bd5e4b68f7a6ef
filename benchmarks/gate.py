"""Compare holdall's drop-in with Stable-Baselines3's buffer, and the result with a stored table: `make gate`.

    python benchmarks/gate.py                                # about a minute on two idle cores
    python benchmarks/gate.py --store                        # writes benchmarks/results/gate.json
    python benchmarks/gate.py --traces DIR --table FILE      # recorded observations instead of the three workloads

For each workload, three buffers hold the same steps: Stable-Baselines3's, holdall's with everything raw
(`budget="auto"`), and holdall's with everything compressed (`budget=None`). The table shows the time of `add` and of
`sample` divided by the time of Stable-Baselines3's buffer, the time of `add`, and bytes per transition.

Times are CPU times of the process with one thread, because other programs on the machine change them little. In a
round of a few milliseconds, each buffer has its turn, and holdall's time is divided by Stable-Baselines3's. A figure is
the median over many rounds, which are made in several passes. `add` is timed on full buffers from which batches were
drawn, while the compressor has nothing to do. With `--wall`, the script reads the wall clock and uses all cores. Such
figures also contain waiting and the gain from several threads. They need an idle machine, and a table of their own.

Bytes of holdall are read from `report()` whenever the compressor has finished, while half of the transitions are
replaced. The least reading counts: it is taken just after a block was compressed, so it hardly depends on how full the
last block is.

Even ratios to Stable-Baselines3's times differ from one kind of processor to another, so the file has a table for each
kind. On a processor without a table, only bytes are compared.

If a time is more than 10 % worse than the stored one, further passes are made before the script calls it worse. The
exit status is 1 if a figure is worse, or if one of the compared rows is wrong. It is 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from shared.process import commit, machine, versions
from shared.streams import Step, Stream, atari, camera, market, trace, vector
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

import holdall.sb3
from holdall.errors import ArgumentError

TABLE = Path(__file__).parent / "results" / "gate.json"
FORMS = {"raw": "auto", "compressed": None}
"""Names of holdall's two forms, and the `budget` that gives them."""
BASELINE = "sb3"
MAX_ROWS = 256
ROWS = {"sample(1)": 1, "sample(32)": 32, "sample(256)": MAX_ROWS}
TIMED = ("add", *ROWS)
LARGE_CALLS = {"add": 20, "sample(1)": 10, "sample(32)": 3, "sample(256)": 1}
SMALL_CALLS = {"add": 200, "sample(1)": 10, "sample(32)": 8, "sample(256)": 4}
"""Calls in one turn, for large and for small observations. Short turns are rarely interrupted by other programs."""
GATED = (*TIMED, "bytes")
MAX_WORSE = 0.10
PASSES = 3
MAX_FURTHER_PASSES = 6
VERIFIED_BATCHES = 2
FILLED_AT_ONCE = 100
"""Transitions that are added to an empty buffer before the compressor is waited for."""
BYTES_EVERY = 20
"""Transitions between two readings of bytes."""

MAX_TRANSITIONS = 40_000
MAX_BASELINE_BYTES = 350_000_000
"""Size of Stable-Baselines3's buffer. It is larger than the caches of a processor, and filled in seconds."""
SMALL_BYTES = 4_096
"""Largest observation that counts as small."""
MAX_SMALL_STEPS = 2_000
"""Length of a recording of small observations. It stays in the caches, as the newest step does in training."""
REUSED_BYTES = 1 << 28
"""Largest array whose memory the allocator keeps when the array is freed."""
WARM_UP_S = 0.02
"""Seconds before each timed round with `--wall`. OpenMP's threads keep a core busy for that long after a copy."""
KEY_WIDTH = 44
CELL_WIDTH = 13

Seconds = dict[str, list[float]]
"""Seconds of one call by buffer, one entry a round."""
Figures = dict[str, dict[str, float]]
"""Figures by row of the table, such as "atari raw", and by name, such as "sample(32)"."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, and with which clock."""

    transitions: int  # at most, in each buffer
    rounds: int  # of a timed operation in one pass
    is_wall: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a stored table must have in common with a run."""
        return {"clock": "wall" if self.is_wall else "cpu", "transitions": self.transitions}


@dataclass(slots=True)
class Results:
    """Figures of all workloads, and counts of the rows that were compared with Stable-Baselines3's."""

    figures: Figures = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)  # of the recorded observations, by workload
    compared_rows: int = 0
    wrong_rows: int = 0


class Bench:
    """Stable-Baselines3's buffer and both forms of holdall's, which always hold the same steps of one workload.

    A recording of at most half the capacity is played again and again. The buffers are full after construction.
    """

    def __init__(self, stream: Stream, effort: Effort) -> None:
        self._effort = effort
        observation_bytes = count_bytes(stream.observation_space)
        self.capacity = min(effort.transitions, MAX_BASELINE_BYTES // (2 * observation_bytes))
        is_small = observation_bytes <= SMALL_BYTES
        self._calls = SMALL_CALLS if is_small else LARGE_CALLS
        recorded = min(self.capacity // 2, MAX_SMALL_STEPS) if is_small else self.capacity // 2
        self._recording = [to_arguments(step) for step in itertools.islice(stream.steps, recorded)]
        self._next_step = itertools.cycle(self._recording)
        self.buffers = make_buffers(stream, self.capacity)
        # In training, steps come more slowly than blocks are compressed.
        for _ in range(0, self.capacity, FILLED_AT_ONCE):
            self._add_to_all(FILLED_AT_ONCE)
            self._wait_until_compressed()

    @property
    def checksum(self) -> int:
        """Checksum of the recorded observations. Stored bytes can be compared only if it is the same."""
        checksum = 0
        for _, next_obs, *_ in self._recording:
            parts = next_obs.values() if isinstance(next_obs, dict) else [next_obs]
            for part in parts:
                checksum = zlib.crc32(np.ascontiguousarray(part).data, checksum)
        return checksum

    def count_wrong_rows(self) -> int:
        """Draw some batches with the same seed from all buffers, and count the rows that differ in any bit."""
        wrong = 0
        for form in FORMS:
            for seed in range(VERIFIED_BATCHES):
                expected = draw_rows(self.buffers[BASELINE], seed)
                actual = draw_rows(self.buffers[form], seed)
                wrong += int((expected != actual).any(axis=1).sum())
        return wrong

    def measure_bytes(self) -> dict[str, float]:
        """Return bytes per transition of every buffer."""
        found = dict.fromkeys(FORMS, math.inf)
        for _ in range(max(1, self.capacity // 2 // BYTES_EVERY)):
            self._add_to_all(BYTES_EVERY)
            self._wait_until_compressed()
            for form in FORMS:
                found[form] = min(found[form], self.buffers[form].report().bytes_per_transition)
        return found | {BASELINE: count_baseline_bytes(self.buffers[BASELINE]) / self.capacity}

    def time_calls(self, operation: str) -> Seconds:
        """Time one of the operations in `TIMED` on every buffer, in one pass."""
        if operation == "add":
            return self._time_add()
        return self._time_sample(operation)

    def _time_add(self) -> Seconds:
        steps: list[tuple[Any, ...]] = []

        def prepare_round() -> None:
            steps[:] = itertools.islice(self._next_step, self._calls["add"])
            self._wait_until_compressed()

        def add_steps(name: str) -> None:
            add = self.buffers[name].add
            for arguments in steps:
                add(*arguments)

        return self._time_in_turns(add_steps, self._calls["add"], prepare_round)

    def _time_sample(self, operation: str) -> Seconds:
        def draw_batches(name: str) -> None:
            sample = self.buffers[name].sample
            for _ in range(self._calls[operation]):
                _batch = sample(ROWS[operation])  # kept until the next one is complete, as in training

        return self._time_in_turns(draw_batches, self._calls[operation], warms_up=self._effort.is_wall)

    def _time_in_turns(
        self,
        take_turn: Callable[[str], None],
        calls: int,
        prepare_round: Callable[[], None] | None = None,
        *,
        warms_up: bool = False,
    ) -> Seconds:
        """Give every buffer its turn in each round, and return the seconds of one call.

        Args:
            take_turn: Makes the timed calls on the buffer that it is given the name of.
            calls: Number of calls in a turn.
            prepare_round: Called before each round, untimed.
            warms_up: Whether turns of `WARM_UP_S` seconds are taken before the timed one.
        """
        read_clock = time.perf_counter if self._effort.is_wall else time.process_time
        seconds: Seconds = {name: [] for name in self.buffers}
        # All orders, because a turn is slower after the turn of some buffers than after that of others.
        orders = itertools.cycle(itertools.permutations(self.buffers))
        for order in itertools.islice(orders, self._effort.rounds):
            if prepare_round is not None:
                prepare_round()
            for name in order:
                if warms_up:
                    repeat_for(WARM_UP_S, take_turn, name)
                begun = read_clock()
                take_turn(name)
                seconds[name].append((read_clock() - begun) / calls)
        return seconds

    def _add_to_all(self, count: int) -> None:
        for arguments in itertools.islice(self._next_step, count):
            for buffer in self.buffers.values():
                buffer.add(*arguments)

    def _wait_until_compressed(self) -> None:
        """Wait until the compactor has no more jobs."""
        self.buffers["compressed"].memory.store.wait_idle()

    def close(self) -> None:
        """Release the memory of all buffers."""
        for form in FORMS:
            self.buffers[form].memory.close()
        self.buffers.clear()
        self._recording.clear()


def repeat_for(seconds: float, call: Callable[[str], None], name: str) -> None:
    """Repeat `call(name)` until `seconds` have passed."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        call(name)


def make_buffers(stream: Stream, capacity: int) -> dict[str, Any]:
    """Return an empty buffer of each kind, for one environment."""
    settings: Any = (capacity, stream.observation_space, stream.action_space, "cpu")
    is_dict = isinstance(stream.observation_space, spaces.Dict)
    baseline_class = DictReplayBuffer if is_dict else ReplayBuffer
    buffers: dict[str, Any] = {BASELINE: baseline_class(*settings)}
    for form, budget in FORMS.items():
        buffers[form] = holdall.sb3.ReplayBuffer(*settings, budget=budget)
    return buffers


def to_arguments(step: Step) -> tuple[Any, ...]:
    """Return the arguments with which Stable-Baselines3 adds a step. Its `done` is True for both kinds of ending."""
    infos = [{"TimeLimit.truncated": bool(truncated)} for truncated in step.truncated]
    return step.obs, step.next_obs, step.action, step.reward, step.terminated | step.truncated, infos


def draw_rows(buffer: Any, seed: int) -> NDArray[np.uint8]:
    """Return the bytes of a batch, one row per transition. All fields of a transition are in its row."""
    np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3 draws from this generator
    tensors: list[torch.Tensor] = []
    for part in buffer.sample(MAX_ROWS):
        if isinstance(part, dict):
            tensors += [part[key] for key in sorted(part)]
        elif part is not None:  # discounts are None without n-step returns
            tensors.append(part)
    rows = [np.ascontiguousarray(tensor.numpy()).reshape(len(tensor), -1).view(np.uint8) for tensor in tensors]
    return np.concatenate(rows, axis=1)


def count_bytes(space: spaces.Space[Any]) -> int:
    """Return the bytes of one observation."""
    if isinstance(space, spaces.Dict):
        return sum(count_bytes(part) for part in space.values())
    return math.prod(space.shape or ()) * np.dtype(space.dtype).itemsize


def count_baseline_bytes(buffer: Any) -> int:
    """Return the bytes of all arrays of a buffer of Stable-Baselines3."""
    arrays = [buffer.actions, buffer.rewards, buffer.dones, buffer.timeouts]
    for observations in (buffer.observations, buffer.next_observations):
        arrays += observations.values() if isinstance(observations, dict) else [observations]
    return sum(array.nbytes for array in arrays)


def open_workloads() -> Iterator[tuple[str, Stream]]:
    """Yield the three workloads that need nothing from outside the repository and its dependencies."""
    yield "atari", atari.stream()
    yield "camera", camera.stream()
    yield "vector", vector.stream(1)


def open_traces(folder: Path) -> Iterator[tuple[str, Stream]]:
    """Yield the recordings in `folder`. A table of prices gives a workload without noise and one with noise."""
    for file in sorted(folder.glob("*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            table = arrays.get("table")
        if table is not None:
            yield file.stem, market.stream(table=table)
            yield f"{file.stem}_noise", market.stream(table=table, noise=0.01)
            continue
        try:
            stream = trace.stream(file)
        except ArgumentError as error:
            print(f"{file.stem} is skipped: {error}", file=sys.stderr)
            continue
        if has_scalar(stream.observation_space):
            print(f"{file.stem} is skipped: Stable-Baselines3 cannot sample a scalar of a Dict", file=sys.stderr)
            continue
        yield file.stem, stream


def has_scalar(space: spaces.Space[Any]) -> bool:
    """Return whether a Dict has a part of a single number, such as a Discrete."""
    return isinstance(space, spaces.Dict) and any(part.shape == () for part in space.values())


def is_worse(now: float, stored: float | None) -> bool:
    """Return whether a figure is more than `MAX_WORSE` above the stored one. All gated figures are costs."""
    return stored is not None and now > stored * (1 + MAX_WORSE)


def measure_workload(name: str, bench: Bench, stored: Figures) -> Figures:
    """Return the figures of both forms. Operations that look worse than stored are timed in further passes."""
    found_bytes = bench.measure_bytes()
    figures: Figures = {
        f"{name} {form}": {"bytes": found_bytes[form], "sb3_bytes": found_bytes[BASELINE]} for form in FORMS
    }
    seconds: dict[str, Seconds] = {operation: {name: [] for name in bench.buffers} for operation in TIMED}
    for _ in range(PASSES):
        for operation in TIMED:
            append_rounds(seconds[operation], bench.time_calls(operation))
    for operation in TIMED:
        set_times(name, operation, seconds[operation], figures)
        for _ in range(MAX_FURTHER_PASSES):
            if not has_worse(operation, figures, stored):
                break
            append_rounds(seconds[operation], bench.time_calls(operation))
            set_times(name, operation, seconds[operation], figures)
    return figures


def append_rounds(seconds: Seconds, further: Seconds) -> None:
    """Append the rounds of a further pass."""
    for name, rounds in further.items():
        seconds[name] += rounds


def set_times(name: str, operation: str, seconds: Seconds, figures: Figures) -> None:
    """Write the median ratio of `operation` over all rounds to `figures`, for each form."""
    for form in FORMS:
        row = figures[f"{name} {form}"]
        row[operation] = float(np.median(np.divide(seconds[form], seconds[BASELINE])))
        if operation == "add":
            row["add_us"] = 1e6 * float(np.quantile(seconds[form], 0.25))


def has_worse(name: str, figures: Figures, stored: Figures) -> bool:
    """Return whether the figure `name` is worse than stored in any row."""
    return any(is_worse(row[name], stored.get(key, {}).get(name)) for key, row in figures.items())


def list_worse(figures: Figures, stored: Figures) -> list[str]:
    """Describe every figure that is worse than the stored one."""
    lines = []
    for key, row in figures.items():
        for name in GATED:
            before = stored.get(key, {}).get(name)
            if is_worse(row[name], before):
                lines.append(f"WORSE: {key}, {name}: {row[name]:.4g}, stored {before:.4g}")
    return lines


def print_header() -> None:
    """Print the names of the columns, and their units."""
    names = (*TIMED, "add", "sb3", "holdall")
    units = (*["of SB3's"] * len(TIMED), "us", "B/transition", "B/transition")
    print_cells("", names)
    print_cells("", units)


def print_row(key: str, row: dict[str, float], stored: dict[str, float]) -> None:
    """Print one row of the table. A star marks figures that are worse than the stored ones."""
    cells = [f"{row[name]:.3f}" + "*" * is_worse(row[name], stored.get(name)) for name in TIMED]
    cells.append(f"{row['add_us']:.2f}")
    cells.append(f"{row['sb3_bytes']:,.0f}")
    cells.append(f"{row['bytes']:,.1f}" + "*" * is_worse(row["bytes"], stored.get("bytes")))
    print_cells(key, cells)


def print_cells(key: str, cells: Iterable[str]) -> None:
    """Print a line of the table."""
    print(f"{key:{KEY_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells), flush=True)


def read_table(file: Path, effort: Effort) -> dict[str, Any]:
    """Return the stored table of this processor. Without one, return the bytes of another processor's table.

    Raises ArgumentError if nothing is stored, or if it was measured with other settings.
    """
    if not file.exists():
        raise ArgumentError(f"There is no table at {file}; write one with --store")
    tables: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    processor = machine()["processor"]
    table = tables[processor if processor in tables else next(iter(tables))]
    if table["settings"] != effort.settings:
        raise ArgumentError(
            f"{file} was measured with {table['settings']}, and this run would use {effort.settings}; name another "
            "file with --table"
        )
    if processor not in tables:
        table["figures"] = {key: {"bytes": row["bytes"]} for key, row in table["figures"].items()}
    return table


def write_table(file: Path, effort: Effort, results: Results) -> None:
    """Store the figures of this processor, together with everything that they depend on. Keep those of others."""
    figures = {
        key: {name: float(f"{value:.5g}") for name, value in row.items()} for key, row in results.figures.items()
    }
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    tables[machine()["processor"]] = {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "settings": effort.settings,
        "checksums": results.checksums,
        "figures": figures,
    }
    file.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def print_differences(table: dict[str, Any], results: Results) -> None:
    """Print why figures were not compared, or may differ although the code is as good as before."""
    processor = machine()["processor"]
    if table["machine"]["processor"] != processor:
        print(f"note: there is no table for {processor}, so only bytes were compared; write one with --store")
    for name, checksum in results.checksums.items():
        if name not in table["checksums"]:
            print(f"note: {name} is not in the table, so it was not compared")
        elif table["checksums"][name] != checksum:
            print(f"note: the observations of {name} are not those of the table; bytes cannot be compared")


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="write the table instead of comparing with it")
    parser.add_argument("--table", type=Path, default=TABLE, help="the stored table (%(default)s)")
    parser.add_argument("--traces", type=Path, help="a folder of recorded observations")
    parser.add_argument("--only", nargs="+", help="names of the workloads to measure; cannot be stored")
    parser.add_argument("--wall", action="store_true", help="wall clock and all cores, for an idle machine")
    parser.add_argument("--transitions", type=int, default=MAX_TRANSITIONS, help="at most, in a buffer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=120, help="of a timed operation in one pass (%(default)s)")
    wanted = parser.parse_args()
    if wanted.store and wanted.only:
        parser.error("--store writes the whole table, so it cannot be used with --only")
    if wanted.store and wanted.traces and wanted.table == TABLE:
        parser.error("--store with --traces needs a --table of its own")
    return wanted


def prepare_process(effort: Effort) -> None:
    """Remove two causes of figures that differ from run to run: threads, and memory that is returned to the system.

    glibc sometimes gives the memory of a freed batch back. The next batch then costs page faults, which makes
    Stable-Baselines3's `sample(256)` four times slower in some runs and not in others.
    """
    if not effort.is_wall:
        os.environ["HOLDALL_THREADS"] = "1"
        torch.set_num_threads(1)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl's libc has no such function
        if mallopt is not None:
            m_mmap_threshold = -3
            m_trim_threshold = -1
            mallopt(m_mmap_threshold, REUSED_BYTES)
            mallopt(m_trim_threshold, 2 * REUSED_BYTES)


def measure_all(workloads: Iterable[tuple[str, Stream]], effort: Effort, stored: Figures) -> Results:
    """Measure one workload after the other, and print its rows as soon as they are known."""
    results = Results()
    print_header()
    for name, stream in workloads:
        bench = Bench(stream, effort)
        results.checksums[name] = bench.checksum
        results.wrong_rows += bench.count_wrong_rows()
        figures = measure_workload(name, bench, stored)
        results.wrong_rows += bench.count_wrong_rows()
        results.compared_rows += 2 * len(FORMS) * VERIFIED_BATCHES * MAX_ROWS
        results.figures |= figures
        bench.close()
        for key, row in figures.items():
            print_row(key, row, stored.get(key, {}))
    return results


def main() -> int:
    """Measure, print and compare. Return the exit status."""
    wanted = read_arguments()
    effort = Effort(wanted.transitions, wanted.rounds, wanted.wall)
    try:
        table = {} if wanted.store else read_table(wanted.table, effort)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    prepare_process(effort)
    workloads = open_traces(wanted.traces) if wanted.traces else open_workloads()
    chosen = ((name, stream) for name, stream in workloads if not wanted.only or name in wanted.only)
    stored: Figures = table.get("figures", {})
    results = measure_all(chosen, effort, stored)
    if not results.figures:
        print("No workload was measured; correct --only or --traces", file=sys.stderr)
        return 2
    worse = list_worse(results.figures, stored)
    for line in worse:
        print(line)
    print(f"{results.wrong_rows} wrong rows of {results.compared_rows}")
    if table:
        print_differences(table, results)
    if wanted.store and not results.wrong_rows:
        write_table(wanted.table, effort, results)
    return 1 if worse or results.wrong_rows else 0


if __name__ == "__main__":
    sys.exit(main())
