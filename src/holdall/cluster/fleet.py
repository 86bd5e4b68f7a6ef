"""The actors of one memory: the settings that they are started with, and how they are started, drained and ended.

In:  settings, checkpoints that shards begin with.  Out: handles; segments that moved to other shards.
Ray's own types know little of actors, so this is where they end.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import threading
from collections.abc import Collection, Mapping
from typing import Any

import ray

from holdall.cluster.journal import journals_in_use
from holdall.cluster.protocol import MOST_SHARDS, GoneError, SegmentStream, asked
from holdall.cluster.roster import NAMESPACE, MemoryTerms, Roster
from holdall.cluster.shard import GROUPS, Shard
from holdall.cluster.status import Cluster
from holdall.errors import ArgumentError, ShardError
from holdall.sampling import Hindsight, NStep, Prioritized, Sampler, Sequence, Uniform
from holdall.storage import COST_CAPS
from holdall.units import require_choice, require_number

_TALKS = 16
"""Questions that the roster hears at a time."""
POLICIES = ("degrade", "block", "raise")
DURABILITIES = ("memory", "segment")
_ANSWERS_S = 10.0
_RESTARTED_S = 15.0
"""What a shard may take to be started again once its machine was given up."""
_HEALTH_MS = {
    "health_check_initial_delay_ms": 5_000, "health_check_period_ms": 3_000, "health_check_timeout_ms": 10_000,
}  # fmt: skip
"""Ray's defaults; its settings are read from the environment, as Ray reads them on the machine of its head."""


def health_patience_s() -> float:
    """Return how long it may take until shards of a machine that hangs are up on another one, by Ray's settings."""
    delay, period, timeout = (_setting(name, usual) / 1000 for name, usual in _HEALTH_MS.items())
    checks = _setting("health_check_failure_threshold", 5)
    return max(_ANSWERS_S, delay + checks * (period + timeout)) + _RESTARTED_S


def _setting(name: str, usual: int) -> int:
    """Read one of Ray's settings: as the cluster has it, where Ray says so, or as this process's environment has it."""
    known = getattr(getattr(getattr(ray, "_raylet", None), "Config", None), name, None)
    try:
        return int(os.environ.get(f"RAY_{name}", usual) if known is None else known())
    except (TypeError, ValueError):
        return usual


PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}
_CHOICES: dict[str, Collection[str]] = {
    "durability": DURABILITIES, "on_shard_loss": POLICIES, "prefer": COST_CAPS, "placement": PLACEMENTS,
}  # fmt: skip


def require_settings(url: str | os.PathLike[str] | None, patience_s: float | None, **chosen: str) -> None:
    """Refuse settings of a memory that do not hold, see `holdall.ray.ReplayMemory`."""
    for argument, value in chosen.items():
        require_choice(argument, value, _CHOICES[argument])
    if patience_s is not None:
        require_number("patience_s", patience_s, 0.1)
    if (url is None) == (chosen["durability"] == "segment"):
        raise ArgumentError(
            f"url ({url!r}) does not go with durability={chosen['durability']!r}; name where journals are kept for "
            "durability='segment', and nothing for 'memory'"
        )


def patience_of(patience_s: float | None) -> tuple[float, float]:
    """Return how long an answer is waited for, and how long a writer waits for a shard.

    The latter as long as Ray may need to give up a machine, and to start another shard.
    """
    return (_ANSWERS_S, health_patience_s()) if patience_s is None else (patience_s, patience_s)


def shared(sampler: Sampler | None) -> Sampler:
    """Return the sampler of a memory over shards: one of holdall's, since weights over all shards depend on it."""
    chosen: Sampler = Uniform() if sampler is None else sampler
    if type(chosen) not in (Uniform, Prioritized, NStep, Sequence, Hindsight):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) is none of holdall's, and weights over shards follow its rules; use "
            "Uniform(), Prioritized(), NStep(), Sequence() or Hindsight()"
        )
    return chosen


def for_shards(sampler: Sampler) -> Sampler:
    """Return the same without what only a learner needs: the function of rewards, which may hold an environment."""
    if isinstance(sampler, Hindsight):
        sampler = copy.copy(sampler)
        sampler.reward_fn = _rewarded_elsewhere
    return sampler


def _rewarded_elsewhere(*_: Any) -> Any:
    raise ShardError("rewards towards other goals are computed by learners; report this")


_LOG = logging.getLogger("holdall")


class Fleet:
    """The actors of one memory.

    Args:
        placement: See `holdall.ray.ReplayMemory`, as for resources.
    """

    def __init__(
        self, terms: MemoryTerms, seed: int | None, placement: str, resources: Mapping[str, float] | None
    ) -> None:  # fmt: skip
        self._home = f"{NAMESPACE}-{secrets.token_hex(8)}"  # where shards have their numbers as names
        self._terms, self._patience_s = terms, terms.patience_s
        remote: Any = ray.remote
        found_by = {"name": terms.name, "namespace": NAMESPACE, "max_concurrency": _TALKS}
        # Ray's record of every call would cost as much as a small call itself; shards have metrics of their own.
        roster = remote(num_cpus=0, max_restarts=-1, enable_task_events=False)(Roster).options(**found_by)
        try:
            self.roster = roster.remote(terms, self._home)
        except ValueError as error:
            raise ArgumentError(
                f"name ({terms.name!r}) is that of another memory of this cluster; choose another"
            ) from error
        # Ray restarts a shard after a loss; what changes it is never called again by Ray itself.
        shard = remote(max_restarts=-1, max_task_retries=0, concurrency_groups=GROUPS, enable_task_events=False)
        self._reserved = dict(resources or {})
        own: dict[str, Any] = {name: self._reserved[name] for name in ("memory", "num_cpus") if name in self._reserved}
        named = {name: amount for name, amount in self._reserved.items() if name not in own}
        self._placed = {"scheduling_strategy": PLACEMENTS[placement], "num_cpus": 0, "resources": named} | own
        self._shard = shard(Shard)
        self.actors: dict[int, Any] = {}
        self._next = 0
        self._mover = secrets.token_bytes(16)  # as whose segments those of shards that are drained are sent
        self._moves: dict[int, SegmentStream] = {}
        nodes: Any = ray.nodes  # it has no types
        machines = sum(bool(node["Alive"]) for node in nodes()) if placement == "spread" else 1
        self._made_with = (terms, seed, -(-terms.shards // max(1, machines)))
        self._lock = threading.RLock()

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
        """Start one more shard and return its number; nobody hears of it before it is up."""
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
        resources: Any = ray.available_resources  # it has no types
        available: dict[str, float] = resources()
        free = {name: available.get("CPU" if name == "num_cpus" else name, 0.0) for name in self._reserved}
        lacking = {name: amount for name, amount in self._reserved.items() if free[name] < amount}
        if lacking:
            raise ShardError(
                f"there is no room for another shard: it reserves {lacking}, and the cluster has "
                f"{ {name: free[name] for name in lacking} } free; start a machine that has it, and call add_shard() "
                "again; the memory is as before"
            )

    def drain(self, number: int, cluster: Cluster) -> None:
        """Move what a shard holds to the others, each segment to the least filled of them, and end it."""
        with self._lock:
            if number not in self.actors or len(self.actors) == 1:
                raise ArgumentError(f"shard ({number}) must be one of several; this memory has {sorted(self.actors)}")
            actor = self.actors[number]
            self._ask(actor, "close_to_writers")
            for stream in self._moves.values():  # what a drain that ended with an error has left under way
                stream.flush()
            while (oldest := self._ask(actor, "oldest"))[0]:
                self._move(number, oldest, cluster)
            self._ask(self.roster, "dismiss", number)
            del self.actors[number]
            self._moves.pop(number, None)
            cluster.refresh()
            self._end(number, actor)

    def _move(self, number: int, oldest: tuple[bytes, int, int, int], cluster: Cluster) -> None:
        """Move a segment; if the shard that it goes to turns out to be gone with all that it held, to another one."""
        payload, rows, first_row, end = oldest
        while True:
            filled = {to: known.inserted for to, known in cluster.refresh().items() if to in self.actors}
            filled.pop(number, None)
            if not filled:
                raise ShardError("no other shard answers; call drain_shard() again when one does")
            to = min(filled, key=filled.__getitem__)
            new = SegmentStream(self.actors[to], to, self._mover, self._terms.writer_patience_s)
            stream = self._moves.setdefault(to, new)
            self._ask(self.actors[number], "give_up", first_row, end, to, self._mover, stream.sequence)
            try:
                stream.send(payload, rows)
                return stream.flush()
            except GoneError:
                if self._terms.url is not None:
                    raise
                del self._moves[to]

    def settle(self) -> None:
        """Wait until the shards are up; have segments that an earlier memory was moving be where they arrived.

        An earlier memory may have had more shards: what these hold must not be left out unnoticed.
        """
        for number, actor in self.actors.items():
            move = self._begun(number, actor)
            if move is None:
                continue
            to, writer, sequence = move
            arrived = to in self.actors and self._ask(self.actors[to], "insert", writer, 0, []).expected > sequence
            self._ask(actor, "end_move", arrived)
        if self._terms.url is None:
            return
        left_out = sorted(set(journals_in_use(self._terms.url)) - set(self.actors))
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
                reason = str(error).strip().splitlines()[-1]  # what its constructor raised
                raise ShardError(f"shard {number} could not be started: {reason}") from error
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                if self._terms.url is None:
                    return None
                _LOG.warning("shard %d is not up yet: it reads its journal, or Ray has no room for it", number)

    def _ask(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call what may be called twice; a shard, or the roster, that is killed meanwhile is waited for."""
        timeout_s = None if actor is self.roster else self._patience_s
        return asked(lambda: actor, method, *arguments, patience_s=self._patience_s, timeout_s=timeout_s)

    def end(self, *, has_saved: bool = False) -> None:
        """End all actors, once they have let go of the places that they saved to."""
        if has_saved or self._terms.url is not None:
            ending = [actor.end_saves.remote() for actor in self.actors.values()]
            ray.wait(ending, num_returns=len(ending), timeout=self._patience_s)
        for actor in (*self.actors.values(), self.roster):
            ray.kill(actor)
