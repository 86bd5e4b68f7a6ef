"""The roster and the rate limiter: what the processes of a memory agree on.

Which shards there are, which codec a field gets, how many samples an insert may have; and the terms of the memory,
which are checked here.

In:  what the shards took, and leases that writers and learners ask for.  Out: grants, or not yet.
Invariant: error = inserts * samples_per_insert - samples never leaves its bounds, whatever is granted at the same time
and whichever process dies with a grant: an insert under way counts against the upper bound as if it were done, and
against the lower as if it never would be. Grants end by themselves, so nobody waits for the dead.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from holdall.cluster.protocol import MOST_LIVES, ShardCounters, require_ray
from holdall.errors import ArgumentError, ShardError
from holdall.ray_access import machine_given_up_s
from holdall.ray_metrics import Gauges
from holdall.sampling import ComposedSampler, Hindsight, NStep, Prioritized, Sampler, Sequence, Uniform
from holdall.schema import require_choice, require_count, require_number
from holdall.storage import COST_CAPS

NAMESPACE = "holdall"
"""Where rosters have their names."""
_LEASE_S = 30.0
"""How long a grant lasts that is neither used nor given back."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """About how often a transition is drawn before it is replaced.

    Args:
        samples_per_insert: Rows drawn for every transition added, in the long run.
        min_size: Transitions added before anything is drawn.
        tolerance: How many rows too many or too few may be drawn; at least a few batches, and a few segments of 128
            transitions times samples_per_insert.
    """

    samples_per_insert: float
    min_size: int
    tolerance: float

    def __post_init__(self) -> None:
        require_number("samples_per_insert", self.samples_per_insert, 1e-6)
        require_count("min_size", self.min_size, 1)
        require_number("tolerance", self.tolerance, 0.0)

    @property
    def lowest(self) -> float:
        """Lower bound of the error."""
        return self.min_size * self.samples_per_insert - self.tolerance

    @property
    def highest(self) -> float:
        """Upper bound of the error."""
        return self.min_size * self.samples_per_insert + self.tolerance

    def require(self, call: str, rows: int) -> None:
        """Refuse to "add", or to "sample", what could never be granted."""
        least = float(rows)
        reason = "the number of rows of a batch"
        if call == "add":
            least = rows * self.samples_per_insert
            reason = f"a segment of {rows} rows times samples_per_insert"
        if least > self.tolerance:
            raise ArgumentError(
                f"tolerance ({self.tolerance:g}) must be at least {least:g}, {reason}. Otherwise writers and learners "
                "can wait for each other forever. Raise tolerance."
            )


_STAYS = 4
"""An episode that is longer than this part of a shard is cut, and goes on on another."""


class MemoryTerms(NamedTuple):
    """What every process that has to do with a memory knows of it; see `holdall.ray.ReplayMemory`."""

    words: dict[str, Any]  # of the schema
    name: str  # of the roster; a handle in its place could not be had again by an actor that is restarted
    sampler: Sampler
    shard_rows: int  # most rows of a shard
    url: str | None  # where journals are kept; None: nowhere, and what a shard held is lost with it
    prefer: str
    on_shard_loss: str
    patience_s: float  # of a process that asks something
    writer_patience_s: float  # of writers, whose error comes when Ray has given a machine up
    limit: RateLimit | None = None
    shards: int = 1  # that it began with

    @property
    def stay_rows(self) -> int:
        """Rows after which a writer may leave a shard within an episode; 0: after every segment."""
        return max(1, self.shard_rows // _STAYS) if isinstance(self.sampler, ComposedSampler) else 0


def roster_of(name: str) -> Any:
    """Find the roster of a memory."""
    require_ray()
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError as error:
        raise ShardError(f"the memory {name} is not there; was it closed?") from error


def agreed_codec(roster: Any, field: str, choose: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the codec that the memory's first writer chose for a field; None: it is asked again later."""
    try:
        words: dict[str, Any] | None = ray.get(roster.codec.remote(field))
        return ray.get(roster.codec.remote(field, choose())) if words is None else words
    except ray.exceptions.RayError:
        return None


_ANSWERS_S = 10.0
_RESTARTED_S = 15.0
"""What a shard may take to be started again once its machine was given up."""


def health_patience_s() -> float:
    """Return how long it may take until shards of a machine that hangs are up on another one, by Ray's settings."""
    return max(_ANSWERS_S, machine_given_up_s()) + _RESTARTED_S


PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}
_CHOICES: dict[str, Collection[str]] = {
    "durability": ("memory", "segment"), "on_shard_loss": ("degrade", "block", "raise"), "prefer": COST_CAPS,
    "placement": PLACEMENTS,
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
    if isinstance(chosen, ComposedSampler) and type(chosen.by) not in (Uniform, Prioritized):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) draws by {type(chosen.by).__name__}, which is none of holdall's, and "
            "weights over shards follow its rules; pass by=Uniform() or by=Prioritized()"
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


_NOTICE_S = 5.0
_NOTICE_AGAIN_S = 30.0
_ASK_AGAIN_S = 0.01
_LOG = logging.getLogger("holdall")


def wait_for_grant(
    limit: RateLimit, call: str, rows: int, ask: Callable[..., Any], goes_on: Callable[[], bool] = lambda: True
) -> int | None:
    """Ask until the limiter grants something, and say now and then what is waited for.

    Args:
        call: "add" or "sample".
        ask: Asks the roster, see `ShardList.ask`.
        goes_on: Is called before the roster is asked again; False: nothing is waited for any more, and None returned.
    """
    limit.require(call, rows)
    began = time.monotonic()
    notice_at = began + _NOTICE_S
    while (grant := ask("grant", call, rows, patience_s=math.inf)) is None:
        now = time.monotonic()
        if now >= notice_at:
            notice_at = now + _NOTICE_AGAIN_S
            _LOG.warning("%s has waited %.0f s for %s: %s", call, now - began, limit, _waited_for(ask("limiter")))
        if not goes_on():
            return None
        time.sleep(_ASK_AGAIN_S)
    return int(grant)


def _waited_for(words: dict[str, float]) -> str:
    """Say what has to happen before a limiter grants more."""
    asked = [
        f"no {who} has asked for a grant yet" if words[key] < 0 else f"a {who} last asked {words[key]:.0f} s ago"
        for who, key in (("writer", "add_s"), ("learner", "sample_s"))
    ]
    return (
        f"{words['inserted']:.0f} transitions were added and {words['sampled']:.0f} rows drawn; the error may be "
        f"{words['lowest']:.0f} to {words['highest']:.0f} and is {words['error']:.0f}; {asked[0]}, {asked[1]}"
    )


@dataclass
class Limiter:
    """Grants inserts and samples. Not locked: its owner runs one call at a time."""

    limit: RateLimit
    inserted: int = 0  # what the shards took, as they last said
    sampled: int = 0
    _inserts: dict[int, tuple[int, float]] = field(default_factory=dict)  # lease: rows, and when it ends
    _next: int = 0

    @property
    def error(self) -> float:
        """How far samples are behind inserts."""
        return self.inserted * self.limit.samples_per_insert - self.sampled

    def words(self) -> dict[str, float]:
        """Say how it stands, as plain numbers."""
        bounds = {"lowest": self.limit.lowest, "highest": self.limit.highest}
        return {"inserted": self.inserted, "sampled": self.sampled, "error": self.error, **bounds}

    def observe(self, inserted: int) -> None:
        """Take over what the shards have taken; it only grows."""
        self.inserted = max(self.inserted, inserted)

    def lease_insert(self, rows: int, now: float) -> int | None:
        """Grant the insert of some rows; None if it would lead out of bounds."""
        self._inserts = {lease: (n, end) for lease, (n, end) in self._inserts.items() if end > now}
        under_way = sum(n for n, _ in self._inserts.values())
        then = (self.inserted + under_way + rows) * self.limit.samples_per_insert - self.sampled
        if then > self.limit.highest:
            return None
        lease, self._next = self._next, self._next + 1
        self._inserts[lease] = (rows, now + _LEASE_S)
        return lease

    def end_insert(self, lease: int) -> None:
        """Forget a grant whose rows a shard has acknowledged, so that they are in `inserted` at the next look."""
        self._inserts.pop(lease, None)

    def take_samples(self, rows: int) -> bool:
        """Grant the draw of some rows, and count them; False if it would lead out of bounds."""
        if self.inserted < self.limit.min_size or self.error - rows < self.limit.lowest:
            return False
        self.sampled += rows
        return True

    def recentre(self, inserted: int) -> None:
        """Begin again with shards that hold something already: as if as much had been drawn as should be."""
        self.inserted = inserted
        behind = max(0, inserted - self.limit.min_size)
        self.sampled = int(behind * self.limit.samples_per_insert)


_NO_LIMIT = RateLimit(1.0, 1, 2.0**62)
_LOOK_AGAIN_S, _ANSWER_S = 0.05, 0.1
_FIRST_RANK = 2**20
"""Of learners that are given none: above those that are."""


class Roster:
    """What is agreed on. It runs one call at a time, and hardly waits for anybody.

    Args:
        home: The namespace in which the memory's shards have their numbers as names: one that is restarted finds them.
    """

    def __init__(self, terms: MemoryTerms, home: str) -> None:
        self._terms = terms
        self._learners = _FIRST_RANK
        self._highest = 0.0  # priority of the whole memory, as far as was said here
        self._limiter = Limiter(terms.limit or _NO_LIMIT)
        self._inserted: dict[tuple[int, int], int] = {}
        self._moved = 0  # rows that one shard took of another
        self._questions: dict[int, Any] = {}  # to shards, that they have not answered yet
        self._looked_at = 0.0
        # A roster that was restarted does not know which lives there were; it begins where there were none yet.
        self._first_life = 1 + secrets.randbelow(MOST_LIVES - 1) if is_restarted() else 0
        self._recentres = True  # also over journals, and with a checkpoint
        self._list(_named_in(home))
        self._lives: dict[int, int] = {}
        self._codecs: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, float] = {}  # when a grant to add or to draw was last asked for
        if terms.limit is not None:
            Gauges("limiter", memory=terms.name).follow(self._limiter.words)

    def terms(self) -> MemoryTerms:
        """Say what handles have to know."""
        return self._terms

    def enroll(self) -> int:
        """Number the learners that have no rank of their own."""
        self._learners += 1
        return self._learners

    def raise_highest(self, scaled: float) -> None:
        """Note a priority; a shard that starts is given the highest."""
        self._highest = max(self._highest, scaled)

    def begin_life(self, shard: int, first: int) -> tuple[int, float]:
        """Count a shard's lives, from `first` on; say what the highest priority is."""
        life = self._lives[shard] = max(first, self._first_life, self._lives.get(shard, -1) + 1)
        return life, self._highest

    def admit(self, shard: int, handle: Any) -> None:
        """Add a shard to the list."""
        self._list(self._shards | {shard: handle})

    def begin(self, known: Mapping[int, ShardCounters]) -> None:
        """Note what shards hold before anything is added; without that, what came first would count as held before.

        Also when a checkpoint was copied to them: that took no grants.
        """
        for shard, counters in known.items():
            self._note(shard, counters)
        self._limiter.recentre(sum(self._inserted.values()) - self._moved)

    def note_move(self, rows: int) -> None:
        """Note that a shard takes rows of another, so that they are not counted as added a second time."""
        self._moved += rows

    def dismiss(self, shard: int) -> None:
        """Take a shard off the list."""
        self._list({number: handle for number, handle in self._shards.items() if number != shard})

    def _list(self, shards: dict[int, Any]) -> None:
        self._shards, self._version = shards, secrets.randbits(62)

    def shards(self, known: int) -> tuple[int, dict[int, Any] | None]:
        """Return the list and its version; no list if the version is known."""
        return self._version, None if known == self._version else self._shards

    def codec(self, key: str, chosen: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the codec that a field's slices get, in words: the first that was chosen; None if none was."""
        return self._codecs.get(key) if chosen is None else self._codecs.setdefault(key, chosen)

    def grant(self, call: str, rows: int) -> int | None:
        """Grant that some rows are inserted, for "add", or drawn, for "sample"; None: not yet."""
        self._look_at_shards()
        now = self._asked[f"{call}_s"] = time.monotonic()
        return self._limiter.lease_insert(rows, now) if call == "add" else self._limiter.take_samples(rows) or None

    def end_insert(self, lease: int, shard: int, counters: ShardCounters) -> None:
        """Note that rows that were granted have arrived."""
        self._note(shard, counters)
        self._limiter.end_insert(lease)

    def limiter(self) -> dict[str, float]:
        """Say how the limiter stands, and how long ago a grant was last asked for; -1: never. Nothing without one."""
        if self._terms.limit is None:
            return {}
        self._look_at_shards(_ANSWER_S)
        now, asked = time.monotonic(), {"add_s": -1.0, "sample_s": -1.0}
        return self._limiter.words() | asked | {call: now - then for call, then in self._asked.items()}

    def _look_at_shards(self, waits_s: float = 0.0) -> None:
        """Ask the shards now and then what they took, and note the answers that have come."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now
            new = {shard: handle for shard, handle in self._shards.items() if shard not in self._questions}
            self._questions |= {shard: handle.counters.remote() for shard, handle in new.items()}
        calls = list(self._questions.values())
        answered = ray.wait(calls, num_returns=len(calls), timeout=waits_s)[0] if calls else []
        for shard in [shard for shard, call in self._questions.items() if call in answered]:
            with suppress(ray.exceptions.RayError):  # it counts with what it took before
                self._note(shard, ray.get(self._questions.pop(shard)))

    def _note(self, shard: int, counters: ShardCounters) -> None:
        """Add up what was ever taken; a shard that began again counts from 0 again."""
        life = 0 if self._terms.url is not None else counters.epoch
        self._inserted[shard, life] = max(self._inserted.get((shard, life), 0), counters.inserted)
        total = sum(self._inserted.values()) - self._moved
        if self._recentres:
            self._limiter.recentre(total)
            self._recentres = len(self._inserted) < len(self._shards)
        self._limiter.observe(total)


def _named_in(home: str) -> dict[int, Any]:
    """Return the shards that there are: those of a roster that was restarted, or none yet."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    numbers = [int(each["name"]) for each in listed if each["namespace"] == home]
    found = {}
    for number in sorted(numbers):
        with suppress(ValueError):  # it has ended since
            found[number] = ray.get_actor(str(number), home)
    return found


def is_restarted() -> bool:
    """Whether Ray has started the actor of this process again."""
    context = ray.get_runtime_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of a name that it uses itself
        return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)
