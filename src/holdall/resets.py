"""Resets that were added as if they were steps: a warning for those who call `memory.add` themselves.

In:  the newest transitions of a memory, a few times in its life.  Out: at most one warning, with the remedy.
A vector environment resets by itself. A loop that does not look at the mode adds either the reset step as a transition
(Gymnasium's next-step mode), or the first observation of the next episode as the final one (same-step mode). Both leave
episodes whose end is continued: the observation after it is its next observation. So do programs that cut episodes
without a reset, or end them when a life is lost, and these are right. Hence more is asked for:

* next-step: every step after an end has no reward, and the other steps have rewards too often for that to be chance;
* same-step: at time limits, which come whatever the environment does, observations change much more than elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import comb, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FIRST_LOOK_TICKS, LAST_LOOK_TICKS, _LOOKS_APART = 256, 2**16, 4
"""When a memory is looked at: after so many ticks, and again after 4 times as many, up to the last look."""
_LOOKED_AT = 4096
"""Transitions that a look takes in, at most."""
_FEWEST_ENDS, _MOST_ENDS = 8, 64
_CHANCE = 1e-6
"""A warning that is a coincidence in a right program is rarer than this."""
_LARGE_CHANGE = 0.95
"""Changes above this share of all are large."""
_MOST_BYTES = 2**20
"""Observations above this size are not compared by how much they change."""

Ids = NDArray[np.int64]
Pairs = list[tuple[NDArray[Any], NDArray[Any]]]
"""Observations and next observations, field by field."""


class Newest(NamedTuple):
    """What is looked at: ids of (ticks, lanes), and how to read transitions."""

    ids: Ids
    outcomes: Callable[[Ids], tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]]
    rows: Callable[[Ids], Any]  # all fields; see `Store.read`

    def pairs(self, ids: Ids) -> Pairs:
        """Read observations and next observations."""
        small = self.rows(ids).small
        return [small[i] for i in sorted(small)]


def next_look(ticks: int) -> float:
    """Return the tick from which on a memory is looked at again."""
    look: float = FIRST_LOOK_TICKS
    while look <= ticks:
        look *= _LOOKS_APART
    return look if look <= LAST_LOOK_TICKS else inf


def newest_ids(first_id: int, next_id: int, lanes: int) -> Ids:
    """Return the ids of the newest ticks, (ticks, lanes)."""
    ticks = min((next_id - first_id) // lanes, max(2, _LOOKED_AT // lanes))
    return np.arange(next_id - ticks * lanes, next_id).reshape(ticks, lanes)


def warn_of_resets(found: str, stacklevel: int) -> float:
    """Warn of resets of an autoreset mode that were added as steps; return when to look again: never."""
    shown = (
        "the step after an episode's end was added as a transition: it starts from the final observation and has no "
        "reward. The environment resets in that step (next-step autoreset), so it is none"
        if found == "next_step"
        else "at time limits next_obs is the first observation of the next episode, not the final one of its own: the "
        "environment resets at once (same-step autoreset), and info['final_obs'] has the true one"
    )
    warnings.warn(
        f"{shown}. Let holdall.Recorder(envs, memory) step the environment, which adds what really happened; or pass "
        "valid= and the true next_obs to add. If nothing is reset there, this is no mistake",
        UserWarning,
        stacklevel=stacklevel,
    )
    return inf


def added_resets(held: Newest) -> str | None:
    """Return the autoreset mode whose resets were added as steps: "next_step", "same_step", or None."""
    reward, terminated, truncated = held.outcomes(held.ids)
    ended = terminated | truncated
    tick, lane = np.nonzero(ended[:-1])
    tick, lane = tick[-_MOST_ENDS:], lane[-_MOST_ENDS:]
    if len(tick) < _FEWEST_ENDS or not _are_continued(held, held.ids[tick, lane], held.ids[tick + 1, lane]):
        return None
    has_none = (reward == 0).reshape(*ended.shape, -1).all(axis=2)
    after = np.zeros_like(ended)
    after[tick + 1, lane] = True
    if has_none[after].all() and not ended[after].any():
        share = (np.count_nonzero(has_none[~after]) + 1) / (np.count_nonzero(~after) + 1)
        return "next_step" if share ** len(tick) < _CHANCE else None
    cut = (truncated & ~terminated)[tick, lane]
    return "same_step" if _changes_much(held, held.ids[tick, lane][cut], held.ids[~ended]) else None


def _are_continued(held: Newest, ends: Ids, after: Ids) -> bool:
    """Whether every end's next observation is the one after it, and they differ from end to end."""
    final, first = held.pairs(ends), held.pairs(after)
    if not all(before[1].tobytes() == now[0].tobytes() for before, now in zip(final, first, strict=True)):
        return False
    shown = {b"".join(row.tobytes() for row in rows) for rows in zip(*(now[0] for now in first), strict=True)}
    return len(shown) >= _FEWEST_ENDS


def _changes_much(held: Newest, ends: Ids, others: Ids) -> bool:
    """Whether observations change more at some ends than elsewhere, and too often for that to be chance."""
    if len(ends) < _FEWEST_ENDS or len(others) < _FEWEST_ENDS:
        return False
    ordinary = others[:: max(1, len(others) // 256)]
    if sum(pair[0].nbytes for pair in held.pairs(ends[:1])) > _MOST_BYTES:
        return False
    limit = np.quantile(_changes(held.pairs(ordinary)), _LARGE_CHANGE)
    count, large = len(ends), int(np.count_nonzero(_changes(held.pairs(ends)) > limit))
    share = 1 - _LARGE_CHANGE
    chance = sum(comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(large, count + 1))
    return chance < _CHANCE


def _changes(pairs: Pairs) -> NDArray[np.float64]:
    """Return by how much each observation differs from the next one."""
    total = np.zeros(len(pairs[0][0]))
    with np.errstate(all="ignore"):  # infinite and unknown values compare as they do
        for now, after in pairs:
            change = after.astype(np.float64) - now.astype(np.float64)
            total += (change.reshape(len(total), -1) ** 2).sum(axis=1)
    return total
