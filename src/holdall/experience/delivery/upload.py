"""Batches on a device: every slice is sent there once, and stacked there.

In:  a draw, and the rows of its ids.  Out: the batch, in tensors that look into one block on the device.
Invariant: in a steady state nothing is allocated and nobody waits for the device: copies and kernels
go over a line of their own, and the consumer's stream waits for them. What is uint8 travels as uint8.

    names of slices -> slices into pinned memory, wave by wave -> device -> index_select into the batch
                    -> or read by the device where they lie, if that is pinned

The bus begins with the first wave, and small fields are packed while it has the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.errors import DamageError
from holdall.experience.delivery.build import BatchBuilder, Job, Reading
from holdall.experience.delivery.device import Blocks, Line, Passage
from holdall.experience.delivery.layout import BatchLayout, Head, Move, Shown, Span
from holdall.experience.native_unique import Cut, Names, SliceNamer, Way
from holdall.experience.part import Places
from holdall.experience.store import Rows
from holdall.schema import Schema

if TYPE_CHECKING:
    import torch

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

    def __init__(self, schema: Schema, plain: BatchBuilder, line: Line, namer: SliceNamer | None, torch: Any) -> None:
        self.schema = schema
        self.plain = plain
        self.line = line
        self.blocks = Blocks(line)
        self.torch = torch
        self._namer = namer
        self._passages: list[dict[int, Passage]] = [{} for _ in range(_PASSAGES)]
        self._turn = 0
        self._under_way: deque[tuple[Any, Reading]] = deque()  # batches that the device reads from the host
        self._rows_on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by leaf: a span of arenas, and its rows
        self._scratch = line.device_bytes(0)
        self._lock = threading.Lock()
        self._layouts: dict[Any, BatchLayout] = {}
        self._layouts_lock = threading.Lock()

    def start(self, draw: Draw, reading: Reading) -> Job:
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

    def layout(self, rows: tuple[int, ...], cuts: dict[int, Cut | None], small: list[Shown]) -> BatchLayout:
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

    def _send(self, job: _DeviceJob, head: Head, passages: dict[int, Passage]) -> None:
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

    def _passage(self, leaf: int, passages: dict[int, Passage]) -> Passage:
        if leaf not in passages:
            passages[leaf] = Passage(self.line)
        return passages[leaf]

    def _send_slices(
        self, job: _DeviceJob, leaf: int, cut: Cut, head: Head, passages: dict[int, Passage]
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
        self, reading: Reading, field: int, cut: Cut, names: tuple[Names, Names], bases: NDArray[np.int64] | None
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

    def _bring(self, places: Places, field: int, body: Passage, count: int, slice_bytes: int) -> None:
        """Copy or decode all slices named into pinned memory, each wave on its way as soon as it is there.

        The last wave is torch's to send, so that it knows how long the memory is read from.
        """
        if self._namer is None:
            return
        out = body.array[: count * slice_bytes].reshape(count, slice_bytes)
        sender, stream = self.line.sender(self._namer.send_here)
        with self.line.sending():
            sent = self._namer.bring(places, field, out, Way(sender, body.device.data_ptr(), stream))
        body.send(sent * slice_bytes, count * slice_bytes)

    def _at_hand(self, job: _DeviceJob, named: _NamedSlices, passages: dict[int, Passage]) -> _NamedSlices:
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

    def _send_whole(self, job: _DeviceJob, leaf: int, passages: dict[int, Passage]) -> None:
        """Send both observations of a field as they are, where slices cannot be named or are cut in several ways."""
        body = self._passage(leaf, passages)
        pair = self.plain.observation_pair(job.reading, leaf)
        nbytes = pair[0].nbytes
        body.make_room(2 * nbytes)
        for position, (array, span) in enumerate(zip(pair, job.layout.large[leaf], strict=True)):
            first = position * nbytes
            body.array[first : first + nbytes] = array.reshape(-1).view(np.uint8)
            job.block[span.first : span.end].copy_(body.host[first : first + nbytes], non_blocking=True)

    def _move(self, job: _DeviceJob, named: _NamedSlices, move: Move) -> None:
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

    def __init__(self, builder: DeviceBuilder, draw: Draw, reading: Reading) -> None:
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
        self.small = [Shown(array, shape + array.shape[1:]) for array in fields]
        of_rows = (draw.weights, draw.discount, draw.mask)
        self.small += [Shown(array, array.shape) for array in of_rows if array is not None]
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

    def _see(self, span: Span) -> torch.Tensor:
        return self.seen_as(span.kind).as_strided(span.shape, span.strides, span.offset)
