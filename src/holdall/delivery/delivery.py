"""Delivery: makes the batch of a draw. The batch belongs to the caller.

    HostDelivery      NumPy arrays, or torch tensors on the CPU
    DeviceDelivery    torch tensors on another device

A batch is made in three steps. `prepare` reads the rows, in any thread. `start` begins to send the rows, and `receive`
returns the batch. Both run in the thread that uses the batch. `start` is optional: `receive` sends what was not sent.
`deliver` is `prepare` and `receive`. `prepare_drawn` replaces `prepare` for rows that were read elsewhere, such as rows
that shards on other machines sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, Goals
from holdall.errors import ArgumentError
from holdall.schema import Array, Schema
from holdall.store.view import WindowSlices

if TYPE_CHECKING:
    from holdall.delivery.drawn_rows import DrawnRows


class Rows(Protocol):
    """Rows of transitions that can be read, such as a `View` of a store."""

    def read(
        self, ids: NDArray[np.int64], outputs: tuple[int, ...], into: NDArray[np.uint8] | None = None, /
    ) -> tuple[Array, ...]:
        """Return the rows of `ids`, one array per output. If `into` is given, the arrays share its memory."""

    def read_windows(
        self, ids: NDArray[np.int64], leaf: int, into: NDArray[np.uint8], with_whole: bool, /
    ) -> WindowSlices | None:
        """Write the slices of an observation leaf to `into`. Return None if the leaf is not stored as slices.

        `with_whole` says whether an observation that is stored whole counts as one slice.
        """


class Delivery(ABC):
    """Makes batches of draws. All methods may be called from any thread."""

    @abstractmethod
    def prepare(self, draw: Draw, rows: Rows) -> Any:
        """Read the rows of a draw. Raise TransitionIdError if a row is not held."""

    @abstractmethod
    def prepare_drawn(self, draw: Draw, drawn: DrawnRows) -> Any:
        """Prepare a batch of `drawn`, rows that were read elsewhere. A batch on the host may share their memory."""

    def start(self, prepared: Any) -> None:  # noqa: B027  Rows on the host are not sent.
        """Begin to send a prepared batch, without waiting. Optional, idempotent, and not thread-safe."""

    @abstractmethod
    def receive(self, prepared: Any) -> Batch:
        """Return a prepared batch. Called once, by the thread that uses the batch."""

    def deliver(self, draw: Draw, rows: Rows) -> Batch:
        """Return the batch of a draw."""
        return self.receive(self.prepare(draw, rows))

    def close(self) -> None:  # noqa: B027  Most deliveries keep no memory.
        """Release the memory that is kept for batches."""


def find_goal_leaves(schema: Schema, goals: Goals) -> tuple[int, int]:
    """Return the numbers of the observation leaves of the achieved goal and of the desired goal."""
    keys = schema.observation.keys or ()
    for key in (goals.achieved_key, goals.desired_key):
        if key not in keys:
            raise ArgumentError(
                f"sampler: Hindsight needs the key {key!r}, but the observation space has {list(keys)}. Name the keys "
                "with achieved_key and desired_key."
            )
    return keys.index(goals.achieved_key), keys.index(goals.desired_key)


def compute_rewards(schema: Schema, goals: Goals, achieved: Array, goal: Array, extras: list[Array]) -> Array:
    """Return the rewards of rows with other goals, which the user's reward function computes."""
    rewards = np.asarray(goals.reward_fn(achieved, goal.copy(), schema.extras.build(extras)))
    if rewards.shape != goals.rows.shape:
        raise ArgumentError(
            f"reward_fn returned an array of shape {rewards.shape} for {len(goals.rows)} rows. Return one reward per "
            "row."
        )
    return rewards
