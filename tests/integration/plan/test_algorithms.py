"""The table of defaults is that of the installed Stable-Baselines3."""

import inspect

import pytest

from holdall.tools.plan.spec import ALGORITHM_CLASSES

sb3 = pytest.importorskip("stable_baselines3")


@pytest.mark.parametrize("name", ["A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"])
def test_defaults_are_the_librarys(name: str) -> None:
    algorithm = ALGORITHM_CLASSES[name]
    parameters = list(inspect.signature(getattr(sb3, name).__init__).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert dict(algorithm.defaults) == {key: defaults[key] for key in algorithm.defaults}
