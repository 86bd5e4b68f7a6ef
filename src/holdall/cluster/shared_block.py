"""Shared memory for the observations of a batch.

Shards on the learner's machine write observations directly into the batch, so that observations cross no socket and no
object store. A block has no name in a file system: the operating system frees it with the last process that has it
open, however that process ends. A block is used again only when nothing refers to its last batch. A block that a shard
may still write to is never used again.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from holdall.schema import Array, Bytes, Leaf

CAN_SHARE = hasattr(os, "memfd_create")
"""Whether a process can open the blocks of another one."""

_ALIGNMENT_BYTES = 64
_CHECK_INTERVAL = 256
"""Calls of `OpenedBlocks.open` after which the blocks are closed that their owners have freed."""
_MAX_BLOCKS = 64
"""Blocks of one process. Their number is limited, because each takes two file descriptors."""
# Mapping all pages at once is much faster than a page fault for each of them.
_MAP_FLAGS = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0)


class BlockPlace(NamedTuple):
    """Where other processes of this machine find a block."""

    process: int
    descriptor: int
    name: str

    @property
    def exists(self) -> bool:
        """Whether the owner still has the block."""
        return _is_block(f"/proc/{self.process}/fd/{self.descriptor}", self.name)

    def open(self, nbytes: int) -> Bytes | None:
        """Map the block. Return None if this process cannot open it, or if it has another size."""
        try:
            descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR)
        except OSError:
            return None
        try:
            if not _is_block(f"/proc/self/fd/{descriptor}", self.name) or os.fstat(descriptor).st_size != nbytes:
                return None
            return np.frombuffer(mmap.mmap(descriptor, nbytes, _MAP_FLAGS), np.uint8)
        finally:
            os.close(descriptor)


def _is_block(path: str, name: str) -> bool:
    try:
        return os.readlink(path).startswith(f"/memfd:{name} ")  # noqa: PTH115  pathlib is several times slower
    except OSError:
        return False


class BlockRows(NamedTuple):
    """Rows of a batch that another process of this machine writes to a block."""

    place: BlockPlace
    rows: int  # Rows of the whole batch.
    positions: bytes = b""  # Positions of the rows in the batch, as int64. Empty: all rows.


class SharedBlock(mmap.mmap):
    """Memory that other processes can open by its `place`."""

    place: BlockPlace

    @classmethod
    def allocate(cls, nbytes: int) -> SharedBlock:
        """Return a new block. Its descriptor is closed when the object is freed."""
        name = f"holdall-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, nbytes)
        block = cls(descriptor, nbytes)
        block.place = BlockPlace(os.getpid(), descriptor, name)
        weakref.finalize(block, os.close, descriptor).atexit = False
        return block


class OpenedBlocks:
    """Blocks of other processes, each opened once. Not thread-safe."""

    def __init__(self) -> None:
        self._opened: dict[BlockPlace, Bytes] = {}
        self._calls = 0

    def open(self, place: BlockPlace, nbytes: int) -> Bytes | None:
        """Return the memory of a block, or None if this process cannot open it."""
        self._calls += 1
        memory = self._opened.get(place)
        if memory is None or self._calls % _CHECK_INTERVAL == 0:
            self._opened = {other: kept for other, kept in self._opened.items() if other.exists}
        if memory is None:
            memory = place.open(nbytes)
            if memory is not None:
                self._opened[place] = memory
        return memory if memory is not None and len(memory) == nbytes else None


class BatchBlock:
    """The observations of one batch in a block."""

    def __init__(self, block: SharedBlock, leaves: Sequence[Leaf], rows: int) -> None:
        self.block = block
        self.memory = np.frombuffer(block, np.uint8)  # Every array of the batch refers to this object.
        self._leaves = leaves
        self._rows = rows

    def describe_rows(self, positions: Array) -> BlockRows:
        """Return the message that tells another process to write the rows at `positions`."""
        is_whole = len(positions) == self._rows
        return BlockRows(self.block.place, self._rows, b"" if is_whole else positions.tobytes())

    def arrays(self) -> tuple[list[Array], list[Array]]:
        """Return observations and next observations, leaf by leaf."""
        return lay_out(self.memory, self._leaves, self._rows)


class BatchBlocks:
    """The blocks of one process that other processes fill. Thread-safe.

    Attributes:
        max_spare: Number of unused blocks that are kept.
    """

    def __init__(self, leaves: Sequence[Leaf], min_bytes: int) -> None:
        self.max_spare = 4
        self._leaves = leaves
        self._min_bytes = min_bytes
        self._spare: list[tuple[SharedBlock, weakref.ref[Bytes]]] = []
        self._alive: weakref.WeakSet[SharedBlock] = weakref.WeakSet()
        self._lock = threading.Lock()

    def take(self, rows: int) -> BatchBlock | None:
        """Return a block for a batch. None if the batch is small, or if this process has too many blocks."""
        nbytes = block_bytes(self._leaves, rows)
        if nbytes < self._min_bytes or not CAN_SHARE:
            return None
        with self._lock:
            for i in reversed(range(len(self._spare))):  # The block that was used last may still be in the caches.
                block, user = self._spare[i]
                if len(block) == nbytes and user() is None:
                    del self._spare[i]
                    return BatchBlock(block, self._leaves, rows)
            if len(self._alive) >= max(_MAX_BLOCKS, 2 * self.max_spare):
                return None
            block = SharedBlock.allocate(nbytes)
            self._alive.add(block)
        return BatchBlock(block, self._leaves, rows)

    def release(self, batch: BatchBlock) -> None:
        """Record that no shard writes to a block any more. It is used again when its batch is freed."""
        with self._lock:
            self._spare = [*self._spare, (batch.block, weakref.ref(batch.memory))][-self.max_spare :]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the next batches."""
        with self._lock:
            return sum(len(block) for block, _ in self._spare)


def block_bytes(leaves: Sequence[Leaf], rows: int) -> int:
    """Return the bytes of observations and next observations of `rows` rows in a block."""
    return 2 * sum(_align(rows * leaf.nbytes) for leaf in leaves)


def lay_out(memory: Bytes, leaves: Sequence[Leaf], rows: int) -> tuple[list[Array], list[Array]]:
    """Return the arrays of observations and next observations in a block, leaf by leaf."""
    half = len(memory) // 2
    return list(_view(memory[:half], leaves, rows)), list(_view(memory[half:], leaves, rows))


def _view(memory: Bytes, leaves: Sequence[Leaf], rows: int) -> Iterator[Array]:
    start = 0
    for leaf in leaves:
        nbytes = rows * leaf.nbytes
        yield memory[start : start + nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
        start += _align(nbytes)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
