"""Answers: drawn rows on their way from a shard to a learner.

In:  rows that a shard read.  Out: what Ray carries; and back, as batches.
Invariant: what is damaged on its way between machines is refused whole. Large arrays lie beside the rest, where Ray
hands them over without copying; to another machine they go compressed, if that pays. Shards on the learner's machine
write rows where they belong in a batch: in a block of memory that both share, which has no name in any file system and
is handed out again only when nothing refers to it, and never if a shard that was asked to write to it has not answered.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.cluster.protocol import ShardCounters, ids_of
from holdall.delivery import Delivery, DrawnRows, HostBatches, ObservationAssembler
from holdall.errors import DamageError
from holdall.sampling import ComposedSampler, Hindsight, Sampler
from holdall.schema import Array, Bytes, Leaf, Schema
from holdall.storage import ALIGNMENT_BYTES, Kernels, Rows

Ids = NDArray[np.int64]
Payload = tuple[Any, ...]
_OWN = ("reward", "discount", "mask")
_LARGE_BYTES = 2**15
"""Arrays from this size on lie beside the rest of an answer."""
_DIGEST_BYTES = 8
_HEAD = struct.Struct("<QQ")
"""Behind a digest of the record: one of the arrays beside it, and how many of them were compressed as one."""
NOBODY = np.empty(0, np.int64)


def followed(sampler: Sampler) -> Sampler:
    """Return what decides how likely a row is drawn: the sampler itself, or that by which it draws its first steps."""
    return sampler.by if isinstance(sampler, ComposedSampler) else sampler


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
    count: BlockPlace | None = None  # where a learner on its machine sees how often the shard has changed
    begin: int = 0  # the first of `rows` that is the draw's

    def part(self, first: int, end: int) -> Answer:
        """Return some of what was drawn, of a plain draw; nothing is copied."""
        if (first, end) == (0, len(self.scaled)):
            return self
        order = None if self.order is None else self.order[first:end] - first
        return Answer(
            self.counters, RowDraw(self.draw.rows[first:end]), self.scaled[first:end], self.rows, order, begin=first
        )


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
        found, where = [share.answer.rows for share in shares], [share.positions for share in shares]

        def merged(parts: Sequence[Array]) -> Array:
            return _merged([part[share.rows] for part, share in zip(parts, shares, strict=True)], where)

        def all_merged(leaves: Sequence[Sequence[Array]]) -> list[Array]:
            return [merged(parts) for parts in zip(*leaves, strict=True)]

        count, small = sum(len(share.ids) for share in shares), {}
        for i, leaf in enumerate(self._leaves):
            pair = small[i] = (written or {}).get(i) or (self._empty(count, leaf), self._empty(count, leaf))
            for share, rows in zip(shares, found, strict=True):
                if i not in rows.small and i not in (written or {}):
                    raise DamageError("an answer lacks a field of its rows; nothing of it is used")
                for side, part in zip(pair, rows.small.get(i, ()), strict=False):
                    side[share.positions] = part[share.rows]
        reward, terminated, truncated, ended = all_merged(
            [[rows.reward, rows.terminated, rows.truncated, rows.ended] for rows in found]
        )
        action, extras = all_merged([rows.action for rows in found]), all_merged([rows.extras for rows in found])
        return Rows(small, (), None, action, reward, terminated, truncated, extras, ended)

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


_SHARED_FROM = 2**16
"""Bytes from which on a batch lies in a block: Ray sends less within the answer itself."""
Pair = tuple[Array, Array]
_COUNT_BYTES = 8
_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""Pages that are mapped one by one, as each is first written, cost far more."""


class BlockPlace(NamedTuple):
    """Where a block of another process of this machine is found, and which rows of a batch in it are meant."""

    process: int
    descriptor: int
    name: str
    rows: int = 0  # of the whole batch
    positions: bytes = b""  # int64, of some of them; nothing: all

    @property
    def is_there(self) -> bool:
        """Whether the block is still behind its descriptor."""
        return _is_behind(f"/proc/{self.process}/fd/{self.descriptor}", self.name)

    def opened(self, nbytes: int) -> Bytes | None:
        """Open the block; None if it is not within reach, or something else is behind its descriptor by now."""
        try:
            descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR)
        except OSError:
            return None
        try:
            if not _is_behind(f"/proc/self/fd/{descriptor}", self.name) or os.fstat(descriptor).st_size != nbytes:
                return None
            return np.frombuffer(mmap.mmap(descriptor, nbytes, _AT_ONCE), np.uint8)
        finally:
            os.close(descriptor)


def _is_behind(path: str, name: str) -> bool:
    try:
        return os.readlink(path).startswith(f"/memfd:{name} ")  # noqa: PTH115  a path of its own takes longer
    except OSError:
        return False


class _SharedBlock(mmap.mmap):
    """Memory behind a descriptor of this process."""

    descriptor: int
    name: str

    @property
    def place(self) -> BlockPlace:
        """Where other processes find it."""
        return BlockPlace(os.getpid(), self.descriptor, self.name)


def _new_block(nbytes: int) -> _SharedBlock:
    name = f"holdall-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, nbytes)
    block = _SharedBlock(descriptor, nbytes)
    block.descriptor, block.name = descriptor, name
    weakref.finalize(block, os.close, descriptor).atexit = False
    return block


class ChangeCount:
    """How often a shard has changed, where processes on its machine see it without asking."""

    def __init__(self) -> None:
        self._block = _new_block(_COUNT_BYTES) if hasattr(os, "memfd_create") else None
        self._count = np.frombuffer(self._block or bytearray(_COUNT_BYTES), np.int64)

    @property
    def place(self) -> BlockPlace | None:
        """Where it is found; None where processes cannot share memory so."""
        return None if self._block is None else self._block.place

    @property
    def value(self) -> int:
        """Changes so far."""
        return int(self._count[0])

    def raise_by_one(self) -> None:
        """Count one more."""
        self._count[0] += 1


class SeenCount:
    """The count of a shard on this machine, if it is within reach."""

    def __init__(self, place: BlockPlace) -> None:
        self._place, self._memory = place, place.opened(_COUNT_BYTES)

    @property
    def now(self) -> int:
        """Changes so far; -1 if the shard's process has ended, or is not within reach."""
        memory = self._memory
        return -1 if memory is None or not self._place.is_there else int(memory.view(np.int64)[0])


class BatchBlock:
    """A batch of so many rows in a block."""

    def __init__(self, block: _SharedBlock, leaves: dict[int, Leaf], rows: int) -> None:
        self.block, self.memory = block, np.frombuffer(block, np.uint8)  # which every view of it refers to
        self._leaves, self._rows = leaves, rows
        self.is_given_up = False  # whether a shard may still write to it that nobody waits for

    def place(self, positions: Array) -> BlockPlace:
        """Say where a shard writes some rows."""
        some = b"" if len(positions) == self._rows else positions.tobytes()
        return self.block.place._replace(rows=self._rows, positions=some)

    def pairs(self) -> dict[int, Pair]:
        """Return observations and next observations, by leaf."""
        return dict(pairs_in(self.memory.copy() if self.is_given_up else self.memory, self._leaves, self._rows))


class BatchBlocks:
    """Blocks for the batches of one learner."""

    def __init__(self, leaves: dict[int, Leaf]) -> None:
        self._leaves = leaves
        self._spare: list[tuple[_SharedBlock, weakref.ref[Bytes]]] = []
        self._lock = threading.Lock()
        self.most = 4  # that are kept

    def take(self, rows: int) -> BatchBlock | None:
        """Return a block for a batch; None for a small one, and where processes cannot share memory so."""
        nbytes = block_bytes(self._leaves.values(), rows)
        if nbytes < _SHARED_FROM or not hasattr(os, "memfd_create"):
            return None
        with self._lock:
            for i in reversed(range(len(self._spare))):  # what was used last is still in caches
                block, user = self._spare[i]
                if len(block) == nbytes and user() is None:
                    del self._spare[i]
                    return BatchBlock(block, self._leaves, rows)
        return BatchBlock(_new_block(nbytes), self._leaves, rows)

    def settle(self, batch: BatchBlock) -> None:
        """Hear that nobody writes to a block any more: it is used again when its batch is gone."""
        with self._lock:
            self._spare = [*self._spare, (batch.block, weakref.ref(batch.memory))][-self.most :]

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        with self._lock:
            return sum(len(block) for block, _ in self._spare)


def block_leaves(schema: Schema, large: Sequence[int]) -> dict[int, Leaf]:
    """Return the observation leaves that lie in a block: all, where any is large; small ones alone travel as well."""
    return dict(enumerate(schema.observation.leaves)) if large else {}


def block_bytes(leaves: Iterable[Leaf], rows: int) -> int:
    """Return what a batch of so many rows takes in a block."""
    return sum(2 * _aligned(rows * leaf.nbytes) for leaf in leaves)


def pairs_in(memory: Bytes, leaves: dict[int, Leaf], rows: int) -> Iterator[tuple[int, Pair]]:
    """Return where the leaves of a batch lie in a block."""
    start = 0
    for i, leaf in leaves.items():
        nbytes, second = rows * leaf.nbytes, start + _aligned(rows * leaf.nbytes)
        obs, next_obs = (
            memory[begin : begin + nbytes].view(leaf.dtype).reshape(rows, *leaf.shape) for begin in (start, second)
        )
        yield i, (obs, next_obs)
        start = second + _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
