"""The tables of arguments and defaults are those of the installed Stable-Baselines3."""

import inspect

import pytest

from holdall.tools.lint.run import algorithm_by_import, algorithm_by_zoo_name
from holdall.tools.plan.spec import ALGORITHM_CLASSES

sb3 = pytest.importorskip("stable_baselines3")

INSTALLED = ["A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"]


@pytest.mark.parametrize("name", INSTALLED)
def test_defaults_and_leading_arguments_are_the_librarys(name: str) -> None:
    algorithm = ALGORITHM_CLASSES[name]
    parameters = list(inspect.signature(getattr(sb3, name).__init__).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert tuple(defaults)[: len(algorithm.positional)] == algorithm.positional
    assert dict(algorithm.defaults) == {key: defaults[key] for key in algorithm.defaults}


@pytest.mark.parametrize(
    ("dotted", "name"),
    [
        ("stable_baselines3.PPO", "PPO"),
        ("stable_baselines3.ppo.ppo.PPO", "PPO"),
        ("sb3_contrib.TQC", "TQC"),
        ("mine.PPO", None),
        ("stable_baselines3.common.policies", None),
        ("PPO", None),
    ],
)
def test_only_the_librarys_own_classes_are_known(dotted: str, name: str | None) -> None:
    found = algorithm_by_import(dotted)
    assert (found.name if found else None) == name


def test_files_of_the_zoo_are_known_by_their_names() -> None:
    assert [getattr(algorithm_by_zoo_name(word), "name", None) for word in ("ppo", "PPO", "ppo_lstm", "her")] == [
        "PPO",
        "PPO",
        "RecurrentPPO",
        None,
    ]
