"""Memory that processes share: blocks of it, batches that others fill, and observations that workers write.

In:  observations, lane by lane or batch by batch, from any process.  Out: the same bytes, as arrays.
Invariant: there is one copy, and nothing is pickled. A block has no name in any file system: the system frees it with
the last process that has it, however that one ends.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.schema import Array, Bytes, Leaf, Schema, Tree, require_count

_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0) if hasattr(mmap, "MAP_SHARED") else 0
"""Pages that are mapped one by one, as each is first written, cost far more."""
_COUNT_BYTES, _ALIGNMENT_BYTES = 8, 64
_LOOK_EVERY = 256
CAN_SHARE = hasattr(os, "memfd_create")
"""Whether a process can open the blocks of another one, see `SharedBlock`."""


class BlockPlace(NamedTuple):
    """Where a block of another process of this machine is found."""

    process: int
    descriptor: int
    name: str

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


class SharedBlock(mmap.mmap):
    """Memory behind a descriptor of this process, which other processes open by its place; see `CAN_SHARE`."""

    place: BlockPlace

    @classmethod
    def new(cls, nbytes: int) -> SharedBlock:
        """Make a block; it is freed with the last that refers to it, here and in processes that have opened it."""
        name = f"holdall-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, nbytes)
        block = cls(descriptor, nbytes)
        block.place = BlockPlace(os.getpid(), descriptor, name)
        weakref.finalize(block, os.close, descriptor).atexit = False
        return block


class OpenedBlocks:
    """Blocks of other processes of this machine, each opened once. Not locked."""

    def __init__(self) -> None:
        self._opened: dict[BlockPlace, Bytes] = {}
        self._calls = 0

    def memory(self, place: BlockPlace, nbytes: int) -> Bytes | None:
        """Return a block of so many bytes; None if it is not within reach."""
        self._calls += 1
        found = self._opened.get(place)
        if found is None or self._calls % _LOOK_EVERY == 0:
            # Those that were given up, or whose process has ended, take memory for as long as they are open here.
            self._opened = {other: memory for other, memory in self._opened.items() if other.is_there}
        if found is None:
            found = place.opened(nbytes)
            if found is not None:
                self._opened[place] = found
        return found if found is not None and len(found) == nbytes else None


class SharedCount:
    """A count that other processes of this machine see without asking, see `SeenCount`."""

    def __init__(self) -> None:
        self._block = SharedBlock.new(_COUNT_BYTES) if CAN_SHARE else None
        self._count = np.frombuffer(self._block or bytearray(_COUNT_BYTES), np.int64)

    @property
    def place(self) -> BlockPlace | None:
        """Where it is found; None where processes cannot share memory so."""
        return None if self._block is None else self._block.place

    @property
    def value(self) -> int:
        """The count now."""
        return int(self._count[0])

    def raise_by_one(self) -> None:
        """Count one more."""
        self._count[0] += 1


class SeenCount:
    """The count of another process, if it is within reach."""

    def __init__(self, place: BlockPlace) -> None:
        self._place, self._memory = place, place.opened(_COUNT_BYTES)

    @property
    def now(self) -> int:
        """The count now; -1 if its process has ended, or is not within reach."""
        memory = self._memory
        return -1 if memory is None or not self._place.is_there else int(memory.view(np.int64)[0])


_SHARED_FROM = 2**16
"""Bytes from which on a batch lies in a block: fewer are as quickly sent."""
_MOST_BLOCKS = 64
Pair = tuple[Array, Array]


class RowsPlace(NamedTuple):
    """Where another process of this machine writes rows of a batch."""

    place: BlockPlace
    rows: int  # of the whole batch
    positions: bytes = b""  # int64, of some of them; nothing: all


class BatchBlock:
    """A batch of so many rows in a block."""

    def __init__(self, block: SharedBlock, leaves: dict[int, Leaf], rows: int) -> None:
        self.block, self.memory = block, np.frombuffer(block, np.uint8)  # which every view of it refers to
        self._leaves, self._rows = leaves, rows

    def place(self, positions: Array) -> RowsPlace:
        """Say where another process writes some rows."""
        return RowsPlace(self.block.place, self._rows, b"" if len(positions) == self._rows else positions.tobytes())

    def pairs(self) -> dict[int, Pair]:
        """Return observations and next observations, by leaf."""
        return pairs_in(self.memory, self._leaves, self._rows)


class BatchBlocks:
    """Blocks for the batches of one process that others fill."""

    def __init__(self, leaves: dict[int, Leaf]) -> None:
        self._leaves = leaves
        self._spare: list[tuple[SharedBlock, weakref.ref[Bytes]]] = []
        self._alive: weakref.WeakSet[SharedBlock] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.most = 4  # that are kept

    def take(self, rows: int) -> BatchBlock | None:
        """Return a block for a batch; None for a small one, and where processes cannot share memory so.

        None, too, for one who keeps many batches: each block takes two of the files that a process may have open.
        """
        nbytes = block_bytes(self._leaves, rows)
        if nbytes < _SHARED_FROM or not CAN_SHARE:
            return None
        with self._lock:
            for i in reversed(range(len(self._spare))):  # what was used last is still in caches
                block, user = self._spare[i]
                if len(block) == nbytes and user() is None:
                    del self._spare[i]
                    return BatchBlock(block, self._leaves, rows)
            if len(self._alive) >= max(_MOST_BLOCKS, 2 * self.most):
                return None
            block = SharedBlock.new(nbytes)
            self._alive.add(block)
        return BatchBlock(block, self._leaves, rows)

    def settle(self, batch: BatchBlock) -> None:
        """Note that nobody writes to a block any more: it is used again when its batch is gone."""
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


def _laid_out_bytes(leaves: Iterable[Leaf], rows: int) -> int:
    """Return what so many rows of all leaves take in a block."""
    return sum(_aligned(rows * leaf.nbytes) for leaf in leaves)


def _laid_out(block: Bytes, leaves: Iterable[Leaf], rows: int) -> Iterator[Array]:
    """Return where so many rows of each leaf lie in a block."""
    start = 0
    for leaf in leaves:
        nbytes = rows * leaf.nbytes
        yield block[start : start + nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
        start += _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def block_bytes(leaves: dict[int, Leaf], rows: int) -> int:
    """Return what a batch of so many rows takes in a block."""
    return 2 * _laid_out_bytes(leaves.values(), rows)


def pairs_in(memory: Bytes, leaves: dict[int, Leaf], rows: int) -> dict[int, Pair]:
    """Return where observations and next observations of a batch lie in a block, by leaf."""
    obs, next_obs = (_laid_out(half, leaves.values(), rows) for half in (memory, memory[len(memory) // 2 :]))
    return dict(zip(leaves, zip(obs, next_obs, strict=True), strict=True))


class SharedObservations:
    """One observation per lane, in shared memory; hand it to worker processes as an argument.

    The channel that sends workers their actions also decides who writes when: nobody may write to a lane while the
    memory reads it. `RolloutMemory.observe` reads it once, before the next actions are sent.

    Args:
        observation_space: Of one lane.
        num_envs: Lanes.
        context: The multiprocessing context that starts the workers; None for the default one.
    """

    def __init__(self, observation_space: spaces.Space[Any], num_envs: int, context: BaseContext | None = None) -> None:
        require_count("num_envs", num_envs)
        if context is not None and not isinstance(context, BaseContext):
            raise ArgumentError(f"context ({context!r}) is no multiprocessing context; pass get_context(...), or None")
        self._tree = Tree.of(observation_space, "observation_space")
        self._lanes = num_envs
        # Without a name: the system frees it with the last process that has it, however that one ends.
        maker: Any = multiprocessing if context is None else context
        self._block = maker.RawArray(ctypes.c_uint8, max(1, _laid_out_bytes(self._tree.leaves, self._lanes)))
        self._view()

    @property
    def obs(self) -> Any:
        """The observations of all lanes, as `RolloutMemory.observe` and `.add` take them; views, never copies."""
        return self._tree.build(self._rows)

    @property
    def num_envs(self) -> int:
        """Lanes."""
        return self._lanes

    def write(self, lane: int, obs: Any) -> None:
        """Put one lane's observation, of exactly the space's shapes and dtypes, in its place."""
        self._require_lane(lane)
        for rows, new in zip(self._rows, self._tree.flatten(obs, (), "obs"), strict=True):
            rows[lane] = new

    def lane(self, lane: int) -> Any:
        """Return one lane's observation as views to write to, for environments that render in place."""
        self._require_lane(lane)
        return self._tree.build([rows[lane : lane + 1].reshape(rows.shape[1:]) for rows in self._rows])

    def _require_lane(self, lane: Any) -> None:
        if require_count("lane", lane, 0) >= self._lanes:
            raise ArgumentError(f"lane ({lane}) must be from 0 to {self._lanes - 1}; pass the worker's own")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a process needs when it is started; at any other time the memory cannot be passed on."""
        return {"tree": self._tree, "lanes": self._lanes, "block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tree, self._lanes, self._block = state["tree"], state["lanes"], state["block"]
        self._view()

    def _view(self) -> None:
        block = np.frombuffer(self._block, np.uint8)
        self._rows: list[Array] = list(_laid_out(block, self._tree.leaves, self._lanes))


def put_together(parts: Sequence[Any], where: Sequence[NDArray[np.int64]]) -> Any:
    """Return the rows of some arrays as one, those of each at their positions; of tuples and lists of arrays the same.

    What is no array is the same in all parts.
    """
    first = parts[0]
    if isinstance(first, list | tuple):
        merged = [put_together(each, where) for each in zip(*parts, strict=True)]
        return getattr(type(first), "_make", type(first))(merged)
    if not isinstance(first, np.ndarray):
        return first
    rows = np.empty((sum(map(len, parts)), *first.shape[1:]), first.dtype)
    for part, positions in zip(parts, where, strict=True):
        rows[positions] = part
    return rows
