"""The learner: which shard each row of a batch is drawn from, and what a draw was worth.

In:  what shards say of themselves with every answer.  Out: a shard for every row; importance weights.
Invariant: a shard is drawn from in proportion to its mass as it is known here. Weights are made of the probability that
was used, so a mass that was out of date costs variance and no bias; one that is lost or joins changes nothing for the
others but their sum.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.checkpoint import Checkpoint
from holdall.cluster.answer import Answer, Deliverer, read_answer
from holdall.cluster.protocol import LOSSES, Cluster, Ids, ShardCounters, received, rows_of, shards_of, this_machine
from holdall.delivery import BatchJob
from holdall.errors import CheckpointError, ShardError, TransitionIdError
from holdall.sampling import ComposedSampler, Hindsight, Likelihood, Sampler, require_enough
from holdall.schema import Array
from holdall.shared import BatchBlock, put_together


def assigned(masses: Mapping[int, float], count: int, generator: np.random.Generator) -> dict[int, Ids]:
    """Draw a shard for each of `count` rows; return the positions of each shard's rows.

    A memory of one shard draws nothing here, so that it goes on exactly as a local one.
    """
    shards = sorted(shard for shard, mass in masses.items() if mass > 0)
    if len(shards) == 1:
        return {shards[0]: np.arange(count)}
    share = np.cumsum([masses[shard] for shard in shards])
    drawn = (share / share[-1]).searchsorted(generator.random(count), side="right")
    return {shard: rows for i, shard in enumerate(shards) if (rows := np.flatnonzero(drawn == i)).size}


def weights_of(
    answers: Sequence[Answer], where: Sequence[Ids], masses: Sequence[float], beta: float
) -> NDArray[np.float32]:
    """Return the weights of a batch: the lowest probability in it over each row's own, to the power of beta.

    Args:
        masses: What each answer's shard was taken to hold when its rows were assigned.
    """
    # Of one shard alone its mass says nothing; of several, what was believed over what was true.
    beliefs = [mass / answer.counters.mass for answer, mass in zip(answers, masses, strict=True)]
    scaled = [answer.scaled for answer in answers]
    chance = put_together(scaled if len(scaled) == 1 else list(map(np.multiply, scaled, beliefs)), where)
    shares: NDArray[np.float32] = (chance.min(initial=np.inf) / chance).astype(np.float32)
    return shares ** np.float32(beta)


_LOOK_S = 0.05
"""How long an answer is waited for before it is asked whether the shard is there at all."""
_MOST_UNDER_WAY = 16


@dataclass(slots=True)
class Call:
    """A question to one shard; its answer may hold rows of several batches."""

    reference: Any
    is_heard: bool = False
    answer: Answer | None = None  # None also where the shard was lost, or holds nothing any more


class Asked(NamedTuple):
    """Rows of a batch that one shard was asked for."""

    shard: int
    rows: Ids  # positions in the batch
    mass: float  # what the shard was taken to hold
    call: Call
    first: int  # the first of them in the answer


@dataclass(slots=True)
class Request:
    """A batch that was asked for."""

    count: int
    asked: list[Asked] = field(default_factory=list)
    block: BatchBlock | None = None  # where shards on this machine write its rows


class Drawing:
    """Draws batches, and sends priorities to the shards.

    Args:
        generator: Draws which shard a row comes from.
        policy: What is done while a shard does not answer, see `ReplayMemory`.
        seeds: Whether the generator seeds the draws of shards, too; else each draws with its own.
    """

    def __init__(
        self, cluster: Cluster, deliverer: Deliverer, sampler: Sampler, generator: np.random.Generator, policy: str,
        *, seeds: bool,
    ) -> None:  # fmt: skip
        self._cluster, self._deliverer, self._sampler, self.generator = cluster, deliverer, sampler, generator
        self._policy, self._lock, self._patience_s = policy, threading.Lock(), cluster.patience_s
        self._seeds, self._machine = seeds, this_machine()
        self._by = Likelihood(sampler).prioritized
        self.updates = 0  # how often this handle has sent something that draws depend on
        self._sent: list[tuple[int, Any]] = []  # priorities that shards have not answered for yet
        self._sending = threading.Lock()

    def state(self) -> tuple[Any, ...] | None:
        """Name what draws depend on now; None if that cannot be seen without a call to the shards."""
        changes = self._cluster.changes()
        return None if changes is None else (self.updates, changes)

    def give_up(self, requests: Iterable[Request]) -> None:
        """Give back the memory of batches that nobody wants, where no shard can still write to it."""
        for request in requests:
            if request.block is not None and all(asked.call.is_heard for asked in request.asked):
                self._deliverer.blocks.settle(request.block)

    def start(self, count: int, batches: int = 1) -> list[Request]:
        """Draw a shard for every row of some batches, and ask every shard once for all of them."""
        requests = [Request(count) for _ in range(batches)]
        if not isinstance(self._sampler, ComposedSampler):
            for request in requests:
                request.block = self._deliverer.blocks.take(count)
        with self._lock:
            self._ask([(request, np.arange(count)) for request in requests], self._reachable(count))
        return requests

    def finish(self, request: Request) -> Batch:
        """Wait for the rows, and make the batch; it is drawn again if a shard was lost, or holds nothing any more.

        Then without a block: who was asked before may still write to the one that it had, which is not used again.
        """
        while (heard := self._heard_of(request)) is None:
            request = Request(request.count)
            with self._lock:
                self._ask([(request, np.arange(request.count))], self._reachable(1))
        weights = weights_of(
            *heard, [asked.mass for asked in request.asked], 1.0 if self._by is None else self._by.beta
        )
        shards = [asked.shard for asked in request.asked]
        return self._deliverer.batch(*heard, shards, weights, self._sampler, request.block)

    def gather(self, wanted: Ids) -> Batch:
        """Return the transitions `wanted`, in that order."""
        numbers, shards = set(self._cluster.numbers), shards_of(wanted)
        unknown = np.flatnonzero(~np.isin(shards, list(numbers)))
        if unknown.size:
            raise TransitionIdError(f"ids holds {int(wanted[unknown[0]])}, which is of no shard of this memory")
        request = Request(len(wanted))
        for shard in np.unique(shards).tolist() or [min(numbers)]:
            rows = np.flatnonzero(shards == shard)
            call = Call(self._cluster.call(shard, "gather", self._machine, rows_of(wanted[rows])))
            request.asked.append(Asked(shard, rows, 1.0, call, 0))
        if (heard := self._heard_of(request)) is None:
            raise ShardError(f"shards {self._cluster.lost} do not answer, and ids are wanted that they hold")
        named = [asked.shard for asked in request.asked]
        return self._deliverer.batch(*heard, named, np.ones(len(wanted), np.float32))

    def _heard_of(self, request: Request) -> tuple[list[Answer], list[Ids]] | None:
        """Wait for all answers; return each, and the positions of its rows in the batch. None if one does not come."""
        answers = [answer for asked in request.asked if (answer := self._heard(asked)) is not None]
        if len(answers) < len(request.asked):
            return None
        pairs = zip(request.asked, answers, strict=True)
        return answers, [asked.rows if each.order is None else asked.rows[each.order] for asked, each in pairs]

    def _heard(self, asked: Asked) -> Answer | None:
        """Wait for a shard's answer, and cut out the rows; None if it is lost, or holds nothing any more."""
        call, shard = asked.call, asked.shard
        if not call.is_heard:
            try:
                payload = self._payload(shard, call)
            except LOSSES as error:
                call.is_heard = True  # so that it is lost once
                self._cluster.lose(shard)
                if self._policy == "raise":
                    raise _away([shard], type(error).__name__) from error
                return None
            call.is_heard = True
            if not isinstance(payload, ShardCounters):
                call.answer = read_answer(payload)
            self._cluster.note(shard, payload if call.answer is None else call.answer.counters)
        return None if call.answer is None else call.answer.part(asked.first, asked.first + len(asked.rows))

    def _payload(self, shard: int, call: Call) -> Any:
        """Wait for what a shard says, but not for one that is known to be away: Ray fails its calls seconds later."""
        until = time.monotonic() + self._patience_s
        while True:
            left = until - time.monotonic()
            try:
                return received(call.reference, min(_LOOK_S, max(0.0, left)))
            except ray.exceptions.GetTimeoutError:
                if left <= 0 or self._cluster.is_away(shard):
                    raise

    def _ask(self, wanted: Sequence[tuple[Request, Ids]], masses: Mapping[int, float]) -> None:
        """Ask shards for some rows of batches, each batch's drawn for itself."""
        by_shard: dict[int, list[tuple[Request, Ids]]] = {}
        for request, rows in wanted:
            for shard, positions in assigned(masses, len(rows), self.generator).items():
                by_shard.setdefault(shard, []).append((request, rows[positions]))
        for shard in sorted(by_shard):
            parts = by_shard[shard]
            counts = [(len(rows), self._relabelled(request.count, rows)) for request, rows in parts]
            blocks = [request.block.place(rows) for request, rows in parts if request.block is not None]
            seed = int(self.generator.integers(1, 2**63)) if self._seeds else 0
            call, first = Call(self._cluster.call(shard, "sample", self._machine, seed, counts, blocks)), 0
            for request, rows in parts:
                request.asked.append(Asked(shard, rows, masses[shard], call, first))
                first += len(rows)
        self._cluster.ask_again([shard for shard in masses if shard not in by_shard])

    def _relabelled(self, count: int, rows: Ids) -> int:
        """Return how many of some rows of a batch get another goal: the first ones of all do."""
        if not isinstance(self._sampler, Hindsight):
            return 0
        return int(np.searchsorted(rows, self._sampler.relabelled(count)))

    def _reachable(self, count: int) -> dict[int, float]:
        """Return the masses of the shards that answer; refuse a batch of more than they hold."""
        until = time.monotonic() + self._patience_s
        while True:
            masses, lost = self._cluster.masses(), self._cluster.lost
            if lost and self._policy == "raise":
                raise _away(lost, "they were lost before")
            is_blocked = bool(lost) and self._policy == "block"
            if masses and not is_blocked:
                break
            if time.monotonic() > until and not is_blocked:
                raise _away(lost, f"none has answered for {self._patience_s:g} s; see `ray list actors`")
            time.sleep(_LOOK_S)
        if self._cluster.transitions < count:
            self._cluster.refresh()
            require_enough(count, self._cluster.transitions, count)
        return self._cluster.masses()

    def prioritize(self, wanted: Ids, priorities: Array) -> None:
        """Send priorities of rows on their way; those of shards that do not answer are passed over.

        If one of them is the highest so far, it waits until all shards know it: what is added from then on gets it.
        """
        self.updates += 1
        shards = shards_of(wanted)
        for shard in (set(self._cluster.numbers) - set(self._cluster.lost)).intersection(shards.tolist()):
            rows = np.flatnonzero(shards == shard)
            with self._sending:
                call = self._cluster.call(shard, "update_priorities", rows_of(wanted[rows]), priorities[rows])
                self._sent.append((shard, call))
        if self._by is not None and priorities.size:
            known = max((counters.highest for counters in self._cluster.known.values()), default=0.0)
            self.hear(all_of_them=bool(self._by.scale(priorities).max() > known))
            self.level()

    def level(self) -> None:
        """Have every shard know the highest priority that any of them knows."""
        known = self._cluster.known
        top = max((counters.highest for counters in known.values()), default=0.0)
        behind = [shard for shard, counters in known.items() if counters.highest < top]
        if not behind:
            return
        with suppress(ShardError):  # a roster that is away for long knows what it did
            self._cluster.ask_roster("raise_highest", top)  # first, for shards that are being started
        for shard, counters in self._cluster.ask_all(behind, "raise_highest", top).items():
            self._cluster.note(shard, counters)

    def hear(self, *, all_of_them: bool = False) -> None:
        """Read the answers to priorities that were sent; wait for them if too many are missing, or if all must come."""
        with self._sending:
            waits_s = self._patience_s if all_of_them or len(self._sent) > _MOST_UNDER_WAY else 0.0
            calls = [call for _, call in self._sent]
            ready = ray.wait(calls, num_returns=len(calls), timeout=waits_s)[0] if calls else []
            heard = [(shard, call) for shard, call in self._sent if waits_s or call in ready]
            self._sent = [sent for sent in self._sent if sent not in heard]
        for shard, call in heard:
            try:
                self._cluster.note(shard, received(call, 0.0))
            except LOSSES:
                self._cluster.lose(shard)


def _away(shards: list[int], why: str) -> ShardError:
    return ShardError(
        f"shards {shards} do not answer ({why}); wait, or use on_shard_loss='degrade' to draw from the others meanwhile"
    )


def saved_by(cluster: Cluster, url: str, calls: Mapping[int, Any]) -> dict[int, Checkpoint]:
    """Wait for the checkpoints of all shards, each for as long as it answers."""
    found: dict[int, Checkpoint] = {}
    patience_s = cluster.patience_s
    for shard, call in calls.items():
        handle = cluster.handle(shard)
        try:
            saving = handle.end_save.remote(received(call, patience_s))
            while not ray.wait([saving], timeout=patience_s)[0]:
                received(handle.counters.remote(), patience_s)
            found[shard] = received(saving, patience_s)
        except LOSSES as error:
            cluster.lose(shard)
            raise CheckpointError(
                f"the checkpoint at {url} is not complete (shard {shard}: {type(error).__name__}); the one before is; "
                "save again"
            ) from error
    return found


_FROM_SHARDS = 4


def together(batches: int, shards: int) -> int:
    """Return how many batches are drawn at once, of so many that may be.

    With as many as there are shards, an answer holds about as much as that of a single shard would. From few shards
    each batch is drawn alone, exactly when a local memory draws it.
    """
    return max(1, min(batches, shards)) if shards >= _FROM_SHARDS else 1


class BatchesAhead:
    """Draws several batches at once, and hands them out one after another.

    Args:
        draw: Draws so many.
        settle: Has what was added and updated here reach the shards; called before a draw, and before it is looked
            whether they have changed.
        batches: How many may be handed out of one draw, whatever happens meanwhile. Those behind them are handed out
            only while nothing has changed since, and are as good as new.
        most: Drawn at once at most: twice as many after every draw of which all were handed out.
    """

    def __init__(
        self, drawing: Drawing, draw: Callable[[int], list[Request]], batches: int, most: int = 1,
        settle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._drawing, self._draw, self._settle = drawing, draw, settle
        self.batches, self._most = batches, max(batches, most)
        self._at_once = batches
        self.drawn: deque[Request] = deque()  # and not handed out yet
        self._state: tuple[Any, ...] | None = None  # when they were drawn
        self._handed_out = 0  # of this draw
        self._lock = threading.Lock()

    def __call__(self) -> BatchJob:
        """Start the next batch."""
        return BatchJob(partial(self._drawing.finish, self.next()))

    def next(self) -> Request:
        """Return the next batch."""
        with self._lock:
            if not self.drawn or self._handed_out >= self.batches:
                self._settle()
                self._draw_anew(self._drawing.state() if self._most > self.batches else None)
            self._handed_out += 1
            return self.drawn.popleft()

    def _draw_anew(self, state: tuple[Any, ...] | None) -> None:
        """Draw, unless batches wait that are as good as new."""
        is_same = state is not None and state == self._state
        if self.drawn and is_same:
            return
        self._drawing.give_up(self.drawn)
        self.drawn.clear()
        self._at_once = min(2 * self._at_once, self._most) if is_same else self.batches
        self._state, self._handed_out = state, 0
        self.drawn.extend(self._draw(self._at_once))
