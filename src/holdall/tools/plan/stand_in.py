"""A stand-in for a training script: it builds the model that some settings describe, and calls `learn`.

`holdall plan --algo sac --obs ...` and `holdall plan run.toml` run this module as a command and probe it, exactly as
they would probe a script. Without an environment, observations are noise, which cannot be compressed.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan.algorithms import ALGORITHM_CLASSES, ALGORITHMS, DEFAULT_BUFFER_SIZE, Algorithm
from holdall.tools.plan.config import read_observation
from holdall.tools.plan.environments import has_images, make_env, parse_space, space_from_dict, space_to_dict
from holdall.tools.plan.settings import SETTINGS, check_values

_MAX_ROWS = 10_000
"""Transitions of the stand-in's replay buffer, and steps of its rollouts. The plan scales them to the real size."""
_ENDLESS = 10**12
"""Steps of a run without `total_timesteps`."""
_NOISE_NOTE = (
    "The observations are made up. They are noise, which cannot be compressed, so holdall's part is an upper bound. "
    "The environment itself is not counted. To measure both, pass --env, or run your script: "
    "holdall plan -- python train.py"
)
_MAX_ENVS = 2**20
_NOT_ARGUMENTS = ("space", "size")
"""Kinds of settings that `build_model` does not get as they were written."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Arguments of a stand-in with a small buffer, and the changes that give the plan the real sizes."""

    arguments: dict[str, Any]
    changes: dict[str, int]
    name: str
    notes: tuple[str, ...]
    is_noise: bool
    """Whether the observations are made up, because no environment is named."""


def describe_run(settings: Mapping[str, Any]) -> StandIn:
    """Check settings, and return the stand-in for them."""
    given = {name: value for name, value in settings.items() if value is not None}
    algo = str(given.get("algo", "")).lower()
    algorithm = _find_algorithm(algo)
    if algorithm.on_policy and "capacity" in given:
        raise ArgumentError(
            f"capacity ({given['capacity']}) is that of a replay buffer, and {algo} has none. It collects rollouts of "
            "--n-steps for each environment."
        )
    values = check_values(given | {"algo": algo})
    _check_device(values.get("device", "cpu"))
    num_envs = values.get("num_envs", 1)
    if num_envs > _MAX_ENVS:
        raise ArgumentError(f"num_envs ({num_envs:,}) must be at most {_MAX_ENVS:,}.")
    arguments = {name: value for name, value in values.items() if SETTINGS[name].kind not in _NOT_ARGUMENTS}
    notes = []
    if "env" not in arguments:
        observation, action = _read_spaces(given)
        arguments |= {"observation": space_to_dict(observation), "action": space_to_dict(action)}
        notes.append(_NOISE_NOTE)
    changes = {"num_envs": num_envs}
    if algorithm.on_policy:
        steps = values.get("n_steps", algorithm.n_steps)
        batch_rows = -(-values.get("batch_size", algorithm.batch_size or 1) // num_envs)
        arguments["n_steps"] = min(steps, max(_MAX_ROWS, batch_rows))
        changes["n_steps"] = steps
    else:
        capacity = values.get("capacity", DEFAULT_BUFFER_SIZE)
        arguments["capacity"] = min(capacity, max(_MAX_ROWS, 2 * num_envs))
        changes["capacity"] = capacity
    return StandIn(arguments, changes, values.get("name", ""), tuple(notes), "env" not in arguments)


def _find_algorithm(algo: str) -> Algorithm:
    if algo in ALGORITHMS:
        return ALGORITHMS[algo]
    known = ", ".join(ALGORITHMS)
    if algo in {name.lower() for name in ALGORITHM_CLASSES}:
        raise ArgumentError(
            f"algo ({algo}) has a buffer class of its own. Plan its script: holdall plan -- python train.py. "
            f"Without a script, --algo can be {known}."
        )
    raise ArgumentError(f"algo ({algo or None}) must be one of {known}. Name it with --algo.")


def _read_spaces(given: Mapping[str, Any]) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the spaces of observations and actions that were written as text."""
    if "obs" not in given:
        raise ArgumentError("obs is missing. Write --obs 84x84x4:uint8, or name the environment with --env.")
    if "action" not in given:
        raise ArgumentError("action is missing. Write --action 8 or --action 'discrete(4)', or name an --env.")
    action = parse_space(str(given["action"]), "action")
    if isinstance(action, spaces.Box):  # Algorithms refuse actions without finite bounds.
        action = spaces.Box(-1.0, 1.0, action.shape, np.float32)
    return read_observation(given["obs"]), action


def _check_device(device: str) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise ArgumentError(f"device ({device!r}) must be 'cpu', 'cuda', 'cuda:0', 'mps' or 'auto'.")


class NoiseEnv(gym.Env[Any, Any]):
    """An environment with the given spaces whose observations are noise."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return noise."""
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return noise, and never end."""
        return self.observation_space.sample(), 0.0, False, False, {}


def build_model(arguments: Mapping[str, Any]) -> Any:
    """Return the model that the arguments describe."""
    algorithm = ALGORITHMS[arguments["algo"]]
    env = _build_env(arguments)
    options: dict[str, Any] = {"device": _choose_device(arguments.get("device", "auto"))}
    if "capacity" in arguments:
        options["buffer_size"] = arguments["capacity"]
    if "n_steps" in arguments:
        options["n_steps"] = arguments["n_steps"]
    if "policy_kwargs" in arguments:
        options["policy_kwargs"] = _read_policy_kwargs(arguments["policy_kwargs"])
    if "batch_size" in arguments and algorithm.batch_size is not None:
        options["batch_size"] = arguments["batch_size"]
    if arguments.get("uses_holdall"):
        adapter = importlib.import_module("holdall.sb3")
        kind = "rollout" if algorithm.on_policy else "replay"
        options[f"{kind}_buffer_class"] = adapter.RolloutBuffer if algorithm.on_policy else adapter.ReplayBuffer
    algorithm_class = getattr(importlib.import_module(algorithm.package), algorithm.name)
    return algorithm_class(arguments.get("policy") or _choose_policy(env.observation_space), env, **options)


def _read_policy_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a policy. Classes of torch are written as their names."""
    torch = importlib.import_module("torch")
    kwargs = dict(given)
    for name, module in {"activation_fn": torch.nn, "optimizer_class": torch.optim}.items():
        if isinstance(kwargs.get(name), str):
            kwargs[name] = getattr(module, kwargs[name])
    return kwargs


def _choose_device(wanted: str) -> str:
    """Return the device, or the CPU where there is no GPU."""
    torch = importlib.import_module("torch")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        return "cpu"
    return wanted


def _choose_policy(observation: spaces.Space[Any]) -> str:
    if isinstance(observation, spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if has_images(observation) else "MlpPolicy"


def _build_env(arguments: Mapping[str, Any]) -> Any:
    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    monitor = importlib.import_module("stable_baselines3.common.monitor")
    makers = [partial(_make_env, dict(arguments), monitor.Monitor)] * arguments.get("num_envs", 1)
    if arguments.get("vec_env", "dummy") == "dummy":
        env = vec_env.DummyVecEnv(makers)
    else:
        env = vec_env.SubprocVecEnv(makers, start_method=arguments.get("start_method") or None)
    frames = arguments.get("frame_stack", 1)
    return env if frames == 1 else vec_env.VecFrameStack(env, frames)


def _make_env(arguments: dict[str, Any], wrap: Callable[[Any], Any]) -> Any:
    if "env" in arguments:
        return wrap(make_env(arguments["env"], arguments.get("wrapper", "")))
    return wrap(NoiseEnv(space_from_dict(arguments["observation"]), space_from_dict(arguments["action"])))


def main() -> None:
    """Build the model that the JSON in the first argument describes, and call `learn`."""
    arguments = json.loads(sys.argv[1])
    build_model(arguments).learn(arguments.get("total_timesteps", _ENDLESS))


if __name__ == "__main__":
    main()
