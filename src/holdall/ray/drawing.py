"""Drawing: a batch from the first question to the last answer.

In:  a batch size.  Out: the batch, drawn over all shards that answer.
Invariant: rows whose shard is lost on the way are drawn anew from the others, in proportion to their masses, so that a
batch is always whole and never biased by the loss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.errors import ArgumentError, HoldallError, ShardError
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.answer import Answer, AnswerReader
from holdall.ray.cluster import LOSSES, Cluster
from holdall.ray.deliver import Deliverer
from holdall.ray.dictionaries import unpack_dictionary
from holdall.ray.ids import ids_of
from holdall.ray.layout import Layout
from holdall.ray.router import assigned, weights_of
from holdall.ray.standing import Standing
from holdall.sampling.draw import Sampler
from holdall.sampling.prioritized import Prioritized

_LOOK_S = 0.05
"""How long an answer is waited for before it is asked whether the shard is there at all."""

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Call:
    """A question to one shard; its answer may hold rows of several batches."""

    reference: Any
    is_heard: bool = False
    answer: Answer | None = None  # None also where the shard was lost, or holds nothing any more


@dataclass(slots=True)
class Asked:
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


class Drawing:
    """Draws batches.

    Args:
        policy: What is done while a shard does not answer, see `ReplayMemory`.
        patience_s: Seconds after which a shard that says nothing counts as lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        layout: Layout,
        deliverer: Deliverer,
        sampler: Sampler,
        generator: np.random.Generator,
        policy: str,
        patience_s: float,
    ) -> None:
        self._cluster = cluster
        self._reader = AnswerReader(layout)
        self._deliverer = deliverer
        self._sampler = sampler
        self.generator = generator
        self._policy = policy
        self._patience_s = patience_s
        self._dictionaries: dict[str, Dictionary] = {}
        self._lock = threading.Lock()

    def start(self, count: int, batches: int = 1) -> list[Request]:
        """Draw a shard for every row of some batches, and ask every shard once for all of them."""
        requests = [Request(count) for _ in range(batches)]
        with self._lock:
            self._ask([(request, np.arange(count)) for request in requests], self._reachable(count))
        return requests

    def finish(self, request: Request) -> Batch:
        """Wait for the rows, draw those anew whose shard was lost, and make the batch."""
        answers: list[Answer] = []
        asked: list[Asked] = []
        ids = np.empty(request.count, np.int64)
        while request.asked:
            oldest = request.asked.pop(0)
            answer = self._heard(oldest)
            if answer is None:
                with self._lock:
                    self._ask([(request, oldest.rows)], self._reachable(1))
                continue
            ids[oldest.rows] = ids_of(oldest.shard, answer.rows)
            answers.append(answer)
            asked.append(oldest)
        beta = self._sampler.beta if isinstance(self._sampler, Prioritized) else 1.0
        where = [each.rows for each in asked]
        weights = weights_of(answers, where, [each.mass for each in asked], beta)
        return self._deliverer.batch(answers, where, ids, weights)

    def answer(self, shard: int, payload: bytes) -> Answer:
        """Read a shard's answer, and fetch the dictionaries that it names."""
        answer = self._reader.read(payload, lambda name: self.learn(shard, name))
        self._cluster.note(shard, answer.standing)
        return answer

    def learn(self, shard: int, name: str) -> Dictionary:
        """Return a dictionary that a shard's blocks name."""
        if name not in self._dictionaries:
            record = received(self._cluster.handle(shard).dictionary.remote(name), self._patience_s)
            self._dictionaries[name] = unpack_dictionary(record)
        return self._dictionaries[name]

    def _heard(self, asked: Asked) -> Answer | None:
        """Wait for a shard's answer, and cut out the rows; None if it is lost, or holds nothing any more."""
        call = asked.call
        if not call.is_heard:
            call.answer = self._answered(asked.shard, call)
        return None if call.answer is None else call.answer.part(asked.first, asked.first + len(asked.rows))

    def _answered(self, shard: int, call: Call) -> Answer | None:
        try:
            payload = self._payload(shard, call)
            call.is_heard = True
            if len(payload) == Standing.NBYTES:
                self._cluster.note(shard, Standing.of(payload))
                return None
            return self.answer(shard, payload)
        except LOSSES as error:
            call.is_heard = True  # so that it is lost once
            self._cluster.lose(shard)
            if self._policy == "raise":
                raise ShardError(
                    f"shard {shard} does not answer ({type(error).__name__}); wait, or use "
                    "on_shard_loss='degrade' to draw from the others meanwhile"
                ) from error
            return None

    def _payload(self, shard: int, call: Call) -> bytes:
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
            counts = [len(rows) for _, rows in parts]
            call, first = Call(self._cluster.call(shard, "sample", counts)), 0
            for (request, rows), count in zip(parts, counts, strict=True):
                request.asked.append(Asked(shard, rows, masses[shard], call, first))
                first += count
        self._cluster.ask_again([shard for shard in masses if shard not in by_shard])

    def _reachable(self, count: int) -> dict[int, float]:
        """Return the masses of the shards that answer; refuse a batch of more than they hold."""
        masses = self._cluster.masses()
        lost = self._cluster.lost
        if lost and self._policy == "raise":
            raise ShardError(
                f"shards {lost} do not answer; wait, or use on_shard_loss='degrade' to draw from the others meanwhile"
            )
        if lost and self._policy == "block":
            for shard in lost:
                self._cluster.wait_for(shard)
            masses = self._cluster.masses()
        if not masses:
            self._cluster.wait_for_any()
        if self._cluster.transitions < count:
            self._cluster.refresh()
            held = self._cluster.transitions
            if held < count:
                raise ArgumentError(
                    f"batch_size ({count}) is more than the {held} transitions held; add more first, or draw a smaller "
                    "batch"
                )
        return self._cluster.masses()


def received(call: Any, patience_s: float) -> bytes:
    """Wait for a call's result; an error of holdall's own is raised as it was there."""
    try:
        result: bytes = ray.get(call, timeout=patience_s)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldallError):
            raise cause from None
        raise
    return result
