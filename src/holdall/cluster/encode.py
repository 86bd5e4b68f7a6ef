"""Encoding: a writer's ticks, cut into unique slices and compressed, one small segment at a time.

In:  checked ticks, in order.  Out: sealed segments.
Invariant: a segment holds bit for bit the ticks that were added since the last one, and refers to no other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from holdall import storage
from holdall.background import end_before_python
from holdall.schema import Array, Bytes, Leaf, Schema

ROW_BYTES = 256
"""Observation leaves up to this size are sent as rows, obs and next_obs: cutting them into slices saves nothing."""
_SEARCH_AGAIN = 64
"""Segments after which a field without a window is searched again."""
_SEGMENT_BYTES = 4 * 2**20
"""Unique slices, raw, after which a segment is full."""


class _OpenField:
    """One sliced leaf of the segment that is being filled."""

    def __init__(self, kernels: storage.Kernels, leaf: Leaf, window: storage.Window, lanes: int, ticks: int) -> None:
        self.leaf = leaf
        self.window = window
        arena_bytes = (ticks + 1) * 2 * lanes * leaf.nbytes
        slices = kernels.new_block(window.slice_bytes, storage.reserve(arena_bytes))
        self.part: storage.OpenPart = kernels.new_part(window, lanes, slices, arena_bytes)
        self.cursors: storage.Cursors = np.zeros((ticks, lanes), np.uint32)
        self.plain = plain_codec(window)

    @property
    def raw(self) -> Bytes:
        """The unique slices so far, as rows."""
        block = self.part.block
        return np.empty((0, self.window.slice_bytes), np.uint8) if block is None else block.raw


class Encoder:
    """Fills one segment after another.

    Args:
        ticks: Most ticks of a segment.
    """

    def __init__(self, schema: Schema, lanes: int, ticks: int, kernels: storage.Kernels) -> None:
        self._lanes, self._reward_shape = lanes, schema.reward_shape
        self._ticks = ticks
        self._kernels = kernels
        self._coder = kernels.coder.keeping()
        observed = schema.observation.leaves
        self._sliced = sliced_leaves(schema)
        self._columns = {
            name: np.empty((ticks, lanes, *leaf.shape), leaf.dtype)
            for name, leaf in column_leaves(schema, self._sliced).items()
        }
        self._invalid: Array | None = None
        self._searches = storage.WindowSearches(lanes)
        self._segments_since_search: dict[int, int] = {}
        self._used = 0
        self._next_tick = 0  # counted from this writer's first one
        self.leaves = [observed[i] for i in self._sliced]
        self.fields: list[_OpenField] = []
        for i, leaf in enumerate(self.leaves):
            self.fields.append(_OpenField(kernels, leaf, storage.Window.whole(leaf), lanes, ticks))
            self._searches.begin(i, leaf)
        self._changed_windows: dict[int, storage.Window] = {}
        self._tick_bytes = 2 * lanes * sum(leaf.nbytes for leaf in self.leaves)

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the first add."""
        return self._columns["reward.0"].dtype if "reward.0" in self._columns else None

    @property
    def rows(self) -> int:
        """Rows in the segment so far."""
        return self._used * self._lanes

    @property
    def is_full(self) -> bool:
        """Whether the segment must be closed before the next tick."""
        if self._used >= self._ticks or self._changed_windows:
            return True
        if self._used * self._tick_bytes < _SEGMENT_BYTES:  # even if nothing was known
            return False
        return sum(field.part.added_bytes for field in self.fields) >= _SEGMENT_BYTES

    @property
    def ends_episodes(self) -> bool:
        """Whether in every lane an episode ended with the last tick."""
        if not self._used:
            return False
        last = self._used - 1
        ended = self._columns["terminated.0"][last] | self._columns["truncated.0"][last]
        return bool((ended if self._invalid is None else ended | self._invalid[last]).all())

    def add(self, tick: storage.Tick) -> None:
        """Write one tick to the segment, which is not full."""
        self._put(tick, self._used)
        self._append([tick.obs[i] for i in self._sliced], [tick.next_obs[i] for i in self._sliced])

    def extend(self, steps: storage.Tick, start: int) -> int:
        """Write ticks, which have a time axis, from `start` on until the segment is full; return how many it took."""
        first, count = self._used, min(self._ticks - self._used, len(steps.reward) - start)
        self._put(steps.cut(slice(start, start + count)), slice(first, first + count))
        obs, next_obs = ([arrays[i] for i in self._sliced] for arrays in (steps.obs, steps.next_obs))
        t, end = start, start + count
        while t < end:
            until = min(end, t + self._ticks_before_full())
            self._append_run([array[t:until] for array in obs], [array[t:until] for array in next_obs], until - t)
            t = until
            if self.is_full:
                break
        return self._used - first

    def _ticks_before_full(self) -> int:
        """Count the ticks, at least one, after which the segment may be full, and not before."""
        if self._searches.scouts:  # a window that was found begins with the next segment
            return 1
        room = _SEGMENT_BYTES - sum(field.part.added_bytes for field in self.fields)
        return max(1, -(-room // self._tick_bytes)) if self.fields else self._ticks

    def _append_run(self, obs: list[Array], next_obs: list[Array], ticks: int) -> None:
        """Write the sliced observations of some ticks; of one alone while windows are searched."""
        if ticks == 1:
            self._append([array[0] for array in obs], [array[0] for array in next_obs])
            return
        end = self._used + ticks
        for field, arrays, next_arrays in zip(self.fields, obs, next_obs, strict=True):
            field.part.append_run(arrays, next_arrays, field.cursors[self._used : end])
        self._used = end

    def _append(self, obs: list[Array], next_obs: list[Array]) -> None:
        """Write the sliced observations of one tick."""
        now = self._used
        for field, array, next_array in zip(self.fields, obs, next_obs, strict=True):
            field.part.append(array, next_array, field.cursors[now])
        self._used = now + 1
        if self._searches.scouts:
            for i in self._searches.look(obs, next_obs):
                window = self._searches.end(i) or storage.Window.whole(self.leaves[i])
                if window != self.fields[i].window:
                    self._changed_windows[i] = window

    def _put(self, tick: storage.Tick, where: int | slice) -> None:
        """Write all other fields of one tick, or of several."""
        columns = self._columns
        if "reward.0" not in columns:
            columns["reward.0"] = np.empty((self._ticks, self._lanes, *self._reward_shape), tick.reward.dtype)
        columns["reward.0"][where] = tick.reward
        for name, values in (("action", tick.action), ("extras", tick.extras)):
            for i, value in enumerate(values):
                columns[f"{name}.{i}"][where] = value
        for i in range(len(tick.obs)):
            if i not in self._sliced:
                columns[f"obs.{i}"][where], columns[f"next.{i}"][where] = tick.obs[i], tick.next_obs[i]
        columns["terminated.0"][where], columns["truncated.0"][where] = tick.terminated, tick.truncated
        if tick.valid is not None and self._invalid is None:
            self._invalid = np.zeros((self._ticks, self._lanes), np.bool_)
        if self._invalid is not None:
            self._invalid[where] = False if tick.valid is None else ~tick.valid

    def close(self, codecs: Mapping[int, storage.Codec]) -> storage.SealedSegment:
        """Return the segment, its slices coded as `codecs` says for their fields, and begin the next one."""
        used = self._used
        if not used:
            raise ValueError("the segment is empty")
        columns = {name: column[:used].copy() for name, column in self._columns.items()}
        if self._invalid is not None and self._invalid[:used].any():
            columns["invalid.0"] = self._invalid[:used].copy()
        columns |= {f"cursors.{i}": f.cursors[:used].copy() for i, f in zip(self._sliced, self.fields, strict=True)}
        parts = tuple(self._close_field(i, field, codecs.get(i)) for i, field in enumerate(self.fields))
        self._used = 0
        for i, field in enumerate(self.fields):
            window = self._changed_windows.get(i)
            if window is not None:
                self.fields[i] = _OpenField(self._kernels, field.leaf, window, self._lanes, self._ticks)
            else:
                field.part.clear()
        self._changed_windows = {}
        first, self._next_tick = self._next_tick, self._next_tick + used
        return storage.SealedSegment(storage.RowChunk(first, used, columns, {}), parts)

    def _close_field(self, i: int, field: _OpenField, codec: storage.Codec | None) -> storage.ClosedPart:
        closed = field.part.closed()
        if closed.log is None:
            raise ValueError("the slices of a segment that travels are always numbered")
        if field.window.count == 1 or field.part.broken_steps * 2 >= field.part.steps:
            self._consider_search(i, field.leaf)
        # Behind the end of a short lane's log stand numbers of older segments, which nothing points to.
        log = np.minimum(closed.log, closed.log.dtype.type(len(field.raw) - 1))
        coded = self._coded(field, codec)
        block = storage.KeptBlock(field.window.slice_bytes, coded.count, storage.CarriedSlices(coded))
        return replace(closed, log=log, block=block, slice_count=coded.count)

    def _coded(self, field: _OpenField, codec: storage.Codec | None) -> storage.Coded:
        """Compress the slices."""
        raw, sealed = field.raw, None
        if codec is not None and codec.transform.slice_bytes == field.window.slice_bytes:
            sealed = self._coder.seal(raw, codec)  # None if its palette does not hold these
        if sealed is None:
            sealed = self._coder.seal(raw, field.plain)
        assert sealed is not None  # it has no palette
        return sealed.coded

    def _consider_search(self, i: int, leaf: Leaf) -> None:
        """Search a field again from time to time: a wrapper may change its mind."""
        waited = self._segments_since_search[i] = self._segments_since_search.get(i, 0) + 1
        if waited >= _SEARCH_AGAIN:
            self._segments_since_search[i] = 0
            self._searches.begin(i, leaf)


def plain_codec(window: storage.Window) -> storage.Codec:
    """Return the codec of slices that nothing was measured on yet."""
    together = max(1, min(8, 2**18 // window.slice_bytes))
    return storage.Codec(storage.Method.ZSTD, 1, storage.Transform(window.slice_bytes), None, together)


def sliced_leaves(schema: Schema) -> list[int]:
    """Return the observation leaves that are cut into slices."""
    return [i for i, leaf in enumerate(schema.observation.leaves) if leaf.nbytes > ROW_BYTES]


def column_leaves(schema: Schema, sliced: Sequence[int]) -> dict[str, Leaf]:
    """Return the leaf of every column but the reward, whose dtype the first add decides."""
    flag = Leaf("", (), np.dtype(np.bool_))
    leaves = {f"action.{i}": leaf for i, leaf in enumerate(schema.action.leaves)}
    leaves |= {f"extras.{i}": leaf for i, leaf in enumerate(schema.extras.leaves)}
    leaves |= {"terminated.0": flag, "truncated.0": flag}
    for i, leaf in enumerate(schema.observation.leaves):
        leaves |= {} if i in sliced else {f"obs.{i}": leaf, f"next.{i}": leaf}
    return leaves


_ENOUGH = 512
"""Slices that a choice is made on."""
_HARDLY_MORE = 1.03
_QUICK_LEVEL = 7
"""Zstandard's last level that is quick: those above take far longer for frames of a game, and hardly less room."""


_Key = tuple[int, storage.Window]
"""A field, and how it is cut."""


class SharedCodecs:
    """The codecs that one writer uses: those that the memory's first writer chose for the same fields.

    Args:
        prefer: How much slower sampling may get, see `holdall.ReplayMemory`.
    """

    def __init__(self, roster: Any, coder: storage.Coder, leaves: Sequence[Leaf], lanes: int, prefer: str) -> None:
        self._roster = roster
        self._coder = coder
        self._leaves = leaves
        self._lanes = lanes
        self._cap = storage.COST_CAPS[prefer]
        self._codecs: dict[_Key, storage.Codec | None] = {}  # None: it is being chosen
        self._samples: dict[_Key, list[Bytes]] = {}

    def of(self, fields: Sequence[_OpenField]) -> dict[int, storage.Codec]:
        """Return the codecs of the fields of a segment that is about to be closed, as far as they were chosen."""
        for number, field in enumerate(fields):
            self._look((number, field.window), field.raw)
        chosen = {number: self._codecs.get((number, field.window)) for number, field in enumerate(fields)}
        return {number: codec for number, codec in chosen.items() if codec is not None}

    def _look(self, key: _Key, slices: Bytes) -> None:
        """Keep some slices of a field that has no codec yet, until there are enough to choose one."""
        if key in self._codecs:
            return
        kept = self._samples.setdefault(key, [])
        held = sum(map(len, kept))
        if held < _ENOUGH:
            kept.append(slices[: _ENOUGH - held].copy())
            return
        self._codecs[key] = None
        work = (key, np.concatenate(self._samples.pop(key)))
        thread = threading.Thread(target=self._choose, args=work, name="holdall-codec", daemon=True)
        end_before_python(thread)
        thread.start()

    def _choose(self, key: _Key, slices: Bytes) -> None:
        """Ask for the codec of a field, and choose one if there is none; if that fails, it is tried again later."""
        (field, window), asked = key, json.dumps([key[0], key[1].words()])
        try:
            words = ray.get(self._roster.codec.remote(asked))
            if words is None:
                # A segment stands for itself: a dictionary would have to follow it wherever it goes.
                chosen = storage.choose(
                    self._coder, self._leaves[field], window, slices, self._cap, 1, self._lanes, has_dictionary=False
                )
                words = storage.codec_words(_quicker(self._coder, chosen, slices))
                words = ray.get(self._roster.codec.remote(asked, words))
            self._codecs[key] = storage.codec_of(words, {})
        except ray.exceptions.RayError:
            del self._codecs[key]


def _quicker(coder: storage.Coder, codec: storage.Codec, slices: Bytes) -> storage.Codec:
    """Return the codec at a lower level if that takes hardly more bytes: steps of an environment wait for it."""
    sealed = coder.seal(slices, codec)
    if sealed is None:
        return codec
    for quick in (codec.hurried(), replace(codec, level=min(codec.level, _QUICK_LEVEL))):
        found = coder.seal(slices, quick)
        if found is not None and found.coded.data.nbytes <= _HARDLY_MORE * sealed.coded.data.nbytes:
            return quick
    return codec
