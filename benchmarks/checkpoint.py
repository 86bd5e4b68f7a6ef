"""What saving costs and what loading takes.

    python benchmarks/checkpoint.py [--gigabytes 1 8] [--recording FILE] [--short] [--json FILE]

The data is noise, which does not shrink, so the script writes as much as the memory holds. Each measurement has a fresh
process. The exit status is 1 if a bar is missed. Linux only.

memory       the most that the process's USS grows while it saves, in a fresh process per size, read every 2 ms
incremental  bytes written after 1 % new data, divided by those of the first save
pause        how long `save` holds up the training thread, with 3,000 segments and a million priorities
load         from nothing to the first batch of 256, with 3,000 segments
raw          with --recording: bytes of a checkpoint of a memory that holds everything uncompressed, divided by those
             that the same memory takes with budget=None
training     with --recording: steps a second of a small network that trains on one core while such a memory is saved
             again and again to new places, divided by those without saves; the two take turns
remote       with --url, 1 GB: the most that USS grows while it is saved there, and while it is loaded and sampled from,
             divided by the same with a directory; seconds to the first batch
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from results import Figure, describe_run, show, store
from shared.process import emit
from shared.streams import Step
from shared.streams.trace import stream

import holdall
from holdall.machine import held_bytes
from holdall.store.tuning import Tuning

GB = 10**9
MB = 10**6
FRAME = (84, 84)
SEGMENTS = 3_000
PRIORITIES = 1_000_000
BATCH = 256
SAVES = 100
RAW_STEPS = 2_500
RAW_BUDGET = "16GiB"
TRAINING_BATCH = 64
TRAINING_S = 0.5
"""Seconds of a turn. Short turns, and many of them, because other processes disturb both sides."""
TRAINING_ROUNDS = 61


def new_memory(capacity: int, **settings: Any) -> holdall.ReplayMemory:
    """Make a memory of frame stacks."""
    stack = spaces.Box(0, 255, (4, *FRAME), np.uint8)
    return holdall.ReplayMemory(stack, spaces.Discrete(6), capacity, seed=0, **settings)


class Player:
    """Plays noise: nothing of it is shared but the stacks, and nothing shrinks."""

    def __init__(self, memory: holdall.ReplayMemory) -> None:
        self._memory = memory
        self._generator = np.random.default_rng(0)
        self._stack = self._generator.integers(0, 256, (1, 4, *FRAME), np.uint8)
        self._number = 0

    def play(self, steps: int) -> None:
        """Add some transitions."""
        flag = np.zeros(1, np.bool_)
        reward = np.ones(1, np.float32)
        action = np.zeros(1, np.int64)
        for _ in range(steps):
            following = np.roll(self._stack, -1, axis=1)
            following[0, -1] = self._generator.integers(0, 256, FRAME, np.uint8)
            self._memory.add(self._stack, action, reward, following, flag, flag)
            self._stack = following


class Watch:
    """Reads this process's USS until it is told to stop."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, held_bytes().unique)

    def stop(self) -> int:
        """Return the most that was read."""
        self._stop.set()
        self._thread.join()
        return self.most


def memory_and_increment(gigabytes: float, folder: Path) -> list[dict[str, Any]]:
    """Fill a memory, save it, add 1 % and save again."""
    steps = int(gigabytes * GB / (FRAME[0] * FRAME[1]))
    with new_memory(2 * steps, budget=None) as memory:
        player = Player(memory)
        player.play(steps)
        memory.store.wait_idle()
        time.sleep(0.2)
        before = held_bytes().unique
        watch = Watch()
        first = memory.save(folder).result()
        grown = watch.stop() - before
        player.play(steps // 100)
        memory.store.wait_idle()
        second = memory.save(folder).result()
    allowed = 0.02 * first.bytes_written + 16 * 2**20 + MB  # New data, the open segment, and the manifest.
    return [
        {
            "what": "memory",
            "gigabytes": gigabytes,
            "bytes": first.bytes_written,
            "grown_bytes": grown,
            "seconds": first.seconds,
            "is_met": grown <= 64 * MB,
        },
        {
            "what": "incremental",
            "gigabytes": gigabytes,
            "first_bytes": first.bytes_written,
            "second_bytes": second.bytes_written,
            "allowed_bytes": allowed,
            "is_met": second.bytes_written <= allowed,
        },
    ]


def pause_and_load(folder: Path) -> list[dict[str, Any]]:
    """Save often from a memory of many segments, and load it."""
    tuning = Tuning(block_bytes=2**16)  # Few frames per segment, because their number is what counts here.
    sampler = holdall.Prioritized()
    with new_memory(PRIORITIES, budget=None, sampler=sampler, _tuning=tuning) as memory:
        player = Player(memory)
        while memory.report().segments < SEGMENTS:
            player.play(1_000)
        memory.sample(BATCH)
        memory.save(folder).result()
        pauses = []
        for _ in range(SAVES):
            player.play(20)
            batch = memory.sample(BATCH)
            memory.update_priorities(batch.ids, np.ones(BATCH))
            began = time.perf_counter()
            handle = memory.save(folder)
            pauses.append(1e3 * (time.perf_counter() - began))
            handle.result()
        segments = memory.report().segments
    began = time.perf_counter()
    with holdall.ReplayMemory.load(folder, sampler=holdall.Prioritized()) as loaded:
        loaded.sample(BATCH)
        took = time.perf_counter() - began
    p50, p99 = np.percentile(pauses, [50, 99]).tolist()
    pause = {"what": "pause", "segments": segments, "p50_ms": p50, "p99_ms": p99, "most_ms": max(pauses)}
    load = {"what": "load", "segments": segments, "seconds": took, "is_met": took < 1}
    return [pause | {"is_met": p99 <= 5}, load]


def raw(folder: Path, recording: Path) -> list[dict[str, Any]]:
    """Save a recording that is held uncompressed."""
    source = stream(recording)
    steps = list(itertools.islice(source.steps, RAW_STEPS))
    spaces_of = (source.observation_space, source.action_space, RAW_STEPS)
    with holdall.ReplayMemory(*spaces_of, budget=None, seed=0) as least:
        feed(least, steps)
        least.store.wait_idle()
        least_bytes = sum(field.total_bytes for field in least.report().fields)
    with holdall.ReplayMemory(*spaces_of, budget=RAW_BUDGET, seed=0) as memory:
        feed(memory, steps)
        memory.store.wait_idle()
        raw_bytes = sum(field.total_bytes for field in memory.report().fields)
        saved = memory.save(folder / "raw").result()
        ratios = sorted(measure_training(memory, folder, steps))
    size = saved.bytes_total / least_bytes
    speed = float(np.median(ratios))
    return [
        {
            "what": "raw",
            "recording": recording.stem,
            "held_bytes": raw_bytes,
            "least_bytes": least_bytes,
            "saved_bytes": saved.bytes_total,
            "ratio": size,
            "is_met": size <= 1.1,
        },
        {"what": "training", "ratio": speed, "ratios": ratios, "is_met": speed >= 0.9},
    ]


def feed(memory: holdall.ReplayMemory, steps: list[Step]) -> None:
    """Add recorded steps."""
    for step in steps:
        memory.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)


def measure_training(memory: holdall.ReplayMemory, folder: Path, steps: list[Step]) -> list[float]:
    """Train with and without saves, in turns. Return the ratios of their speeds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 8, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 4, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(1),
    )
    network(torch.zeros(1, 3, 84, 84))
    optimizer = torch.optim.Adam(network.parameters())
    again = itertools.cycle(steps)
    numbers = itertools.count()

    def train(*, saves: bool) -> float:
        count = 0
        handle: Any = None
        began = time.perf_counter()
        while time.perf_counter() - began < TRAINING_S:
            if saves and (handle is None or handle.done()):
                handle = memory.save(folder / str(next(numbers)))
            feed(memory, [next(again)])
            batch = memory.sample(TRAINING_BATCH)
            images = torch.from_numpy(batch.obs["image"]).float() / 255
            loss = (network(images)[:, 0] - torch.from_numpy(batch.reward)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += 1
        speed = count / (time.perf_counter() - began)
        if handle is not None:
            handle.cancel()  # The next turn is without a save.
            with contextlib.suppress(holdall.CheckpointError):
                handle.result()
        return speed

    train(saves=False)
    return [train(saves=True) / train(saves=False) for _ in range(TRAINING_ROUNDS)]


def remote(folder: Path, url: str) -> list[dict[str, Any]]:
    """Save to an object store and load from there, beside a directory."""
    steps = GB // (FRAME[0] * FRAME[1])
    grown: dict[str, float] = {}
    with new_memory(2 * steps, budget=None) as memory:
        Player(memory).play(steps)
        memory.store.wait_idle()
        for place in (str(folder), url):
            before = held_bytes().unique
            watch = Watch()
            memory.save(place).result()
            grown[place] = watch.stop() - before
    found = []
    for place in (str(folder), url):  # in processes of their own: what one has allocated, the next would use again
        program = [sys.executable, __file__, "--only", "sampled", "--url", place]
        found.append(json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout))
    saving = grown[url]
    loading = found[1]["grown_bytes"] - found[0]["grown_bytes"]
    words = {"what": "remote", "save_grown_bytes": saving, "load_grown_bytes": loading}
    return [words | {"first_batch_seconds": found[1]["seconds"], "is_met": max(saving, loading) <= 64 * MB}]


def sampled(url: str) -> list[dict[str, Any]]:
    """Load a memory and sample from it."""
    before = held_bytes().unique
    watch = Watch()
    began = time.perf_counter()
    with holdall.ReplayMemory.load(url, budget=None) as loaded:
        loaded.sample(BATCH)
        took = time.perf_counter() - began
        for _ in range(20):
            loaded.sample(BATCH)
    return [{"what": "sampled", "grown_bytes": watch.stop() - before, "seconds": took, "is_met": True}]


def measured(only: str, folder: Path, url: str | None, recording: Path | None) -> list[dict[str, Any]]:
    """Run one of the measurements."""
    if only == "raw" and recording is not None:
        return raw(folder, recording)
    if only == "pause":
        return pause_and_load(folder)
    if only == "remote" and url is not None:
        return remote(folder, url)
    if only == "sampled" and url is not None:
        return sampled(url)
    return memory_and_increment(float(only), folder)


def figures_of(one: dict[str, Any]) -> list[Figure]:
    """Return the figures of a measurement."""
    match one["what"]:
        case "memory":
            name = f"memory that a save of {one['gigabytes']:g} GB takes"
            return [Figure(name, "measured", "MB", one["grown_bytes"] / MB, "at most 64 MB")]
        case "incremental":
            name = f"bytes that the next save writes after 1 % more data ({one['gigabytes']:g} GB)"
            return [
                Figure(name, "measured", "MB", one["second_bytes"] / MB, f"at most {one['allowed_bytes'] / MB:.0f} MB")
            ]
        case "pause":
            name = f"`save` holds up the training thread, {one['segments']:,} segments"
            return [
                Figure(f"{name}: median", "measured", "ms", one["p50_ms"]),
                Figure(f"{name}: p99", "measured", "ms", one["p99_ms"], "at most 5 ms"),
            ]
        case "load":
            name = f"`load` of {one['segments']:,} segments, and the first batch of {BATCH}"
            return [Figure(name, "measured", "s", one["seconds"], "less than 1 s")]
        case "raw":
            name = "camera recording held uncompressed: bytes on disk over bytes held with `budget=None`"
            return [Figure(name, "measured", "of the bytes", one["ratio"], "at most 1.1")]
        case "training":
            name = "speed of training while the same memory is saved all the time"
            return [Figure(name, "measured", "of the speed", one["ratio"], "at least 0.9")]
        case "remote":
            name = "more than with a directory, in an object store"
            return [
                Figure(f"memory that a save takes {name}", "measured", "MB", one["save_grown_bytes"] / MB),
                Figure(f"memory that loading takes {name}", "measured", "MB", one["load_grown_bytes"] / MB),
                Figure("first batch from an object store", "measured", "s", one["first_batch_seconds"]),
            ]
    return []


def main() -> None:
    """Run every measurement in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[1.0, 8.0], metavar="N", help="sizes")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a disk with room for them")
    parser.add_argument("--url", help="a prefix of an object store, to be measured, too")
    parser.add_argument("--recording", type=Path, help="recorded camera images, see holdall.tools.bench.trace")
    parser.add_argument("--short", action="store_true", help="1 GB alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        for result in measured(arguments.only, arguments.folder, arguments.url, arguments.recording):
            emit(result)
        return
    run = describe_run({"recording": arguments.recording and arguments.recording.stem})
    found = []
    sizes = arguments.gigabytes[:1] if arguments.short else arguments.gigabytes
    further = [] if arguments.recording is None else ["raw"]
    further += [] if arguments.url is None else ["remote"]
    for only in [*map(str, sizes), "pause", *further]:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            program = [sys.executable, __file__, "--only", only, "--folder", str(folder)]
            program += [] if arguments.url is None else ["--url", arguments.url]
            program += [] if arguments.recording is None else ["--recording", str(arguments.recording)]
            done = subprocess.run(program, capture_output=True, text=True, check=True)
        finally:
            shutil.rmtree(folder)
        for line in done.stdout.splitlines():
            found.append(json.loads(line))
            figures = figures_of(found[-1])
            show(figures)
            if arguments.json is not None:
                store(arguments.json, figures, run)
    sys.exit(0 if all(result["is_met"] for result in found) else 1)


if __name__ == "__main__":
    main()
