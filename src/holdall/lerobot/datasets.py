"""Reading transitions from a LeRobotDataset, and writing transitions to one.

A LeRobotDataset has the frames of episodes with `action`, `next.reward` and `next.done`. Its images have 8 bits. The
state after the last frame of an episode is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from holdall.errors import ArgumentError, MissingPackageError

_ACTION = "action"
_REWARD = "next.reward"
_DONE = "next.done"
_EPISODE = "episode_index"
_INFO_PREFIX = "complementary_info."
_IMAGE_CHANNELS = {1, 3}
_WRITER_THREADS = 3


def read_transitions(dataset: Any, state_keys: list[str], drop_unfinished: bool) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `ReplayBuffer.add`, frame by frame. Each frame is decoded once.

    If the dataset has no `next.done`, the last frame of every episode is done.

    Args:
        drop_unfinished: Leave out the last frame of an episode that is not done. Otherwise this frame is truncated, and
            its own state is its next state.
    """
    count = len(dataset)
    sample: Any = dataset[0] if count else None
    for i in range(count):
        if i == 0:
            _require_keys(sample, state_keys)
        following: Any = dataset[i + 1] if i + 1 < count else None
        is_last = following is None or int(following[_EPISODE]) != int(sample[_EPISODE])
        done = bool(sample[_DONE].item()) if _DONE in sample else is_last
        is_unfinished = is_last and not done
        state = {key: sample[key] for key in state_keys}
        if not (is_unfinished and drop_unfinished):
            yield {
                "state": state,
                "action": sample[_ACTION],
                "reward": float(sample[_REWARD].item()),
                "next_state": state if is_last or done else {key: following[key] for key in state_keys},
                "done": done,
                "truncated": is_unfinished,
                "complementary_info": _read_info(sample),
            }
        sample = following


def _require_keys(sample: Any, state_keys: list[str]) -> None:
    missing = [key for key in (*state_keys, _ACTION, _REWARD) if key not in sample]
    if missing:
        raise ArgumentError(
            f"The dataset has no {missing}. Its keys are {sorted(sample)}. Pass state_keys of the dataset, or a "
            f"dataset with '{_ACTION}' and '{_REWARD}'."
        )


def _read_info(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    info = {key.removeprefix(_INFO_PREFIX): value for key, value in sample.items() if key.startswith(_INFO_PREFIX)}
    return info or None


def describe_features(
    state: Mapping[str, torch.Tensor], action: torch.Tensor, info: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Return the features of a dataset. All arguments are batches."""
    return {
        _ACTION: _describe_feature(action),
        _REWARD: {"dtype": "float32", "shape": (1,)},
        _DONE: {"dtype": "bool", "shape": (1,)},
        **{key: _describe_feature(rows) for key, rows in state.items()},
        **{_INFO_PREFIX + key: _describe_feature(rows) for key, rows in info.items()},
    }


def _describe_feature(rows: torch.Tensor) -> dict[str, Any]:
    shape = tuple(rows.shape[1:]) or (1,)
    is_image = len(shape) == 3 and shape[0] in _IMAGE_CHANNELS
    return {"dtype": "image" if is_image else "float32", "shape": shape}


class DatasetFile:
    """Context manager that writes a LeRobotDataset. After the context, the dataset is complete.

    Attributes:
        dataset: The LeRobotDataset.
    """

    def __init__(
        self, repo_id: str, fps: int, root: str | os.PathLike[str] | None, features: dict[str, dict[str, Any]]
    ) -> None:
        try:
            from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: PLC0415  an optional package
        except ImportError as error:
            raise MissingPackageError(
                f'Datasets are written by LeRobot, which cannot be imported ({error}). Run "pip install '
                "'lerobot[dataset]'\"."
            ) from error
        self.dataset: Any = LeRobotDataset.create(
            repo_id=repo_id,
            fps=fps,
            root=root,
            robot_type=None,
            features=features,
            use_videos=True,
            image_writer_threads=_WRITER_THREADS,
        )
        self._pending = 0

    def add_frame(
        self,
        state: Mapping[str, torch.Tensor],
        action: torch.Tensor,
        reward: torch.Tensor,
        done: torch.Tensor,
        info: Mapping[str, torch.Tensor],
        task: str,
    ) -> None:
        """Add one transition."""
        frame = {
            **{key: value.cpu() for key, value in state.items()},
            _ACTION: action.cpu(),
            _REWARD: reward.reshape(1).cpu(),
            _DONE: done.reshape(1).bool().cpu(),
            **{
                _INFO_PREFIX + key: value.cpu() if value.ndim else value.reshape(1).cpu() for key, value in info.items()
            },
            "task": task,
        }
        self.dataset.add_frame(frame)
        self._pending += 1

    def end_episode(self) -> None:
        """End the current episode."""
        self.dataset.save_episode()
        self._pending = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._pending:
            self.end_episode()
        # Up to LeRobot 0.5, datasets have no `writer` and write their images themselves.
        getattr(self.dataset, "writer", self.dataset).stop_image_writer()
        if error is None:
            self.dataset.finalize()
