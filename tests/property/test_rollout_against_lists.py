"""Random rollouts, one after another in one memory: minibatches have the added rows, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdall import RolloutMemory
from holdall.store.tuning import Tuning
from holdall.testing import Stream, assert_same_bits
from holdall.testing.oracle import map_leaves
from holdall.testing.strategies import streams
from holdall.testing.streams import StreamStep, stack_steps


def collect(
    memory: RolloutMemory, stream: Stream, steps: int, generator: np.random.Generator
) -> tuple[StreamStep, Any]:
    """Add a rollout. Return its steps along a time axis, and the estimates that were added with them."""
    ticks = []
    estimates = []
    for _ in range(steps):
        tick = stream.tick()
        value, log_prob = generator.standard_normal((2, stream.num_envs), np.float32)
        others = {"extras": tick.extras} if tick.extras else {}
        obs = tick.obs
        if generator.random() < 0.5:
            memory.observe(obs)
            obs = None
        flags = (tick.terminated, tick.truncated)
        memory.add(obs, tick.action, tick.reward, *flags, value, log_prob, final_obs=tick.next_obs, **others)
        ticks.append(tick)
        estimates.append((value, log_prob))
    return stack_steps(ticks), np.array(estimates)


def take_rows(value: Any, ids: Any) -> Any:
    """Take the rows of `ids` out of arrays of (steps, lanes, ...)."""
    return map_leaves(lambda rows: rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])[ids], value)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    stream=streams(),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    compress=st.sampled_from([None, None, "speed", "memory"]),
    block_bytes=st.sampled_from([1, 20_000]),
    sliced_from_bytes=st.sampled_from([1, 64, 4096]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rollout_comes_back_bit_for_bit(
    stream: Stream,
    lengths: list[int],
    compress: str | None,
    block_bytes: int,
    sliced_from_bytes: int,
    seed: int,
) -> None:
    """Minibatches and sequences have every step once. The steps of a sequence are consecutive steps of one episode."""
    tuning = Tuning(
        block_bytes=block_bytes, small_field_bytes=sliced_from_bytes, tiny_field_bytes=sliced_from_bytes // 16
    )
    generator = np.random.default_rng(seed)
    lanes = stream.num_envs
    with RolloutMemory(
        stream.observation_space,
        stream.action_space,
        max(lengths),
        lanes,
        extras=stream.extras,
        compress=compress,
        seed=seed,
        _tuning=tuning,
    ) as memory:
        for steps in lengths:
            memory.reset()
            added, estimates = collect(memory, stream, steps, generator)
            cut = np.flatnonzero(added.truncated.reshape(-1))
            assert_same_bits(memory.final_obs(), take_rows(added.next_obs, cut))
            memory.finish(np.zeros(lanes, np.float32), final_values=np.zeros(len(cut), np.float32))
            expected = {"obs": added.obs, "action": added.action, "reward": added.reward, "extras": added.extras}
            expected |= {"value": estimates[:, 0], "log_prob": estimates[:, 1]}
            seen = []
            for batch in memory.minibatches(17):
                seen.extend(batch.ids.tolist())
                for name, rows in expected.items():
                    assert_same_bits(getattr(batch, name), take_rows(rows, batch.ids))
            assert sorted(seen) == list(range(steps * lanes))
            ended = (added.terminated | added.truncated).reshape(-1)
            seen = []
            for batch in memory.sequences(40, length=13):
                assert np.array_equal(batch.mask, batch.ids >= 0)
                for row, mask in zip(batch.ids, batch.mask, strict=True):
                    ids = row[mask]
                    seen.extend(ids.tolist())
                    assert mask[: len(ids)].all()
                    assert (np.diff(ids) == lanes).all()
                    assert not ended[ids[:-1]].any()
                for name, rows in expected.items():
                    got = getattr(batch, name)
                    assert_same_bits(take_steps(got, batch.mask), take_rows(rows, batch.ids[batch.mask]))
                    map_leaves(_assert_zero, take_steps(got, ~batch.mask))
            assert sorted(seen) == list(range(steps * lanes))


def take_steps(value: Any, mask: Any) -> Any:
    """Take the steps where `mask` is set out of arrays of (sequences, time, ...)."""
    return map_leaves(lambda rows: rows[mask], value)


def _assert_zero(rows: Any) -> None:
    assert not rows.view(np.uint8).any()
