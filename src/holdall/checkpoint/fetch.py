"""Blocks of a checkpoint in an object store.

A batch waits only for the data that it needs; a thread fetches everything else meanwhile. A `Dataset` has no such
thread.

`RemoteBlocks` is the hook `Store.before_read` of a memory that was loaded from an object store. It fetches the
compressed units that contain the slices of a batch. `BackgroundFetch` fetches all blocks, newest first. When it has
finished, the hook is removed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall._native import Catalog, Coded, Part, Segment
from holdall.checkpoint.data_file import DataFile, Demand, fetch_ranges
from holdall.checkpoint.waiting import Waiting
from holdall.errors import HoldallError
from holdall.store.format import NEXT_FOLLOWS
from holdall.store.layouts import find_sliced_layout

_FETCH_BYTES = 4 * 2**20
_STOP_S = 5.0

_LOG = logging.getLogger("holdall")

Ids = NDArray[np.int64]


class _Log(NamedTuple):
    """The arrays of a sliced part."""

    cursors: NDArray[np.uint32]
    log: NDArray[Any]  # (entries, lanes)
    window: int


class RemoteBlocks:
    """The hook that fetches data of remote files before it is read. A store may call it from any thread."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._logs: dict[int, _Log] = {}  # Parts whose blocks are in remote files, by serial number.
        for segment in segments:
            for part in segment.parts:
                if _find_file(part) is not None:
                    self._logs[part.serial] = _read_log(part, segment.lanes)

    def __call__(self, catalog: Catalog, ids: Ids) -> None:
        """Fetch the units that the transitions `ids` need."""
        wanted: dict[int, list[Demand]] = {}
        ids = ids.reshape(-1)
        segments = catalog.segments
        first_ticks = np.array([segment.first_tick for segment in segments], np.int64)
        ticks = np.unique(ids // catalog.lanes)
        ticks = ticks[(ticks >= catalog.first_tick) & (ticks < catalog.next_tick)]
        for number in np.unique(np.searchsorted(first_ticks, ticks, side="right") - 1).tolist():
            segment = segments[number]
            rows = ids - segment.first_tick * catalog.lanes
            rows = rows[(rows >= 0) & (rows < segment.ticks * catalog.lanes)]
            for part in segment.parts:
                demand = self._find_demand(part, rows, catalog.lanes)
                if demand is not None:
                    wanted.setdefault(id(demand.file), []).append(demand)
        fetch_ranges(
            Demand(
                demands[0].file,
                np.concatenate([demand.starts for demand in demands]),
                np.concatenate([demand.ends for demand in demands]),
            )
            for demands in wanted.values()
        )

    def _find_demand(self, part: Part, rows: Ids, lanes: int) -> Demand | None:
        """Return the ranges of a part's file that `rows` need. None if the block is in memory or on this machine."""
        log = self._logs.get(part.serial)
        file = _find_file(part)
        if log is None or file is None or part.block is None:
            return None
        coded = part.block.form
        if not isinstance(coded, Coded) or coded.location is None:
            return None
        starts = (log.cursors[rows] & ~NEXT_FOLLOWS).astype(np.int64)
        # A next observation starts within the observation or directly after it.
        entries = np.minimum(starts[:, None] + np.arange(2 * log.window), len(log.log) - 1)
        slices = np.unique(log.log[entries, (rows % lanes)[:, None]]).astype(np.int64)
        places = slices if coded.places is None else coded.places[slices].astype(np.int64)
        units = np.unique(places // coded.codec.group)
        offsets = coded.offsets.astype(np.int64)
        start = coded.location[1]
        return Demand(file, start + offsets[units], start + offsets[units + 1])


def start_fetch(segments: Sequence[Segment], store: Any, waiting: Waiting) -> BackgroundFetch | None:
    """Install the hook and start the background fetch. Do nothing if all blocks are on this machine."""
    hook = fetch_on_demand(segments)
    if hook is None:
        return None
    store.before_read = hook
    return BackgroundFetch(segments, store, waiting)


def fetch_on_demand(segments: Sequence[Segment]) -> RemoteBlocks | None:
    """Return the hook that fetches blocks before they are read, or None if all blocks are on this machine."""
    files = [_find_file(part) for segment in segments for part in segment.parts]
    return RemoteBlocks(segments) if any(file is not None for file in files) else None


def fetch_all(segments: Sequence[Segment]) -> None:
    """Fetch all remote blocks of `segments`."""
    for each in _list_ranges(segments):
        file = each.file()
        if file is not None:
            file.fetch(np.array([each.start], np.int64), np.array([each.start + each.nbytes], np.int64))


class _BlockRange(NamedTuple):
    file: weakref.ref[DataFile]  # Weak, because a memory that evicted its blocks no longer needs the file.
    start: int
    nbytes: int


class BackgroundFetch:
    """The thread that fetches all blocks of one memory."""

    def __init__(self, segments: Sequence[Segment], store: Any, waiting: Waiting) -> None:
        self._waiting = waiting
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        arguments = (_list_ranges(segments), weakref.ref(store), self._stopped)
        thread = threading.Thread(target=fetch_blocks, args=arguments, name="holdall-fetch", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            _LOG.warning("A loaded checkpoint is fetched when it is sampled, because no thread can start: %s", error)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything is fetched, or fetching failed."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """Stop fetching, and end all waiting for the object store."""
        self._stopped.set()
        self._waiting.cancel()
        self.wait(_STOP_S)


def _list_ranges(segments: Sequence[Segment]) -> list[_BlockRange]:
    """Return the ranges of all remote blocks, newest first."""
    ranges: dict[int, _BlockRange] = {}
    for segment in reversed(segments):
        for part in segment.parts:
            file = _find_file(part)
            if file is not None and part.block is not None and isinstance(part.block.form, Coded):
                location = part.block.form.location
                if location is not None:
                    ranges[part.block.serial] = _BlockRange(weakref.ref(file), location[1], location[2])
    return list(ranges.values())


def fetch_blocks(ranges: list[_BlockRange], store: weakref.ref[Any], stopped: threading.Event) -> None:
    """Fetch all blocks, then remove the hook of `store`. End early if `stopped` is set."""
    try:
        for each in ranges:
            for first in range(0, each.nbytes, _FETCH_BYTES):
                file = each.file()
                if stopped.is_set() or file is None:
                    break
                start = each.start + first
                end = min(start + _FETCH_BYTES, each.start + each.nbytes)
                file.fetch(np.array([start], np.int64), np.array([end], np.int64))
                del file
    except HoldallError as error:
        if not stopped.is_set():
            _LOG.warning("The rest of a loaded checkpoint is fetched when it is sampled: %s", error)
        return
    if stopped.is_set():
        return
    for each in ranges:
        file = each.file()
        if file is not None:
            file.is_remote = False
    loaded_store = store()
    if loaded_store is not None:
        loaded_store.before_read = None


def _find_file(part: Part) -> DataFile | None:
    """Return the remote file of a part's block, or None."""
    form = None if part.block is None else part.block.form
    if isinstance(form, Coded) and isinstance(form.file, DataFile) and form.file.is_remote:
        return form.file
    return None


def _read_log(part: Part, lanes: int) -> _Log:
    arrays = part.arrays()
    return _Log(arrays["cursors"], arrays["log"].reshape(-1, lanes), find_sliced_layout(part).slice_count)
