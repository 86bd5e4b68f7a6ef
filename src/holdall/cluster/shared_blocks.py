"""Memory that a learner and the shards on its machine share: shards write the rows of a batch where they belong.

In:  a batch's rows, and the leaves that are large.  Out: the arrays of a batch, filled by several processes.
Invariant: a block is handed out again only when nothing refers to it, and never if a shard that was asked to write to
it has not answered. It has no name in any file system: it goes with the processes that use it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.schema import Array, Bytes, Leaf, Schema

_SHARED_FROM = 2**16
"""Bytes from which on a batch lies in a block: Ray sends less within the answer itself."""
Pair = tuple[Array, Array]
_COUNT_BYTES = 8
_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""Pages that are mapped one by one, as each is first written, cost far more."""


class BlockPlace(NamedTuple):
    """Where a block is found, and which of its rows are meant."""

    process: int
    descriptor: int
    name: str
    rows: int  # of the whole batch
    positions: bytes  # int64, of some of them; nothing: all


class _SharedBlock(mmap.mmap):
    """Memory behind a descriptor of this process."""

    descriptor: int
    name: str


def _new_block(nbytes: int) -> _SharedBlock:
    name = f"holdall-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, nbytes)
    block = _SharedBlock(descriptor, nbytes)
    block.descriptor, block.name = descriptor, name
    weakref.finalize(block, os.close, descriptor).atexit = False
    return block


class CountPlace(NamedTuple):
    """Where a count of changes is found."""

    process: int
    descriptor: int
    name: str


class ChangeCount:
    """How often a shard has changed, where processes on its machine see it without asking."""

    def __init__(self) -> None:
        self._block = _new_block(_COUNT_BYTES) if hasattr(os, "memfd_create") else None
        self._count = np.frombuffer(self._block or bytearray(_COUNT_BYTES), np.int64)

    @property
    def place(self) -> CountPlace | None:
        """Where it is found; None where processes cannot share memory so."""
        return None if self._block is None else CountPlace(os.getpid(), self._block.descriptor, self._block.name)

    @property
    def value(self) -> int:
        """Changes so far."""
        return int(self._count[0])

    def raise_by_one(self) -> None:
        """Count one more."""
        self._count[0] += 1


class SeenCount:
    """The count of a shard on this machine."""

    def __init__(self, place: CountPlace, memory: Bytes) -> None:
        self._path, self._name = f"/proc/{place.process}/fd/{place.descriptor}", place.name
        self._count = memory.view(np.int64)

    @classmethod
    def of(cls, place: CountPlace) -> SeenCount | None:
        """Open it; None if it is not within reach."""
        memory = _opened(f"/proc/{place.process}/fd/{place.descriptor}", place.name, _COUNT_BYTES)
        return None if memory is None else cls(place, memory)

    @property
    def now(self) -> int:
        """Changes so far; -1 if the shard's process has ended."""
        return int(self._count[0]) if _is_at(self._path, self._name) else -1


class BatchBlock:
    """A batch of so many rows in a block."""

    def __init__(self, block: _SharedBlock, leaves: dict[int, Leaf], rows: int) -> None:
        self.block, self.memory = block, np.frombuffer(block, np.uint8)  # which every view of it refers to
        self._leaves, self._rows = leaves, rows
        self.is_given_up = False  # whether a shard may still write to it that nobody waits for

    def place(self, positions: Array) -> BlockPlace:
        """Say where a shard writes some rows."""
        some = b"" if len(positions) == self._rows else positions.tobytes()
        return BlockPlace(os.getpid(), self.block.descriptor, self.block.name, self._rows, some)

    def pairs(self) -> dict[int, Pair]:
        """Return observations and next observations, by leaf."""
        return dict(_pairs(self.memory.copy() if self.is_given_up else self.memory, self._leaves, self._rows))


class BatchBlocks:
    """Blocks for the batches of one learner."""

    def __init__(self, leaves: dict[int, Leaf]) -> None:
        self._leaves = leaves
        self._spare: list[tuple[_SharedBlock, weakref.ref[Bytes]]] = []
        self._lock = threading.Lock()
        self.most = 4  # that are kept

    def take(self, rows: int) -> BatchBlock | None:
        """Return a block for a batch; None for a small one, and where processes cannot share memory so."""
        nbytes = _block_bytes(self._leaves.values(), rows)
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


class OpenedBlocks:
    """Blocks of learners on this machine, as a shard writes to them."""

    def __init__(self, leaves: dict[int, Leaf]) -> None:
        self._leaves = leaves
        self._lock = threading.Lock()  # a shard answers several calls at a time
        self._opened: dict[tuple[str, int], tuple[str, dict[int, Pair]]] = {}  # by name and rows: path, and the arrays

    def pairs(self, place: BlockPlace) -> dict[int, Pair] | None:
        """Return where the rows of a batch are written; None if the block is not within reach."""
        with self._lock:
            found = self._opened.get((place.name, place.rows))
            if found is None:
                # Those that their learners gave up take memory for as long as they are open here.
                self._opened = {key: known for key, known in self._opened.items() if _is_at(known[0], key[0])}
                path = f"/proc/{place.process}/fd/{place.descriptor}"
                memory = _opened(path, place.name, _block_bytes(self._leaves.values(), place.rows))
                if memory is None:
                    return None
                found = self._opened[place.name, place.rows] = path, dict(_pairs(memory, self._leaves, place.rows))
        return found[1]


def _opened(path: str, name: str, nbytes: int) -> Bytes | None:
    """Open a block of another process; None if something else is behind its descriptor by now."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if not _is_at(f"/proc/self/fd/{descriptor}", name) or os.fstat(descriptor).st_size != nbytes:
            return None
        return np.frombuffer(mmap.mmap(descriptor, nbytes, _AT_ONCE), np.uint8)
    finally:
        os.close(descriptor)


def _is_at(path: str, name: str) -> bool:
    try:
        return os.readlink(path).startswith(f"/memfd:{name} ")  # noqa: PTH115  a path of its own takes longer
    except OSError:
        return False


def _block_bytes(leaves: Iterable[Leaf], rows: int) -> int:
    return sum(2 * _aligned(rows * leaf.nbytes) for leaf in leaves)


def _pairs(memory: Bytes, leaves: dict[int, Leaf], rows: int) -> Iterator[tuple[int, Pair]]:
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
    return -(-nbytes // storage.ALIGNMENT_BYTES) * storage.ALIGNMENT_BYTES


_KEPT_FROM = 0.05
"""Share of its decoded bytes from which on a segment is kept decoded: others decode in the time of a copy."""
_NEWLY_DECODED = 16
"""Segments that one answer decodes and keeps so."""
_SLICES, _SEALED = (storage.RECORD_FIELDS.index(name) for name in ("slices", "sealed"))


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
        touched, where = np.unique(places.segment, return_inverse=True)
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
        """Decode slices and keep them, if that pays and there is room."""
        nbytes = sealed.count * sealed.codec.transform.slice_bytes
        if np.asarray(sealed.coded.data).nbytes < _KEPT_FROM * nbytes:
            return None
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


class ShardReader:
    """Decodes rows of a shard's store; several threads may use it.

    Args:
        neighbours: Shards on a machine, this one counted; each has its share of the cores.
    """

    def __init__(
        self, schema: Schema, large: Sequence[int], kernels: storage.Kernels, decoded_bytes: int = 0,
        neighbours: int = 1,
    ) -> None:  # fmt: skip
        self._leaves = {i: schema.observation.leaves[i] for i in large}
        self._kernels = kernels
        self._threads = kernels.new_pool(max(1, (os.cpu_count() or 1) // neighbours))
        self._kept = DecodedSegments(kernels.coder, decoded_bytes)
        self._blocks = OpenedBlocks(self._leaves)

    def read(self, found: storage.Rows, counts: Sequence[int], blocks: Sequence[BlockPlace]) -> storage.Rows:
        """Return rows with all of their observations; those that could be written to blocks are not among them.

        Args:
            counts: Rows of every batch.
            blocks: Where each of them is written; nothing: nowhere.
        """
        places = found.places
        if places is None:
            return found._replace(large=())
        if places.awaits_files:
            storage.bring_places(places)
        opened = [pairs for place in blocks if (pairs := self._blocks.pairs(place)) is not None]
        is_shared, small = bool(blocks) and len(opened) == len(blocks), dict(found.small)
        for field, i in enumerate(found.large):
            leaf, kept = self._leaves[i], self._kept.instead(places, field)
            if not is_shared:
                count = len(found.reward)
                obs, next_obs = np.empty((2, count, *leaf.shape), leaf.dtype)
                small[i] = obs, next_obs
                self._fill(small[i], leaf, kept)
                continue
            end = 0
            for pairs, count, place in zip(opened, counts, blocks, strict=True):
                begin, end = end, end + count
                rows = np.frombuffer(place.positions, np.int64).copy() if place.positions else None
                self._fill(pairs[i], leaf, _part(kept, slice(begin, end), rows))
        return found._replace(small=small, large=(), places=None)

    def _fill(self, pair: Pair, leaf: Leaf, places: storage.Places) -> None:
        """Decode rows of one field to where they belong in a batch."""
        if len(places.segment):
            obs, next_obs = (side.view(np.uint8).reshape(len(side), leaf.nbytes) for side in pair)
            self._kernels.gather(places, 0, obs, next_obs, self._threads)


def _part(places: storage.Places, some: slice, rows: NDArray[np.int64] | None) -> storage.Places:
    """Return the places of some rows of a field, and where in a batch each of them goes."""
    cursors = [places.cursors[0][some]]
    return replace(places, segment=places.segment[some], cursors=cursors, lane=places.lane[some], rows=rows)
