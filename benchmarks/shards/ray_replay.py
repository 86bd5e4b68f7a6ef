"""Compare the memory over shards with other buffers.

    python benchmarks/shards/ray_replay.py [--case sample] [--json FILE]

The other buffers are TorchRL's RayReplayBuffer, and a local memory of holdall in a plain Ray actor.

All buffers run on one Ray cluster and get the same recorded steps. TorchRL is skipped if it is not installed
(`pip install torchrl==0.14.1 tensordict==0.14.3`). Ratios compare medians. The exit status is 1 if a figure misses its
bar. Linux only: memory is read from /proc.

* `insert`: insert single steps, and blocks of 64, until all are acknowledged; read the growth of the shard's USS
* `sample`: draw 256 transitions as tensors, with and without prefetch; compare every bit; count the bytes and the CPU
  time of a batch for another machine
* `spread`: CPU time of a batch from 4 shards over that of a batch from 1, in the learner, the shards and Ray
* `checkpoint`: the slowest batches while the memory is saved again and again, over those of an idle memory
* `kill`: seconds without a batch after kill -9 of a shard, and seconds until that shard is drawn from again
* `machines`: the same after a machine of a small cluster was lost, frozen or cut off

Most bars are for Atari frames. Camera images compress less. The workload "noise" has the same images with one value in
20 changed by one, and hardly compresses.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_cases import checkpoint, has_torchrl, insert, kill, machines, sample, spread
from ray_sides import Recording, own_ray, record
from results import Figure, describe_run, show, store

CASES: dict[str, Callable[[Recording, int], dict[str, Any]]] = {
    "insert": insert,
    "sample": sample,
    "spread": spread,
    "checkpoint": checkpoint,
    "kill": kill,
    "machines": machines,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Recorded steps, and the cases that use them."""

    source: str
    options: dict[str, Any]
    held: int
    cases: tuple[str, ...]


NAMES = {"atari": "Atari, 4 stacked frames", "camera": "camera and vector", "noise": "the same, noisy"}
WORKLOADS = {
    "atari": Workload("atari", {"game": "Breakout"}, 8_192, tuple(CASES)),
    "camera": Workload("camera", {}, 4_096, ("insert", "sample", "spread", "checkpoint")),
    "noise": Workload("camera", {"noisy": True}, 4_096, ("insert", "sample")),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of one workload, and its bounds."""

    workload: str
    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its bounds."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def as_figure(self) -> Figure:
        """Return the figure as results store it. The workload is the column of its table."""
        bound = f"at least {self.least:g}" if self.least is not None else None
        if self.most is not None:
            bound = f"at most {self.most:.3g}"
        return Figure(self.name, NAMES[self.workload], "", float(f"{self.value:.3g}"), bound)


def bars_of(workload: str, found: dict[str, Any]) -> list[Bar]:
    """Return the figures of one workload with their bounds."""
    bars = []
    is_atari = workload == "atari"

    def bar(name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        bars.append(Bar(workload, name, value, least if is_atari else None, most if is_atari else None))

    inserted = found.get("insert", {})
    drawn = found.get("sample", {})
    if "times" in inserted.get("steps", {}):
        bar("inserts step by step, times TorchRL's", inserted["steps"]["times"], least=10)
        bar("inserts in blocks of 64, times TorchRL's", inserted["blocks"]["times"], least=10)
        held = inserted["shard_bytes_per_transition"]
        bar("shard memory over TorchRL's", held["holdall"] / held["torchrl"], most=1 / 50)
        encoded = inserted["encoded_bytes_per_transition"]
        bar("compressed transitions alone over TorchRL's memory", encoded / held["torchrl"])
    bars += [*_sample_bars(workload, drawn), *_spread_bars(workload, found.get("spread", {}))]
    if "checkpoint" in found:
        saved = found["checkpoint"]
        slower = saved["saving"]["p99_us"] / saved["idle"]["p99_us"]
        bars.append(Bar(workload, "p99 of a batch while saving over idle", slower, most=3))
    if "kill" in found:
        bar("seconds without a batch after kill -9, at most", found["kill"]["longest_wait_s"]["most"], most=3)
        bar("seconds until that shard is drawn from again, median", found["kill"]["shard_again_s"]["median"], most=3)
    for story, told in found.get("machines", {}).items():
        bar(f"seconds without a batch, a machine {story}", told["first_batch_s"], most=10)
        bar(f"seconds until all shards are drawn from, a machine {story}", told["recovered_s"], most=10)
    return bars


def _sample_bars(workload: str, drawn: dict[str, Any]) -> list[Bar]:
    bars = []
    if "times" in drawn.get("asked", {}):
        least = {"camera": 6.0, "atari": 6.0, "noise": 4.0}[workload]
        bars += [
            Bar(workload, "batches of 256, times TorchRL's", drawn["asked"]["times"], least),
            Bar(workload, "batches of 256 asked for ahead, times TorchRL's", drawn["ahead"]["times"], least),
            Bar(workload, "rows that differ", drawn["rows"]["differing"], most=0),
        ]
    if drawn:
        plain = {"atari": 1.2, "camera": 1.2, "noise": 1.0}[workload]
        most = {"atari": 0.05, "camera": 0.05, "noise": 1.0}[workload]
        sent = drawn["wire"]["bytes"]
        decoded = drawn["wire"]["decoded_bytes"]
        bars += [
            Bar(workload, "batches of 256, times a plain actor's", drawn["asked"]["plain_times"], plain),
            Bar(
                workload, "batches of 256 asked for ahead, times a plain actor's", drawn["ahead"]["plain_times"], plain
            ),
            Bar(workload, "bytes between hosts over decoded", sent / decoded, most=most),
        ]
    return bars


def _spread_bars(workload: str, spent: dict[str, Any]) -> list[Bar]:
    if not spent:
        return []
    ways = {"CPU of a batch": ("4", "1"), "CPU of a batch asked for ahead": ("4 ahead", "1 ahead")}
    return [
        Bar(workload, f"{name}, 4 shards over 1", spent[one]["cpu_us"] / spent[other]["cpu_us"])
        for name, (one, other) in ways.items()
    ]


def measure(workloads: list[str], cases: list[str], rounds: int) -> dict[str, Any]:
    """Measure cases of workloads on one Ray."""
    recordings = {}
    for name in workloads:
        played = WORKLOADS[name]
        source = importlib.import_module(f"shared.streams.{played.source}").stream(0, **played.options)
        recordings[name] = record(source, played.held)
    found: dict[str, Any] = {}
    with own_ray():
        for name, recording in recordings.items():
            found[name] = {}
            for case in cases:
                if case in WORKLOADS[name].cases:
                    start = time.perf_counter()
                    found[name][case] = CASES[case](recording, rounds)
                    print(f"{name} {case}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def main() -> int:
    """Read the command line, measure, and print the figures with their bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--short", action="store_true", help="inserts and samples, in three turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    cases = wanted.case or (["insert", "sample"] if wanted.short else list(CASES))
    rounds = 3 if wanted.short else wanted.rounds
    run = describe_run({"short": wanted.short, "rounds": rounds}, ("ray", "torchrl", "tensordict"))
    found = measure(wanted.workload or list(WORKLOADS), cases, rounds)
    bars = [bar for name, figures in found.items() for bar in bars_of(name, figures)]
    rows = [bar.as_figure() for bar in bars]
    show(rows)
    if not has_torchrl():
        print("TorchRL is skipped, because it is not installed: pip install torchrl==0.14.1 tensordict==0.14.3")
    if wanted.json:
        store(wanted.json, rows, run)
    return int(not all(bar.is_met for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
