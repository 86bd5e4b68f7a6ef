"""The guard: what is done in a process before its memory runs out.

In:  the limits that the process is under, looked at twice a second, and oftener as they come near.
Out: a warning, memories that spill, a checkpoint.
Invariant: it acts while something is left to act with, and it never raises: training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from holdall import report as tracked
from holdall.errors import ArgumentError, ClosedError
from holdall.machine import Limit, held_bytes, memory_limits
from holdall.units import format_bytes
from holdall.watch.agent import Agent
from holdall.watch.allocators import give_back
from holdall.watch.approach import Approach, Near
from holdall.watch.pressure import stalled_share

OnPressure = Literal["warn", "spill", "checkpoint"]
KINDS = ("warn", "spill", "checkpoint")

_FIRST_LOOK_S = 0.1
_ROOM_TO_MAKE = 0.05
"""Share of the limit that is freed beyond what was asked for, so that the next look finds something left."""
_STALLED = 40.0
"""Per cent of the time that processes wait for memory: as bad as having none."""
_RESTS_S = 1.0
"""Time after an act, in which what was started takes effect."""

_LOG = logging.getLogger("holdall")


class Guard:
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
        if act not in KINDS:
            raise ArgumentError(f"on_pressure ({act!r}) must be one of {', '.join(KINDS)}")
        if not 0.1 <= at <= 0.99:
            raise ArgumentError(f"pressure_at ({at}) must be a share of the limit, from 0.1 to 0.99")
        if act == "checkpoint" and checkpoint is None:
            raise ArgumentError("on_pressure is 'checkpoint', but checkpoint is None; pass a function that saves")
        self._agent, self._act = agent, act
        self._limit_bytes, self._checkpoint = limit_bytes, checkpoint
        self._is_near = False
        self._rests_until = 0.0
        self._approach = Approach(at)
        self._pause_s = _FIRST_LOOK_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_out, name="holdall-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the guard."""
        self._ended.set()

    def look(self) -> bool:
        """Look at the limits once; say whether one was near and something was done."""
        now = time.monotonic()
        near = self._approach.nearest(self._limits(), now)
        self._pause_s = near.look_again_s
        if now < self._rests_until:
            return False
        if not near.is_near and (stalled_share() or 0.0) < _STALLED:
            self._is_near = False
            return False
        room = _ROOM_TO_MAKE * near.limit.total_bytes
        self._do(near, int(max(room - near.spare, room) + near.soon_taken))
        self._is_near, self._rests_until = True, now + _RESTS_S
        return True

    def _limits(self) -> list[Limit]:
        limits = memory_limits()
        if self._limit_bytes is not None:
            left = max(self._limit_bytes - held_bytes().proportional, 0)
            limits.append(Limit("limit", left, self._limit_bytes))
        return limits

    def _do(self, near: Near, wanted: int) -> None:
        left, total = format_bytes(near.limit.free_bytes), format_bytes(near.limit.total_bytes)
        text = f"memory is short: {left} left of {total} ({near.limit.name})"
        if near.spare > 0:  # it does not look short yet
            text += f", and {format_bytes(int(near.coming))} more is taken every second"
        if self._act == "spill":
            done = self._relieve(wanted)
            give_back()
            text += f"; {done}"
        elif self._act == "checkpoint" and not self._is_near and self._checkpoint is not None:
            self._checkpoint()
            text += "; a checkpoint is being taken"
        if self._act == "spill" or not self._is_near:
            _LOG.warning("%s", text)
            self._agent.note(text)

    def _relieve(self, wanted: int) -> str:
        """Have every memory give its part, as much as it has of all."""
        memories = [memory for memory in tracked.living() if hasattr(memory, "relieve")]
        sizes = [_size(memory) for memory in memories]
        for memory, size in zip(memories, sizes, strict=True):
            try:
                memory.relieve(-(-wanted * size // max(sum(sizes), 1)))
            except ClosedError:
                continue
        if not memories:
            return "there is no memory of holdall's that could give some back"
        return f"holdall's memories are told to hold {format_bytes(wanted)} less"

    def _look_out(self) -> None:
        while not self._ended.wait(self._pause_s):
            try:
                self.look()
            except Exception:  # whatever it is: a guard that fails must not end the training
                _LOG.exception("the guard of memory failed; training goes on without it")
                return


def _size(memory: Any) -> int:
    return sum(int(array.nbytes) for _, array in memory.arrays())
