"""The table of defaults is that of the installed Stable-Baselines3."""

import inspect

import pytest

from holdall.tools.plan.algorithms import ALGORITHM_CLASSES, DEFAULT_BUFFER_SIZE

sb3 = pytest.importorskip("stable_baselines3")


@pytest.mark.parametrize("name", ["A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"])
def test_defaults_are_the_librarys(name: str) -> None:
    algorithm = ALGORITHM_CLASSES[name]
    parameters = list(inspect.signature(getattr(sb3, name).__init__).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert defaults.get("batch_size") == algorithm.batch_size
    assert defaults["n_steps"] == algorithm.n_steps
    assert defaults.get("buffer_size") == (None if algorithm.on_policy else DEFAULT_BUFFER_SIZE)
