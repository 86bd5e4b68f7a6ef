"""Environments among the live objects: wrappers, lanes, spaces and bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .arrays import MAX_DEPTH, MAX_SAMPLED_ITEMS, count_deep
from .heap import LiveHeap
from .objects import get_attributes, get_count, name_class_of, read_settings
from .snapshot import FoundEnvironment, Plain


def walk_environments(env: Any) -> Iterator[Any]:
    """Yield an environment and all environments inside it."""
    waiting = [env]
    while waiting:
        part = waiting.pop()
        if part is not None:
            yield part
            waiting += _get_inner_environments(part)


def find_environments(objects: LiveHeap) -> Iterator[FoundEnvironment]:
    """Describe the outermost environments: those that no other environment contains."""
    inner: set[int] = set()
    for env in objects.environments:
        for part in _get_inner_environments(env):
            inner.add(id(part))
    for env in objects.environments:
        if id(env) not in inner:
            yield describe_environment(env)


def _get_inner_environments(env: Any) -> list[Any]:
    attributes = get_attributes(env)
    parts = [attributes.get(name) for name in ("env", "venv")]
    envs = attributes.get("envs")
    parts += list(envs) if isinstance(envs, (list, tuple)) else []
    return [part for part in parts if part is not None]


def describe_environment(env: Any) -> FoundEnvironment:
    """Describe an environment with its wrappers."""
    names: list[str] = []
    settings: Plain = {}
    start_method = ""
    env_id = ""
    n_envs = 1
    observation_space = None
    action_space = None
    part = env
    while part is not None and len(names) < 64:
        attributes = get_attributes(part)
        names.append(name_class_of(part))
        settings = read_settings(attributes) | settings
        stacked = attributes.get("stacked_obs")
        if stacked is not None and "n_stack" not in settings:
            settings["n_stack"] = getattr(stacked, "n_stack", None) or getattr(stacked, "stack_size", None)
        n_envs = max(n_envs, get_count(attributes, ("num_envs",)) or 1)
        processes = attributes.get("processes")
        if isinstance(processes, list) and processes:
            start_method = getattr(processes[0], "_start_method", None) or "fork"
        spec = attributes.get("spec") or attributes.get("_spec")
        env_id = env_id or str(getattr(spec, "id", "") or "")
        observation_space = observation_space or _get_space(attributes, "observation_space")
        action_space = action_space or _get_space(attributes, "action_space")
        part = next(iter(_get_inner_environments(part)), None)
    return FoundEnvironment(
        class_names=tuple(names),
        env_id=env_id,
        n_envs=n_envs,
        observation_space=describe_space(observation_space),
        action_space=describe_space(action_space),
        settings=settings,
        start_method=start_method,
        nbytes_each=0 if start_method else _count_environment_bytes(env),
    )


def _count_environment_bytes(env: Any) -> int:
    """Return the bytes of Python objects and arrays of one environment in `env`. Shared objects count once."""
    lanes = [env]
    for part in walk_environments(env):
        envs = get_attributes(part).get("envs")
        if isinstance(envs, (list, tuple)) and envs:
            lanes = list(envs)
    # Wrappers contain the environment several attributes deep. With a negative depth, the count reaches it.
    seen: set[int] = set()
    sizes = [count_deep(lane, seen, -MAX_DEPTH) for lane in lanes[:MAX_SAMPLED_ITEMS]]
    return sizes[0] if len(sizes) == 1 else sum(sizes[1:]) // (len(sizes) - 1)


def _get_space(attributes: Mapping[str, Any], name: str) -> Any:
    return attributes.get(f"single_{name}") or attributes.get(name) or attributes.get(f"_{name}")


def describe_space(space: Any) -> Plain | None:
    """Describe a space of gymnasium as plain data. Return None for an unknown space."""
    kind = type(space).__name__.lower()
    if space is None:
        return None
    with contextlib.suppress(Exception):
        if kind == "box":
            low = float(space.low.min()) if space.low.size else 0.0
            high = float(space.high.max()) if space.high.size else 0.0
            return {
                "kind": "box",
                "shape": [int(side) for side in space.shape],
                "dtype": str(space.dtype),
                "low": low if abs(low) < float("inf") else None,
                "high": high if abs(high) < float("inf") else None,
            }
        if kind == "discrete":
            return {"kind": kind, "counts": [int(space.n)], "dtype": str(space.dtype)}
        if kind == "multidiscrete":
            return {"kind": kind, "counts": [int(n) for n in space.nvec.ravel()], "dtype": str(space.dtype)}
        if kind == "multibinary":
            return {"kind": kind, "counts": [int(side) for side in space.shape]}
        if kind == "dict":
            children = {str(name): describe_space(child) for name, child in space.spaces.items()}
            return {"kind": "dict", "spaces": children}
        if kind == "tuple":
            return {"kind": "tuple", "spaces": [describe_space(child) for child in space.spaces]}
    return None
