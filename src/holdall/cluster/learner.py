"""Learners: the shard of each row of a batch, and the weights of the rows.

A shard is drawn in proportion to its mass, as this process knows it. Weights are computed from the probability that was
used, so a mass that is out of date adds variance but no bias.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.cluster.answer import Answer, BatchMaker, merge_rows, read_answer
from holdall.cluster.calls import get_machine_id, get_result
from holdall.cluster.ids import Ids, rows_of_ids, shards_of_ids
from holdall.cluster.members import Members
from holdall.cluster.messages import LOSSES, GatherRequest, SampleRequest, ShardCounters
from holdall.cluster.shared_block import BatchBlock
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import ArgumentError, ShardError, TransitionIdError
from holdall.sampling import ComposedSampler, Hindsight, Likelihood, Sampler, require_enough
from holdall.schema import Array

_MAX_PENDING_UPDATES = 16
"""Unconfirmed updates of priorities above which `update_priorities` waits for the shards."""


def assign_rows(masses: Mapping[int, float], count: int, generator: np.random.Generator) -> dict[int, Ids]:
    """Draw a shard for each of `count` rows. Return the positions of each shard's rows. One mass must be positive.

    With one shard nothing is drawn, so that a memory of one shard draws exactly as a local one.
    """
    shards = sorted(shard for shard, mass in masses.items() if mass > 0)
    if len(shards) == 1:
        return {shards[0]: np.arange(count)}
    cumulative = np.cumsum([masses[shard] for shard in shards])
    drawn = (cumulative / cumulative[-1]).searchsorted(generator.random(count), side="right")
    positions = {shard: np.flatnonzero(drawn == i) for i, shard in enumerate(shards)}
    return {shard: rows for shard, rows in positions.items() if rows.size}


def compute_weights(
    answers: Sequence[Answer], positions: Sequence[Ids], masses: Sequence[float], beta: float
) -> NDArray[np.float32]:
    """Return the weights of a batch: the lowest probability in the batch over each row's own, to the power of beta.

    Args:
        masses: For every answer, the mass of its shard when rows were assigned.
    """
    scaled = [answer.scaled for answer in answers]
    if len(scaled) > 1:
        # The shard was drawn by the mass that this process believed, and the row within the shard by the true mass.
        beliefs = [mass / answer.counters.mass for answer, mass in zip(answers, masses, strict=True)]
        scaled = [each * belief for each, belief in zip(scaled, beliefs, strict=True)]
    chance = merge_rows(scaled, positions)
    shares: NDArray[np.float32] = (chance.min(initial=np.inf) / chance).astype(np.float32)
    return shares ** np.float32(beta)


class RequestedRows(NamedTuple):
    """Rows of a batch that one shard was asked for."""

    shard: int
    positions: Ids  # In the batch.
    mass: float  # Mass of the shard when the rows were assigned.
    call: Any  # Ray's reference to the answer.


@dataclass(slots=True)
class BatchRequest:
    """A batch that was requested from the shards."""

    count: int
    parts: list[RequestedRows] = field(default_factory=list)
    block: BatchBlock | None = None  # Where shards on this machine write observations.


class Learner:
    """Draws batches, and sends priorities to the shards. Thread-safe. Batches are prepared for `Delivery.receive`.

    Args:
        policy: What to do while a shard does not answer, see `on_shard_loss` of `ReplayMemory`.
        seeds: Whether the generator also seeds the draws of shards. Otherwise each shard has its own generator.

    Attributes:
        generator: Draws the shard of every row.
    """

    def __init__(
        self,
        members: Members,
        maker: BatchMaker,
        sampler: Sampler,
        generator: np.random.Generator,
        policy: str,
        tuning: ClusterTuning,
        *,
        seeds: bool,
    ) -> None:
        self.generator = generator
        self._members = members
        self._maker = maker
        self._sampler = sampler
        self._policy = policy
        self._tuning = tuning
        self._seeds = seeds
        self._machine = get_machine_id()
        self._prioritized = Likelihood(sampler).prioritized
        self._lock = threading.Lock()
        self._updates: list[tuple[int, Any]] = []  # Priorities that shards have not confirmed yet.
        self._updates_lock = threading.Lock()

    # ---------------------------------------------------------------- batches

    def start(self, count: int) -> BatchRequest:
        """Draw a shard for every row of a batch, and ask the shards for their rows."""
        request = BatchRequest(count)
        if not isinstance(self._sampler, ComposedSampler):
            request.block = self._maker.blocks.take(count)
        with self._lock:
            self._request_rows(request, self._find_masses(count))
        return request

    def finish(self, request: BatchRequest) -> Any:
        """Wait for the rows, and return the prepared batch. Draw again if a shard was lost or is empty meanwhile."""
        while True:
            collected = self._collect_answers(request)
            if collected is not None:
                break
            # Without a block, because a shard may still write to the old one.
            request = BatchRequest(request.count)
            with self._lock:
                self._request_rows(request, self._find_masses(1))
        answers, positions = collected
        beta = 1.0 if self._prioritized is None else self._prioritized.beta
        weights = compute_weights(answers, positions, [part.mass for part in request.parts], beta)
        shards = [part.shard for part in request.parts]
        return self._maker.prepare(answers, positions, shards, weights, self._sampler, request.block)

    def gather(self, ids: Ids) -> Any:
        """Return a prepared batch of the transitions `ids`, in that order."""
        shards = self._find_shards(ids)
        request = BatchRequest(len(ids))
        # Without ids, the first shard returns arrays of no rows.
        for shard in np.unique(shards).tolist() or [self._members.numbers[0]]:
            positions = np.flatnonzero(shards == shard)
            wanted = GatherRequest(self._machine, rows_of_ids(ids[positions]))
            call = self._call_gather(shard, wanted)
            request.parts.append(RequestedRows(shard, positions, 1.0, call))
        collected = self._collect_answers(request)
        if collected is None:
            raise ShardError(f"Shards {self._members.lost} do not answer, and some of the ids are stored there.")
        answers, all_positions = collected
        shards_asked = [part.shard for part in request.parts]
        return self._maker.prepare(answers, all_positions, shards_asked, np.ones(len(ids), np.float32))

    def _request_rows(self, request: BatchRequest, masses: Mapping[int, float]) -> None:
        """Ask shards for the rows of a batch, in proportion to their masses."""
        assigned = assign_rows(masses, request.count, self.generator)
        for shard, positions in assigned.items():
            wanted = SampleRequest(
                machine=self._machine,
                seed=int(self.generator.integers(1, 2**63)) if self._seeds else 0,
                rows=len(positions),
                goals=self._count_goals(request.count, positions),
                block=None if request.block is None else request.block.describe_rows(positions),
            )
            call = self._call_sample(shard, wanted)
            request.parts.append(RequestedRows(shard, positions, masses[shard], call))
        self._members.probe([shard for shard in masses if shard not in assigned])

    def _find_shards(self, ids: Ids) -> Ids:
        """Return the shard of every id. Raise TransitionIdError if the memory has no such shard."""
        shards = shards_of_ids(ids)
        if not np.isin(shards, self._members.numbers).all():
            self._members.refresh_list(now=True)
        unknown = np.flatnonzero(~np.isin(shards, self._members.numbers))
        if unknown.size:
            raise TransitionIdError(
                f"Transition {int(ids[unknown[0]])} belongs to no shard of this memory. Pass ids of its batches."
            )
        return shards

    def _call_sample(self, shard: int, wanted: SampleRequest) -> Any:
        return self._members.submit(shard, lambda handle: handle.sample.remote(wanted))

    def _call_gather(self, shard: int, wanted: GatherRequest) -> Any:
        return self._members.submit(shard, lambda handle: handle.gather.remote(wanted))

    def _call_update(self, shard: int, rows: Ids, priorities: Array) -> Any:
        return self._members.submit(shard, lambda handle: handle.update_priorities.remote(rows, priorities))

    def _count_goals(self, count: int, positions: Ids) -> int:
        """Return how many of the rows at `positions` get another goal. The first rows of the whole batch get one."""
        if not isinstance(self._sampler, Hindsight):
            return 0
        return int(np.searchsorted(positions, self._sampler.count_relabelled(count)))

    def _find_masses(self, count: int) -> dict[int, float]:
        """Return the masses of the shards that answer. At least one mass is positive.

        Raise ArgumentError if the shards hold less than `count` transitions, or none that may be drawn.
        """
        end_s = time.monotonic() + self._members.patience_s
        while True:
            masses = self._members.masses()
            lost = self._members.lost
            if lost and self._policy == "raise":
                raise _lost_error(lost, "they were lost before")
            is_blocked = bool(lost) and self._policy == "block"
            if masses and not is_blocked:
                if self._members.transitions < count or not any(masses.values()):
                    self._members.refresh()
                    masses = self._members.masses()
                    if masses:
                        require_enough(count, self._members.transitions, count)
                if any(masses.values()):
                    return masses
                if masses:
                    raise ArgumentError(
                        "sampler: none of the transitions held may be drawn. Add more transitions first."
                    )
            if time.monotonic() > end_s and not is_blocked:
                silence = f"none has answered for {self._members.patience_s:g} s. See `ray list actors`"
                raise _lost_error(self._members.lost, silence)
            time.sleep(self._tuning.pause_s)

    def _collect_answers(self, request: BatchRequest) -> tuple[list[Answer], list[Ids]] | None:
        """Wait for all answers. Return them and the positions of their rows, or None if one is missing."""
        answers = []
        positions = []
        for part in request.parts:
            answer = self._wait_for_answer(part)
            if answer is None:
                return None
            answers.append(answer)
            positions.append(part.positions if answer.order is None else part.positions[answer.order])
        return answers, positions

    def _wait_for_answer(self, part: RequestedRows) -> Answer | None:
        """Return the rows of one part, or None if the shard was lost or is empty."""
        try:
            payload = self._wait_for_payload(part)
        except LOSSES as error:
            self._members.mark_lost(part.shard)
            if self._policy == "raise":
                raise _lost_error([part.shard], type(error).__name__) from error
            return None
        if isinstance(payload, ShardCounters):
            self._members.record(part.shard, payload)
            return None
        answer = read_answer(payload)
        self._members.record(part.shard, answer.counters)
        return answer

    def _wait_for_payload(self, part: RequestedRows) -> Any:
        """Wait for a shard, unless Ray is restarting it: Ray would fail the call seconds later."""
        end_s = time.monotonic() + self._members.patience_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                return get_result(part.call, min(self._tuning.pause_s, max(0.0, left_s)))
            except ray.exceptions.GetTimeoutError:
                if left_s <= 0 or self._members.is_away(part.shard):
                    raise

    # ---------------------------------------------------------------- priorities

    def update_priorities(self, ids: Ids, priorities: Array) -> None:
        """Send priorities to the shards. Priorities of rows on shards that do not answer are dropped.

        New rows get the highest priority so far. If these priorities have a new highest one, wait until all shards have
        it.
        """
        shards = self._find_shards(ids)
        available = set(self._members.numbers) - set(self._members.lost)
        for shard in available.intersection(shards.tolist()):
            is_on_shard = shards == shard
            rows = rows_of_ids(ids[is_on_shard])
            values = priorities[is_on_shard]
            with self._updates_lock:
                self._updates.append((shard, self._call_update(shard, rows, values)))
        if self._prioritized is not None and priorities.size:
            known = max((counters.highest for counters in self._members.known.values()), default=0.0)
            self.read_confirmations(wait=bool(self._prioritized.scale(priorities).max() > known))
            self.spread_highest()

    def spread_highest(self) -> None:
        """Send the highest priority of all shards to the shards that do not have it."""
        known = self._members.known
        highest = max((counters.highest for counters in known.values()), default=0.0)
        behind = [shard for shard, counters in known.items() if counters.highest < highest]
        if not behind:
            return
        # The roster gets the priority first, for shards that are being started. If the roster does not answer, only
        # these shards lack it.
        with suppress(ShardError):
            self._members.ask_roster(lambda roster: roster.raise_highest.remote(highest))
        answers = self._members.ask_all(behind, lambda shard: shard.raise_highest.remote(highest))
        for shard, counters in answers.items():
            self._members.record(shard, counters)

    def read_confirmations(self, *, wait: bool = False) -> None:
        """Read the shards' confirmations of priorities. Wait for all if `wait`, or if too many are missing."""
        with self._updates_lock:
            must_wait = wait or len(self._updates) > _MAX_PENDING_UPDATES
            calls = [call for _, call in self._updates]
            timeout_s = self._members.patience_s if must_wait else 0.0
            ready = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0] if calls else []
            confirmed = [update for update in self._updates if must_wait or update[1] in ready]
            self._updates = [update for update in self._updates if update not in confirmed]
        for shard, call in confirmed:
            try:
                self._members.record(shard, get_result(call, 0.0))
            except LOSSES:
                self._members.mark_lost(shard)


def _lost_error(shards: list[int], reason: str) -> ShardError:
    return ShardError(
        f"Shards {shards} do not answer ({reason}). Wait, or use on_shard_loss='degrade' to draw from the others."
    )
