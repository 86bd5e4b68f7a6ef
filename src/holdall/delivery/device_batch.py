"""Where every field of a batch lies in its block on a device: worked out once for all batches that look alike.

In:  shapes and dtypes.  Out: spans of the block, and pinned memory that lies as the end of it does.
Invariant: spans do not overlap, and each begins where any dtype may.

    block:  large observations, one field after another | small fields | names of slices | places of slices
    head:                                                 small fields | names of slices | places of slices

The head is pinned. Names and places are sent first, so that the bus is busy while small fields are packed; places
only tell of slices that the device reads on the host by itself.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.device import DeviceBlocks, DeviceStream, StagingBuffer
from holdall.delivery.host import ALIGNMENT_BYTES, BatchBuilder, BatchJob, DrawnRows
from holdall.errors import DamageError
from holdall.native import CopyPlan, Cut, Names, SliceNamer
from holdall.schema import Array, Leaf, Schema
from holdall.storage.slices import Places
from holdall.storage.store import Rows

if TYPE_CHECKING:
    import torch


_NAME, _PLACE = np.dtype(np.int32), np.dtype(np.int64)
_HEADS = 2
"""While one batch leaves its pinned memory, the next is put into the other's."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A field's place in a block, in bytes and as torch counts."""

    first: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # in elements
    dtype: np.dtype[Any]
    kind: torch.dtype  # the same, as torch calls it


class DeviceMove(NamedTuple):
    """Names in a block, and where in it the slices they name are to stand."""

    names_offset: int  # in names
    names: int
    first: int
    nbytes: int


class PackedField(NamedTuple):
    """An array whose bytes are sent, and the shape in which the batch shows them."""

    array: Array
    shape: tuple[int, ...]


class BatchLayout:
    """The layout of batches with the same fields, shapes and dtypes.

    Args:
        kind_of: Returns torch's name of a dtype.
        rows: The shape of a batch's ids.
        large: The leaves that lie in segments, by their position, and how each is cut; None for one that is not.
        small: All other fields.
    """

    def __init__(
        self,
        line: DeviceStream,
        kind_of: Callable[[np.dtype[Any]], torch.dtype],
        rows: tuple[int, ...],
        large: dict[int, tuple[Leaf, Cut | None]],
        small: Sequence[PackedField],
    ) -> None:
        self.nbytes = 0
        self._kind_of = kind_of
        self.large = {
            position: (self._add((*rows, *leaf.shape), leaf.dtype), self._add((*rows, *leaf.shape), leaf.dtype))
            for position, (leaf, _) in large.items()
        }
        self.head_first = self.nbytes
        self.small = [self._add(shown.shape, shown.array.dtype) for shown in small]
        self.names_first = self.nbytes
        count = math.prod(rows)
        cuts = {position: cut for position, (_, cut) in large.items() if cut is not None}
        self.names = {
            position: (self._add((count, cut[2]), _NAME), self._add((count, cut[2]), _NAME))
            for position, cut in cuts.items()
        }
        self.places = {position: self._add((2 * count * cut[2],), _PLACE) for position, cut in cuts.items()}
        self.moves = {position: _moves(self.names[position], self.large[position]) for position in cuts}
        shapes = [shown.array.shape for shown in small]
        self.heads = [PinnedHead(line, self, shapes) for _ in range(_HEADS)]

    def _add(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> BlockSpan:
        nbytes = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        first = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return BlockSpan(first, first + nbytes, shape, strides, first // dtype.itemsize, dtype, self._kind_of(dtype))


class PinnedHead:
    """Pinned memory for small fields and names; used by one batch at a time."""

    def __init__(self, line: DeviceStream, layout: BatchLayout, shapes: list[tuple[int, ...]]) -> None:
        self.host: torch.Tensor = line.host_bytes(layout.nbytes - layout.head_first)
        small_bytes = layout.names_first - layout.head_first
        self.fields, self.named = self.host[:small_bytes], self.host[small_bytes:]
        self.left: Any = None  # a mark behind the copy from here
        array = self.host.numpy()

        def seen(span: BlockSpan, shape: tuple[int, ...]) -> Array:
            piece: Array = array[span.first - layout.head_first : span.end - layout.head_first]
            return piece.view(span.dtype).reshape(shape)

        self.places: dict[int, NDArray[np.int64]] = {
            position: seen(span, span.shape) for position, span in layout.places.items()
        }
        self._small = [seen(span, shape) for span, shape in zip(layout.small, shapes, strict=True)]
        self.names: dict[int, tuple[Names, Names]] = {
            position: (seen(pair[0], pair[0].shape), seen(pair[1], pair[1].shape))
            for position, pair in layout.names.items()
        }

    def pack(self, fields: Sequence[PackedField]) -> None:
        """Copy the small fields to their places."""
        for place, shown in zip(self._small, fields, strict=True):
            place[...] = shown.array


def _moves(names: tuple[BlockSpan, BlockSpan], out: tuple[BlockSpan, BlockSpan]) -> list[DeviceMove]:
    """Tell which names go where: both observations at once, if neither names nor bytes have a gap in between."""
    pairs = [
        DeviceMove(named.offset, math.prod(named.shape), span.first, span.end - span.first)
        for named, span in zip(names, out, strict=True)
    ]
    if names[0].end == names[1].first and out[0].end == out[1].first:
        first, second = pairs
        return [DeviceMove(first.names_offset, first.names + second.names, first.first, first.nbytes + second.nbytes)]
    return pairs


_PASSAGES = 2
"""As many as a layout has heads."""
_KEPT_LAYOUTS = 8
"""Kinds of batches whose layouts are kept, with their pinned heads."""


class _NamedSlices(NamedTuple):
    """The slices of one field that a batch is made of, each once."""

    leaf: int
    cut: Cut
    unique: int
    word: torch.dtype
    words: int  # of a slice
    source: torch.Tensor | None = None  # on the device, as rows of words; None: the device is to read them ...
    on_host: torch.Tensor | None = None  # ... from here


class DeviceBuilder:
    """Makes batches on one device.

    Args:
        plain: Makes the same batches in arrays, and copies them over; goals that are images are told anew there.
        namer: Names slices; None where the loops for that were not compiled: observations then travel whole.
    """

    def __init__(
        self, schema: Schema, plain: BatchBuilder, line: DeviceStream, namer: SliceNamer | None, torch: Any
    ) -> None:
        self.schema = schema
        self.plain = plain
        self.line = line
        self.blocks = DeviceBlocks(line)
        self.torch = torch
        self._namer = namer
        self._passages: list[dict[int, StagingBuffer]] = [{} for _ in range(_PASSAGES)]
        self._turn = 0
        self._under_way: deque[tuple[Any, DrawnRows]] = deque()  # batches that the device reads from the host
        self._rows_on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by leaf: a span of arenas, and its rows
        self._scratch = line.device_bytes(0)
        self._lock = threading.Lock()
        self._layouts: dict[Any, BatchLayout] = {}
        self._layouts_lock = threading.Lock()

    def start(self, draw: Draw, reading: DrawnRows) -> BatchJob:
        """See `Builder`; the block is chosen here, behind all that the consumer asked the device for so far."""
        if draw.goals is not None and self.plain.goals_are_among(draw.goals, reading.rows.large):
            return self.plain.start(draw, reading)
        return _DeviceJob(self, draw, reading)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        with self._layouts_lock:
            heads = [head.host.numel() for layout in self._layouts.values() for head in layout.heads]
        return sum(heads) + sum(passage.nbytes for passages in self._passages for passage in passages.values())

    def layout(self, rows: tuple[int, ...], cuts: dict[int, Cut | None], small: list[PackedField]) -> BatchLayout:
        """Return the layout of batches like this one."""
        key = (rows, tuple(cuts.items()), tuple((shown.shape, shown.array.dtype) for shown in small))
        with self._layouts_lock:
            layout = self._layouts.pop(key, None)
            if layout is None:
                leaves = self.schema.observation.leaves
                large = {position: (leaves[position], cut) for position, cut in cuts.items()}
                layout = BatchLayout(self.line, self._kind_of, rows, large, small)
            self._layouts[key] = layout
            if len(self._layouts) > _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]  # the kind not asked for the longest
        return layout

    def cuts(self, rows: Rows) -> dict[int, Cut | None]:
        """Return how the large fields are cut into slices that can be named; None for one that travels whole."""
        if self._namer is None or rows.places is None:
            return dict.fromkeys(rows.large)
        return {leaf: self._namer.cut(rows.places, field) for field, leaf in enumerate(rows.large)}

    def fill(self, job: _DeviceJob) -> None:
        """Bring all fields of a batch to its block."""
        with self._lock, self.line.at_work():
            head, passages = job.layout.heads[self._turn], self._passages[self._turn]
            self._turn = (self._turn + 1) % _PASSAGES
            self.line.hold(job.free)
            if head.left is not None:
                self.line.wait(head.left)
            self._forget_passed()
            try:
                self._send(job, head, passages)
            except BaseException:
                self.line.wait(self.line.mark())  # copies that C started may still read what is about to go
                raise
            job.ready = head.left = self.line.mark()
            for leaf in job.cuts:
                if leaf in passages:
                    passages[leaf].left = job.ready
            if job.reading.pinned is not None:
                self._under_way.append((job.ready, job.reading))

    def _send(self, job: _DeviceJob, head: PinnedHead, passages: dict[int, StagingBuffer]) -> None:
        """Send everything, the slowest first, and stack what is there."""
        layout = job.layout
        slices = [
            self._send_slices(job, leaf, cut, head, passages)
            for leaf, cut in job.cuts.items()
            if cut is not None and job.count
        ]
        for leaf, cut in job.cuts.items():
            if cut is None:
                self._send_whole(job, leaf, passages)
        if slices:
            job.block[layout.names_first :].copy_(head.named, non_blocking=True)
            slices = [self._at_hand(job, named, passages) for named in slices]
        head.pack(job.small)
        job.block[layout.head_first : layout.names_first].copy_(head.fields, non_blocking=True)
        for named in slices:
            for move in layout.moves[named.leaf]:
                self._move(job, named, move)

    def _passage(self, leaf: int, passages: dict[int, StagingBuffer]) -> StagingBuffer:
        if leaf not in passages:
            passages[leaf] = StagingBuffer(self.line)
        return passages[leaf]

    def _send_slices(
        self, job: _DeviceJob, leaf: int, cut: Cut, head: PinnedHead, passages: dict[int, StagingBuffer]
    ) -> _NamedSlices:
        """Name the slices of one field, and send those that the device neither has nor can read by itself."""
        field, slice_bytes = job.large.index(leaf), cut[0] * cut[1]
        word = self._widest(slice_bytes)
        reading, words = job.reading, slice_bytes // word.itemsize
        there = None if reading.mirrored is None else reading.mirrored.fields.get(field)
        count = self._name(reading, field, cut, head.names[leaf], None if there is None else there.bases)
        named = _NamedSlices(leaf, cut, count, word, words)
        if there is not None:
            return named._replace(source=there.slices.view(word).view(-1, words))
        body, pinned = self._passage(leaf, passages), reading.pinned
        if self._namer is None or reading.rows.places is None:
            raise DamageError("slices were to be named, but nothing names them here; report this")
        if pinned is not None and self._namer.where(
            pinned.starts[field], slice_bytes, word.itemsize, head.places[leaf]
        ):
            body.make_room_there(count * slice_bytes)
            return named._replace(on_host=pinned.span)
        body.make_room(count * slice_bytes)
        self._bring(reading.rows.places, field, body, count, slice_bytes)
        return named._replace(source=body.rows(word, words))

    def _name(
        self, reading: DrawnRows, field: int, cut: Cut, names: tuple[Names, Names], bases: NDArray[np.int64] | None
    ) -> int:
        of_obs, of_next = names
        first, last = reading.rows.places, None if reading.last is None else reading.last.places
        if self._namer is None or first is None:
            return 0
        self._namer.begin(0 if bases is not None else 2 * of_obs.size)
        if last is None:
            return self._namer.name(first, field, cut, of_obs, of_next, bases)
        self._namer.name(first, field, cut, of_obs, None, bases)
        return self._namer.name(last, field, cut, None, of_next, bases)

    def _bring(self, places: Places, field: int, body: StagingBuffer, count: int, slice_bytes: int) -> None:
        """Copy or decode all slices named into pinned memory, each wave on its way as soon as it is there.

        The last wave is torch's to send, so that it knows how long the memory is read from.
        """
        if self._namer is None:
            return
        out = body.array[: count * slice_bytes].reshape(count, slice_bytes)
        sender, stream = self.line.sender(self._namer.send_here)
        with self.line.sending():
            sent = self._namer.collect(places, field, out, CopyPlan(sender, body.device.data_ptr(), stream))
        body.send(sent * slice_bytes, count * slice_bytes)

    def _at_hand(self, job: _DeviceJob, named: _NamedSlices, passages: dict[int, StagingBuffer]) -> _NamedSlices:
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
        slices = passages[named.leaf].rows(word, words)
        self.torch.index_select(rows, 0, places, out=slices[: named.unique])
        return named._replace(source=slices)

    def _forget_passed(self) -> None:
        """Let go of what the device has read."""
        while self._under_way and self.line.passed(self._under_way[0][0]):
            self._under_way.popleft()

    def finish(self) -> None:
        """Wait until the device has read all that it was asked to."""
        with self._lock:
            for mark, _ in self._under_way:
                self.line.wait(mark)
            self._under_way.clear()

    def _send_whole(self, job: _DeviceJob, leaf: int, passages: dict[int, StagingBuffer]) -> None:
        """Send both observations of a field as they are, where slices cannot be named or are cut in several ways."""
        body = self._passage(leaf, passages)
        pair = self.plain.observation_pair(job.reading, leaf)
        nbytes = pair[0].nbytes
        body.make_room(2 * nbytes)
        for position, (array, span) in enumerate(zip(pair, job.layout.large[leaf], strict=True)):
            first = position * nbytes
            body.array[first : first + nbytes] = array.reshape(-1).view(np.uint8)
            job.block[span.first : span.end].copy_(body.host[first : first + nbytes], non_blocking=True)

    def _move(self, job: _DeviceJob, named: _NamedSlices, move: DeviceMove) -> None:
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
        if self._scratch.numel() < move.nbytes:
            self._scratch = self.line.device_bytes(move.nbytes)
        picked = self._scratch[: move.nbytes]
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


class _DeviceJob:
    """One batch on its way to a device."""

    def __init__(self, builder: DeviceBuilder, draw: Draw, reading: DrawnRows) -> None:
        self._builder = builder
        self._draw = draw
        self.reading = reading
        self.ready: Any = None
        is_at_hand = reading.mirrored is not None or (reading.pinned is not None and reading.pinned.is_whole)
        self.is_quick = builder.line.works_alone and (is_at_hand or not reading.rows.large)
        rows = reading.rows
        last = reading.last or rows
        self.large = rows.large
        self.count = len(rows.reward)
        self.cuts = builder.cuts(rows)
        obs = {leaf: pair[0] for leaf, pair in rows.small.items()}
        next_obs = {leaf: pair[1] for leaf, pair in last.small.items()}
        reward = rows.reward if draw.reward is None else draw.reward
        if draw.goals is not None and reading.outcomes is not None and draw.goals.rows.size:
            builder.plain.tell_anew(draw.goals, reading.outcomes, obs, next_obs, reward, rows.extras)
        self._small_leaves = list(obs)
        shape = draw.ids.shape
        fields = [*obs.values(), *next_obs.values(), *rows.action, *rows.extras]
        fields += [reward, last.terminated, last.truncated]
        self.small = [PackedField(array, shape + array.shape[1:]) for array in fields]
        of_rows = (draw.weights, draw.discount, draw.mask)
        self.small += [PackedField(array, array.shape) for array in of_rows if array is not None]
        self.layout = builder.layout(shape, self.cuts, self.small)
        self.block = builder.blocks.take(self.layout.nbytes)
        self._seen_as: dict[Any, torch.Tensor] = {}
        self.free = builder.line.mark_consumer()

    def seen_as(self, dtype: Any) -> torch.Tensor:
        """See the whole block as elements of one dtype."""
        seen = self._seen_as.get(dtype)
        if seen is None:
            seen = self._seen_as[dtype] = self.block.view(dtype)
        return seen

    def work(self) -> None:
        """See `Job`."""
        if self.reading.mirrored is None:
            self.reading.bring()
        self._builder.fill(self)

    def receive(self) -> Batch:
        """See `Job`; the consumer's stream, not the host, waits for what is under way."""
        builder, draw, schema = self._builder, self._draw, self._builder.schema
        builder.line.hold_consumer(self.ready)
        small = iter([self._see(span) for span in self.layout.small])
        obs, next_obs = (self._observation(side, small) for side in (0, 1))
        return Batch(
            obs=schema.observation.build(obs),
            action=schema.action.build([next(small) for _ in schema.action.leaves]),
            next_obs=schema.observation.build(next_obs),
            extras=schema.extras.build([next(small) for _ in schema.extras.leaves]),
            reward=next(small),
            terminated=next(small),
            truncated=next(small),
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
