"""The cases of `ray_replay.py`. Each function gets recorded steps and returns figures.

The buffers take turns, and another one begins every round, so that other load on the machine affects all of them alike.
CPU times are those that the kernel counts, of the learner or writer, of the shards and of Ray's own processes.

`kill` kills one shard after another with SIGKILL while batches are drawn. The shards have journals. `machines` loses,
freezes and cuts off a machine of a small cluster. It runs tests/shards/chaos/machine_loss.py, which also checks every
bit and every acknowledgement.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdall.cluster.ids import shards_of_ids

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_sides import (
    BATCH,
    PREFETCH,
    ActorSide,
    HoldallSide,
    Recording,
    TorchRLSide,
    cpu_seconds,
    differing_rows,
    process_of,
    servants,
    unique_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
SHARDS = 4
BLOCK = 64
STEPS = 256
"""Steps of a round of single inserts."""
WARM = 1_024
"""Transitions before the first reading. A memory chooses its codec with them, in the background."""
IN_A_ROW = 10
"""Batches in one turn of a buffer."""

Side = HoldallSide | ActorSide | TorchRLSide


def has_torchrl() -> bool:
    """Return whether TorchRL is installed."""
    return importlib.util.find_spec("torchrl") is not None


def insert(recording: Recording, rounds: int) -> dict[str, Any]:
    """Measure inserts until all are acknowledged, and the memory that they take in the shard's process."""
    ours = HoldallSide(recording, len(recording.steps))
    sides: list[Side] = [ours, TorchRLSide(len(recording.steps))] if has_torchrl() else [ours]
    with closing(sides):
        for side in sides:
            side.insert(side.arrange(recording.steps[:WARM], BLOCK), BLOCK)
        time.sleep(2)  # a codec is being chosen
        held = {side.name: unique_bytes(side.processes) for side in sides}
        blocks = (len(recording.steps) - WARM - rounds * STEPS) // rounds // BLOCK * BLOCK
        steps_end = WARM + rounds * STEPS
        found: dict[str, Any] = {
            "steps": _inserted(recording, sides, range(WARM, steps_end, STEPS), STEPS, 1),
            "blocks": _inserted(recording, sides, range(steps_end, steps_end + rounds * blocks, blocks), blocks, BLOCK),
        }
        added = rounds * (STEPS + blocks)
        found["shard_bytes_per_transition"] = {
            side.name: (unique_bytes(side.processes) - held[side.name]) / added for side in sides
        }
        found["encoded_bytes_per_transition"] = ours.encoded_bytes_per_transition()
    return found


def sample(recording: Recording, rounds: int) -> dict[str, Any]:
    """Measure batches with and without prefetch, and compare the delivered bits."""
    ours = HoldallSide(recording, len(recording.steps))
    plain = ActorSide(recording, len(recording.steps))
    sides: list[Side] = [ours, plain]
    if has_torchrl():
        sides += [TorchRLSide(len(recording.steps)), TorchRLSide(len(recording.steps), PREFETCH)]
    with closing(sides):
        for side in sides:
            side.insert(side.arrange(recording.steps, BLOCK), BLOCK)
        time.sleep(1)
        found: dict[str, Any] = {"asked": _drawn({side.name: (side, side.sample) for side in sides[:3]}, rounds)}
        with ours.memory.loader(BATCH, PREFETCH) as loader:
            ahead: dict[str, tuple[Side, Callable[[], Any]]] = {
                "holdall": (ours, lambda: next(loader)),
                "plain actor": (plain, plain.sample_ahead),
            }
            if has_torchrl():
                ahead["torchrl"] = (sides[3], sides[3].sample)
            found["ahead"] = _drawn(ahead, rounds)
        if has_torchrl():
            compared = [differing_rows(side.sample(), ours) for side in sides[2:] for _ in range(4)]
            found["rows"] = {"compared": len(compared) * BATCH, "differing": sum(compared)}
        sent = [ours.sent_elsewhere() for _ in range(10)]
        found["wire"] = {name: float(np.median([each[name] for each in sent])) for name in sent[0]}
        found["wire"]["decoded_bytes"] = recording.batch_bytes
    return found


def spread(recording: Recording, rounds: int) -> dict[str, Any]:
    """Measure the CPU time of batches from 1 and from 4 shards, with and without prefetch."""
    sides = {str(shards): HoldallSide(recording, len(recording.steps), shards) for shards in (1, 4)}
    with closing(list(sides.values())), ExitStack() as loaders:
        ways: dict[str, Callable[[], Any]] = {}
        for name, side in sides.items():
            side.insert(side.arrange(recording.steps, BLOCK), BLOCK)
            loader = loaders.enter_context(side.memory.loader(BATCH, PREFETCH))
            ways |= {name: side.sample, f"{name} ahead": partial(next, loader)}
        everyone = [process for side in sides.values() for process in side.processes] + servants()
        found: dict[str, Any] = {name: {"learner_us": [], "others_us": []} for name in ways}
        for name, side in sides.items():
            found[name]["wire_bytes"] = side.sent_elsewhere()["bytes"]
        for name in itertools.chain(*(_in_turn(list(ways), turn) for turn in range(rounds))):
            _timed(ways[name], IN_A_ROW)  # Batches that were drawn ahead before this turn are not counted.
            before = cpu_seconds(), cpu_seconds(everyone)
            _timed(ways[name], 5 * IN_A_ROW)
            after = cpu_seconds(), cpu_seconds(everyone)
            for key, start, end in zip(("learner_us", "others_us"), before, after, strict=True):
                found[name][key].append(1e6 * (end - start) / (5 * IN_A_ROW))
        for told in found.values():
            both = np.array(told["learner_us"]) + np.array(told["others_us"])
            told |= {key: float(np.median(told[key])) for key in ("learner_us", "others_us")}
            told |= {"cpu_us": float(np.median(both)), "least_cpu_us": float(both.min())}
    return found


def checkpoint(recording: Recording, rounds: int) -> dict[str, Any]:
    """Measure batches while the memory is saved again and again, each time to a new folder, and while it is idle."""
    side = HoldallSide(recording, len(recording.steps), 2)
    with closing([side]), tempfile.TemporaryDirectory() as folder:
        side.insert(side.arrange(recording.steps, BLOCK), BLOCK)
        for _ in range(IN_A_ROW):
            side.sample()
        times: dict[str, list[float]] = {"idle": [], "saving": []}
        saves = 0
        for _ in range(min(rounds, 4)):
            times["idle"] += _timed(side.sample, 5 * IN_A_ROW)
            with _saving(side, Path(folder)) as done:
                times["saving"] += _timed(side.sample, 5 * IN_A_ROW)
            saves += len(done)
        return {"saves": saves, "batches": len(times["idle"])} | {
            name: {f"p{p}_us": 1e6 * float(np.percentile(taken, p)) for p in (50, 99)} for name, taken in times.items()
        }


@contextmanager
def closing(sides: Sequence[Side]) -> Iterator[None]:
    """End the actors of all buffers at the end."""
    try:
        yield
    finally:
        for side in sides:
            side.close()


@contextmanager
def _saving(side: HoldallSide, folder: Path) -> Iterator[list[float]]:
    """Save in the background while the `with` block runs. Yield the seconds of every save."""
    is_over = threading.Event()
    taken = list[float]()

    def save() -> None:
        while not is_over.is_set():
            # so that everything is written
            start = time.perf_counter()
            place = Path(tempfile.mkdtemp(dir=folder))
            side.memory.save(place).result()
            taken.append(time.perf_counter() - start)
            shutil.rmtree(place)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield taken
    finally:
        is_over.set()
        thread.join()


def _inserted(recording: Recording, sides: list[Side], begins: range, count: int, block: int) -> dict[str, Any]:
    """Insert parts of the recording into all buffers, in turns."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    writer_s = dict.fromkeys(seconds, 0.0)
    shard_s = dict.fromkeys(seconds, 0.0)
    for turn, begin in enumerate(begins):
        arranged = {side.name: side.arrange(recording.steps[begin : begin + count], block) for side in sides}
        for side in _in_turn(sides, turn):
            before = cpu_seconds(), cpu_seconds(side.processes)
            start = time.perf_counter()
            side.insert(arranged[side.name], block)
            seconds[side.name].append((time.perf_counter() - start) / count)
            writer_s[side.name] += cpu_seconds() - before[0]
            shard_s[side.name] += cpu_seconds(side.processes) - before[1]
    total = count * len(begins)
    return _told(seconds) | {
        "writer_cpu_us": {name: 1e6 * used / total for name, used in writer_s.items()},
        "shard_cpu_us": {name: 1e6 * used / total for name, used in shard_s.items()},
    }


def _drawn(ways: dict[str, tuple[Side, Callable[[], Any]]], rounds: int) -> dict[str, Any]:
    """Draw batches from all buffers, in turns. The last batch of each is kept, as in training."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    learner_s = dict.fromkeys(ways, 0.0)
    shard_s = dict.fromkeys(ways, 0.0)
    for name in itertools.chain(*(_in_turn(list(ways), turn) for turn in range(1 + rounds))):
        side, draw = ways[name]
        before = cpu_seconds(), cpu_seconds(side.processes)
        taken = _timed(draw, IN_A_ROW)
        seconds[name].append(float(np.mean(taken)))
        learner_s[name] += cpu_seconds() - before[0]
        shard_s[name] += cpu_seconds(side.processes) - before[1]
    batches = IN_A_ROW * (1 + rounds)
    return _told({name: taken[1:] for name, taken in seconds.items()}) | {
        "learner_cpu_us": {name: 1e6 * used / batches for name, used in learner_s.items()},
        "shard_cpu_us": {name: 1e6 * used / batches for name, used in shard_s.items()},
    }


def _timed(act: Callable[[], Any], count: int) -> list[float]:
    taken = []
    held = None
    for _ in range(count):
        start = time.perf_counter()
        held = act()
        taken.append(time.perf_counter() - start)
    del held
    return taken


def _in_turn(sides: list[Any], turn: int) -> list[Any]:
    return sides[turn % len(sides) :] + sides[: turn % len(sides)]


def _told(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return rates, and their ratios to those of TorchRL and of the plain actor."""
    found: dict[str, Any] = {
        name: {"per_s": 1 / float(np.median(taken)), "best_per_s": 1 / min(taken)} for name, taken in seconds.items()
    }
    for name, prefix in (("torchrl", ""), ("plain actor", "plain_")):
        if name in found:
            found[f"{prefix}times"] = found["holdall"]["per_s"] / found[name]["per_s"]
            found[f"{prefix}best_times"] = found["holdall"]["best_per_s"] / found[name]["best_per_s"]
    return found


# ---------------------------------------------------------------- losses


def kill(recording: Recording, rounds: int) -> dict[str, Any]:
    """Kill one shard after another. Each is drawn from again before the next one is killed."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"durability": "segment", "url": folder}
        side = HoldallSide(recording, len(recording.steps), SHARDS, **settings)
        try:
            side.insert(side.arrange(recording.steps, BLOCK), BLOCK)
            side.sample()
            found = [_killed(side, turn % SHARDS) for turn in range(rounds)]
        finally:
            side.close()
    names = ("next_batch_s", "longest_wait_s", "shard_again_s")
    told = {name: [each[i] for each in found] for i, name in enumerate(names)}
    return {"kills": rounds} | {
        name: {"median": float(np.median(taken)), "most": max(taken)} for name, taken in told.items()
    }


def machines(_recording: Recording, _rounds: int) -> dict[str, Any]:
    """Lose, freeze and cut off a machine, each in a cluster of its own. Only root can cut a machine off."""
    sys.path.append(str(ROOT))
    machine_loss: Any = importlib.import_module("tests.shards.chaos.machine_loss")
    apart = importlib.import_module("tests.shards.nodes").can_be_apart()
    return {fault: machine_loss.lose_machine(fault) for fault in machine_loss.FAULTS if fault != "cut" or apart}


def _killed(side: HoldallSide, shard: int) -> tuple[float, float, float]:
    """Kill a shard, and draw until it is drawn from again. Return the first wait, the longest one and the total."""
    process_of(side.memory._members.handle(shard)).kill()
    start = last = time.perf_counter()
    waits: list[float] = []
    while True:
        batch = side.memory.sample(BATCH)
        now = time.perf_counter()
        waits.append(now - last)
        last = now
        if shard in shards_of_ids(batch.ids) and shard not in side.memory._members.lost:
            return waits[0], max(waits), now - start
