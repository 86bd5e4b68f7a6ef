"""Dataset: a checkpoint that is only read, by this process and by any number of DataLoader workers.

    open        -> the newest complete checkpoint, whose blocks stay in their files
    dataset[i]  -> one step by key, with windows over time
    to_memory   -> a ReplayMemory that begins with these transitions

Compressed blocks are read from their files when a step is read, so the page cache holds one copy for all processes.
Forked workers share the rows of small fields with their parent. Spawned workers open the checkpoint again, because a
pickle of a dataset contains only its settings.

Guarantee: a row equals, bit for bit, what was added. Windows never contain steps of another episode.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from holdall._native import Reader, Segment
from holdall.batch import Batch, Draw, Flags, Ids, check_ids
from holdall.checkpoint import LOAD_S, Attached, find_writer, is_remote, normalized_url, open_read_only
from holdall.checks import require_count, require_number, require_path, to_whole
from holdall.dataset_batches import Batches
from holdall.dataset_rows import Allocate, BlockPool, LentBytes, SharedRows, allocate_nothing
from holdall.delivery import HostDelivery, Loader
from holdall.errors import ArgumentError, ClosedError, TransitionIdError
from holdall.machine import pool_threads
from holdall.memory import ReplayMemory
from holdall.sampling import Episodes, Held, NStep, Prioritized, Sampler, new_generator
from holdall.sampling import Sequence as SequenceSampler
from holdall.schema import Array, Schema, Tree
from holdall.store.budget import Budget
from holdall.store.columns import Columns
from holdall.store.snapshot import StoreState
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.view import View, align

METADATA = "dataset.json"
"""Name of the attached file in which `holdall checkpoint import` records fps, source and tasks."""

_TOLERANCE_S = 1e-4
_CHECKED_STEPS = 64
"""Number of recorded timestamps that are compared with `fps`."""
_RESULT_KEYS = ("id", "discount", "mask")
"""Keys of results that are not stored fields. A field of such a name gets the prefix "extras."."""


class Feature(NamedTuple):
    """Shape and dtype of one key of a step."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def aligned_bytes(self, count: int) -> int:
        """Return the bytes of `count` steps, rounded up so that another array may follow them."""
        return align(count * prod(self.shape) * self.dtype.itemsize)


class _Window(NamedTuple):
    """Keys that are read at the same offsets from each step."""

    offsets: NDArray[np.int64] | None  # Offsets in steps. None: the step itself, without an axis of time.
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _DatasetSettings:
    """Everything that another process needs to open the same dataset."""

    url: str
    number: int | None
    delta_timestamps: dict[str, tuple[float, ...]] | None
    fps: float | None
    keys: tuple[str, ...] | None
    sampler: NStep | SequenceSampler | None
    seed: int | None
    cache_dir: str | None
    timeout: float


class Dataset:
    """The transitions of a checkpoint, for `torch.utils.data.DataLoader` and for loops of your own. Made with `open`.

    `dataset[i]` is a dict of arrays by key: `observation` or, for Dict spaces, `observation.NAME`, and likewise
    `action`, `reward`, `next_observation`, `terminated`, `truncated`, every extra by its name, and `id`. An index
    counts the transitions that are held, oldest first. `dataset[[3, 1, 4]]` has the same keys with a leading axis.

    All methods may be called from any thread, and in forked children.

    Attributes:
        url: Place of the checkpoint.
        number: Number of the checkpoint.
        schema: Spaces of all fields.
        fps: Steps per second, or None if that is neither recorded nor given.
        attached: Files that were saved with the checkpoint, by name.

    Examples:
        >>> _ = memory.save("recording").result()
        >>> with holdall.Dataset.open("recording", allow_writer=True) as dataset:
        ...     print(len(dataset), dataset[[3, 1]]["observation"].shape)
        100 (2, 4)
    """

    def __init__(self, settings: _DatasetSettings, cache: _CacheDirectory | None = None) -> None:
        restored = open_read_only(settings.url, settings.number, settings.cache_dir, settings.timeout)
        self._settings = replace(settings, number=restored.manifest.number)
        self._cache = cache
        self.url = settings.url
        self.number: int = restored.manifest.number
        self.schema: Schema = restored.schema
        self.attached: Attached = restored.attached
        tuning = Tuning()
        budget = Budget.from_settings(None, self.schema, can_spill=False, tuning=tuning)
        ticks = max(restored.manifest.next_tick - restored.first_tick, 1)
        threads = 1 if multiprocessing.parent_process() is not None else pool_threads()
        self._store: Store | None = Store(self.schema, ticks, budget, tuning=tuning, threads=threads)
        restored.fill_on_demand(self._store)
        self._columns = Columns(self.schema)
        self._pid = os.getpid()  # The process that opened the dataset.
        self._child_pid = self._pid  # The forked child that made `_child_reader`.
        self._child_reader: Reader | None = None
        self._block_pool: BlockPool | None = None  # Only a DataLoader worker has one.
        self._max_kept_bytes = tuning.max_staging_bytes
        self._delivery = HostDelivery(self.schema)
        self._episodes = Episodes()
        self._outputs = _list_outputs(self.schema, self._columns, restored.reward_dtype)
        view = self._store.view()
        self._held = Held(view.first_id, view.next_id, self.schema.num_envs, max(view.next_id - view.first_id, 1), view)
        self._valid_ids: Ids | None = None  # Ids by index. None: all entries are transitions.
        if not view.all_valid:
            ids = np.arange(view.first_id, view.next_id)
            self._valid_ids = ids[view.are_valid(ids)]
        self._generator = self._new_generator()
        self.fps = self._find_fps()
        self._windows = self._plan_windows()
        if settings.delta_timestamps is not None and len(self) > 0:
            # The bounds of all episodes are found now, so that forked workers share them.
            self._episodes.find_bounds(self._held, self._find_ids(np.zeros(1, np.int64)))

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        fps: float | None = None,
        sampler: NStep | SequenceSampler | None = None,
        keys: Sequence[str] | None = None,
        seed: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        allow_writer: bool = False,
        timeout: float = LOAD_S,
    ) -> Self:
        """Open the newest complete checkpoint.

        Args:
            url: The place that `ReplayMemory.save` or `holdall checkpoint import` wrote to: a directory, or a prefix of
                an object store.
            delta_timestamps: Seconds before (negative) and after a step at which keys are read:
                `{"observation.image": [-0.1, 0.0], "action": [0.0, 0.1]}`. These keys get an axis of time. Steps beyond
                the episode repeat its first or last step, and are True in `KEY_is_pad`.
            fps: Steps per second. None: as recorded by `holdall checkpoint import`.
            sampler: `NStep(n, gamma)` or `Sequence(length)`. `dataset[i]` is then the n-step transition or the sequence
                that begins with step `i`. It cannot be combined with `delta_timestamps`.
            keys: Keys that are read; all by default. With `delta_timestamps`, next observations are left out.
            seed: Seed of `sample`.
            cache_dir: Directory for the parts of a remote checkpoint that were read. Processes with the same directory
                fetch each part once. None: a temporary directory, which is removed when the dataset is closed.
            allow_writer: Open a checkpoint although a memory still saves to the same place. The dataset is the newest
                checkpoint of this moment. Spawned workers open that checkpoint again, so the memory must not remove it:
                pass a larger `keep` to its `save`.
            timeout: Seconds without an answer of an object store after which an error is raised.
        """
        location = normalized_url(url)
        writer = "" if allow_writer else find_writer(location)
        if writer:
            raise ArgumentError(
                f"url ({location}) is being written by {writer}. Close the memory that saves there, or pass "
                "allow_writer=True to read the newest complete checkpoint."
            )
        if fps is not None and require_number("fps", fps, 0) == 0:
            raise ArgumentError(f"fps ({fps!r}) must be a number above 0. Pass the steps per second.")
        cache = None
        if cache_dir is None and is_remote(location):
            cache = _CacheDirectory()
        settings = _DatasetSettings(
            url=location,
            number=None,
            delta_timestamps=_check_deltas(delta_timestamps),
            fps=None if fps is None else float(fps),
            keys=None if keys is None else _check_keys(keys),
            sampler=_check_sampler(sampler, delta_timestamps),
            seed=seed,
            cache_dir=cache.path if cache is not None else _path_or_none(cache_dir),
            timeout=require_number("timeout", timeout, 0),
        )
        return cls(settings, cache)

    # ---------------------------------------------------------------- size and keys

    def __len__(self) -> int:
        """Count the transitions."""
        if self._valid_ids is not None:
            return len(self._valid_ids)
        return self._held.next_id - self._held.first_id

    @property
    def first_id(self) -> int:
        """Lowest transition id."""
        return self._held.first_id

    @property
    def next_id(self) -> int:
        """Id after the highest one."""
        return self._held.next_id

    @property
    def features(self) -> dict[str, Feature]:
        """Shape and dtype of one step, for every key that can be read."""
        return {key: feature for key, (_, feature) in self._outputs.items()}

    # ---------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> dict[str, Array]:
        """Return one step, or the steps of an array of indices."""
        if isinstance(index, int | np.integer):
            rows = self._read(np.array([self._check_index(int(index))], np.int64))
            return {key: array[0, ...] for key, array in rows.items()}
        if isinstance(index, slice):
            index = np.arange(len(self))[index]
        indices = self._check_indices(index)
        if _find_torch_worker() is None:
            return self._read(indices)
        leases: list[LentBytes] = []
        return SharedRows(self._read(indices, partial(self._lease, leases)), leases)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Return several steps. torch's DataLoader calls this method, so that a batch is read at once."""
        rows = self._read(self._check_indices(indices))
        return [{key: array[row, ...] for key, array in rows.items()} for row in range(len(indices))]

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids` as `ReplayMemory.gather` does, without windows."""
        wanted = check_ids(ids)
        view = self._view()
        self._bind_held(view).require_ids(wanted)
        return self._delivery.deliver(Draw.from_ids(wanted), view)

    def sample(self, batch_size: int) -> dict[str, Array]:
        """Return `batch_size` steps at random, each equally likely. Workers with one seed draw different steps."""
        batch_size = require_count("batch_size", batch_size, 1)
        if len(self) == 0:
            raise ArgumentError(f"{self.url} has no transitions, so there is nothing to draw. Open another place.")
        self._view()  # The first view in a forked child gives this dataset another generator.
        return self._read(self._generator.integers(0, len(self), size=batch_size))

    def batches(
        self, batch_size: int, *, weights: Any = None, seed: int | None = None, num_batches: int | None = None
    ) -> Batches:
        """Return batches of indices: a `batch_sampler` of torch's DataLoader, or an iterable for loops of your own.

        Without `weights`, each pass has every index at most once, in random order, unless `num_batches` asks for more.
        With `weights`, indices are drawn with replacement.

        Args:
            weights: One number of at least 0 per index. An index is drawn in proportion to its weight.
            seed: Seed of the order. Pass `n` depends only on the seed and `n`.
            num_batches: Number of batches in one pass; by default all full batches of the dataset.
        """
        return Batches(len(self), batch_size, weights=weights, seed=seed, num_batches=num_batches)

    def loader(
        self, batch_size: int, *, weights: Any = None, seed: int | None = None, prefetch: int = 2
    ) -> Iterator[dict[str, Array]]:
        """Return an endless iterator over batches, which a thread of this process makes ahead.

        Batches of images arrive faster than from the processes of torch's DataLoader, because they are not copied from
        one process to another. The arguments are those of `batches`.

        Args:
            prefetch: Number of batches that are made ahead.
        """
        batches = self.batches(batch_size, weights=weights, seed=seed)
        indices = itertools.chain.from_iterable(batches for _ in itertools.count())
        prefetch = require_count("prefetch", prefetch, 0)
        loader: Any = Loader(lambda: partial(self.__getitem__, next(indices)), lambda rows: rows, prefetch)
        return _iterate(loader)

    def _read(self, indices: NDArray[np.int64], allocate: Allocate = allocate_nothing) -> dict[str, Array]:
        """Return the rows of `indices` by key. Large arrays are read into the memory that `allocate` returns."""
        view = self._view()
        ids = self._find_ids(indices)
        if self._settings.sampler is not None:
            draw = self._settings.sampler.complete(self._bind_held(view), Draw.from_ids(ids))
            return self._read_draw(view, draw, allocate)
        rows: dict[str, Array] = {}
        for window in self._windows:
            if window.offsets is None:
                rows |= self._read_keys(view, ids, window.keys, allocate)
                continue
            steps, is_pad = self._find_steps(view, ids, window.offsets)
            arrays = self._read_keys(view, steps.reshape(-1), window.keys, allocate)
            for key, array in arrays.items():
                rows[key] = array.reshape(*steps.shape, *array.shape[1:])
                rows[f"{key}_is_pad"] = is_pad.copy()
        rows["id"] = ids
        return rows

    def _lease(self, leases: list[LentBytes], nbytes: int) -> LentBytes | None:
        """Return memory for `nbytes` that another process can read, and append it to `leases`."""
        if self._block_pool is None or self._block_pool.pid != os.getpid():
            self._block_pool = BlockPool()
        lease = self._block_pool.lease(nbytes)
        if lease is not None:
            leases.append(lease)
        return lease

    def _read_draw(self, view: View, draw: Draw, allocate: Allocate) -> dict[str, Array]:
        """Return the rows of a draw of `NStep` or `Sequence`."""
        (window,) = self._windows
        arrays = self._read_steps(view, draw, window.keys, allocate)
        rows = {key: array.reshape(*draw.ids.shape, *array.shape[1:]) for key, array in arrays.items()}
        if draw.reward is not None and "reward" in rows:
            rows["reward"] = draw.reward
        if draw.discount is not None:
            rows["discount"] = draw.discount
        if draw.mask is not None:
            rows["mask"] = draw.mask
        rows["id"] = draw.ids
        return rows

    def _read_steps(self, view: View, draw: Draw, keys: tuple[str, ...], allocate: Allocate) -> dict[str, Array]:
        """Return the stored fields of a draw. Fields of the last step are read at `draw.last_ids`."""
        if draw.last_ids is None:
            return self._read_keys(view, draw.ids.reshape(-1), keys, allocate)
        last_step_outputs = set(self._columns.last_step_outputs)
        last_keys = tuple(key for key in keys if self._outputs[key][0] in last_step_outputs)
        first_keys = tuple(key for key in keys if key not in last_keys)
        rows: dict[str, Array] = {}
        if first_keys:
            rows |= self._read_keys(view, np.ascontiguousarray(draw.ids), first_keys, allocate)
        if last_keys:
            rows |= self._read_keys(view, np.ascontiguousarray(draw.last_ids), last_keys, allocate)
        return {key: rows[key] for key in keys}

    def _read_keys(self, view: View, ids: Ids, keys: tuple[str, ...], allocate: Allocate) -> dict[str, Array]:
        """Return the rows of `ids` by key."""
        outputs = tuple(self._outputs[key][0] for key in keys)
        into = allocate(sum(self._outputs[key][1].aligned_bytes(len(ids)) for key in keys))
        return dict(zip(keys, view.read(ids, outputs, into), strict=True))

    def _find_steps(self, view: View, ids: Ids, offsets: NDArray[np.int64]) -> tuple[Ids, Flags]:
        """Return the steps at `offsets` from each of `ids`, and which of them are padding."""
        held = self._bind_held(view)
        first, last = self._episodes.find_bounds(held, ids)
        wanted = held.find_places(ids)[:, None] + offsets
        inside = np.clip(wanted, first[:, None], last[:, None])
        return held.find_ids(inside)[0], wanted != inside

    def _find_ids(self, indices: NDArray[np.int64]) -> Ids:
        if self._valid_ids is not None:
            return self._valid_ids[indices]
        return indices + self._held.first_id

    def _check_index(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise TransitionIdError(f"index ({index}) is outside of the dataset, which has {count} transitions.")
        return index % count

    def _check_indices(self, indices: Any) -> NDArray[np.int64]:
        wanted = check_ids(indices)
        count = len(self)
        if wanted.size and (wanted.min() < -count or wanted.max() >= count):
            outside = wanted[(wanted < -count) | (wanted >= count)]
            raise TransitionIdError(f"index ({outside[0]}) is outside of the dataset, which has {count} transitions.")
        return np.where(wanted < 0, wanted + count, wanted)

    # ---------------------------------------------------------------- a memory of the dataset

    def to_memory(
        self, capacity: float, *, keep_extras: bool = True, sampler: Sampler | None = None, **settings: Any
    ) -> ReplayMemory:
        """Return a memory that begins with these transitions, and to which more can be added.

        The memory takes over the segments as they are: nothing is decoded, and blocks stay in their files. The newest
        transition of each lane is marked as truncated unless its episode ended, because an unrelated one follows it.

        Args:
            capacity: Maximum number of transitions. If the dataset has more, the newest ones are kept.
            keep_extras: False leaves the extras out, so that `add` needs none.
            sampler: As in the constructor of `ReplayMemory`, like the other `settings`.
        """
        lanes = self.schema.num_envs
        if settings.pop("num_envs", lanes) != lanes:
            raise ArgumentError(
                f"num_envs differs from the lanes of the dataset ({lanes}). Leave it out, or use "
                "holdall.ReplayMemory.load(url, num_envs=...), which adds every transition again."
            )
        if settings.get("store_device") is not None:
            raise ArgumentError(
                "store_device is not possible here. Use holdall.ReplayMemory.load(url, store_device=...), which copies "
                "everything to the device."
            )
        store = self._require_store()
        memory = ReplayMemory(
            self.schema if keep_extras else replace(self.schema, extras=_NO_EXTRAS),
            None,
            require_count("capacity", to_whole(capacity), lanes),
            sampler=sampler,
            **settings,
        )
        try:
            state = store.snapshot()
            memory.store.restore(state if keep_extras else self._remove_extras(state))
            memory.host_store.before_read = store.before_read
            newest = np.arange(max(memory.next_id - lanes, memory.first_id), memory.next_id)
            newest = newest[memory.are_valid(newest)]
            _, terminated, truncated = memory.store.view().outcomes(newest)
            memory.set_flags(newest, terminated, truncated | ~terminated)
        except BaseException:
            memory.close()
            raise
        return memory

    def _remove_extras(self, state: StoreState) -> StoreState:
        """Return a state whose segments have no extras."""
        first_extra = self._columns.first_extra
        segments = []
        for segment in state.segments:
            parts = [*segment.parts[:first_extra], segment.parts[-1]]
            segments.append(Segment(segment.first_tick, segment.ticks, segment.lanes, parts))
        return replace(state, segments=tuple(segments))

    # ---------------------------------------------------------------- processes

    def _view(self) -> View:
        """Return a view of all transitions, with the reader of this process."""
        store = self._require_store()
        if os.getpid() == self._pid:
            return store.view()
        return View(store.catalog, self._get_child_reader(), self._columns, store.before_read)

    def _get_child_reader(self) -> Reader:
        """Return the reader of a forked child. The threads of the parent's reader do not exist in the child.

        The first call in a child also gives the dataset another generator.
        """
        if self._child_reader is None or self._child_pid != os.getpid():
            if is_remote(self.url):
                raise ClosedError(
                    f"{self.url} is in an object store, whose connections do not survive a fork. Pass "
                    "multiprocessing_context='forkserver' to the DataLoader, or open the dataset in the child."
                )
            self._child_reader = Reader(self._max_kept_bytes)
            self._child_pid = os.getpid()
            self._generator = self._new_generator()
        return self._child_reader

    def _new_generator(self) -> np.random.Generator:
        """Return the generator of this process. Workers of a DataLoader have different ones."""
        seed = self._settings.seed
        if seed is None or multiprocessing.parent_process() is None:
            return new_generator(seed)
        worker = _find_torch_worker()
        return new_generator([seed, os.getpid() if worker is None else worker.id + 1])

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the settings. The process that unpickles them opens the same checkpoint again."""
        self._require_store()
        return type(self), (self._settings,)

    def close(self) -> None:
        """Free everything. Rows that were returned stay valid."""
        store = self._store
        self._store = None
        if store is not None and os.getpid() == self._pid:
            store.close()
        if self._cache is not None:
            self._cache.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_store(self) -> Store:
        if self._store is None:
            raise ClosedError(f"The dataset of {self.url} was closed. Call Dataset.open again.")
        return self._store

    def _bind_held(self, view: View) -> Held:
        """Return the held transitions, read from `view`."""
        return replace(self._held, fields=view)

    # ---------------------------------------------------------------- keys and windows

    def _plan_windows(self) -> tuple[_Window, ...]:
        """Return the keys to read, grouped by the offsets at which they are read."""
        deltas = self._settings.delta_timestamps
        keys = self._settings.keys
        if keys is None:
            # Windows contain the following steps already, so next observations are left out.
            next_outputs = () if deltas is None else self._columns.next_obs_outputs
            keys = tuple(key for key, (output, _) in self._outputs.items() if output not in next_outputs)
            keys += tuple(key for key in deltas or () if key not in keys)
        self._require_known("keys", keys)
        self._require_known("delta_timestamps", tuple(deltas or ()))
        left_out = [key for key in deltas or () if key not in keys]
        if left_out:
            raise ArgumentError(f"delta_timestamps has {left_out[0]!r}, which keys leaves out. Add it to keys.")
        keys_by_offsets: dict[tuple[int, ...] | None, list[str]] = {}
        for key in keys:
            offsets = None
            if deltas is not None and key in deltas:
                offsets = self._find_offsets(key, deltas[key])
            keys_by_offsets.setdefault(offsets, []).append(key)
        return tuple(
            _Window(None if offsets is None else np.array(offsets, np.int64), tuple(group))
            for offsets, group in keys_by_offsets.items()
        )

    def _require_known(self, argument: str, keys: tuple[str, ...]) -> None:
        unknown = [key for key in keys if key not in self._outputs]
        if unknown:
            raise ArgumentError(
                f"{argument} has {unknown[0]!r}, which the dataset does not have. Its keys are "
                f"{', '.join(self._outputs)}."
            )

    def _find_offsets(self, key: str, deltas: tuple[float, ...]) -> tuple[int, ...]:
        """Convert the seconds of a key to numbers of steps. Raise ArgumentError if steps are at other times."""
        if self.fps is None:
            raise ArgumentError(
                f"delta_timestamps needs fps, because {self.url} does not have {METADATA}. Pass the steps per second "
                "of the recording: fps=10."
            )
        offsets = []
        for delta in deltas:
            steps = round(delta * self.fps)
            if abs(steps / self.fps - delta) > _TOLERANCE_S:
                raise ArgumentError(
                    f"delta_timestamps[{key!r}] has {delta} s, but at fps={self.fps:g} steps are {1 / self.fps:g} s "
                    f"apart. Use multiples of this interval, such as {steps / self.fps:g}, or pass another fps."
                )
            offsets.append(steps)
        return tuple(offsets)

    def _find_fps(self) -> float | None:
        """Return the steps per second, or None if they are not known. Compare them with recorded timestamps."""
        given = self._settings.fps
        recorded = None
        if METADATA in self.attached:
            recorded = json.loads(self.attached[METADATA]).get("fps")
        if given is not None and recorded is not None and abs(given - recorded) > _TOLERANCE_S * recorded:
            raise ArgumentError(f"fps ({given:g}) differs from the recorded {recorded:g}. Leave fps out.")
        fps = recorded if given is None else given
        interval = self._measure_interval()
        if fps is not None and interval is not None and abs(interval - 1 / fps) > _TOLERANCE_S:
            raise ArgumentError(
                f"fps ({fps:g}) does not fit the recorded timestamps, which are {interval:g} s apart. Pass "
                f"fps={1 / interval:g}."
            )
        return None if fps is None else float(fps)

    def _measure_interval(self) -> float | None:
        """Return the median seconds between recorded timestamps of the first steps. None if there are none."""
        if "timestamp" not in self._outputs or len(self) < 2:
            return None
        output, feature = self._outputs["timestamp"]
        if feature.dtype.kind != "f":
            return None
        ids = self._find_ids(np.arange(min(len(self), _CHECKED_STEPS)))
        following = ids + self.schema.num_envs
        view = self._view()
        is_inside = (following < self._held.next_id) & ~view.are_ends(ids)
        is_inside[is_inside] &= view.are_valid(following[is_inside])
        if not is_inside.any():
            return None
        (before,) = view.read(ids[is_inside], (output,))
        (after,) = view.read(following[is_inside], (output,))
        interval = float(np.median((after - before).reshape(-1)))
        return interval if interval > 0 else None


def _find_torch_worker() -> Any:
    """Return torch's `WorkerInfo` in a worker of a DataLoader, and None in other processes."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return None if torch_data is None else torch_data.get_worker_info()


def _iterate(loader: Any) -> Iterator[dict[str, Array]]:
    """Yield the batches of a loader. Close the loader when the iterator is closed or freed."""
    with loader:
        while True:
            yield next(loader)


class _CacheDirectory:
    """A temporary directory of one dataset. Only the process that made it removes it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="holdall-dataset-")
        self.remove = weakref.finalize(self, _remove_directory, self.path, os.getpid())


def _remove_directory(path: str, process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


_NO_EXTRAS = Tree((), {})


def _list_outputs(
    schema: Schema, columns: Columns, reward_dtype: np.dtype[Any] | None
) -> dict[str, tuple[int, Feature]]:
    """Return for every key the number of its output in `Columns`, and its feature."""
    outputs: dict[str, tuple[int, Feature]] = {}

    def add_leaves(prefix: str, tree: Tree, numbers: tuple[int, ...]) -> None:
        for leaf, number in zip(tree.leaves, numbers, strict=True):
            key = ".".join(part for part in (prefix, leaf.name) if part)
            if key in outputs or key in _RESULT_KEYS:
                key = f"extras.{key}"
            outputs[key] = (number, Feature(leaf.shape, leaf.dtype))

    add_leaves("observation", schema.observation, columns.obs_outputs)
    add_leaves("action", schema.action, columns.action_outputs)
    outputs["reward"] = (columns.reward_output, Feature(schema.reward_shape, reward_dtype or np.dtype(np.float64)))
    add_leaves("next_observation", schema.observation, columns.next_obs_outputs)
    outputs["terminated"] = (columns.terminated_output, Feature((), np.dtype(np.bool_)))
    outputs["truncated"] = (columns.truncated_output, Feature((), np.dtype(np.bool_)))
    add_leaves("", schema.extras, columns.extra_outputs)
    return outputs


def _check_deltas(deltas: Any) -> dict[str, tuple[float, ...]] | None:
    if deltas is None:
        return None
    if not isinstance(deltas, Mapping):
        raise ArgumentError(f"delta_timestamps ({deltas!r}) must map keys to lists of seconds. Pass a dict.")
    checked = {}
    for key, seconds in deltas.items():
        argument = f"delta_timestamps[{key!r}]"
        if isinstance(seconds, str) or not isinstance(seconds, Sequence | np.ndarray) or len(seconds) == 0:
            raise ArgumentError(f"{argument} ({seconds!r}) must be a list of seconds, such as [0.0].")
        try:
            numbers = [float(number) for number in seconds]
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{argument} ({seconds!r}) must be a list of seconds, such as [0.0].") from error
        checked[str(key)] = tuple(require_number(argument, number, -np.inf) for number in numbers)
    return checked


def _check_keys(keys: Any) -> tuple[str, ...]:
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):
        raise ArgumentError(f"keys ({keys!r}) must be a list of keys. Pass one, such as ['action'].")
    return tuple(dict.fromkeys(keys))


def _check_sampler(sampler: Any, deltas: Any) -> NStep | SequenceSampler | None:
    if sampler is None:
        return None
    if not isinstance(sampler, NStep | SequenceSampler) or isinstance(sampler.by, Prioritized):
        raise ArgumentError(
            f"sampler ({type(sampler).__name__}) must be NStep(...) or Sequence(...) by Uniform(). For weighted draws "
            "use batches(batch_size, weights=...)."
        )
    if deltas is not None:
        raise ArgumentError("sampler and delta_timestamps were both given. Pass one of them.")
    return sampler


def _path_or_none(path: Any) -> str | None:
    return None if path is None else require_path("cache_dir", path)
