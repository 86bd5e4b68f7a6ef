"""Replay: DreamerV3's `embodied.replay.Replay` over a ReplayMemory.

    add    -> one transition; the memory holds the steps of all workers in the order in which they were added
    sample -> first step of a sequence -> the next steps of the same worker -> View.read
    update -> ReplayMemory.update, by step id

Arrays of more than 4 KiB are stored as observations, which are compressed, unless they are floating point. All other
keys except the reward are extras, which `update` rewrites in place.

Guarantee: a batch has, bit for bit, the steps that were added and the latents that `update` wrote last. With the same
seed, `sample` draws the same sequences as DreamerV3's own class.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
import zlib
from collections import deque
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.checkpoint import open_reader
from holdall.checks import refuse_malformed, require_count, to_whole
from holdall.errors import ArgumentError, CheckpointError
from holdall.memory import ReplayMemory
from holdall.schema import Array
from holdall.schema_json import dtype_from_json, dtype_to_json
from holdall.space_leaves import stored_space
from holdall.store.tuning import Tuning
from holdall.store.view import View

__all__ = ["Replay"]

_LOG = logging.getLogger("holdall")

Ids = NDArray[np.int64]
Step = dict[str, Array]

_WORKERS = 32
"""Workers whose unfinished sequences are held in addition to `capacity`."""
_STEP_ID_BYTES = 20
_TOKEN_BYTES = 12
_WARNING_S = 30.0
"""Seconds between warnings while `sample` waits for a sequence."""
_MODES = ("train", "report", "eval")
_STATE = "dreamer/state.json"
_FORMAT = 1


class Selector(Protocol):
    """The methods of the classes in `embodied.replay.selectors`, which draw numbers of sequences."""

    def __call__(self) -> Any:
        """Return the number of a sequence."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def __setitem__(self, number: int, step_ids: NDArray[np.uint8]) -> None:
        """Add a sequence, whose steps have `step_ids`, (length, 20)."""

    def __delitem__(self, number: int) -> None:
        """Remove a sequence."""


class Replay:
    """Drop-in for DreamerV3's `embodied.replay.Replay`, in a fraction of the memory.

    Methods may be called from any thread.

    A sequence is `length` steps of one worker. It can be drawn as soon as its last step is added.

    Args:
        length: Steps of a sequence, with the context.
        capacity: Maximum number of sequences. The oldest one is removed first.
        directory: Place of the checkpoints of `save` and `load`: a directory, or a prefix of an object store.
        chunksize: Not used. holdall chooses the lengths of its segments.
        online: Whether `sample` first returns new sequences, each step of a worker once. Then the selector draws.
        selector: Object that draws sequences, as in `embodied.replay.selectors`; uniform by default.
        save_wait: Whether `save` returns only when the checkpoint is complete.
        name: Name for log messages.
        seed: Seed of the uniform selector.
        budget: RAM that may be used; see `holdall.ReplayMemory`.
        prefer: How much slower sampling compressed data may be; see `holdall.ReplayMemory`.
        spill_dir: Directory for the oldest images that exceed the budget.

    Examples:
        >>> from holdall.dreamer import Replay
        >>> replay = Replay(length=2, capacity=100)
        >>> for step in range(10):
        ...     replay.add({"image": np.zeros((8, 8, 3), np.uint8), "is_first": step == 0, "is_last": False})
        >>> replay.sample(4)["image"].shape
        (4, 2, 8, 8, 3)
    """

    def __init__(
        self,
        length: int,
        capacity: float | None = None,
        directory: str | os.PathLike[str] | None = None,
        chunksize: int = 1024,
        online: bool = False,
        selector: Selector | None = None,
        save_wait: bool = False,
        name: str = "unnamed",
        seed: int = 0,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        _tuning: Tuning | None = None,
    ) -> None:
        if capacity is None:
            raise ArgumentError("capacity is None, but a memory needs a limit. Pass the number of sequences to hold.")
        self.length = require_count("length", length, 1)
        self.capacity = require_count("capacity", to_whole(capacity), 1)
        self.directory = None if directory is None else str(directory)
        self.chunksize = chunksize
        self.online = online
        self.save_wait = save_wait
        self.name = name
        self.metrics = {"samples": 0, "inserts": 0, "updates": 0}
        self._settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "_tuning": _tuning,
        }
        self._memory: ReplayMemory | None = None
        self._keys: dict[str, _Key] = {}
        self._token = uuid.uuid4().bytes[:_TOKEN_BYTES]  # The first bytes of all step ids.
        self._condition = threading.Condition(threading.RLock())  # Held for every change; notified of new sequences.
        ring = self.capacity + _WORKERS * self.length
        # By id modulo `ring`: the distance to the id of the worker's next step. 0: that step has not been added yet.
        self._distances: NDArray[np.uint32] = np.zeros(ring, np.uint32)
        # Ids of the first steps of sequences, by number of the sequence modulo the capacity.
        self._starts: Ids = np.zeros(self.capacity, np.int64)
        self._first_number = 0
        self._next_number = 0
        self._uniform = _Uniform(self.capacity, seed) if selector is None else None
        self.sampler: Selector = selector if self._uniform is None else self._uniform  # type: ignore[assignment]
        self._streams: dict[Any, _Stream] = {}
        self._queue: deque[int] = deque()  # With `online`: ids of the first steps of the sequences to return next.

    @property
    def memory(self) -> ReplayMemory:
        """The memory that stores the steps. The first `add` makes it."""
        if self._memory is None:
            raise ArgumentError(f"Replay {self.name!r} is empty, so it has no memory yet. Add a step first.")
        return self._memory

    def __len__(self) -> int:
        """Return the number of sequences that can be drawn."""
        return self._next_number - self._first_number

    # ---------------------------------------------------------------- adding

    def add(self, step: Mapping[str, Any], worker: Any = 0) -> None:
        """Add the next step of a worker. Keys that begin with "log/" are dropped.

        The first step decides keys, shapes and dtypes. Raise ArgumentError if a later step differs.
        """
        arrays = {key: np.asarray(value) for key, value in step.items() if not key.startswith("log/")}
        with self._condition:
            if self._memory is None:
                # Smaller arrays become extras. As observations they would be stored twice: `next_obs` is not known, so
                # the memory gets `obs` in its place, and stores both rows of small observations.
                tuning = self._settings["_tuning"] or Tuning()
                self._make_memory({key: _Key.of(key, array, tuning.small_field_bytes) for key, array in arrays.items()})
            memory = self.memory
            arguments = _make_arguments(self._keys, arrays)
            transition_id = memory.next_id
            memory.add(**arguments)
            self._record_step(transition_id, self._streams.setdefault(worker, _Stream()))

    def _make_memory(self, keys: dict[str, _Key]) -> None:
        """Make the memory for steps with `keys`."""
        observation: dict[str, spaces.Space[Any]]
        observation = {key.name: key.space for key in keys.values() if key.kind == "image"}
        extras = {key.name: key.space for key in keys.values() if key.kind == "extra"}
        self._memory = ReplayMemory(
            spaces.Dict(observation), spaces.Dict({}), len(self._distances), 1, extras=extras, **self._settings
        )
        self._keys = keys

    def _record_step(self, transition_id: int, stream: _Stream) -> None:
        """Append a step to a stream. Record the sequence that ends with this step."""
        first_id = self.memory.first_id
        ring = len(self._distances)
        self._distances[transition_id % ring] = 0
        if stream.newest is not None and stream.newest >= first_id:
            self._distances[stream.newest % ring] = transition_id - stream.newest
        stream.newest = transition_id
        pending = stream.pending
        while pending and pending[0] < first_id:
            pending.popleft()  # The worker paused for so long that its steps were evicted.
        pending.append(transition_id)
        if len(pending) >= self.length:
            start = pending.popleft()
            self._record_sequence(start)
            if self.online and stream.count % self.length == 0:
                self._queue.append(start)
        stream.count += 1

    def _record_sequence(self, start: int) -> None:
        """Add the sequence that begins with step `start`. Remove sequences that do not fit or were evicted."""
        while len(self) >= self.capacity:
            self._remove_oldest()
        self._remove_evicted()
        number = self._next_number
        self._starts[number % self.capacity] = start
        self._next_number += 1
        self._add_to_sampler(number, start)
        self.metrics["inserts"] += 1
        self._condition.notify_all()

    def _add_to_sampler(self, number: int, start: int) -> None:
        step_ids = _NO_STEP_IDS  # The uniform selector does not read them.
        if self._uniform is None:
            step_ids = self._make_step_ids(self._follow(np.array([start]))[0])
        self.sampler[number] = step_ids

    def _remove_oldest(self) -> None:
        del self.sampler[self._first_number]
        self._first_number += 1

    def _remove_evicted(self) -> None:
        """Remove the oldest sequences as long as the memory does not hold their first steps."""
        first_id = self.memory.first_id
        while len(self) > 0 and self._starts[self._first_number % self.capacity] < first_id:
            self._remove_oldest()

    # ---------------------------------------------------------------- sampling

    def sample(self, batch: int, mode: str = "train") -> dict[str, Array]:
        """Return `batch` sequences: arrays of shape (batch, length, ...) by key. Wait until there is a sequence.

        `stepid` identifies every step, for `update`. `is_first` is set in the first step of every sequence. `is_last`
        is also set in every step before the first step of another episode.
        """
        batch = require_count("batch", batch, 1)
        if mode not in _MODES:
            raise ArgumentError(f"mode is {mode!r}. Pass one of {', '.join(_MODES)}.")
        with self._condition:
            starts = np.array([self._draw(mode) for _ in range(batch)], np.int64)
            ids = self._follow(starts)
            view = self.memory.host_store.view()
        data = self._read(view, ids)
        data["stepid"] = self._make_step_ids(ids)
        _mark_ends(data)
        return data

    def _draw(self, mode: str) -> int:
        """Return the id of the first step of a sequence. Called with the lock, which is released while it waits."""
        if mode == "train":
            self.metrics["samples"] += 1
        while True:
            while len(self) == 0:
                if not self._condition.wait(_WARNING_S):
                    _LOG.warning("Replay %r is empty, and sample waits for %d steps.", self.name, self.length)
            if self.online and self._queue and mode == "train":
                start = self._queue.popleft()
            else:
                self._remove_evicted()
                if len(self) == 0:
                    continue
                start = int(self._starts[self.sampler() % self.capacity])
            if start >= self.memory.first_id:
                return start

    def _follow(self, starts: Ids) -> Ids:
        """Return the ids of the steps of the sequences that begin with `starts`, (sequences, length)."""
        ids = np.empty((len(starts), self.length), np.int64)
        ids[:, 0] = starts
        ring = len(self._distances)
        for t in range(1, self.length):
            before = ids[:, t - 1]
            ids[:, t] = before + self._distances[before % ring]
        return ids

    def _read(self, view: View, ids: Ids) -> dict[str, Array]:
        """Return all keys of steps, in the order of the first step that was added."""
        schema = self.memory.schema
        columns = view.columns
        outputs = dict(zip(schema.observation.keys or (), columns.obs_outputs, strict=True))
        outputs |= dict(zip(schema.extras.keys or (), columns.extra_outputs, strict=True))
        wanted = [columns.reward_output if key.kind == "reward" else outputs[key.name] for key in self._keys.values()]
        rows = view.read(ids.reshape(-1), tuple(wanted))
        return {
            name: array.reshape(*ids.shape, *key.shape)
            for (name, key), array in zip(self._keys.items(), rows, strict=True)
        }

    # ---------------------------------------------------------------- updates

    def update(self, data: Mapping[str, Any]) -> None:
        """Rewrite keys of steps, such as the latents of a batch after its training step.

        Steps that were evicted since are ignored. If a step occurs twice, its last row counts.

        Args:
            data: `stepid` of a batch, (batch, time, 20), new rows by key with the axes (batch, time), and optionally
                `priority`, (batch, time), for the selector.
        """
        rows = {key: np.asarray(value) for key, value in data.items()}
        step_ids = rows.pop("stepid", None)
        if step_ids is None or step_ids.ndim != 3 or step_ids.shape[2] != _STEP_ID_BYTES or step_ids.dtype != np.uint8:
            given = "missing" if step_ids is None else f"{step_ids.dtype} of shape {step_ids.shape}"
            raise ArgumentError(f"stepid is {given}. Pass the uint8 array (batch, time, 20) that sample returned.")
        leading = step_ids.shape[:2]
        priority = rows.pop("priority", None)
        if priority is not None and priority.shape != leading:
            raise ArgumentError(f"priority has shape {priority.shape}, expected {leading}: one for each step id.")
        for key, array in rows.items():
            self._require_rewritable(key, array, leading)
        with self._condition:
            self.metrics["updates"] += prod(leading)
            if priority is not None:
                self._set_priorities(step_ids.reshape(-1, _STEP_ID_BYTES), priority.reshape(-1))
            ids, is_held = self._find_held(step_ids)
            if rows and is_held.any():
                some = {key: array.reshape(-1, *array.shape[2:])[is_held] for key, array in rows.items()}
                self.memory.update(ids[is_held], **some)

    def _require_rewritable(self, name: str, array: Array, leading: tuple[int, ...]) -> None:
        """Raise ArgumentError unless `array` can replace rows of the key `name`. `leading` is (batch, time)."""
        key = self._keys.get(name)
        if key is None:
            raise ArgumentError(f"{name!r} is not a key of the steps, which have {sorted(self._keys)}. Leave it out.")
        if key.kind != "extra":
            raise ArgumentError(
                f"{name!r} is stored as {'an image' if key.kind == 'image' else 'the reward'}, which cannot be "
                "rewritten. Add the results of the network under another key, as floating point numbers."
            )
        if array.shape != (*leading, *key.shape) or array.dtype != key.dtype:
            raise ArgumentError(
                f"{name!r} has dtype {array.dtype} and shape {array.shape}, expected {key.dtype} and "
                f"{(*leading, *key.shape)}. Nothing is cast: pass rows like those of sample."
            )

    def _set_priorities(self, step_ids: NDArray[np.uint8], priorities: Array) -> None:
        prioritize = getattr(self.sampler, "prioritize", None)
        if prioritize is None:
            raise ArgumentError("priority was given, but the selector has no prioritize. Pass a selector that has it.")
        prioritize(step_ids, priorities)

    def _make_step_ids(self, ids: Ids) -> NDArray[np.uint8]:
        """Return the step ids of transitions: the token of this replay and the transition id."""
        step_ids = np.empty((*ids.shape, _STEP_ID_BYTES), np.uint8)
        step_ids[..., :_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        step_ids[..., _TOKEN_BYTES:] = ids.astype(">i8")[..., None].view(np.uint8)
        return step_ids

    def _find_held(self, step_ids: NDArray[np.uint8]) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the transition ids of step ids as a flat array, and which of them the memory holds."""
        if self._memory is None:
            return np.zeros(0, np.int64), np.zeros(0, np.bool_)
        flat = np.ascontiguousarray(step_ids.reshape(-1, _STEP_ID_BYTES))
        ids = np.ascontiguousarray(flat[:, _TOKEN_BYTES:]).view(">i8")[:, 0].astype(np.int64)
        is_own = (flat[:, :_TOKEN_BYTES] == np.frombuffer(self._token, np.uint8)).all(axis=1)
        return ids, is_own & (ids >= self._memory.first_id) & (ids < self._memory.next_id)

    # ---------------------------------------------------------------- accounting

    def stats(self) -> dict[str, float]:
        """Return sizes, and counts since the last call."""
        with self._condition:
            metrics = self.metrics
            self.metrics = dict.fromkeys(metrics, 0)
            memory = self._memory
            is_counted = metrics["inserts"] > 0
            return {
                "items": len(self),
                "chunks": 0 if memory is None else memory.store.segments,
                "streams": len(self._streams),
                "ram_gb": 0.0 if memory is None else memory.report().total_bytes / 2**30,
                **metrics,
                "replay_ratio": self.length * metrics["samples"] / metrics["inserts"] if is_counted else float("nan"),
            }

    def close(self) -> None:
        """Free everything. Batches stay valid."""
        if self._memory is not None:
            self._memory.close()

    # ---------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write a checkpoint to `directory`, if there is one. Only new and rewritten steps are written."""
        if self.directory is None or self._memory is None:
            return
        with self._condition:
            self._remove_evicted()
            handle = self._memory.save(self.directory, attach=self._pack_state(), keep=1)
        if self.save_wait:
            handle.result()

    def _pack_state(self) -> dict[str, bytes]:
        """Return the sequences and the state of the uniform selector, as files of a checkpoint."""
        memory = self.memory
        held = np.arange(memory.first_id, memory.next_id)
        numbers = np.arange(self._first_number, self._next_number)
        state: dict[str, Any] = {
            "format": _FORMAT,
            "length": self.length,
            "token": self._token.hex(),
            "keys": {name: key.to_json() for name, key in self._keys.items()},
            "first_number": self._first_number,
            "next_number": self._next_number,
            "steps": len(held),
            "queued": len(self._queue),
            "generator": None,
        }
        arrays = {
            "starts": np.diff(self._starts[numbers % self.capacity], prepend=0),
            "distances": self._distances[held % len(self._distances)],
            "places": np.zeros(0, np.int64),
            "queue": np.array(self._queue, np.int64),
        }
        if self._uniform is not None:
            state["generator"] = self._uniform.generator.bit_generator.state
            arrays["places"] = np.diff(self._uniform.numbers[: len(self)], prepend=0)
        files = {_STATE: json.dumps(state).encode()}
        for name, array in arrays.items():
            files[f"dreamer/{name}"] = zlib.compress(array.astype("<i8").tobytes(), level=1)
        return files

    def load(
        self, data: Any = None, directory: str | os.PathLike[str] | None = None, amount: float | None = None
    ) -> None:
        """Load the newest checkpoint of `directory`, if there is one. Workers begin new sequences.

        Args:
            data: Not used; the result of `save`, which is None.
            directory: Place of the checkpoint; that of the constructor by default.
            amount: Number of sequences to load, the newest ones; all by default.
        """
        place = self.directory if directory is None else str(directory)
        if place is None or not _has_checkpoint(place):
            return
        with self._condition:
            if self._memory is not None:
                raise ArgumentError(f"Replay {self.name!r} has steps already. Load before the first step is added.")
            memory = ReplayMemory.load(place, capacity=len(self._distances), **self._settings)
            try:
                with refuse_malformed(f"The Replay that was saved in {place}"):
                    state, arrays = _unpack_state(memory, place, self.length)
                    self._restore(memory, state, arrays, amount)
            except BaseException:
                memory.close()
                raise
            self._condition.notify_all()

    def _restore(
        self, memory: ReplayMemory, state: dict[str, Any], arrays: dict[str, Ids], amount: float | None
    ) -> None:
        """Take over a loaded memory and its sequences. A malformed state raises before anything is changed."""
        keys = {name: _Key.from_json(name, fields) for name, fields in state["keys"].items()}
        token = bytes.fromhex(state["token"])
        starts = np.cumsum(arrays["starts"])
        count = len(starts)
        kept = min(count, self.capacity, count if amount is None else require_count("amount", to_whole(amount), 1))
        numbers = np.arange(state["next_number"] - kept, state["next_number"])
        self._starts[numbers % self.capacity] = starts[count - kept :]
        newest = np.arange(memory.next_id - len(arrays["distances"]), memory.next_id)
        is_held = newest >= memory.first_id
        self._distances[newest[is_held] % len(self._distances)] = arrays["distances"][is_held]
        self._keys = keys
        self._token = token
        self._memory = memory
        self._first_number = state["next_number"] - kept
        self._next_number = state["next_number"]
        self._queue = deque(arrays["queue"].tolist() if self.online else ())
        if self._uniform is not None and state["generator"] is not None and kept == count:
            self._uniform.restore(np.cumsum(arrays["places"]), state["generator"])
            return
        for number in numbers.tolist():
            self._add_to_sampler(number, int(self._starts[number % self.capacity]))


class _Stream:
    """The steps of one worker, by transition id."""

    def __init__(self) -> None:
        self.pending: deque[int] = deque()  # First steps of sequences that are not complete yet.
        self.newest: int | None = None
        self.count = 0  # Number of steps that were added.


class _Key(NamedTuple):
    """One key of the steps."""

    name: str
    kind: str  # Field of the memory: "image" for an observation, "reward" or "extra".
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, array: Array, small_bytes: int) -> _Key:
        """Return the key of an array. Raise ArgumentError if its dtype is not numeric.

        Arrays of more than `small_bytes` are images, unless they are floating point.
        """
        if array.dtype.kind not in "biuf" or name == "stepid":
            raise ArgumentError(
                f"{name!r} has dtype {array.dtype}. Steps have booleans and numbers, and stepid is holdall's own key. "
                f"Convert {name!r}, or leave it out."
            )
        kind = "extra"
        if name == "reward" and array.shape == ():
            kind = "reward"
        elif array.nbytes > small_bytes and array.dtype.kind != "f":
            kind = "image"
        return cls(name, kind, array.shape, array.dtype)

    @property
    def space(self) -> spaces.Box:
        """The space of the stored array."""
        return stored_space(self.shape, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the key as a JSON object."""
        return {"kind": self.kind, "shape": self.shape, "dtype": dtype_to_json(self.dtype)}

    @classmethod
    def from_json(cls, name: str, fields: Mapping[str, Any]) -> _Key:
        """Return the key that `to_json` described."""
        return cls(name, str(fields["kind"]), tuple(map(int, fields["shape"])), dtype_from_json(fields["dtype"]))


class _Uniform:
    """Draws all sequences with the same probability. The draws are those of DreamerV3's uniform selector.

    Attributes:
        numbers: Numbers of the sequences. The last number replaces one that is removed.
        generator: The random generator.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.numbers: Ids = np.zeros(capacity, np.int64)
        self.generator = np.random.default_rng(seed)
        self._places: Ids = np.zeros(capacity, np.int64)  # Index in `numbers`, by sequence number modulo the capacity.
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __call__(self) -> int:
        return int(self.numbers[self.generator.integers(0, self._count)])

    def __setitem__(self, number: int, step_ids: NDArray[np.uint8]) -> None:
        self.numbers[self._count] = number
        self._places[number % len(self._places)] = self._count
        self._count += 1

    def __delitem__(self, number: int) -> None:
        place = self._places[number % len(self._places)]
        self._count -= 1
        last = self.numbers[self._count]
        self.numbers[place] = last
        self._places[last % len(self._places)] = place

    def restore(self, numbers: Ids, generator_state: dict[str, Any]) -> None:
        """Continue where another selector was saved."""
        self._count = len(numbers)
        self.numbers[: self._count] = numbers
        self._places[numbers % len(self._places)] = np.arange(self._count)
        self.generator.bit_generator.state = generator_state


_NO_STEP_IDS = np.zeros((0, _STEP_ID_BYTES), np.uint8)
_NOT_ENDED = np.zeros(1, np.bool_)
_NO_REWARD = np.zeros(1, np.float32)


def _make_arguments(keys: Mapping[str, _Key], arrays: Step) -> dict[str, Any]:
    """Return a step as arguments of `ReplayMemory.add`. Raise ArgumentError if it does not fit `keys`."""
    if arrays.keys() != keys.keys():
        missing = sorted(keys.keys() - arrays.keys())
        unknown = sorted(arrays.keys() - keys.keys())
        raise ArgumentError(
            f"The step misses the keys {missing} and has the unknown keys {unknown}, compared with the first step. Add "
            "steps with the keys of the first one."
        )
    by_kind: dict[str, dict[str, Array]] = {"image": {}, "extra": {}, "reward": {}}
    for name, key in keys.items():
        array = arrays[name]
        if array.shape != key.shape or array.dtype != key.dtype:
            raise ArgumentError(
                f"{name!r} has dtype {array.dtype} and shape {array.shape}, but the first step had {key.dtype} and "
                f"{key.shape}. Nothing is cast: add steps of that dtype and shape."
            )
        by_kind[key.kind][name] = array[None]
    return {
        "obs": by_kind["image"],
        "action": {},
        "reward": by_kind["reward"].get("reward", _NO_REWARD),
        "next_obs": by_kind["image"],  # It is never read. An image that equals `obs` takes no memory.
        "terminated": _NOT_ENDED,
        "truncated": _NOT_ENDED,
        "extras": by_kind["extra"],
    }


def _mark_ends(data: dict[str, Array]) -> None:
    """Mark the first step of every sequence, and the last step of every episode that was abandoned."""
    if "is_first" not in data:
        return
    is_first = data["is_first"]
    is_first[:, 0] = True
    if "is_last" in data:
        data["is_last"][:, :-1] |= is_first[:, 1:]


def _has_checkpoint(place: str) -> bool:
    """Return whether a place has a checkpoint. Raise ArgumentError if it has DreamerV3's own files."""
    if "://" in place:
        return bool(open_reader(place).numbers())
    folder = Path(place)
    if not folder.is_dir():
        return False
    if (folder / "manifests").is_dir():
        return True
    if any(folder.glob("*.npz")):
        raise ArgumentError(
            f"directory ({place}) has chunks of DreamerV3's own Replay, which holdall does not read. Pass an empty "
            "directory."
        )
    return False


def _unpack_state(memory: ReplayMemory, place: str, length: int) -> tuple[dict[str, Any], dict[str, Ids]]:
    """Return the state and the arrays that `_pack_state` saved. Raise an error if they are damaged or do not fit."""
    if _STATE not in memory.attached:
        raise CheckpointError(
            f"{place} is a checkpoint of a memory, but not of a Replay. Load it with ReplayMemory.load."
        )
    state = json.loads(memory.attached[_STATE])
    if state.get("format") != _FORMAT:
        raise CheckpointError(
            f"{place} has format {state.get('format')}, but this version reads {_FORMAT}. Update holdall."
        )
    if state["length"] != length:
        raise ArgumentError(
            f"{place} has sequences of {state['length']} steps, but length is {length}. Pass the saved length."
        )
    count = int(state["next_number"]) - int(state["first_number"])
    nbytes_by_name = {
        "starts": 8 * count,
        "places": 8 * count if state["generator"] else 0,
        "distances": 8 * state["steps"],
        "queue": 8 * state["queued"],
    }
    arrays = {}
    for name, nbytes in nbytes_by_name.items():
        # A damaged file must not decompress to more bytes than the state says.
        content = zlib.decompressobj().decompress(memory.attached[f"dreamer/{name}"], nbytes + 1)
        if len(content) != nbytes:
            raise CheckpointError(f"{place} is damaged: its number of {name} is wrong. Load another checkpoint.")
        arrays[name] = np.frombuffer(content, "<i8").astype(np.int64)
    return state, arrays
