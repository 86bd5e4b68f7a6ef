"""The oracle's side of every sampler: what a batch has to be, worked out step by step.

In:  an oracle, and the ids that a memory drew.  Out: the batches that these ids have to give.
Invariant: plain loops over single transitions; nothing is shared with the samplers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.errors import TransitionIdError
from holdall.testing.oracle import OracleMemory, map_leaves


def n_step_batch(oracle: OracleMemory, ids: NDArray[np.int64], n: int, gamma: float) -> Batch:
    """Return what `NStep(n, gamma)` has to give for first steps `ids`; weights are ones."""
    runs = [run_from(oracle, int(number), n) for number in ids]
    first, last = oracle.gather(ids), oracle.gather([run[-1] for run in runs])
    returns = [_discounted(oracle.gather(run).reward, gamma) for run in runs]
    return replace(
        first,
        reward=np.array(returns, np.result_type(first.reward.dtype, np.float32)),
        next_obs=last.next_obs,
        terminated=last.terminated,
        truncated=last.truncated,
        discount=np.array([gamma ** len(run) for run in runs], np.float32),
    )


def sequence_batch(
    oracle: OracleMemory, starts: NDArray[np.int64], length: int, burn_in: int = 0, crossing: bool = False
) -> Batch:
    """Return what `Sequence(length, burn_in)` has to give for first steps `starts`; weights are ones."""
    ids, mask = [], []
    for start in starts.tolist():
        if crossing:
            steps = [start + oracle.num_envs * k for k in range(-burn_in, length)]
            real = [step if is_held(oracle, step) else None for step in steps]
        else:
            before = run_before(oracle, start, burn_in)
            after = run_from(oracle, start, length)
            real = [None] * (burn_in - len(before)) + before + after + [None] * (length - len(after))
        nearest = next(step for step in real if step is not None)
        for step in real:
            nearest = nearest if step is None else step
            ids.append(nearest)
            mask.append(step is not None)
    shape = (len(starts), burn_in + length)
    flat = oracle.gather(ids)
    fields = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras", "ids")
    rows = {
        name: map_leaves(lambda array: array.reshape(*shape, *array.shape[1:]), getattr(flat, name)) for name in fields
    }
    return Batch(**rows, weights=np.ones(len(starts), np.float32), mask=np.array(mask).reshape(shape))


def run_from(oracle: OracleMemory, first: int, count: int) -> list[int]:
    """Return `first` and the steps after it in its episode, `count` at most."""
    run = [first]
    while len(run) < count and not ends(oracle, run[-1]) and is_held(oracle, run[-1] + oracle.num_envs):
        run.append(run[-1] + oracle.num_envs)
    return run


def run_before(oracle: OracleMemory, first: int, count: int) -> list[int]:
    """Return the steps before `first` in its episode, `count` at most, oldest first."""
    run: list[int] = []
    step = first - oracle.num_envs
    while len(run) < count and is_held(oracle, step) and not ends(oracle, step):
        run.insert(0, step)
        step -= oracle.num_envs
    return run


def is_held(oracle: OracleMemory, number: int) -> bool:
    """Whether a transition can be gathered."""
    try:
        oracle.gather([number])
    except TransitionIdError:
        return False
    return True


def ends(oracle: OracleMemory, number: int) -> bool:
    """Whether a transition is the last of its episode."""
    row = oracle.gather([number])
    return bool(row.terminated[0] or row.truncated[0])


def _discounted(rewards: NDArray[Any], gamma: float) -> Any:
    dtype = np.result_type(rewards.dtype, np.float32).type
    total = dtype(rewards[0]) * dtype(1.0)
    for k in range(1, len(rewards)):
        total = total + dtype(rewards[k]) * dtype(gamma**k)
    return total
