"""A live model's spec: what was constructed, read off the object.

In:  an algorithm of Stable-Baselines3.  Out: a `Spec`; the model is neither changed nor stepped.
"""

from __future__ import annotations

from typing import Any

from holdall.errors import ArgumentError
from holdall.plan.buffers import REPLAY_CLASSES, installed_version
from holdall.plan.spec import ALGORITHMS, Spec


def spec_of_model(model: Any) -> Spec:
    """Read a model's configuration."""
    algo = type(model).__name__.lower()
    if algo not in ALGORITHMS or not hasattr(model, "observation_space"):
        names = ", ".join(algorithm.class_name for algorithm in ALGORITHMS.values())
        raise ArgumentError(f"model ({type(model).__name__}) is none that holdall plan knows: {names}")
    values: dict[str, Any] = {
        "observation": model.observation_space,
        "action": model.action_space,
        "num_envs": int(model.n_envs),
        "policy": _policy_name(model),
        "policy_kwargs": _plain(model.policy_kwargs),
        "device": model.device.type,
        "sb3": installed_version(),
    } | _vector_environment(model.get_env())
    if ALGORITHMS[algo].on_policy:
        values |= {"n_steps": int(model.n_steps), "batch_size": int(getattr(model, "batch_size", 0) or 0)}
    else:
        values |= _replay(model)
    return Spec(algo=algo, **values)


def _replay(model: Any) -> dict[str, Any]:
    buffer = type(model.replay_buffer)
    ours = buffer.__module__.partition(".")[0] == "holdall"
    # A subclass has the arrays of the class that it extends, as far as can be known from here.
    known = next((base.__name__ for base in buffer.__mro__ if base.__name__ in REPLAY_CLASSES), "")
    return {
        "capacity": int(model.buffer_size),
        "batch_size": int(model.batch_size),
        "buffer_class": "" if ours else known,
        "uses_holdall": ours,
        "optimize_memory_usage": bool(model.optimize_memory_usage) and not ours,
        "handle_timeout_termination": bool(getattr(model.replay_buffer, "handle_timeout_termination", True)),
    }


def _vector_environment(env: Any) -> dict[str, Any]:
    """Look through the wrappers for how environments run, and for a stack of frames."""
    found: dict[str, Any] = {"vec_env": "dummy"}
    while env is not None:
        if type(env).__name__ == "SubprocVecEnv":
            method = getattr(getattr(env, "processes", [None])[0], "_start_method", None) or ""
            found |= {"vec_env": "subproc", "start_method": method}
        if type(env).__name__ == "VecFrameStack":
            found["frame_stack"] = int(env.stacked_obs.n_stack if hasattr(env, "stacked_obs") else env.n_stack)
        env = getattr(env, "venv", None)
    return found


def _policy_name(model: Any) -> str:
    names = {policy: name for name, policy in type(model).policy_aliases.items()}
    return str(names.get(model.policy_class, ""))


def _plain(policy_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keep what is data, and the names of torch's classes; the rest cannot travel to another process."""
    kept = {}
    for name, value in policy_kwargs.items():
        if name == "use_sde":
            continue
        if isinstance(value, type) and value.__module__.startswith("torch."):
            kept[name] = value.__name__
        elif _is_data(value):
            kept[name] = value
    return kept


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_data(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_data(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
