"""Where an actor is, as far as Ray told this process: at once, and without a question.

What tells is no part of Ray's promised interface, so it is read here alone; without it everybody counts as up, and a
loss is noticed when calls fail, two seconds later.
"""

from __future__ import annotations

from holdall.cluster.status import actor_state

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from holdall.cluster.protocol import CallOrder, CallOrderError, ShardCounters, is_newer
from holdall.cluster.writer import Address
from holdall.errors import ShardError
from holdall.report import FieldReport






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
            self.begin_anew()
        self.counters = counters

    @property
    def is_away(self) -> bool:
        """Whether Ray restarts the shard, or gave it up, as far as this process was told.

        A call that is made meanwhile fails after two seconds, though the shard be back after one.
        """
        return actor_state(self.handle) in {"restarting", "gone"}

    def begin_anew(self) -> None:
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
            member.begin_anew()
            member.probe, member.probed_at = None, time.monotonic() if member.is_away else 0.0

    def is_away(self, shard: int) -> bool:
        """Whether Ray restarts a shard, or gave it up, as far as this process was told."""
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
                    told = ShardCounters.of(ray.get(probe))
                    member.lost = False
                    if is_newer(told, member.counters):
                        member.keep(told)
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


def added_up(reports: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[FieldReport, ...]:
    """Add up the fields of the same name; a shard that is still empty may not know of all."""
    fields = [[FieldReport(**field) for field in of_shard] for of_shard in reports]
    longest = max(fields, key=len, default=[])
    return tuple(_sum_of([field for one in fields for field in one if field.name == f.name]) for f in longest)


def _sum_of(fields: list[FieldReport]) -> FieldReport:
    return FieldReport(
        fields[0].name,
        sum(field.slice_bytes for field in fields),
        sum(field.log_bytes for field in fields),
        sum(field.row_bytes for field in fields),
        sum(field.plain_bytes for field in fields),
        fields[0].finding,
        sum(field.sealed_bytes for field in fields),
        sum(field.disk_bytes for field in fields),
    )
