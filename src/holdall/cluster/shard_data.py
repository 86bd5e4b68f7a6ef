"""What a shard holds: an ordinary store of one lane, whose ticks are row numbers, and how rows are drawn from it.

In:  segments that writers sealed, a journal, or a checkpoint.  Out: rows for answers; segments to move; checkpoints.
Invariant: row numbers only grow, and name the same transition for as long as it is held. Not locked: the shard is.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.checkpoint import Restored, SaveHandle, Savers, Snapshot, WriterRun, runs_of, runs_state
from holdall.cluster.answer import MOST_KNOWN_FORMS, Answer, FoundField, Payload, RowDraw, SliceForm, pack_answer
from holdall.cluster.encode import sliced_leaves
from holdall.cluster.journal import SLOT_BYTES, Entry, Journal
from holdall.cluster.protocol import ShardCounters
from holdall.cluster.row_order import RowOrder
from holdall.delivery import Prefetched, host_pool
from holdall.errors import DamageError
from holdall.json_state import generator_state, restored_generator, schema_of
from holdall.machine import memory_limits
from holdall.native import chosen_kernels
from holdall.sampling import ComposedSampler, Held, Hindsight, Prioritized, Sampler
from holdall.schema import Array, Bytes, Leaf, Schema

_LOADED = bytes(16)
"""Stands for the writer of segments that a checkpoint brought."""
_NO_TICK = 2**40 - 1
"""First tick of a segment whose rows are not known to follow each other: it was held by another shard."""
_DECODED_FROM = 0.9
"""Share of the decoded bytes from which on a shard decodes what it sends to another machine."""
_DECODED_NEAR_FROM = 0.05
"""The same for a learner on the shard's machine, who has arrays at once; measured, see decision 076."""
_MEASURE_AGAIN = 64
"""Answers after which a field's share is measured again."""
_NEWLY_DECODED = 16
"""Segments that one answer decodes and keeps so."""
_SHARE_OF_AVAILABLE = 4
_SLICES, _SEALED = (storage.RECORD_FIELDS.index(name) for name in ("slices", "sealed"))
_CUT = slice(storage.RECORD_FIELDS.index("outer"), storage.RECORD_FIELDS.index("shift") + 1)

Ids = NDArray[np.int64]


class ShardData:
    """All rows of a shard, and what draws from it depend on.

    Args:
        words: The memory's schema, see `holdall.json_state.schema_words`.
        capacity: Most rows held.
        lock: The shard's own.
        neighbours: Shards on a machine, this one counted; together they keep decoded what a memory there would.
    """

    def __init__(
        self, words: dict[str, Any], capacity: int, sampler: Sampler, generator: np.random.Generator,
        lock: threading.Lock, neighbours: int = 1,
    ) -> None:  # fmt: skip
        self.capacity = capacity
        self.sampler = sampler
        self.generator = generator
        self.inserted = 0  # transitions ever accepted
        self.dictionaries: dict[str, storage.Dictionary] = {}
        self._words = words | {"num_envs": 1}
        self._schema = schema_of(self._words)
        self._lock = lock
        self._kernels = chosen_kernels()
        decoded_bytes = memory_limits()[0].free_bytes // _SHARE_OF_AVAILABLE // neighbours
        self._finder = RowFinder(self._schema, self._kernels, decoded_bytes)
        self._savers = Savers(self._kernels.coder)
        self._codecs: dict[storage.Codec, storage.Codec] = {}
        self._runs: deque[WriterRun] = deque()
        self._by = sampler.by if isinstance(sampler, ComposedSampler) else sampler
        self._starts = Prioritized(alpha=0.0)  # counts what a sequence may begin with
        self._order: RowOrder | None = None
        self.store = self.begin_at(0)

    def begin_at(self, first_row: int) -> storage.AdoptingStore:
        """Hold nothing, and number the next row so."""
        self._runs.clear()
        self._order = RowOrder() if isinstance(self.sampler, ComposedSampler) else None
        self.store = storage.AdoptingStore(
            self._schema,
            self.capacity,
            self._kernels,
            self._lock,
            storage.Budget.of(None, "balanced", 1),
            first_tick=first_row,
            large=sliced_leaves(self._schema),
        )
        return self.store

    def unpacked(self, payload: bytes, dictionaries: dict[str, storage.Dictionary]) -> storage.SealedSegment:
        """Read a segment; the codecs that segments have in common are kept once, so that answers can compare them."""
        segment = storage.unpack_segment(payload, self._schema, dictionaries, self._kernels.coder)
        for part in segment.parts:
            self._share_codec(part.block)
        return segment

    def _share_codec(self, block: storage.SliceBlock) -> None:
        """Have a block in memory, with a codec that others have too."""
        if block.sealed is not None:
            coded = block.sealed.coded.in_memory()
            codec = self._codecs.setdefault(coded.codec, coded.codec)
            block.sealed = storage.CarriedSlices(replace(coded, codec=codec))

    def take(self, writer: bytes, segment: storage.SealedSegment) -> None:
        """Take a segment of a writer over."""
        first = self.store.adopt(segment)
        rows, tick, lanes = self.store.next_tick - first, segment.rows.first_tick, segment.lanes
        run = WriterRun(writer.hex(), tick, lanes, first, rows)
        if tick == _NO_TICK:
            run = run._replace(first_tick=-1, lanes=rows)
        self._runs.append(run)
        if self._order is not None:
            self._order.add(run, self.store.first_tick)
        while self._runs[0].first_row + self._runs[0].rows <= self.store.first_tick:
            self._runs.popleft()
        self.inserted += rows

    def segment_at(self, row: int) -> tuple[int, storage.SealedSegment]:
        """Return the first row of a segment that is held, and the segment as one that another shard can adopt."""
        segment = self.store.segment_at(row)
        return segment.rows.first_tick, replace(segment, rows=replace(segment.rows, first_tick=_NO_TICK))

    def packed(self, segment: storage.SealedSegment) -> bytes:
        """Return a segment as bytes."""
        return storage.pack_segment(segment, self._kernels.coder)

    def replay(self, journal: Journal, memory: str) -> None:
        """Take a journal over for a memory of this name, and hold all that it holds and shows."""
        for page in journal.open():
            if page.begins:
                self.begin_at(page.first_row)
            elif page.first_row != self.store.next_tick:
                raise DamageError(f"{journal.url} lacks segments before row {page.first_row}; load a checkpoint")
            for entry in page.entries:
                self.take(entry.writer, self.unpacked(entry.payload, journal.dictionaries))
        move = journal.move
        # What another memory was moving when it ended may not have arrived; this one's will.
        is_other = move is not None and move.memory != memory
        self.store.forget_before(move.first_row if move is not None and is_other else journal.hidden_before)
        self.dictionaries = dict(journal.dictionaries)
        self.inserted = self.store.next_tick
        self._resume_priorities(journal)

    def _resume_priorities(self, journal: Journal) -> None:
        """Go on with the priorities that the journal has, if they were made with the same settings."""
        saved, by = journal.priorities, self._by
        if saved is not None and isinstance(by, Prioritized) and [by.alpha, by.floor] == saved["settings"]:
            by.restore(saved)
            by.resize(self.capacity, self.store.first_tick)

    def priorities(self) -> dict[str, Any] | None:
        """Return all that `replay` needs of a sampler with priorities; None of one without."""
        by = self._by
        if not isinstance(by, Prioritized) or self.store.next_tick == self.store.first_tick:
            return None
        by.mass(self._startable())  # so that what is new has a priority
        return by.state() | {"settings": [by.alpha, by.floor]}

    def load(self, checkpoint: Restored) -> None:
        """Hold what was saved, all of it in memory, and draw on from there."""
        content = checkpoint.content
        for block in [] if content is None else [part.block for segment in content.segments for part in segment.parts]:
            self._share_codec(block)
            named = None if block.sealed is None else block.sealed.codec.dictionary
            if named is not None:
                self.dictionaries[storage.dictionary_name(named)] = named
        store = self.begin_at(checkpoint.manifest.first_tick)
        checkpoint.fill(store)
        state = checkpoint.state
        if checkpoint.saved is not None:
            self._savers.to(checkpoint.url, checkpoint.saved)
        self._runs.extend(runs_of(state["runs"]))
        if self._order is not None:
            for run in self._runs:
                self._order.add(run, store.first_tick)
        self.inserted = int(state["inserted"])
        self.generator = restored_generator(state["generator"])
        if state["sampler"]["kind"] == type(self.sampler).__name__:
            self.sampler.restore(state["sampler"]["state"])
        if isinstance(self._by, Prioritized):
            self._by.resize(self.capacity, store.first_tick)

    def write_loaded(self, journal: Journal, checkpoint: str, written: int) -> None:
        """Write the segments of a checkpoint that a journal does not have yet.

        Args:
            written: The row behind the last that the journal holds.
        """
        journal.loading = checkpoint
        waiting: list[bytes] = []
        begin = row = max(self.store.first_tick, written)
        while row < self.store.next_tick:
            first, segment = self.segment_at(row)
            waiting.append(self.packed(segment))
            row = first + segment.rows.ticks
            if sum(map(len, waiting)) >= SLOT_BYTES or row == self.store.next_tick:
                entries = [Entry(_LOADED, 0, payload) for payload in waiting]
                journal.append(entries, begin, list(self.dictionaries.values()))
                begin, waiting = row, []
        journal.end_loading(self.store.first_tick)

    def save(self, url: str) -> SaveHandle:
        """Begin a checkpoint of this moment; the memory removes those that none of its manifests names."""
        saver = self._savers.to(url)
        state = {
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state()},
            "generator": generator_state(self.generator),
            "prefetched": Prefetched().state(),
            "inserted": self.inserted,
            "runs": runs_state(self._runs),
        }
        frozen = self.store.freeze(saver.rows_saved())
        snapshot = Snapshot(frozen, self._words, self.capacity, state, {}, self._lock, self.store.release)
        return saver.save(snapshot, None, None, None)

    def end_saves(self) -> None:
        """Wait for checkpoints that are under way, and let others write there."""
        self._savers.close()

    def draw(self, counts: Sequence[tuple[int, int]], generator: np.random.Generator | None = None) -> RowDraw:
        """Draw rows of some batches, those of each for itself.

        Args:
            counts: Of every batch how many, and how many of these get another goal.
        """
        sampler, held, chosen = self.sampler, self.held(), generator or self.generator
        if isinstance(sampler, Hindsight):
            return RowDraw.of([sampler.draw(held, count, chosen, relabelled) for count, relabelled in counts])
        return RowDraw.of([sampler.draw(held, count, chosen) for count, _ in counts])

    def found(self, draw: RowDraw) -> tuple[NDArray[np.float64], storage.Rows]:
        """Look rows up: what each was drawn in proportion to, and where it lies."""
        rows = draw.rows[: len(draw.rows) - len(draw.others)]
        if draw.steps and isinstance(self.sampler, ComposedSampler):
            rows = self.sampler.first_ids(rows.reshape(-1, draw.steps))
        by = self._by
        scaled = by.scaled(self._startable(), rows) if isinstance(by, Prioritized) else np.ones(len(rows))
        return scaled, self.store.read(draw.rows)

    def answer(
        self, counters: ShardCounters, draw: RowDraw, scaled: NDArray[np.float64], found: storage.Rows,
        is_near: bool = False,
    ) -> Payload:  # fmt: skip
        """Make an answer of what was looked up; that takes no lock.

        Args:
            is_near: Whether it goes to this machine.
        """
        columns, fields = self._finder.columns(found), self._finder.fields(found, is_near)
        return pack_answer(Answer(counters, draw, scaled, columns, fields), is_near)

    def mass(self) -> float:
        """Return what draws are in proportion to: transitions, starts of sequences, or the sum of scaled priorities."""
        if self.store.next_tick == self.store.first_tick:
            return 0.0
        startable = self._startable()
        if isinstance(self._by, Prioritized):
            return self._by.mass(startable)
        return float(self.store.transitions) if startable.only is None else self._starts.mass(startable)

    @property
    def highest(self) -> float:
        """The scaled priority of a new row; 0 where there are none."""
        return self._by.highest if isinstance(self._by, Prioritized) else 0.0

    def raise_highest(self, scaled: float) -> None:
        """Give the rows that come from now on no lower priority than this one."""
        if isinstance(self._by, Prioritized):
            self._by.raise_highest(self._startable(), scaled)

    def held(self) -> Held:
        """Describe the rows that can be drawn."""
        if self._order is not None:
            self._order.forget_before(self.store.first_tick)
        return Held(self.store.first_tick, self.store.next_tick, 1, self.capacity, self.store, order=self._order)

    def _startable(self) -> Held:
        """Describe the rows that can be drawn as the first of what a batch holds."""
        return self.sampler.starts(self.held()) if isinstance(self.sampler, ComposedSampler) else self.held()


class DecodedSegments:
    """Decoded slices of segments that are drawn from: as an ordinary memory leaves what it has room for uncompressed.

    Those of a segment go with it. Where there is no room left, others are decoded for every batch.

    Args:
        most_bytes: Kept at most.
    """

    def __init__(self, coder: storage.Coder, most_bytes: int) -> None:
        self._coder = coder
        self._room = most_bytes
        self._slices: weakref.WeakKeyDictionary[storage.SealedSlices, Bytes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def instead(self, places: storage.Places, field: int) -> storage.Places:
        """Return the places of one field, as that of a batch of one, with decoded slices where these are kept."""
        touched, _, where = _unique(places.segment)
        records, held = places.records[field][touched], list[storage.Held]()
        newly = _NEWLY_DECODED
        for i, segment in enumerate(touched.tolist()):
            log, content = places.held[field][segment]
            if isinstance(content, storage.SealedSlices) and not places.reads_files:
                slices = self._slices.get(content)
                if slices is None and newly:
                    slices, newly = self._decode(content), newly - 1
                if slices is not None:
                    records[i, _SLICES], records[i, _SEALED], content = slices.ctypes.data, 0, slices
            held.append((log, content))
        return replace(
            places, records=[records], segment=where.astype(np.int32), cursors=[places.cursors[field]],
            held=(tuple(held),),
        )  # fmt: skip

    def _decode(self, sealed: storage.SealedSlices) -> Bytes | None:
        """Decode slices and keep them, if there is room."""
        nbytes = sealed.count * sealed.codec.transform.slice_bytes
        with self._lock:
            if nbytes > self._room:
                return None
            self._room -= nbytes
        slices = np.empty((sealed.count, sealed.codec.transform.slice_bytes), np.uint8)
        self._coder.decode(sealed, np.arange(sealed.count), slices)
        self._slices[sealed] = slices
        weakref.finalize(sealed, self._free, nbytes).atexit = False
        return slices

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._room += nbytes


class RowFinder:
    """Finds what a learner needs of some rows of a shard's store; several threads may use it."""

    def __init__(self, schema: Schema, kernels: storage.Kernels, decoded_bytes: int = 0) -> None:
        self._leaves = schema.observation.leaves
        self._kernels = kernels
        self._threads = self._kernels.new_pool()
        self._staging = host_pool()
        self._words: dict[tuple[int, ...], tuple[storage.Codec, str]] = {}
        self._shares: dict[int, tuple[float, int]] = {}  # of a field: coded bytes over decoded, and answers since
        self._kept = DecodedSegments(kernels.coder, decoded_bytes)

    def columns(self, rows: storage.Rows) -> dict[str, Array]:
        """Name the small fields as they are sent."""
        found = {f"obs.{i}": pair[0] for i, pair in rows.small.items()}
        found |= {f"next.{i}": pair[1] for i, pair in rows.small.items()}
        found |= {f"action.{i}": column for i, column in enumerate(rows.action)}
        found |= {f"extras.{i}": column for i, column in enumerate(rows.extras)}
        return found | {"reward.0": rows.reward, "terminated.0": rows.terminated, "truncated.0": rows.truncated}

    def fields(self, rows: storage.Rows, is_near: bool = False) -> dict[int, FoundField]:
        """Find the slices of the large fields; no lock is needed.

        Args:
            is_near: Whether the learner is on this machine.
        """
        places = rows.places
        if places is None or not len(places.segment):
            nothing = FoundField(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32), ())
            return dict.fromkeys(rows.large, nothing)
        found = {}
        for field, i in enumerate(rows.large):
            leaf, limit = self._leaves[i], _DECODED_NEAR_FROM if is_near else _DECODED_FROM
            share, answers = self._shares.get(field, (0.0, 0))
            coded = None
            if share <= limit or answers % _MEASURE_AGAIN == 0:
                coded = self._compressed(places, field, leaf)
                share = 1.0 if coded is None else coded.nbytes / (2 * len(places.segment) * leaf.nbytes)
            self._shares[field] = share, answers + 1
            found[i] = self._decoded(places, field, leaf) if coded is None or share > limit else coded
        return found

    def _compressed(self, places: storage.Places, field: int, leaf: Leaf) -> FoundField | None:
        """Put the units together that hold the slices of the rows; None where these are better decoded here.

        An array operation costs more here than what it does for the rows of one answer, so there are few.
        """
        touched, _, where = _unique(places.segment)
        found = _joinable(places.held[field], touched.tolist())
        if found is None:
            return None
        logs, coded = found
        cuts = places.records[field][touched, _CUT]
        form_of, forms, groups = self._forms(cuts.tolist(), coded)
        tables = [each.offsets for each in coded]
        cursors = places.cursors[field]
        flags = cursors & storage.NEXT_IS_WHOLE
        count, shift = cuts[where, -2], cuts[where, -1]
        length = count + np.where(flags, count, shift)
        begin = length.cumsum()
        row = np.arange(len(where)).repeat(length)
        begin -= length
        start = _starts(logs)[where] + (cursors ^ flags) - begin
        number = np.concatenate(logs).take(np.arange(len(row)) + start[row])
        group, form = groups[form_of][where], form_of[where]
        nth, within = np.divmod(number, group[row])
        # Units are counted over all tables, and those of one form lie together.
        units, example, place = _unique(((form << 40) + _starts(tables)[where])[row] + nth)
        offsets = np.concatenate(tables)
        units &= (1 << 40) - 1
        begins, ends = offsets.take(units), offsets.take(units + 1)
        data = [np.asarray(each.data).data for each in coded]
        segments = where[row[example]]
        cut = [
            data[segment][first:last]
            for segment, first, last in zip(segments.tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]
        bounds = np.searchsorted(form_of[segments], np.arange(len(forms) + 1))
        joined = tuple(
            _joined(each, cut[first:last], (ends - begins)[first:last])
            for each, (first, last) in zip(forms, pairwise(bounds.tolist()), strict=True)
        )
        numbers = (place - bounds[form][row]) * group[row] + within
        is_narrow = all(each.slices.count <= 1 << 16 for each in joined if isinstance(each.slices, storage.Coded))
        log: storage.Log = numbers.astype(np.uint16) if is_narrow else numbers.astype(np.uint32)
        return FoundField(form.astype(np.int32), begin.astype(np.uint32) | flags, log, joined)

    def _forms(self, cuts: list[list[int]], coded: list[storage.Coded]) -> tuple[Ids, list[SliceForm], Ids]:
        """Number the forms that the slices of some segments have; return the forms, too, and the slices of a unit.

        Units of one form can be put together.
        """
        keys: dict[tuple[Any, ...], int] = {}
        forms: list[SliceForm] = []
        numbers: list[int] = []
        number, codec, last = -1, None, [0]
        for cut, each in zip(cuts, coded, strict=True):
            if codec is each.codec and last == cut and not each.palette.size:  # most are coded like the one before
                numbers.append(number)
                continue
            codec, last = each.codec, cut
            key = (id(each.codec), *cut, each.palette.tobytes() if each.palette.size else b"")
            number = keys.setdefault(key, len(forms))
            if number == len(forms):
                outer, run_bytes, count, shift = cut
                window = storage.Window(0, 1, count, outer, run_bytes, shift)
                forms.append(SliceForm(window, each, self._described(each.codec, cut)))
            numbers.append(number)
        groups = [form.slices.codec.group for form in forms if isinstance(form.slices, storage.Coded)]
        return np.array(numbers), forms, np.array(groups)

    def _described(self, codec: storage.Codec, cut: list[int]) -> str:
        """Describe a cut and a codec; the same ones are sent over and over."""
        key = (id(codec), *cut)
        known = self._words.get(key)
        if known is None or known[0] is not codec:
            if len(self._words) >= MOST_KNOWN_FORMS:
                self._words.clear()
            words = json.dumps({"cut": cut, "codec": storage.codec_words(codec)}, sort_keys=True)
            known = self._words[key] = codec, words
        return known[1]

    def _decoded(self, places: storage.Places, field: int, leaf: Leaf) -> FoundField:
        """Decode the rows here: every observation and next observation is one slice."""
        count = len(places.segment)
        nbytes = count * leaf.nbytes
        if places.awaits_files:
            storage.bring_places(places)
        both = self._staging.take(2 * nbytes)
        obs, next_obs = both[:nbytes].reshape(count, -1), both[nbytes:].reshape(count, -1)
        self._kernels.gather(self._kept.instead(places, field), 0, obs, next_obs, self._threads)
        numbers = np.arange(count, dtype=np.uint32)
        log = np.stack([numbers, numbers + np.uint32(count)], axis=1).reshape(-1)
        form = SliceForm(storage.Window.whole(leaf), both)
        return FoundField(np.zeros(count, np.int32), 2 * numbers, log, (form,))


def _joinable(held: tuple[storage.Held, ...], segments: list[int]) -> tuple[list[Array], list[storage.Coded]] | None:
    """Return logs and coded slices of some segments; None unless all units are whole, and can be moved."""
    logs: list[Array] = []
    found: list[storage.Coded] = []
    for segment in segments:
        log, content = held[segment]
        if not isinstance(log, np.ndarray) or not isinstance(content, storage.SealedSlices):
            return None
        coded = content.coded
        codec = coded.codec
        if isinstance(coded.data, storage.Extent) or coded.count % codec.group or codec.key or len(coded.places):
            return None
        logs.append(log)  # of one lane
        found.append(coded)
    return logs, found


def _starts(arrays: Sequence[Array]) -> Ids:
    """Say where each of some arrays begins if they stand one after another."""
    return np.array(list(accumulate((len(array) for array in arrays[:-1]), initial=0)))


def _joined(form: SliceForm, units: list[Any], sizes: NDArray[np.uint32]) -> SliceForm:
    """Return a form with these units."""
    like: Any = form.slices
    offsets = np.zeros(len(units) + 1, np.uint32)
    np.cumsum(sizes, out=offsets[1:])
    data = np.frombuffer(b"".join(units), np.uint8)
    return form._replace(slices=storage.Coded(like.codec, len(units) * like.codec.group, offsets, like.palette, data))


def _unique(values: NDArray[Any]) -> tuple[Ids, Ids, Ids]:
    """Return each value once, in order; where it is first found; and where each of `values` is among them.

    np.unique takes twice as long for few of them.
    """
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.empty(len(values), np.bool_)
    is_new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    place = np.empty(len(values), np.int64)
    place[order] = np.cumsum(is_new) - 1
    return ordered[is_new], order[is_new], place
