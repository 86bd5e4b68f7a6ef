"""holdall.zoo: importing this module makes every algorithm of rl-zoo train with holdall's buffers.

`python -m rl_zoo3.train --algo dqn --env PongNoFrameskip-v4 --gym-packages holdall.zoo`

Importing this module replaces the algorithms in rl_zoo3's table by subclasses that choose holdall's buffers.
Hyperparameters and files do not change, and one seed gives the same weights as without this module. `enjoy` and `load`
read the trained models without this module.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from holdall.errors import MissingPackageError

try:
    from rl_zoo3 import ALGOS
    from sb3_contrib import RecurrentPPO
except ImportError as error:
    raise MissingPackageError("holdall.zoo needs rl-zoo; run \"pip install 'holdall[zoo]'\"") from error

from stable_baselines3 import HerReplayBuffer as PlainHerReplayBuffer
from stable_baselines3.common import buffers
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from holdall.sb3 import HerReplayBuffer, ReplayBuffer, RolloutBuffer
from holdall.sb3.contrib import equip
from holdall.sb3.prioritized import use_buffer_class

_N_STEP = getattr(buffers, "NStepReplayBuffer", buffers.ReplayBuffer)  # New in Stable-Baselines3 2.7.
_REPLAYS = (buffers.ReplayBuffer, buffers.DictReplayBuffer, _N_STEP)
_ROLLOUTS = (buffers.RolloutBuffer, buffers.DictRolloutBuffer)
_TIERS = ("budget", "prefer", "spill_dir")


class ReplayInHoldall(OffPolicyAlgorithm):
    """Mix-in that uses holdall's buffers instead of Stable-Baselines3's. A user's own buffer class is kept."""

    def _setup_model(self) -> None:
        kind = self.replay_buffer_class
        choice: Any = nullcontext()
        if kind is PlainHerReplayBuffer:
            self.replay_buffer_class = HerReplayBuffer
        elif kind is None or kind in (*_REPLAYS, ReplayBuffer):
            choice = use_buffer_class(self, ReplayBuffer)
        with choice:
            super()._setup_model()

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Load a buffer. A buffer of Stable-Baselines3 is converted to one of holdall."""
        super().load_replay_buffer(path, truncate_last_traj)
        loaded: Any = self.replay_buffer
        if type(loaded) in (*_REPLAYS, PlainHerReplayBuffer):
            kind: Any = HerReplayBuffer if type(loaded) is PlainHerReplayBuffer else ReplayBuffer
            tiers = {name: value for name, value in self.replay_buffer_kwargs.items() if name in _TIERS}
            self.replay_buffer = kind.copy_of(loaded, **tiers)


class RolloutInHoldall(OnPolicyAlgorithm):
    """Mix-in that uses holdall's rollout buffers instead of Stable-Baselines3's."""

    def _setup_model(self) -> None:
        if self.rollout_buffer_class is None or self.rollout_buffer_class in _ROLLOUTS:
            self.rollout_buffer_class = RolloutBuffer
        super()._setup_model()
        if isinstance(self, RecurrentPPO):
            equip(self)


def _use_holdall(algorithm: type[BaseAlgorithm]) -> type[BaseAlgorithm]:
    """Return an algorithm that uses holdall's buffers. ARS has no buffer, and is returned unchanged."""
    for family, mix_in in ((OffPolicyAlgorithm, ReplayInHoldall), (OnPolicyAlgorithm, RolloutInHoldall)):
        if issubclass(algorithm, family):
            # The class keeps the algorithm's name, because checkpoints store it.
            return type(algorithm.__name__, (mix_in, algorithm), {"__module__": algorithm.__module__})
    return algorithm


ALGOS.update({name: _use_holdall(algorithm) for name, algorithm in ALGOS.items()})
