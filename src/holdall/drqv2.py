"""DrQ-v2's replay storage and loader over a ReplayMemory: `ReplayBufferStorage` and `make_replay_loader`.

DrQ-v2 writes every episode to a compressed file, and its loader workers keep all episodes uncompressed. Here the
storage and the loader of a folder share one memory, in which every frame of the stacks is stored once.

Guarantee: with the same seed, batches equal, bit for bit, those that DrQ-v2 makes without worker processes. For every
row, an episode is drawn, and then the first of n consecutive steps. Rewards and discounts are accumulated in float32.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.checks import require_count, require_flag, require_number, to_whole
from holdall.delivery import Loader
from holdall.errors import ArgumentError, MissingPackageError
from holdall.memory import ReplayMemory
from holdall.report import MemoryReport
from holdall.space_leaves import stored_space
from holdall.store.tuning import Tuning

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.drqv2 needs torch; run \"pip install 'holdall[torch]'\"") from error

_DEFAULT_SIZE = 1_000_000
"""`replay_buffer_size` of DrQ-v2's configuration."""
_REQUIRED = ("observation", "action", "reward", "discount")
_STORAGES: WeakValueDictionary[Path, ReplayBufferStorage] = WeakValueDictionary()
"""Storages by folder. `make_replay_loader` gets only the folder, and finds its storage here."""

Ids = NDArray[np.int64]


class _Episode(NamedTuple):
    """A complete episode."""

    first_id: int
    length: int


class _Draw(NamedTuple):
    """The first transition of each row of a batch, and how many steps a row has."""

    first_ids: Ids
    nstep: int
    discount: float


class ReplayBufferStorage:
    """Drop-in for DrQ-v2's `replay_buffer.ReplayBufferStorage`.

    Args:
        data_specs: Specs with `name`, `shape` and `dtype`: observation, action, reward, discount, and further ones.
        replay_dir: Folder of checkpoints. If it has one, the storage continues with it.
        max_size: Maximum number of transitions. None: that of `make_replay_loader`, or a million.
        budget: See `holdall.ReplayMemory`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: See `holdall.ReplayMemory`.
    """

    def __init__(
        self,
        data_specs: Sequence[Any],
        replay_dir: Path | str,
        *,
        max_size: float | None = None,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | None = None,
        _tuning: Tuning | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in data_specs}
        missing = [name for name in _REQUIRED if name not in self._specs]
        if missing:
            raise ArgumentError(
                f"data_specs has the names {sorted(self._specs)} and lacks {missing}. Pass a spec for each of "
                f"{list(_REQUIRED)}."
            )
        self._replay_dir = Path(replay_dir)
        self._replay_dir.mkdir(parents=True, exist_ok=True)
        self._max_size = None if max_size is None else require_count("max_size", to_whole(max_size), 1)
        self._memory_settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "_tuning": _tuning,
        }
        self._saves_snapshots = False
        self._latest: dict[str, NDArray[Any]] | None = None  # The last time step, if its episode has not ended.
        self._first_id = 0  # First transition of the current episode.
        self._transitions = 0
        self._episodes: deque[_Episode] = deque()
        self._memory: ReplayMemory | None = None
        if any(self._replay_dir.iterdir()):
            self._resume()
        _STORAGES[self._replay_dir.resolve()] = self

    def __len__(self) -> int:
        """Return the number of transitions of complete episodes that were ever added, as DrQ-v2 does."""
        return self._transitions

    @property
    def memory(self) -> ReplayMemory:
        """The memory that holds the transitions. The first `add` makes it."""
        if self._memory is None:
            self._memory = ReplayMemory(
                _make_space(self._specs["observation"]),
                _make_space(self._specs["action"]),
                self._max_size or _DEFAULT_SIZE,
                extras={name: _make_space(spec) for name, spec in self._specs.items() if name in self._extras},
                reward_shape=tuple(self._specs["reward"].shape),
                **self._memory_settings,
            )
        return self._memory

    @property
    def _extras(self) -> list[str]:
        return [name for name in self._specs if name not in {"observation", "action", "reward"}]

    def add(self, time_step: Any) -> None:
        """Add a time step of DrQ-v2: one of dm_env, with an action. The last time step of an episode completes it."""
        values = {name: self._check(name, time_step[name]) for name in self._specs}
        before = None if time_step.first() else self._latest
        if time_step.first():
            self._end_episode(is_cut=True)  # The environment was reset before its episode ended.
        if before is not None:
            is_last = time_step.last()
            is_terminal = is_last and not values["discount"].any()
            self.memory.add(
                before["observation"][None],
                values["action"][None],
                values["reward"][None],
                values["observation"][None],
                np.array([is_terminal]),
                np.array([is_last and not is_terminal]),
                {name: values[name][None] for name in self._extras},
            )
        self._latest = values
        if time_step.last():
            self._end_episode(is_cut=False)
            if self._saves_snapshots and self._memory is not None:
                self._memory.save(self._replay_dir)

    def _check(self, name: str, value: Any) -> NDArray[Any]:
        """Return `value` as an array of the spec `name`. A single number fills the array, as in DrQ-v2."""
        spec = self._specs[name]
        dtype = np.dtype(spec.dtype)
        array = np.full(spec.shape, value, dtype) if np.isscalar(value) else np.asarray(value)
        if array.shape != tuple(spec.shape) or array.dtype != dtype:
            raise ArgumentError(
                f"time_step[{name!r}] has shape {array.shape} and dtype {array.dtype}, but its spec has "
                f"{tuple(spec.shape)} and {dtype}. Pass values of the spec, or change the spec in data_specs."
            )
        return array

    def _end_episode(self, *, is_cut: bool) -> None:
        """Complete the current episode, if it has transitions. With `is_cut`, mark its last transition as truncated."""
        self._latest = None
        if self._memory is None or self._memory.next_id == self._first_id:
            return
        if is_cut:
            self._memory.set_flags([self._memory.next_id - 1], [False], [True])
        self._record_episode(self._memory.next_id)

    def _record_episode(self, next_id: int) -> None:
        """Record the episode from `_first_id` to `next_id` - 1."""
        length = next_id - self._first_id
        self._episodes.append(_Episode(self._first_id, length))
        self._transitions += length
        self._first_id = next_id

    def _resume(self) -> None:
        """Load the checkpoint in the folder, and find its episodes. The last one is cut if it has not ended."""
        self._memory = ReplayMemory.load(self._replay_dir, self._max_size, **self._memory_settings)
        view = self._memory.host_store.view()
        ids = np.arange(view.first_id, view.next_id)
        self._first_id = view.first_id
        for end in ids[view.are_ends(ids)].tolist():
            self._record_episode(end + 1)
        self._end_episode(is_cut=True)

    def set_loader(self, max_size: int, *, save_snapshot: bool) -> None:
        """Apply the settings of a loader. For `make_replay_loader`."""
        storage_size = self._max_size if self._memory is None else self._memory.capacity
        if storage_size is not None and storage_size != max_size:
            raise ArgumentError(
                f"max_size ({max_size}) differs from the storage, which has {storage_size}. Make the loader before the "
                f"first add, or pass max_size={max_size} to ReplayBufferStorage."
            )
        self._max_size = max_size
        self._saves_snapshots = save_snapshot

    def draw(self, count: int, nstep: int, discount: float) -> _Draw:
        """Draw the first transitions of a batch from Python's and NumPy's generators. For `make_replay_loader`."""
        if self._memory is not None:
            while self._episodes and self._episodes[0].first_id < self._memory.first_id:
                self._episodes.popleft()
        episodes = [episode for episode in self._episodes if episode.length >= nstep]
        if not episodes:
            raise ArgumentError(
                f"No complete episode has {nstep} steps (nstep). Add time steps up to the last one of an episode first."
            )
        first_ids = np.empty(count, np.int64)
        for row in range(count):
            episode = random.choice(episodes)
            start = np.random.randint(0, episode.length - nstep + 1)  # noqa: NPY002  DrQ-v2's generator
            first_ids[row] = episode.first_id + start
        return _Draw(first_ids, nstep, discount)

    def read(self, draw: _Draw) -> list[torch.Tensor]:
        """Return observation, action, reward, discount and next observation of a draw. For `make_replay_loader`."""
        view = self.memory.host_store.view()
        columns = view.columns
        steps = draw.first_ids[:, None] + np.arange(draw.nstep)
        extra_names = [leaf.name for leaf in self.memory.schema.extras.leaves]
        discount_output = columns.extra_outputs[extra_names.index("discount")]
        rewards, discounts = view.read(steps.reshape(-1), (columns.reward_output, discount_output))
        rewards = rewards.reshape(*steps.shape, *rewards.shape[1:])
        discounts = discounts.reshape(*steps.shape, *discounts.shape[1:])
        reward = np.zeros_like(rewards[:, 0])
        discount = np.ones_like(discounts[:, 0])
        for step in range(draw.nstep):
            reward += discount * rewards[:, step]
            discount *= discounts[:, step] * draw.discount
        obs, action = view.read(draw.first_ids, (columns.obs_outputs[0], columns.action_outputs[0]))
        (next_obs,) = view.read(np.ascontiguousarray(steps[:, -1]), (columns.next_obs_outputs[0],))
        return [torch.from_numpy(array) for array in (obs, action, reward, discount, next_obs)]

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def close(self) -> None:
        """Wait for checkpoints, and free everything."""
        if self._memory is not None:
            self._memory.close()


class ReplayLoader:
    """An endless loader of batches, which `make_replay_loader` returns. Every iterator draws batches of its own."""

    def __init__(
        self, storage: ReplayBufferStorage, batch_size: int, prefetch: int, nstep: int, discount: float
    ) -> None:
        self._storage = storage
        self._batch_size = batch_size
        self._prefetch = prefetch
        self._nstep = nstep
        self._discount = discount

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        loader: Any = Loader(self._draw, lambda batch: batch, self._prefetch)
        return iter(loader)

    def _draw(self) -> Any:
        """Draw a batch, and return the function that reads it."""
        draw = self._storage.draw(self._batch_size, self._nstep, self._discount)
        return lambda: self._storage.read(draw)


def make_replay_loader(
    replay_dir: Path | str,
    max_size: float,
    batch_size: int,
    num_workers: int,
    save_snapshot: bool,
    nstep: int,
    discount: float,
) -> ReplayLoader:
    """Return an endless loader of batches: observation, action, reward, discount and next observation, as tensors.

    Args:
        replay_dir: Folder of a `ReplayBufferStorage` that was made before.
        max_size: Maximum number of transitions of the storage.
        num_workers: Batches that one thread reads ahead. There are no processes: all batches come from one memory.
        save_snapshot: Write a checkpoint to `replay_dir` at the end of every episode, in the background.
        nstep: Steps from the observation to the next observation. Episodes with fewer steps are not drawn.
        discount: Discount of one step.
    """
    storage = _STORAGES.get(Path(replay_dir).resolve())
    if storage is None:
        raise ArgumentError(
            f"replay_dir ({replay_dir}) has no storage in this process. Make ReplayBufferStorage(data_specs, "
            "replay_dir) first, and keep a reference to it."
        )
    max_size = require_count("max_size", to_whole(max_size), 1)
    require_number("discount", discount, 0)
    storage.set_loader(max_size, save_snapshot=require_flag("save_snapshot", save_snapshot))
    return ReplayLoader(
        storage,
        require_count("batch_size", batch_size, 1),
        require_count("num_workers", num_workers, 0),
        require_count("nstep", nstep, 1),
        float(discount),
    )


def _make_space(spec: Any) -> spaces.Box:
    return stored_space(tuple(spec.shape), np.dtype(spec.dtype))
