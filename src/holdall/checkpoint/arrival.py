"""Arrival: what a memory that was loaded from an object store will read, fetched in the background, newest first.

In:  the blocks of a checkpoint.  Out: their bytes on this machine, while batches are drawn already.
Invariant: a few megabytes are under way at a time. Whatever goes wrong here, a batch fetches what it needs by itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from holdall.errors import HoldallError
from holdall.experience.disk.segment_file import Extent, SegmentFile

_AT_ONCE_BYTES = 4 * 2**20

_LOG = logging.getLogger("holdall")


class _Run(NamedTuple):
    file: weakref.ref[SegmentFile]  # a memory that drops its blocks needs them no more
    start: int
    nbytes: int


class Arrival:
    """Fetches the blocks of one memory.

    Args:
        extents: Where they lie, in the order in which they are wanted.
        interrupt: Makes whoever waits for the store give up.
    """

    def __init__(self, extents: Iterable[Extent], interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._stopped = threading.Event()
        runs = [_Run(weakref.ref(e.file), e.start, e.nbytes) for e in extents if e.file.is_awaited]
        self._thread: threading.Thread | None = None
        if runs:
            arguments = (runs, self._stopped)
            self._thread = threading.Thread(target=_run, args=arguments, name="holdall-arrival", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all of it is here, or cannot be had; for measurements and tests."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """End it, and all waiting for the store."""
        self._stopped.set()
        self._interrupt()
        self.wait()


def _run(runs: list[_Run], stopped: threading.Event) -> None:
    try:
        for run in runs:
            for first in range(0, run.nbytes, _AT_ONCE_BYTES):
                file = run.file()
                if stopped.is_set() or file is None:
                    break
                start = run.start + first
                file.bring(np.array([start]), np.array([min(start + _AT_ONCE_BYTES, run.start + run.nbytes)]))
                del file
    except HoldallError as error:
        if not stopped.is_set():
            _LOG.warning("the rest of a loaded checkpoint is fetched when it is sampled from (%s)", error)
        return
    if stopped.is_set():
        return
    for run in runs:
        if (arrived := run.file()) is not None:
            arrived.is_awaited = False
