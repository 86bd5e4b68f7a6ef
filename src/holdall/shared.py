"""Observations in memory that processes share: workers write them, a rollout memory reads them.

In:  observations, lane by lane, from any process.  Out: the same bytes, as arrays of all lanes.
Invariant: there is one copy. Nothing is pickled, and nothing but the unique slices that a memory keeps is copied out.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.schema import Array, Tree
from holdall.units import require_count

_ALIGNMENT_BYTES = 64


class SharedObservations:
    """One observation per lane, in shared memory; hand it to worker processes as an argument.

    The channel that sends workers their actions also decides who writes when: nobody may write to a lane while the
    memory reads it. `RolloutMemory.observe` reads it once, before the next actions are sent.

    Args:
        observation_space: Of one lane.
        num_envs: Lanes.
        context: The multiprocessing context that starts the workers; None for the default one.
    """

    def __init__(self, observation_space: spaces.Space[Any], num_envs: int, context: BaseContext | None = None) -> None:
        require_count("num_envs", num_envs)
        if context is not None and not isinstance(context, BaseContext):
            raise ArgumentError(f"context ({context!r}) is no multiprocessing context; pass get_context(...), or None")
        self._tree = Tree.of(observation_space, "observation_space")
        self._lanes = num_envs
        # Without a name: the system frees it with the last process that has it, however that one ends.
        maker: Any = multiprocessing if context is None else context
        self._block = maker.RawArray(ctypes.c_uint8, max(1, self._starts()[-1]))
        self._view()

    @property
    def obs(self) -> Any:
        """The observations of all lanes, as `RolloutMemory.observe` and `.add` take them; views, never copies."""
        return self._tree.build(self._rows)

    @property
    def num_envs(self) -> int:
        """Lanes."""
        return self._lanes

    def write(self, lane: int, obs: Any) -> None:
        """Put one lane's observation, of exactly the space's shapes and dtypes, in its place."""
        self._require_lane(lane)
        for rows, new in zip(self._rows, self._tree.flatten(obs, (), "obs"), strict=True):
            rows[lane] = new

    def lane(self, lane: int) -> Any:
        """Return one lane's observation as views to write to, for environments that render in place."""
        self._require_lane(lane)
        return self._tree.build([rows[lane : lane + 1].reshape(rows.shape[1:]) for rows in self._rows])

    def _require_lane(self, lane: Any) -> None:
        if require_count("lane", lane, 0) >= self._lanes:
            raise ArgumentError(f"lane ({lane}) must be from 0 to {self._lanes - 1}; pass the worker's own")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a process needs when it is started; at any other time the memory cannot be passed on."""
        return {"tree": self._tree, "lanes": self._lanes, "block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tree, self._lanes, self._block = state["tree"], state["lanes"], state["block"]
        self._view()

    def _starts(self) -> list[int]:
        """Where each leaf begins, and where the last one ends."""
        starts = [0]
        for leaf in self._tree.leaves:
            starts.append(starts[-1] + -(-self._lanes * leaf.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return starts

    def _view(self) -> None:
        block = np.frombuffer(self._block, np.uint8)
        self._rows: list[Array] = [
            block[start : start + self._lanes * leaf.nbytes].view(leaf.dtype).reshape(self._lanes, *leaf.shape)
            for leaf, start in zip(self._tree.leaves, self._starts(), strict=False)
        ]
