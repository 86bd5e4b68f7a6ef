"""Encoding: a writer's ticks, cut into unique slices and compressed, a block at a time.

In:  checked ticks, in order.  Out: blocks.
Invariant: a block holds bit for bit the ticks that were added since the last one, and refers to no other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from holdall.cluster.block import Block, SlicedField, open_record, read_part
from holdall.cluster.protocol import TravelLayout
from holdall.schema import Array, Bytes, Leaf
from holdall.storage.blocks import Coded, Coder, reserve
from holdall.storage.codec import COST_CAPS, Codec, Dictionary, Method, Transform, choose
from holdall.storage.layout import Window, WindowSearches
from holdall.storage.records import Buffer, codec_of, codec_words, pack, window_words
from holdall.storage.slices import Cursors, Kernels, OpenPart
from holdall.storage.snapshot import Tick

_SEARCH_AGAIN = 64
"""Blocks after which a field in which no window was found is looked at again."""
_BLOCK_BYTES = 4 * 2**20
"""Unique slices, raw, after which a block is full."""


class _OpenField:
    """One sliced leaf of the block that is being filled."""

    def __init__(self, kernels: Kernels, leaf: Leaf, window: Window, lanes: int, ticks: int) -> None:
        self.leaf = leaf
        self.window = window
        self.lanes = lanes
        arena_bytes = (ticks + 1) * 2 * lanes * leaf.nbytes
        slices = kernels.new_block(window.slice_bytes, reserve(arena_bytes))
        self.part: OpenPart = kernels.new_part(window, lanes, slices, arena_bytes)
        self.cursors: Cursors = np.zeros((ticks, lanes), np.uint32)

    @property
    def raw(self) -> Bytes:
        """The unique slices so far, as rows."""
        block = self.part.block
        return np.empty((0, self.window.slice_bytes), np.uint8) if block is None else block.raw

    def filled(self, group: int) -> Bytes:
        """Return the unique slices, the last one again and again behind them until they are whole groups."""
        raw, block = self.raw, self.part.block
        used, whole = len(raw), -(-len(raw) // group) * group
        if block is None or whole > block.capacity:
            return np.concatenate([raw, np.broadcast_to(raw[-1:], (whole - used, raw.shape[1]))])
        rows = block.arena[: whole * block.slice_bytes].reshape(whole, -1)
        rows[used:] = raw[-1]
        return rows


class Encoder:
    """Fills one block after another.

    Args:
        ticks: Most ticks of a block.
    """

    def __init__(self, layout: TravelLayout, lanes: int, ticks: int, kernels: Kernels) -> None:
        self._layout = layout
        self._lanes = lanes
        self._ticks = ticks
        self._kernels = kernels
        self._coder = kernels.coder.keeping()
        self._columns = {name: np.empty((ticks, lanes, *shape), dtype) for name, (shape, dtype) in _rows(layout)}
        self._reward: Array | None = None
        self._searches = WindowSearches(lanes)
        self._blocks_since_search: dict[int, int] = {}
        self._used = 0
        self.fields: list[_OpenField] = []
        for i, leaf in enumerate(layout.leaves):
            self.fields.append(self._new_field(leaf, Window.whole(leaf)))
            self._searches.begin(i, leaf)
        self._changed_windows: dict[int, Window] = {}
        self._tick_bytes = 2 * lanes * sum(leaf.nbytes for leaf in layout.leaves)

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """What the first add said."""
        return None if self._reward is None else self._reward.dtype

    @property
    def rows(self) -> int:
        """Rows in the block so far."""
        return self._used * self._lanes

    @property
    def is_full(self) -> bool:
        """Whether the block has to be closed before the next tick."""
        if self._used >= self._ticks or self._changed_windows:
            return True
        if self._used * self._tick_bytes < _BLOCK_BYTES:  # even if nothing was known
            return False
        return sum(field.part.added_bytes for field in self.fields) >= _BLOCK_BYTES

    def add(self, tick: Tick) -> None:
        """Write one tick to the block, which is not full."""
        self._put(tick, self._used)
        self._append([tick.obs[i] for i in self._layout.sliced], [tick.next_obs[i] for i in self._layout.sliced])

    def extend(self, steps: Tick, start: int) -> int:
        """Write ticks, which have a time axis, from `start` on until the block is full; return how many it took."""
        first, count = self._used, min(self._ticks - self._used, len(steps.reward) - start)
        self._put(steps.cut(slice(start, start + count)), slice(first, first + count))
        obs, next_obs = ([arrays[i] for i in self._layout.sliced] for arrays in (steps.obs, steps.next_obs))
        t, end = start, start + count
        while t < end:
            until = min(end, t + self._ticks_before_full())
            self._append_run([array[t:until] for array in obs], [array[t:until] for array in next_obs], until - t)
            t = until
            if self.is_full:
                break
        return self._used - first

    def _ticks_before_full(self) -> int:
        """Count the ticks, at least one, after which the block may be full, and not before."""
        if self._searches.under_way:  # a window that was found begins with the next block
            return 1
        room = _BLOCK_BYTES - sum(field.part.added_bytes for field in self.fields)
        return max(1, -(-room // self._tick_bytes)) if self.fields else self._ticks

    def _append_run(self, obs: list[Array], next_obs: list[Array], ticks: int) -> None:
        """Write the observations of some ticks that are cut into slices; of one alone while windows are looked for."""
        if ticks == 1:
            self._append([array[0] for array in obs], [array[0] for array in next_obs])
            return
        end = self._used + ticks
        for field, arrays, next_arrays in zip(self.fields, obs, next_obs, strict=True):
            field.part.append_run(arrays, next_arrays, field.cursors[self._used : end])
        self._used = end

    def _append(self, obs: list[Array], next_obs: list[Array]) -> None:
        """Write the observations of one tick that are cut into slices."""
        now = self._used
        for field, array, next_array in zip(self.fields, obs, next_obs, strict=True):
            field.part.append(array, next_array, field.cursors[now])
        self._used = now + 1
        if self._searches.under_way:
            self._look(obs, next_obs)

    def _put(self, tick: Tick, where: int | slice) -> None:
        """Write all else of one tick, or of several."""
        if self._reward is None:
            self._reward = np.empty((self._ticks, self._lanes), tick.reward.dtype)
        self._reward[where] = tick.reward
        columns = self._columns
        for name, values in (("action", tick.action), ("extras", tick.extras)):
            for i, value in enumerate(values):
                columns[f"{name}.{i}"][where] = value
        for i in range(len(tick.obs)):
            if i not in self._layout.sliced:
                columns[f"obs.{i}"][where], columns[f"next.{i}"][where] = tick.obs[i], tick.next_obs[i]
        columns["terminated"][where], columns["truncated"][where] = tick.terminated, tick.truncated
        columns["valid"][where] = True if tick.valid is None else tick.valid

    def close(self, codecs: Mapping[int, Codec]) -> Block:
        """Return the block, its slices coded as `codecs` says for their fields, and begin the next one."""
        used, rows = self._used, self.rows
        if self._reward is None:
            raise ValueError("the block is empty")
        columns = {
            name: column[:used].reshape(rows, *column.shape[2:]).copy()
            for name, column in (self._columns | {"reward": self._reward}).items()
        }
        fields = tuple(self._close_field(i, field, codecs.get(i)) for i, field in enumerate(self.fields))
        self._used = 0
        for i, field in enumerate(self.fields):
            window = self._changed_windows.get(i)
            if window is not None:
                self.fields[i] = self._new_field(field.leaf, window)
            else:
                field.part.clear()
        self._changed_windows = {}
        return Block(self._lanes, rows, columns, fields)

    def _close_field(self, i: int, field: _OpenField, codec: Codec | None) -> SlicedField:
        closed = field.part.closed()
        if closed.log is None:
            raise ValueError("a block's slices are always numbered")
        if field.window.count == 1 or field.part.broken_steps * 2 >= field.part.steps:
            self._consider_search(i, field.leaf)
        # Behind the end of a short lane's log stand numbers of older blocks, which nothing points to.
        log = np.minimum(closed.log.T, np.uint32(len(field.raw) - 1), dtype=np.uint32)
        cursors = field.cursors[: self._used].reshape(-1).copy()
        return SlicedField(field.window, cursors, log, self._coded(field, codec))

    def _coded(self, field: _OpenField, codec: Codec | None) -> Coded:
        """Compress the slices, filled up to whole units."""
        chosen = codec if codec is not None and codec.transform.slice_bytes == field.window.slice_bytes else None
        raw = field.raw
        for attempt in (chosen, plain_codec(field.window)):
            if attempt is not None:
                sealed = self._coder.seal(field.filled(attempt.group), attempt)
                if sealed is not None:
                    return sealed.coded
        stored = Codec(Method.STORED, 0, Transform(field.window.slice_bytes))
        offsets = (np.arange(len(raw) + 1, dtype=np.uint64) * raw.shape[1]).astype(np.uint32)
        return Coded(stored, len(raw), offsets, np.empty(0, np.uint8), raw.reshape(-1).copy())

    def _look(self, obs: list[Array], next_obs: list[Array]) -> None:
        """Look for windows; one that was found begins with the next block."""
        done = self._searches.look(obs, next_obs)
        for i in done:
            window = self._searches.end(i) or Window.whole(self.fields[i].leaf)
            if window != self.fields[i].window:
                self._changed_windows[i] = window

    def _consider_search(self, i: int, leaf: Leaf) -> None:
        """Look at a field again from time to time: a wrapper may change its mind."""
        waited = self._blocks_since_search[i] = self._blocks_since_search.get(i, 0) + 1
        if waited >= _SEARCH_AGAIN:
            self._blocks_since_search[i] = 0
            self._searches.begin(i, leaf)

    def _new_field(self, leaf: Leaf, window: Window) -> _OpenField:
        return _OpenField(self._kernels, leaf, window, self._lanes, self._ticks)


def plain_codec(window: Window) -> Codec:
    """Return the codec of slices that nothing was measured on yet."""
    together = max(1, min(8, 2**18 // window.slice_bytes))
    return Codec(Method.ZSTD, 1, Transform(window.slice_bytes), None, together)


def _rows(layout: TravelLayout) -> list[tuple[str, tuple[tuple[int, ...], np.dtype[Any]]]]:
    return list(layout.columns.items())


CODEC = "codec"
_ENOUGH = 512
"""Slices that a choice is made on."""
_HARDLY_MORE = 1.03
_ASK_AGAIN = 16
"""Blocks between two questions to the roster."""


class SharedCodecs:
    """The codecs that one writer uses.

    Args:
        prefer: How dear sampling may be, see `holdall.ReplayMemory`.
    """

    def __init__(self, roster: Any, coder: Coder, leaves: Sequence[Leaf], lanes: int, prefer: str) -> None:
        self._roster = roster
        self._coder = coder
        self._leaves = leaves
        self._lanes = lanes
        self._cap = COST_CAPS[prefer]
        self._codecs: dict[int, tuple[Window, Codec]] = {}
        self._samples: dict[int, list[Bytes]] = {}
        self._asked: dict[int, int] = {}
        self._questions: dict[int, tuple[Window, Any]] = {}
        self._choosing: set[int] = set()

    def codecs(self, windows: Sequence[Window]) -> dict[int, Codec]:
        """Return the codecs of fields that are cut by these windows, as far as they were chosen."""
        return {field: codec for field, (window, codec) in self._codecs.items() if window == windows[field]}

    def look(self, field: int, window: Window, slices: Bytes) -> None:
        """Look at the slices of a block that is about to be closed, if there is something to choose."""
        known = self._codecs.get(field)
        if field in self._choosing or (known is not None and known[0] == window):
            return
        if field in self._questions:
            self._hear(field)
            return
        kept = self._samples.setdefault(field, [])
        if kept and kept[0].shape[1] != slices.shape[1]:
            kept.clear()
        held = sum(map(len, kept))
        if held < _ENOUGH:
            kept.append(slices[: _ENOUGH - held].copy())
            return
        if self._asked.get(field, 0) > 0:
            self._asked[field] -= 1
            return
        self._questions[field] = window, self._roster.codec.remote(_key(field, window))

    def _hear(self, field: int) -> None:
        """Look whether the roster answered."""
        window, question = self._questions[field]
        ready, _ = ray.wait([question], timeout=0)
        if not ready:
            return
        del self._questions[field]
        try:
            answer, told = ray.get(question)
        except ray.exceptions.RayError:  # blocks go on as they are
            self._asked[field] = _ASK_AGAIN
            return
        if answer == "chosen":
            self._codecs[field] = window, unpack_codec(told)
            self._samples.pop(field, None)
        elif answer == "choose":
            slices = np.concatenate(self._samples[field])
            self._choosing.add(field)
            work = (field, window, slices)
            threading.Thread(target=self._choose, args=work, name="holdall-codec", daemon=True).start()
        else:
            self._asked[field] = _ASK_AGAIN

    def _choose(self, field: int, window: Window, slices: Bytes) -> None:
        try:
            chosen = choose(self._coder, self._leaves[field], window, slices, self._cap, 1, self._lanes)
            codec = _quicker(self._coder, chosen, slices)
            self._questions[field] = window, self._roster.chose.remote(_key(field, window), pack_codec(codec))
        finally:
            self._choosing.discard(field)


def _quicker(coder: Coder, codec: Codec, slices: Bytes) -> Codec:
    """Return the codec at a lower level if that takes hardly more bytes: steps of an environment wait for it."""
    hurried = codec.hurried()
    sealed, quick = (coder.seal(slices, each) for each in (codec, hurried))
    if sealed is None or quick is None:
        return codec
    return hurried if quick.coded.data.nbytes <= _HARDLY_MORE * sealed.coded.data.nbytes else codec


def pack_codec(codec: Codec) -> bytes:
    """Return a codec, with its dictionary, as a record."""
    parts: dict[str, Buffer] = {} if codec.dictionary is None else {"dictionary": codec.dictionary.content}
    return b"".join(pack(CODEC, {"codec": codec_words(codec)}, parts, frozenset()))


def unpack_codec(payload: bytes) -> Codec:
    """Read a codec that was received."""
    record = open_record(payload, CODEC)
    words = record.head["codec"]
    named = words["dictionary"]
    known = {} if named is None else {named: Dictionary(read_part(record, payload, "dictionary"))}
    return codec_of(words, known)


def _key(field: int, window: Window) -> str:
    return json.dumps([field, window_words(window)])
