"""Write-behind: a memory saves itself as it goes, so that a crash costs little and a save has little left to write.

In:  a memory, and how often it shall be safe.  Out: blocks as they are sealed, and checkpoints, never two at a time.
Invariant: what goes wrong is logged and tried again at the next turn; training is never the worse for it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from holdall.checkpoint.handle import SaveHandle
from holdall.errors import HoldallError

_LOOK_S = 0.1
"""How often it is looked whether something is to be written."""

_LOG = logging.getLogger("holdall")


class Owner(Protocol):
    """What is saved."""

    @property
    def next_id(self) -> int:
        """Id of the next transition."""


class Turn(NamedTuple):
    """When a checkpoint is due: whichever comes first, counted from the end of the last one."""

    seconds: float | None
    transitions: int | None

    @property
    def look_s(self) -> float:
        """How long nothing needs to be looked at."""
        return _LOOK_S if self.seconds is None else min(_LOOK_S, self.seconds)

    def is_due(self, seconds: float, transitions: int) -> bool:
        """Whether so many seconds, or transitions, are enough."""
        by_time = self.seconds is not None and seconds >= self.seconds
        return by_time or (self.transitions is not None and transitions >= self.transitions)


class Autosave:
    """Writes blocks as they are sealed, and makes a checkpoint at every turn, until it is stopped.

    Args:
        owner: What is saved; held weakly, so that a memory which is simply dropped ends its thread.
        save: Begins a save of the owner.
        write_ahead: Has the owner's blocks written that are full.
    """

    def __init__(
        self, owner: Owner, save: Callable[[Owner], SaveHandle], write_ahead: Callable[[Owner], None], turn: Turn
    ) -> None:
        self._stopped = threading.Event()
        arguments = (weakref.ref(owner), save, write_ahead, turn, owner.next_id, self._stopped)
        self._thread = threading.Thread(target=_run, args=arguments, name="holdall-autosave", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, after the save that is under way."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run(
    owner: weakref.ref[Owner],
    save: Callable[[Owner], SaveHandle],
    write_ahead: Callable[[Owner], None],
    turn: Turn,
    first_id: int,
    stopped: threading.Event,
) -> None:
    began, saved_id = time.monotonic(), first_id
    while not stopped.wait(turn.look_s):
        memory = owner()
        if memory is None:
            return
        try:
            next_id = memory.next_id
            if not turn.is_due(time.monotonic() - began, next_id - saved_id):
                write_ahead(memory)
                continue
            began, saved_id = time.monotonic(), next_id
            handle = save(memory)
            del memory
            handle.result()
            began = time.monotonic()
        except RuntimeError:  # the memory was closed, or the program ends
            return
        except (HoldallError, OSError) as error:
            _LOG.warning("a checkpoint could not be saved (%s); the next one is tried when it is due", error)
        finally:
            memory = None
