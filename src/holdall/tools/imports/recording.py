"""The protocol of readers of data sets, and the import of their steps as transitions.

Most data sets have no observation after the last step of an episode. That step's `next_obs` then repeats its own
observation, and the step is marked as truncated unless the data set says that it terminated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.memory import ReplayMemory
from holdall.schema import Array

OnProgress = Callable[[int, int], None]
"""Called with the number of steps that are done, and the number of all steps."""

STEPS_AT_ONCE = 256
"""Most steps in one `Piece`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive steps of one episode. All arrays have one row per step."""

    obs: dict[str, Array]
    action: Array
    reward: Array
    terminated: NDArray[np.bool_]
    extras: dict[str, Array]
    is_last: bool  # Whether the episode ends with the last step.
    next_obs: dict[str, Array] | None = None  # None: the observation of the following step.

    def __len__(self) -> int:
        return len(self.reward)


class RecordedSteps(Protocol):
    """A data set that can be read once, from the first step to the last."""

    @property
    def observation_space(self) -> spaces.Dict:
        """Space of the observations."""

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Space of the actions."""

    @property
    def extras(self) -> dict[str, spaces.Space[Any]]:
        """Spaces of further fields."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts for `holdall.Dataset`, stored in the checkpoint: `fps`, and others that the source records."""

    def pieces(self) -> Iterator[Piece]:
        """Yield all steps, in order."""

    def close(self) -> None:
        """Close the files."""


def import_recording(
    recording: RecordedSteps, on_progress: OnProgress, *, drop_last: bool = False, **settings: Any
) -> ReplayMemory:
    """Return a memory of one lane with all steps of a data set, and close the data set.

    Args:
        drop_last: Leave out the last step of an episode if it neither terminated nor has a next observation.
        settings: Arguments of `ReplayMemory`.
    """
    with closing(recording):
        memory = ReplayMemory(
            recording.observation_space,
            recording.action_space,
            max(recording.steps, 1),
            extras=recording.extras,
            **settings,
        )
        try:
            _add_steps(memory, recording, on_progress, drop_last=drop_last)
        except BaseException:
            memory.close()
            raise
        return memory


def _add_steps(memory: ReplayMemory, recording: RecordedSteps, on_progress: OnProgress, *, drop_last: bool) -> None:
    done = 0
    pending: Piece | None = None  # One step, whose next observation was not read yet.
    for piece in recording.pieces():
        done += len(piece)
        if piece.next_obs is not None:
            _extend(memory, piece, piece.next_obs)
        else:
            joined = piece if pending is None else _join(pending, piece)
            pending = _add_known_steps(memory, joined, drop_last=drop_last)
        # Wait for the compactor. If it fell behind, it would use fast codecs, and the checkpoint would be larger.
        memory.store.wait_idle()
        on_progress(done, recording.steps)
    if pending is not None:
        raise AssertionError("The last piece of a reader must end its episode.")
    if len(memory) == 0:
        raise ArgumentError("source has no steps, so there is nothing to import. Record some first.")


def _add_known_steps(memory: ReplayMemory, piece: Piece, *, drop_last: bool) -> Piece | None:
    """Add the steps whose next observations are known. Return the last step if its episode continues."""
    is_dropped = drop_last and not piece.terminated[-1]
    if piece.is_last and not is_dropped:
        # The observation of the last step stands in for its next observation, which was not recorded.
        next_obs = {key: np.concatenate([rows[1:], rows[-1:]]) for key, rows in piece.obs.items()}
        _extend(memory, piece, next_obs)
        return None
    if len(piece) > 1:
        _extend(memory, _cut(piece, slice(-1)), _cut_rows(piece.obs, slice(1, None)))
    return None if piece.is_last else _cut(piece, slice(-1, None))


def _extend(memory: ReplayMemory, piece: Piece, next_obs: dict[str, Array]) -> None:
    """Add all steps of `piece`. If the piece ends an episode that did not terminate, the last step is truncated."""
    truncated = np.zeros(len(piece), np.bool_)
    truncated[-1] = piece.is_last and not piece.terminated[-1]
    memory.extend(
        _add_lane_axis(piece.obs),
        piece.action[:, None],
        piece.reward[:, None],
        _add_lane_axis(next_obs),
        piece.terminated[:, None],
        truncated[:, None],
        extras=_add_lane_axis(piece.extras) or None,
    )


def _add_lane_axis(arrays: dict[str, Array]) -> dict[str, Array]:
    return {key: rows[:, None] for key, rows in arrays.items()}


def _cut(piece: Piece, rows: slice) -> Piece:
    return replace(
        piece,
        obs=_cut_rows(piece.obs, rows),
        action=piece.action[rows],
        reward=piece.reward[rows],
        terminated=piece.terminated[rows],
        extras=_cut_rows(piece.extras, rows),
    )


def _cut_rows(arrays: dict[str, Array], rows: slice) -> dict[str, Array]:
    return {key: array[rows] for key, array in arrays.items()}


def _join(first: Piece, second: Piece) -> Piece:
    return Piece(
        obs={key: np.concatenate([rows, second.obs[key]]) for key, rows in first.obs.items()},
        action=np.concatenate([first.action, second.action]),
        reward=np.concatenate([first.reward, second.reward]),
        terminated=np.concatenate([first.terminated, second.terminated]),
        extras={key: np.concatenate([rows, second.extras[key]]) for key, rows in first.extras.items()},
        is_last=second.is_last,
    )
