"""The actors of one memory, as its process sees them: started, found, called, drained and ended.

In:  settings, and what Ray and the shards report.  Out: handles; counters of the shards; losses as they are noticed.
Invariant: calls of one client reach a shard in the order in which they were made. A shard that does not answer is asked
again until it does; nothing else waits for it. Ray's own types know little of actors, so this is where they end.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from holdall.cluster.protocol import MOST_SHARDS, Ack, CallOrder, CallOrderError, ShardCounters, dictionary_of, is_newer
from holdall.cluster.roster import NAMESPACE, RateLimit, Roster
from holdall.cluster.shard import GROUPS, Shard
from holdall.cluster.status import actor_state
from holdall.cluster.writer import Address, Writer
from holdall.errors import ArgumentError, ShardError
from holdall.sampling import Prioritized, Sampler, Uniform
from holdall.storage import COST_CAPS, segment_needs
from holdall.units import require_number

_TALKS = 16
"""Questions that the roster hears at a time."""


def start_roster(name: str, limit: RateLimit | None, survives: bool) -> Any:
    """Start a memory's roster under a name by which shards find it."""
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(Roster)
    return actor.options(name=name, namespace=NAMESPACE, max_concurrency=_TALKS).remote(name, limit, survives)


def start_shard(options: dict[str, Any], *arguments: Any) -> Any:
    """Start a shard. Ray restarts it after a loss; what changes it is never called again by Ray itself.

    Args:
        options: Where Ray may start it.
    """
    remote: Any = ray.remote
    actor = remote(max_restarts=-1, max_task_retries=0, concurrency_groups=GROUPS)(Shard)
    return actor.options(**options).remote(*arguments)


POLICIES = ("degrade", "block", "raise")
_LOOK_AGAIN_S = 2.0
_PROBE_AGAIN_S = 0.25

LOSSES = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, CallOrderError)
"""What a call fails with when its shard does not answer, or not in time."""


@dataclass(slots=True)
class _Member:
    """One shard, as far as is known."""

    handle: Any
    counters: ShardCounters | None = None
    client: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    calls: int = 0
    lost: bool = False
    probe: Any = None  # a question to a shard that was lost, or not heard of for a while
    probed_at: float = 0.0

    def keep(self, counters: ShardCounters) -> None:
        """Keep what the shard said of itself; one that was restarted knows nothing of the calls before."""
        if self.counters is not None and counters.epoch != self.counters.epoch:
            self.begin_again()
        self.counters = counters

    @property
    def is_away(self) -> bool:
        """Whether Ray restarts the shard, or gave it up, as far as this process knows.

        A call that is made meanwhile fails after two seconds, though the shard be back after one.
        """
        return actor_state(self.handle) in {"restarting", "gone"}

    def begin_again(self) -> None:
        """Number calls from 0 on, under another name."""
        self.client, self.calls = secrets.token_bytes(16), 0


class Cluster:
    """All shards of a memory."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._roster = address.roster()
        self._members: dict[int, _Member] = {}
        self._lock = threading.RLock()
        self._version = -1
        self._looked_at = 0.0
        self.losses = 0
        self.roster_was_lost = False  # and restarted, without what it knew

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard in this client's order; return what to wait for."""
        with self._lock:
            member = self._members[shard]
            epoch = -1 if member.counters is None else member.counters.epoch
            calls = CallOrder(member.client, epoch, member.calls)
            member.calls += 1
            return getattr(member.handle, method).remote(calls.packed(), *arguments)

    def ask_roster(self, method: str, *arguments: Any) -> Any:
        """Ask the roster something; None while it is being restarted."""
        try:
            return ray.get(getattr(self._roster, method).remote(*arguments), timeout=self._address.patience_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None

    def handle(self, shard: int) -> Any:
        """Return the actor of a shard."""
        with self._lock:
            return self._members[shard].handle

    @property
    def numbers(self) -> list[int]:
        """All shards."""
        with self._lock:
            return sorted(self._members)

    @property
    def lost(self) -> list[int]:
        """Shards that do not answer now."""
        with self._lock:
            return sorted(number for number, member in self._members.items() if member.lost)

    def masses(self) -> dict[int, float]:
        """What can be drawn from now, by shard."""
        self._look_around()
        with self._lock:
            for member in self._members.values():
                self._hear(member)
            return {
                number: 0.0 if member.counters is None else member.counters.mass
                for number, member in self._members.items()
                if not member.lost
            }

    @property
    def transitions(self) -> int:
        """Transitions that can be drawn from the shards that answer, as far as is known."""
        with self._lock:
            known = [m.counters for m in self._members.values() if not m.lost and m.counters is not None]
        return sum(counters.transitions for counters in known)

    def note(self, shard: int, counters: ShardCounters) -> None:
        """Keep what a shard said of itself."""
        with self._lock:
            member = self._members.get(shard)
            if member is not None and is_newer(counters, member.counters):
                member.keep(counters)

    def ask_again(self, shards: list[int]) -> None:
        """Have shards say how they stand, without waiting for it; those that are not drawn from would not."""
        with self._lock:
            for number in shards:
                member = self._members.get(number)
                if member is not None and member.probe is None:
                    member.probe, member.probed_at = member.handle.counters.remote(), time.monotonic()

    def refresh(self) -> dict[int, ShardCounters]:
        """Ask every shard how it stands, and wait; return the counters_by_shard of those that answered."""
        self._look_around(now=True)
        with self._lock:
            asked = {number: member.handle.counters.remote() for number, member in self._members.items()}
        found = {}
        for number, call in asked.items():
            try:
                found[number] = ShardCounters.of(ray.get(call, timeout=self._address.patience_s))
            except LOSSES:
                self.lose(number)
                continue
            with self._lock:
                self._members[number].lost = False
            self.note(number, found[number])
        return found

    def lose(self, shard: int) -> None:
        """Mark a shard that did not answer; it is asked again until it does."""
        with self._lock:
            member = self._members.get(shard)
            if member is None:
                return
            self.losses += not member.lost
            member.lost = True
            member.begin_again()
            member.probe, member.probed_at = None, time.monotonic() if member.is_away else 0.0

    def is_away(self, shard: int) -> bool:
        """Whether Ray restarts a shard, or gave it up, as far as this process knows."""
        with self._lock:
            member = self._members.get(shard)
        return member is not None and member.is_away

    def wait_for(self, shard: int) -> None:
        """Wait until a shard answers again."""
        self._look_around(now=True)
        while True:
            with self._lock:
                member = self._members.get(shard)
                if member is None:
                    return
                self._hear(member)
                if not member.lost:
                    return
            time.sleep(_PROBE_AGAIN_S / 5)

    def wait_for_any(self) -> None:
        """Wait until some shard answers again; no longer than the memory's patience."""
        until = time.monotonic() + self._address.patience_s
        while not self.masses():
            if time.monotonic() > until:
                raise ShardError(
                    f"none of the memory's shards has answered for {self._address.patience_s:g} s; look at "
                    "`ray list actors`, or make the memory again"
                )
            time.sleep(_PROBE_AGAIN_S / 5)

    def _hear(self, member: _Member) -> None:
        """Look whether a question was answered, and ask a lost shard again."""
        now = time.monotonic()
        if member.probe is not None:
            ready, _ = ray.wait([member.probe], timeout=0)
            if ready:
                probe, member.probe = member.probe, None
                try:
                    answer = ShardCounters.of(ray.get(probe))
                    member.lost = False
                    if is_newer(answer, member.counters):
                        member.keep(answer)
                except LOSSES:
                    member.lost = True
        if member.lost and member.probe is None:
            pause = _LOOK_AGAIN_S if member.is_away else _PROBE_AGAIN_S
            if now - member.probed_at > pause:
                member.probe, member.probed_at = member.handle.counters.remote(), now

    def _look_around(self, now: bool = False) -> None:
        """Ask the roster for shards that came or went, from time to time."""
        with self._lock:
            if not now and self._version >= 0 and time.monotonic() - self._looked_at < _LOOK_AGAIN_S:
                return
            self._looked_at = time.monotonic()
            known = self._version
        try:
            version, shards = ray.get(self._roster.shards.remote(known), timeout=self._address.patience_s)
        except LOSSES:
            return
        if shards is not None and version < known:
            self.roster_was_lost = True
            return
        if shards is None:
            return
        with self._lock:
            self._version = version
            for number, (handle, _) in shards.items():
                if number not in self._members:
                    self._members[number] = _Member(handle)
                    self._members[number].probe = handle.counters.remote()
            for number in set(self._members) - set(shards):
                del self._members[number]


DURABILITIES = ("memory", "segment")
PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """See `holdall.ray.ReplayMemory`."""

    durability: str
    url: str | os.PathLike[str] | None
    on_shard_loss: str
    prefer: str
    device: str | None
    patience_s: float
    limit: RateLimit | None = None
    placement: str = "spread"
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        known = {
            "durability": DURABILITIES,
            "on_shard_loss": POLICIES,
            "prefer": tuple(COST_CAPS),
            "placement": tuple(PLACEMENTS),
        }
        for argument, values in known.items():
            value = getattr(self, argument)
            if value not in values:
                raise ArgumentError(f"{argument} ({value!r}) must be one of {', '.join(values)}; pass one of these")
        require_number("patience_s", self.patience_s, 0.1)
        if (self.url is None) == (self.durability == "segment"):
            raise ArgumentError(
                f"url ({self.url!r}) does not go with durability={self.durability!r}; name where journals are kept for "
                "durability='segment', and nothing for 'memory'"
            )

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to Ray about where a shard runs."""
        named = dict(self.resources or {})
        own: dict[str, Any] = {name: named.pop(name) for name in ("memory", "num_cpus") if name in named}
        return {"scheduling_strategy": PLACEMENTS[self.placement], "num_cpus": 0, "resources": named, **own}


def single(sampler: Sampler | None) -> Sampler:
    """Return the sampler of a memory over shards: one that draws single transitions."""
    chosen: Sampler = Uniform() if sampler is None else sampler
    if type(chosen) not in (Uniform, Prioritized):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) draws more than single transitions, and an episode may lie on several "
            "shards; use Uniform() or Prioritized(), and make n-step returns where steps are added"
        )
    return chosen


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
        settings: ClusterSettings,
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

    def drain(self, number: int, writer: Writer, cluster: Cluster) -> None:
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
                known = {
                    name: dictionary_of(self._ask(actor, "dictionary", name)) for name in segment_needs(payload)[1]
                }
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
        """Wait until the shards are up; have segments that an earlier memory was moving be where they arrived.

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

    def end(self, *, has_saved: bool = False) -> None:
        """End all actors, once they have let go of the places that they saved to."""
        if has_saved:
            ending = [actor.end_saves.remote() for actor in self.actors.values()]
            ray.wait(ending, num_returns=len(ending), timeout=self._patience_s)
        for actor in (*self.actors.values(), self.roster):
            ray.kill(actor)


def _reason(error: ray.exceptions.ActorDiedError) -> str:
    """Return what a constructor raised: the last line of what Ray made of it."""
    return str(error).strip().splitlines()[-1]
