"""Answers: drawn rows on their way from a shard to a learner.

In:  rows that a shard read.  Out: what Ray carries; and back, as batches.
Invariant: what is damaged on its way between machines is refused whole. Large arrays lie beside the rest, where Ray
hands them over without copying; to another machine they go compressed, if that pays.
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.cluster.protocol import ShardCounters, ids_of
from holdall.cluster.shared_blocks import BatchBlock, BatchBlocks, CountPlace
from holdall.delivery import Delivery, DrawnRows, HostBatches, ObservationAssembler
from holdall.errors import DamageError
from holdall.sampling import Hindsight, Sampler
from holdall.schema import Array, Leaf, Schema
from holdall.storage import Kernels, Rows

Ids = NDArray[np.int64]
Payload = tuple[Any, ...]
_OWN = ("reward", "discount", "mask")
_LARGE_BYTES = 2**15
"""Arrays from this size on lie beside the rest of an answer."""
_DIGEST_BYTES = 8
_HEAD = struct.Struct("<QQ")
"""Behind a digest of the record: one of the arrays beside it, and how many of them were compressed as one."""
NOBODY = np.empty(0, np.int64)


class RowDraw(NamedTuple):
    """What a shard's sampler drew: rows, and what else the sampler says of each."""

    rows: Ids  # of every drawn one its steps; behind all of these the rows that `others` names
    steps: int = 0  # rows of each that was drawn; 0: one, and no axis of time
    others: Ids = NOBODY  # which drawn one each row behind them belongs to: its last step, or its goal
    own: Mapping[str, Array] = {}  # by name, of every drawn one: see `holdall.batch.Draw`

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> RowDraw:
        """Lay the draws of some batches one behind another."""
        behind: list[Ids] = []
        others: list[Ids] = []
        begin = 0
        for draw in draws:
            if draw.last_ids is not None:
                behind.append(draw.last_ids)
                others.append(begin + np.arange(len(draw.ids)))
            elif draw.goals is not None:
                behind.append(draw.goals.ids)
                others.append(begin + draw.goals.rows)
            begin += len(draw.ids)
        ids = np.concatenate([draw.ids for draw in draws])
        own = {name: [getattr(draw, name) for draw in draws] for name in _OWN if getattr(draws[0], name) is not None}
        return cls(
            np.concatenate([ids.reshape(-1), *behind]),
            ids.shape[1] if ids.ndim == 2 else 0,
            np.concatenate(others) if others else NOBODY,
            {name: np.concatenate(arrays) for name, arrays in own.items()},
        )

    @property
    def drawn(self) -> Ids:
        """The rows of what was drawn, a line for each."""
        return self.rows[: len(self.rows) - len(self.others)].reshape(-1, max(1, self.steps))

    @property
    def is_plain(self) -> bool:
        """Whether each that was drawn is one row, and nothing else."""
        return not self.steps and not self.others.size and not self.own


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of one shard, and what is known of each."""

    counters: ShardCounters
    draw: RowDraw
    scaled: NDArray[np.float64]  # what each drawn one was drawn in proportion to
    rows: Rows  # those of the draw are among them; without leaves that were written to a block
    order: Ids | None = None  # which of those asked for each drawn one is; None: as they were asked for
    count: CountPlace | None = None  # where a learner on its machine sees how often the shard has changed
    begin: int = 0  # the first of `rows` that is the draw's

    def part(self, first: int, end: int) -> Answer:
        """Return some of what was drawn, of a plain draw; nothing is copied."""
        if (first, end) == (0, len(self.scaled)):
            return self
        order = None if self.order is None else self.order[first:end] - first
        return Answer(
            self.counters, RowDraw(self.draw.rows[first:end]), self.scaled[first:end], self.rows, order, begin=first
        )


def _each(parts: Sequence[Rows], act: Callable[[list[Array]], Array]) -> Rows:
    """Return rows whose every array is made of the same array of all parts."""

    def lists(of: Callable[[Rows], list[Array]]) -> list[Array]:
        return [act(list(arrays)) for arrays in zip(*(of(part) for part in parts), strict=True)]

    first = parts[0]
    small = {i: tuple(lists(lambda rows, i=i: list(rows.small[i]))) for i in first.small}  # type: ignore[misc]
    flat = lists(lambda rows: [rows.reward, rows.terminated, rows.truncated, rows.ended])
    reward, terminated, truncated, ended = flat
    action, extras = lists(lambda rows: rows.action), lists(lambda rows: rows.extras)
    return Rows(small, (), None, action, reward, terminated, truncated, extras, ended)  # type: ignore[arg-type]


class AnswerPacker:
    """Packs the answers of a shard; several threads may use it."""

    pays_up_to = 0.9
    """Share of the plain bytes up to which compressing them pays."""
    measured_again = 64
    """Answers after which that is measured again."""

    def __init__(self) -> None:
        self._answers = 0
        self._pays = True
        self._threads = threading.local()

    def pack(self, answer: Answer, *, is_near: bool) -> Payload | bytes:
        """Return a record, and the arrays beside it if there are any.

        Args:
            is_near: Whether it stays on this machine: arrays in shared memory are not compressed, nor checked.
        """
        beside: list[Any] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _LARGE_BYTES:
                beside.append(np.frombuffer(raw, np.uint8))
            return raw.nbytes < _LARGE_BYTES

        content = pickle.dumps(answer, 5, buffer_callback=is_small)
        sizes: list[int] = []  # of what was compressed
        if beside and not is_near and (frame := self._compressed(beside)) is not None:
            sizes, beside = [array.nbytes for array in beside], [frame]
        digest = 0 if is_near or not beside else _digest_of(beside)
        body = b"".join([_HEAD.pack(digest, len(sizes)), np.array(sizes, "<i8").tobytes(), content])
        record = xxhash.xxh3_64_digest(body) + body
        return (record, *beside) if beside else record

    def _compressed(self, arrays: list[Any]) -> Any:
        """Compress arrays as one, so that what they have in common is sent once; None if that does not pay."""
        self._answers, nbytes = self._answers + 1, sum(array.nbytes for array in arrays)
        if not self._pays and self._answers % self.measured_again:
            return None
        if not hasattr(self._threads, "compressor"):
            settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=25)
            self._threads.compressor = zstandard.ZstdCompressor(compression_params=settings)
        stream = self._threads.compressor.compressobj(nbytes)
        frame = b"".join([*(stream.compress(array.data) for array in arrays), stream.flush()])
        self._pays = len(frame) <= self.pays_up_to * nbytes
        return np.frombuffer(frame, np.uint8) if self._pays else None


def _digest_of(arrays: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.data)
    return digest.intdigest()


def read_answer(payload: Payload | bytes) -> Answer:
    """Read an answer that was received; DamageError if anything in it is not as it was sent."""
    record, *beside = (payload,) if isinstance(payload, bytes) else payload
    if xxhash.xxh3_64_digest(memoryview(record)[_DIGEST_BYTES:]) != record[:_DIGEST_BYTES]:
        raise DamageError("an answer was damaged on its way; nothing of it is used")
    digest, count = _HEAD.unpack_from(record, _DIGEST_BYTES)
    begin = _DIGEST_BYTES + _HEAD.size
    if digest and digest != _digest_of(beside):
        raise DamageError("the arrays beside an answer were damaged on their way; nothing of it is used")
    if count:
        ends = np.cumsum(np.frombuffer(record, "<i8", count, begin)).tolist()
        plain = memoryview(zstandard.ZstdDecompressor(max_window_size=2**25).decompress(beside[0].data))
        beside = [plain[first:end] for first, end in pairwise([0, *ends])]
    # Ray itself reads what an actor sends so; nothing that strangers sent comes this far.
    answer: Answer = pickle.loads(memoryview(record)[begin + 8 * count :], buffers=beside)
    return answer


class _Share(NamedTuple):
    """Rows of one answer, and where they go."""

    answer: Answer
    rows: slice  # of the answer
    positions: Ids
    ids: Ids


class Deliverer:
    """Brings the rows of answers together, and makes batches of them as a local memory does of its own."""

    def __init__(self, schema: Schema, kernels: Kernels, device: str | None, large: Sequence[int]) -> None:
        self._leaves = schema.observation.leaves
        self.blocks = BatchBlocks({i: self._leaves[i] for i in large})
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
            sampler: Makes something else of rows behind those drawn than last steps: goals.
            block: Where shards have written rows that their answers do not have.
        """
        steps, count = answers[0].draw.steps, len(weights)
        each = max(1, steps)
        drawn, behind = [], []
        for shard, answer, rows in zip(shards, answers, where, strict=True):
            first, ids = len(rows) * each, ids_of(shard, answer.draw.rows)
            positions = rows if each == 1 else (rows[:, None] * each + np.arange(each)).reshape(-1)
            begin, end, last = answer.begin, answer.begin + first, answer.begin + len(ids)
            drawn.append(_Share(answer, slice(begin, end), positions, ids[:first]))
            behind.append(_Share(answer, slice(end, last), rows[answer.draw.others], ids[first:]))
        own: dict[str, Any] = {
            name: _merged([answer.draw.own[name] for answer in answers], where) for name in answers[0].draw.own
        }
        draw = Draw(_ids(drawn).reshape((count, steps) if steps else count), weights, **own)
        if block is not None and not block.is_given_up:
            self.blocks.settle(block)
        found = DrawnRows(self._rows(drawn, {} if block is None else block.pairs()), None, None)
        if isinstance(sampler, Hindsight):
            draw, found = replace(draw, goals=sampler.goals(_ids(behind))), found._replace(outcomes=self._rows(behind))
        elif any(len(share.ids) for share in behind):
            draw, found = replace(draw, last_ids=_ids(behind)), found._replace(last=self._rows(behind))
        return self._batches.make(draw, found)

    def _rows(self, shares: Sequence[_Share], written: Mapping[int, tuple[Array, Array]] | None = None) -> Rows:
        """Bring rows of some answers together.

        Args:
            written: Leaves of the batch whose rows may be there already.
        """
        found = [share.answer.rows for share in shares]
        rest = _each(
            [rows._replace(small={}) for rows in found],
            lambda parts: _merged(
                [part[share.rows] for part, share in zip(parts, shares, strict=True)],
                [share.positions for share in shares],
            ),
        )
        count, small = sum(len(share.ids) for share in shares), {}
        for i, leaf in enumerate(self._leaves):
            pair = small[i] = (written or {}).get(i) or (self._empty(count, leaf), self._empty(count, leaf))
            for share, rows in zip(shares, found, strict=True):
                if i not in rows.small and i not in (written or {}):
                    raise DamageError("an answer lacks a field of its rows; nothing of it is used")
                if i in rows.small:
                    for merged, part in zip(pair, rows.small[i], strict=True):
                        merged[share.positions] = part[share.rows]
        return rest._replace(small=small)

    def _empty(self, count: int, leaf: Leaf) -> Array:
        room: Array = self._room.take(count * leaf.nbytes)
        return room.view(leaf.dtype).reshape(count, *leaf.shape)


def _ids(shares: Sequence[_Share]) -> Ids:
    return _merged([share.ids for share in shares], [share.positions for share in shares])


def _merged(parts: Sequence[Array], where: Sequence[Ids]) -> Array:
    """Bring rows together, those of each part at their positions."""
    merged = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, positions in zip(parts, where, strict=True):
        merged[positions] = part
    return merged
