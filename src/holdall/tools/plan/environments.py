"""Spaces as text and as plain data, and environments by their name.

In:  spaces as users write them, such as `84x84x3:uint8` or `discrete(4)`; ids of gymnasium, or `module:Class`.
Out: gymnasium spaces, dicts of plain numbers that another process reads as JSON, and environments.
`space_from_dict(space_to_dict(space))` keeps the shapes, dtypes and bounds that memory depends on. Text is never
evaluated. Importing this module imports neither torch nor Stable-Baselines3.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.probe.environments import describe_space

_BOX = re.compile(r"(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>[a-z]+\d*))?")
_COUNTED_SPACE = re.compile(r"(?P<kind>discrete|multibinary|multidiscrete)\((?P<counts>\d+(?:\s*,\s*\d+)*)\)")
_FORMS = "84x84x3:uint8, 31 (float32), discrete(4), multibinary(6) or multidiscrete(3,4)"
_MAX_ELEMENTS = 2**26
"""Shapes with more elements are taken for typing errors. gymnasium would allocate four arrays of such a shape."""


def parse_space(text: str, argument: str) -> spaces.Space[Any]:
    """Read one space."""
    if found := _COUNTED_SPACE.fullmatch(text.strip().lower()):
        counts = [int(count) for count in found["counts"].split(",")]
        return _make_counted_space(found["kind"], counts, f"{argument} ({text!r})")
    found = _BOX.fullmatch(text.strip().lower())
    if not found:
        raise ArgumentError(f"{argument} ({text!r}) is not a space. Write it like {_FORMS}.")
    shape = tuple(int(side) for side in found["shape"].split("x"))
    return _make_box(shape, found["dtype"] or "float32", f"{argument} ({text!r})")


def parse_observation(texts: Sequence[str], argument: str = "obs") -> spaces.Space[Any]:
    """Read one unnamed space, or the named spaces of a Dict: `image=84x84x3:uint8`."""
    named = [text.partition("=") for text in texts]
    if not named:
        raise ArgumentError(f"{argument} is missing. Write it like {_FORMS}, or name an environment.")
    if len(named) == 1 and not named[0][1]:
        return parse_space(texts[0], argument)
    children: dict[str, spaces.Space[Any]] = {}
    for name, equals, rest in named:
        if not equals or not name or name in children:
            raise ArgumentError(
                f"{argument} ({name + equals + rest!r}) has no name of its own. Each of several spaces needs one. "
                "Write NAME=SPACE."
            )
        children[name] = parse_space(rest, f"{argument} {name}")
    return spaces.Dict(children)


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain data."""
    data = describe_space(space)
    parts = data["spaces"].values() if data is not None and data["kind"] == "dict" else [data]
    if data is None or any(part is None or part["kind"] in {"dict", "tuple"} for part in parts):
        raise ArgumentError(
            f"space ({space}) cannot be stored by Stable-Baselines3. Use Box, Discrete, MultiBinary, MultiDiscrete "
            "or one Dict of these."
        )
    return data


def space_from_dict(data: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that `space_to_dict` described."""
    kind = data["kind"]
    if kind == "dict":
        return spaces.Dict({key: space_from_dict(child) for key, child in data["spaces"].items()})
    if kind == "box":
        low = -np.inf if data["low"] is None else data["low"]
        high = np.inf if data["high"] is None else data["high"]
        return _make_box(tuple(data["shape"]), data["dtype"], "space", low, high)
    return _make_counted_space(kind, list(data["counts"]), "space", data.get("dtype"))


def has_images(space: spaces.Space[Any]) -> bool:
    """Return whether Stable-Baselines3 uses a convolutional network for a part of the space."""
    if isinstance(space, spaces.Dict):
        return any(has_images(child) for child in space.spaces.values())
    return isinstance(space, spaces.Box) and _is_image(space)


def _is_image(space: spaces.Box) -> bool:
    if len(space.shape) != 3 or space.dtype != np.uint8:
        return False
    return bool((space.low == 0).all() and (space.high == 255).all())


def _make_box(
    shape: tuple[int, ...], dtype: str, label: str, low: float | None = None, high: float | None = None
) -> spaces.Box:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"{label} has no NumPy dtype {dtype!r}. Write uint8, float32 or another one.") from error
    if kind.kind not in "biuf" or 0 in shape or np.prod(shape, dtype=np.float64) > _MAX_ELEMENTS:
        raise ArgumentError(
            f"{label} must have a plain number dtype, sides of at least 1 and at most {_MAX_ELEMENTS:,} elements. "
            f"Write it like {_FORMS}."
        )
    if low is None or high is None:
        low, high = _get_bounds(kind)
    return spaces.Box(low, high, shape, kind.type)


def _get_bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return 0, 1
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _make_counted_space(kind: str, counts: list[int], label: str, dtype: str | None = None) -> spaces.Space[Any]:
    if not counts or min(counts) < 1:
        raise ArgumentError(f"{label} must have counts of at least 1. Write it like {_FORMS}.")
    if kind == "discrete" and len(counts) == 1:
        return spaces.Discrete(counts[0], dtype=np.dtype(dtype or "int64").type)
    if kind == "multidiscrete":
        return spaces.MultiDiscrete(counts, dtype=np.dtype(dtype or "int64").type)
    if kind == "multibinary":
        return spaces.MultiBinary(counts[0] if len(counts) == 1 else counts)
    raise ArgumentError(f"{label} must have exactly one count. Write it like {_FORMS}.")


def make_env(env_id: str, wrapper: str = "") -> Any:
    """Make one environment. `wrapper` is "atari" for Stable-Baselines3's AtariWrapper, or empty.

    Modules of the working directory are found after those of the libraries, so that a file such as `random.py` there
    does not replace a module of Python.
    """
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)
    module, _, name = env_id.rpartition(":")
    try:
        env_class = getattr(importlib.import_module(module), name, None) if module else None
        env: Any = env_class() if isinstance(env_class, type) else gym.make(env_id)
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(
            f"env ({env_id!r}) cannot be made here ({error}). Install its packages, or write module:Class for a class "
            "of your own."
        ) from error
    if wrapper != "atari":
        return env
    # Imported here, because this module also imports torch.
    return importlib.import_module("stable_baselines3.common.atari_wrappers").AtariWrapper(env)
