"""From a recipe to a batch: what was read under some ids, put together as it says.

In:  a draw, and the rows of its ids.  Out: the batch, on the device that was asked for.
Invariant: every observation is copied once, straight to where the batch has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, Goals
from holdall.errors import ArgumentError
from holdall.experience.assemble import Delivery, ObservationAssembler
from holdall.experience.store import Rows, Store
from holdall.schema import Array, Schema


class Reading(NamedTuple):
    """All that a draw needs of the store, found in one go."""

    rows: Rows  # of the ids
    last: Rows | None  # of the last ids, if they are others
    outcomes: Rows | None  # of the transitions that become goals

    @classmethod
    def of(cls, draw: Draw, store: Store) -> Reading:
        """Read the rows of a draw, all of whose ids are held."""
        return cls(
            store.read(draw.ids.reshape(-1)),
            None if draw.last_ids is None else store.read(draw.last_ids.reshape(-1)),
            None if draw.goals is None else store.read(draw.goals.ids),
        )


class BatchBuilder:
    """Makes batches of one memory's transitions."""

    def __init__(self, schema: Schema, assembler: ObservationAssembler, delivery: Delivery) -> None:
        self._schema = schema
        self._assembler = assembler
        self._delivery = delivery

    def build(self, draw: Draw, reading: Reading) -> Batch:
        """Copy the large fields, which takes no lock, and make the batch."""
        schema, rows = self._schema, reading.rows
        last = reading.last or rows
        obs, next_obs = self._observations(rows, reading.last)
        reward = rows.reward if draw.reward is None else draw.reward
        if draw.goals is not None and reading.outcomes is not None and draw.goals.rows.size:
            self._tell_anew(draw.goals, reading.outcomes, obs, next_obs, reward, rows.extras)

        def deliver(array: Array) -> Any:
            return self._delivery.hand_over(array.reshape(*draw.ids.shape, *array.shape[1:]))

        hand_over = self._delivery.hand_over
        return Batch(
            obs=schema.observation.build([deliver(array) for array in obs]),
            action=schema.action.build([deliver(array) for array in rows.action]),
            reward=deliver(reward),
            next_obs=schema.observation.build([deliver(array) for array in next_obs]),
            terminated=deliver(last.terminated),
            truncated=deliver(last.truncated),
            extras=schema.extras.build([deliver(array) for array in rows.extras]),
            ids=draw.ids,
            weights=hand_over(draw.weights),
            discount=None if draw.discount is None else hand_over(draw.discount),
            mask=None if draw.mask is None else hand_over(draw.mask),
        )

    def _observations(self, rows: Rows, last: Rows | None) -> tuple[list[Array], list[Array]]:
        """Return observations and next observations, one array a leaf."""
        leaves = range(len(self._schema.observation.leaves))
        if last is None:
            both = [self._pair(rows, leaf, wanted=(True, True)) for leaf in leaves]
            return [obs for obs, _ in both], [next_obs for _, next_obs in both]
        first = [self._pair(rows, leaf, wanted=(True, False))[0] for leaf in leaves]
        return first, [self._pair(last, leaf, wanted=(False, True))[1] for leaf in leaves]

    def _pair(self, rows: Rows, leaf: int, wanted: tuple[bool, bool]) -> tuple[Array, Array]:
        """Return observation and next observation of one leaf; one that is not wanted may be empty."""
        if leaf in rows.small or rows.places is None:
            return rows.small[leaf]
        field = rows.large.index(leaf)
        return self._assembler.assemble(rows.places, field, self._schema.observation.leaves[leaf], wanted)

    def _tell_anew(
        self,
        goals: Goals,
        outcomes: Rows,
        obs: list[Array],
        next_obs: list[Array],
        reward: Array,
        extras: list[Array],
    ) -> None:
        """Put other goals, and the rewards they deserve, into rows of a batch that is not handed over yet."""
        achieved, desired = (self._leaf(key) for key in (goals.achieved_key, goals.desired_key))
        goal = self._pair(outcomes, achieved, wanted=(False, True))[1]
        for observed in (obs, next_obs):
            observed[desired][goals.rows] = goal
        info = self._schema.extras.build([array[goals.rows] for array in extras])
        told = np.asarray(goals.reward_fn(next_obs[achieved][goals.rows], goal.copy(), info))
        if told.shape != goals.rows.shape:
            raise ArgumentError(
                f"reward_fn returned an array of shape {told.shape} for {len(goals.rows)} rows; return one reward a row"
            )
        reward[goals.rows] = told

    def _leaf(self, key: str) -> int:
        keys = self._schema.observation.keys or ()
        if key not in keys:
            raise ArgumentError(
                f"sampler: hindsight needs the key {key!r}, but the observation space has {list(keys)}; name the keys "
                "with achieved_key and desired_key"
            )
        return keys.index(key)


def of_ids(ids: NDArray[np.int64]) -> Draw:
    """Return the recipe of a plain batch of given transitions."""
    return Draw(ids, np.ones(len(ids), np.float32))
