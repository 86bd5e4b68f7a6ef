"""The guard: acts before the memory of this process runs out.

A thread checks every limit twice a second, and more often as one comes near. Because a thread may be late on a busy
machine, a memory that grows also asks the guard, in the thread that adds, as often as its growth may bring a limit
near. If a limit is near, `add` waits until the memory has spilled. The guard never raises: training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from holdall.errors import ArgumentError, ClosedError
from holdall.machine import Limit, held_bytes, memory_limits, read_text
from holdall.memory_registry import MEMORIES
from holdall.tools.watch.agent import Agent
from holdall.tools.watch.allocators import return_free_heap
from holdall.units import format_bytes

OnPressure = Literal["warn", "spill", "checkpoint"]

_QUESTIONS_UNTIL_NEAR = 8
"""A memory asks again after it took this fraction of what is left until a limit is near."""
_EXTRA_SHARE = 0.05
"""Share of the limit that is freed beyond what is needed, so that the next check finds room."""
_MAX_STALLED_PERCENT = 40.0
"""Percentage of time that processes wait for memory, above which memory is short."""
_PAUSE_AFTER_ACTION_S = 1.0
_PAUSE_AFTER_WARNING_S = 10.0
_LOOKAHEAD_S = 1.0
"""A limit that will be near after this time, at the present rate, is near."""
_MAX_PAUSE_S = 0.5
_MIN_PAUSE_S = 0.02
_POSSIBLE_BYTES_PER_S = 512.0 * 2**20
"""Rate at which a quiet process may start to allocate before the next check."""
_PRESSURE_FILES = (Path("/sys/fs/cgroup/memory.pressure"), Path("/proc/pressure/memory"))
_LOG = logging.getLogger("holdall")


def read_stalled_percent() -> float | None:
    """Return the percentage of the last ten seconds in which a process waited for memory. None if it is unknown."""
    for file in _PRESSURE_FILES:
        words = read_text(file).split()
        if len(words) > 1 and words[1].startswith("avg10="):
            return float(words[1].removeprefix("avg10="))
    return None


class ApproachedLimit(NamedTuple):
    """A limit, and how near it is."""

    limit: Limit
    spare_bytes: float  # Bytes until the limit is near. Negative if it is.
    bytes_per_second: float  # Growth of the memory in use.

    @property
    def soon_bytes(self) -> float:
        """Bytes that will be taken within the next second."""
        return self.bytes_per_second * _LOOKAHEAD_S

    @property
    def is_near(self) -> bool:
        """Whether the limit is near, or will be within a second."""
        return self.spare_bytes <= self.soon_bytes

    @property
    def pause_s(self) -> float:
        """Seconds until the next check."""
        pause_s = self.spare_bytes / (4.0 * self.bytes_per_second + _POSSIBLE_BYTES_PER_S)
        return min(max(pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)


def choose_nearest(known: Iterable[ApproachedLimit]) -> ApproachedLimit:
    """Return the limit that is near first, as a share of its size."""
    return min(known, key=lambda near: (near.spare_bytes - near.soon_bytes) / max(near.limit.total_bytes, 1))


class LimitTracker:
    """Measures how fast memory is taken. A rising rate counts at once, a falling one slowly.

    `pressure_at` is the share of a limit from which on it is near.
    """

    def __init__(self, pressure_at: float) -> None:
        self._pressure_at = pressure_at
        self._before: dict[str, tuple[float, int, float]] = {}  # Time, free bytes and rate, by limit.

    def follow(self, limits: Iterable[Limit], now: float) -> list[ApproachedLimit]:
        """Return all limits with their spare bytes and rates."""
        found = []
        for limit in limits:
            spare_bytes = limit.free_bytes - (1.0 - self._pressure_at) * limit.total_bytes
            found.append(ApproachedLimit(limit, spare_bytes, self._measure_rate(limit, now)))
        return found

    def _measure_rate(self, limit: Limit, now: float) -> float:
        moment, free_bytes, before = self._before.setdefault(limit.name, (now, limit.free_bytes, 0.0))
        if now - moment < _MIN_PAUSE_S:  # One page in a microsecond would be gigabytes per second.
            return before
        rate = max((free_bytes - limit.free_bytes) / (now - moment), 0.0)
        rate = max(rate, 0.5 * (before + rate))
        self._before[limit.name] = (now, limit.free_bytes, rate)
        return rate


class MemoryGuard:
    """Checks the limits, and acts when one is near.

    Args:
        agent: Publishes what the guard did.
        on_pressure: "warn", "spill" or "checkpoint".
        pressure_at: Share of a limit from which on it is near.
        limit_bytes: Limit of the user's own over this process.
        checkpoint: Called once each time memory runs short, for "checkpoint".
        has_thread: Whether a thread checks. Without it, only memories that grow and callers of `check` do.
        read_limits: Returns the limits of the system.
        clock: Returns seconds.
    """

    def __init__(
        self,
        agent: Agent,
        on_pressure: OnPressure,
        pressure_at: float = 0.9,
        limit_bytes: int | None = None,
        checkpoint: Callable[[], Any] | None = None,
        *,
        has_thread: bool = True,
        read_limits: Callable[[], list[Limit]] = memory_limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        actions = get_args(OnPressure)
        if on_pressure not in actions:
            raise ArgumentError(
                f"on_pressure ({on_pressure!r}) must be one of {', '.join(actions)}. Pass one of these."
            )
        if not 0.1 <= pressure_at <= 0.99:
            raise ArgumentError(f"pressure_at ({pressure_at}) must be a share of the limit, from 0.1 to 0.99.")
        if on_pressure == "checkpoint" and checkpoint is None:
            raise ArgumentError("on_pressure is 'checkpoint', but checkpoint is None. Pass a function that saves.")
        self._agent = agent
        self._on_pressure = on_pressure
        self._limit_bytes = limit_bytes
        self._checkpoint = checkpoint
        self._read_limits = read_limits
        self._clock = clock
        self._tracker = LimitTracker(pressure_at)
        self._pid = os.getpid()
        self._checking = threading.Lock()
        self._is_short = False
        self._next_action = 0.0
        self._next_warning = 0.0
        self._unasked_bytes = 0.0  # Growth of memories before they ask again.
        self._pause_s = 0.0
        self._plan_next_check(self._tracker.follow(self._list_limits(), clock()))
        self._ended = threading.Event()
        if on_pressure == "spill":
            MEMORIES.set_pressure_check(self.is_short)
        if has_thread:
            threading.Thread(target=self._run, name="holdall-guard", daemon=True).start()

    def stop(self) -> None:
        """End the guard."""
        self._ended.set()
        MEMORIES.clear_pressure_check(self.is_short)

    def is_short(self, grown_bytes: int) -> bool:
        """Return whether memory is short after a memory grew. Called by the thread that adds."""
        self._unasked_bytes -= grown_bytes
        if self._unasked_bytes > 0 or os.getpid() != self._pid:  # A forked child has no guard.
            return False
        return self._check_safely(is_patient=False)

    def check(self, *, is_patient: bool = True) -> bool:
        """Check the limits once. Return whether one was near and the guard acted.

        With `is_patient`, the effect of an action of the last second is awaited.
        """
        with self._checking:
            now = self._clock()
            known = self._tracker.follow(self._list_limits(), now)
            self._plan_next_check(known)
            if is_patient and now < self._next_action:
                return False
            near = choose_nearest(known)
            if not near.is_near and (read_stalled_percent() or 0.0) < _MAX_STALLED_PERCENT:
                self._is_short = False
                return False
            self._act(near, now)
            self._is_short = True
            self._next_action = now + _PAUSE_AFTER_ACTION_S
            return True

    def _plan_next_check(self, known: list[ApproachedLimit]) -> None:
        self._pause_s = min(one.pause_s for one in known)
        self._unasked_bytes = min(one.spare_bytes for one in known) / _QUESTIONS_UNTIL_NEAR

    def _list_limits(self) -> list[Limit]:
        limits = self._read_limits()
        if self._limit_bytes is not None:
            free_bytes = max(self._limit_bytes - held_bytes().proportional, 0)
            limits = [*limits, Limit("limit", free_bytes, self._limit_bytes)]
        return limits

    def _act(self, near: ApproachedLimit, now: float) -> None:
        limit = near.limit
        left = f"{format_bytes(limit.free_bytes)} left of {format_bytes(limit.total_bytes)}"
        text = f"memory is short: {left} ({limit.name})"
        if near.spare_bytes > 0:
            text += f", and {format_bytes(near.bytes_per_second)} more is taken every second"
        pause_s = _PAUSE_AFTER_ACTION_S
        if self._on_pressure == "spill":
            extra_bytes = _EXTRA_SHARE * limit.total_bytes
            text += f"; {_relieve_memories(int(extra_bytes + max(-near.spare_bytes, 0.0) + near.soon_bytes))}"
            return_free_heap()
            pause_s = _PAUSE_AFTER_WARNING_S  # A memory that fills faster than it spills is short again and again.
        elif self._is_short:
            return
        elif self._checkpoint is not None and self._on_pressure == "checkpoint":
            self._checkpoint()
            text += "; a checkpoint is being taken"
        if now >= self._next_warning:
            self._next_warning = now + pause_s
            _LOG.warning("%s", text)
            self._agent.add_event(text)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._check_safely()

    def _check_safely(self, *, is_patient: bool = True) -> bool:
        try:
            return self.check(is_patient=is_patient)
        except Exception:
            _LOG.exception("the memory guard failed; training continues without it")
            self.stop()
            return False


def _relieve_memories(nbytes: int) -> str:
    """Ask every memory to free a share of `nbytes` in proportion to its size. Return what was asked."""
    size_by_memory: dict[Any, int] = {}
    for memory in MEMORIES:
        if hasattr(memory, "relieve"):
            with contextlib.suppress(ClosedError):
                size_by_memory[memory] = memory.report().total_bytes
    total = max(sum(size_by_memory.values()), 1)
    for memory, size in size_by_memory.items():
        with contextlib.suppress(ClosedError):
            memory.relieve(-(-nbytes * size // total))
    if not size_by_memory:
        return "this process has no memory of holdall that could spill"
    return f"holdall's memories must hold {format_bytes(nbytes)} less"
