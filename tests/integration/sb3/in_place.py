"""A pytest plugin that replaces the buffers of Stable-Baselines3 and sb3-contrib by holdall's.

Their own tests are run with `-p tests.integration.sb3.in_place`; see test_their_own_tests.py.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import stable_baselines3
from sb3_contrib.common.maskable import buffers as maskable
from sb3_contrib.common.recurrent import buffers as recurrent
from stable_baselines3.common import buffers
from stable_baselines3.her import her_replay_buffer

import holdall.sb3
import holdall.sb3.contrib


class DictReplayBuffer(holdall.sb3.ReplayBuffer):
    """holdall has one class for Box and Dict observations. Stable-Baselines3's tests use two."""


class NStepReplayBuffer(holdall.sb3.ReplayBuffer):
    """holdall's `ReplayBuffer` has an argument for n-step returns. Stable-Baselines3's tests use this class."""

    def __init__(self, *args: Any, n_steps: int = 3, **settings: Any) -> None:
        super().__init__(*args, n_steps=n_steps, **settings)


class DictRolloutBuffer(holdall.sb3.RolloutBuffer):
    """See `DictReplayBuffer`."""


IN_PLACE: dict[types.ModuleType, dict[str, type]] = {
    buffers: {
        "ReplayBuffer": holdall.sb3.ReplayBuffer,
        "DictReplayBuffer": DictReplayBuffer,
        "NStepReplayBuffer": NStepReplayBuffer,
        "RolloutBuffer": holdall.sb3.RolloutBuffer,
        "DictRolloutBuffer": DictRolloutBuffer,
    },
    her_replay_buffer: {"HerReplayBuffer": holdall.sb3.HerReplayBuffer},
    maskable: {
        name: getattr(holdall.sb3.contrib, name) for name in ("MaskableRolloutBuffer", "MaskableDictRolloutBuffer")
    },
    recurrent: {
        name: getattr(holdall.sb3.contrib, name) for name in ("RecurrentRolloutBuffer", "RecurrentDictRolloutBuffer")
    },
}


def replace_classes() -> None:
    """Replace the classes in every module that imported them, and in the modules that tests import them from.

    The original modules do not change, because holdall's classes inherit from their classes.
    """
    importlib.import_module("sb3_contrib")
    users = [
        module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in {"stable_baselines3", "sb3_contrib"} and module not in IN_PLACE
    ]
    for home, classes in IN_PLACE.items():
        for name, ours in classes.items():
            theirs = getattr(home, name)
            for module in users:
                if module.__dict__.get(name) is theirs:
                    setattr(module, name, ours)
        shown = types.ModuleType(home.__name__)
        shown.__dict__.update(home.__dict__ | classes)
        package, _, last = home.__name__.rpartition(".")
        sys.modules[home.__name__] = shown
        setattr(sys.modules[package], last, shown)
    assert stable_baselines3.HerReplayBuffer is holdall.sb3.HerReplayBuffer


replace_classes()
