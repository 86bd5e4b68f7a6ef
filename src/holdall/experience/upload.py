"""Batches on a device: every slice is sent there once, and stacked there.

In:  a draw, and the rows of its ids.  Out: the batch, in tensors that look into one block on the device.
Invariant: in a steady state nothing is allocated and nobody waits for the device: copies and kernels
go over a line of their own, and the consumer's stream waits for them. What is uint8 travels as uint8.

    names of slices -> slices into pinned memory, piece by piece -> device -> index_select into the batch
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.experience.assemble import ALIGNMENT_BYTES
from holdall.experience.build import BatchBuilder, Job, Reading
from holdall.experience.crew import Crew
from holdall.experience.device import Blocks, Line, Passage
from holdall.experience.native_unique import Cut, Names, SliceNamer
from holdall.experience.store import Rows
from holdall.schema import Array, Schema

if TYPE_CHECKING:
    import torch

_NAME = np.dtype(np.int32)
_PASSAGES = 2
"""While one batch leaves its pinned memory, the next is put into the other's."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a field of a batch lies in its block."""

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.first + self.nbytes


class _Layout:
    """Spans one after another, each where any dtype may begin."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Span:
        span = _Span(self.nbytes, shape, dtype)
        self.nbytes += -(-span.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return span


class DeviceBuilder:
    """Makes batches on one device.

    Args:
        plain: Makes the same batches in arrays, and copies them over; goals that are images are told anew there.
        namer: Names slices; None where the loops for that were not compiled: observations then travel whole.
    """

    def __init__(
        self,
        schema: Schema,
        plain: BatchBuilder,
        line: Line,
        namer: SliceNamer | None,
        crew: Crew,
        torch: Any,
    ) -> None:
        self.schema = schema
        self.plain = plain
        self.line = line
        self.blocks = Blocks(line)
        self.torch = torch
        self._namer = namer
        self._crew = crew
        self._passages: list[dict[int, Passage]] = [{} for _ in range(_PASSAGES)]
        self._turn = 0
        self._under_way: deque[tuple[Any, Reading]] = deque()  # batches that the device reads from the host
        self._scratch = line.device_bytes(0)
        self._lock = threading.Lock()
        self._dtypes: dict[np.dtype[Any], Any] = {}

    def start(self, draw: Draw, reading: Reading) -> Job:
        """See `Builder`; the block is chosen here, behind all that the consumer asked the device for so far."""
        if draw.goals is not None and self.plain.goals_are_among(draw.goals, reading.rows.large):
            return self.plain.start(draw, reading)
        return _DeviceJob(self, draw, reading)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(passage.nbytes for passages in self._passages for passage in passages.values())

    def fill(self, job: _DeviceJob) -> None:
        """Bring all fields of a batch to its block."""
        with self._lock, self.line.at_work():
            self.line.hold(job.free)
            self._forget_passed()
            cuts = {leaf: self._cut(job.reading.rows, leaf) for leaf in job.large}
            count = len(job.reading.rows.reward)
            names = _Layout()
            names.add((job.small_bytes,), np.dtype(np.uint8))
            spans = {leaf: [names.add((count, cut[2]), _NAME) for _ in range(2)] for leaf, cut in cuts.items() if cut}
            head = self._passage(-1)
            head.make_room(names.nbytes)
            for leaf, cut in cuts.items():
                if cut is None:
                    self._send_whole(job, leaf, self._passage(leaf))
                else:
                    self._send_slices(job, leaf, cut, head, spans[leaf])
            self._send_small(job, head)  # packed while the large ones are on the bus
            head.leave()
            self._turn = (self._turn + 1) % _PASSAGES
            job.ready = self.line.mark()

    def _passage(self, leaf: int) -> Passage:
        """Return the pinned memory of one field whose turn it is; that of small fields and names is -1."""
        passages = self._passages[self._turn]
        if leaf not in passages:
            passages[leaf] = Passage(self.line)
        return passages[leaf]

    def _cut(self, rows: Rows, leaf: int) -> Cut | None:
        """Return how a field is cut into slices that can be named."""
        if self._namer is None or rows.places is None:
            return None
        return self._namer.cut(rows.places, rows.large.index(leaf))

    def _send_small(self, job: _DeviceJob, head: Passage) -> None:
        """Pack the small fields as they lie in the block, and send them there in one go."""
        for span, array in job.small:
            first = span.first - job.small_first
            head.array[first : first + span.nbytes] = array.reshape(-1).view(np.uint8)
        block = job.block[job.small_first : job.small_first + job.small_bytes]
        block.copy_(head.host[: job.small_bytes], non_blocking=True)

    def _send_slices(self, job: _DeviceJob, leaf: int, cut: Cut, head: Passage, spans: list[_Span]) -> None:
        """Name the slices of one field, send those that are not there yet, and stack them."""
        field = job.reading.rows.large.index(leaf)
        of_obs, of_next = (head.array[s.first : s.end].view(np.int32).reshape(s.shape) for s in spans)
        there = None if job.reading.mirrored is None else job.reading.mirrored.fields.get(field)
        count = self._name(job.reading, field, cut, of_obs, of_next, None if there is None else there.bases)
        head.send(spans[0].first, spans[1].end)
        if there is None:
            source = self._let_read(job.reading, field, cut, count, leaf)
            if source is None:
                source = self._send_named(job.reading, field, cut, count, self._passage(leaf))
        else:
            source = there.slices
        for span, named in zip(job.spans[leaf], spans, strict=True):
            picked = head.device[named.first : named.end].view(self.torch.int32)
            self._stack(source, picked, job.block[span.first : span.end], cut)

    def _name(
        self, reading: Reading, field: int, cut: Cut, of_obs: Names, of_next: Names, bases: NDArray[np.int64] | None
    ) -> int:
        first, last = reading.rows.places, None if reading.last is None else reading.last.places
        if self._namer is None or first is None:
            return 0
        self._namer.begin(0 if bases is not None else 2 * of_obs.size)
        if last is None:
            return self._namer.name(first, field, cut, of_obs, of_next, bases)
        self._namer.name(first, field, cut, of_obs, None, bases)
        return self._namer.name(last, field, cut, None, of_next, bases)

    def _let_read(self, reading: Reading, field: int, cut: Cut, count: int, leaf: int) -> torch.Tensor | None:
        """Let the device read all slices named where they lie on the host; None if some cannot be read there."""
        slice_bytes = cut[0] * cut[1]
        word = self._widest(slice_bytes)
        if self._namer is None or reading.pinned is None or not count:
            return None
        where = self._namer.where(reading.pinned.starts[field], slice_bytes)
        if where is None:
            return None
        body, route = self._passage(leaf), self._passage(-2 - leaf)
        route.make_room(where.nbytes)
        route.array[: where.nbytes].view(np.int64)[:] = where // word.itemsize
        route.send(0, where.nbytes)
        route.leave()
        body.make_room_there(count * slice_bytes)
        out = body.device[: count * slice_bytes]
        span, width = reading.pinned.span, slice_bytes // word.itemsize
        words = span[: span.numel() // word.itemsize * word.itemsize].view(word)
        # A row begins with every word, so that one may begin wherever a slice does.
        rows = words.as_strided((words.numel() - width + 1, width), (1, 1))
        places = route.device[: where.nbytes].view(self.torch.int64)
        self.torch.index_select(rows, 0, places, out=out.view(word).view(count, width))
        self._under_way.append((self.line.mark(), reading))
        return out

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

    def _send_named(self, reading: Reading, field: int, cut: Cut, count: int, body: Passage) -> torch.Tensor:
        """Copy or decode all slices named into pinned memory, each piece on its way as soon as it is there."""
        slice_bytes = cut[0] * cut[1]
        body.make_room(count * slice_bytes)

        def send(first: int, end: int) -> None:
            with self.line.at_work():
                body.send(first * slice_bytes, end * slice_bytes)

        if self._namer is not None and reading.rows.places is not None:
            out = body.array[: count * slice_bytes].reshape(count, slice_bytes)
            self._namer.fetch(reading.rows.places, field, out, self._crew, send)
        body.leave()
        return body.device[: count * slice_bytes]

    def _send_whole(self, job: _DeviceJob, leaf: int, body: Passage) -> None:
        """Send both observations of a field as they are, where slices cannot be named or are cut in several ways."""
        pair = self.plain.observation_pair(job.reading, leaf)
        nbytes = pair[0].nbytes
        body.make_room(2 * nbytes)
        for position, (array, span) in enumerate(zip(pair, job.spans[leaf], strict=True)):
            first = position * nbytes
            body.array[first : first + nbytes] = array.reshape(-1).view(np.uint8)
            job.block[span.first : span.end].copy_(body.host[first : first + nbytes], non_blocking=True)
        body.leave()

    def _stack(self, source: torch.Tensor, names: torch.Tensor, out: torch.Tensor, cut: Cut) -> None:
        """Put the named slices of `source` side by side in `out`, as windows."""
        outer, run_bytes, window = cut
        slice_bytes = outer * run_bytes
        if slice_bytes == 0 or names.numel() == 0:
            return
        word = self._widest(slice_bytes)
        slices = source.view(word).view(-1, slice_bytes // word.itemsize)
        flat = outer == 1 or window == 1
        if not flat and self._scratch.numel() < out.numel():
            self._scratch = self.line.device_bytes(out.numel())
        picked = (out if flat else self._scratch[: out.numel()]).view(word).view(names.numel(), -1)
        self.torch.index_select(slices, 0, names, out=picked)
        if not flat:
            run = self._widest(run_bytes)
            shape = (-1, window, outer, run_bytes // run.itemsize)
            windows = out.view(run).view(shape[0], outer, window, shape[3])
            windows.copy_(picked.view(run).view(shape).permute(0, 2, 1, 3))

    def _widest(self, nbytes: int) -> Any:
        """Return the widest dtype that divides `nbytes`: kernels move an element a thread, whatever is in it."""
        torch = self.torch
        words = (torch.complex128, torch.int64, torch.int32, torch.int16)
        return next((word for word in words if nbytes % word.itemsize == 0), torch.uint8)

    def dtype_of(self, dtype: np.dtype[Any]) -> Any:
        """Return torch's name of a dtype."""
        if dtype not in self._dtypes:
            self._dtypes[dtype] = self.torch.from_numpy(np.empty(0, dtype)).dtype
        return self._dtypes[dtype]


class _Window:
    """A block seen as what lies in it; one view a dtype, and one a field."""

    def __init__(self, builder: DeviceBuilder, block: torch.Tensor) -> None:
        self._builder = builder
        self._block = block
        self._by_dtype: dict[np.dtype[Any], torch.Tensor] = {}

    def see(self, span: _Span, leading: tuple[int, ...]) -> torch.Tensor:
        """Return one field, its first axis replaced by the axes of a batch."""
        flat = self._by_dtype.get(span.dtype)
        if flat is None:
            flat = self._by_dtype[span.dtype] = self._block.view(self._builder.dtype_of(span.dtype))
        shape = (*leading, *span.shape[1:])
        return flat.as_strided(shape, _strides(shape), span.first // span.dtype.itemsize)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array without gaps."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class _DeviceJob:
    """One batch on its way to a device."""

    def __init__(self, builder: DeviceBuilder, draw: Draw, reading: Reading) -> None:
        self._builder = builder
        self._draw = draw
        self.reading = reading
        self.ready: Any = None
        rows, leaves = reading.rows, builder.schema.observation.leaves
        last = reading.last or rows
        self.large = rows.large
        layout = _Layout()
        count = len(rows.reward)
        self.spans = {
            leaf: tuple(layout.add((count, *leaves[leaf].shape), leaves[leaf].dtype) for _ in range(2))
            for leaf in self.large
        }
        self.small_first = layout.nbytes
        self.small: list[tuple[_Span, Array]] = []
        self._layout = layout
        obs = {leaf: pair[0] for leaf, pair in rows.small.items()}
        next_obs = {leaf: pair[1] for leaf, pair in last.small.items()}
        reward = rows.reward if draw.reward is None else draw.reward
        if draw.goals is not None and reading.outcomes is not None and draw.goals.rows.size:
            builder.plain.tell_anew(draw.goals, reading.outcomes, obs, next_obs, reward, rows.extras)
        self._obs = {leaf: self._put(array) for leaf, array in obs.items()}
        self._next_obs = {leaf: self._put(array) for leaf, array in next_obs.items()}
        self._action = [self._put(array) for array in rows.action]
        self._extras = [self._put(array) for array in rows.extras]
        self._reward, self._terminated, self._truncated, self._weights = (
            self._put(array) for array in (reward, last.terminated, last.truncated, draw.weights)
        )
        self._discount = None if draw.discount is None else self._put(draw.discount)
        self._mask = None if draw.mask is None else self._put(draw.mask)
        self.small_bytes = layout.nbytes - self.small_first
        self.block = builder.blocks.take(layout.nbytes)
        self.free = builder.line.mark_consumer()

    def _put(self, array: Array) -> _Span:
        span = self._layout.add(array.shape, array.dtype)
        self.small.append((span, np.ascontiguousarray(array)))
        return span

    def work(self) -> None:
        """See `Job`."""
        self._builder.fill(self)

    def receive(self) -> Batch:
        """See `Job`; the consumer's stream, not the host, waits for what is under way."""
        builder, draw, schema = self._builder, self._draw, self._builder.schema
        builder.line.hold_consumer(self.ready)
        window, shape = _Window(builder, self.block), draw.ids.shape

        def see(span: _Span) -> torch.Tensor:
            return window.see(span, shape)

        leaves = range(len(schema.observation.leaves))
        obs = [see(self.spans[leaf][0] if leaf in self.spans else self._obs[leaf]) for leaf in leaves]
        next_obs = [see(self.spans[leaf][1] if leaf in self.spans else self._next_obs[leaf]) for leaf in leaves]
        return Batch(
            obs=schema.observation.build(obs),
            action=schema.action.build([see(span) for span in self._action]),
            reward=see(self._reward),
            next_obs=schema.observation.build(next_obs),
            terminated=see(self._terminated),
            truncated=see(self._truncated),
            extras=schema.extras.build([see(span) for span in self._extras]),
            ids=draw.ids,
            weights=window.see(self._weights, shape[:1]),
            discount=None if self._discount is None else window.see(self._discount, shape[:1]),
            mask=None if self._mask is None else window.see(self._mask, shape[:1]),
        )
