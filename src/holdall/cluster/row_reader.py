"""Reading the rows of a shard: decoded, into arrays of its own or into the block of a learner on this machine.

In:  where rows lie in a shard's store.  Out: the same rows with all of their observations.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.cluster.answer import BlockPlace, Pair, block_bytes, block_leaves, pairs_in
from holdall.schema import Bytes, Leaf, Schema

_KEPT_FROM = 0.05
"""Share of its decoded bytes from which on a segment is kept decoded: others decode in the time of a copy."""
_NEWLY_DECODED = 16
"""Segments that one answer decodes and keeps so."""
_SLICES, _SEALED = (storage.RECORD_FIELDS.index(name) for name in ("slices", "sealed"))
_BlockPart = tuple[dict[int, Pair], slice, NDArray[np.int64] | None]
"""A batch in a block, which rows of an answer are its, and where they go in it; None: they are all of it."""


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
        self._leaves = schema.observation.leaves
        self._kernels = kernels
        self._threads = kernels.new_pool(max(1, (os.cpu_count() or 1) // neighbours))
        self._kept = DecodedSegments(kernels.coder, decoded_bytes)
        self._blocks = OpenedBlocks(block_leaves(schema, large))

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
        parts, small = self._opened(counts, blocks), dict(found.small)
        for field, i in enumerate(found.large):
            leaf, kept = self._leaves[i], self._kept.instead(places, field)
            if not parts:
                count = len(found.reward)
                obs, next_obs = np.empty((2, count, *leaf.shape), leaf.dtype)
                small[i] = obs, next_obs
                self._fill(small[i], leaf, kept)
                continue
            for pairs, some, rows in parts:
                self._fill(pairs[i], leaf, _part(kept, some, rows))
        for pairs, some, rows in parts:
            for i, sides in found.small.items():
                for side, part in zip(pairs[i], sides, strict=True):
                    side[slice(None) if rows is None else rows] = part[some]
        return found._replace(small={} if parts else small, large=(), places=None)

    def _opened(self, counts: Sequence[int], blocks: Sequence[BlockPlace]) -> list[_BlockPart]:
        """Return where the rows of every batch are written; nothing if one of the blocks is not within reach."""
        parts, end = list[_BlockPart](), 0
        for place, count in zip(blocks, counts if blocks else (), strict=True):
            pairs = self._blocks.pairs(place)
            if pairs is None:
                return []
            rows = np.frombuffer(place.positions, np.int64).copy() if place.positions else None
            begin, end = end, end + count
            parts.append((pairs, slice(begin, end), rows))
        return parts

    def _fill(self, pair: Pair, leaf: Leaf, places: storage.Places) -> None:
        """Decode rows of one field to where they belong in a batch."""
        if len(places.segment):
            obs, next_obs = (side.view(np.uint8).reshape(len(side), leaf.nbytes) for side in pair)
            self._kernels.gather(places, 0, obs, next_obs, self._threads)


def _part(places: storage.Places, some: slice, rows: NDArray[np.int64] | None) -> storage.Places:
    """Return the places of some rows of a field, and where in a batch each of them goes."""
    cursors = [places.cursors[0][some]]
    return replace(places, segment=places.segment[some], cursors=cursors, lane=places.lane[some], rows=rows)


class OpenedBlocks:
    """Blocks of learners on this machine, as a shard writes to them."""

    def __init__(self, leaves: dict[int, Leaf]) -> None:
        self._leaves = leaves
        self._lock = threading.Lock()  # a shard answers several calls at a time
        self._opened: dict[tuple[str, int], tuple[BlockPlace, dict[int, Pair]]] = {}  # by name and rows

    def pairs(self, place: BlockPlace) -> dict[int, Pair] | None:
        """Return where the rows of a batch are written; None if the block is not within reach."""
        with self._lock:
            found = self._opened.get((place.name, place.rows))
            if found is None:
                # Those that their learners gave up take memory for as long as they are open here.
                self._opened = {key: known for key, known in self._opened.items() if known[0].is_there}
                memory = place.opened(block_bytes(self._leaves.values(), place.rows))
                if memory is None:
                    return None
                found = self._opened[place.name, place.rows] = place, dict(pairs_in(memory, self._leaves, place.rows))
        return found[1]
