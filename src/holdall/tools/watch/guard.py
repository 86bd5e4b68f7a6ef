"""The guard: what a process does before its memory runs out.

In:  the limits that the process is under, checked every half second, and more often as one comes near.
Out: a warning, memories that spill, or a checkpoint.
A thread may come too late on a busy machine. Therefore a memory that grows asks the guard itself, in the thread that
adds, as often as its growth may bring a limit near; and if one is near, `add` waits until the memory has spilled.
Invariant: it acts while some memory is left, and it never raises: training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from holdall import report as tracked
from holdall.errors import ArgumentError, ClosedError
from holdall.machine import Limit, held_bytes, memory_limits
from holdall.tools.watch.agent import Agent
from holdall.tools.watch.allocators import return_free_heap
from holdall.tools.watch.process_watcher import stalled_percent
from holdall.units import format_bytes

OnPressure = Literal["warn", "spill", "checkpoint"]
PRESSURE_ACTIONS = ("warn", "spill", "checkpoint")

_LOOKS_UNTIL_NEAR = 8
"""A memory asks again after it took this part of what was left until a limit is near."""
_EXTRA_SHARE_TO_FREE = 0.05
"""Share of the limit that is freed beyond what is needed, so that the next check finds something left."""
_STALLED_PERCENT = 40.0
"""Per cent of the time that processes wait for memory: as bad as having none."""
_PAUSE_AFTER_ACTION_S = 1.0
_PAUSE_AFTER_WORDS_S = 10.0  # a memory that fills faster than it spills is short again and again
"""Time after an action in which it takes effect."""

_LOG = logging.getLogger("holdall")
_LOOKAHEAD_S = 1.0
"""A limit that will be near after this time, at the present rate, is near."""
_LONGEST_PAUSE_S = 0.5
_SHORTEST_PAUSE_S = 0.02
_POSSIBLE_BURST_BYTES_PER_S = 512.0 * 2**20
"""Bytes a second that a quiet process may start to take before the next check."""


class MemoryGuard:
    """Looks at the limits, and acts when one comes near.

    Args:
        act: What to do.
        at: Share of a limit from which on it is near.
        limit_bytes: A limit of the user's own, over this process alone.
        checkpoint: Saves what is worth saving; for `act="checkpoint"`, called once each time memory runs short.
    """

    def __init__(
        self,
        agent: Agent,
        act: OnPressure,
        at: float = 0.9,
        limit_bytes: int | None = None,
        checkpoint: Callable[[], Any] | None = None,
    ) -> None:
        if act not in PRESSURE_ACTIONS:
            raise ArgumentError(f"on_pressure ({act!r}) must be one of {', '.join(PRESSURE_ACTIONS)}")
        if not 0.1 <= at <= 0.99:
            raise ArgumentError(f"pressure_at ({at}) must be a share of the limit, from 0.1 to 0.99")
        if act == "checkpoint" and checkpoint is None:
            raise ArgumentError("on_pressure is 'checkpoint', but checkpoint is None; pass a function that saves")
        self._agent, self._act = agent, act
        self._limit_bytes, self._checkpoint = limit_bytes, checkpoint
        self._is_near = False
        self._rests_until = self._silent_until = 0.0
        self._approach = LimitTracker(at)
        self._pid = os.getpid()
        self._checking = threading.Lock()
        self._unseen_bytes = 0.0  # that memories may still take before they ask again
        self._pause_s = 0.0
        self._plan_next_look(self._approach.follow(self._limits(), time.monotonic()))
        self._ended = threading.Event()
        tracked.GROWTH_CHECKS.append(self.is_short)
        self._thread = threading.Thread(target=self._run, name="holdall-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the guard."""
        self._ended.set()
        with contextlib.suppress(ValueError):  # it was stopped before
            tracked.GROWTH_CHECKS.remove(self.is_short)

    def is_short(self, grown: int) -> bool:
        """Return whether memory is short, after one that spills took so much more; asked by the thread that adds."""
        self._unseen_bytes -= grown
        if self._unseen_bytes > 0 or self._act != "spill" or os.getpid() != self._pid:  # a fork has no guard
            return False
        try:
            return self.check(rests=False)
        except Exception:
            _LOG.exception("the memory guard failed; training goes on without it")
            self.stop()
            return False

    def check(self, *, rests: bool = True) -> bool:
        """Check the limits once; return whether one was near and the guard acted.

        Args:
            rests: Whether what was done within the last second is given time to take effect.
        """
        with self._checking:
            now = time.monotonic()
            known = self._approach.follow(self._limits(), now)
            near = nearest_of(known)
            self._plan_next_look(known)
            if rests and now < self._rests_until:
                return False
            if not near.is_near and (stalled_percent() or 0.0) < _STALLED_PERCENT:
                self._is_near = False
                return False
            room = _EXTRA_SHARE_TO_FREE * near.limit.total_bytes
            self._do(near, int(max(room - near.spare_bytes, room) + near.soon_bytes), now)
            self._is_near, self._rests_until = True, now + _PAUSE_AFTER_ACTION_S
            return True

    def _plan_next_look(self, known: list[ApproachedLimit]) -> None:
        """Look again before any limit can be near: the one that is near first may not be the one with least left."""
        self._pause_s = min(one.pause_s for one in known)
        self._unseen_bytes = min(one.spare_bytes for one in known) / _LOOKS_UNTIL_NEAR

    def _limits(self) -> list[Limit]:
        limits = memory_limits()
        if self._limit_bytes is not None:
            left = max(self._limit_bytes - held_bytes().proportional, 0)
            limits.append(Limit("limit", left, self._limit_bytes))
        return limits

    def _do(self, near: ApproachedLimit, wanted: int, now: float) -> None:
        left, total = format_bytes(near.limit.free_bytes), format_bytes(near.limit.total_bytes)
        text = f"memory is short: {left} left of {total} ({near.limit.name})"
        if near.spare_bytes > 0:  # it does not look short yet
            text += f", and {format_bytes(int(near.bytes_per_second))} more is taken every second"
        if self._act == "spill":
            done = self._relieve(wanted)
            return_free_heap()
            text += f"; {done}"
        elif self._act == "checkpoint" and not self._is_near and self._checkpoint is not None:
            self._checkpoint()
            text += "; a checkpoint is being taken"
        if now >= self._silent_until and (self._act == "spill" or not self._is_near):
            self._silent_until = now + (_PAUSE_AFTER_WORDS_S if self._act == "spill" else _PAUSE_AFTER_ACTION_S)
            _LOG.warning("%s", text)
            self._agent.add_event(text)

    def _relieve(self, wanted: int) -> str:
        """Ask every memory to give up its share."""
        memories = [memory for memory in list(tracked.LIVING) if hasattr(memory, "relieve")]
        sizes = [sum(int(array.nbytes) for _, array in memory.arrays()) for memory in memories]
        for memory, size in zip(memories, sizes, strict=True):
            with contextlib.suppress(ClosedError):
                memory.relieve(-(-wanted * size // max(sum(sizes), 1)))
        if not memories:
            return "no memory of holdall can give some back"
        return f"holdall's memories must hold {format_bytes(wanted)} less"

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            try:
                self.check()
            except Exception:  # a guard that fails must not end the training
                _LOG.exception("the memory guard failed; training goes on without it")
                return


class ApproachedLimit(NamedTuple):
    """A limit, and how near it is."""

    limit: Limit
    spare_bytes: float  # until it is near; below 0: it is
    bytes_per_second: float  # by which use grows

    @property
    def is_near(self) -> bool:
        """Whether it is near, or will be in a second."""
        return self.spare_bytes <= self.soon_bytes

    @property
    def pause_s(self) -> float:
        """Seconds until the next check."""
        pause = self.spare_bytes / (4.0 * self.bytes_per_second + _POSSIBLE_BURST_BYTES_PER_S)
        return min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)

    @property
    def soon_bytes(self) -> float:
        """Bytes that will be taken within the next second."""
        return self.bytes_per_second * _LOOKAHEAD_S


def nearest_of(known: Iterable[ApproachedLimit]) -> ApproachedLimit:
    """Return the limit that is near first, as a share of its size."""
    return min(known, key=lambda near: (near.spare_bytes - near.soon_bytes) / max(near.limit.total_bytes, 1))


class LimitTracker:
    """Follows how fast memory is taken. A rising rate counts at once, a falling one slowly.

    Args:
        at: Share of a limit from which on it is near.
    """

    def __init__(self, at: float) -> None:
        self._at = at
        self._before: dict[str, tuple[float, int, float]] = {}  # when, how much was left, bytes a second

    def follow(self, limits: Iterable[Limit], now: float) -> list[ApproachedLimit]:
        """Return all limits, with what is left of each and how fast it goes."""
        return [ApproachedLimit(limit, self._spare(limit), self._rate(limit, now)) for limit in limits]

    def nearest(self, limits: Iterable[Limit], now: float) -> ApproachedLimit:
        """Return the limit that is near first, as a share of its size."""
        return nearest_of(self.follow(limits, now))

    def _spare(self, limit: Limit) -> float:
        return limit.free_bytes - (1.0 - self._at) * limit.total_bytes

    def _rate(self, limit: Limit, now: float) -> float:
        moment, left, before = self._before.get(limit.name, (now, limit.free_bytes, 0.0))
        rate = max((left - limit.free_bytes) / (now - moment), 0.0) if now > moment else 0.0
        rate = max(rate, 0.5 * (before + rate))
        self._before[limit.name] = (now, limit.free_bytes, rate)
        return rate
