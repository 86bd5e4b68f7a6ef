"""ReplayMemory over shards: the local memory's calls, for more actors or transitions than one machine takes.

With it the fleet: how its actors are started, drained and ended. Ray's own types know little of actors, so this is
where they end.

The flow, one stage a file:

    add    -> writer -> encode (a sealed segment) -> protocol (a stream of segments) -> shard -> its store
    sample -> learner (which shards) -> shard -> its store -> answer -> learner (decode) -> batch

Invariant: what comes back is bit for bit what was added, whichever shard held it. A memory of one shard gives the
batches of a local memory with the same seed.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import ray
from gymnasium import spaces

from holdall import checkpoint, sampling
from holdall.cluster import roster
from holdall.cluster.handle import MemoryHandle
from holdall.cluster.journal import journals_in_use
from holdall.cluster.learner import saved_by
from holdall.cluster.protocol import MOST_SHARDS, Cluster, GoneError, ShardCounters, asked
from holdall.cluster.shard import THREADS, Shard
from holdall.cluster.writer import ShardStreams, Writer
from holdall.errors import ArgumentError, HoldallError, ShardError
from holdall.native import chosen_kernels
from holdall.ray_access import require_safe_cluster
from holdall.replay import ReplayMemory as LocalReplayMemory
from holdall.sampling import Sampler, Uniform
from holdall.schema import Schema, require_count, schema_of, schema_words, whole

_LOCAL_ON = 8
_SPARE_ROWS = 1024
"""Rows that a shard of a local memory's transitions has beyond its share: they are not spread evenly."""


class Fleet:
    """The actors of one memory.

    Args:
        placement: See `holdall.ray.ReplayMemory`, as for resources.
    """

    def __init__(
        self, terms: roster.MemoryTerms, seed: int | None, placement: str, resources: Mapping[str, float] | None
    ) -> None:  # fmt: skip
        self._home = f"{roster.NAMESPACE}-{secrets.token_hex(8)}"  # where shards have their numbers as names
        self._terms, self._patience_s = terms, terms.patience_s
        remote: Any = ray.remote
        # Ray's record of every call would cost as much as a small call itself; shards have metrics of their own.
        agreed = remote(num_cpus=0, max_restarts=-1, enable_task_events=False)(roster.Roster)
        try:
            self.roster = agreed.options(name=terms.name, namespace=roster.NAMESPACE).remote(terms, self._home)
        except ValueError as error:
            raise ArgumentError(
                f"name ({terms.name!r}) is that of another memory of this cluster; choose another"
            ) from error
        # Ray restarts a shard after a loss; what changes it is never called again by Ray itself.
        shard = remote(max_restarts=-1, max_task_retries=0, enable_task_events=False, **THREADS)
        self._reserved = dict(resources or {})
        own: dict[str, Any] = {name: self._reserved[name] for name in ("memory", "num_cpus") if name in self._reserved}
        named = {name: amount for name, amount in self._reserved.items() if name not in own}
        self._placed = {"scheduling_strategy": roster.PLACEMENTS[placement], "num_cpus": 0, "resources": named} | own
        self._shard = shard(Shard)
        self.actors: dict[int, Any] = {}
        self._next = 0
        self._moves = ShardStreams(terms)  # on which the segments of shards that are drained are sent
        machines = sum(bool(node["Alive"]) for node in ray.nodes()) if placement == "spread" else 1
        self._made_with = (terms, seed, -(-terms.shards // max(1, machines)))
        self._lock = threading.RLock()
        self.moving = threading.Lock()  # who has it knows that every row is on one shard
        self.saving: list[Any] = []  # calls that begin a checkpoint
        self.saves: list[checkpoint.SaveHandle] = []  # under way

    def start(self, number: int, saved: tuple[str, Any] | None = None) -> None:
        """Start a shard of this number.

        Args:
            saved: Where a checkpoint lies that it begins with, and what the manifest says of it.
        """
        with self._lock:
            self.actors[number] = self._started(number, saved)
            self._ask(self.roster, "admit", number, self.actors[number])

    def _started(self, number: int, saved: tuple[str, Any] | None = None) -> Any:
        if number >= MOST_SHARDS:
            raise ArgumentError(f"the memory had {MOST_SHARDS} shards, the most there can be; make a new one")
        self._next = max(self._next, number + 1)
        named = self._shard.options(**self._placed, name=str(number), namespace=self._home)
        return named.remote(number, *self._made_with, saved)

    def grow(self) -> int:
        """Start one more shard and return its number; it is listed when it is up."""
        with self._lock:
            self._require_room()
            number = self._next
            actor = self._started(number)
            try:
                ray.get(actor.counters.remote(), timeout=self._patience_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._end(number, actor)
                raise ShardError(
                    f"shard {number} did not start within {self._patience_s:g} s ({type(error).__name__}); see "
                    "`ray status` for room, and call add_shard() again; the memory is as before"
                ) from error
            self.actors[number] = actor
            self._ask(self.roster, "admit", number, actor)
            return number

    def _end(self, number: int, actor: Any) -> None:
        """End a shard that is listed nowhere, unless a roster was restarted meanwhile."""
        ray.kill(actor)
        self._ask(self.roster, "dismiss", number)

    def _require_room(self) -> None:
        """Refuse to start a shard for which no machine has what it reserves."""
        available: dict[str, float] = ray.available_resources()
        free = {name: available.get("CPU" if name == "num_cpus" else name, 0.0) for name in self._reserved}
        lacking = {name: amount for name, amount in self._reserved.items() if free[name] < amount}
        if lacking:
            raise ShardError(
                f"there is no room for another shard: it reserves {lacking}, and the cluster has "
                f"{ {name: free[name] for name in lacking} } free; start a machine that has it, and call add_shard() "
                "again; the memory is as before"
            )

    def drain(self, number: int, cluster: Cluster) -> None:
        """Move what a shard holds to the others, segment by segment as writers send theirs, and end it."""
        with self._lock:
            if number not in self.actors or len(self.actors) == 1:
                raise ArgumentError(f"shard ({number}) must be one of several; this memory has {sorted(self.actors)}")
            actor = self.actors[number]
            self._ask(actor, "close_to_writers")
            moves = self._moves
            moves.flush()  # what a drain that ended with an error has left under way
            moves.look_around(now=True)
            moves.streams[number].is_gone = True
            for other in cluster.refresh().keys() & moves.streams.keys():  # so that it knows which is filled least
                moves.streams[other].counters = cluster.known.get(other)
            while (oldest := self._ask(actor, "oldest"))[0]:
                payload, rows, first_row, end = oldest
                with self.moving:
                    if self.saving:  # each shard has to be saved as it is now, or as it is after this move
                        ray.wait(self.saving, num_returns=len(self.saving), timeout=self._patience_s)
                    stream = moves.roomy()
                    self._ask(actor, "give_up", first_row, end, stream.number, moves.writer, stream.sequence)
                    self._ask(self.roster, "note_move", rows)
                    moves.send(stream, payload, rows)
                    moves.flush()
            with self.moving:
                for save in self.saves:  # which may still need the shard
                    with suppress(HoldallError):  # its handle raises it
                        save.result()
                self._ask(self.roster, "dismiss", number)
                del self.actors[number]
            cluster.refresh()
            self._end(number, actor)

    def settle(self) -> None:
        """Wait until the shards are up; have segments that an earlier memory was moving be where they arrived."""
        waits_s = self._patience_s if self._terms.url is None else math.inf  # it may have a long journal to read
        for number, actor in self.actors.items():
            try:
                move = asked(actor, "move", patience_s=waits_s, timeout_s=self._patience_s)
            except GoneError as error:
                self.end()
                reason = str(error.__cause__).strip().splitlines()[-1]  # what its constructor raised
                raise ShardError(f"shard {number} could not be started: {reason}") from error
            except ShardError:
                continue
            if move is not None:
                to, writer, sequence = move
                arrived = to in self.actors and self._ask(self.actors[to], "insert", writer, 0, []).expected > sequence
                self._ask(actor, "end_move", arrived)

    def begin(self, known: Mapping[int, ShardCounters]) -> None:
        """Report to the roster what shards hold, before the first writer adds something."""
        self._ask(self.roster, "begin", known)

    def _ask(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call what may be called twice; a shard, or the roster, that is killed meanwhile is waited for."""
        timeout_s = None if actor is self.roster else self._patience_s
        return asked(actor, method, *arguments, patience_s=self._patience_s, timeout_s=timeout_s)

    def end(self, *, has_saved: bool = False) -> None:
        """End all actors, once they have let go of the places that they saved to."""
        if not ray.is_initialized():  # they have ended with it
            return
        try:
            if has_saved or self._terms.url is not None:
                ending = [actor.end_saves.remote() for actor in self.actors.values()]
                ray.wait(ending, num_returns=len(ending), timeout=self._patience_s)
        finally:  # also if an interrupt ends the wait
            for actor in (*self.actors.values(), self.roster):
                ray.kill(actor)


class SavedShards(NamedTuple):
    """Shards that begin with what a checkpoint holds, or empty."""

    rows: int  # most rows of each
    generator: np.random.Generator  # that draws go on with
    places: Mapping[int, tuple[str, int] | None]  # by number: where its checkpoint lies, and which one it is


class ReplayMemory(MemoryHandle):
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
        name: Under which other processes find the memory, see `holdall.ray.attach`; None: a random one.
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
        limit: roster.RateLimit | None = None, placement: str = "spread", resources: Mapping[str, float] | None = None,
        patience_s: float | None = None, reward_shape: tuple[int, ...] = (), name: str | None = None,
    ) -> None:  # fmt: skip
        schema = observation_space
        if not isinstance(schema, Schema):
            require_count("num_envs", num_envs, 1)
            schema = Schema.of(schema, action_space, extras, num_envs, reward_shape)
        if not isinstance(shards, SavedShards):
            require_count("shards", shards, 1)
            capacity = require_count("capacity", whole(capacity), schema.num_envs * shards, " (num_envs times shards)")
            rows = capacity // schema.num_envs // shards * schema.num_envs
            shards = SavedShards(rows, sampling.generator_of(seed), dict.fromkeys(range(shards)))
        roster.require_settings(
            url, patience_s, durability=durability, on_shard_loss=on_shard_loss, prefer=prefer, placement=placement
        )
        sampler = roster.shared(sampler)
        require_safe_cluster()
        terms = roster.MemoryTerms(
            schema_words(schema), name or f"holdall-{secrets.token_hex(8)}", roster.for_shards(sampler), shards.rows,
            None if url is None else checkpoint.normalized_url(url), prefer, on_shard_loss,
            *roster.patience_of(patience_s), limit, len(shards.places),
        )  # fmt: skip
        # An earlier memory may have had more shards: what these hold must not be left out unnoticed.
        journals = [] if terms.url is None else journals_in_use(terms.url)
        if left_out := sorted(set(journals) - set(shards.places)):
            raise ArgumentError(
                f"shards ({terms.shards}) leaves out {left_out}, whose journals are there, too, from an earlier "
                f"memory; pass shards={left_out[-1] + 1}, drain what is too much then, or name another place"
            )
        self._fleet = Fleet(terms, seed, placement, resources)
        super().__init__(terms, sampler, shards.generator, device, seeds=False)
        self._savers = checkpoint.Savers(chosen_kernels().coder)
        self._has_saved = False
        for number, saved in shards.places.items():
            self._fleet.start(number, saved)
        self._fleet.settle()
        self._fleet.begin(self._cluster.refresh())
        self._drawing.level()

    def add_shard(self) -> int:
        """Start one more shard and return its number; new segments go there, too.

        Where there is no room for it, `ShardError` says so, and the memory is as before.
        """
        self._require_open()
        return self._fleet.grow()

    def drain_shard(self, number: int) -> None:
        """Move what a shard holds to the others, and end it; draws and writers go on meanwhile.

        Transitions that were moved have new ids, and the priority of new ones; for samplers that follow episodes each
        of them stands alone. If it raises `ShardError`, call it again; with journals every transition is there once,
        whatever is killed meanwhile. It waits for saves that have begun.
        """
        self._flush_granted()
        self._fleet.drain(number, self._cluster)

    def save(self, url: str | os.PathLike[str], *, keep: int = 3) -> checkpoint.SaveHandle:
        """Write a checkpoint in the background, and return at once, see `holdall.ReplayMemory.save`.

        Every shard writes what is new of its own, and one manifest names them all. `holdall.ReplayMemory.load`
        reads it, too.
        """
        require_count("keep", keep, 1)
        self._flush_granted()
        self._cluster.refresh()
        self._drawing.updates += 1  # what goes on from here and what is loaded draw the same
        place, self._has_saved = checkpoint.normalized_url(url), True
        state = {
            "shard_rows": self._terms.shard_rows,
            "generator": sampling.generator_state(self._drawing.generator),
            "sampler": sampling.sampler_words(self.sampler),
        }
        with self._fleet.moving:
            calls = {
                number: self._cluster.call(number, "begin_save", checkpoint.shard_url(place, number))
                for number in self._fleet.actors
            }
            self._fleet.saving = list(calls.values())
            ticks, saved = self.capacity // self.num_envs, partial(saved_by, self._cluster, place, calls)
            snapshot = checkpoint.ShardsSnapshot(self._terms.words, ticks, state, {}, saved)
            handle = self._savers.to(place).save(lambda _saved: snapshot, int(keep), None, None)
            self._fleet.saves = [*(save for save in self._fleet.saves if not save.done()), handle]
        return handle

    @classmethod
    def load(
        cls, url: str | os.PathLike[str], device: str | None = None, sampler: Sampler | None = None,
        *,
        durability: str = "memory", journal_url: str | os.PathLike[str] | None = None, on_shard_loss: str = "degrade",
        prefer: str = "balanced", limit: roster.RateLimit | None = None, patience_s: float | None = None,
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
            "url": journal_url, "patience_s": patience_s, "durability": durability, "on_shard_loss": on_shard_loss,
            "prefer": prefer,
        }  # fmt: skip
        roster.require_settings(**settings)  # before anything is read
        settings |= {"device": device, "limit": limit}
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
        sampler = sampling.sampler_to_resume(sampler, state["sampler"], goes_on=goes_on)
        rows = -(-manifest.capacity_ticks * schema.num_envs // count) + _SPARE_ROWS
        places: dict[int, tuple[str, int] | None] = dict.fromkeys(range(count))
        if goes_on:
            rows = int(state["shard_rows"])
            places = {
                int(shard.folder[-5:]): (f"{reader.url}/{shard.folder}", shard.number) for shard in manifest.shards
            }
        saved = SavedShards(rows, sampling.restored_generator(state["generator"]), places)
        memory = cls(schema, None, shards=saved, sampler=sampler, **settings)
        if not goes_on:
            try:
                _copy_transitions(reader.url, Writer(memory._terms._replace(limit=None), schema.num_envs))
                memory._fleet.begin(memory._cluster.refresh())
            except BaseException:
                memory.close()
                raise
        return memory

    def close(self, *, flush: bool = False) -> None:
        """End the shards; batches that were handed out stay as they are. `flush`: also what is lost with the shards."""
        self.ignore_limit()  # nobody draws any more, and another thread may wait for that in `add`
        with self._lock:
            if self._closed:
                return
            with ExitStack() as ending:  # whatever one of them raises
                ending.callback(self._fleet.end, has_saved=self._has_saved)
                ending.callback(self._savers.close)
                ending.callback(setattr, self, "_closed", True)
                super().close(flush=flush or self._terms.url is not None)


def _copy_transitions(url: str, writer: Writer) -> None:
    """Send all transitions of a local memory's newest checkpoint, bit for bit; return when the shards have them."""
    with LocalReplayMemory.load(url, sampler=Uniform()) as memory:
        streams = checkpoint.Streams.of_lanes(memory.first_id, memory.next_id, memory.num_envs)
        for steps in checkpoint.trajectories([memory], streams, memory.num_envs, memory.schema, marks_ends=False):
            writer.extend(*steps)
    writer.close()
