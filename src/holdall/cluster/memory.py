"""ReplayMemory over shards: the methods of a local memory, for more actors or transitions than one machine can have."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import ray
from gymnasium import spaces

from holdall import checkpoint, sampling
from holdall.checks import require_count, to_whole
from holdall.cluster.access import require_safe_cluster
from holdall.cluster.calls import get_result
from holdall.cluster.config import (
    ClusterSettings,
    MemoryConfig,
    normalize_journal_url,
    require_sampler,
    strip_sampler,
)
from holdall.cluster.fleet import Fleet
from holdall.cluster.handle import MemoryHandle
from holdall.cluster.journal import list_journals
from holdall.cluster.limiter import RateLimit
from holdall.cluster.members import Members
from holdall.cluster.messages import LOSSES
from holdall.cluster.shard import SavedShard
from holdall.cluster.tuning import ClusterTuning
from holdall.cluster.writer import Writer
from holdall.delivery import new_delivery
from holdall.errors import ArgumentError, BlobMissingError, CheckpointError, ShardError
from holdall.memory import ReplayMemory as LocalReplayMemory
from holdall.memory import load_checkpoint
from holdall.sampling import Sampler
from holdall.schema import Schema
from holdall.schema_json import schema_from_json, schema_to_json

_DEFAULT_SHARDS = 8
"""Number of shards into which the checkpoint of a local memory is loaded."""
_SPARE_ROWS = 1024
"""Rows that a shard gets beyond its share of copied transitions, because they are not spread evenly."""


class _InitialState(NamedTuple):
    """What a memory starts with."""

    schema: Schema
    shard_rows: int  # Rows that each shard holds at most.
    sampler: Sampler | None
    generator: np.random.Generator  # Generator of the learner.
    shards: Mapping[int, SavedShard | None]  # The checkpoint of each shard. None: the shard starts empty.
    seed: int | None = None  # Seed of the shards' generators.
    device: str | None = None
    name: str | None = None

    @property
    def has_transitions(self) -> bool:
        """Whether the shards start with their checkpoints."""
        return any(saved is not None for saved in self.shards.values())


class ReplayMemory(MemoryHandle):
    """Replay memory over shards, each of which is a Ray actor.

    Args:
        observation_space: See `holdall.ReplayMemory`, also for action_space, num_envs, prefer, device, seed, extras and
            reward_shape.
        capacity: Transitions over all shards. Each shard holds an equal part.
        shards: Number of actors that hold transitions.
        durability: "memory": a lost shard loses its transitions. "segment": an acknowledged transition was written to
            `url` first, and a restarted shard continues with it.
        on_shard_loss: What `sample` does while a shard does not answer: "degrade" draws from the others, "block" waits,
            "raise" raises `ShardError`.
        url: Place of the journals: a path that every machine sees, or a prefix of an object store.
        sampler: See `holdall.ReplayMemory`. It must be a sampler of holdall. With a sampler that follows episodes, a
            lane stays on one shard until an episode ends.
        limit: How many rows are drawn for every transition added. Writers and learners then wait for each other.
        placement: Where shards are started: "spread" over machines, or "pack" on few.
        resources: What Ray reserves for each shard, by name: {"memory": 2**34}, or a resource of your own.
        name: Name under which other processes find the memory, see `holdall.ray.attach`. None: a random one.
        patience_s: Seconds after which a silent shard counts as lost. None: 10 for learners and 90 for writers, because
            Ray needs up to 70 to give up a machine.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | Schema,
        action_space: spaces.Space[Any] | None,
        capacity: float = 1_000_000,
        num_envs: int = 1,
        *,
        shards: int = 8,
        durability: str = "memory",
        url: str | os.PathLike[str] | None = None,
        on_shard_loss: str = "degrade",
        prefer: str = "balanced",
        device: str | None = None,
        seed: int | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None,
        sampler: Sampler | None = None,
        limit: RateLimit | None = None,
        placement: str = "spread",
        resources: Mapping[str, float] | None = None,
        patience_s: float | None = None,
        reward_shape: tuple[int, ...] = (),
        name: str | None = None,
        _tuning: ClusterTuning | None = None,
    ) -> None:
        schema = observation_space
        if not isinstance(schema, Schema):
            require_count("num_envs", num_envs, 1)
            schema = Schema.of(schema, action_space, extras, num_envs, reward_shape)
        require_count("shards", shards, 1)
        capacity = require_count("capacity", to_whole(capacity), schema.num_envs * shards, " (num_envs times shards)")
        settings = ClusterSettings(
            durability=durability,
            url=normalize_journal_url(url),
            on_shard_loss=on_shard_loss,
            prefer=prefer,
            limit=limit,
            placement=placement,
            resources=dict(resources or {}),
            patience_s=patience_s,
            tuning=_tuning or ClusterTuning(),
        )
        initial = _InitialState(
            schema=schema,
            shard_rows=capacity // schema.num_envs // shards * schema.num_envs,
            sampler=sampler,
            generator=sampling.new_generator(seed),
            shards=dict.fromkeys(range(shards)),
            seed=seed,
            device=device,
            name=name,
        )
        self._start_actors(initial, settings)

    def _start_actors(self, initial: _InitialState, settings: ClusterSettings) -> None:
        """Check what the constructor or `load` was given, and start the actors."""
        sampler = require_sampler(initial.sampler)
        delivery = new_delivery(initial.schema, initial.device)
        require_safe_cluster()
        config = MemoryConfig(
            schema_json=schema_to_json(initial.schema),
            name=initial.name or f"holdall-{secrets.token_hex(8)}",
            sampler=strip_sampler(sampler),
            shard_rows=initial.shard_rows,
            shards=len(initial.shards),
            settings=settings,
        )
        _require_all_journals(settings.url, initial.shards)
        self._savers = checkpoint.Savers()
        self._has_saved = False
        self._fleet = Fleet(config, initial.seed)
        try:
            super().__init__(config, sampler, initial.generator, initial.device, delivery, seeds=False)
            for number, saved in initial.shards.items():
                self._fleet.start(number, saved)
            self._fleet.wait_until_up()
            self._fleet.begin(self._members.refresh())
            self._learner.spread_highest()
        except BaseException:
            self._fleet.end()
            raise

    def add_shard(self) -> int:
        """Start one more shard and return its number. New segments are sent there, too.

        Raise ShardError if the cluster has no room for it. The memory is then as before.
        """
        self._require_open()
        return self._fleet.grow()

    # ---------------------------------------------------------------- checkpoints

    def save(self, url: str | os.PathLike[str], *, keep: int = 3) -> checkpoint.SaveHandle:
        """Write a checkpoint in the background and return at once, see `holdall.ReplayMemory.save`.

        Every shard writes what is new, and one manifest names the checkpoints of all shards.
        `holdall.ReplayMemory.load` can read it, too.
        """
        require_count("keep", keep, 1)
        self._flush_granted()
        # Wait until the shards have stored all priorities. Raise the error of a shard that refused some.
        self._learner.read_confirmations(wait=True)
        self._members.refresh()  # The list may lack a shard that was just added.
        self._has_saved = True
        place = checkpoint.normalized_url(url)
        calls = {number: self._begin_save(number, place) for number in self._fleet.actors}
        snapshot = checkpoint.ShardsSnapshot(
            schema=self._config.schema_json,
            capacity_ticks=self.capacity // self.num_envs,
            state={
                "shard_rows": self._config.shard_rows,
                "generator": sampling.get_generator_state(self._learner.generator),
                "sampler": sampling.describe_sampler(self.sampler),
            },
            wait=partial(_wait_for_shards, self._members, place, calls),
        )
        return self._savers.save(lambda: snapshot, place, keep=int(keep))

    def _begin_save(self, number: int, place: str) -> Any:
        url = checkpoint.shard_url(place, number)
        return self._members.submit(number, lambda shard: shard.begin_save.remote(url))

    @classmethod
    def load(
        cls,
        url: str | os.PathLike[str],
        device: str | None = None,
        sampler: Sampler | None = None,
        *,
        durability: str = "memory",
        journal_url: str | os.PathLike[str] | None = None,
        on_shard_loss: str = "degrade",
        prefer: str = "balanced",
        limit: RateLimit | None = None,
        placement: str = "spread",
        resources: Mapping[str, float] | None = None,
        patience_s: float | None = None,
        name: str | None = None,
        shards: int | None = None,
        _tuning: ClusterTuning | None = None,
    ) -> Self:
        """Load the newest complete checkpoint. Draws continue where they were.

        With the saved number of shards, the memory continues as it was. With another number, or if a local memory saved
        the checkpoint, every transition is added again under a new id, and samplers start again.

        Args:
            device: As in the constructor, like all arguments that are not listed here. A checkpoint has none of them.
            sampler: None: a sampler with the saved settings.
            shards: Number of shards. None: as many as saved it, or 8 for the checkpoint of a local memory.
            journal_url: Place of the journals from now on, for `durability="segment"`. If there are journals already,
                their transitions take precedence over the checkpoint. With another number of shards, they are refused.
        """
        if shards is not None:
            require_count("shards", shards, 1)
        # Wrong settings raise an error before anything is read.
        settings = ClusterSettings(
            durability=durability,
            url=normalize_journal_url(journal_url),
            on_shard_loss=on_shard_loss,
            prefer=prefer,
            limit=limit,
            placement=placement,
            resources=dict(resources or {}),
            patience_s=patience_s,
            tuning=_tuning or ClusterTuning(),
        )
        reader = checkpoint.open_reader(url)

        def read_initial(manifest: checkpoint.Manifest) -> _InitialState:
            return _read_initial_state(manifest, reader, sampler, shards)._replace(device=device, name=name)

        return checkpoint.load_newest(
            reader, lambda manifest: cls._load_manifest(manifest, reader, read_initial(manifest), settings)
        )

    @classmethod
    def _load_manifest(
        cls,
        manifest: checkpoint.Manifest,
        reader: checkpoint.CheckpointReader,
        initial: _InitialState,
        settings: ClusterSettings,
    ) -> Self:
        memory = cls.__new__(cls)
        if not initial.has_transitions:
            _require_no_journals(settings.url)
            with load_checkpoint(manifest, reader) as source:
                memory._start_actors(initial, settings)
                memory._copy_transitions(source)
            return memory
        try:
            memory._start_actors(initial, settings)
        except ShardError as error:
            if manifest.number in reader.numbers():
                raise
            # Starting shards takes seconds. Meanwhile, a memory that saves to this place may remove the checkpoint.
            raise BlobMissingError(errno.ENOENT, f"Checkpoint {manifest.number} was removed meanwhile.") from error
        return memory

    def _copy_transitions(self, source: LocalReplayMemory) -> None:
        """Add all transitions of a local memory. Return when the shards have them. Close this memory if that fails."""
        settings = replace(self._config.settings, limit=None)
        writer = Writer(replace(self._config, settings=settings), self.num_envs)
        streams = checkpoint.Streams.of_lanes(source.first_id, source.next_id, source.num_envs)
        try:
            for steps in checkpoint.trajectories([source], streams, source.num_envs, source.schema, marks_ends=False):
                writer.extend(*steps)
            writer.close()
            self._fleet.begin(self._members.refresh())
        except BaseException:
            self.close()
            raise

    def close(self, *, flush: bool = False) -> None:
        """End the shards. Batches that were returned stay valid.

        Args:
            flush: Whether to flush first. A memory with journals always does.
        """
        self.ignore_limit()  # Another thread may wait in `add` for a draw that will not happen any more.
        with self._lock:
            if self._closed:
                return
            with ExitStack() as ending:  # Every step runs, also if another one raises.
                ending.callback(self._fleet.end, has_saved=self._has_saved)
                ending.callback(self._savers.close)
                ending.callback(setattr, self, "_closed", True)
                super().close(flush=flush or self._config.settings.url is not None)


def _read_initial_state(
    manifest: checkpoint.Manifest, reader: checkpoint.CheckpointReader, sampler: Sampler | None, shards: int | None
) -> _InitialState:
    """Return what a memory that is loaded from a checkpoint starts with.

    With another number of shards than the saved one, the shards start empty.
    """
    state = checkpoint.read_saved_state(manifest, reader)
    schema = schema_from_json(manifest.schema)
    count = shards or len(manifest.shards) or _DEFAULT_SHARDS
    has_same_count = count == len(manifest.shards)
    initial = _InitialState(
        schema=schema,
        shard_rows=-(-manifest.capacity_ticks * schema.num_envs // count) + _SPARE_ROWS,
        sampler=sampling.choose_sampler(sampler, state["sampler"], has_same_ids=has_same_count),
        generator=sampling.restore_generator(state["generator"]),
        shards=dict.fromkeys(range(count)),
    )
    if not has_same_count:
        return initial
    # A folder ends with the five digits of the shard's number, see `shard_url`.
    saved = {
        int(shard.folder[-5:]): SavedShard(f"{reader.url}/{shard.folder}", shard.number) for shard in manifest.shards
    }
    return initial._replace(shard_rows=int(state["shard_rows"]), shards=saved)


def _require_all_journals(url: str | None, shards: Collection[int]) -> None:
    """Raise ArgumentError if an earlier memory had more shards, because their transitions would be left out."""
    journals = [] if url is None else list_journals(url)
    left_out = sorted(set(journals) - set(shards))
    if left_out:
        raise ArgumentError(
            f"shards ({len(shards)}) leaves out shards {left_out}, which have journals at {url} from an earlier "
            f"memory. Pass shards={left_out[-1] + 1}, or another url. To use another number of shards, save the memory "
            "and load it with shards=."
        )


def _require_no_journals(url: str | None) -> None:
    """Raise ArgumentError if there are journals, to which the transitions of a checkpoint would be added again."""
    if url is not None and list_journals(url):
        raise ArgumentError(
            f"journal_url ({url!r}) has journals already, to which every transition of the checkpoint would be added. "
            "Choose another journal_url, or make a memory with url= to continue with the journals."
        )


def _wait_for_shards(members: Members, url: str, calls: Mapping[int, Any]) -> dict[int, checkpoint.Checkpoint]:
    """Wait for the checkpoints of all shards, each for as long as the shard answers."""
    checkpoints: dict[int, checkpoint.Checkpoint] = {}
    patience_s = members.patience_s
    for shard, call in calls.items():
        handle = members.handle(shard)
        try:
            saving = handle.end_save.remote(get_result(call, patience_s))
            while not ray.wait([saving], timeout=patience_s)[0]:
                get_result(handle.counters.remote(), patience_s)
            checkpoints[shard] = get_result(saving, patience_s)
        except LOSSES as error:
            members.mark_lost(shard)
            raise CheckpointError(
                f"The checkpoint at {url} is not complete (shard {shard}: {type(error).__name__}). The one before it "
                "is intact. Save again."
            ) from error
    return checkpoints
