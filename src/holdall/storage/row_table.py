"""Row tables: the short fields of a batch are copied from their rings in one call.

In:  rings, and transition ids.  Out: `Rows`: an array a field, each from an aligned address on.
Invariant: a table points only into arrays that it keeps alive, and is written again whenever a ring finds its next
observations elsewhere than before. An id that is not held is refused, and then nothing is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Array, Bytes, Leaf, require_known

if TYPE_CHECKING:
    from holdall.storage.slices import Places
    from holdall.storage.snapshot import Apart

COLUMN_FIELDS = ("ring", "row_bytes", "later", "block", "apart_count", "apart_ids", "apart_rows", "unless")
"""Columns of a table of columns, in the order of the struct `row_column` in structs.h; the loader compares them."""
ALIGNMENT_BYTES = 64
"""Where the columns of a batch begin, as torch's own tensors do: matrix products of floats that begin elsewhere add up
in another order, so that the last bits differ."""
ColumnSpan = tuple[tuple[int, ...], np.dtype[Any], int, int]
"""Shape, dtype, which block, and the first byte in it."""
_FLOAT_BYTES = 4
_ONE_BLOCK_BYTES = 1 << 15
"""Both blocks are one up to this size: allocating another one takes longer than to copy it."""
_NO_BLOCK = 2
"""Where columns without bytes are: NumPy gives them other strides in a block than of their own."""


def fresh_bytes(nbytes: int) -> Bytes:
    """Allocate bytes from an aligned address on."""
    block: Any = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % ALIGNMENT_BYTES
    return block[start : start + nbytes]  # type: ignore[no-any-return]  # a buffer to ctypes, an array to NumPy


class Rows(NamedTuple):
    """What was read under some ids: copies of the small fields, places of the large ones."""

    small: dict[int, tuple[Array, Array]]  # by observation leaf: obs and next_obs
    large: tuple[int, ...]  # observation leaves whose places follow, in this order
    places: Places | None
    action: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    extras: list[Array]
    ended: Array  # float32: 1.0 where an episode ended and was not cut short


class RowRing(Protocol):
    """A ring of observations, as a table sees it."""

    leaf: Leaf

    @property
    def following(self) -> Array | Apart:
        """Where next observations are found that do not follow in the ring: another object whenever that changes."""

    def columns(self) -> dict[str, Array]:
        """Return the ring of observations as "obs", and that of next observations, if they have one, as "next"."""


class RowReader(Protocol):
    """The loops that follow a table, see `Kernels`."""

    def read_rows(
        self,
        columns: NDArray[np.int64],
        ids: NDArray[np.int64],
        held: tuple[int, int],
        ring_rows: int,
        blocks: tuple[Bytes, Bytes],
        /,
    ) -> bool:
        """Copy the rows of `ids` from rings into two blocks, one column after another, each from a multiple of 64 on.

        Args:
            columns: A table, see `COLUMN_FIELDS`; what it points into is alive.
            ids: Contiguous, and writable.
            held: The first id that may be asked for, and the one behind the last. If one id is another, nothing is
                copied, and False is returned.
            ring_rows: Rows of every ring; a transition stands at its id modulo that.
        """


class RowTable:
    """How kernels copy the short fields of a batch in one go: from which rings, and where to.

    Observations go to one block and everything else to another, so that rewards that a caller keeps do not keep large
    observations, too.

    Args:
        small: Rings of observations, by leaf.
        action: Rings of actions; those of extras likewise.
        flags: Rings of what ended, and of what was cut short.
        reward: The ring of rewards, once there is one.
        cursors: Rings of cursors to the large fields; the list that is passed grows when a field moves to segments.
    """

    def __init__(
        self,
        small: Mapping[int, RowRing],
        action: list[Array],
        extras: list[Array],
        flags: tuple[Array, Array],
        reward: Array | None,
        cursors: list[NDArray[np.uint32]],
    ) -> None:
        self._small = dict(small)
        self._reward, self._cursors = reward, cursors
        self._counts = (len(small), len(action), len(extras), len(cursors))
        plain = [*action, *flags, *extras, *([] if reward is None else [reward]), *cursors]
        self._leaves = [(ring.leaf.shape, ring.leaf.dtype, 0) for ring in small.values() for _ in range(2)]
        self._leaves += [((), np.dtype(np.float32), 1), *((ring.shape[2:], ring.dtype, 1) for ring in plain)]
        self._table = np.zeros((len(self._leaves), len(COLUMN_FIELDS)), np.int64)
        ended = 2 * len(small)
        self._table[ended] = flags[0].ctypes.data, _FLOAT_BYTES, 0, 1, 0, 0, 0, flags[1].ctypes.data
        for row, ring in enumerate(plain, ended + 1):
            self._table[row, :4] = ring.ctypes.data, ring[0, 0].nbytes, 0, 1
        self._alive = [plain, *(ring.columns() for ring in small.values())]
        self._following: list[object] = [None] * len(small)
        self._spans: tuple[int, int, int, list[ColumnSpan]] = (-1, 0, 0, [])

    def fits(self, small: int, reward: Array | None, cursors: list[NDArray[np.uint32]]) -> bool:
        """Whether these are still all rings: fields only move to segments, and rewards come with the first tick."""
        known = self._counts
        return known[0] == small and self._reward is reward and self._cursors is cursors and known[3] == len(cursors)

    def read(
        self,
        kernels: RowReader,
        ids: NDArray[np.int64],
        held: tuple[int, int],
        ring_rows: int,
        take: Callable[[int], Bytes],
    ) -> tuple[Rows, list[NDArray[np.uint32]]]:
        """Copy all fields of `ids` that are in rings, and the cursors to the others.

        Args:
            ids: Contiguous, and writable.
            held: The first id held, and the one behind the last; others are refused.
            ring_rows: Rows of every ring.
            take: Returns memory, from an aligned address on.
        """
        for i, ring in enumerate(self._small.values()):
            following = ring.following
            if self._following[i] is not following:
                self._point(2 * i, ring, following)
                self._following[i] = following
        _, observed_bytes, other_bytes, spans = self._spans_of(len(ids))
        if observed_bytes + other_bytes <= _ONE_BLOCK_BYTES:
            observed = take(observed_bytes + other_bytes)
            others = observed[observed_bytes:]
        else:
            observed, others = take(observed_bytes), take(other_bytes)
        if not kernels.read_rows(self._table, ids, held, ring_rows, (observed, others)):
            require_known(ids, *held)
            raise DamageError(f"rings of {ring_rows} rows are too short for the ids held, {held}; report this")
        blocks = (observed, others, None)
        return self._named([np.ndarray(shape, dtype, blocks[k], first) for shape, dtype, k, first in spans])

    def _point(self, row: int, ring: RowRing, following: Any) -> None:
        """Write where the observations and next observations of one ring are found."""
        obs, nbytes = ring.columns()["obs"], ring.leaf.nbytes
        self._table[row] = obs.ctypes.data, nbytes, 0, 0, 0, 0, 0, 0
        if isinstance(following, np.ndarray):
            self._table[row + 1] = following.ctypes.data, nbytes, 0, 0, 0, 0, 0, 0
            return
        ids, rows = (column[following.first : following.end] for column in (following.ids, following.rows))
        later = obs.shape[1]
        self._table[row + 1] = obs.ctypes.data, nbytes, later, 0, len(ids), ids.ctypes.data, rows.ctypes.data, 0

    def _named(self, columns: list[Array]) -> tuple[Rows, list[NDArray[np.uint32]]]:
        small, actions, extras, fields = self._counts
        first = 2 * small + 1
        flags = first + actions
        reward = flags + 2 + extras
        rows = Rows(
            small={i: (columns[2 * k], columns[2 * k + 1]) for k, i in enumerate(self._small)},
            large=(),
            places=None,
            action=columns[first:flags],
            reward=np.empty(0, np.float32) if self._reward is None else columns[reward],
            terminated=columns[flags],
            truncated=columns[flags + 1],
            extras=columns[flags + 2 : reward],
            ended=columns[first - 1],
        )
        return rows, columns[len(columns) - fields :]

    def _spans_of(self, rows: int) -> tuple[int, int, int, list[ColumnSpan]]:
        """Return, for so many rows, that number, the bytes of both blocks, and where every column stands."""
        spans = self._spans
        if spans[0] != rows:
            sizes, columns = [0, 0], []
            for shape, dtype, block in self._leaves:
                nbytes = rows * prod(shape) * dtype.itemsize
                columns.append(((rows, *shape), dtype, *((block, sizes[block]) if nbytes else (_NO_BLOCK, 0))))
                sizes[block] += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            spans = self._spans = (rows, sizes[0], sizes[1], columns)
        return spans
