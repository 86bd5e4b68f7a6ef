"""What writers, shards and learners know and ask of each other: ids, counters, and which shards answer.

A transition id over shards is the shard, and the number of the row there:

    bits 48 to 62: shard    bits 36 to 47: life, for shards that start empty after a loss    bits 0 to 35: row

Invariant: an id is never used again, not even by a shard that lost what it held. Those of shard 0 in its first life are
those of a local memory. Calls that change a shard are never retried by Ray; those of one client reach it in the order
in which they were made. A shard that does not answer is asked again until it answers; nothing else waits for it.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.errors import HoldallError, ShardError
from holdall.shared import BlockPlace, SeenCount

Ids = NDArray[np.int64]

_SHARD_SHIFT = 48
_LIFE_SHIFT = 36
MOST_SHARDS = 1 << 15
MOST_LIVES = 1 << 12
_ROW_MASK = np.int64((1 << _SHARD_SHIFT) - 1)


def require_ray() -> None:
    """Refuse what needs Ray after it was shut down: any call would start another one, without this memory."""
    if not ray.is_initialized():
        raise ShardError(
            "Ray was shut down, and the memory ended with it; what no shard had acknowledged is lost: close the memory "
            "before ray.shutdown(), and make it again"
        )


def first_row_of(life: int) -> int:
    """Return the number of a shard's first row in one of its lives."""
    return (life % MOST_LIVES) << _LIFE_SHIFT


def life_of(row: Any) -> Any:
    """Return the life in which a row, or each of some, was accepted."""
    return row >> _LIFE_SHIFT


def ids_of(shard: int, rows: Ids) -> Ids:
    """Name rows of a shard."""
    return rows | np.int64(shard << _SHARD_SHIFT)


def shards_of(ids: Ids) -> Ids:
    """Return the shards of ids."""
    return ids >> _SHARD_SHIFT


def rows_of(ids: Ids) -> Ids:
    """Return the row numbers of ids, as their shards count."""
    return ids & _ROW_MASK


class ShardCounters(NamedTuple):
    """One shard at one moment."""

    epoch: int  # another one after every restart
    first_row: int
    next_row: int
    transitions: int  # rows held that can be drawn
    inserted: int  # transitions ever accepted
    changes: int  # of what is held or of priorities, since it was started
    backlog: int  # bytes that wait to be made durable
    mass: float  # what its draws are in proportion to: transitions, or the sum of scaled priorities
    highest: float = 0.0  # scaled priority that a new row gets
    counted_at: BlockPlace | None = None  # where others on its machine see how often it has changed


class RestartedError(ShardError):
    """A shard that does not know what it was asked before, as it was restarted since."""


def this_machine() -> bytes:
    """Name the machine that this process runs on, as Ray counts machines."""
    node: str = ray.get_runtime_context().get_node_id()
    return node.encode()


def this_node() -> str:
    """Return the address of the machine that this process runs on, as Ray has it."""
    return str(ray.util.get_node_ip_address())


class SentSegment(NamedTuple):
    """A segment on its way to a shard."""

    payload: bytes
    rows: int
    lease: int  # of the limiter, which is given back when the segment has arrived; -1: none


class Ack(NamedTuple):
    """A shard's answer to some segments of a writer."""

    expected: int  # the number of the writer's next segment; all before it are there, and durable if any are
    counters: ShardCounters
    is_closed: bool = False  # the shard takes nothing more
    refused: str = ""  # why the next segment will never be accepted


class GoneError(ShardError):
    """A shard that will not come back."""


class ShardClosedError(GoneError):
    """A shard that takes nothing more; what it has not accepted is safe to send elsewhere."""


class ShardStatus(NamedTuple):
    """One shard at one moment; all but its number is unknown while it does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # memory that its process has to itself
    counters: ShardCounters | None = None
    pss_bytes: int = 0  # the same, and its share of what it has in common with others
    held_bytes: int = 0  # of transitions, as they are held
    plain_bytes: int = 0  # what the same transitions take as plain arrays of obs and next_obs
    capacity: int = 0  # most transitions
    is_durable: bool = False  # whether a journal is kept
    is_draining: bool = False  # whether it takes nothing more
    limit: str = ""  # what its memory meets first: its control group, or the machine
    limit_bytes: int = 0
    limit_free_bytes: int = 0


ActorState = Literal["up", "starting", "restarting", "gone"]


_STATES: dict[Any, ActorState] = {0: "starting", 1: "starting", 3: "restarting", 4: "gone"}
"""By the numbers of Ray's ActorTableData; 2 is an actor that runs."""


def actor_state(handle: Any) -> ActorState:
    """Return where the actor of a handle is."""
    return _STATES.get(getattr(handle, "_get_local_state", lambda: None)(), "up")


LOSSES = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, RestartedError)
"""What a call fails with when its shard does not answer, or not in time."""


def received(call: Any, patience_s: float | None = None) -> Any:
    """Wait for a call's result; an error of holdall's own is raised as it was there."""
    try:
        return ray.get(call, timeout=patience_s)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldallError):
            raise cause from None
        raise


_LOG = logging.getLogger("holdall")
PAUSE_S = 0.05
_LOOK_AGAIN_S = 2.0
"""How often the roster is asked for new shards."""


def asked(actor: Any, method: str, *arguments: Any, patience_s: float, timeout_s: float | None) -> Any:
    """Call what may be called twice; an actor that Ray restarts, also on another machine, is waited for.

    Args:
        timeout_s: How long one call may take; None: as long as it takes, of an actor that answers as soon as it is up.
    """
    until, was_dead = time.monotonic() + patience_s, False
    while True:
        require_ray()
        try:
            return received(getattr(actor, method).remote(*arguments), timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            is_dead = isinstance(error, ray.exceptions.ActorDiedError)
            if is_dead and was_dead:
                raise GoneError(f"{method} will never be answered: the actor is gone for good ({error})") from error
            was_dead = is_dead
            if isinstance(error, ray.exceptions.GetTimeoutError):
                _LOG.warning("%s is not answered yet: a shard reads its journal, or Ray has no room for it", method)
            if time.monotonic() > until:
                raise ShardError(
                    f"{method} was not answered for {max(0.0, patience_s):g} s ({type(error).__name__}); nothing is "
                    "lost: see `ray status` for room, and try again"
                ) from error
        time.sleep(PAUSE_S)


class ShardList:
    """The shards of a memory, by number, as its roster lists them. Not locked."""

    def __init__(self, roster: Any, patience_s: float) -> None:
        self._roster, self._patience_s = roster, patience_s
        self.handles: dict[int, Any] = {}
        self._version = -1
        self._looked_at = -_LOOK_AGAIN_S

    def ask(self, method: str, *arguments: Any, patience_s: float | None = None) -> Any:
        """Ask the roster something; while it is being restarted it is waited for."""
        waits_s = self._patience_s if patience_s is None else patience_s
        return asked(self._roster, method, *arguments, patience_s=waits_s, timeout_s=self._patience_s)

    def look(self, *, now: bool = False) -> None:
        """See which shards there are, from time to time or at once; who knows none yet waits for one."""
        if not now and self.handles and time.monotonic() - self._looked_at < _LOOK_AGAIN_S:
            return
        require_ray()
        self._looked_at = time.monotonic()
        until = self._looked_at + (0.0 if self.handles else self._patience_s)
        while True:
            missing, left_s = "lists no shards", until - time.monotonic()
            try:
                version, handles = self.ask("shards", self._version, patience_s=left_s)
                if handles is not None:
                    self._version, self.handles = version, handles
            except ShardError as error:
                missing, left_s = f"does not answer ({error})", -1.0 if isinstance(error, GoneError) else left_s
            if self.handles:
                return
            if left_s < 0:
                raise ShardError(f"the memory's roster {missing}; is the memory closed?")
            time.sleep(PAUSE_S)


_PROBE_AGAIN_S, _MOST_PROBES = 0.25, 16


@dataclass(slots=True)
class _Member:
    """One shard, as far as is known."""

    handle: Any
    counters: ShardCounters | None = None
    lost: bool = False
    probes: list[Any] = field(default_factory=list)  # questions to a shard that was lost, or not drawn from
    probed_at: float = 0.0
    count: SeenCount | None = None  # of its changes, if it runs on this machine

    @property
    def is_as_known(self) -> bool:
        """Whether the shard has not changed since it last said how it stands, as far as can be seen from here."""
        counters, count = self.counters, self.count
        return not self.lost and counters is not None and count is not None and count.now == counters.changes

    def ask(self) -> None:
        """Have the shard say how it stands, without waiting for it."""
        self.probed_at = time.monotonic()
        self.probes = [*self.probes, self.handle.counters.remote()][-_MOST_PROBES:]


class Cluster:
    """All shards of a memory."""

    def __init__(self, roster: Any, patience_s: float) -> None:
        self.patience_s, self._list = patience_s, ShardList(roster, patience_s)
        self.ask_roster = self._list.ask
        self._members: dict[int, _Member] = {}  # in its place another is put when shards come or go
        self._lock, self._looking = threading.RLock(), threading.Lock()
        self.losses = 0

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard; return what to wait for. Calls of one handle are taken in the order in which they are made.

        The arguments go as one, already pickled: Ray takes far longer for each than this takes for all.
        """
        with self._lock:
            return self.handle(shard).ordered.remote(pickle.dumps((method, *arguments)))

    def _member(self, shard: int) -> _Member:
        """Return what is known of a shard; of one that was dismissed, a record that is kept nowhere."""
        return self._members.get(shard) or _Member(None)

    def handle(self, shard: int) -> Any:
        """Return the actor of a shard."""
        return self._members[shard].handle

    @property
    def numbers(self) -> list[int]:
        """All shards."""
        return sorted(self._members)

    @property
    def lost(self) -> list[int]:
        """Shards that do not answer now."""
        return sorted(number for number, member in self._members.items() if member.lost)

    @property
    def known(self) -> dict[int, ShardCounters]:
        """What the shards that answer said of themselves last."""
        members = self._members.items()
        return {number: m.counters for number, m in members if m.counters is not None and not m.lost}

    @property
    def transitions(self) -> int:
        """Transitions that can be drawn, as far as is known."""
        return sum(counters.transitions for counters in self.known.values())

    def masses(self) -> dict[int, float]:
        """What can be drawn from now, by shard."""
        self._look_around()
        with self._lock:
            for number, member in self._members.items():
                self._hear(number, member)
            return {
                number: 0.0 if member.counters is None else member.counters.mass
                for number, member in self._members.items()
                if not member.lost
            }

    def note(self, shard: int, counters: ShardCounters, *, answers: bool = False) -> None:
        """Keep what a shard said of itself; `answers`: one that was lost, too, is there again."""
        with self._lock:
            member = self._member(shard)
            known, member.lost = member.counters, member.lost and not answers
            # Calls may overtake each other. Of another epoch the last word counts, as epochs may also become less.
            if known is not None and known.epoch == counters.epoch and counters.changes < known.changes:
                return
            member.counters = counters
            if known is not None and known.epoch != counters.epoch:  # it counts its changes elsewhere now
                member.count = None
            if counters.counted_at is not None and member.count is None:
                member.count = SeenCount(counters.counted_at)

    def changes(self) -> dict[int, tuple[int, int]] | None:
        """Say of every shard how often it has changed, if all are as they are known here; None if that is not seen."""
        with self._lock:
            members = self._members.items()
            if not all(member.is_as_known for _, member in members):
                return None
            return {n: (m.counters.epoch, m.counters.changes) for n, m in members if m.counters is not None}

    def ask_again(self, shards: list[int]) -> None:
        """Have shards say how they stand, without waiting for it; those that are not drawn from would not."""
        with self._lock:
            for number in shards:
                member = self._members.get(number)
                if member is not None and not member.probes:
                    member.ask()

    def refresh(self) -> dict[int, ShardCounters]:
        """Ask every shard how it stands, and wait; return the counters of those that answered."""
        self._look_around(now=True)
        found: dict[int, ShardCounters] = self.ask_all(self.numbers, "counters")
        for number, counters in found.items():
            self.note(number, counters, answers=True)
        return found

    def ask_all(self, shards: Iterable[int], method: str, *arguments: Any) -> dict[int, Any]:
        """Call some shards at the same time, and wait; return what those say that answer."""
        calls = {n: getattr(self.handle(n), method).remote(*arguments) for n in shards if n in self._members}
        found = {}
        for number, call in calls.items():
            try:
                found[number] = received(call, self.patience_s)
            except LOSSES:
                self.lose(number)
        return found

    def lose(self, shard: int) -> None:
        """Mark a shard that did not answer; it is asked again until it does."""
        with self._lock:
            member = self._member(shard)
            self.losses += not member.lost
            member.lost = True

    def is_away(self, shard: int) -> bool:
        """Whether Ray restarts a shard, or gave it up, as far as this process knows.

        A call that is made meanwhile fails after two seconds, though the shard be back after one.
        """
        return actor_state(self._member(shard).handle) in {"restarting", "gone"}

    def _hear(self, number: int, member: _Member) -> None:
        """Look whether a question was answered, and ask a lost shard again.

        Without waiting for the questions before: Ray fails one that it is asked while it restarts an actor, or gives it
        up, seconds later, though the actor be back by then.
        """
        for probe in ray.wait(member.probes, num_returns=len(member.probes), timeout=0)[0] if member.probes else ():
            member.probes.remove(probe)
            try:
                self.note(number, ray.get(probe), answers=True)
            except LOSSES:
                member.lost = True
            else:
                member.probes.clear()  # those that fail now were asked before
                break
        if member.lost and time.monotonic() - member.probed_at > _PROBE_AGAIN_S:
            member.ask()

    def _look_around(self, now: bool = False) -> None:
        """Ask the roster for shards that came or went, from time to time or at once."""
        if self._looking.acquire(blocking=now or not self._members):
            try:
                self._list.look(now=now)
            finally:
                self._looking.release()
        with self._lock:
            handles = self._list.handles
            if handles.keys() != self._members.keys():
                new = {number: _Member(handles[number]) for number in handles.keys() - self._members.keys()}
                for member in new.values():
                    member.ask()
                self._members = {number: m for number, m in self._members.items() if number in handles} | new
