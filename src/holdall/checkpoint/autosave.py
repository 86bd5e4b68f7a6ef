"""Write-behind: a memory saves itself every so often, so that a crash costs no more than that.

In:  a way to save.  Out: checkpoints, one after another, never two at a time.
Invariant: what goes wrong is logged and tried again at the next turn; training is never the worse for it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from holdall.checkpoint.handle import SaveHandle
from holdall.errors import ClosedError, HoldallError

_LOG = logging.getLogger("holdall")


class Autosave:
    """Saves every `seconds`, counted from the end of the last save, until it is stopped.

    Args:
        owner: What is saved; held weakly, so that a memory which is simply dropped ends its thread.
        save: Begins a save of the owner.
    """

    def __init__(self, owner: object, save: Callable[[object], SaveHandle], seconds: float) -> None:
        self._stopped = threading.Event()
        arguments = (weakref.ref(owner), save, seconds, self._stopped)
        self._thread = threading.Thread(target=_run, args=arguments, name="holdall-autosave", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, after the save that is under way."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run(
    owner: weakref.ref[object], save: Callable[[object], SaveHandle], seconds: float, stopped: threading.Event
) -> None:
    while not stopped.wait(seconds):
        memory = owner()
        if memory is None:
            return
        try:
            handle = save(memory)
            del memory
            handle.result()
        except ClosedError:
            return
        except (HoldallError, OSError) as error:
            _LOG.warning("a checkpoint could not be saved (%s); the next one is tried in %g s", error, seconds)
