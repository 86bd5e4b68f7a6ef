"""A shard, its only writer and its only learner, in one process and without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall.batch import Batch
from holdall.cluster.answer import BatchMaker, read_answer
from holdall.cluster.config import strip_sampler
from holdall.cluster.journal import Entry
from holdall.cluster.learner import compute_weights
from holdall.cluster.messages import ShardCounters
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.shard_data import ShardData
from holdall.cluster.tuning import ClusterTuning
from holdall.delivery import Delivery, new_delivery
from holdall.sampling import Hindsight, Likelihood, Sampler, check_priorities
from holdall.schema import Schema
from holdall.schema_json import schema_to_json
from holdall.store.tuning import Tuning

WRITER = b"w" * 16


class Desk:
    """A memory of one shard. Transitions are sent as segments, and batches as packed answers, as between processes."""

    def __init__(
        self,
        schema: Schema,
        sampler: Sampler,
        capacity: int,
        seed: int,
        *,
        segment_rows: int = 32,
        is_near: bool = False,
        tuning: ClusterTuning | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        tuning = tuning or ClusterTuning(store=Tuning(small_field_bytes=256, tiny_field_bytes=16))
        generator = np.random.default_rng(seed)
        self.sampler = sampler
        self.is_near = is_near
        self.shard = ShardData(schema_to_json(schema), capacity, strip_sampler(sampler), generator, tuning)
        self.builder = SegmentBuilder(schema, segment_rows, "balanced", tuning.store)
        self.delivery = delivery or new_delivery(schema, None)
        self.maker = BatchMaker(schema, self.delivery, tuning)

    def add(self, *step: Any) -> None:
        if not self.builder.append((*step, *[None] * (8 - len(step)))):
            self.send()
            assert self.builder.append((*step, *[None] * (8 - len(step))))

    def send(self) -> None:
        if self.builder.rows:
            self.shard.accept([Entry(WRITER, 0, self.builder.close())])

    def counters(self) -> ShardCounters:
        return ShardCounters(0, 0, 0, 0, 0, 0, 0, self.shard.mass)

    def sample(self, count: int) -> Batch:
        self.send()
        goals = self.sampler.count_relabelled(count) if isinstance(self.sampler, Hindsight) else 0
        counters = self.counters()
        drawn = self.shard.draw(count, goals, None, is_near=self.is_near)
        answer = read_answer(self.shard.read(drawn, counters, is_near=self.is_near))
        positions = [np.arange(count) if answer.order is None else answer.order]
        by = Likelihood(self.sampler).prioritized
        weights = compute_weights([answer], positions, [1.0], 1.0 if by is None else by.beta)
        return self.delivery.receive(self.maker.prepare([answer], positions, [0], weights, self.sampler))

    def gather(self, ids: Any) -> Batch:
        self.send()
        drawn = self.shard.find(np.asarray(ids, np.int64))
        answer = read_answer(self.shard.read(drawn, self.counters(), is_near=self.is_near))
        return self.delivery.receive(
            self.maker.prepare([answer], [np.arange(len(ids))], [0], np.ones(len(ids), np.float32))
        )

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        self.send()
        sampler: Any = self.shard.sampler
        drawn, numbers = check_priorities(sampler, ids, priorities)
        self.shard.update_priorities(sampler.check_update(drawn, numbers), numbers)
