"""Segments that travel: runs of ticks that go to another machine, to a journal, or to another store, as bytes.

In:  checked ticks, in order, from which an encoder makes one small segment after another; or parts of a store.
Out: sealed segments; bytes, which are the records that a checkpoint has of them; and back.
Invariant: a segment holds bit for bit the ticks that it was given, and refers to nothing outside of itself but
dictionaries, by name. Nothing that was received is trusted: every checksum is computed, and every number is held
against the others before it is used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdall.background import end_before_python
from holdall.errors import ArgumentError, DamageError
from holdall.schema import Array, Bytes, Leaf, Schema, count_of, dtype_of, malformed_refused
from holdall.storage.blocks import CarriedSlices, Codec, Dictionary, KeptBlock, Method, Transform, reserve, stored
from holdall.storage.codec_choice import COST_CAPS, choose
from holdall.storage.coded_units import in_memory
from holdall.storage.records import Record, codec_of, codec_words, pack_slices, require_kind, unpack, unpack_coded
from holdall.storage.repair import Repair
from holdall.storage.rings import FLAG, TINY_BYTES
from holdall.storage.slices import NEXT_IS_WHOLE, ClosedPart, Window, WindowSearches
from holdall.storage.snapshot import ROWS, Like, RowChunk, pack_logs, pack_rows, unpack_logs, unpack_rows
from holdall.storage.ticks import Arguments, FastTick, FlatField, Kernels, SlicedTick, Tick, TickWriter, packed_rows

if TYPE_CHECKING:
    from holdall.storage.ticks import Coder

_MOST_SEGMENT_ROWS, _SEGMENT_BYTES = 2**20, 4 * 2**20
"""Rows that a segment may have, and unique slices, raw, after which one that is encoded is full."""
_CURSOR = Leaf("", (), np.dtype(np.uint32))


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A run of ticks that can be moved: to another machine, to a journal, to another store.

    It refers to nothing outside of itself but the dictionaries of its codecs. `Store.segment_at` and writers make it,
    `pack_segment` and `unpack_segment` turn it into bytes and back, `Store.adopt` takes it over.

    The columns of `rows` are named as a store names its own, each (ticks, lanes, ...): `action.0`, `extras.0`,
    `reward.0`, `terminated.0`, `truncated.0`; `invalid.0` only if a lane made no transition; `cursors.3` for an
    observation leaf that lies in slices, `obs.0` and `next.0` for one that does not. Nothing is kept apart.
    """

    rows: RowChunk
    parts: tuple[ClosedPart, ...]  # by large leaf, in the order of the leaves: window, log (entries, lanes), block

    @property
    def lanes(self) -> int:
        """Lanes that advanced together."""
        return int(self.rows.columns["terminated.0"].shape[1])

    @property
    def large(self) -> tuple[int, ...]:
        """The observation leaves that lie in slices."""
        return _large_leaves(self.rows.columns)

    def require(self, lanes: int, large: Sequence[int], reward_dtype: np.dtype[Any] | None) -> None:
        """Refuse to be adopted by a store of other fields; one of a single lane takes any number of lanes."""
        dtype = self.rows.columns["reward.0"].dtype
        if reward_dtype is not None and reward_dtype != dtype:
            raise ArgumentError(
                f"reward has dtype {dtype}, but the first add had dtype {reward_dtype}. holdall never casts. Pass "
                "rewards of one dtype in every writer."
            )
        if self.large != tuple(large) or lanes not in (1, self.lanes):
            raise ArgumentError(
                f"a segment of {self.lanes} lanes whose leaves {self.large} are large came to a store of {lanes} lanes "
                f"whose leaves {tuple(large)} are; make both of the same schema"
            )

    def in_one_lane(self) -> SealedSegment:
        """Return the same transitions one after another: row r was tick r // lanes in lane r % lanes."""
        rows, lanes = self.rows.ticks * self.lanes, self.lanes
        columns = {name: column.reshape(rows, 1, *column.shape[2:]) for name, column in self.rows.columns.items()}
        parts = []
        for i, part in zip(self.large, self.parts, strict=True):
            log: Any = part.log
            entries = np.arange(lanes, dtype=np.uint32) * np.uint32(len(log))
            columns[f"cursors.{i}"] = (self.rows.columns[f"cursors.{i}"] + entries).reshape(rows, 1)
            parts.append(replace(part, log=np.ascontiguousarray(log.T).reshape(-1, 1), log_rows=log.size))
        return SealedSegment(RowChunk(self.rows.first_tick * lanes, rows, columns, {}), tuple(parts))


def travelling(part: ClosedPart, coder: Coder) -> ClosedPart:
    """Return a part with a log and with sealed slices in memory, whatever it has."""
    block, log = part.block, part.log
    if log is None:
        lanes = part.slice_count // max(part.log_rows, 1)
        log = np.arange(part.slice_count, dtype=np.uint32).reshape(part.log_rows, lanes)
    sealed = block.sealed
    if sealed is None:
        raw = block.arena[: part.slice_count * block.slice_bytes].reshape(part.slice_count, block.slice_bytes)
        sealed = coder.seal(raw, stored(block.slice_bytes))
    if sealed is None:
        raise DamageError("slices could not be stored as they are; report this")
    carried = CarriedSlices(in_memory(sealed.coded))
    return replace(part, log=log, block=KeptBlock(block.slice_bytes, carried.count, carried))


def pack_segment(segment: SealedSegment, coder: Coder) -> bytes:
    """Return a segment as bytes: the records that a checkpoint has of it, one after another.

    These are its rows, its logs, and the slices of every large leaf. Dictionaries are records of their own, by name.
    """
    records = [pack_rows(segment.rows, compresses=False), pack_logs(segment.parts, compresses=False)]
    for part in segment.parts:
        if part.block.sealed is None:
            raise TypeError("the slices of a segment that travels are sealed")
        coded = part.block.sealed.coded
        records.append(pack_slices(coded, coder.checksums(np.asarray(coded.data), coded.offsets)))
    return b"".join(buffer for record in records for buffer in record)


def unpack_segment(
    payload: bytes, schema: Schema, dictionaries: Mapping[str, Dictionary], coder: Coder
) -> SealedSegment:
    """Read a segment that was received; DamageError if anything in it does not make sense.

    Every checksum is computed and every number held against the others, so whatever was sent, reading the result
    stays within it. Its lanes may be any number, whatever the schema says of its own.
    """

    def read(start: int, nbytes: int) -> bytes:
        return payload[start : start + nbytes]

    with malformed_refused("a segment"):
        rows, logs, *slices = records_in(payload)
        require_kind(rows, ROWS, read)
        like = _columns_like(rows.head["columns"], schema)
        ticks, first_tick = rows.head["ticks"], count_of(rows.head["first_tick"])
        lanes = like["terminated.0"][0][0]
        if type(ticks) is not int or not 1 <= ticks * lanes <= _MOST_SEGMENT_ROWS:
            raise DamageError(f"a segment claims {ticks!r} ticks of {lanes} lanes; nothing of it is used")
        chunk = unpack_rows(rows, read, first_tick, ticks, like)
        leaves = [schema.observation.leaves[i] for i in _large_leaves(like)]
        coded = [unpack_coded(record, read, dictionaries, coder) for record in slices]
        blocks = [KeptBlock(each.codec.transform.slice_bytes, each.count, CarriedSlices(each)) for each in coded]
        segment = SealedSegment(chunk, tuple(unpack_logs(logs, read, lanes, leaves, blocks)))
        for i, part in zip(segment.large, segment.parts, strict=True):
            _require_within(part, chunk.columns[f"cursors.{i}"])
    return segment


def records_in(payload: bytes) -> Iterator[Record]:
    """Read the heads of records that stand one after another."""
    start = 0
    while start < len(payload):
        record = unpack(lambda first, nbytes: payload[first : first + nbytes], start, len(payload))
        yield record
        start += record.nbytes


def _columns_like(described: Any, schema: Schema) -> Like:
    """Return what the columns of a segment must be, where only lanes, large leaves and the reward's dtype are free."""
    found = {name: (dtype_of(dtype), shape) for name, dtype, shape in described}
    (lanes,) = {count_of(shape[0]) for _, shape in found.values()}
    leaves = _column_leaves(schema, _large_leaves(found)) | {"reward.0": schema.reward_leaf(found["reward.0"][0])}
    leaves |= {"invalid.0": FLAG} if "invalid.0" in found else {}
    return {name: ((lanes, *leaf.shape), leaf.dtype) for name, leaf in leaves.items()}


def _column_leaves(schema: Schema, large: Collection[int]) -> dict[str, Leaf]:
    """Return the leaf of every column but the reward, whose dtype the first add decides, and of lanes without step."""
    leaves = {f"action.{i}": leaf for i, leaf in enumerate(schema.action.leaves)}
    leaves |= {f"extras.{i}": leaf for i, leaf in enumerate(schema.extras.leaves)}
    leaves |= {"terminated.0": FLAG, "truncated.0": FLAG}
    for i, leaf in enumerate(schema.observation.leaves):
        leaves |= {f"cursors.{i}": _CURSOR} if i in large else {f"obs.{i}": leaf, f"next.{i}": leaf}
    return leaves


def _large_leaves(columns: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(int(name.removeprefix("cursors.")) for name in columns if name.startswith("cursors.")))


def _require_within(part: ClosedPart, cursors: NDArray[np.uint32]) -> None:
    """Refuse cursors that point outside the log, and a log that points outside the block."""
    window, log = part.window, part.log
    start = (cursors & ~NEXT_IS_WHOLE).astype(np.int64)
    end = start + window.count + np.where(cursors & NEXT_IS_WHOLE, window.count, window.shift)
    if log is None or log.size >= NEXT_IS_WHOLE or end.max() > len(log) or int(log.max()) >= part.slice_count:
        raise DamageError("a segment points outside itself; nothing of it is used")


def sliced_leaves(schema: Schema) -> list[int]:
    """Return the observation leaves that an encoder cuts into slices; others are sent as rows, obs and next_obs."""
    return [i for i, leaf in enumerate(schema.observation.leaves) if leaf.nbytes > TINY_BYTES]


class _OpenField:
    """One sliced leaf of the segment that is being filled."""

    def __init__(self, kernels: Kernels, window: Window, lanes: int, ticks: int, leaf: Leaf) -> None:
        self.leaf, self.window, size = leaf, window, window.slice_bytes
        together = max(1, min(8, 2**18 // size))
        self._plain = Codec(Method.ZSTD, 1, Transform(size), None, together)
        arena_bytes = (ticks + 1) * 2 * lanes * leaf.nbytes
        self.part = kernels.new_part(window, lanes, kernels.new_block(size, reserve(arena_bytes)), arena_bytes)

    @property
    def raw(self) -> Bytes:
        """The unique slices so far, as rows."""
        block = self.part.block
        return np.empty((0, self.window.slice_bytes), np.uint8) if block is None else block.raw

    def closed(self, coder: Coder, codec: Codec | None) -> ClosedPart:
        """Return what was written, with its slices compressed: plainly, if a codec's palette does not hold them."""
        closed, raw, size, sealed = self.part.closed(), self.raw, self.window.slice_bytes, None
        if closed.log is None:
            raise ValueError("the slices of a segment that travels are always numbered")
        if codec is not None and codec.transform.slice_bytes == size:
            sealed = coder.seal(raw, codec)
        if sealed is None:
            sealed = coder.seal(raw, self._plain)
        assert sealed is not None  # without a palette
        # Behind the end of a short lane's log stand numbers of older segments, which nothing points to.
        log = np.minimum(closed.log, closed.log.dtype.type(len(raw) - 1))
        block = KeptBlock(size, len(raw), CarriedSlices(sealed.coded))
        return replace(closed, log=log, block=block, slice_count=len(raw))


class Encoder:
    """Fills one segment after another.

    Args:
        ticks: Most ticks of a segment.
    """

    def __init__(self, schema: Schema, lanes: int, ticks: int, kernels: Kernels) -> None:
        self.lanes, self._ticks, self.kernels, self._coder = lanes, ticks, kernels, kernels.coder.keeping()
        self._schema, observed, self._sliced = schema, schema.observation.leaves, sliced_leaves(schema)
        self._small = [i for i in range(len(observed)) if i not in self._sliced]
        self._columns = {
            name: np.zeros((ticks, lanes, *leaf.shape), leaf.dtype)
            for name, leaf in _column_leaves(schema, self._sliced).items()
        }
        self._cursors = [self._columns[f"cursors.{i}"] for i in self._sliced]
        self._repair = Repair()
        self._writer: TickWriter | None = None  # made with the first tick; it counts the segment's ticks
        self._fast, self._fast_rows = FastTick(), 0
        self._searches = WindowSearches(lanes)
        self._next_tick = 0  # number of the segment's first tick, counted from the first one ever
        self.leaves = [observed[i] for i in self._sliced]
        self.fields = [_OpenField(kernels, Window.whole(leaf), lanes, ticks, leaf) for leaf in self.leaves]
        self._parts = [field.part for field in self.fields]
        for i, leaf in enumerate(self.leaves):
            self._searches.begin(i, leaf)
        self._changed_windows: dict[int, Window] = {}
        self._tick_bytes = 2 * lanes * sum(leaf.nbytes for leaf in self.leaves)

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the first add."""
        return self._columns["reward.0"].dtype if self._has("reward") else None

    @property
    def _used(self) -> int:
        return 0 if self._writer is None else self._writer.next_tick

    @property
    def rows(self) -> int:
        """Rows in the segment so far."""
        return self._used * self.lanes

    @property
    def is_full(self) -> bool:
        """Whether the segment must be closed before the next tick."""
        used = self._used
        if used >= self._ticks or self._changed_windows:
            return True
        if used * self._tick_bytes < _SEGMENT_BYTES:  # even if nothing was known
            return False
        return sum(part.added_bytes for part in self._parts) >= _SEGMENT_BYTES

    @property
    def ends_episodes(self) -> bool:
        """Whether in every lane an episode ended with the last tick."""
        last = [self._columns[f"{name}.0"] for name in ("terminated", "truncated", "invalid") if self._has(name)]
        return bool(self._used) and bool(np.logical_or.reduce([column[self._used - 1] for column in last]).all())

    def _has(self, name: str) -> bool:
        return f"{name}.0" in self._columns

    def add(self, tick: Tick) -> None:
        """Write one tick to the segment, which is not full."""
        self.end_short_way()
        if self._repair.is_pending[0]:
            self._repair.run()
        writer, sliced = self._made_writer(tick), self._in_slices(tick)
        for part in self._parts:
            part.lengthen_log()
        if writer.write(self._in_columns(tick), sliced if self._parts else None, is_kept=True) <= 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")
        if self._searches.scouts:
            for i in self._searches.look(sliced.obs, sliced.next_obs):
                window = self._searches.end(i) or Window.whole(self.leaves[i])
                if window != self.fields[i].window:
                    self._changed_windows[i] = window
        self._offer_short_way(writer)

    def extend(self, steps: Tick, start: int) -> int:
        """Write ticks, which have a time axis, from `start` on until the segment is full; return how many it took."""
        first, t = self._used, start
        while t < len(steps.reward) and not self.is_full:
            some = steps.cut(slice(t, t + self._ticks_before_full()))
            written = self._add_run(some) if len(some.reward) > 1 else 0
            if not written:
                self.add(some.cut(0))
            t += written or 1
        return self._used - first

    def _add_run(self, steps: Tick) -> int:
        """Write several ticks in one call, and return how many; 0 if they cannot be written so."""
        self.end_short_way()
        if self._repair.is_pending[0]:
            self._repair.run()
        writer = self._made_writer(steps)
        writer.pause_tick = self._ticks
        for part in self._parts:
            part.lengthen_log(len(steps.reward))
        sliced = self._in_slices(steps)
        obs, next_obs = ([np.ascontiguousarray(array) for array in arrays] for arrays in (sliced.obs, sliced.next_obs))
        sliced = sliced._replace(obs=obs, next_obs=next_obs)
        return writer.write_run(packed_rows(self._in_columns(steps)), sliced if self._parts else None)

    def _ticks_before_full(self) -> int:
        """Count the ticks, at least one, after which the segment may be full, and not before."""
        if self._searches.scouts:  # a window that was found begins with the next segment
            return 1
        left = self._ticks - self._used
        if not self._parts:
            return max(1, left)
        room = _SEGMENT_BYTES - sum(part.added_bytes for part in self._parts)
        return max(1, min(left, -(-room // self._tick_bytes)))

    def short_way(self, lock: Any, rows: int) -> Callable[..., int]:
        """Return `FastTick.add`, for a caller who holds `lock` in every other call.

        Ticks are written so while a segment has fewer than `rows`, and nothing else is to do before or after them.
        """
        self._fast, self._fast_rows = self.kernels.new_fast_tick(lock, self._repair), rows
        return self._fast.add

    def _offer_short_way(self, writer: TickWriter) -> None:
        if not (self._searches.scouts or self._changed_windows or self._has("invalid")):
            writer.pause_tick = writer.blocks_pause_tick = min(self._ticks, self._fast_rows // self.lanes)
            writer.limit(_SEGMENT_BYTES - 1)
            rest = [field.rows for field in writer.flat if not field.is_observation]
            self._fast.offer(writer, lambda: Arguments.of(self._schema, self._small, self._sliced, rest))

    def end_short_way(self) -> None:
        """Write no more ticks the short way, until one was added."""
        self._fast.end()

    def _made_writer(self, tick: Tick) -> TickWriter:
        """Return what writes ticks; the first one sets the dtype of rewards."""
        columns, lanes = self._columns, (self._ticks, self.lanes)
        if not self._has("reward"):
            columns["reward.0"] = np.empty((*lanes, *self._schema.reward_shape), tick.reward.dtype)
        if tick.valid is not None and not self._has("invalid"):
            columns["invalid.0"] = np.zeros(lanes, np.bool_)
        written = len(columns) - len(self._small) - len(self._sliced)  # of small leaves both sides are one field
        if self._writer is None or len(self._writer.flat) != written:
            names = [name for name in columns if name.startswith(("action.", "extras."))]
            names += [f"{name}.0" for name in ("reward", "terminated", "truncated", "invalid") if self._has(name)]
            flat = [FlatField(columns[f"obs.{i}"], columns[f"next.{i}"], is_observation=True) for i in self._small]
            flat += [FlatField(columns[name], None, is_observation=False) for name in names]
            self._writer = self.kernels.new_writer(flat, self._ticks, (0, self._used), self._repair)
        return self._writer

    def _in_columns(self, tick: Tick) -> list[Array]:
        """Return the rows of one tick, or of several, that go to columns, in the order of the writer's fields."""
        rows = [row for i in self._small for row in (tick.obs[i], tick.next_obs[i])]
        rows += [*tick.action, *tick.extras, tick.reward, tick.terminated, tick.truncated]
        if self._has("invalid"):
            rows.append(np.zeros_like(tick.terminated) if tick.valid is None else ~tick.valid)
        return rows

    def _in_slices(self, tick: Tick) -> SlicedTick:
        """Return the observations of one tick, or of several, that are cut into slices."""
        obs, next_obs = ([arrays[i] for i in self._sliced] for arrays in (tick.obs, tick.next_obs))
        return SlicedTick(self._parts, self._cursors, obs, next_obs)

    def close(self, codecs: Mapping[int, Codec]) -> SealedSegment:
        """Return the segment, its slices coded as `codecs` says for their fields, and begin the next one."""
        self.end_short_way()
        if self._repair.is_pending[0]:
            self._repair.run()
        used, writer = self._used, self._writer
        if writer is None or not used:
            raise ValueError("the segment is empty")
        columns = {name: column[:used].copy() for name, column in self._columns.items()}
        if self._has("invalid") and not columns["invalid.0"].any():
            del columns["invalid.0"]
        parts = tuple(field.closed(self._coder, codecs.get(i)) for i, field in enumerate(self.fields))
        for i, field in enumerate(self.fields):
            if i in self._changed_windows:
                window = self._changed_windows.pop(i)
                self.fields[i] = _OpenField(self.kernels, window, self.lanes, self._ticks, field.leaf)
                continue
            if field.window.count == 1 or field.part.broken_steps * 2 >= field.part.steps:
                self._searches.consider(i, field.leaf)
            field.part.clear()
        if any(part is not field.part for part, field in zip(self._parts, self.fields, strict=True)):
            self._parts = [field.part for field in self.fields]  # a new list: the writer looks at them again
        writer.next_tick = 0
        first, self._next_tick = self._next_tick, self._next_tick + used
        return SealedSegment(RowChunk(first, used, columns, {}), parts)


_ENOUGH = 512
"""Slices that a choice is made on."""
_HARDLY_MORE = 1.06
_QUICK_LEVELS = {Method.STORED: (), Method.LZ4: (0, 3, 7), Method.ZSTD: (1, 3, 7)}
"""Levels at which compressors are quick: those above take far longer for frames of a game, and hardly less room."""
_Key = tuple[int, Window]
"""A field, and how it is cut."""


class EncoderCodecs:
    """The codecs of an encoder's fields: each is chosen by the first slices of its field, in the background.

    Args:
        prefer: How much slower sampling may get, see `holdall.ReplayMemory`.
        agree: Given the name of a field and what chooses a codec for it, returns the one to use, in words: that of
            another encoder of the same fields, or the chosen one. None: it is asked again later.
    """

    def __init__(
        self, encoder: Encoder, prefer: str,
        agree: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any] | None],
    ) -> None:  # fmt: skip
        self._encoder, self._coder = encoder, encoder.kernels.coder
        self._cap, self._agree = COST_CAPS[prefer], agree
        self._codecs: dict[_Key, Codec | None] = {}  # None: it is being chosen
        self._samples: dict[_Key, list[Bytes]] = {}

    def of_fields(self) -> dict[int, Codec]:
        """Return the codecs of the fields of a segment that is about to be closed, as far as they were chosen."""
        chosen = {}
        for number, field in enumerate(self._encoder.fields):
            self._look((number, field.window), field.raw)
            if (codec := self._codecs.get((number, field.window))) is not None:
                chosen[number] = codec
        return chosen

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
        thread = threading.Thread(target=self._settle, args=work, name="holdall-codec", daemon=True)
        end_before_python(thread)
        thread.start()

    def _settle(self, key: _Key, slices: Bytes) -> None:
        """Agree on the codec of a field."""
        words = self._agree(json.dumps([key[0], key[1].words()]), lambda: codec_words(self._chosen(key, slices)))
        if words is None:
            del self._codecs[key]
        else:
            self._codecs[key] = codec_of(words, {})

    def _chosen(self, key: _Key, slices: Bytes) -> Codec:
        # A segment stands for itself: a dictionary would have to follow it wherever it goes.
        leaf, lanes = self._encoder.leaves[key[0]], self._encoder.lanes
        return quicker(
            self._coder, choose(self._coder, leaf, key[1], slices, self._cap, 1, lanes, has_dictionary=False), slices
        )


def quicker(coder: Coder, codec: Codec, slices: Bytes) -> Codec:
    """Return the codec at a lower level if that takes hardly more bytes: steps of an environment wait for it."""
    sealed = coder.seal(slices, codec)
    if sealed is None:
        return codec
    for level in _QUICK_LEVELS[codec.method]:
        quick = replace(codec, level=min(codec.level, level))
        found = coder.seal(slices, quick)
        if found is not None and found.coded.data.nbytes <= _HARDLY_MORE * sealed.coded.data.nbytes:
            return quick
    return codec
