"""The workloads and the sides of several benchmarks.

A side is one way to keep experience: Stable-Baselines3's own buffer, holdall's drop-in for it, or holdall's memory.
This module imports holdall only when one of holdall's sides is opened, because the memory of that import is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from shared.streams import Step, Stream

SideName = Literal["sb3", "holdall", "core"]
SIDES: tuple[SideName, ...] = ("sb3", "holdall")
"""The sides that are compared. "core" is `ReplayMemory` without Stable-Baselines3's interface."""
BATCH = 256
SB3_MOST_BYTES = 6_000_000_000
"""Maximum size of Stable-Baselines3's buffer. If all transitions take more, it holds the newest ones."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of a case is measured."""

    read_from: int  # transitions at the first reading of the process's memory
    read_to: int
    read_every: int
    held: int  # transitions in the timed memories
    wrapped: int  # transitions added, timed, after these were full
    block: int  # ticks of a timed block of adds
    batches: int  # samples timed, on each side
    in_a_row: int  # samples of one side before the next side's turn
    sb3_read_from: int = 0  # where Stable-Baselines3's buffer cannot hold as many: its own range
    sb3_read_to: int = 0
    sb3_read_every: int = 0

    def readings_of(self, side: SideName) -> tuple[int, int, int]:
        """Return the first reading, the last reading and their distance, in transitions, of one side."""
        if side == "sb3" and self.sb3_read_to:
            return self.sb3_read_from, self.sb3_read_to, self.sb3_read_every
        return self.read_from, self.read_to, self.read_every


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: the source of its data, and the settings of holdall."""

    name: str
    module: str  # of streams
    lanes: int
    full: Sizes
    short: Sizes
    bytes_bar: float | None = None  # absolute
    bytes_ratio_bar: float | None = None  # of Stable-Baselines3's
    add_bar: float = 1.0
    sample_bar: float = 0.7
    compressed: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    """By preference: bytes per transition, and the time of a sample of Stable-Baselines3's."""
    options: Mapping[str, Any] = field(default_factory=dict)  # of the source

    def stream(self, trace: Path | None, seed: int = 0) -> Stream:
        """Open the case's source, or a recorded trace in its place."""
        opened: Stream
        if trace is not None:
            opened = importlib.import_module("shared.streams.trace").stream(trace)
        elif self.module == "vector":
            opened = importlib.import_module("shared.streams.vector").stream(self.lanes, seed)
        else:
            opened = importlib.import_module(f"shared.streams.{self.module}").stream(seed, **self.options)
        return opened

    def sizes(self, is_short: bool) -> Sizes:
        """Return how much is measured."""
        return self.short if is_short else self.full


_IMAGES = Sizes(20_000, 100_000, 500, held=20_000, wrapped=4_000, block=50, batches=60, in_a_row=5)
_SHORT_IMAGES = Sizes(
    10_000,
    40_000,
    250,
    held=8_000,
    wrapped=1_000,
    block=50,
    batches=60,
    in_a_row=5,
    sb3_read_from=2_000,
    sb3_read_to=8_000,
    sb3_read_every=250,
)

_VECTORS = Sizes(20_000, 100_000, 500, held=100_000, wrapped=20_000, block=100, batches=300, in_a_row=10)

_GAMES = Sizes(
    40_000,
    200_000,
    1_000,
    held=10_000,
    wrapped=2_000,
    block=50,
    batches=40,
    in_a_row=5,
    sb3_read_from=10_000,
    sb3_read_to=50_000,
    sb3_read_every=500,
)

CASES = {
    case.name: case
    for case in (
        Case(
            "atari",
            "atari",
            1,
            _IMAGES,
            _SHORT_IMAGES,
            bytes_bar=7_300,
            compressed={"balanced": (330, 1.0), "memory": (240, 1.0)},
        ),
        Case(
            "camera",
            "camera",
            1,
            _IMAGES,
            _SHORT_IMAGES,
            bytes_bar=21_700,
            compressed={"balanced": (3_800, 1.5), "memory": (2_900, 2.8)},
        ),
        Case(
            "market",
            "market",
            1,
            Sizes(1_000, 5_000, 50, 5_000, 300, 10, 30, 2, sb3_read_from=50, sb3_read_to=300, sb3_read_every=10),
            Sizes(1_000, 5_000, 50, 600, 50, 10, 30, 2, sb3_read_from=50, sb3_read_to=150, sb3_read_every=10),
            bytes_ratio_bar=1 / 200,
        ),
        *(
            Case(
                game.lower(),
                "atari",
                1,
                _GAMES,
                _SHORT_IMAGES,
                compressed={"balanced": (None, 1.0), "memory": (None, 1.0)},
                bytes_ratio_bar=1 / 120,
                options={"game": game},
            )
            for game in ("MontezumaRevenge", "MsPacman", "Pong", "Breakout")
        ),
        Case("vector1", "vector", 1, _VECTORS, _VECTORS, bytes_ratio_bar=0.65, sample_bar=1.0),
        Case("vector16", "vector", 16, _VECTORS, _VECTORS, bytes_ratio_bar=0.65, sample_bar=1.0),
    )
}


class Side:
    """One way to keep experience, with `add` and `sample`. `arguments` prepares a step before time is taken.

    Args:
        capacity: Transitions over all lanes.
        prefer: Compress every full block, with this preference. None: holdall's defaults.
    """

    def __init__(self, name: SideName, stream: Stream, capacity: int, prefer: str | None = None) -> None:
        settings: dict[str, Any] = {} if prefer is None or name == "sb3" else {"budget": None, "prefer": prefer}
        self.name = name
        self.capacity = capacity
        self._lanes = stream.lanes
        self.store: Any
        if name == "core":
            holdall = importlib.import_module("holdall")
            self.store = holdall.ReplayMemory(
                stream.observation_space, stream.action_space, capacity, stream.lanes, device="cpu", seed=0, **settings
            )
        else:
            self.store = _buffer_class(name, stream)(
                capacity, stream.observation_space, stream.action_space, "cpu", n_envs=stream.lanes, **settings
            )
        self.add: Callable[..., None] = self.store.add
        self.sample: Callable[[int], Any] = self.store.sample

    def arguments(self, step: Step) -> tuple[Any, ...]:
        """Arrange a step as this side's `add` takes it."""
        if self.name == "core":
            return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated
        infos = [{"TimeLimit.truncated": bool(cut)} for cut in step.truncated]
        # Both kinds of ending are `done` to Stable-Baselines3.
        return step.obs, step.next_obs, step.action, step.reward, step.terminated | step.truncated, infos

    @property
    def memory(self) -> Any:
        """The holdall memory of this side."""
        return self.store if self.name == "core" else self.store.memory


def libraries_of(name: SideName) -> None:
    """Import what a side needs beyond Stable-Baselines3 and torch."""
    if name != "sb3":
        importlib.import_module("holdall" if name == "core" else "holdall.sb3")


def sb3_capacity(stream: Stream, wanted: int) -> int:
    """Return how many of the `wanted` transitions Stable-Baselines3's buffer can hold here."""
    return min(wanted, SB3_MOST_BYTES // (2 * _nbytes(stream.observation_space)) // stream.lanes * stream.lanes)


def _buffer_class(name: SideName, stream: Stream) -> type[ReplayBuffer]:
    if name == "holdall":
        dropin: type[ReplayBuffer] = importlib.import_module("holdall.sb3").ReplayBuffer
        return dropin
    return DictReplayBuffer if isinstance(stream.observation_space, spaces.Dict) else ReplayBuffer


def _nbytes(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_nbytes(part) for part in space.values())
    return int(np.prod(space.shape or (), dtype=np.int64)) * np.dtype(space.dtype).itemsize
