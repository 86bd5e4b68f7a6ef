"""From a recipe to a batch: what was read under some ids, put together as it says.

In:  a draw, and the rows of its ids.  Out: the batch, on the device that was asked for.
Invariant: every observation is copied once, straight to where the batch has it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, Goals
from holdall.errors import ArgumentError, DamageError
from holdall.experience.delivery.assemble import Delivery, ObservationAssembler
from holdall.experience.delivery.mirror import Mirror, Mirrored
from holdall.experience.delivery.pinned_arenas import Pinned, PinnedArenas
from holdall.experience.disk.awaited_file import bring_places
from holdall.experience.store import Rows, Store
from holdall.schema import Array, Schema


class Reading(NamedTuple):
    """All that a draw needs of the store, found in one go."""

    rows: Rows  # of the ids
    last: Rows | None  # of the last ids, if they are others
    outcomes: Rows | None  # of the transitions that become goals
    mirrored: Mirrored | None = None  # where the slices are on a device
    pinned: Pinned | None = None  # where a device may read them on the host

    def bring(self) -> None:
        """Fetch what is to be read of files that lie elsewhere."""
        for rows in (self.rows, self.last, self.outcomes):
            if rows is not None and rows.places is not None:
                bring_places(rows.places)

    @classmethod
    def of(cls, draw: Draw, store: Store, mirror: Mirror | None = None, arenas: PinnedArenas | None = None) -> Reading:
        """Read the rows of a draw, all of whose ids are held."""
        return cls(
            store.read(draw.ids.reshape(-1)),
            None if draw.last_ids is None else store.read(draw.last_ids.reshape(-1)),
            None if draw.goals is None else store.read(draw.goals.ids),
            None if mirror is None else mirror.brought_up_to_date(store),
            None if arenas is None else arenas.brought_up_to_date(store),
        )


class Job(Protocol):
    """A batch that was drawn, looked up, and is still to be put together."""

    is_quick: bool
    """Whether `work` only asks a device for something, which takes less time than to wake a thread for it."""

    def work(self) -> None:
        """Do what takes long, in any thread."""

    def receive(self) -> Batch:
        """Return the batch to the thread that will use it."""


class Builder(Protocol):
    """Makes batches of one memory's transitions, on one device."""

    def start(self, draw: Draw, reading: Reading) -> Job:
        """Begin a batch; called by the thread that will use it."""


class _HostJob:
    """A batch in arrays, or in tensors that share their memory."""

    is_quick = False

    def __init__(self, builder: BatchBuilder, draw: Draw, reading: Reading) -> None:
        self._arguments = (builder, draw, reading)
        self._batch: Batch | None = None

    def work(self) -> None:
        """See `Job`."""
        builder, draw, reading = self._arguments
        reading.bring()
        self._batch = builder.build(draw, reading)

    def receive(self) -> Batch:
        """See `Job`."""
        if self._batch is None:
            self.work()
        batch, self._batch = self._batch, None
        if batch is None:
            raise DamageError("a batch was received before it was made; report this")
        return batch


class BatchBuilder:
    """Makes batches in arrays, and hands them over as they are or as tensors."""

    def __init__(self, schema: Schema, assembler: ObservationAssembler, delivery: Delivery) -> None:
        self._schema = schema
        self._assembler = assembler
        self._delivery = delivery

    def start(self, draw: Draw, reading: Reading) -> Job:
        """See `Builder`."""
        return _HostJob(self, draw, reading)

    def build(self, draw: Draw, reading: Reading) -> Batch:
        """Copy the large fields, which takes no lock, and make the batch."""
        schema, rows = self._schema, reading.rows
        last = reading.last or rows
        pairs = [self.observation_pair(reading, leaf) for leaf in range(len(schema.observation.leaves))]
        obs, next_obs = dict(enumerate(pair[0] for pair in pairs)), dict(enumerate(pair[1] for pair in pairs))
        reward = rows.reward if draw.reward is None else draw.reward
        if draw.goals is not None and reading.outcomes is not None and draw.goals.rows.size:
            self.tell_anew(draw.goals, reading.outcomes, obs, next_obs, reward, rows.extras)

        def deliver(array: Array) -> Any:
            return self._delivery.hand_over(array.reshape(*draw.ids.shape, *array.shape[1:]))

        hand_over = self._delivery.hand_over
        return Batch(
            obs=schema.observation.build([deliver(array) for array in obs.values()]),
            action=schema.action.build([deliver(array) for array in rows.action]),
            reward=deliver(reward),
            next_obs=schema.observation.build([deliver(array) for array in next_obs.values()]),
            terminated=deliver(last.terminated),
            truncated=deliver(last.truncated),
            extras=schema.extras.build([deliver(array) for array in rows.extras]),
            ids=draw.ids,
            weights=hand_over(draw.weights),
            discount=None if draw.discount is None else hand_over(draw.discount),
            mask=None if draw.mask is None else hand_over(draw.mask),
        )

    def observation_pair(self, reading: Reading, leaf: int) -> tuple[Array, Array]:
        """Return observations and next observations of one leaf."""
        if reading.last is None:
            return self._pair(reading.rows, leaf, wanted=(True, True))
        first = self._pair(reading.rows, leaf, wanted=(True, False))[0]
        return first, self._pair(reading.last, leaf, wanted=(False, True))[1]

    def _pair(self, rows: Rows, leaf: int, wanted: tuple[bool, bool]) -> tuple[Array, Array]:
        """Return observation and next observation of one leaf; one that is not wanted may be empty."""
        if leaf in rows.small or rows.places is None:
            return rows.small[leaf]
        field = rows.large.index(leaf)
        return self._assembler.assemble(rows.places, field, self._schema.observation.leaves[leaf], wanted)

    def goals_are_among(self, goals: Goals, leaves: Collection[int]) -> bool:
        """Whether goals lie in one of some leaves."""
        return any(self._leaf(key) in leaves for key in (goals.achieved_key, goals.desired_key))

    def tell_anew(
        self,
        goals: Goals,
        outcomes: Rows,
        obs: dict[int, Array],
        next_obs: dict[int, Array],
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
