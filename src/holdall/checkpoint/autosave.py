"""Autosave: checkpoints of a memory at intervals.

One thread per memory starts a save whenever it is due. A save that fails is logged, and the next one is tried when it
is due.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdall.background import end_at_exit
from holdall.checks import require_count, require_number
from holdall.errors import ArgumentError, ClosedError, HoldallError

if TYPE_CHECKING:
    from holdall.checkpoint.savers import SaveHandle

_POLL_S = 0.1
_STOP_S = 5.0
"""Seconds that `stop` waits for the thread at most. A disk that hangs can keep the thread for longer."""

_LOG = logging.getLogger("holdall")


class AutosavedMemory(Protocol):
    """A memory that can be saved."""

    @property
    def next_id(self) -> int:
        """Id of the next transition."""

    def save(self, url: str, /, *, keep: int, mirror: str | None) -> SaveHandle:
        """Start a save."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """Limits on the time and on the number of transitions between two saves. A save is due at the first limit.

    Seconds are counted from the end of the last save, or from its start if it failed. Transitions are counted from the
    start of the last save, because transitions that were added later are not in its checkpoint.
    """

    seconds: float | None
    transitions: int | None

    @property
    def poll_s(self) -> float:
        """Seconds between two checks."""
        return _POLL_S if self.seconds is None else min(_POLL_S, self.seconds)

    def is_due(self, seconds: float, transitions: int) -> bool:
        """Return whether a save is due after `seconds` and `transitions`."""
        if self.seconds is not None and seconds >= self.seconds:
            return True
        return self.transitions is not None and transitions >= self.transitions


@dataclass(frozen=True, slots=True)
class _Settings:
    """Arguments of every save."""

    url: str
    keep: int
    mirror: str | None
    interval: SaveInterval


class Autosave:
    """The thread that saves one memory.

    The thread ends when the memory is closed or garbage-collected, or when `stop` is called.
    """

    def __init__(self, memory: AutosavedMemory, settings: _Settings) -> None:
        self._stopped = threading.Event()
        arguments = (weakref.ref(memory), settings, memory.next_id, self._stopped)
        self._thread = threading.Thread(target=_run_autosave, args=arguments, name="holdall-autosave", daemon=True)
        end_at_exit(self._thread, self._stopped.set)
        self._thread.start()

    def stop(self) -> None:
        """Start no more saves. A save in progress continues."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)


def start_autosave(
    memory: AutosavedMemory,
    url: str,
    seconds: float | None,
    transitions: int | None,
    keep: int,
    mirror: str | None,
) -> Autosave:
    """Check the arguments of `ReplayMemory.save_every` and start the thread. `url` is normalized."""
    if seconds is None and transitions is None:
        raise ArgumentError("save_every was given neither seconds nor transitions. Pass one of them, or both.")
    interval = SaveInterval(
        None if seconds is None else require_number("seconds", seconds, 0.01),
        None if transitions is None else require_count("transitions", transitions, 1),
    )
    keep = require_count("keep", keep, 1)
    if mirror is not None:
        from holdall.checkpoint.mirror import require_mirror  # noqa: PLC0415  needs an optional package

        require_mirror(mirror, url)
    return Autosave(memory, _Settings(url, keep, mirror, interval))


def _run_autosave(
    reference: weakref.ref[AutosavedMemory], settings: _Settings, first_id: int, stopped: threading.Event
) -> None:
    began = time.monotonic()
    saved_id = first_id
    while not stopped.wait(settings.interval.poll_s):
        memory = reference()
        if memory is None:
            return
        try:
            next_id = memory.next_id
            if not settings.interval.is_due(time.monotonic() - began, next_id - saved_id):
                continue
            began = time.monotonic()
            saved_id = next_id
            handle = memory.save(settings.url, keep=settings.keep, mirror=settings.mirror)
            memory = None
            while not (handle.done() or stopped.wait(_POLL_S)):
                pass
            if stopped.is_set():
                return  # Closing the memory waits for the save.
            handle.result()
            began = time.monotonic()
        except ClosedError:
            return
        except (HoldallError, OSError, RuntimeError) as error:
            _LOG.warning("A checkpoint could not be saved: %s The next save starts when it is due.", error)
        finally:
            memory = None
