"""SBX, which is Stable-Baselines3 with JAX, learns the same weights with holdall's buffer as with its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[3] / ".cache" / "sbx"

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import jax, numpy as np
from sbx import DQN, SAC
from holdall.sb3 import ReplayBuffer

def train(algorithm, environment, **settings):
    model = algorithm("MlpPolicy", environment, seed=0, learning_starts=100, buffer_size=1000, **settings)
    return model.learn(300)

for algorithm, environment in ((SAC, "Pendulum-v1"), (DQN, "CartPole-v1")):
    plain = train(algorithm, environment)
    ours = train(algorithm, environment, replay_buffer_class=ReplayBuffer)
    assert type(ours.replay_buffer) is ReplayBuffer
    pairs = zip(*(jax.tree_util.tree_leaves(model.policy.qf_state.params) for model in (plain, ours)), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs), algorithm.__name__
print("the same weights")
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_sbx_learns_the_same_weights() -> None:
    """SBX runs in another process: JAX starts threads, and a process with threads must not fork."""
    if not (FETCHED / ".stamp").exists():
        pytest.skip("needs SBX, which `make nightly` fetches where there is a network")
    surroundings = os.environ | {"PYTHONPATH": str(FETCHED / "site"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same weights\n")
