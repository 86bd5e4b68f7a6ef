"""The fleet: a memory's actors, from their start to their end.

In:  what every shard of a memory is made with.  Out: shards that come and go; the roster knows of each.
Invariant: a shard that is drained is closed to writers first; its blocks are then moved as they are, each hidden where
it was before it is shown elsewhere, so that none is drawn twice.
"""

from __future__ import annotations

import threading
from typing import Any

import ray

from holdall.errors import ArgumentError
from holdall.ray.actors import start_roster, start_shard
from holdall.ray.block import dictionaries_of
from holdall.ray.cluster import Cluster
from holdall.ray.drawing import Drawing
from holdall.ray.ids import MOST_SHARDS
from holdall.ray.settings import Settings
from holdall.ray.writer import Writer
from holdall.sampling.draw import Sampler


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
            ray.get([self.roster.retire.remote(number), actor.close_to_writers.remote()])
            writer.look_around()
            while (released := ray.get(actor.release.remote()))[0]:
                payload, rows, end = released
                known = {name: drawing.learn(number, name) for name in dictionaries_of(payload)}
                writer.pass_on(payload, known, rows)
                ray.get(actor.forget_before.remote(end))
            ray.get(self.roster.dismiss.remote(number))
            del self.actors[number]
            cluster.refresh()
            writer.look_around()
            ray.kill(actor)

    def readmit(self) -> None:
        """Tell a roster that was restarted which shards there are."""
        self.roster.admit.remote(self.actors)

    def end(self) -> None:
        """End all actors."""
        for actor in (*self.actors.values(), self.roster):
            ray.kill(actor)
