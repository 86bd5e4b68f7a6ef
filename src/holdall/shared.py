"""SharedObservations: observations that worker processes write and a rollout reads, without a copy or a pickle."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.checks import require_count
from holdall.errors import ArgumentError
from holdall.schema import Array, Bytes, Leaf, Tree

_ALIGNMENT_BYTES = 64


class SharedObservations:
    """One observation per lane in shared memory, which is passed to worker processes as an argument.

    No worker may write to a lane while the memory reads it. `RolloutMemory.observe` reads all lanes once, before the
    next actions are sent to the workers.

    Args:
        observation_space: Space of one lane's observation.
        num_envs: Number of lanes.
        context: Multiprocessing context that starts the workers. None for the default one.

    Examples:
        >>> board = holdall.SharedObservations(Box(0, 255, (2,), np.uint8), num_envs=2)
        >>> board.write(1, np.array([7, 8], np.uint8))
        >>> board.obs
        array([[0, 0],
               [7, 8]], dtype=uint8)
    """

    def __init__(self, observation_space: spaces.Space[Any], num_envs: int, context: BaseContext | None = None) -> None:
        require_count("num_envs", num_envs)
        if context is not None and not isinstance(context, BaseContext):
            raise ArgumentError(
                f"context ({context!r}) must be a multiprocessing context; pass get_context(...), or None"
            )
        self._tree = Tree.of(observation_space, "observation_space")
        self._lanes = num_envs
        # The block has no name in the system, which frees it when the last process that uses it ends.
        maker: Any = multiprocessing if context is None else context
        self._block = maker.RawArray("B", max(1, _count_bytes(self._tree.leaves, self._lanes)))
        self._make_views()

    @property
    def obs(self) -> Any:
        """The observations of all lanes, for `RolloutMemory.observe` and `add`. They are views, never copies."""
        return self._tree.build(self._rows)

    @property
    def num_envs(self) -> int:
        """Number of lanes."""
        return self._lanes

    def write(self, lane: int, obs: Any) -> None:
        """Write the observation of one lane, which must have the space's shapes and dtypes."""
        self._require_lane(lane)
        for rows, new in zip(self._rows, self._tree.flatten(obs, (), "obs"), strict=True):
            rows[lane] = new

    def lane(self, lane: int) -> Any:
        """Return writable views of the observation of one lane, for environments that render in place."""
        self._require_lane(lane)
        return self._tree.build([rows[lane : lane + 1].reshape(rows.shape[1:]) for rows in self._rows])

    def _require_lane(self, lane: Any) -> None:
        if require_count("lane", lane, 0) >= self._lanes:
            raise ArgumentError(f"lane ({lane}) must be from 0 to {self._lanes - 1}; pass the worker's own lane")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a new process. multiprocessing allows this only while it starts a process."""
        return {"tree": self._tree, "lanes": self._lanes, "block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tree = state["tree"]
        self._lanes = state["lanes"]
        self._block = state["block"]
        self._make_views()

    def _make_views(self) -> None:
        """Set `_rows` to one array per leaf, all of them views of the block."""
        block = np.frombuffer(self._block, np.uint8)
        self._rows: list[Array] = list(_lay_out(block, self._tree.leaves, self._lanes))


def _count_bytes(leaves: Iterable[Leaf], lanes: int) -> int:
    """Return the bytes that the arrays of all leaves take, with their alignment."""
    return sum(_align(lanes * leaf.nbytes) for leaf in leaves)


def _lay_out(block: Bytes, leaves: Iterable[Leaf], lanes: int) -> Iterator[Array]:
    """Yield the array of each leaf in the block."""
    start = 0
    for leaf in leaves:
        nbytes = lanes * leaf.nbytes
        yield block[start : start + nbytes].view(leaf.dtype).reshape(lanes, *leaf.shape)
        start += _align(nbytes)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
