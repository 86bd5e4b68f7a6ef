"""The queue of a sealer: what its worker and the memory share.

In:  blocks to seal or to spill.  Out: what became of each, and what will be sealed again when there is time.
Invariant: everything changes in one step, so that an interrupt of the memory's thread leaves nothing in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from holdall.storage.blocks import SealedSlices, SliceBlock
from holdall.storage.slices import FrozenBlock


class SealResult(NamedTuple):
    """What became of a block."""

    block: SliceBlock
    sealed: SealedSlices | None  # None: it stays as it is
    is_spilled: bool  # whether it was to go to a file
    is_again: bool = False  # whether it was sealed before, in a hurry


@dataclass(frozen=True, eq=False, slots=True)
class SealJob:
    """What has to be done with a block."""

    frozen: FrozenBlock
    spill: bool  # move it to a file, instead of sealing it
    again: bool = False  # seal better what was sealed in a hurry


class HurriedBlock:
    """A block that was sealed in a hurry; it goes with its last segment all the same.

    Args:
        is_raw: Whether it did not shrink then.
    """

    def __init__(self, frozen: FrozenBlock, *, is_raw: bool) -> None:
        self._block = weakref.ref(frozen.block)
        self._before, self._behind = (frozen.field, frozen.leaf, frozen.window), (frozen.lanes, frozen.logs)
        self._is_raw = is_raw
        self.whole_bytes = frozen.block.used * frozen.block.slice_bytes

    def frozen(self) -> FrozenBlock | None:
        """Return it; None if it is gone, or no longer in memory."""
        block = self._block()
        if block is None or block.is_on_disk or (block.sealed is None and not self._is_raw):
            return None
        return FrozenBlock(*self._before, block, *self._behind)


class SealQueue:
    """What the worker and the memory share.

    An interrupt may hit the memory's thread anywhere, so there is no lock that it could leave behind: what is asked for
    and what came of it lie in queues that change in one step, and bells are locks that one waits for and others
    release. A thread that waits looks again after a while, so that a bell which was not rung costs time only.
    """

    def __init__(self, *, seals_again: bool) -> None:
        self.jobs: deque[SealJob] = deque()
        self.begun: tuple[SealJob, ...] = ()  # what the worker is at; the last may still be the first of the jobs, too
        self.results: deque[SealResult] = deque()
        # Blocks that are to be sealed again when there is time.
        self.hurried: deque[HurriedBlock] = deque(maxlen=None if seals_again else 0)
        self.arrivals: deque[tuple[float, int]] = deque(maxlen=4)  # when blocks came, and the bytes of all so far
        self._waited_s = 0.0  # that `add` waited for room, in all
        self._waits_since: float | None = None
        self.has_leisure = False  # somebody waits for all of it, so there is nothing to wait for
        self.wakes_worker = new_bell()
        self.waiting: deque[threading.Lock] = deque()  # a bell for everybody who waits for the worker
        self.stopped = False
        self.failure = ""

    def under_way(self) -> list[SealJob]:
        """Return what waits or is being worked at, each once."""
        jobs, begun = list(self.jobs), self.begun
        return [*(job for job in begun if job not in jobs), *jobs]

    def begin_next(self) -> SealJob | None:
        """Take the next job; it is never in between. What was begun before stays begun."""
        before = self.begun
        while self.jobs:
            with contextlib.suppress(IndexError, ValueError):  # it was withdrawn
                job = self.jobs[0]
                self.begun = (*before, job)
                self.jobs.remove(job)
                return job
        self.begun = before
        return None

    def begin_again(self) -> SealJob | None:
        """Take a block that was sealed in a hurry and is still in memory, to be sealed better."""
        while self.hurried:
            with contextlib.suppress(IndexError):
                frozen = self.hurried[0].frozen()
                job = None if frozen is None else SealJob(frozen, spill=False, again=True)
                self.begun = () if job is None else (job,)
                self.hurried.popleft()
                if job is not None:
                    return job
        return None

    def end(self, job: SealJob) -> None:
        """Forget a job that was done."""
        self.begun = tuple(other for other in self.begun if other is not job)

    def came(self, nbytes: int) -> None:
        """Remember that a block came."""
        self._waits_since = None  # an interrupt may have left it
        before = self.arrivals[-1][1] if self.arrivals else 0
        self.arrivals.append((self._now(), before + nbytes))

    @contextlib.contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """`add` waits meanwhile: blocks would come faster than they do."""
        self._waits_since = began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began
            self._waits_since = None

    @property
    def is_pressed(self) -> bool:
        """Whether `add` waits for room."""
        return self._waits_since is not None

    def _now(self) -> float:
        """A clock that stands still while `add` waits."""
        waits_since = self._waits_since
        return (time.monotonic() if waits_since is None else waits_since) - self._waited_s

    @property
    def bytes_per_second(self) -> float:
        """How fast blocks come, or would if nobody waited: 0 if few came so far."""
        arrivals = tuple(self.arrivals)
        if len(arrivals) < 3:
            return 0.0
        (first, before), (_, total) = arrivals[0], arrivals[-1]
        return (total - before) / max(self._now() - first, 1e-6)

    @property
    def quiet_s(self) -> float:
        """For how long no block should come, by the last ones; 0 if few came so far, or one is late."""
        arrivals = tuple(self.arrivals)
        if len(arrivals) < 3:
            return 0.0
        (first, _), (last, _) = arrivals[0], arrivals[-1]
        return max(0.0, last + (last - first) / (len(arrivals) - 1) - self._now())

    def tell(self) -> None:
        """Wake everybody who waits for the worker."""
        while self.waiting:
            with contextlib.suppress(IndexError):  # another thread was quicker
                ring(self.waiting.popleft())

    def stop(self) -> None:
        """Let the worker end, and nobody wait for it any more."""
        self.stopped = True
        ring(self.wakes_worker)
        self.tell()


def new_bell() -> threading.Lock:
    """Return what one waits for with `acquire`, and others ring."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def ring(bell: threading.Lock) -> None:
    """Wake who waits for a bell."""
    with contextlib.suppress(RuntimeError):  # it rang already
        bell.release()
