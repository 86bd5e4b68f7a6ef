"""LeRobot's learner with holdall's buffers, without a change to LeRobot.

`install` replaces names of the module `lerobot.rl.learner`. Where the learner would delete its last data set and write
another one, a `LearnerBuffer` writes a checkpoint: incremental, and complete or absent after a crash.

Guarantee: the learner's two buffers resume in their states of one moment. The checkpoint of the offline buffer is
written first, and the checkpoint of the online buffer names it. If a run is killed between the two, the offline buffer
has a newer checkpoint that no checkpoint names, and it is removed when the learner resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from holdall.checkpoint import open_reader, remove_newer
from holdall.checks import refuse_malformed
from holdall.errors import MissingPackageError
from holdall.lerobot.replay_buffer import ReplayBuffer

_FOLDER = "holdall"
"""Folder of the checkpoints in the learner's output folder."""
_ONLINE = "dataset"
_OFFLINE = "dataset_offline"
"""Names that the learner gives to the datasets of its two buffers."""
_OFFLINE_FILE = "lerobot/offline.json"
"""File in a checkpoint of the online buffer: the number of the offline buffer's checkpoint."""
_KEEP = 3
"""Number of checkpoints of the online buffer to keep."""


class LearnerBuffer(ReplayBuffer):
    """A buffer of LeRobot's learner. `to_lerobot_dataset` writes a checkpoint.

    Attributes:
        export_datasets: Whether `to_lerobot_dataset` writes a dataset, too.
        offline: The learner's offline buffer, which this buffer saves, too. None for the offline buffer itself.
        is_saved_by_other: Whether the online buffer saves this buffer.
    """

    export_datasets = False
    offline: LearnerBuffer | None = None
    is_saved_by_other = False

    def to_lerobot_dataset(
        self,
        repo_id: str,
        fps: int = 1,
        root: str | os.PathLike[str] | None = None,
        task_name: str = "from_replay_buffer",
        *,
        split_segments: bool = True,
    ) -> Any:
        """Write a checkpoint to `find_checkpoint(root)`, and wait until it is complete.

        Return the dataset if one is written.
        """
        if root is not None:
            if not self.is_saved_by_other:
                self._save_with_offline(find_checkpoint(root))
            if not self.export_datasets:
                return None
        return super().to_lerobot_dataset(repo_id, fps, root, task_name, split_segments=split_segments)

    def _save_with_offline(self, place: Path) -> None:
        """Write the checkpoint of the offline buffer, and then the checkpoint of this buffer, which names it."""
        attach: dict[str, bytes] = {}
        if self.offline is not None:
            # One more is kept, because each of the earlier `_KEEP` checkpoints of this buffer still names one.
            saved = self.offline.save(place.parent / _OFFLINE, keep=_KEEP + 1).result()
            attach[_OFFLINE_FILE] = json.dumps({"number": saved.number}).encode()
        self._save(place, attach, _KEEP, None).result()

    def find_offline_number(self) -> int | None:
        """Return the number of the offline buffer's checkpoint that belongs to the loaded checkpoint of this buffer."""
        named = self.memory.attached.get(_OFFLINE_FILE) if self.initialized else None
        if named is None:
            return None
        with refuse_malformed("The number of the offline buffer's checkpoint"):
            return int(json.loads(named)["number"])


def find_checkpoint(root: str | os.PathLike[str]) -> Path:
    """Return the path of the checkpoint that replaces the dataset in `root`."""
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

    The learner's two buffers, online and offline, are saved together to the folder `holdall` of its output folder. With
    `resume=true`, the learner loads both in their states of one moment. If there is no checkpoint, it loads LeRobot's
    datasets.

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
    make_online = _find_original(learner, "initialize_replay_buffer")
    make_offline = _find_original(learner, "initialize_offline_replay_buffer")

    buffers = _BufferPair(
        lambda place, device, capacity: InstalledBuffer.load(place, device, capacity, **tiers),
        make_online,
        make_offline,
    )
    learner.ReplayBuffer = InstalledBuffer
    learner.initialize_replay_buffer = _wrap_original(buffers.initialize_online, make_online)
    learner.initialize_offline_replay_buffer = _wrap_original(buffers.initialize_offline, make_offline)


class _BufferPair:
    """The learner's two buffers, made or loaded. Its methods replace the learner's functions.

    Args:
        load: Loads a buffer from a path, for a device and with a capacity.
        make_online: The learner's own function for the online buffer.
        make_offline: The learner's own function for the offline buffer.
    """

    def __init__(self, load: Callable[[Path, Any, int], LearnerBuffer], make_online: Any, make_offline: Any) -> None:
        self._load = load
        self._make_online = make_online
        self._make_offline = make_offline
        self._online: LearnerBuffer | None = None

    def initialize_online(self, cfg: Any, device: Any, storage_device: Any) -> LearnerBuffer:
        """Return the online buffer. The learner calls this method before `initialize_offline`."""
        place = _find_checkpoint_to_resume(cfg, _ONLINE)
        if place is None:
            self._online = self._make_online(cfg, device, storage_device)
        else:
            self._online = self._load(place, device, cfg.policy.online_buffer_capacity)
        return self._online

    def initialize_offline(self, cfg: Any, device: Any, storage_device: Any) -> LearnerBuffer:
        """Return the offline buffer, in its state at the time when the online buffer was saved."""
        place = _find_checkpoint_to_resume(cfg, _OFFLINE)
        offline: LearnerBuffer
        if place is None:
            offline = self._make_offline(cfg, device, storage_device)
        else:
            number = None if self._online is None else self._online.find_offline_number()
            if number is not None:
                remove_newer(open_reader(place), number)
            offline = self._load(place, device, cfg.policy.offline_buffer_capacity)
        if self._online is not None:
            self._online.offline = offline
            offline.is_saved_by_other = True
        return offline


def _find_checkpoint_to_resume(cfg: Any, name: str) -> Path | None:
    """Return the path of the checkpoint to resume from, or None if there is none or the run does not resume."""
    place = find_checkpoint(Path(cfg.output_dir) / name)
    return place if cfg.resume and place.exists() else None


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


def _find_original(learner: Any, name: str) -> Any:
    """Return LeRobot's own function, also if `install` has replaced it already."""
    function = getattr(learner, name)
    return getattr(function, "__wrapped__", function)


def _wrap_original(replacement: Callable[[Any, Any, Any], LearnerBuffer], original: Any) -> Any:
    @wraps(original)
    def initialize(cfg: Any, device: Any, storage_device: Any) -> Any:
        return replacement(cfg, device, storage_device)

    return initialize
