"""Answers: drawn rows on their way from a shard to a learner.

In:  rows that a shard read.  Out: what Ray carries; and back, as batches.
Invariant: what is damaged on its way between machines is refused whole. On one machine large arrays lie beside the
rest, where Ray hands them over without copying; to another one an answer goes compressed as one. Shards on the
learner's machine write rows where they belong in a batch, in a block that both share; it is handed out again only when
nothing refers to it, and never if a shard that was asked to write to it has not answered.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, of_ids
from holdall.cluster.protocol import Ids, ShardCounters, ids_of
from holdall.delivery import Delivery, DrawnRows, HostBatches, ObservationAssembler
from holdall.errors import DamageError
from holdall.sampling import Hindsight, Sampler
from holdall.schema import Array, Leaf, Schema
from holdall.shared import BatchBlock, BatchBlocks, Pair, block_leaves, put_together
from holdall.storage import Kernels, Rows

Payload = tuple[Any, ...] | bytes
"""To this machine a record and the arrays beside it; to another one bytes."""
_LARGE_BYTES = 2**15
"""Arrays from this size on lie beside the rest of an answer."""
_DIGEST_BYTES = 8
_WINDOW_LOG = 25
_LEVEL, _QUICK_LEVEL = 3, -50


class Answer(NamedTuple):
    """What a shard drew in one call; where that is rows of several batches, they stand one behind another."""

    counters: ShardCounters
    draw: Draw  # its ids are the numbers of rows there
    scaled: NDArray[np.float64]  # what each drawn one was drawn in proportion to
    found: DrawnRows  # without leaves that were written to a block
    order: Ids | None = None  # which of those asked for each drawn one is; None: as they were asked for

    def part(self, first: int, end: int) -> Answer:
        """Return some of the rows that were drawn; nothing is copied."""
        if (first, end) == (0, len(self.scaled)):
            return self
        some = slice(first, end)
        order = None if self.order is None else self.order[some] - first
        found = DrawnRows(self.found.rows.cut(some), None, None)
        return Answer(self.counters, of_ids(self.draw.ids[some]), self.scaled[some], found, order)


class AnswerPacker:
    """Packs the answers of a shard, one at a time."""

    pays_up_to = 0.9
    """Share of the plain bytes up to which compressing them well pays."""
    measured_again = 64
    """Answers after which that is measured again."""

    def __init__(self) -> None:
        self._packed = 0
        self._pays = True
        # An answer is compressed as one, so that what its rows have in common is sent once.
        settings = partial(zstandard.ZstdCompressionParameters.from_level, window_log=_WINDOW_LOG)
        self._compressors = {
            level: zstandard.ZstdCompressor(compression_params=settings(level)) for level in (_LEVEL, _QUICK_LEVEL)
        }

    def pack(self, answer: Answer, *, is_near: bool) -> Payload:
        """Return what is sent; `is_near`: it stays on this machine, and is neither compressed nor checked."""
        if is_near:
            return _with_arrays_beside(answer)
        parts = [memoryview(part) for part in _with_arrays_beside(answer)]
        sizes = [part.nbytes for part in parts]
        is_measured = self._pays or self._packed % self.measured_again == 0
        stream = self._compressors[_LEVEL if is_measured else _QUICK_LEVEL].compressobj(sum(sizes))
        frame = b"".join([*map(stream.compress, parts), stream.flush()])
        if is_measured:
            self._pays = len(frame) <= self.pays_up_to * sum(sizes)
        self._packed += 1
        body = np.array([len(sizes), *sizes], "<i8").tobytes() + frame
        return xxhash.xxh3_64_digest(body) + body


def _with_arrays_beside(answer: Answer) -> tuple[Any, ...]:
    beside: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE_BYTES:
            beside.append(np.frombuffer(raw, np.uint8))
        return raw.nbytes < _LARGE_BYTES

    return pickle.dumps(answer, 5, buffer_callback=is_small), *beside


def read_answer(payload: Payload) -> Answer:
    """Read an answer that was received; DamageError if anything in it is not as it was sent."""
    if isinstance(payload, bytes):
        body = memoryview(payload)[_DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(body) != payload[:_DIGEST_BYTES]:
            raise DamageError("an answer was damaged on its way; nothing of it is used")
        count, *rest = np.frombuffer(body, "<i8", int.from_bytes(body[:8], "little") + 1).tolist()
        frame = body[8 * (count + 1) :]
        plain = memoryview(zstandard.ZstdDecompressor(max_window_size=2**_WINDOW_LOG).decompress(frame))
        payload = tuple(plain[first:end] for first, end in pairwise([0, *accumulate(rest)]))
    record, *beside = payload
    # Ray itself reads what an actor sends so; nothing that strangers sent comes this far.
    answer: Answer = pickle.loads(record, buffers=beside)
    return answer


class Deliverer:
    """Brings the rows of answers together, and makes batches of them as a local memory does of its own."""

    def __init__(self, schema: Schema, kernels: Kernels, device: str | None, large: Sequence[int]) -> None:
        self._leaves = schema.observation.leaves
        self.blocks = BatchBlocks(block_leaves(schema, large))
        assembler = ObservationAssembler(kernels, 1 << 62, 1)
        self._room = assembler.staging
        self._batches = HostBatches(schema, assembler, Delivery(device, schema.leaves))

    def keep(self, batches: int) -> None:
        """Keep memory for so many batches in use."""
        self.blocks.most = max(self.blocks.most, batches + 1)
        self._batches.keep(batches)

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        return self.blocks.nbytes + self._room.nbytes

    def batch(
        self, answers: Sequence[Answer], where: Sequence[Ids], shards: Sequence[int], weights: NDArray[np.float32],
        sampler: Sampler | None = None, block: BatchBlock | None = None,
    ) -> Batch:  # fmt: skip
        """Make a batch.

        Args:
            where: For every answer, the positions in the batch of what was drawn.
            sampler: That of the memory, which knows what other goals are worth.
            block: Where shards have written rows that their answers do not have.
        """
        draws = [answer.draw for answer in answers]
        named = [ids_of(shard, draw.ids) for shard, draw in zip(shards, draws, strict=True)]
        ids, reward, discount, mask = put_together(
            [(ids, draw.reward, draw.discount, draw.mask) for ids, draw in zip(named, draws, strict=True)], where
        )
        draw, every_step = Draw(ids, weights, reward=reward, discount=discount, mask=mask), where
        if ids.ndim == 2:
            every_step = [(rows[:, None] * ids.shape[1] + np.arange(ids.shape[1])).reshape(-1) for rows in where]
        written = {} if block is None else block.pairs()
        if block is not None:
            self.blocks.settle(block)
        found = DrawnRows(self._rows([answer.found.rows for answer in answers], every_step, written), None, None)
        if draws[0].last_ids is not None:
            found = found._replace(last=self._rows([answer.found.last for answer in answers], where))
        if isinstance(sampler, Hindsight):
            goals = [each.goals.ids for each in draws if each.goals is not None]
            first = [rows[: len(ids)] for rows, ids in zip(where, goals, strict=True)]
            draw = replace(draw, goals=sampler.goals(put_together(goals, first)))
            found = found._replace(outcomes=self._rows([answer.found.outcomes for answer in answers], first))
        return self._batches.make(draw, found)

    def _rows(
        self, found: Sequence[Rows | None], where: Sequence[Ids], written: Mapping[int, Pair] | None = None
    ) -> Rows:
        """Bring rows of some answers together.

        Args:
            written: Leaves of the batch whose rows may be there already.
        """
        parts, written = [rows for rows in found if rows is not None], written or {}
        count, small = sum(map(len, where)), {}
        for i, leaf in enumerate(self._leaves):
            small[i] = written.get(i) or (self._empty(count, leaf), self._empty(count, leaf))
            for rows, positions in zip(parts, where, strict=True):
                if i not in rows.small and i not in written:
                    raise DamageError("an answer lacks a field of its rows; nothing of it is used")
                for side, part in zip(small[i], rows.small.get(i, ()), strict=False):
                    side[positions] = part
        merged: Rows = put_together(parts, where)
        return merged._replace(small=small)

    def _empty(self, count: int, leaf: Leaf) -> Array:
        room: Array = self._room.take(count * leaf.nbytes)
        return room.view(leaf.dtype).reshape(count, *leaf.shape)
