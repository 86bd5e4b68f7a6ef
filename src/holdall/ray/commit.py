"""Commits: blocks that were accepted become durable, several at a time, and can be drawn from then on.

In:  blocks in the order in which they were accepted.  Out: slots of a journal; then the blocks, in the same order.
Invariant: a block can be drawn, and its writer hears of it, only after it was written. A disk that fails is tried again
until it does not; writers wait meanwhile, and nothing is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdall.errors import CheckpointError, FencedError, HoldallError
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import Block
from holdall.ray.journal import Entry, Journal, Move

_SLOT_BYTES = 16 * 2**20
_TRY_AGAIN_S = 0.5
_LOOK_AGAIN_S = 0.01
_TRIM_EVERY = 64

_LOG = logging.getLogger("holdall")


@dataclass(slots=True)
class Staged:
    """A block on its way to the journal."""

    entry: Entry
    block: Block
    done: threading.Event = field(default_factory=threading.Event)
    error: HoldallError | None = None

    def wait(self) -> None:
        """Return when the block can be drawn; raise if it never will be."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Committer:
    """Writes what is staged, in a thread of its own.

    Args:
        apply: Shows blocks that are durable, and returns the number of the first row that is still needed.
    """

    def __init__(self, journal: Journal, next_row: int, apply: Callable[[list[Staged]], int]) -> None:
        self._journal = journal
        self._apply = apply
        self._next_row = next_row
        self._staged: list[Staged] = []
        self._changed = threading.Condition()
        self._commits = 0
        self.backlog = 0  # bytes
        threading.Thread(target=self._run, name="holdall-journal", daemon=True).start()

    def stage(self, staged: Staged) -> None:
        """Have a block written; the shard's lock keeps blocks in order."""
        with self._changed:
            self._staged.append(staged)
            self.backlog += len(staged.entry.payload)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that is staged is durable."""
        while self.backlog:
            time.sleep(_LOOK_AGAIN_S)

    @property
    def journal(self) -> Journal:
        """What is written to, to be looked at."""
        return self._journal

    def hide(self, row: int, move: Move | None) -> None:
        """Have the rows before a number left out when the journal is read; nothing may be staged."""
        _insistently(lambda: self._journal.hide(row, move))

    def end_drain(self) -> None:
        """Have it remembered that all is elsewhere; nothing may be staged."""
        _insistently(self._journal.end_drain)

    def close_to_writers(self, memory: str) -> None:
        """Have it remembered that nothing more is taken; nothing may be staged."""
        _insistently(lambda: self._journal.close_to_writers(memory))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._staged)
            if self._journal.lingers_s:
                time.sleep(self._journal.lingers_s)
            batch = self._taken()
            try:
                self._write(batch)
            except HoldallError as error:  # fenced: nothing of this shard is ever acknowledged again
                _LOG.warning("%s", error)
                for each in batch:
                    each.error = error
                    each.done.set()
            finally:
                with self._changed:
                    self.backlog -= sum(len(each.entry.payload) for each in batch)

    def _taken(self) -> list[Staged]:
        with self._changed:
            taken, nbytes = 0, 0
            while taken < len(self._staged) and (taken == 0 or nbytes < _SLOT_BYTES):
                nbytes += len(self._staged[taken].entry.payload)
                taken += 1
            batch, self._staged = self._staged[:taken], self._staged[taken:]
            return batch

    def _write(self, batch: list[Staged]) -> None:
        dictionaries: dict[int, Dictionary] = {}
        for each in batch:
            for sliced in each.block.fields:
                if sliced.coded.codec.dictionary is not None:
                    dictionaries[id(sliced.coded.codec.dictionary)] = sliced.coded.codec.dictionary
        entries = [each.entry for each in batch]
        _insistently(lambda: self._journal.append(entries, self._next_row, list(dictionaries.values())))
        self._next_row += sum(each.block.rows for each in batch)
        needed = self._apply(batch)
        self._commits += 1
        if self._commits % _TRIM_EVERY == 0:
            self._journal.trim(needed)


def _insistently(write: Callable[[], None]) -> None:
    """Write until the disk takes it; FencedError if somebody else has the journal."""
    while True:
        try:
            write()
        except FencedError:
            raise
        except CheckpointError as error:
            _LOG.warning("%s; trying again", error)
            time.sleep(_TRY_AGAIN_S)
        else:
            return
