"""The fleet: a memory's actors, from their start to their end.

In:  what every shard of a memory is made with.  Out: shards that come and go; the roster knows of each.
Invariant: a shard that is drained is closed to writers first; its blocks are then moved as they are, each hidden where
it was before it is shown elsewhere, so that none is drawn twice. With journals, the one that a block leaves says where
it goes, and as which block of which writer. So whoever is killed, it is there once: while this process lives it has the
block and sends it again; a memory that is made later asks the shard it went to, and shows it again if it is not there.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray

from holdall.errors import ArgumentError, ShardError
from holdall.ray.actors import start_roster, start_shard
from holdall.ray.block import dictionaries_of
from holdall.ray.cluster import Cluster
from holdall.ray.drawing import Drawing
from holdall.ray.envelope import Ack
from holdall.ray.ids import MOST_SHARDS
from holdall.ray.settings import Settings
from holdall.ray.writer import Writer
from holdall.sampling.draw import Sampler

_PAUSE_S = 0.05
_LOG = logging.getLogger("holdall")


class Fleet:
    """The actors of one memory.

    Args:
        name: Of the memory, under which its roster is found.
        words: The memory's schema, as plain words.
        shard_rows: Most rows of a shard.
        url: Where journals are kept; None: nowhere.
    """

    def __init__(
        self,
        name: str,
        words: dict[str, Any],
        shard_rows: int,
        sampler: Sampler,
        seed: int | None,
        url: str | None,
        settings: Settings,
    ) -> None:
        self.shard_rows = shard_rows
        self.roster = start_roster(name, settings.limit, survives=url is not None)
        self.actors: dict[int, Any] = {}
        self._next = 0
        self._made_with = (words, shard_rows, sampler, seed, name, url)
        self._options = settings.options
        self._patience_s = settings.patience_s
        self._has_journals = url is not None
        self._lock = threading.RLock()

    def start(self, number: int | None = None, saved: tuple[str, Any] | None = None) -> int:
        """Start a shard and return its number.

        Args:
            saved: Where a checkpoint lies that it begins with, and what the manifest says of it.
        """
        with self._lock:
            chosen = self._next if number is None else number
            if chosen >= MOST_SHARDS:
                raise ArgumentError(f"the memory had {MOST_SHARDS} shards, the most there can be; make a new one")
            self._next = chosen + 1
            self.actors[chosen] = start_shard(self._options, chosen, *self._made_with, saved)
            ray.get(self.roster.admit.remote(self.actors))
            return chosen

    def drain(self, number: int, writer: Writer, drawing: Drawing, cluster: Cluster) -> None:
        """Move what a shard holds to the others, and end it."""
        with self._lock:
            if number not in self.actors or len(self.actors) == 1:
                raise ArgumentError(f"shard ({number}) must be one of several; this memory has {sorted(self.actors)}")
            actor = self.actors[number]
            ray.get(self.roster.admit.remote(self.actors))
            ray.get(self.roster.retire.remote(number))
            self._ask(actor, "close_to_writers")
            writer.look_around()
            while (oldest := self._ask(actor, "oldest"))[0]:
                payload, rows, first_row, end = oldest
                known = {name: drawing.learn(number, name) for name in dictionaries_of(payload)}
                to, name, sequence = writer.next_of_others()
                self._ask(actor, "give_up", first_row, end, to, name, sequence)
                writer.pass_on(to, payload, known, rows)
            self._ask(actor, "end_drain")
            ray.get(self.roster.dismiss.remote(number))
            del self.actors[number]
            cluster.refresh()
            writer.look_around()
            ray.kill(actor)

    def settle(self) -> None:
        """Wait until the shards are up; have blocks that an earlier memory was moving be where they arrived.

        An earlier memory may have had more shards: what these hold must not be left out unnoticed.
        """
        for number, actor in self.actors.items():
            move = self._begun(number, actor)
            if move is None:
                continue
            to, writer, sequence = move
            arrived = to in self.actors and Ack.of(self._ask(self.actors[to], "expect", writer)).expected > sequence
            self._ask(actor, "end_move", arrived)
        if not self._has_journals:
            return
        left_out = sorted(set(self._ask(next(iter(self.actors.values())), "journals")) - set(self.actors))
        if left_out:
            self.end()
            raise ArgumentError(
                f"shards ({len(self.actors)}) leaves out {left_out}, whose journals are there, too, from an earlier "
                f"memory; pass shards={left_out[-1] + 1}, drain what is too much then, or name another place"
            )

    def _begun(self, number: int, actor: Any) -> Any:
        """Wait until a shard is up, if it has a journal to read; return what it says of a move."""
        while True:
            try:
                return ray.get(actor.move.remote(), timeout=self._patience_s)
            except ray.exceptions.ActorDiedError as error:
                self.end()
                raise ShardError(f"shard {number} could not be started: {_reason(error)}") from error
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                if not self._has_journals:
                    return None
                _LOG.warning("shard %d is not up yet: it reads its journal, or Ray has no room for it", number)

    def _ask(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call what may be called twice; a shard that is killed meanwhile is waited for."""
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return ray.get(getattr(actor, method).remote(*arguments), timeout=self._patience_s)
            except ray.exceptions.ActorDiedError:
                raise
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > until:
                    raise ShardError(
                        f"a shard has not answered {method} for {self._patience_s:g} s; nothing is lost: try again"
                    ) from error
                time.sleep(_PAUSE_S)

    def readmit(self) -> None:
        """Tell a roster that was restarted which shards there are."""
        self.roster.admit.remote(self.actors)

    def end(self) -> None:
        """End all actors."""
        for actor in (*self.actors.values(), self.roster):
            ray.kill(actor)


def _reason(error: ray.exceptions.ActorDiedError) -> str:
    """Return what a constructor raised: the last line of what Ray made of it."""
    return str(error).strip().splitlines()[-1]
