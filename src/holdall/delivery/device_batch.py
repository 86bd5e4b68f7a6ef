"""Batches on a device: unique slices are sent once, and stacked there.

In:  draws.  Out: batches whose tensors are views of one block on the device.
Invariant: the host never waits for the device, but for pinned memory that it writes to again. A block is used again
only when no tensor of it is left, and only after everything that the consumer asked for before.

What the device can read by itself it puts together by itself, see `device_assembly`. Of all else, the names of slices
are sent first, so that the bus is busy while small fields are packed.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_safe, left
from holdall.batch import Batch, Draw
from holdall.delivery.batch_layout import (
    KEPT_BLOCKS,
    BatchPlan,
    DeviceBlock,
    DeviceMove,
    PackedField,
    PinnedHead,
    SentLayout,
)
from holdall.delivery.batches import Batches, BatchJob, DrawnRows, HostBatches, MadeBatch, ReadyJob, goal_leaves
from holdall.delivery.device import DeviceScratch, DeviceStream, StagingRing, StagingSlot
from holdall.delivery.device_assembly import DeviceAssembler, SlotDraw
from holdall.delivery.pinned_arenas import PinnedArenas, PinnedSlices
from holdall.errors import DamageError
from holdall.native import CopyPlan, Cut, Names, SliceNamer
from holdall.sampling import Uniform
from holdall.schema import Array, Schema
from holdall.storage import Kernels, Rows, Store

if TYPE_CHECKING:
    import torch


_KEPT_LAYOUTS = 8
"""Kinds of batches whose layouts are kept, with their pinned heads."""


class _NamedSlices(NamedTuple):
    """The slices of one field that a batch is made of, each once."""

    leaf: int
    cut: Cut
    source: torch.Tensor  # on the device, as rows of words


class DeviceBatches(Batches):
    """Makes batches on one device.

    Args:
        plain: Makes the same batches in arrays.
        kernels: Where the loops that name slices are not compiled, observations are sent whole.
    """

    def __init__(
        self, schema: Schema, plain: HostBatches, stream: DeviceStream, kernels: Kernels, torch: Any, pins: bool
    ) -> None:
        self.schema, self.plain, self.stream, self.torch = schema, plain, stream, torch
        self._namer: SliceNamer | None = kernels.namer()
        self._assembler = DeviceAssembler.of(torch, stream, schema, self._namer)
        self._arenas = PinnedArenas(stream) if self._assembler is not None and pins else None
        self._pinned: tuple[int, PinnedSlices | None] = -1, None  # by the version of the segments
        self._most_blocks = KEPT_BLOCKS
        self._rings: dict[int, StagingRing[StagingSlot]] = {}  # by leaf
        self._scratch: dict[int, DeviceScratch] = {}  # by leaf: its unique slices, before they are stacked
        self._picked = DeviceScratch(stream)
        self._lock: Any = fork_safe(threading.RLock())
        self._layouts: dict[Any, SentLayout] = {}
        self._layouts_lock: Any = fork_safe(threading.RLock())

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """See `Batches`: rows of a `Uniform` sampler, once a batch of so many rows was made."""
        held = store.held
        if type(sampler) is not Uniform or held[1] - held[0] < count:
            return None
        if (found := self._plain_plan(count, store)) is None:
            return None
        assembler, plan = found
        made = assembler.assemble_plain(plan, held, generator.integers(*held, size=count), ahead=False)
        return made.batch if isinstance(made, MadeBatch) else self._begin_otherwise(made, store).receive()

    def draw_slots(self, rows: SlotDraw, count: int, store: Store, *, ahead: bool) -> BatchJob | None:
        """Draw rows as `draw_slots` of `holdall.native` does, and begin a batch of them, if it can be made at once."""
        lanes, held = self.schema.num_envs, store.held
        if rows.filled == rows.slots:
            is_filled = held[1] - held[0] >= rows.slots * lanes
        else:
            is_filled = held == (0, rows.filled * lanes)
        if not is_filled or (found := self._plain_plan(count, store)) is None:
            return None
        assembler, plan = found
        made = assembler.assemble_plain(plan, held, rows, ahead=ahead)
        if isinstance(made, MadeBatch):
            return ReadyJob(partial(self.hand_over, made))
        return self._begin_otherwise(made, store)

    def _plain_plan(self, count: int, store: Store) -> tuple[DeviceAssembler, BatchPlan] | None:
        """Return the plan of batches of so many rows, if there is one and the device fetches them by itself."""
        found = self._fetches(store)
        plan = None if found is None else found[0].plain_plan(store, found[1], count)
        return None if found is None or plan is None else (found[0], plan)

    def _begin_otherwise(self, ids: NDArray[np.int64], store: Store) -> BatchJob:
        """Begin a batch of rows that the device cannot fetch by itself."""
        draw = Draw(ids, np.ones(len(ids), np.float32))
        (job := self.start(draw, self.plain.look_up(draw, store))).work()
        return job

    def _fetches(self, store: Store) -> tuple[DeviceAssembler, PinnedSlices | None] | None:
        """Return what has the device fetch rows by itself, and where it reads slices; None where it cannot."""
        assembler, segments, found = self._assembler, store.large_segments, None
        if assembler is None:
            return None
        if self._arenas is not None:
            if segments.index.version != self._pinned[0]:  # arenas are looked at again when segments are others
                self._pinned = -1, None  # this one keeps no arena pinned
                self._pinned = segments.index.version, self._arenas.up_to_date(store)
            found = self._pinned[1]
        return None if found is None and segments.cursors else (assembler, found)

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`."""
        made = None
        if (found := self._fetches(store)) is not None:
            made = found[0].assemble(draw, store, found[1], ahead=ahead)
            if made is not None and draw.goals is None:
                return DrawnRows.of_made(*made)
        return self.plain.look_up(draw, store)._replace(made=made)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`; the block is chosen here, behind everything that the consumer asked the device for."""
        goals = () if draw.goals is None else self._other_goals(draw, drawn)
        if drawn.made is None:
            return _DeviceJob(self, draw, drawn, goals)
        return ReadyJob(partial(self.hand_over, drawn.made, draw, goals))

    def _other_goals(self, draw: Draw, drawn: DrawnRows) -> tuple[Array, ...]:
        """Return goals, those of next observations and rewards of a draw, of which the caller's function is asked."""
        if draw.goals is None:
            return ()
        leaves = goal_leaves(self.schema, draw.goals)
        if not drawn.rows.small.keys() >= set(leaves):
            drawn.fetch()
        pairs = {leaf: self.plain.observation_pair(drawn, leaf) for leaf in leaves}
        obs, next_obs = ({leaf: pair[side] for leaf, pair in pairs.items()} for side in (0, 1))
        reward = self.plain.relabel_goals(draw, drawn, obs, next_obs)
        return obs[leaves[1]], next_obs[leaves[1]], reward

    def hand_over(self, made: MadeBatch, draw: Draw | None = None, goals: tuple[Array, ...] = ()) -> Batch:
        """Return a batch to its consumer, whose stream, not the host, waits for what is under way."""
        batch, ready = made
        if ready is not None:
            self.stream.let_consumer_wait(ready)
        if draw is not None and draw.goals is not None:
            key = draw.goals.desired_key
            for tensor, rows in zip((batch.obs[key], batch.next_obs[key], batch.reward), goals, strict=True):
                tensor.copy_(self.torch.from_numpy(rows).view(tensor.shape), non_blocking=True)
        return batch

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        made = drawn.made
        return made.batch if made is not None and draw.goals is None else super().make(draw, drawn)

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        self.plain.keep(batches)
        self._most_blocks = max(self._most_blocks, batches + 1)
        if self._assembler is not None:
            self._assembler.most_blocks = self._most_blocks

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
        self._pinned = self._pinned[0], None
        if self._assembler is not None:
            self._assembler.close()
        if self._arenas is not None:
            self._arenas.close()
        if self._namer is not None:
            self._namer.pool.dismiss()

    def room_for(
        self, draw: Draw, cuts: dict[int, Cut | None], small: list[PackedField]
    ) -> tuple[SentLayout, Any, Any]:
        """Return the layout of such batches, a block that nobody else can see, and the batch in it."""
        rows = draw.ids.shape
        key = (rows, tuple(cuts.items()), tuple((field.name, field.shape, field.array.dtype) for field in small))
        if self._layouts_lock._is_owned():  # this thread was interrupted in it
            left(self._layouts_lock)
        with self._layouts_lock:
            layout = self._layouts.pop(key, None)
            if layout is None:
                layout = SentLayout(self.torch, self.schema, self.stream, rows, cuts, small)
            self._layouts[key] = layout
            if len(self._layouts) > _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]  # the kind that was not used for longest
            block = layout.free_block(self.stream, self._most_blocks)
            return layout, block, layout.batch(draw.ids, block)

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
            try:
                self._send(job, head, used)
            except BaseException:
                self.stream.synchronize(self.stream.record())  # copies that C started may still read what goes now
                raise
            job.ready = self.stream.record()
            if self._assembler is not None:
                self._assembler.behind = job.ready
            for slot in used:
                slot.read = job.ready

    def _send(self, job: _DeviceJob, head: PinnedHead, used: list[StagingSlot]) -> None:
        """Send everything, the slowest first, and stack what is there."""
        layout, block = job.layout, job.block.memory
        slices = []
        for leaf, cut in job.cuts.items():
            if cut is None:
                used.append(self._send_whole(job, leaf))
            elif job.count:
                slices.append(self._send_slices(job, leaf, cut, head, used))
        if slices:
            block[layout.names_first :].copy_(head.named, non_blocking=True)
        for place, field in zip(head.small, job.small, strict=True):
            place[...] = field.array
        block[layout.head_first : layout.names_first].copy_(head.fields, non_blocking=True)
        for named in slices:
            for move in layout.moves[named.leaf]:
                self._stack(block, named, move)

    def _staging(self, leaf: int, nbytes: int) -> StagingSlot:
        if leaf not in self._rings:
            self._rings[leaf] = StagingRing(self.stream, StagingSlot)
        return self._rings[leaf].next_slot(nbytes)

    def _send_whole(self, job: _DeviceJob, leaf: int) -> StagingSlot:
        """Send both observations of a field as they are, where slices cannot be named or are cut in several ways."""
        pair = self.plain.observation_pair(job.drawn, leaf)
        nbytes = pair[0].nbytes
        slot = self._staging(leaf, 2 * nbytes)
        for position, (array, span) in enumerate(zip(pair, job.layout.large[leaf], strict=True)):
            first = position * nbytes
            slot.array[first : first + nbytes] = array.reshape(-1).view(np.uint8)
            there = job.block.memory[span.first : span.first + span.nbytes]
            there.copy_(slot.host[first : first + nbytes], non_blocking=True)
        return slot

    def _send_slices(
        self, job: _DeviceJob, leaf: int, cut: Cut, head: PinnedHead, used: list[StagingSlot]
    ) -> _NamedSlices:
        """Name the slices of one field, and send each of them once."""
        drawn, field, slice_bytes = job.drawn, job.drawn.rows.large.index(leaf), cut[0] * cut[1]
        namer, places = self._namer, drawn.rows.places
        if namer is None or places is None:
            raise DamageError("slices were to be named, but nothing names them here; report this")
        count = self._name(namer, drawn, field, cut, head.names[leaf])
        nbytes = count * slice_bytes
        scratch = self._scratch.setdefault(leaf, DeviceScratch(self.stream))
        scratch.make_room(nbytes)
        slot = self._staging(leaf, nbytes)
        used.append(slot)
        # Every wave is on its way as soon as it is copied or decoded. Torch sends the last one, so that it knows how
        # long the memory is read from.
        out = slot.array[:nbytes].reshape(count, slice_bytes)
        function, stream = self.stream.copy_function(namer.send_here)
        with self.stream.driver_context():
            sent = namer.collect(places, field, out, CopyPlan(function, scratch.memory.data_ptr(), stream))
        first = sent * slice_bytes
        scratch.memory[first:nbytes].copy_(slot.host[first:nbytes], non_blocking=True)
        word = self._widest(slice_bytes)
        return _NamedSlices(leaf, cut, scratch.rows(word, slice_bytes // word.itemsize))

    @staticmethod
    def _name(namer: SliceNamer, drawn: DrawnRows, field: int, cut: Cut, names: tuple[Names, Names]) -> int:
        of_obs, of_next = names
        first, last = drawn.rows.places, None if drawn.last is None else drawn.last.places
        if first is None:
            return 0
        namer.begin(2 * of_obs.size)
        if last is None:
            return namer.name(first, field, cut, of_obs, of_next)
        namer.name(first, field, cut, of_obs, None)
        return namer.name(last, field, cut, None, of_next)

    def _stack(self, block: torch.Tensor, named: _NamedSlices, move: DeviceMove) -> None:
        """Put named slices side by side in a block, as windows."""
        (outer, run_bytes, window), source = named.cut, named.source
        names, out = move.names.of(block), block[move.first : move.first + move.nbytes]
        if outer == 1 or window == 1:
            self.torch.index_select(source, 0, names, out=out.view(source.dtype).view(-1, source.shape[1]))
            return
        self._picked.make_room(move.nbytes)
        picked = self._picked.memory[: move.nbytes]
        self.torch.index_select(source, 0, names, out=picked.view(source.dtype).view(-1, source.shape[1]))
        run = self._widest(run_bytes)
        shape = (-1, window, outer, run_bytes // run.itemsize)
        windows = out.view(run).view(shape[0], outer, window, shape[3])
        windows.copy_(picked.view(run).view(shape).permute(0, 2, 1, 3))

    def _widest(self, nbytes: int) -> Any:
        """Return the widest dtype that divides `nbytes`: kernels move an element a thread, whatever is in it."""
        torch = self.torch
        words = (torch.complex128, torch.int64, torch.int32, torch.int16)
        return next((word for word in words if nbytes % word.itemsize == 0), torch.uint8)


class _DeviceJob(BatchJob):
    """One batch on its way to a device."""

    def __init__(self, batches: DeviceBatches, draw: Draw, drawn: DrawnRows, goals: tuple[Array, ...]) -> None:
        self._batches, self._draw, self._goals = batches, draw, goals
        self.drawn, rows, last = drawn, drawn.rows, drawn.last or drawn.rows
        self.ready: Any = None
        self.is_quick = batches.stream.is_asynchronous and not rows.large
        self.count = len(rows.reward)
        self.cuts = batches.cuts(rows)
        of_rows = {
            "obs": [rows.small[leaf][0] for leaf in sorted(rows.small)],
            "next_obs": [last.small[leaf][1] for leaf in sorted(last.small)],
            "action": rows.action,
            "extras": rows.extras,
            "reward": [rows.reward if draw.reward is None else draw.reward],
            "terminated": [last.terminated],
            "truncated": [last.truncated],
            "ended": [last.ended],
        }
        shape = draw.ids.shape
        self.small = [PackedField(name, a, shape + a.shape[1:]) for name, arrays in of_rows.items() for a in arrays]
        of_draw = {name: getattr(draw, name) for name in ("weights", "discount", "mask")}
        self.small += [PackedField(name, array, array.shape) for name, array in of_draw.items() if array is not None]
        self.layout: SentLayout
        self.block: DeviceBlock
        self.layout, self.block, self._batch = batches.room_for(draw, self.cuts, self.small)
        self.free = batches.stream.record_consumer()

    def work(self) -> None:
        """See `BatchJob`."""
        self.drawn.fetch()
        self._batches.fill(self)

    def receive(self) -> Batch:
        """See `BatchJob`."""
        return self._batches.hand_over(MadeBatch(super().receive(), self.ready), self._draw, self._goals)
