"""The memory over shards beside others: `python benchmarks/ray_replay.py --json results/ray.json`.

The others are TorchRL's RayReplayBuffer, and a local memory of holdall's in a plain actor.

Out: a table and JSON. Both sides run on one Ray and are given the same recorded steps. TorchRL's rows are skipped, with
the reason, where it is not installed (`pip install torchrl==0.14.1 tensordict==0.14.3`). Ratios are of medians, with
those of the best turns beside them. The exit status is 1 if a bar was not met. Linux only: memory is read from /proc.
Cases may be measured one by one (`--case`, `--workload`): the others stay in the JSON as they were.

* `insert`: steps one by one, and blocks of 64, until all was acknowledged; what that added to the shard's USS
* `sample`: 256 transitions as tensors, compared bit by bit; also asked for ahead; and what travels for a batch between
  machines
* `spread`: CPU-seconds of a batch from 4 shards over those from 1, of learner, shards and Ray; also asked for ahead
* `checkpoint`: the slowest batches while the memory is saved over and over, over those of an idle memory
* `kill`: seconds until a batch comes again after kill -9 of a shard, and until that shard is drawn from again
* `machines`: the same after a machine of a small cluster was lost, frozen or cut off

Most bars are for Atari frames. Camera images compress less, and noise hardly. "Noise" is the camera's images with one
value in 20 off by one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from process import commit, machine, versions
from ray_cases import checkpoint, has_torchrl, insert, sample, spread
from ray_losses import kill, machines
from ray_sides import Recording, own_ray, record

CASES: dict[str, Callable[[Recording, int], dict[str, Any]]] = {
    "insert": insert,
    "sample": sample,
    "spread": spread,
    "checkpoint": checkpoint,
    "kill": kill,
    "machines": machines,
}


FIGURES = 2
"""Another number whenever a case tells other figures: those of before are then not kept."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played, and how much of it."""

    source: str
    options: dict[str, Any]
    held: int
    cases: tuple[str, ...]


WORKLOADS = {
    "atari": Workload("atari", {"game": "Breakout"}, 8_192, tuple(CASES)),
    "camera": Workload("camera", {}, 4_096, ("insert", "sample", "spread", "checkpoint")),
    "noise": Workload("camera", {"noisy": True}, 4_096, ("insert", "sample")),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of one workload, and what is asked of it."""

    workload: str
    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def verdict(self) -> str:
        """Say whether it is what is asked."""
        if self.least is None and self.most is None:
            return ""
        met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "met" if met else "MISSED"


def bars_of(workload: str, found: dict[str, Any]) -> list[Bar]:
    """Lay the figures of one workload beside what is asked."""
    bars = []
    is_atari = workload == "atari"

    def bar(name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        bars.append(Bar(workload, name, value, least if is_atari else None, most if is_atari else None))

    inserted, drawn = found.get("insert", {}), found.get("sample", {})
    if "times" in inserted.get("steps", {}):
        bar("inserts step by step, times TorchRL's", inserted["steps"]["times"], least=10)
        bar("inserts in blocks of 64, times TorchRL's", inserted["blocks"]["times"], least=10)
        held = inserted["shard_bytes_per_transition"]
        bar("shard memory over TorchRL's", held["holdall"] / held["torchrl"], most=1 / 50)
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
        sent, decoded = drawn["wire"]["bytes"], drawn["wire"]["decoded_bytes"]
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
        source = importlib.import_module(f"streams.{played.source}").stream(0, **played.options)
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


def with_others(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found, and what an earlier run found in other cases."""
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = told.get("found", {}) if told.get("figures") == FIGURES else {}
    names = [name for name in WORKLOADS if name in before or name in found]
    return {name: before.get(name, {}) | found.get(name, {}) for name in names}


def main() -> int:
    """Read the command line, measure, and show the figures beside what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    found = measure(wanted.workload or list(WORKLOADS), wanted.case or list(CASES), wanted.rounds)
    bars = [bar for name, figures in found.items() for bar in bars_of(name, figures)]
    for bar in bars:
        asked = f">= {bar.least:g}" if bar.least is not None else f"<= {bar.most:.3g}" if bar.most is not None else ""
        print(f"{bar.workload:8}{bar.name:52}{bar.value:10.4g}  {asked:10}{bar.verdict}")
    if not has_torchrl():
        print("skipped beside TorchRL: it is not installed; pip install torchrl==0.14.1 tensordict==0.14.3")
    if wanted.json:
        told: dict[str, Any] = {
            "machine": machine(),
            "versions": versions("ray", "torchrl", "tensordict"),
            "commit": commit(),
            "figures": FIGURES,
        }
        found = with_others(wanted.json, found)
        all_bars = [bar for name, figures in found.items() for bar in bars_of(name, figures)]
        told |= {"bars": [asdict(bar) | {"verdict": bar.verdict} for bar in all_bars], "found": found}
        wanted.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(any(bar.verdict == "MISSED" for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
