"""Reading the rows of a shard: decoded, into arrays of its own or into the block of a learner on this machine.

In:  where rows lie in a shard's store.  Out: the same rows with all of their observations.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.cluster.answer import BlockPlace, Pair, block_bytes, block_leaves, pairs_in
from holdall.delivery import ObservationAssembler
from holdall.schema import Bytes, Leaf, Schema

_KEPT_FROM = 0.05
"""Share of its decoded bytes from which on a segment is kept decoded: others decode in the time of a copy."""
_NEWLY = 16
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

    def instead(self, places: storage.Places) -> storage.Places:
        """Return the places of a batch, with decoded slices where these are kept."""
        if places.reads_files:
            return places
        touched, where = np.unique(places.segment, return_inverse=True)
        records, held, newly = [table[touched] for table in places.records], list[tuple[storage.Held, ...]](), _NEWLY
        for table, contents in zip(records, places.held, strict=True):
            kept = list[storage.Held]()
            for record, segment in zip(table, touched.tolist(), strict=True):
                log, content = contents[segment]
                if isinstance(content, storage.SealedSlices):
                    slices = self._slices.get(content)
                    if slices is None and newly:
                        slices, newly = self._decode(content), newly - 1
                    if slices is not None:
                        record[_SLICES], record[_SEALED], content = slices.ctypes.data, 0, slices
                kept.append((log, content))
            held.append(tuple(kept))
        return replace(places, records=records, segment=where.astype(np.int32), held=tuple(held))

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
        self._assembler = ObservationAssembler(kernels, 0, max(1, (os.cpu_count() or 1) // neighbours))
        self._kept = DecodedSegments(kernels.coder, decoded_bytes)
        self._blocks = OpenedBlocks(block_leaves(schema, large))

    def read(self, found: storage.Rows, counts: Sequence[int], blocks: Sequence[BlockPlace]) -> storage.Rows:
        """Return rows with all of their observations; those that could be written to blocks are not among them.

        Args:
            counts: Rows of every batch.
            blocks: Where each of them is written; nothing: nowhere.
        """
        if found.places is None:
            return found._replace(large=())
        if found.places.awaits_files:
            storage.bring_places(found.places)
        places = self._kept.instead(found.places)
        opened = [self._blocks.pairs(place) for place in blocks]
        if not blocks or None in opened:
            return self._assembler.complete(found._replace(places=places), self._leaves)
        end = 0
        for pairs, place, count in zip(opened, blocks, counts, strict=True):
            some, end = slice(end, end + count), end + count
            rows = np.frombuffer(place.positions, np.int64).copy() if place.positions else None
            self._write(found, _part(places, some, rows), some, pairs or {})
        return found._replace(small={}, large=(), places=None)

    def _write(self, found: storage.Rows, places: storage.Places, some: slice, pairs: Mapping[int, Pair]) -> None:
        """Write the rows of one batch to where they belong in its block."""
        for field, i in enumerate(found.large):
            obs, next_obs = (side.view(np.uint8).reshape(len(side), self._leaves[i].nbytes) for side in pairs[i])
            self._assembler.fill(places, field, obs, next_obs)
        for i, sides in found.small.items():
            for side, part in zip(pairs[i], sides, strict=True):
                side[slice(None) if places.rows is None else places.rows] = part[some]


def _part(places: storage.Places, some: slice, rows: NDArray[np.int64] | None) -> storage.Places:
    """Return the places of some rows, and where in a batch each of them goes; None: they are all of it."""
    cursors = [each[some] for each in places.cursors]
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
