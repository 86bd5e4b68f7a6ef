"""Tiers: which blocks stay raw, which are sealed and which go to disk; and the queue of those that wait for that.

In:  what the user said, what this machine has, and blocks as they are frozen, sealed and dropped.  Out: orders.
Invariant: a budget in bytes is a limit over everything that a memory holds. What does not depend on the blocks is set
aside first: rings, the open segment, those being sealed and spilled, staging. The queue, which worker and memory share,
changes in single steps, so that an interrupt of the memory's thread leaves nothing in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from holdall.errors import ArgumentError
from holdall.machine import available_bytes, pool_threads
from holdall.storage.blocks import SealedSlices, SliceBlock
from holdall.storage.codec_choice import COST_CAPS
from holdall.storage.rings import FieldLayout
from holdall.storage.slices import FrozenBlock
from holdall.units import format_bytes

_SHARE_OF_AVAILABLE = 4
_SHARE_BEFORE_DISK = 2
"""With a disk tier and no limit named, sealed blocks stay in memory up to this share of what is available."""
_SEGMENTS_OF_A_BUDGET = 32
"""A segment takes at most this share of a limit, for there are several on their way: see SEGMENTS_ON_THE_WAY."""
SEGMENTS_ON_THE_WAY = 6
"""One open, one waiting to be sealed, one being sealed, what it becomes, that being written out, and a spare arena."""
_RINGS_OF_A_BUDGET = 8
"""Fields that could lie in segments take at most this share of a limit in rings, which are never compressed."""
_STAGING_SHARE, _MOST_STAGING = 8, 256 * 2**20
_AHEAD_S = 0.5
"""Raw blocks are sealed before they reach what is allowed, if they would do so within this time."""
_WAITING_SHARE, _MAX_WAITING_BYTES = 32, 2**30
"""Without a limit, blocks that wait to be compressed may take this share of the available memory, up to a maximum.
Bursts of that size are compressed well. With two segments, recorded frames that are added at full speed take up to
five times as many bytes, because most of them are compressed with the fast preset."""
_SPARED_WHILE_STUCK = 2
"""Segments that a budget sets aside for writing to disk, and that may be used while the disk takes nothing."""
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Budget:
    """What the stages need to know of `budget`, `prefer` and `spill_dir`; this machine is asked when it matters."""

    limit: int | None = None  # over everything, if the user named one
    is_auto: bool = False  # whether it goes by what is available
    spills: bool = False
    cost_cap: float = COST_CAPS["balanced"]  # of sampling sealed slices, over a raw gather
    most_threads: int | None = None  # None: see `pool_threads`

    @cached_property
    def threads(self) -> int:
        """Threads of a pool."""
        return self.most_threads or pool_threads()

    @cached_property
    def _available(self) -> int:
        return available_bytes()

    @property
    def raw_bytes(self) -> int:
        """What closed blocks may take that stay raw."""
        return self._available // _SHARE_OF_AVAILABLE if self.is_auto else self.limit or 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of raw blocks that may wait to be compressed, if there is no limit."""
        return 0 if self.limit is not None else min(self._available // _WAITING_SHARE, _MAX_WAITING_BYTES)

    @property
    def staging_bytes(self) -> int:
        """Most that may be kept for the next batches."""
        return NO_LIMIT if self.limit is None else min(self.limit // _STAGING_SHARE, _MOST_STAGING)

    def choose(self, layouts: Sequence[FieldLayout]) -> tuple[list[int], int]:
        """Return the large fields of a layout that the limit allows, and the most that one segment may take.

        The first layout where possible; if none is allowed, say which limit would allow one.
        """
        limit = self.limit or 0
        fitting = [layout for layout in layouts if _least_limit(layout.fixed, layout.segment) <= limit]
        if not fitting:
            least = min(layouts, key=lambda layout: _least_limit(layout.fixed, layout.segment))
            self.require(least.fixed, least.segment)
        modest = (layout for layout in fitting if layout.optional * _RINGS_OF_A_BUDGET <= limit)
        return next(modest, fitting[-1]).large, limit // _SEGMENTS_OF_A_BUDGET

    def require(self, fixed: int, segment: int) -> None:
        """Refuse a limit that is too small for rings and tables of all ticks, and for the smallest useful segment."""
        least = _least_limit(fixed, segment)
        if self.limit is not None and self.limit < least:
            raise ArgumentError(
                f"budget ({format_bytes(self.limit)}) is too small: the small fields and the index of a memory of this "
                f"capacity take {format_bytes(fixed)}, and segments need {format_bytes(segment)} each while they are "
                f"written, sealed and moved; give it at least {least} bytes ({format_bytes(least)}), or lower capacity"
            )

    def closed_allowed(self, fixed: int, elsewhere: int, segment: int) -> int:
        """Return what closed blocks may take in memory, in any form.

        Beside them there are rings and tables of the full capacity (`fixed`), logs, dictionaries and indexes of blocks
        on disk (`elsewhere`), and segments on their way, of so many bytes at most.
        """
        if self.limit is None:
            return NO_LIMIT if not self.spills else self._available // _SHARE_BEFORE_DISK if self.is_auto else 0
        aside = fixed + elsewhere + SEGMENTS_ON_THE_WAY * segment + self.staging_bytes
        return max(self.limit - aside, 0)


def _least_limit(fixed: int, segment: int) -> int:
    return max(_SEGMENTS_OF_A_BUDGET * segment, 2 * fixed)


class EarlyDrops(NamedTuple):
    """Transitions that left before the capacity was reached, and why."""

    transitions: int = 0
    reason: str = ""  # of the newest drop, with the remedy

    def plus(self, transitions: int, reason: str) -> EarlyDrops:
        """Return the drops with some more."""
        return EarlyDrops(self.transitions + transitions, reason)


class Allowance(NamedTuple):
    """What closed blocks may take in memory."""

    raw: int
    closed: int  # raw or sealed
    at_most: int  # the same while the disk takes nothing: what is set aside for writing is not needed then


class Tiers:
    """Keeps the newest blocks raw, the older ones sealed, and the oldest on disk.

    It decides and counts; who owns it carries the orders out and says what became of every block.

    Args:
        measures_early: Whether the first block of every field is sealed at once, though it might stay raw: how much
            fits a limit is known by how much it shrinks.
    """

    def __init__(self, budget: Budget, *, measures_early: bool = False) -> None:
        self._budget = budget
        self._most_raw = self._most_closed = NO_LIMIT  # what is left of the budget after `relieve`
        self._measures_early = measures_early
        self._raw = _BlockQueue()
        self._sealed = _BlockQueue()  # in memory: sealed, or did not shrink
        self._measured: list[FrozenBlock] = []  # to be sealed early
        self._sealing: dict[int, FrozenBlock] = {}  # by identity of the block
        self._spilling: dict[int, FrozenBlock] = {}
        self._is_stuck = False  # the disk did not take the last block
        self._has_made_room = False  # disk space was freed, and no block was written since
        self._is_refusing = False  # the disk did not take a block although disk space was freed for it
        self._tries_again = False  # whether a block came since the disk was tried last
        # Blocks and their bytes in every spill file, by the file's identity. A file is deleted with its last block.
        self._files: dict[int, tuple[int, int]] = {}
        self._fields: set[int] = set()

    def allowance(self, fixed: int, overhead: int, segment: int) -> Allowance:
        """Return what closed blocks may take beside all else, see `Budget.closed_allowed`."""
        closed = min(self._budget.closed_allowed(fixed, overhead, segment), self._most_closed)
        at_most = closed + _SPARED_WHILE_STUCK * segment
        return Allowance(min(self._budget.raw_bytes, self._most_raw, closed), closed, at_most)

    def keep(self, frozen: FrozenBlock) -> None:
        """Take a block that was just frozen, or one that was sealed elsewhere."""
        self._tries_again = True
        if frozen.block.sealed is not None:
            self._sealed.put(frozen)
        elif self._measures_early and frozen.field not in self._fields:
            self._measured.append(frozen)
        else:
            self._raw.put(frozen)
        self._fields.add(frozen.field)

    def settle(self, allowance: Allowance, bytes_per_second: float = 0.0) -> None:
        """Decide what has to be sealed and spilled; it counts as on its way from now on, see `under_way`."""
        self._sealing |= {id(frozen.block): frozen for frozen in self._measured}
        self._measured = []
        raw_allowed = allowance.raw - int(_AHEAD_S * bytes_per_second)
        while self._raw.blocks and (self._raw.nbytes > raw_allowed or self._held > allowance.closed):
            self._raw.move_oldest(self._sealing)
        if self._budget.spills and not self._is_stuck:
            while self._sealed.blocks and self._held > allowance.closed:
                self._sealed.move_oldest(self._spilling)

    def is_over(self, allowance: Allowance, freed_bytes: int) -> bool:
        """Whether the oldest segment has to leave early.

        Without a disk tier, segments leave until the rest fits. If the disk did not take a block, segments leave until
        the disk has room for what is too much in memory, see `try_again`. If the disk takes nothing even then, they
        also leave until memory holds no more than `allowance.at_most`.

        Args:
            freed_bytes: Disk space that segments which left just now have freed.
        """
        excess_bytes = self._held - allowance.closed
        if excess_bytes <= 0:
            return False
        if not self._budget.spills:
            return True
        if not self._is_stuck:
            return False
        is_room_needed = freed_bytes < max(excess_bytes, self._next_spill_bytes)
        return is_room_needed or (self._is_refusing and self._held > allowance.at_most)

    @property
    def _next_spill_bytes(self) -> int:
        """Bytes of the block that is spilled next."""
        return next((frozen.block.used_bytes for frozen in self._sealed.blocks.values()), 0)

    def try_again(self, allowance: Allowance, freed_bytes: int) -> None:
        """Have blocks spilled again after the disk did not take one.

        If disk space was freed, go on as if the disk worked. If not, try one block for every block that comes.
        """
        if not self._is_stuck:
            return
        if freed_bytes:
            self._is_stuck = False
            self._has_made_room = not self._spilling  # a block that is being written had none
            self.settle(allowance)
        elif self._tries_again and self._sealed.blocks:
            self._sealed.move_oldest(self._spilling)
        self._tries_again = False

    def take_back(self, block: SliceBlock) -> None:
        """Go on with a block that was sealed or spilled, or could not be: then no other one is spilled."""
        if (frozen := self._sealing.pop(id(block), None)) is not None:
            self._sealed.put(frozen)
        if (frozen := self._spilling.pop(id(block), None)) is None:
            return
        extent = block.extent
        if extent is not None:
            blocks, nbytes = self._files.get(id(extent.file), (0, 0))
            self._files[id(extent.file)] = blocks + 1, nbytes + extent.nbytes
        self._is_stuck = extent is None
        self._is_refusing = self._is_stuck and (self._is_refusing or self._has_made_room)
        self._has_made_room = False
        if self._is_stuck:
            self._tries_again = False
            waiting, self._spilling = list(self._spilling.values()), {}
            for back in reversed([frozen, *waiting]):
                self._sealed.put_back(back)

    def forget(self, evicted: Sequence[SliceBlock]) -> int:
        """Let go of blocks that were evicted, which need no sealing or spilling; return the disk space that is freed.

        Disk space is freed with the last block of a spill file.
        """
        gone = {id(block) for block in evicted}
        self._raw.drop(gone)
        self._sealed.drop(gone)
        for key in gone:
            self._sealing.pop(key, None)
            self._spilling.pop(key, None)
        freed_bytes = 0
        for block in evicted:
            file = None if block.extent is None else id(block.extent.file)
            if file is None or file not in self._files:  # in memory, or in a file of a checkpoint
                continue
            blocks, nbytes = self._files[file]
            if blocks > 1:
                self._files[file] = blocks - 1, nbytes
            else:
                del self._files[file]
                freed_bytes += nbytes
        return freed_bytes

    def under_way(self) -> tuple[list[FrozenBlock], list[FrozenBlock]]:
        """Return the blocks that are to be sealed, and those that are to be spilled."""
        return list(self._sealing.values()), list(self._spilling.values())

    def rollback_targets(self) -> tuple[object, ...]:
        """Return the objects whose attributes a decision changes, for `Repair.restoring`."""
        return self, self._raw, self._sealed

    def is_changing(self, block: SliceBlock) -> bool:
        """Whether a block waits to be sealed or spilled, or is being."""
        return id(block) in self._sealing or id(block) in self._spilling

    def relieve(self, nbytes: int) -> None:
        """Allow that many bytes less from now on: raw, and where there is a disk tier, in any form."""
        self._most_raw = min(self._most_raw, max(self._raw.nbytes - nbytes, 0))
        if self._budget.spills:
            self._most_closed = min(self._most_closed, max(self._held - nbytes, 0))

    def ticks_that_fit(
        self, fixed: int, overhead: int, segment: int, ticks: int, slice_bytes_per_tick: float
    ) -> int | None:
        """Say how many ticks the limit holds in memory, by `ticks` closed ones; None if that is not known yet."""
        shrinks_to = self.shrinks_to
        if self._budget.limit is None or shrinks_to is None or ticks == 0:
            return None
        room = self._budget.closed_allowed(fixed, overhead, segment) + overhead
        return int(room / max(slice_bytes_per_tick * shrinks_to + overhead / ticks, 1e-9))

    @property
    def shrinks_to(self) -> float | None:
        """What became of sealed blocks, over what they were; None before one of every field was sealed."""
        known = {frozen.field for frozen in self._sealed.blocks.values()}
        return self._sealed.nbytes / self._sealed.whole_bytes if self._fields and known == self._fields else None

    def spare_bytes(self, allowance: Allowance) -> int | None:
        """Return what a limit leaves for blocks that wait; None if there is none: then as few wait as possible."""
        return None if self._budget.limit is None else max(allowance.closed - self._held, 0)

    def has_room(self, allowance: Allowance, nbytes: int) -> bool:
        """Whether at least `nbytes` of the limit are free or taken by raw blocks, which compression makes smaller."""
        return self._budget.limit is None or self._raw.nbytes + allowance.closed - self._held >= nbytes

    @property
    def _held(self) -> int:
        """What closed blocks take, those on their way as if they had arrived: for these, memory is set aside."""
        ratio = self._sealed.nbytes / self._sealed.whole_bytes if self._sealed.whole_bytes else 0.0
        sealing = sum(frozen.block.used_bytes for frozen in self._sealing.values())
        return self._raw.nbytes + self._sealed.nbytes + int(ratio * sealing)


class _BlockQueue:
    """Blocks in the order in which they came, and what they take."""

    def __init__(self) -> None:
        self.blocks: dict[int, FrozenBlock] = {}  # by identity of the block; copied often, so no OrderedDict
        self.nbytes = 0
        self.whole_bytes = 0  # if none of them was sealed

    def put(self, frozen: FrozenBlock) -> None:
        self.blocks[id(frozen.block)] = frozen
        self._count(frozen, 1)

    def put_back(self, frozen: FrozenBlock) -> None:
        self.blocks = {id(frozen.block): frozen, **self.blocks}
        self._count(frozen, 1)

    def move_oldest(self, target: dict[int, FrozenBlock]) -> None:
        name = next(iter(self.blocks))
        target[name] = self.blocks.pop(name)
        self._count(target[name], -1)

    def drop(self, gone: set[int]) -> None:
        for frozen in [self.blocks.pop(key) for key in gone if key in self.blocks]:
            self._count(frozen, -1)

    def _count(self, frozen: FrozenBlock, sign: int) -> None:
        self.nbytes += sign * frozen.block.used_bytes
        self.whole_bytes += sign * frozen.block.used * frozen.block.slice_bytes


# ---------------------------------------------------------------- the queue

_WAITING_SEGMENTS = 2
"""Segments that may wait for the worker, whatever their size: one is filled while another one is compressed."""


class SealResult(NamedTuple):
    """What became of a block."""

    block: SliceBlock
    sealed: SealedSlices | None  # None: it stays as it is
    is_spilled: bool  # whether it was to go to a file


@dataclass(frozen=True, eq=False, slots=True)
class SealJob:
    """What has to be done with a block."""

    frozen: FrozenBlock
    spill: bool  # move it to a file, instead of sealing it
    nbytes: int  # that somebody may wait for


class SealProgress(NamedTuple):
    """What the worker is at."""

    begun: tuple[SealJob, ...] = ()  # the last may still be the first of the jobs, too
    nbytes: int = 0  # of these that are sealed
    ended: int = 0  # of the jobs before


class SealQueue:
    """What the worker and the memory share.

    An interrupt may hit the memory's thread anywhere, so there is no lock that it could leave behind: queues change in
    one step, and bells are locks that one waits for and others release. A thread that waits looks again after a while,
    so that a bell which was not rung costs time only.

    Args:
        min_waiting_bytes: Bytes that may wait for the worker if there is no limit; at least two segments may.
    """

    def __init__(self, min_waiting_bytes: int = 0) -> None:
        self.jobs: deque[SealJob] = deque()
        self.progress = SealProgress()  # changed in one step, by the worker
        self.sealed_bytes = ctypes.c_int64()  # the same, for C, which reads it at any time; never ahead of it
        self.results: deque[SealResult] = deque()
        self.arrivals: deque[tuple[float, int]] = deque(maxlen=4)  # when blocks came, and the bytes of all so far
        self._min_waiting_bytes = min_waiting_bytes
        self.segment_bytes = 0  # of the blocks that were filled last
        self.spare_bytes: int | None = None  # of a limit that blocks may take while they wait; None without a limit
        self.away_until = -1e9  # by the clock: no codec is chosen before
        self._waited_s = 0.0  # that `add` waited for room, in all
        self._waits_since: float | None = None
        self.is_drained = False  # whether a caller waits until nothing waits; then no more blocks come
        self.wakes_worker = new_bell()
        self.waiting: deque[threading.Lock] = deque()  # a bell for everybody who waits for the worker
        self.stopped = False
        self.failure = ""

    def under_way(self) -> list[SealJob]:
        """Return what waits or is being worked at, each once."""
        jobs, begun = list(self.jobs), self.progress.begun
        return [*(job for job in begun if job not in jobs), *jobs]

    def begin_next(self) -> SealJob | None:
        """Take the next job; it is never in between. What was begun before stays begun."""
        before = self.progress
        while self.jobs:
            with contextlib.suppress(IndexError, ValueError):  # it was withdrawn
                job = self.jobs[0]
                self.progress = before._replace(begun=(*before.begun, job))
                self.jobs.remove(job)
                return job
        self.progress = before
        return None

    def got_on(self, job: SealJob, nbytes: int) -> None:
        """So many bytes of a job are sealed; fewer than before if it was begun again."""
        self._count(self.progress._replace(nbytes=min(nbytes, job.nbytes)))

    def end(self, job: SealJob) -> None:
        """Forget a job that was done."""
        begun, _, ended = self.progress
        others = tuple(other for other in begun if other is not job)
        self._count(SealProgress(others, 0, ended + (job.nbytes if len(others) < len(begun) else 0)))

    def _count(self, progress: SealProgress) -> None:
        sealed = progress.ended + progress.nbytes
        self.sealed_bytes.value = min(sealed, self.sealed_bytes.value)
        self.progress = progress
        self.sealed_bytes.value = sealed

    def outstanding(self) -> tuple[int, int]:
        """Return what is not sealed or spilled yet of the blocks that came, and what was so far of all."""
        jobs, (begun, nbytes, ended) = list(self.jobs), self.progress
        return sum(job.nbytes for job in {*jobs, *begun}) - nbytes, ended + nbytes

    @property
    def max_waiting_bytes(self) -> int:
        """Raw bytes that waiting blocks, the rest of the current block and the open segment may take together."""
        bytes_of_segments = _WAITING_SEGMENTS * self.segment_bytes
        if self.spare_bytes is None:
            return max(bytes_of_segments, self._min_waiting_bytes)
        return bytes_of_segments + self.spare_bytes

    @property
    def is_behind(self) -> bool:
        """Whether the worker should use the fast preset: `add` waits, or will soon, and more blocks are to come."""
        if self.is_drained:
            return False
        return self.is_pressed or 2 * self.outstanding()[0] > self.max_waiting_bytes

    def came(self, nbytes: int) -> None:
        """Remember that blocks were filled, whether they are sealed now or stay raw for a while."""
        self._waits_since = None  # an interrupt may have left it
        before = self.arrivals[-1][1] if self.arrivals else 0
        self.arrivals.append((self._now(), before + nbytes))
        self.segment_bytes = nbytes

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
    (bell := threading.Lock()).acquire()
    return bell


def ring(bell: threading.Lock) -> None:
    """Wake who waits for a bell."""
    with contextlib.suppress(RuntimeError):  # it rang already
        bell.release()
