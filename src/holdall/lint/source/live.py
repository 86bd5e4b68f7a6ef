"""A live model of Stable-Baselines3 as a run: every value is known.

In:  a model, and what `learn` will get.  Out: a Run. The framework is not imported here: a model brings it along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdall.errors import ArgumentError
from holdall.lint.algorithms import ALGORITHMS, Algorithm
from holdall.lint.finding import Place
from holdall.lint.run import Callback, Environments, Learn, Run, Setting
from holdall.lint.source.spaces import space_of
from holdall.lint.values import UNKNOWN, Reference

_VECTORS = {"DummyVecEnv": "dummy", "SubprocVecEnv": "subproc"}
_POLICIES = {
    "MultiInputActorCriticPolicy": "MultiInputPolicy",
    "ActorCriticCnnPolicy": "CnnPolicy",
    "ActorCriticPolicy": "MlpPolicy",
}


def read_model(model: Any, total_timesteps: int | None = None, callbacks: Iterable[Any] = ()) -> Run:
    """Describe a model."""
    algorithm = next((ALGORITHMS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in ALGORITHMS), None)
    if algorithm is None or not hasattr(model, "observation_space"):
        raise ArgumentError(
            f"model ({type(model).__name__}) must be a model of Stable-Baselines3: one of {', '.join(ALGORITHMS)}"
        )
    place = Place(f"live {type(model).__name__}", 0, 0, 0, 0)
    steps = UNKNOWN if total_timesteps is None else total_timesteps
    learn = Learn(Setting(steps, place), tuple(_callbacks(callbacks, place)), place)
    given = {name: Setting(value, place) for name, value in _arguments(model, algorithm)}
    return Run(type(model).__name__, algorithm, given, _environments(model, place), (learn,), place)


def _arguments(model: Any, algorithm: Algorithm) -> Iterator[tuple[str, object]]:
    for name in algorithm.defaults:
        value: Any = getattr(model, name, UNKNOWN)
        if name == "train_freq" and hasattr(value, "frequency"):
            value = (value.frequency, value.unit.value)
        elif name == "device":
            value = str(value)
        elif name.endswith("_class") and isinstance(value, type):
            value = _buffer_class(value)
        yield name, value
    policy = type(getattr(model, "policy", None)).__name__
    yield "policy", _POLICIES.get(policy, policy)


def _buffer_class(kind: type) -> object:
    """Return a buffer class as an argument would give it: None where it is the library's own choice."""
    own = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "RolloutBuffer", "DictRolloutBuffer")
    is_own = kind.__module__.startswith("stable_baselines3")
    return None if is_own and kind.__name__ in own else Reference(f"{kind.__module__}.{kind.__name__}")


def _environments(model: Any, place: Place) -> Environments:
    env = getattr(model, "env", None)
    vector = next((_VECTORS[name] for name in map(_name, _unwrapped(env)) if name in _VECTORS), "")
    return Environments(
        count=model.n_envs,
        vector=vector,
        observation=space_of(model.observation_space, "observation_space", place),
        action=space_of(model.action_space, "action_space", place),
        stack=next((_stack(layer) for layer in _unwrapped(env) if _name(layer) == "VecFrameStack"), 1),
        place=place,
        origin=None if env is None else id(env),
    )


def _name(layer: Any) -> str:
    return type(layer).__name__


def _stack(layer: Any) -> int:
    return int(getattr(getattr(layer, "stacked_obs", None), "n_stack", 1))


def _unwrapped(env: Any) -> Iterator[Any]:
    while env is not None:
        yield env
        env = getattr(env, "venv", None)


def _callbacks(callbacks: Iterable[Any], place: Place) -> Iterator[Callback]:
    for callback in callbacks:
        settings = {
            name: Setting(value, place)
            for name, value in vars(callback).items()
            if name in {"save_freq", "eval_freq", "save_replay_buffer"}
        }
        evaluated = getattr(callback, "eval_env", None)
        environments = None if evaluated is None else Environments(origin=id(evaluated))
        yield Callback(type(callback).__name__, settings, place, environments)
        yield from _callbacks(getattr(callback, "callbacks", ()), place)
