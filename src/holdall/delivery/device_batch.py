"""Batches on a device: unique slices are sent once, and stacked there.

In:  draws.  Out: batches whose tensors are views of one block on the device.
Invariant: the host never waits for the device, but for pinned memory that it writes to again. A block is used again
only when no tensor of it is left, and only after everything that the consumer asked for before.

Names and places of slices are sent first, so that the bus is busy while small fields are packed; places are only used
for slices that the device reads on the host by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_safe, left
from holdall.batch import Batch, Draw
from holdall.delivery.batch_layout import (
    BatchLayout,
    BlockSpan,
    DeviceBatch,
    DeviceMove,
    PackedField,
    PinnedHead,
    nesting,
)
from holdall.delivery.batches import Batches, BatchJob, BlockPool, DrawnRows, HostBatches
from holdall.delivery.device import DeviceScratch, DeviceStream, StagingRing, StagingSlot
from holdall.delivery.device_assembly import DeviceAssembler, MadeBatch, MadeJob, Readable, SlotDraw
from holdall.delivery.device_store import DeviceSlices, DeviceSnapshot, PinnedArenas, PinnedSnapshot
from holdall.errors import DamageError
from holdall.native import CopyPlan, Cut, Names, SliceNamer
from holdall.sampling import Uniform
from holdall.schema import Schema
from holdall.storage import Kernels, Rows, Store

if TYPE_CHECKING:
    import torch


_KEPT_LAYOUTS = 8
"""Kinds of batches whose layouts are kept, with their pinned heads."""


class _NamedSlices(NamedTuple):
    """The slices of one field that a batch is made of, each once."""

    leaf: int
    cut: Cut
    unique: int
    word: torch.dtype
    words: int  # of a slice
    source: torch.Tensor | None = None  # on the device, as rows of words; None: the device reads them ...
    on_host: torch.Tensor | None = None  # ... from here


class DeviceBatches(Batches):
    """Makes batches on one device.

    Args:
        plain: Makes the same batches in arrays, and copies them over; goals that are images are relabelled there.
        kernels: Where the loops that name slices are not compiled, observations are sent whole.
    """

    def __init__(
        self,
        schema: Schema,
        plain: HostBatches,
        stream: DeviceStream,
        kernels: Kernels,
        torch: Any,
        store_on_device: bool,
        pins: bool,
    ) -> None:
        self.schema = schema
        self.nested = [nesting(tree) for tree in (schema.observation, schema.action, schema.extras)]
        self.plain = plain
        self.stream = stream
        self.blocks = BlockPool(stream.device_bytes, stream.own, stream.see)
        self.torch = torch
        self._namer: SliceNamer | None = kernels.namer()
        named = self._namer is not None
        self._slices = DeviceSlices(stream, kernels.coder) if named and store_on_device else None
        self._arenas = PinnedArenas(stream) if named and pins and not store_on_device else None
        self._pinned: tuple[int, PinnedSnapshot | None] = -1, None  # by the version of the segments
        self._assembler = DeviceAssembler.of(torch, stream, schema, self._namer)
        self._rings: dict[int, StagingRing] = {}  # by leaf
        self._scratch: dict[int, DeviceScratch] = {}  # by leaf: its unique slices, before they are stacked
        self._picked = DeviceScratch(stream)
        self._under_way: deque[tuple[Any, DrawnRows]] = deque()  # batches that the device reads from the host
        self._rows_on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by leaf: a span of arenas, and its rows
        self._lock: Any = fork_safe(threading.RLock())
        self._layouts: dict[Any, BatchLayout] = {}
        self._layouts_lock: Any = fork_safe(threading.RLock())

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """See `Batches`: rows of a `Uniform` sampler, once a batch of so many rows was made."""
        if type(sampler) is not Uniform or self._assembler is None:
            return None
        readable = self._readable(store)
        plan = self._assembler.plain_plan(store, readable, count) if _reads_all(readable) else None
        if plan is None or not store.all_valid or (held := store.held)[1] - held[0] < count:
            return None
        made = self._assembler.assemble_plain(plan, held, generator.integers(*held, size=count), ahead=False)
        return made.batch if isinstance(made, MadeBatch) else self._begin_otherwise(made, store).receive()

    def draw_slots(self, rows: SlotDraw, count: int, store: Store, *, ahead: bool) -> BatchJob | None:
        """Draw rows as `draw_slots` of `holdall.native` does, and begin a batch of them, if it can be made at once."""
        lanes, held = self.schema.num_envs, store.held
        if rows.filled == rows.slots:
            is_filled = held[1] - held[0] >= rows.slots * lanes
        else:
            is_filled = held == (0, rows.filled * lanes)
        if self._assembler is None or not is_filled or not store.all_valid:
            return None
        readable = self._readable(store)
        plan = self._assembler.plain_plan(store, readable, count) if _reads_all(readable) else None
        if plan is None:
            return None
        made = self._assembler.assemble_plain(plan, held, rows, ahead=ahead)
        return MadeJob(self.stream, made) if isinstance(made, MadeBatch) else self._begin_otherwise(made, store)

    def _begin_otherwise(self, ids: NDArray[np.int64], store: Store) -> BatchJob:
        """Begin a batch of rows that the device cannot fetch by itself."""
        draw = Draw(ids, np.ones(len(ids), np.float32))
        (job := self.start(draw, self._look_up(draw, store, self._readable(store)))).work()
        return job

    def _readable(self, store: Store) -> Readable:
        """Return where the device reads slices now; arenas are looked at again when segments are others."""
        if self._slices is None:
            version = store.large_segments.index.version
            if self._arenas is not None and version != self._pinned[0]:
                self._pinned = -1, None  # this one keeps no arena pinned
                self._pinned = version, self._arenas.up_to_date(store)
            return self._pinned[1]
        found = self._slices.up_to_date(store)
        if self._assembler is not None and (sent := self._slices.newly_sent()) is not None:
            self._assembler.behind = sent
        return found

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`."""
        readable = self._readable(store)
        if self._assembler is not None and _reads_all(readable):
            made = self._assembler.assemble(draw, store, readable, ahead=ahead)
            if made is not None:
                return DrawnRows(None, None, None, made=made)  # type: ignore[arg-type]  # nothing else is needed
        return self._look_up(draw, store, readable)

    def _look_up(self, draw: Draw, store: Store, readable: Readable) -> DrawnRows:
        """Find the rows of a batch whose slices are sent from here."""
        on_device = readable if isinstance(readable, DeviceSnapshot) else None
        pinned = readable if isinstance(readable, PinnedSnapshot) else None
        return self.plain.look_up(draw, store)._replace(on_device=on_device, pinned=pinned)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`; the block is chosen here, behind everything that the consumer asked the device for."""
        if drawn.made is not None:
            return MadeJob(self.stream, drawn.made)
        if self.plain.has_goals_among(draw, drawn.rows.large):
            return self.plain.start(draw, drawn)
        return _DeviceJob(self, draw, drawn)

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        if drawn.made is not None:
            return drawn.made.batch
        job = self.start(draw, drawn)
        job.work()
        return job.receive()

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        self.plain.keep(batches)
        self.blocks.most = max(self.blocks.most, batches + 1)
        if self._assembler is not None:
            self._assembler.most_blocks = max(self._assembler.most_blocks, batches + 1)

    @property
    def pinned_bytes(self) -> int:
        """See `Batches`."""
        with left(self._layouts_lock):
            heads = [layout.ring.nbytes for layout in self._layouts.values()]
        if self._assembler is not None:
            heads.append(self._assembler.pinned_bytes)
        return sum(heads) + sum(ring.nbytes for ring in list(self._rings.values()))

    def close(self) -> None:
        """Wait until the device has read everything; then end the threads, and release what is pinned."""
        with left(self._lock):
            for event, _ in self._under_way:
                self.stream.synchronize(event)
            self._under_way.clear()
        self._pinned = self._pinned[0], None
        if self._assembler is not None:
            self._assembler.close()
        if self._arenas is not None:
            self._arenas.close()
        if self._namer is not None:
            self._namer.pool.dismiss()

    def layout(self, rows: tuple[int, ...], cuts: dict[int, Cut | None], small: list[PackedField]) -> BatchLayout:
        """Return the layout of batches like this one."""
        key = (rows, tuple(cuts.items()), tuple((shown.shape, shown.array.dtype) for shown in small))
        if self._layouts_lock._is_owned():  # this thread was interrupted in it
            left(self._layouts_lock)
        with self._layouts_lock:
            layout = self._layouts.pop(key, None)
            if layout is None:
                leaves = self.schema.observation.leaves
                large = {position: (leaves[position], cut) for position, cut in cuts.items()}
                layout = BatchLayout(self.stream, self._kind_of, rows, large, small)
            self._layouts[key] = layout
            if len(self._layouts) > _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]  # the kind that was not used for longest
        return layout

    def cuts(self, rows: Rows) -> dict[int, Cut | None]:
        """Return how the large fields are cut into slices that can be named; None for one that is sent whole."""
        if self._namer is None or rows.places is None:
            return dict.fromkeys(rows.large)
        return {leaf: self._namer.cut(rows.places.records[field], field) for field, leaf in enumerate(rows.large)}

    def fill(self, job: _DeviceJob) -> None:
        """Bring all fields of a batch to its block."""
        if self._lock._is_owned():  # this thread was interrupted in it
            left(self._lock)
        with self._lock, self.stream.active():
            head = job.layout.next_head()
            used = [head.slot]
            self.stream.wait_for(job.free)
            while self._under_way and self.stream.has_passed(self._under_way[0][0]):
                self._under_way.popleft()
            try:
                self._send(job, head, used)
            except BaseException:
                self.stream.synchronize(
                    self.stream.record()
                )  # copies that C started may still read what is about to go
                raise
            job.ready = self.stream.record()
            if self._assembler is not None:
                self._assembler.behind = job.ready
            for slot in used:
                slot.read = job.ready
            if job.drawn.pinned is not None:
                self._under_way.append((job.ready, job.drawn))

    def _send(self, job: _DeviceJob, head: PinnedHead, used: list[StagingSlot]) -> None:
        """Send everything, the slowest first, and stack what is there."""
        layout = job.layout
        slices = []
        for leaf, cut in job.cuts.items():
            if cut is None:
                used.append(self._send_whole(job, leaf))
            elif job.count:
                slices.append(self._send_slices(job, leaf, cut, head, used))
        if slices:
            job.block[layout.names_first :].copy_(head.named, non_blocking=True)
            slices = [self._read_from_host(job, named) for named in slices]
        head.pack(job.small)
        job.block[layout.head_first : layout.names_first].copy_(head.fields, non_blocking=True)
        for named in slices:
            for move in layout.moves[named.leaf]:
                self._stack(job, named, move)

    def _staging(self, leaf: int, nbytes: int) -> StagingSlot:
        if leaf not in self._rings:
            self._rings[leaf] = StagingRing(self.stream)
        return self._rings[leaf].next_slot(nbytes)

    def _send_whole(self, job: _DeviceJob, leaf: int) -> StagingSlot:
        """Send both observations of a field as they are, where slices cannot be named or are cut in several ways."""
        pair = self.plain.observation_pair(job.drawn, leaf)
        nbytes = pair[0].nbytes
        slot = self._staging(leaf, 2 * nbytes)
        for position, (array, span) in enumerate(zip(pair, job.layout.large[leaf], strict=True)):
            first = position * nbytes
            slot.array[first : first + nbytes] = array.reshape(-1).view(np.uint8)
            job.block[span.first : span.end].copy_(slot.host[first : first + nbytes], non_blocking=True)
        return slot

    def _send_slices(
        self, job: _DeviceJob, leaf: int, cut: Cut, head: PinnedHead, used: list[StagingSlot]
    ) -> _NamedSlices:
        """Name the slices of one field, and send those that the device neither has nor can read by itself."""
        field, slice_bytes = job.large.index(leaf), cut[0] * cut[1]
        word = self._widest(slice_bytes)
        drawn, words = job.drawn, slice_bytes // word.itemsize
        there = None if drawn.on_device is None else drawn.on_device.fields.get(field)
        count = self._name(drawn, field, cut, head.names[leaf], None if there is None else there.bases)
        named = _NamedSlices(leaf, cut, count, word, words)
        if there is not None:
            return named._replace(source=there.slices.view(word).view(-1, words))
        namer, pinned, places = self._namer, drawn.pinned, drawn.rows.places
        if namer is None or places is None:
            raise DamageError("slices were to be named, but nothing names them here; report this")
        scratch = self._scratch.setdefault(leaf, DeviceScratch(self.stream))
        scratch.make_room(count * slice_bytes)
        if pinned is not None and namer.where(pinned.starts[field], slice_bytes, word.itemsize, head.places[leaf]):
            return named._replace(on_host=pinned.span)
        slot = self._staging(leaf, count * slice_bytes)
        used.append(slot)
        # Every wave is on its way as soon as it is copied or decoded. Torch sends the last one, so that it knows how
        # long the memory is read from.
        out = slot.array[: count * slice_bytes].reshape(count, slice_bytes)
        function, stream = self.stream.copy_function(namer.send_here)
        with self.stream.driver_context():
            sent = namer.collect(places, field, out, CopyPlan(function, scratch.memory.data_ptr(), stream))
        first, end = sent * slice_bytes, count * slice_bytes
        scratch.memory[first:end].copy_(slot.host[first:end], non_blocking=True)
        return named._replace(source=scratch.rows(word, words))

    def _name(
        self, drawn: DrawnRows, field: int, cut: Cut, names: tuple[Names, Names], bases: NDArray[np.int64] | None
    ) -> int:
        of_obs, of_next = names
        first, last = drawn.rows.places, None if drawn.last is None else drawn.last.places
        if self._namer is None or first is None:
            return 0
        self._namer.begin(0 if bases is not None else 2 * of_obs.size)
        if last is None:
            return self._namer.name(first, field, cut, of_obs, of_next, bases)
        self._namer.name(first, field, cut, of_obs, None, bases)
        return self._namer.name(last, field, cut, None, of_next, bases)

    def _read_from_host(self, job: _DeviceJob, named: _NamedSlices) -> _NamedSlices:
        """Let the device read slices where they lie on the host, if it has not got them."""
        word, words, span = named.word, named.words, named.on_host
        if span is None:
            return named
        known, rows = self._rows_on_host.get(named.leaf, (None, None))
        if known is not span:
            whole = span[: span.numel() // word.itemsize * word.itemsize].view(word)
            # A row begins with every word, so that one may begin wherever a slice does.
            rows = whole.as_strided((whole.numel() - words + 1, words), (1, 1))
            self._rows_on_host[named.leaf] = (span, rows)
        places = job.seen_as(self.torch.int64).as_strided((named.unique,), (1,), job.layout.places[named.leaf].offset)
        slices = self._scratch[named.leaf].rows(word, words)
        self.torch.index_select(rows, 0, places, out=slices[: named.unique])
        return named._replace(source=slices)

    def _stack(self, job: _DeviceJob, named: _NamedSlices, move: DeviceMove) -> None:
        """Put named slices side by side in the block, as windows."""
        (outer, run_bytes, window), source = named.cut, named.source
        if source is None:
            raise DamageError("slices were to be stacked before they were there; report this")
        names = job.seen_as(self.torch.int32).as_strided((move.names,), (1,), move.names_offset)
        word, words = named.word, named.words
        if outer == 1 or window == 1:
            place = move.first // word.itemsize
            out = job.seen_as(word).as_strided((move.names, words), (words, 1), place)
            self.torch.index_select(source, 0, names, out=out)
            return
        self._picked.make_room(move.nbytes)
        picked = self._picked.memory[: move.nbytes]
        self.torch.index_select(source, 0, names, out=picked.view(word).view(move.names, words))
        run = self._widest(run_bytes)
        shape = (-1, window, outer, run_bytes // run.itemsize)
        windows = job.block[move.first : move.first + move.nbytes].view(run).view(shape[0], outer, window, shape[3])
        windows.copy_(picked.view(run).view(shape).permute(0, 2, 1, 3))

    def _widest(self, nbytes: int) -> Any:
        """Return the widest dtype that divides `nbytes`: kernels move an element a thread, whatever is in it."""
        torch = self.torch
        words = (torch.complex128, torch.int64, torch.int32, torch.int16)
        return next((word for word in words if nbytes % word.itemsize == 0), torch.uint8)

    def _kind_of(self, dtype: np.dtype[Any]) -> torch.dtype:
        kind: torch.dtype = self.torch.from_numpy(np.empty(0, dtype)).dtype
        return kind


def _reads_all(readable: Readable) -> bool:
    """Whether the device may read all slices by itself: none is compressed, so far as is known here."""
    return not isinstance(readable, PinnedSnapshot) or readable.is_whole


class _DeviceJob:
    """One batch on its way to a device."""

    def __init__(self, batches: DeviceBatches, draw: Draw, drawn: DrawnRows) -> None:
        self._batches = batches
        self._draw = draw
        self.drawn = drawn
        self.ready: Any = None
        is_readable = drawn.on_device is not None or (drawn.pinned is not None and drawn.pinned.is_whole)
        self.is_quick = batches.stream.is_asynchronous and (is_readable or not drawn.rows.large)
        rows = drawn.rows
        last = drawn.last or rows
        self.large = rows.large
        self.count = len(rows.reward)
        self.cuts = batches.cuts(rows)
        obs = {leaf: pair[0] for leaf, pair in rows.small.items()}
        next_obs = {leaf: pair[1] for leaf, pair in last.small.items()}
        reward = batches.plain.relabel_goals(draw, drawn, obs, next_obs)
        self._small_leaves = list(obs)
        shape = draw.ids.shape
        fields = [*obs.values(), *next_obs.values(), *rows.action, *rows.extras]
        fields += [reward, last.terminated, last.truncated, last.ended]
        self.small = [PackedField(array, shape + array.shape[1:]) for array in fields]
        of_rows = (draw.weights, draw.discount, draw.mask)
        self.small += [PackedField(array, array.shape) for array in of_rows if array is not None]
        self.layout = batches.layout(shape, self.cuts, self.small)
        self.block = batches.blocks.take(self.layout.nbytes)
        self._seen_as: dict[Any, torch.Tensor] = {}
        self.free = batches.stream.record_consumer()

    def seen_as(self, dtype: Any) -> torch.Tensor:
        """See the whole block as elements of one dtype."""
        seen = self._seen_as.get(dtype)
        if seen is None:
            seen = self._seen_as[dtype] = self.block.view(dtype)
        return seen

    def work(self) -> None:
        """See `BatchJob`."""
        if self.drawn.on_device is None:
            self.drawn.fetch()
        self._batches.fill(self)

    def receive(self) -> Batch:
        """See `BatchJob`; the consumer's stream, not the host, waits for what is under way."""
        draw, schema = self._draw, self._batches.schema
        observed, acted, added = self._batches.nested
        self._batches.stream.let_consumer_wait(self.ready)
        small = iter([self._see(span) for span in self.layout.small])
        obs, next_obs = (self._observation(side, small) for side in (0, 1))
        return DeviceBatch(
            obs=observed(obs),
            action=acted([next(small) for _ in schema.action.leaves]),
            next_obs=observed(next_obs),
            extras=added([next(small) for _ in schema.extras.leaves]),
            reward=next(small),
            terminated=next(small),
            truncated=next(small),
            ended=next(small),
            ids=draw.ids,
            weights=next(small),
            discount=None if draw.discount is None else next(small),
            mask=None if draw.mask is None else next(small),
        )

    def _observation(self, side: int, small: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        leaves = {leaf: self._see(spans[side]) for leaf, spans in self.layout.large.items()}
        leaves.update((leaf, next(small)) for leaf in self._small_leaves)
        return [leaves[leaf] for leaf in range(len(leaves))]

    def _see(self, span: BlockSpan) -> torch.Tensor:
        return self.seen_as(span.kind).as_strided(span.shape, span.strides, span.offset)
