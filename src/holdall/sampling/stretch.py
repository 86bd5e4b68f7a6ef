"""Stretches: the steps before and after a transition, in its own lane and episode.

In:  ids, and how many steps.  Out: the ids of the steps, and which of them are real.
Invariant: a stretch never leaves what is held. It stops at the end of an episode, at the write
head and at a lane that made no transition; what is not real repeats the nearest real step.
"""

from __future__ import annotations

import numpy as np

from holdall.sampling.draw import Flags, Held, Ids


def steps_after(held: Held, ids: Ids, count: int, crossing: bool = False) -> tuple[Ids, Flags]:
    """Return `ids` and the `count` - 1 steps after each, (batch, count), and which are real.

    Args:
        crossing: Go on past the ends of episodes.
    """
    steps = ids[:, None] + held.lanes * np.arange(count)
    real = steps < held.next_id
    inside = np.where(real, steps, ids[:, None])
    if not held.fields.all_valid:
        real &= held.fields.are_valid(inside)
    if not crossing:
        real[:, 1:] &= ~held.fields.are_ends(inside[:, :-1])
        real = np.logical_and.accumulate(real, axis=1)
    return inside, real


def steps_before(held: Held, ids: Ids, count: int, crossing: bool = False) -> tuple[Ids, Flags]:
    """Return the `count` steps before each of `ids`, oldest first, and which are real."""
    steps = ids[:, None] - held.lanes * np.arange(count, 0, -1)
    real = steps >= held.first_id
    inside = np.where(real, steps, ids[:, None])
    if not held.fields.all_valid:
        real &= held.fields.are_valid(inside)
    if not crossing:
        real &= ~held.fields.are_ends(inside)
        real = np.logical_and.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    return inside, real


def filled_up(steps: Ids, real: Flags) -> Ids:
    """Let what is not real repeat the last real step before it, or else the first one after it."""
    position = np.where(real, np.arange(steps.shape[1]), -1)
    nearest = np.maximum.accumulate(position, axis=1)
    nearest = np.where(nearest < 0, real.argmax(axis=1)[:, None], nearest)
    return np.take_along_axis(steps, nearest, axis=1)
