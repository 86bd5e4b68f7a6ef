"""ReplayMemory over shards: the local memory's calls, for more actors or transitions than one machine takes.

The flow, one stage a file:

    add    -> writer -> encode (a sealed segment) -> protocol (a stream of segments) -> shard -> its store
    sample -> learner (which shards) -> shard -> its store -> answer -> learner (decode) -> batch

Invariant: what comes back is bit for bit what was added, whichever shard held it. A memory of one shard gives the
batches of a local memory with the same seed.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import ray
from gymnasium import spaces

from holdall import checkpoint
from holdall.batch import Batch
from holdall.cluster.answer import Deliverer
from holdall.cluster.fleet import ClusterSettings, Fleet, shared
from holdall.cluster.learner import BatchesAhead, Drawing, Priorities, Request, checked, saved_by, together
from holdall.cluster.protocol import ShardCounters
from holdall.cluster.roster import RateLimit, WaitNotice
from holdall.cluster.security import require_safe_cluster
from holdall.cluster.status import Cluster, Gauges, ShardStatus, added_up, status_of
from holdall.cluster.writer import Address, Writer, copy_transitions
from holdall.delivery import Loader
from holdall.errors import ArgumentError, ClosedError
from holdall.json_state import generator_of, generator_state, restored_generator, schema_of, schema_words
from holdall.native import chosen_kernels
from holdall.report import MemoryReport
from holdall.sampling import ComposedSampler, Sampler, sampler_to_resume, sampler_words
from holdall.schema import Schema, as_ids
from holdall.units import require_count, whole

_ASK_AGAIN_S = 0.005
_STAYS = 4
"""An episode that is longer than this part of a shard is cut, and goes on on another."""
_LOCAL_ON = 8
_SPARE_ROWS = 1024
"""Rows that a shard of a local memory's transitions has beyond its share: they are not spread evenly."""


class SavedShards(NamedTuple):
    """Shards that begin with what a checkpoint holds, or empty."""

    rows: int  # most rows of each
    generator: np.random.Generator  # that draws go on with
    places: Mapping[int, tuple[str, int] | None]  # by number: where its checkpoint lies, and which one it is


class ReplayMemory:
    """Replay memory over shards, each an actor of Ray's.

    Args:
        observation_space: As for `holdall.ReplayMemory`, and so are action_space, num_envs, prefer, device, seed,
            extras and reward_shape.
        capacity: Transitions over all shards; each holds its share.
        shards: Actors that hold transitions; `load` passes those of a checkpoint.
        durability: "memory": what a shard held is lost with it. "segment": an acknowledged transition was written to
            `url` first, and a restarted shard goes on with it.
        on_shard_loss: What `sample` does while a shard does not answer: "degrade" draws from the others, "block" waits,
            "raise" raises `ShardError`.
        url: Where journals are kept: a path that every machine sees, or a prefix of an object store.
        sampler: As for `holdall.ReplayMemory`, if it is one of holdall's. With one that follows episodes, a lane
            stays on one shard until an episode ends.
        limit: How many rows are drawn for every transition added; writers and learners then wait for each other.
        placement: Where shards are started: "spread" over machines as far as there are any, or "pack" on few.
        resources: What Ray reserves for each, by name: {"memory": 2**34}, or one of your own that machines for shards
            have once each.
        patience_s: Seconds after which a shard that says nothing counts as lost. None: 10 for learners; writers wait as
            long as Ray may need to give up a machine and to start the shard again elsewhere.

    All methods may be called from any thread.
    """

    def __init__(
        self, observation_space: spaces.Space[Any] | Schema, action_space: spaces.Space[Any] | None,
        capacity: float = 1_000_000, num_envs: int = 1,
        *,
        shards: int | SavedShards = 8, durability: str = "memory", url: str | os.PathLike[str] | None = None,
        on_shard_loss: str = "degrade", prefer: str = "balanced", device: str | None = None, seed: int | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None, sampler: Sampler | None = None,
        limit: RateLimit | None = None, placement: str = "spread", resources: Mapping[str, float] | None = None,
        patience_s: float | None = None, reward_shape: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        if isinstance(observation_space, Schema):
            self.schema = observation_space
        else:
            require_count("num_envs", num_envs, 1)
            self.schema = Schema.of(observation_space, action_space, extras, num_envs, reward_shape)
        self.num_envs = self.schema.num_envs
        if not isinstance(shards, SavedShards):
            require_count("shards", shards, 1)
            capacity = require_count("capacity", whole(capacity), self.num_envs * shards, " (num_envs times shards)")
            rows = capacity // self.num_envs // shards * self.num_envs
            shards = SavedShards(rows, generator_of(seed), dict.fromkeys(range(shards)))
        settings = ClusterSettings(
            durability, url, on_shard_loss, prefer, device, patience_s, limit, placement, resources
        )
        self.sampler = shared(sampler)
        require_safe_cluster()
        kernels = chosen_kernels()
        self._deliverer = Deliverer(self.schema, kernels, device)
        self._savers = checkpoint.Savers(kernels.coder)
        self._words = schema_words(self.schema)
        self._lock = threading.RLock()
        self._closed = self._has_saved = False
        self._name = f"holdall-{secrets.token_hex(8)}"
        self._metrics = Gauges("learner", memory=self._name)
        place = None if url is None else checkpoint.normalized_url(url)
        self._fleet = Fleet(
            self._name, self._words, shards.rows, self.sampler, seed, place, settings, len(shards.places)
        )
        patience_s = settings.asking_s
        self._address = Address(
            self._words,
            self._name,
            place is not None,
            prefer,
            patience_s,
            settings.writing_s,
            limit,
            max(1, shards.rows // _STAYS) if isinstance(self.sampler, ComposedSampler) else 0,
        )
        self._cluster = Cluster(self._address.roster(), patience_s)
        self._writer = Writer(self._address, self.num_envs)
        self._drawing = Drawing(
            self._cluster, self.schema, self._deliverer, self.sampler, shards.generator, on_shard_loss, patience_s
        )
        self._priorities = Priorities(self._cluster, patience_s)
        for number, saved in shards.places.items():
            self._fleet.start(number, saved)
        self._fleet.settle()
        self._cluster.refresh()

    def add_shard(self) -> int:
        """Start one more shard and return its number; new segments go there, too.

        Where there is no room for it, `ShardError` says so, and the memory is as before.
        """
        self._open()
        return self._fleet.grow()

    def drain_shard(self, number: int) -> None:
        """Move what a shard holds to the others, and end it; draws and writers go on meanwhile.

        Transitions that were moved have new ids, and the priority of new ones. If it ends with `ShardError`, call it
        again; with journals every transition is there once, whatever is killed meanwhile.
        """
        self.flush()
        with self._lock:
            self._fleet.drain(number, self._writer, self._cluster)

    def writer(self, num_envs: int | None = None, spread: int | None = None) -> Writer:
        """Return a handle that feeds the memory from any process; it can be pickled.

        Args:
            num_envs: Its lanes, if not as many as the memory's.
            spread: Shards that it sends to; None: all. With many actors, 2 keep connections few.
        """
        self._open()
        lanes = self.num_envs if num_envs is None else num_envs
        require_count("num_envs", lanes, 1)
        if spread is not None:
            require_count("spread", spread, 1)
        return Writer(self._address, lanes, spread)

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add one transition per lane, see `holdall.ReplayMemory.add`."""
        with self._lock:
            self._open()
            self._writer.add(obs, action, reward, next_obs, terminated, truncated, extras, valid)

    def add_as_is(self, *_: Any) -> bool:
        """Say that there is no short way to add; for adapters."""
        return False

    add_at_once = add_as_is

    def extend(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add whole trajectories, see `holdall.ReplayMemory.extend`."""
        with self._lock:
            self._open()
            self._writer.extend(obs, action, reward, next_obs, terminated, truncated, extras, valid)

    def flush(self) -> None:
        """Return when the shards have acknowledged all that `add` was given."""
        with self._lock:
            self._open()
            self._writer.flush()
            for shard, counters in self._writer.counters_by_shard.items():
                self._cluster.note(shard, counters)

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions; what this process added before is among those that can be drawn."""
        require_count("batch_size", batch_size, 1)
        return self._drawing.finish(self._start(batch_size)[0])

    def loader(self, batch_size: int, prefetch: int = 2) -> Loader:
        """Return an endless iterator over batches asked for ahead of time, see `holdall.ReplayMemory.loader`.

        From four shards on some batches are drawn at once, so that fewer calls are made: each is then drawn at most,
        and no longer exactly, `prefetch` batches before it is handed out. With a limiter each is drawn alone.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        self._open()
        self._deliverer.batches.keep(prefetch + 2)
        batches = 1 if self._address.limit is not None else together(prefetch, self.num_shards)
        ahead = BatchesAhead(self._drawing, lambda count: self._start(batch_size, count), batches)
        return Loader(ahead, max(0, prefetch - batches + 1))

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        wanted = as_ids(ids)
        self.flush()
        return self._drawing.gather(wanted)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set how much it would pay to see transitions again, see `holdall.ReplayMemory.update_priorities`.

        It does not wait for the shards, which have it before they draw again. What a shard refuses is raised by a later
        call.
        """
        self._open()
        update = checked(self.sampler, ids, priorities)
        self.flush()
        self._priorities.send(*update)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Refuse: shards hold what writers sent, and a restarted one reads that from its journal again."""
        raise ArgumentError(
            f"update of {sorted(columns)}: a memory over shards does not rewrite extras; keep them in a "
            "holdall.ReplayMemory, or have the actors compute them"
        )

    def __len__(self) -> int:
        """Count the transitions that can be sampled, over the shards that answer."""
        self.flush()
        self._priorities.hear(all_of_them=True)  # so that the shards say what they weigh with them
        return sum(counters.transitions for counters in self._cluster.refresh().values())

    @property
    def capacity(self) -> int:
        """Most transitions that are held, over all shards."""
        return self._fleet.shard_rows * len(self._cluster.numbers)

    @property
    def num_shards(self) -> int:
        """Shards, those that do not answer now among them."""
        return len(self._cluster.numbers)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held; of a memory of one shard."""
        return self._only_counters().first_row

    @property
    def next_id(self) -> int:
        """Id of the next transition; of a memory of one shard."""
        return self._only_counters().next_row

    def shards(self) -> list[ShardStatus]:
        """Say of every shard where it runs and what it holds; `holdall watch PID` there shows more of one."""
        self._open()
        return [status_of(number, actor, self._address.patience_s) for number, actor in self._fleet.actors.items()]

    def report(self) -> MemoryReport:
        """Account for the bytes that all shards hold, field by field."""
        self.flush()
        known = self._cluster.refresh()
        asked = [self._cluster.handle(shard).report.remote() for shard in known]
        fields = added_up(ray.get(asked, timeout=self._address.patience_s))
        transitions = sum(counters.transitions for counters in known.values())
        return MemoryReport(transitions, fields, self._deliverer.assembler.staging.nbytes, len(known))

    def save(self, url: str | os.PathLike[str], *, keep: int = 3) -> checkpoint.SaveHandle:
        """Write a checkpoint in the background, and return at once, see `holdall.ReplayMemory.save`.

        Every shard writes what is new of its own, and one manifest names them all. `holdall.ReplayMemory.load`
        reads it, too.
        """
        require_count("keep", keep, 1)
        self.flush()
        self._cluster.refresh()
        place, self._has_saved = checkpoint.normalized_url(url), True
        state = {
            "shard_rows": self._fleet.shard_rows,
            "generator": generator_state(self._drawing.generator),
            "sampler": sampler_words(self.sampler),
        }
        calls = {
            number: self._cluster.call(number, "begin_save", checkpoint.shard_url(place, number))
            for number in self._fleet.actors
        }
        ticks, patience = self.capacity // self.num_envs, self._address.patience_s
        snapshot = checkpoint.ShardsSnapshot(
            self._words, ticks, state, {}, lambda: saved_by(self._cluster, place, calls, patience)
        )
        return self._savers.to(place).save(snapshot, int(keep), None, None)

    @classmethod
    def load(
        cls, url: str | os.PathLike[str], device: str | None = None, sampler: Sampler | None = None,
        *,
        durability: str = "memory", journal_url: str | os.PathLike[str] | None = None, on_shard_loss: str = "degrade",
        prefer: str = "balanced", limit: RateLimit | None = None, patience_s: float | None = None,
        shards: int | None = None,
    ) -> Self:  # fmt: skip
        """Load the newest checkpoint that is whole; draws go on where they were.

        On as many shards as it was saved from, a memory goes on as it was. On another number of shards, and from a
        local memory's checkpoint, every transition is added again, under a new id, and samplers start again.

        Args:
            sampler: None: one with the settings of the saved memory's.
            shards: Actors; None: as many as saved it, or 8 for a local memory's transitions.
            journal_url: Where journals are kept from now on, for `durability="segment"`. Transitions that they hold
                already go before the checkpoint's.
        """
        if shards is not None:
            require_count("shards", shards, 1)
        settings: dict[str, Any] = {
            "durability": durability, "url": journal_url, "on_shard_loss": on_shard_loss, "prefer": prefer,
            "device": device, "patience_s": patience_s, "limit": limit,
        }  # fmt: skip
        ClusterSettings(**settings)  # refuses before anything is read
        reader = checkpoint.open_reader(url)
        return checkpoint.newest(reader, lambda manifest: cls._loaded(manifest, reader, settings, sampler, shards))

    @classmethod
    def _loaded(
        cls, manifest: checkpoint.Manifest, reader: checkpoint.CheckpointReader, settings: Mapping[str, Any],
        sampler: Sampler | None, shards: int | None,
    ) -> Self:  # fmt: skip
        state, schema = checkpoint.restored_state(manifest, reader), schema_of(manifest.schema)
        count = len(manifest.shards) or _LOCAL_ON if shards is None else shards
        goes_on = count == len(manifest.shards)
        sampler = sampler_to_resume(sampler, state["sampler"], goes_on=goes_on)
        rows = -(-manifest.capacity_ticks * schema.num_envs // count) + _SPARE_ROWS
        places: dict[int, tuple[str, int] | None] = dict.fromkeys(range(count))
        if goes_on:
            rows = int(state["shard_rows"])
            places = {
                int(shard.folder[-5:]): (f"{reader.url}/{shard.folder}", shard.number) for shard in manifest.shards
            }
        saved = SavedShards(rows, restored_generator(state["generator"]), places)
        memory = cls(schema, None, shards=saved, sampler=sampler, **settings)
        if not goes_on:
            try:
                copy_transitions(reader.url, Writer(replace(memory._address, limit=None), schema.num_envs))
            except BaseException:
                memory.close()
                raise
        return memory

    def close(self) -> None:
        """End the shards; batches that were handed out stay as they are."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._writer.close(flush=self._address.survives)  # what is lost with the shards is not sent to them
            finally:
                try:
                    self._savers.close()
                finally:
                    self._fleet.end(has_saved=self._has_saved)
                    self._deliverer.assembler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the memory was closed; make a new ReplayMemory")

    def _only_counters(self) -> ShardCounters:
        self.flush()
        known = self._cluster.refresh()
        if list(known) != [0]:
            raise ArgumentError(
                "first_id and next_id are asked of a memory of several shards, each of which counts for itself; use "
                "the ids of a batch"
            )
        return known[0]

    def _start(self, count: int, batches: int = 1) -> list[Request]:
        """Ask for some batches, once what this process added and updated has reached the shards."""
        self.flush()
        self._priorities.hear()
        self._wait_for_grant(count)
        if self._metrics.is_due:
            self._set_metrics()
        return self._drawing.start(count, batches)

    def _set_metrics(self) -> None:
        shards = max(1, self.num_shards)
        self._metrics.set(
            coverage=1 - len(self._cluster.lost) / shards,
            losses=self._cluster.losses,
            unacknowledged_bytes=self._writer.unacknowledged_bytes,
            credit_wait_seconds=self._writer.waited_s,
        )

    def _wait_for_grant(self, count: int) -> None:
        """Wait until the limiter grants a draw, if there is one."""
        limit = self._address.limit
        if self._cluster.roster_was_lost:
            self._cluster.roster_was_lost = False
            self._fleet.roster.admit.remote(self._fleet.actors)  # it was restarted, and knows none of them
        if limit is None:
            return
        limit.require("batch", count)
        notice = WaitNotice("sample")
        while not self._cluster.ask_roster("take_samples", count):
            notice.give(lambda: self._cluster.ask_roster("limiter"))
            time.sleep(_ASK_AGAIN_S)
