"""TorchRL's storages compared with HoldallStorage: bytes of an element, and times of `extend` and `sample`.

    python benchmarks/adapters/torchrl_storage.py [--case atari] [--short] [--json FILE]

The case `atari` is Seaquest in stacks of 4 frames. `camera` is the environment that holdall ships, a Dict with images.

Bytes: every side of a case is filled in a process of its own, in batches of 128 steps, as a collector gives them. The
figure is the slope of a line through the process's unique set size. Times: all sides get the same batches in one
process. Each side extends and draws before the next one's turn, and the side that comes first changes. The figures are
medians, and the ratio to LazyTensorStorage. With one seed, all sides must draw the same bits.

The exit status is 1 if a bar is missed on Atari: 100 times less memory than LazyTensorStorage with everything
compressed, and a `sample` that takes no longer.
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
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from holdall.machine import held_bytes
from holdall.torchrl import HoldallStorage

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.line import fit_line
from shared.process import emit
from shared.streams import Step, Stream, atari, camera

BLOCK = 128
BATCH = 256
WARM_UP = 1_000
BAR_MEMORY = 100.0
BAR_SAMPLE = 1.0
CASES: dict[str, Callable[[], Stream]] = {"atari": atari.stream, "camera": camera.stream}
SIDES: dict[str, Callable[[int, Path], Any]] = {
    "LazyTensorStorage": lambda size, _: LazyTensorStorage(size),
    "LazyMemmapStorage": lambda size, folder: LazyMemmapStorage(size, scratch_dir=folder),
    "HoldallStorage": lambda size, _: HoldallStorage(size, budget=None),
    "HoldallStorage, auto": lambda size, _: HoldallStorage(size),
}
ROWS = {"LazyTensorStorage": (1_024, 4_096), "LazyMemmapStorage": (1_024, 4_096)}
"""Elements between which memory is read. What grows by 56 kB an element needs few. What grows by 200 B needs many: the
raw block that is being filled comes and goes, 4 MiB of Atari."""
OTHER_ROWS = (8_192, 65_536)
TIMED_ROWS = 4_096
QUICK = 8
"""`--short` divides the numbers of rows by this."""


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


def footprint(case: str, side: str, is_short: bool) -> dict[str, Any]:
    """Fill one side and fit a line through what the process holds."""
    first, last = (rows // (QUICK if is_short else 1) for rows in ROWS.get(side, OTHER_ROWS))
    stream = CASES[case]()
    for _ in itertools.islice(stream.steps, WARM_UP // (QUICK if is_short else 1)):
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
    return {"bytes": fit_line(readings)[0], "elements": [first, last], "reported_bytes": reported}


def times(case: str, is_short: bool) -> dict[str, Any]:
    """Extend and sample on all sides in turn, and compare what they draw."""
    rows = TIMED_ROWS // (QUICK if is_short else 1)
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
        for turn in range(8 if is_short else 60):
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


def measure(case: str, is_short: bool) -> dict[str, Any]:
    """Measure all sides of a case."""
    more = ["--short"] if is_short else []
    found: dict[str, Any] = _in_a_process("--case", case, "--times", *more)
    for side in SIDES:
        if "auto" not in side:  # that one keeps raw what there is room for
            found[side] |= _in_a_process("--case", case, "--footprint", side, *more)
    plain = found["LazyTensorStorage"]
    for figures in found.values():
        figures["ratios"] = {act: figures[act] / plain[act] for act in ("extend", "sample")}
        if "bytes" in figures:
            figures["times_smaller"] = plain["bytes"] / figures["bytes"]
    return found


def figures_of(case: str, found: dict[str, Any]) -> list[Figure]:
    """Return the figures of a case."""
    figures = []
    for side, row in found.items():
        name = f"{case}: {side}"
        is_judged = case == "atari" and side == "HoldallStorage"
        if "bytes" in row:
            bar = f"at least {BAR_MEMORY} x" if is_judged else None
            figures.append(Figure(name, "an element takes", "B", row["bytes"]))
            figures.append(Figure(name, "less by", "times", row["times_smaller"], bar))
        figures.append(Figure(name, "`extend`", "of LazyTensorStorage's time", row["ratios"]["extend"]))
        bar = f"at most {BAR_SAMPLE}" if is_judged else None
        figures.append(Figure(name, "`sample`", "of LazyTensorStorage's time", row["ratios"]["sample"], bar))
    return figures


def main() -> int:
    """Read the command line, measure, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--short", action="store_true", help="fewer elements and turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--footprint", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.footprint or arguments.times:
        way = times if arguments.times else lambda case, is_short: footprint(case, arguments.footprint, is_short)
        emit({"result": way(arguments.case, arguments.short)})
        return 0
    cases = [arguments.case] if arguments.case else list(CASES)
    found = {case: measure(case, arguments.short) for case in cases}
    run = describe_run({"short": arguments.short}, ("torchrl", "tensordict"))
    for case, sides in found.items():
        figures = figures_of(case, sides)
        show(figures)
        if arguments.json:
            store(arguments.json, figures, run)
    ours = found.get("atari", {}).get("HoldallStorage")
    met = ours is None or (ours["times_smaller"] >= BAR_MEMORY and ours["ratios"]["sample"] <= BAR_SAMPLE)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
