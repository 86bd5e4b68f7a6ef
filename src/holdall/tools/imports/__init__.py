"""Import of data sets that other libraries recorded, for `holdall checkpoint import`.

    recording   the protocol of readers, and the import of a reader's steps into a memory
    lerobot     LeRobotDataset, versions 2.0, 2.1 and 3.0, on disk
    robomimic   HDF5 files of robomimic

A data set is read a few hundred steps at a time. Compressed blocks are moved to a temporary folder next to the
checkpoint, so the memory in use depends on the size of a step, not on the size of the data set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdall.tools.imports.lerobot import LeRobotRecording
from holdall.tools.imports.recording import OnProgress, RecordedSteps, import_recording
from holdall.tools.imports.robomimic import RobomimicRecording

READERS: dict[str, Callable[[Path], RecordedSteps]] = {"lerobot": LeRobotRecording, "robomimic": RobomimicRecording}
"""Readers by the word before the colon of `holdall checkpoint import lerobot:PATH`."""

__all__ = ["READERS", "OnProgress", "RecordedSteps", "import_recording"]
