"""Templates of the checkpoints that are damaged: memories of three kinds, each saved three times."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import Prioritized, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.store.tuning import Tuning

LANES = 2
TUNING = Tuning(block_bytes=20_000, max_segment_ticks=20, min_segment_ticks=5, min_packed_rows=8)
"""A few ticks fill a segment."""
IMAGES = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 12, 36), np.uint8),
        "history": spaces.Box(-np.inf, np.inf, (140, 8), np.float32),
        "state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)
NUMBERS = spaces.Box(-np.inf, np.inf, (5,), np.float32)
_NOISE = np.random.default_rng(0).integers(0, 24, (61, 12, 36), np.uint8)

Content = dict[str, Any]


def make_observation(tick: int) -> dict[str, Any]:
    """Return the observations of both lanes at a tick: two frames, a window of 140 days, and numbers."""
    frames = [[_NOISE[(tick - back + 31 * lane) % 61] for back in (1, 0)] for lane in range(LANES)]
    days = np.arange(tick, tick + 140).reshape(1, -1, 1) + 1000 * np.arange(LANES).reshape(-1, 1, 1)
    state = np.array([[tick + 0.5 * lane] * 3 for lane in range(LANES)], np.float32)
    history = (days * np.arange(37, 45) % 101 / 8).astype(np.float32)
    return {"image": np.array(frames, np.uint8), "history": history, "state": state}


def add_images(memory: ReplayMemory, tick: int) -> None:
    """Add the transition of a tick."""
    ended = np.array([tick % 17 == 16, tick % 23 == 22])
    action = np.array([tick % 5, 1])
    reward = np.array([tick, -tick], np.float32)
    after = make_observation(tick + 1)
    final = make_observation(tick + 1000)
    for key, rows in after.items():
        rows[ended] = final[key][ended]
    memory.add(make_observation(tick), action, reward, after, ended, np.zeros(LANES, np.bool_))


def add_numbers(memory: ReplayMemory, tick: int) -> None:
    """Add the transition of a tick."""
    at, after = (np.full((1, 5), t, np.float32) / np.arange(1, 6, dtype=np.float32) for t in (tick, tick + 1))
    flags = np.array([tick % 9 == 8]), np.array([tick % 11 == 10])
    memory.add(at, np.array([tick % 4]), np.array([tick], np.float64), after, *flags)


def make_image_memory(folder: Path) -> ReplayMemory:
    """Return a memory of large fields, which spills."""
    return ReplayMemory(
        IMAGES, spaces.Discrete(5), 1600, LANES, budget=None, spill_dir=folder / "spill", seed=1, _tuning=TUNING
    )


def make_number_memory(_folder: Path) -> ReplayMemory:
    """Return a memory of small fields, with priorities."""
    return ReplayMemory(NUMBERS, spaces.Discrete(4), 40, seed=2, sampler=Prioritized(), _tuning=TUNING)


@dataclass(frozen=True)
class Kind:
    """The functions that make, fill and load memories of one kind."""

    ticks: tuple[int, ...]  # The ticks after which the memory is saved.
    new: Callable[[Path], ReplayMemory]
    add: Callable[[ReplayMemory, int], None]
    arguments: Callable[[], dict[str, Any]] = dict


KINDS = {
    "images": Kind((30, 55, 80), make_image_memory, add_images, lambda: {"budget": None}),
    "numbers": Kind((15, 30, 50), make_number_memory, add_numbers, lambda: {"sampler": Prioritized()}),
    "shards": Kind((4, 7, 9), make_image_memory, add_images),
}


def read_content(memory: ReplayMemory) -> Content:
    """Return all transitions of a memory, as bytes, and the ids that it draws next."""
    every = np.arange(memory.first_id, memory.next_id)
    ids = every[memory.are_valid(every)]
    found = {name: rows.tobytes() for name, rows in read_rows(memory, ids).items()} if len(ids) else {}
    draws = memory.sample(8).ids.tobytes() if len(ids) else b""
    attached = {name: memory.attached[name] for name in memory.attached}
    return found | {"ids": ids.tobytes(), "lanes": memory.num_envs, "attached": attached, "draws": draws}


def read_rows(memory: ReplayMemory, ids: Any) -> dict[str, Any]:
    """Return every field of some transitions."""
    batch = memory.gather(ids)
    rows: dict[str, Any] = {"reward": batch.reward, "terminated": batch.terminated, "truncated": batch.truncated}
    for name, tree in (("obs", batch.obs), ("action", batch.action), ("next_obs", batch.next_obs)):
        leaves = tree if isinstance(tree, dict) else {"": tree}
        rows |= {f"{name}.{key}": leaf for key, leaf in leaves.items()}
    return rows


@dataclass(frozen=True)
class Template:
    """A directory of checkpoints, the files of each checkpoint, and the acknowledged states."""

    name: str
    run: Path
    needs: dict[int, dict[str, int]]  # For each checkpoint, the size of each file by its path.
    holds: dict[int, Content]

    @property
    def kind(self) -> Kind:
        """The kind of its memories."""
        return KINDS[self.name]


def make_template(name: str, folder: Path) -> None:
    """Save a memory three times, and write a `Template` with the acknowledged states."""
    kind = KINDS[name]
    run = folder / "run"
    holds = {}
    if name == "shards":
        shards = import_module("tests.crash.test_shards").MemoryOfShards(run, 2)
        done = 0
        for number, tick in enumerate(kind.ticks, 1):
            for shard, writer in ((0, 0), (1, 1)):
                shards.shards[shard].insert(writer, done, tick - done)
            done = tick
            shards.save().result()
            holds[number] = _load_copy(run, folder / str(number), kind)
        shards.close()
    else:
        with kind.new(folder) as memory:
            for number, tick in enumerate(kind.ticks, 1):
                while memory.next_id // memory.num_envs < tick:
                    kind.add(memory, memory.next_id // memory.num_envs)
                memory.store.wait_idle()
                memory.save(run, attach={"agent.pth": b"weights %d" % number}).result()
                holds[number] = _load_copy(run, folder / str(number), kind)
                for field, rows in read_rows(memory, np.arange(memory.first_id, memory.next_id)).items():
                    assert holds[number][field] == rows.tobytes(), (
                        f"checkpoint {number} has another {field} than was added"
                    )
    needs = {number: _find_needed_files(run, number) for number in holds}
    (folder / "template.pickle").write_bytes(pickle.dumps(Template(name, run, needs, holds)))


def _load_copy(run: Path, copy: Path, kind: Kind) -> Content:
    shutil.copytree(run, copy)
    with ReplayMemory.load(copy, **kind.arguments()) as memory:
        content = read_content(memory)
    shutil.rmtree(copy)
    return content


def _find_needed_files(run: Path, number: int, below: str = "") -> dict[str, int]:
    """Return the files of a checkpoint and their sizes."""
    manifest = open_reader(run / below).manifest(number)
    name = f"{below}manifests/{number:016d}.json"
    needs = {name: (run / name).stat().st_size}
    needs |= {f"{below}segments/{file}": nbytes for file, nbytes in manifest.files.items()}
    for shard in manifest.shards:
        needs |= _find_needed_files(run, shard.number, f"{shard.folder}/")
    return needs
