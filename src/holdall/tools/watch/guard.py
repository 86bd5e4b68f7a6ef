"""The guard: acts before the memory of this process runs out.

A thread checks every limit twice a second, and more often as a limit comes near. On a busy machine the thread may be
late. So a memory that grows asks the guard, too, in the thread that adds, before its growth can bring a limit near. If
a limit is near, `add` waits until the memory has spilled. The guard never raises: training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

from holdall.errors import ArgumentError, ClosedError
from holdall.machine import Limit, held_bytes, memory_limits
from holdall.memory_registry import MEMORIES
from holdall.tools.watch.agent import Agent
from holdall.tools.watch.allocators import return_free_heap
from holdall.tools.watch.pressure import read_stalled_percent
from holdall.units import format_bytes

OnPressure = Literal["warn", "spill", "checkpoint"]

_QUESTIONS_UNTIL_NEAR = 8
"""Memories ask this many times while they take the bytes that are spare until a limit is near."""
_EXTRA_SHARE = 0.05
"""Share of the limit that is freed in addition to the bytes that are short, so that the next check finds room."""
_MAX_STALLED_PERCENT = 40.0
"""Memory is short if processes wait for it for at least this percentage of the time."""
_PAUSE_AFTER_ACTION_S = 1.0
_PAUSE_AFTER_WARNING_S = 10.0
_LOOKAHEAD_S = 1.0
"""A limit counts as near if it will be near after this time at the present rate."""
_MAX_PAUSE_S = 0.5
_MIN_PAUSE_S = 0.02
_POSSIBLE_BYTES_PER_S = 512.0 * 2**20
"""Rate at which a quiet process may start to allocate before the next check."""
_LOG = logging.getLogger("holdall")


class ApproachedLimit(NamedTuple):
    """A limit, with its spare bytes and the rate at which they are taken."""

    limit: Limit
    spare_bytes: float  # Bytes until the limit is near. Negative if the limit is near.
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


def choose_nearest(limits: Iterable[ApproachedLimit]) -> ApproachedLimit:
    """Return the limit with the smallest share of its size left until it is near."""
    return min(limits, key=lambda near: (near.spare_bytes - near.soon_bytes) / max(near.limit.total_bytes, 1))


class LimitTracker:
    """Measures how fast memory is taken. A rising rate counts at once, a falling one slowly.

    A limit is near if at least the share `pressure_at` of it is taken.
    """

    def __init__(self, pressure_at: float) -> None:
        self._pressure_at = pressure_at
        self._before: dict[str, tuple[float, int, float]] = {}  # Time, free bytes and rate, by limit.

    def follow(self, limits: Iterable[Limit], now: float) -> list[ApproachedLimit]:
        """Return all limits with their spare bytes and rates."""
        approached = []
        for limit in limits:
            spare_bytes = limit.free_bytes - (1.0 - self._pressure_at) * limit.total_bytes
            approached.append(ApproachedLimit(limit, spare_bytes, self._measure_rate(limit, now)))
        return approached

    def _measure_rate(self, limit: Limit, now: float) -> float:
        moment, free_bytes, previous_rate = self._before.setdefault(limit.name, (now, limit.free_bytes, 0.0))
        if now - moment < _MIN_PAUSE_S:  # One page in a microsecond would be gigabytes per second.
            return previous_rate
        rate = max((free_bytes - limit.free_bytes) / (now - moment), 0.0)
        rate = max(rate, 0.5 * (previous_rate + rate))
        self._before[limit.name] = (now, limit.free_bytes, rate)
        return rate


class MemoryGuard:
    """Checks the limits, and acts when one is near.

    Args:
        agent: Publishes what the guard did.
        on_pressure: "warn", "spill" or "checkpoint".
        pressure_at: A limit is near if at least this share of it is taken.
        limit_bytes: The user's limit for the memory of this process.
        checkpoint: Called once each time memory runs short, for "checkpoint".
        has_thread: Whether a thread checks. Otherwise the limits are checked only when a memory grows and by `check`.
        read_limits: Returns the limits of the system.
        read_stalled: Returns the percentage of the time in which a process waited for memory, or None.
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
        read_stalled: Callable[[], float | None] = read_stalled_percent,
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
        self._read_stalled = read_stalled
        self._clock = clock
        self._tracker = LimitTracker(pressure_at)
        self._pid = os.getpid()
        self._checking = threading.Lock()
        self._is_short = False
        self._action_ends = 0.0  # Time until which the last action may still take effect.
        self._next_warning = 0.0
        self._bytes_until_check = 0.0  # Growth of memories until they ask again.
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
        self._bytes_until_check -= grown_bytes
        if self._bytes_until_check > 0 or os.getpid() != self._pid:  # A forked child has no guard.
            return False
        return self._check_safely(is_patient=False)

    def check(self, *, is_patient: bool = True) -> bool:
        """Check the limits once. Return whether memory is short and the guard acted.

        With `is_patient`, the guard does not act within a second after its last action, which may still take effect.
        """
        with self._checking:
            now = self._clock()
            limits = self._tracker.follow(self._list_limits(), now)
            self._plan_next_check(limits)
            if is_patient and now < self._action_ends:
                return False
            nearest = choose_nearest(limits)
            if not nearest.is_near and (self._read_stalled() or 0.0) < _MAX_STALLED_PERCENT:
                self._is_short = False
                return False
            self._act(nearest, now)
            self._is_short = True
            self._action_ends = now + _PAUSE_AFTER_ACTION_S
            return True

    def _plan_next_check(self, limits: list[ApproachedLimit]) -> None:
        self._pause_s = min(one.pause_s for one in limits)
        self._bytes_until_check = min(one.spare_bytes for one in limits) / _QUESTIONS_UNTIL_NEAR

    def _list_limits(self) -> list[Limit]:
        limits = self._read_limits()
        if self._limit_bytes is not None:
            free_bytes = max(self._limit_bytes - held_bytes().proportional, 0)
            limits = [*limits, Limit("limit", free_bytes, self._limit_bytes)]
        return limits

    def _act(self, nearest: ApproachedLimit, now: float) -> None:
        """Do what `on_pressure` says, and report it unless that happened a moment ago."""
        limit = nearest.limit
        left = f"{format_bytes(limit.free_bytes)} left of {format_bytes(limit.total_bytes)}"
        text = f"memory is short: {left} ({limit.name})"
        if nearest.spare_bytes > 0:
            text += f", and {format_bytes(nearest.bytes_per_second)} more is taken every second"
        pause_s = _PAUSE_AFTER_ACTION_S
        if self._on_pressure == "spill":
            extra_bytes = _EXTRA_SHARE * limit.total_bytes
            needed_bytes = max(-nearest.spare_bytes, 0.0) + nearest.soon_bytes
            text += f"; {_relieve_memories(int(needed_bytes + extra_bytes))}"
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
    """Ask every memory to free a share of `nbytes` in proportion to its size. Return a sentence about the request."""
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
