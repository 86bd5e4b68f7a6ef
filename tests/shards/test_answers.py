"""Answers: shards send rows to learners on their machine and on others, and damaged answers are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall import NStep, Sequence, Uniform
from holdall.cluster.answer import Answer, BatchMaker, read_answer
from holdall.cluster.ids import make_ids
from holdall.cluster.tuning import ClusterTuning
from holdall.delivery import Delivery, new_delivery
from holdall.delivery.device import DeviceDelivery
from holdall.errors import DamageError
from holdall.sampling import Sampler
from holdall.schema import Schema
from holdall.testing import LeafPlan, OracleMemory, Stream, assert_same_bits

from .desk import Desk

SPACE = spaces.Dict(image=spaces.Box(0, 255, (4, 24, 24), np.uint8), state=spaces.Box(-1, 1, (3,), np.float32))
ACTION = spaces.Box(0, 2, (), np.int32)  # JAX has no int64 by default.
SCHEMA = Schema.of(SPACE, ACTION, {}, 1)


def fill_desk(seed: int, sampler: Sampler | None = None, **settings: Any) -> tuple[Desk, OracleMemory]:
    stream = Stream(SPACE, ACTION, 1, plans=[LeafPlan(axis=0, content="table"), LeafPlan()], seed=seed)
    desk = Desk(SCHEMA, sampler or Uniform(), 1_000, seed, **settings)
    oracle = OracleMemory(1_000)
    for _ in range(200):
        step = stream.tick()
        arguments = step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated
        oracle.add(*arguments)
        desk.add(*arguments)
    desk.send()
    return desk, oracle


def test_an_answer_to_another_machine_has_the_transitions_that_were_added() -> None:
    desk, oracle = fill_desk(0)
    for _ in range(5):
        batch = desk.sample(64)
        assert_same_bits(batch, oracle.gather(batch.ids))


def test_an_answer_to_another_machine_is_compressed() -> None:
    desk, _ = fill_desk(0)
    drawn = desk.shard.draw(256, 0, None, is_near=False)
    payload = desk.shard.read(drawn, desk.counters(), is_near=False)
    assert isinstance(payload, bytes)
    assert len(payload) < 2 * 256 * 4 * 24 * 24 / 10


def test_a_damaged_answer_is_refused() -> None:
    desk, _ = fill_desk(0)
    payload: Any = desk.shard.read(desk.shard.draw(8, 0, None, is_near=False), desk.counters(), is_near=False)
    for position in np.random.default_rng(0).integers(0, len(payload), 100).tolist():
        damaged = bytearray(payload)
        damaged[position] ^= 1
        with pytest.raises(DamageError, match="damaged on its way"):
            read_answer(bytes(damaged))


@pytest.mark.parametrize("is_near", [False, True])
def test_rows_of_several_shards_get_their_positions_in_the_batch(is_near: bool) -> None:
    desks = [fill_desk(seed) for seed in (0, 1)]
    maker = BatchMaker(SCHEMA, new_delivery(SCHEMA, None), ClusterTuning())
    generator = np.random.default_rng(0)
    answers: list[Answer] = []
    for desk, _ in desks:
        drawn = desk.shard.draw(20, 0, generator, is_near=is_near)
        answers.append(read_answer(desk.shard.read(drawn, desk.counters(), is_near=is_near)))
    positions = [
        where if answer.order is None else where[answer.order]
        for answer, where in zip(answers, np.split(generator.permutation(40), 2), strict=True)
    ]
    batch = maker.prepare(answers, positions, [0, 3], np.ones(40, np.float32))
    for (_, oracle), answer, where, shard in zip(desks, answers, positions, (0, 3), strict=True):
        assert np.array_equal(batch.ids[where], make_ids(shard, answer.ids))
        expected = oracle.gather(answer.ids)
        assert_same_bits({key: rows[where] for key, rows in batch.obs.items()}, expected.obs)
        assert_same_bits({key: rows[where] for key, rows in batch.next_obs.items()}, expected.next_obs)
        assert_same_bits(batch.reward[where], expected.reward)


DELIVERIES: dict[str, Callable[[Schema], Delivery]] = {
    "tensors": lambda schema: new_delivery(schema, "cpu"),
    "tensors of a device": lambda schema: DeviceDelivery(schema, "cpu"),
}
"""Arrays of JAX are tested in jax_answers.py."""


def require_exact(delivery: Delivery) -> None:
    """Compare batches of a delivery with the transitions that were added."""
    desk, oracle = fill_desk(0, delivery=delivery)
    for count in (1, 64):
        batch = desk.sample(count)
        assert isinstance(batch.ids, np.ndarray)
        assert not isinstance(batch.obs["image"], np.ndarray)
        assert_same_bits(batch, oracle.gather(batch.ids))


@pytest.mark.parametrize("name", DELIVERIES)
def test_every_delivery_returns_the_transitions_that_were_added(name: str) -> None:
    require_exact(DELIVERIES[name](SCHEMA))


@pytest.mark.parametrize("sampler", [Sequence(4), NStep(3, 0.9)], ids=["sequences", "n-step"])
def test_a_device_gets_the_draws_of_samplers_that_follow_episodes(sampler: Sampler) -> None:
    desks = [fill_desk(0, sampler=sampler, delivery=delivery)[0] for delivery in (None, DeviceDelivery(SCHEMA, "cpu"))]
    expected, batch = (desk.sample(16) for desk in desks)
    assert_same_bits(batch, expected)


def test_an_answer_without_observations_is_refused() -> None:
    desk, _ = fill_desk(0, is_near=True)
    answer: Any = desk.shard.read(desk.shard.draw(8, 0, None, is_near=True), desk.counters(), is_near=True)
    incomplete = answer._replace(rows=answer.rows._replace(obs=[]))
    with pytest.raises(DamageError, match="lacks observations"):
        desk.maker.prepare([incomplete], [np.arange(8)], [0], np.ones(8, np.float32))
