"""Models, callbacks and optimizers among the live objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .arrays import count_bytes
from .environments import describe_environment, describe_space, walk_environments
from .heap import LiveHeap
from .objects import get_attributes, name_class, name_class_of, read_settings
from .snapshot import FoundCallback, FoundModel, FoundOptimizer


def get_model_buffer(model: Any) -> Any:
    """Return the replay or rollout buffer of a model of Stable-Baselines3."""
    attributes = get_attributes(model)
    buffer = attributes.get("replay_buffer")
    return attributes.get("rollout_buffer") if buffer is None else buffer


def describe_model(model: Any, objects: LiveHeap, context: Mapping[str, Any]) -> FoundModel:
    """Describe a model of Stable-Baselines3."""
    attributes = get_attributes(model)
    policy: Any = attributes.get("policy")
    parameter_bytes = 0
    with contextlib.suppress(Exception):
        for parameter in policy.parameters():
            parameter_bytes += count_bytes(parameter)
            objects.claim(parameter)
    buffer = get_model_buffer(model)
    env = attributes.get("env")
    total_timesteps = context.get("total_timesteps")
    is_stopped_here = context.get("model") is model
    settings = read_settings(attributes)
    settings["policy_class"] = name_class(attributes.get("policy_class"))
    for name in ("replay_buffer_class", "rollout_buffer_class"):
        if isinstance(attributes.get(name), type):
            settings[name] = name_class(attributes[name])
    return FoundModel(
        class_name=name_class_of(model),
        policy_class=name_class(attributes.get("policy_class")),
        settings=settings,
        n_envs=int(attributes.get("n_envs") or 1),
        device=str(getattr(attributes.get("device"), "type", attributes.get("device"))),
        observation_space=describe_space(attributes.get("observation_space")),
        action_space=describe_space(attributes.get("action_space")),
        total_timesteps=int(total_timesteps) if is_stopped_here and total_timesteps is not None else None,
        parameter_bytes=parameter_bytes,
        buffer_owner="" if buffer is None else objects.find_name(buffer),
        base_class=_find_library_class(type(model)),
        environment=None if env is None else describe_environment(env),
        is_on_policy="rollout_buffer" in attributes,
    )


def _find_library_class(cls: type) -> str:
    """Return the first class of Stable-Baselines3 or sb3-contrib in the method resolution order."""
    names = (name_class(base) for base in cls.__mro__)
    return next((name for name in names if name.startswith(("stable_baselines3.", "sb3_contrib."))), "")


def find_callbacks(objects: LiveHeap, passed: Any) -> Iterator[FoundCallback]:
    """Describe all callbacks. `passed` is the argument of `learn`, which may contain some of them."""
    trained = {id(env) for model in objects.models for env in walk_environments(get_attributes(model).get("env"))}
    reached: dict[int, Any] = {}
    waiting = list(passed) if isinstance(passed, (list, tuple)) else [passed]
    while waiting:
        callback = waiting.pop()
        if callback is None or id(callback) in reached:
            continue
        reached[id(callback)] = callback
        attributes = get_attributes(callback)
        waiting += attributes.get("callbacks", None) or []
        waiting += [attributes.get(name) for name in ("callback", "callback_after_eval", "callback_on_new_best")]
    others = [callback for callback in objects.callbacks if id(callback) not in reached]
    for callback in (*reached.values(), *others):
        attributes = get_attributes(callback)
        shares_env = any(id(env) in trained for env in walk_environments(attributes.get("eval_env")))
        yield FoundCallback(name_class_of(callback), read_settings(attributes), id(callback) in reached, shares_env)


def describe_optimizer(optimizer: Any) -> FoundOptimizer:
    """Describe an optimizer of torch."""
    parameter_bytes = 0
    state_bytes = 0
    with contextlib.suppress(Exception):
        for group in optimizer.param_groups:
            parameter_bytes += sum(count_bytes(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            state_bytes += sum(count_bytes(value) for value in state.values() if hasattr(value, "untyped_storage"))
    return FoundOptimizer(name_class_of(optimizer), parameter_bytes, state_bytes)
