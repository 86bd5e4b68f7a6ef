"""Runs LeRobot's own tests of its replay buffer, with holdall's class in place of LeRobot's.

    python benchmarks/lerobot_tests.py FOLDER            # a checkout of LeRobot, for its tests; lerobot is installed
    python benchmarks/lerobot_tests.py FOLDER --plain    # the same tests of LeRobot's own class

torchvision has no build for every machine. Where it cannot be imported, an empty module takes its place, which has what
datasets of images need. `test_memory_optimization` does not apply, because it counts the tensors in the attributes of
two buffers, and holdall's buffers have none.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TESTS = "tests/utils/test_replay_buffer.py"
NOT_APPLICABLE = "test_memory_optimization"


class _ToTensor:
    """torchvision's conversion of a PIL image."""

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class _EmptyModule(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ToTensor if name == "ToTensor" else type(name, (torch.nn.Module,), {})


class _EmptyTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all of its modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def stand_in_for_torchvision() -> None:
    """Make imports of torchvision succeed."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        print("torchvision cannot be imported here; an empty module takes its place", file=sys.stderr)
        sys.meta_path.insert(0, _EmptyTorchvision())


def main() -> int:
    """Run the tests. Return their exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of LeRobot of the version that is installed")
    parser.add_argument("--plain", action="store_true", help="test LeRobot's own class")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    stand_in_for_torchvision()
    try:
        buffer: Any = importlib.import_module("lerobot.rl.buffer")
    except ImportError as error:
        print(f"skipped: LeRobot cannot be imported ({error})", file=sys.stderr)
        return 0
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", *arguments.pytest]
    if not arguments.plain:
        buffer.ReplayBuffer = importlib.import_module("holdall.lerobot").ReplayBuffer
        options += ["--deselect", f"{TESTS}::{NOT_APPLICABLE}"]
    os.chdir(arguments.folder)
    sys.path.insert(0, str(arguments.folder))
    return int(pytest.main([TESTS, *options]))


if __name__ == "__main__":
    sys.exit(main())
