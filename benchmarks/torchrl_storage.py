"""TorchRL's storages beside HoldallStorage: bytes of an element, and times of `extend` and `sample`, in one run.

    python benchmarks/torchrl_storage.py [--case atari] [--quick] [--json FILE] [--guide FILE]

Bytes: every side of a case is filled in a process of its own, in batches of 128 steps as a collector gives them; the
figure is the slope of a line through the process's unique set size. Times: all sides in one process are given the same
batches; each extends and draws before the next one's turn, and whose turn comes first changes. Shown are medians, and
the ratio to LazyTensorStorage. With one seed all sides must draw the same bits. Exit status 1 if a bar is not met on
Atari: 100 times less memory than LazyTensorStorage with everything compressed, and a `sample` that takes no longer.
Cases: `atari` is Seaquest in stacks of 4 frames; `camera` is the environment that holdall ships, a Dict with images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from footprint import line_through
from process import commit, emit, machine, versions
from streams import Step, Stream, atari, camera
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from holdall.machine import held_bytes
from holdall.torchrl import HoldallStorage

BLOCK, BATCH, WARM_UP = 128, 256, 1_000
BAR_MEMORY, BAR_SAMPLE = 100.0, 1.0
CASES: dict[str, Callable[[], Stream]] = {"atari": atari.stream, "camera": camera.stream}
SIDES: dict[str, Callable[[int, Path], Any]] = {
    "LazyTensorStorage": lambda size, _: LazyTensorStorage(size),
    "LazyMemmapStorage": lambda size, folder: LazyMemmapStorage(size, scratch_dir=folder),
    "HoldallStorage": lambda size, _: HoldallStorage(size, budget=None),
    "HoldallStorage, auto": lambda size, _: HoldallStorage(size),
}
ROWS = {"LazyTensorStorage": (1_024, 4_096), "LazyMemmapStorage": (1_024, 4_096)}
"""Elements between which memory is read. What grows by 56 kB an element needs few; what grows by 200 B needs many: the
raw block that is being filled comes and goes, 4 MiB of Atari."""
OTHER_ROWS, TIMED_ROWS = (8_192, 65_536), 4_096
BEGIN = "<!-- torchrl: python benchmarks/torchrl_storage.py --json benchmarks/results/torchrl_storage.json -->"
END = "<!-- end of torchrl -->"
QUICK = 8
"""`--quick` divides the numbers of rows by this."""


def blocks(stream: Stream) -> Iterator[TensorDictBase]:
    """Return what a collector of one environment gives: TensorDicts of 128 steps, with `next`."""
    while True:
        steps = list(itertools.islice(stream.steps, BLOCK))
        data = _in_tensordict([step.obs for step in steps])
        data["action"] = torch.cat([torch.from_numpy(step.action) for step in steps])
        data["next"] = _in_tensordict([step.next_obs for step in steps])
        data["next", "reward"] = _column(steps, "reward")
        for flag in ("terminated", "truncated"):
            data["next", flag] = _column(steps, flag)
            data[flag] = torch.zeros_like(data["next", flag])
        data["next", "done"] = data["next", "terminated"] | data["next", "truncated"]
        data["done"] = torch.zeros_like(data["next", "done"])
        yield data


def _in_tensordict(observations: list[Any]) -> TensorDict:
    first = observations[0]
    named = observations if isinstance(first, dict) else [{"pixels": each} for each in observations]
    tensors = {key: torch.cat([torch.from_numpy(each[key]) for each in named]) for key in named[0]}
    return TensorDict(tensors, batch_size=[len(observations)])


def _column(steps: list[Step], name: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(getattr(step, name)) for step in steps])[:, None]


def footprint(case: str, side: str, quick: bool) -> dict[str, Any]:
    """Fill one side and fit a line through what the process holds."""
    first, last = (rows // (QUICK if quick else 1) for rows in ROWS.get(side, OTHER_ROWS))
    stream = CASES[case]()
    for _ in itertools.islice(stream.steps, WARM_UP // (QUICK if quick else 1)):
        pass
    with tempfile.TemporaryDirectory() as folder:
        buffer = TensorDictReplayBuffer(storage=SIDES[side](last, Path(folder) / "memmap"), batch_size=BATCH)
        readings = []
        for data in itertools.islice(blocks(stream), last // BLOCK):
            buffer.extend(data)
            if len(buffer) >= first:
                readings.append((len(buffer), held_bytes().unique))
        if isinstance(buffer.storage, HoldallStorage):
            buffer.storage.memory.store.wait_idle()
            reported = buffer.storage.memory.report().bytes_per_transition
        else:
            reported = None
    return {"bytes": line_through(readings)[0], "elements": [first, last], "reported_bytes": reported}


def times(case: str, quick: bool) -> dict[str, Any]:
    """Extend and sample on all sides in turn, and compare what they draw."""
    rows = TIMED_ROWS // (QUICK if quick else 1)
    seconds: dict[str, dict[str, list[float]]] = {side: {"extend": [], "sample": []} for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        buffers = {
            side: TensorDictReplayBuffer(storage=make(rows, Path(folder) / "memmap"), batch_size=BATCH)
            for side, make in SIDES.items()
        }
        for turn, data in enumerate(itertools.islice(blocks(CASES[case]()), rows // BLOCK)):
            order = list(SIDES)[turn % len(SIDES) :] + list(SIDES)[: turn % len(SIDES)]
            for side in order:
                given = data.clone()
                _timed(partial(buffers[side].extend, given), seconds[side]["extend"])
        buffers["HoldallStorage"].storage.memory.store.wait_idle()
        for turn in range(8 if quick else 60):
            order = list(SIDES)[turn % len(SIDES) :] + list(SIDES)[: turn % len(SIDES)]
            drawn = {}
            for side in order:
                torch.manual_seed(turn)
                drawn[side] = _timed(buffers[side].sample, seconds[side]["sample"])
            for side in SIDES:
                _require_same(drawn[side], drawn["LazyTensorStorage"], side)
        for buffer in buffers.values():
            if isinstance(buffer.storage, HoldallStorage):
                buffer.storage.close()
    return {side: {act: statistics.median(some) for act, some in acts.items()} for side, acts in seconds.items()}


def _timed(act: Callable[[], Any], into: list[float]) -> Any:
    start = time.perf_counter()
    result = act()
    into.append(time.perf_counter() - start)
    return result


def _require_same(drawn: TensorDictBase, wanted: TensorDictBase, side: str) -> None:
    for key in wanted.keys(include_nested=True, leaves_only=True):
        if not torch.equal(drawn[key], wanted[key]):
            raise SystemExit(f"{side} drew another {key} than LazyTensorStorage")


def _in_a_process(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["result"]


def measure(case: str, quick: bool) -> dict[str, Any]:
    """Measure all sides of a case."""
    more = ["--quick"] if quick else []
    found: dict[str, Any] = _in_a_process("--case", case, "--times", *more)
    for side in SIDES:
        if "auto" not in side:  # that one keeps raw what there is room for
            found[side] |= _in_a_process("--case", case, "--footprint", side, *more)
    plain = found["LazyTensorStorage"]
    for side, figures in found.items():
        figures["ratios"] = {act: figures[act] / plain[act] for act in ("extend", "sample")}
        held = ""
        if "bytes" in figures:
            figures["times_smaller"] = plain["bytes"] / figures["bytes"]
            held = f"{figures['bytes']:10,.0f} B an element ({figures['times_smaller']:.1f} x less)"
        print(
            f"{case:8} {side:22} {held:42} "
            f"extend {figures['extend'] * 1e3:8.2f} ms ({figures['ratios']['extend']:.2f})   "
            f"sample {figures['sample'] * 1e3:8.2f} ms ({figures['ratios']['sample']:.2f})"
        )
    return found


def table(cases: dict[str, Any]) -> str:
    """Return the results as the table of docs/guides/torchrl.md."""
    lines = ["| environment | storage | an element takes | `extend` | `sample` |", "|---|---|---|---|---|"]
    for case, found in cases.items():
        for side, figures in found.items():
            held = ""
            if "bytes" in figures:
                held = f"{figures['bytes']:,.0f} B ({figures['times_smaller']:.1f} x less)"
            acts = [f"{figures[act] * 1e3:.1f} ms ({figures['ratios'][act]:.2f} x)" for act in ("extend", "sample")]
            lines.append(f"| {case} | {side} | {held} | {acts[0]} | {acts[1]} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str, cases: dict[str, Any]) -> str:
    """Return a guide with the table of these results in its place."""
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{table(cases)}{END}{rest.split(END, 1)[1]}"


def main() -> int:
    """Read the command line, measure, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="one case that is measured again takes its place there")
    parser.add_argument("--guide", type=Path, help="put the table there, in its place")
    parser.add_argument("--footprint", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.footprint or arguments.times:
        way = times if arguments.times else lambda case, quick: footprint(case, arguments.footprint, quick)
        emit({"result": way(arguments.case, arguments.quick)})
        return 0
    cases = [arguments.case] if arguments.case else list(CASES)
    found = {case: measure(case, arguments.quick) for case in cases}
    about = {"machine": machine(), "versions": versions("torch", "torchrl", "tensordict"), "commit": commit()}
    if arguments.case and arguments.json and arguments.json.is_file():
        found = json.loads(arguments.json.read_text(encoding="utf-8"))["cases"] | found
    if arguments.guide:
        guide = arguments.guide.read_text(encoding="utf-8")
        arguments.guide.write_text(rewritten(guide, found), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n", encoding="utf-8")
    ours = found.get("atari", {}).get("HoldallStorage")
    met = ours is None or (ours["times_smaller"] >= BAR_MEMORY and ours["ratios"]["sample"] <= BAR_SAMPLE)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
