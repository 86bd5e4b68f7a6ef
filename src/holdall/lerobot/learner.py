"""LeRobot's learner with holdall's buffers, without a change to LeRobot.

`install` replaces names of the module `lerobot.rl.learner`. Where the learner would delete its last data set and write
another one, a `LearnerBuffer` writes a checkpoint: incremental, and complete or absent after a crash.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from holdall.errors import MissingPackageError
from holdall.lerobot.replay_buffer import ReplayBuffer

_FOLDER = "holdall"
"""Folder of the checkpoints in the learner's output folder."""
_ONLINE = "dataset"
_OFFLINE = "dataset_offline"
"""Names that the learner gives to the datasets of its two buffers."""


class LearnerBuffer(ReplayBuffer):
    """The buffer of LeRobot's learner. `to_lerobot_dataset` writes a checkpoint."""

    export_datasets = False
    """Whether `to_lerobot_dataset` writes a dataset, too."""

    def to_lerobot_dataset(
        self,
        repo_id: str,
        fps: int = 1,
        root: str | os.PathLike[str] | None = None,
        task_name: str = "from_replay_buffer",
        *,
        split_segments: bool = True,
    ) -> Any:
        """Write a checkpoint beside `root`, and wait until it is safe. Return the dataset if one is written."""
        if root is not None:
            self.save(find_checkpoint(root)).result()
            if not self.export_datasets:
                return None
        return super().to_lerobot_dataset(repo_id, fps, root, task_name, split_segments=split_segments)


def find_checkpoint(root: str | os.PathLike[str]) -> Path:
    """Return the place of the checkpoint that replaces the dataset in `root`."""
    folder = Path(root)
    return folder.parent / _FOLDER / folder.name


def install(
    *,
    budget: str | int | None = "auto",
    prefer: str = "balanced",
    spill_dir: str | os.PathLike[str] | None = None,
    lossy_8bit_images: bool = False,
    export_datasets: bool = False,
) -> None:
    """Make LeRobot's learner use holdall's buffers from now on. Call it before `lerobot.rl.learner.train_cli()`.

    With `resume=true`, the learner loads the checkpoints in the folder `holdall` of its output folder. If there are
    none, it loads LeRobot's datasets.

    Args:
        budget: RAM of each of the two buffers, online and offline; see `holdall.ReplayMemory`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: Folder of the disk tiers.
        lossy_8bit_images: See `ReplayBuffer`.
        export_datasets: Also write LeRobot's datasets at every checkpoint, which takes long.
    """
    learner = _import_learner()
    tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
    settings = {**tiers, "lossy_8bit_images": lossy_8bit_images}

    class InstalledBuffer(LearnerBuffer):
        """A buffer with the settings of `install`."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**settings, **keywords})

    InstalledBuffer.export_datasets = export_datasets
    make_online = _get_replaced(learner, "initialize_replay_buffer")
    make_offline = _get_replaced(learner, "initialize_offline_replay_buffer")

    def load(name: str, make: Any, cfg: Any, device: Any, storage_device: Any) -> Any:
        place = find_checkpoint(Path(cfg.output_dir) / name)
        if not cfg.resume or not place.exists():
            return make(cfg, device, storage_device)
        capacities = {_ONLINE: cfg.policy.online_buffer_capacity, _OFFLINE: cfg.policy.offline_buffer_capacity}
        return InstalledBuffer.load(place, device, capacities[name], **tiers)

    learner.ReplayBuffer = InstalledBuffer
    learner.initialize_replay_buffer = _replace(make_online, partial(load, _ONLINE, make_online))
    learner.initialize_offline_replay_buffer = _replace(make_offline, partial(load, _OFFLINE, make_offline))


def run_learner() -> None:
    """Run LeRobot's learner with holdall's buffers. The arguments are those of LeRobot's command."""
    install()
    _import_learner().train_cli()


def _import_learner() -> Any:
    try:
        return import_module("lerobot.rl.learner")
    except ImportError as error:
        raise MissingPackageError(
            f"LeRobot's learner cannot be imported ({error}). Run \"pip install 'lerobot[hilserl]'\"."
        ) from error


def _get_replaced(learner: Any, name: str) -> Any:
    """Return LeRobot's own function, also if it was replaced before."""
    function = getattr(learner, name)
    return getattr(function, "__wrapped__", function)


def _replace(original: Any, replacement: Any) -> Any:
    def initialize(cfg: Any, device: Any, storage_device: Any) -> Any:
        return replacement(cfg, device, storage_device)

    initialize.__wrapped__ = original  # type: ignore[attr-defined]
    return initialize
