"""Detection of environment resets that were added as transitions.

A vector environment resets its lanes by itself. A loop that ignores the autoreset mode and calls `memory.add` adds
wrong transitions:

- With next-step autoreset, it adds the step that only resets. That step starts from the final observation.
- With same-step autoreset, it passes the first observation of the next episode as the final one.

Both leave the same trace: the next observation of an episode's last step equals the observation of the following step.
Programs that cut episodes without a reset, or that end an episode when a life is lost, leave this trace, too, and they
are correct. So `find_added_resets` requires further evidence. A correct program gives that evidence by chance in at
most one of a million cases:

- next-step: no step after an end has a reward, although other steps often have rewards;
- same-step: observations change much more at time limits than in other steps.

A memory checks its newest transitions a few times, see `next_check_tick`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import comb, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.environments import NEXT_STEP, SAME_STEP

FIRST_CHECK_TICK = 256
_LAST_CHECK_TICK = 2**16
_CHECK_INTERVAL_FACTOR = 4
"""The next check is made when a memory has this many times as many ticks."""
_MAX_TRANSITIONS = 4096
"""Newest transitions that are checked, but at least two ticks."""
_MIN_ENDS = 8
"""Ends of episodes that are needed as evidence."""
_MAX_ENDS = 64
"""Ends of episodes that are checked, the newest ones."""
_MAX_CHANCE = 1e-6
"""Highest probability that a correct program causes a warning."""
_LARGE_CHANGE_QUANTILE = 0.95
"""Changes of an observation above this quantile of ordinary changes are large."""
_MAX_OBSERVATION_BYTES = 2**20
"""Changes of larger observations are not measured."""

Ids = NDArray[np.int64]
Pairs = list[tuple[NDArray[Any], NDArray[Any]]]
"""Observations and next observations, leaf by leaf."""


class RecentTransitions(NamedTuple):
    """The transitions that are checked: their ids of shape (ticks, lanes), and functions that read them."""

    ids: Ids
    read_outcomes: Callable[[Ids], tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]]
    read_pairs: Callable[[Ids], Pairs]


def next_check_tick(ticks: int) -> float:
    """Return the tick of the next check of a memory with `ticks` ticks. Infinity if there is none."""
    check: float = FIRST_CHECK_TICK
    while check <= ticks:
        check *= _CHECK_INTERVAL_FACTOR
    return check if check <= _LAST_CHECK_TICK else inf


def recent_ids(first_id: int, next_id: int, lanes: int) -> Ids:
    """Return the ids of the newest ticks, in an array of shape (ticks, lanes)."""
    ticks = min((next_id - first_id) // lanes, max(2, _MAX_TRANSITIONS // lanes))
    return np.arange(next_id - ticks * lanes, next_id).reshape(ticks, lanes)


def warn_of_resets(mode: str, stacklevel: int) -> None:
    """Warn that resets of the autoreset mode `mode` were added as transitions."""
    if mode == NEXT_STEP:
        finding = (
            "The step after the end of an episode was added as a transition. It starts from the final observation and "
            "has no reward, so the environment probably resets in that step (next-step autoreset)."
        )
    else:
        finding = (
            "At time limits, next_obs is the first observation of the next episode, not the final one of its own "
            "episode. The environment resets at once (same-step autoreset), and info['final_obs'] has the true one."
        )
    warnings.warn(
        f"{finding} Let holdall.Recorder(envs, memory) step the environment, or pass valid= and the true next_obs to "
        "add. If the environment resets nothing there, ignore this warning.",
        UserWarning,
        stacklevel=stacklevel,
    )


def find_added_resets(recent: RecentTransitions) -> str | None:
    """Return the autoreset mode whose resets were added as transitions, or None."""
    reward, terminated, truncated = recent.read_outcomes(recent.ids)
    ended = terminated | truncated
    tick, lane = np.nonzero(ended[:-1])
    tick = tick[-_MAX_ENDS:]
    lane = lane[-_MAX_ENDS:]
    ends = recent.ids[tick, lane]
    if len(tick) < _MIN_ENDS or not _are_continued(recent, ends, recent.ids[tick + 1, lane]):
        return None
    has_no_reward = (reward == 0).reshape(*ended.shape, -1).all(axis=2)
    follows_end = np.zeros_like(ended)
    follows_end[tick + 1, lane] = True
    if has_no_reward[follows_end].all() and not ended[follows_end].any():
        # The probability that as many ordinary steps all have no reward.
        share = (np.count_nonzero(has_no_reward[~follows_end]) + 1) / (np.count_nonzero(~follows_end) + 1)
        return NEXT_STEP if share ** len(tick) < _MAX_CHANCE else None
    is_time_limit = (truncated & ~terminated)[tick, lane]
    return SAME_STEP if _changes_much(recent, ends[is_time_limit], recent.ids[~ended]) else None


def _are_continued(recent: RecentTransitions, ends: Ids, following: Ids) -> bool:
    """Return whether every final observation equals the observation of the following step.

    At least `_MIN_ENDS` of these observations must differ: constant observations are no evidence.
    """
    final = recent.read_pairs(ends)
    first = recent.read_pairs(following)
    if not all(before[1].tobytes() == now[0].tobytes() for before, now in zip(final, first, strict=True)):
        return False
    distinct = {b"".join(row.tobytes() for row in rows) for rows in zip(*(now[0] for now in first), strict=True)}
    return len(distinct) >= _MIN_ENDS


def _changes_much(recent: RecentTransitions, ends: Ids, others: Ids) -> bool:
    """Return whether large changes are more frequent at `ends` than at `others`, and this is not chance."""
    if len(ends) < _MIN_ENDS or len(others) < _MIN_ENDS:
        return False
    if sum(pair[0].nbytes for pair in recent.read_pairs(ends[:1])) > _MAX_OBSERVATION_BYTES:
        return False
    ordinary = others[:: max(1, len(others) // 256)]
    limit = np.quantile(_measure_changes(recent.read_pairs(ordinary)), _LARGE_CHANGE_QUANTILE)
    count = len(ends)
    large = int(np.count_nonzero(_measure_changes(recent.read_pairs(ends)) > limit))
    share = 1 - _LARGE_CHANGE_QUANTILE
    # The probability of at least `large` large changes among `count` ordinary ones.
    chance = sum(comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(large, count + 1))
    return chance < _MAX_CHANCE


def _measure_changes(pairs: Pairs) -> NDArray[np.float64]:
    """Return the squared distance of each observation from the next one."""
    total = np.zeros(len(pairs[0][0]))
    with np.errstate(all="ignore"):  # Observations may contain infinities and NaN.
        for now, following in pairs:
            change = following.astype(np.float64) - now.astype(np.float64)
            total += (change.reshape(len(total), -1) ** 2).sum(axis=1)
    return total
