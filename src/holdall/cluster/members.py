"""What one process knows about the shards of a memory: their actors, their counters, and which do not answer.

A shard that does not answer is lost. This process asks it again until it answers, and does not wait for it meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray

from holdall.cluster.calls import actor_state, ask, get_result, require_ray
from holdall.cluster.messages import LOSSES, GoneError, ShardCounters
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import ShardError


@dataclass(slots=True)
class _Member:
    """What this process knows about one shard."""

    handle: Any
    counters: ShardCounters | None = None
    is_lost: bool = False
    # Unanswered questions for the counters of a shard that is lost or that the last batch was not drawn from.
    probes: list[Any] = field(default_factory=list)
    probed_at: float = 0.0  # Time of the newest probe, by `time.monotonic`.

    def probe(self, max_probes: int) -> None:
        """Ask the shard for its counters without waiting for the answer."""
        self.probed_at = time.monotonic()
        self.probes = [*self.probes, self.handle.counters.remote()][-max_probes:]


class Members:
    """The shards of a memory, as one process knows them. Thread-safe.

    Attributes:
        patience_s: Seconds without an answer after which a shard counts as lost.
        losses: Number of times that a shard was found not to answer.
    """

    def __init__(self, roster: Any, patience_s: float, tuning: ClusterTuning) -> None:
        self.patience_s = patience_s
        self.losses = 0
        self._roster = roster
        self._tuning = tuning
        self._version = -1  # Version of the roster's list.
        self._listed_at = -tuning.list_s  # When the roster was last asked for its list.
        self._members: dict[int, _Member] = {}  # Replaced, never changed, when shards are added or removed.
        self._lock = threading.RLock()
        self._list_lock = threading.Lock()  # Held while the roster is asked for its list.

    def ask_roster(self, question: Callable[[Any], Any], patience_s: float | None = None) -> Any:
        """Return the roster's answer to `question(roster)`. Wait while Ray restarts the roster."""
        patience = self.patience_s if patience_s is None else patience_s
        return ask(lambda: question(self._roster), "The memory's roster", patience, self.patience_s)

    def refresh_list(self, *, now: bool = False) -> None:
        """Ask the roster for its list of shards, at most every `list_s` seconds unless `now`.

        Wait for the roster only if no shard is known yet. Raise ShardError if it lists no shard within `patience_s`.
        """
        is_recent = time.monotonic() - self._listed_at < self._tuning.list_s
        if is_recent and self._members and not now:
            return
        require_ray()
        if not self._list_lock.acquire(blocking=now or not self._members):
            return  # Another thread is asking.
        try:
            self._listed_at = time.monotonic()
            end_s = self._listed_at + (0.0 if self._members else self.patience_s)
            while not self._read_list(end_s - time.monotonic()):
                time.sleep(self._tuning.pause_s)
        finally:
            self._list_lock.release()

    def _read_list(self, left_s: float) -> bool:
        """Read the roster's list, and return whether any shard is known.

        Raise ShardError if no shard is known and the roster has ended or no time is left to ask again.
        """
        reason = "The memory's roster lists none."
        is_last = left_s < 0
        try:
            version, handles = self.ask_roster(lambda roster: roster.shards.remote(self._version), left_s)
            if handles is not None:
                self._version = version
                self._set_handles(handles)
        except ShardError as error:
            reason = str(error)
            is_last = is_last or isinstance(error, GoneError)
        if is_last and not self._members:
            raise ShardError(f"No shard of the memory is known. {reason} Is the memory closed?")
        return bool(self._members)

    def _set_handles(self, handles: dict[int, Any]) -> None:
        with self._lock:
            known = self._members
            self._members = {
                number: known[number] if number in known else _Member(handle) for number, handle in handles.items()
            }

    def end_lease(self, lease: int, shard: int, counters: ShardCounters) -> None:
        """Tell the limiter that the rows of a lease have arrived. Does not wait."""
        self._roster.end_insert.remote(lease, shard, counters)

    def submit(self, shard: int, call: Callable[[Any], Any]) -> Any:
        """Return the future of `call(actor)`. A shard executes the calls of one process in the order of `submit`."""
        with self._lock:
            return call(self.handle(shard))

    def handle(self, shard: int) -> Any:
        """Return the actor of a shard."""
        return self._members[shard].handle

    @property
    def numbers(self) -> list[int]:
        """Numbers of all shards."""
        return sorted(self._members)

    @property
    def lost(self) -> list[int]:
        """Numbers of the shards that do not answer now."""
        return sorted(number for number, member in self._members.items() if member.is_lost)

    @property
    def known(self) -> dict[int, ShardCounters]:
        """The last counters of every shard that answers."""
        members = self._members.items()
        return {number: m.counters for number, m in members if m.counters is not None and not m.is_lost}

    def last_counters(self, shard: int) -> ShardCounters | None:
        """Return the last counters of a shard, also if it does not answer now. None if it never answered."""
        member = self._members.get(shard)
        return None if member is None else member.counters

    @property
    def transitions(self) -> int:
        """Transitions that can be drawn, according to the last counters."""
        return sum(counters.transitions for counters in self.known.values())

    def masses(self) -> dict[int, float]:
        """Return the mass of every shard that answers. Does not wait for any shard."""
        self.refresh_list()
        with self._lock:
            for number, member in self._members.items():
                self._read_probes(number, member)
            return {
                number: 0.0 if member.counters is None else member.counters.mass
                for number, member in self._members.items()
                if not member.is_lost
            }

    def record(self, shard: int, counters: ShardCounters, *, answers: bool = False) -> None:
        """Record the counters of a shard. With `answers`, the shard is no longer lost."""
        with self._lock:
            member = self._members.get(shard)
            if member is None:
                return
            known = member.counters
            if answers:
                member.is_lost = False
            # Answers may overtake each other. A later epoch can have a lower number, so another epoch always counts.
            if known is not None and known.epoch == counters.epoch and counters.changes < known.changes:
                return
            member.counters = counters

    def probe(self, shards: Iterable[int]) -> None:
        """Ask shards for their counters without waiting. Used for shards that a batch is not drawn from."""
        with self._lock:
            for number in shards:
                member = self._members.get(number)
                if member is not None and not member.probes:
                    member.probe(self._tuning.max_probes)

    def refresh(self) -> dict[int, ShardCounters]:
        """Ask every shard for its counters, and wait. Return the counters of the shards that answered."""
        self.refresh_list(now=True)
        found: dict[int, ShardCounters] = self.ask_all(self.numbers, lambda shard: shard.counters.remote())
        for number, counters in found.items():
            self.record(number, counters, answers=True)
        return found

    def ask_all(self, shards: Iterable[int], question: Callable[[Any], Any]) -> dict[int, Any]:
        """Ask several shards at the same time, and wait. Return the answers by shard."""
        members = self._members
        calls = {number: question(members[number].handle) for number in shards if number in members}
        found = {}
        for number, call in calls.items():
            try:
                found[number] = get_result(call, self.patience_s)
            except LOSSES:
                self.mark_lost(number)
        return found

    def mark_lost(self, shard: int) -> None:
        """Record that a shard did not answer. `masses` asks it again."""
        with self._lock:
            member = self._members.get(shard)
            if member is not None and not member.is_lost:
                self.losses += 1
                member.is_lost = True

    def is_away(self, shard: int) -> bool:
        """Return whether Ray is restarting a shard or gave it up, according to this process.

        Ray fails a call to such a shard only after two seconds, even if the shard is back after one.
        """
        member = self._members.get(shard)
        return member is None or actor_state(member.handle) in {"restarting", "gone"}

    def _read_probes(self, number: int, member: _Member) -> None:
        """Read the answers that have arrived, and ask a lost or new shard again.

        A new question does not wait for earlier ones. If Ray got a question while it restarted the actor, the question
        fails seconds later, even if the actor is back by then.
        """
        if member.probes:
            for probe in ray.wait(member.probes, num_returns=len(member.probes), timeout=0)[0]:
                member.probes.remove(probe)
                try:
                    self.record(number, ray.get(probe), answers=True)
                except LOSSES:
                    member.is_lost = True
                else:
                    member.probes.clear()  # If one of them fails later, it was asked before the shard was back.
                    break
        is_unknown = member.is_lost or member.counters is None
        if is_unknown and time.monotonic() - member.probed_at > self._tuning.probe_s:
            member.probe(self._tuning.max_probes)
