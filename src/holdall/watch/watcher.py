"""The watcher: readings of another process, one after the other.

In:  a process id.  Out: readings; everything that takes time happens here, outside of the watched process.
Invariant: a reading's parts add up to its total. A process that ended is an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import psutil

from holdall.errors import WatchError
from holdall.machine import LINUX, disk, held_bytes, page_cache, peak_bytes
from holdall.threads import usable_cores
from holdall.watch.attribute import attribute
from holdall.watch.gpu import gpu_of
from holdall.watch.history import Live
from holdall.watch.pressure import headroom, stalled_share
from holdall.watch.reading import Part, Reading
from holdall.watch.sidecar import Told, told_by
from holdall.watch.tree import worker_parts

_STALE_S = 120.0
"""What a process said longer ago than this is about another moment."""


class Watcher:
    """Reads one process tree.

    Args:
        pid: The process; its children are its workers.
        limit_bytes: A limit that the user names beside those of the system, over the tree's memory.
        without: Processes below it that are no part of the training.
    """

    def __init__(self, pid: int, limit_bytes: int | None = None, without: Collection[int] = ()) -> None:
        self.pid = pid
        self._limit_bytes = limit_bytes
        self._without = without
        self._before: Told | None = None
        self._newest: Told | None = None
        self._cores = usable_cores()
        self._highest = 0
        try:
            self._process = psutil.Process(pid)
        except psutil.Error as error:
            raise WatchError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error

    @property
    def newest_told(self) -> Told | None:
        """What the process said of itself last."""
        return self._newest

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            return bool(self._process.is_running()) and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def listen(self) -> Live | None:
        """Return what the process said of its live objects since the last call; cheap, to be called often."""
        before = self._newest
        told = self._told()
        return None if told is None or told is before or self._newest is before else _live(told)

    def read(self) -> Reading:
        """Read the tree now."""
        try:
            return self._read()
        except (OSError, psutil.Error) as error:
            if isinstance(error, PermissionError | psutil.AccessDenied):
                raise WatchError(
                    f"pid ({self.pid}) belongs to another user, or may not be traced; run as its user, or as root"
                ) from error
            raise WatchError(f"pid ({self.pid}) has ended") from error

    def _read(self) -> Reading:
        told = self._told()
        now = time.time()
        own = attribute(self.pid, told) if LINUX else self._sums_alone(told)
        parts = [*own, *worker_parts(self.pid, self._without)]
        pss = sum(part.resident for part in parts)
        limit = None if self._limit_bytes is None else self._limit_bytes - pss
        return Reading(
            time=now,
            pss=pss,
            peak=self._peak(told),
            parts=tuple(parts),
            step=self._step_at(now),
            goal=None if told is None else told.goal,
            phase=None if told is None else told.phase,
            gpu=gpu_of(self.pid, told),
            steps_per_second=self._rate(),
            pressure=stalled_share(),
            threads=int(self._process.num_threads()),
            torch_threads=None if told is None else told.torch_threads,
            cores=self._cores,
            page_cache=page_cache(self.pid) if LINUX else None,
            headroom=headroom(self.pid, limit),
            spilled=0 if told is None else sum(told.spilled.values()),
            disk_free=None if told is None else _free_on_disk(told),
            exact=LINUX,
        )

    def _peak(self, told: Told | None) -> int:
        """Return the highest of all peaks: a process that tells its phases lets the kernel's begin anew."""
        phases = [] if told is None else [phase.peak for phase in told.phases.values()]
        self._highest = max(self._highest, peak_bytes(self.pid), *phases)
        return self._highest

    def _told(self) -> Told | None:
        """Return the newest sidecar, and keep the one before it for the rate of steps."""
        told = told_by(self.pid)
        if told is None or time.time() - told.time > _STALE_S:
            return None
        if self._newest is None or told.time > self._newest.time:
            self._before, self._newest = self._newest, told
        return told

    def _rate(self) -> float | None:
        before, newest = self._before, self._newest
        if before is None or newest is None or before.step is None or newest.step is None:
            return None
        return max(newest.step - before.step, 0) / max(newest.time - before.time, 1e-3)

    def _step_at(self, moment: float) -> int | None:
        """Return the step at which a reading was taken: what was last told, and what was made since."""
        newest, rate = self._newest, self._rate()
        if newest is None or newest.step is None:
            return None
        return newest.step + int((rate or 0.0) * min(max(moment - newest.time, 0.0), 5.0))

    def _sums_alone(self, told: Told | None) -> list[Part]:
        """Say what can be said where the system tells only sums: what was named, and the rest."""
        whole = held_bytes(self.pid).proportional
        left, parts = whole, []
        for region in () if told is None else told.regions:
            # Pages cannot be counted here: what was written to is estimated by how full a buffer is.
            touched = min(int(region.nbytes * (1.0 if region.fill is None else region.fill)), left)
            left -= touched
            parts.append(Part(region.group, region.name, touched, region.nbytes, region.fill))
        return [*parts, Part("unattributed", "this system tells only the sum", left, left)]


def _live(told: Told) -> Live | None:
    """Return what live objects take, without the arrays of buffers: the series in which a leak shows."""
    if told.heap is None:
        return None
    named = sum(region.nbytes for region in told.regions if region.in_heap and region.group == "buffers")
    python = 0 if told.python is None else told.python.in_use
    heap = max(told.heap.in_use + told.heap.mapped + python - named, 0)
    return Live(told.time, told.step, told.phase, heap, python)


def _free_on_disk(told: Told) -> int | None:
    """Return what is left where memories spill to; the least, if that is several places."""
    limits = [disk(Path(folder)) for folder in told.spilled]
    return min((limit.free_bytes for limit in limits if limit is not None), default=None)
