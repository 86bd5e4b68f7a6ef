"""Fleet: starts and ends the actors of a memory."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import ray

from holdall.cluster.calls import ask, read_last_line
from holdall.cluster.config import NAMESPACE, PLACEMENTS, MemoryConfig
from holdall.cluster.ids import MAX_SHARDS
from holdall.cluster.messages import GoneError, ShardCounters
from holdall.cluster.roster import Roster
from holdall.cluster.shard import THREADS, SavedShard, Shard
from holdall.errors import ArgumentError, ShardError

_ROSTER = "The memory's roster"


class Fleet:
    """The actors of one memory. Owned by the process that made the memory.

    Args:
        seed: Seed of the shards' generators. None: a different one every time.

    Attributes:
        roster: The memory's roster.
        actors: Shards by number.
    """

    def __init__(self, config: MemoryConfig, seed: int | None) -> None:
        settings = config.settings
        self.actors: dict[int, Any] = {}
        # In this Ray namespace, the name of a shard is its number.
        self._shard_namespace = f"{NAMESPACE}-{secrets.token_hex(8)}"
        self._config = config
        self._patience_s = settings.learner_patience_s
        self._next_number = 0
        self._lock = threading.RLock()
        remote: Any = ray.remote
        # Ray's events for every call would cost as much as a small call itself. Shards have metrics of their own.
        roster = remote(num_cpus=0, max_restarts=-1, enable_task_events=False)(Roster)
        try:
            self.roster = roster.options(name=config.name, namespace=NAMESPACE).remote(config, self._shard_namespace)
        except ValueError as error:
            raise ArgumentError(
                f"name ({config.name!r}) is that of another memory in this cluster. Choose another one."
            ) from error
        # Ray restarts a lost shard, but never repeats a call that changes one.
        shard = remote(max_restarts=-1, max_task_retries=0, enable_task_events=False, **THREADS)
        self._shard = shard(Shard)
        self._options = _actor_options(settings.placement, settings.resources)
        machines = 1
        if settings.placement == "spread":
            machines = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        shards_per_machine = -(-config.shards // machines)  # Rounded up.
        self._arguments = (config, seed, shards_per_machine)

    def start(self, number: int, saved: SavedShard | None = None) -> None:
        """Start a shard.

        Args:
            saved: Checkpoint to start with. None: the shard starts empty.
        """
        with self._lock:
            self.actors[number] = self._create_actor(number, saved)
            self._admit(number, self.actors[number])

    def grow(self) -> int:
        """Start one more shard, and return its number once it runs."""
        with self._lock:
            number = self._next_number
            actor = self._create_actor(number)
            try:
                ray.get(actor.counters.remote(), timeout=self._patience_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                ray.kill(actor)
                self._ask_roster(lambda: self.roster.dismiss.remote(number))
                raise ShardError(
                    f"Shard {number} did not start within {self._patience_s:g} s ({type(error).__name__}). The memory "
                    "is as before. If `ray status` says that there is no room for the shard, start a machine that has "
                    "what it reserves. Then call add_shard() again."
                ) from error
            self.actors[number] = actor
            self._admit(number, actor)
            return number

    def wait_until_up(self) -> None:
        """Wait until the shards run. Raise ShardError if one cannot be started."""
        # A shard may have a long journal to read.
        patience_s = self._patience_s if self._config.settings.url is None else math.inf
        for number, actor in self.actors.items():
            try:
                ask(actor.trouble.remote, f"Shard {number}", patience_s, self._patience_s)
            except GoneError as error:
                reason = read_last_line(error.__cause__)  # The error of the shard's constructor.
                raise ShardError(f"Shard {number} could not be started: {reason}") from error
            except ShardError:
                continue  # Learners draw from the other shards, and ask this shard again.

    def begin(self, known: Mapping[int, ShardCounters]) -> None:
        """Report the sizes of the shards to the roster, before the first writer adds something."""
        self._ask_roster(lambda: self.roster.begin.remote(known))

    def end(self, *, has_saved: bool = False) -> None:
        """End all actors, after they have finished their checkpoints."""
        if not ray.is_initialized():  # The actors have ended with Ray.
            return
        try:
            if has_saved or self._config.settings.url is not None:
                ending = [actor.end_saves.remote() for actor in self.actors.values()]
                ray.wait(ending, num_returns=len(ending), timeout=self._patience_s)
        finally:  # Also if an interrupt ends the wait.
            for actor in (*self.actors.values(), self.roster):
                ray.kill(actor)

    def _create_actor(self, number: int, saved: SavedShard | None = None) -> Any:
        if number >= MAX_SHARDS:
            raise ArgumentError(f"A memory can have at most {MAX_SHARDS} shards. Make a new one.")
        self._next_number = max(self._next_number, number + 1)
        named = self._shard.options(**self._options, name=str(number), namespace=self._shard_namespace)
        return named.remote(number, *self._arguments, saved)

    def _admit(self, number: int, actor: Any) -> None:
        self._ask_roster(lambda: self.roster.admit.remote(number, actor))

    def _ask_roster(self, question: Any) -> None:
        ask(question, _ROSTER, self._patience_s)


def _actor_options(placement: str, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray's options of a shard. Ray has an option of its own for memory and CPUs, and one for all others."""
    standard = {name: resources[name] for name in ("memory", "num_cpus") if name in resources}
    custom = {name: amount for name, amount in resources.items() if name not in standard}
    return {"scheduling_strategy": PLACEMENTS[placement], "num_cpus": 0, "resources": custom, **standard}
