"""What an update holds beside what stays, worked out from what real updates took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from holdall.tools.plan.phases import MIB, HeapGrowth, MeasuredCosts, PhasePart, UpdateBytes, host_phases
from holdall.tools.plan.spec import Spec

SPEC = Spec("dqn", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4), batch_size=64)
# 40 MiB stay; at batches of 64 there are 20 MiB of activations, in small blocks, and twice that at 128.
ONCE = UpdateBytes(weights=10 * MIB, settled=40 * MIB, settled_heap=40 * MIB, mapped=0, heap=60 * MIB, live=60 * MIB)
TWICE = ONCE._replace(heap=80 * MIB, live=80 * MIB)
MAPPED = ONCE._replace(mapped=100 * MIB, live=160 * MIB)


def grown(batch: int, nbytes: int) -> HeapGrowth:
    """Real updates, whose activations are as much smaller as the batch."""
    return HeapGrowth(batch, nbytes, ONCE._replace(heap=40 * MIB + 20 * MIB * batch // 64))


def activations(spec: Spec, growth: HeapGrowth | None, once: UpdateBytes = ONCE) -> PhasePart:
    measured = MeasuredCosts(traced_batch=64, traced=once, traced_twice=TWICE, growth=growth)
    (train,) = (phase for phase in host_phases(spec, measured) if phase.name == "train")
    return train.parts[-1]


def test_what_real_updates_of_the_same_batch_took_is_the_answer() -> None:
    part = activations(SPEC, grown(64, 100 * MIB))
    assert (part.nbytes, part.how) == (60 * MIB, "measured")
    assert part.most_bytes > part.nbytes


@pytest.mark.parametrize(("batch", "took", "expected"), [(32, 70, 60), (16, 55, 60), (64, 100, 60)])
def test_the_share_of_the_heap_that_is_lost_is_that_of_smaller_batches(batch: int, took: int, expected: int) -> None:
    assert activations(SPEC, grown(batch, took * MIB)).nbytes == expected * MIB


def test_blocks_that_are_mapped_on_their_own_leave_no_holes() -> None:
    measured = MeasuredCosts(traced_batch=64, traced=ONCE, traced_twice=TWICE, growth=grown(32, 70 * MIB))
    large = SPEC.but(batch_size=128)
    (train,) = (phase for phase in host_phases(large, measured) if phase.name == "train")
    assert train.parts[-1].nbytes == 120 * MIB
    assert activations(SPEC, grown(64, 240 * MIB), MAPPED).nbytes == 200 * MIB


def test_an_update_never_takes_less_than_lives_in_it() -> None:
    assert activations(SPEC, grown(32, 41 * MIB)).nbytes >= 20 * MIB


def test_without_real_updates_the_bound_is_wide() -> None:
    part = activations(SPEC, None)
    assert part.how == "traced"
    assert part.most_bytes > 1.5 * part.nbytes


def test_a_rollout_is_flattened_beside_the_heap_that_the_update_before_left() -> None:
    rollout = Spec("ppo", SPEC.observation, SPEC.action, n_steps=2048, num_envs=2, batch_size=64)
    measured = MeasuredCosts(traced_batch=64, traced=ONCE, traced_twice=TWICE, growth=grown(64, 100 * MIB))
    kept = replace(measured, growth=grown(64, 100 * MIB)._replace(kept=85 * MIB))
    before, after = ({phase.name: phase for phase in host_phases(rollout, costs)} for costs in (measured, kept))
    for name in ("collect", "flatten"):
        assert after[name].nbytes - before[name].nbytes == 45 * MIB
        assert after[name].most_bytes - before[name].most_bytes > 45 * MIB
    assert after["train"].nbytes == before["train"].nbytes


def test_what_the_heap_keeps_grows_with_the_batch_as_what_lives_in_it() -> None:
    rollout = Spec("ppo", SPEC.observation, SPEC.action, n_steps=2048, num_envs=2, batch_size=64)
    half = grown(32, 70 * MIB)._replace(kept=60 * MIB)
    measured = MeasuredCosts(traced_batch=64, traced=ONCE, traced_twice=TWICE, growth=half)
    (flatten,) = (phase for phase in host_phases(rollout, measured) if phase.name == "flatten")
    assert flatten.parts[-2].nbytes == 40 * MIB


def test_what_does_not_grow_with_the_batch_is_not_scaled() -> None:
    half = grown(32, 70 * MIB)._replace(fixed=6 * MIB)
    assert activations(SPEC, half).nbytes == (2 * (30 - 6) + 6) * MIB
    assert activations(SPEC, half._replace(batch=64)).nbytes == 30 * MIB
