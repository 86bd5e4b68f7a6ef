"""Spaces: as programs construct them, as environments of known ids have them, and their attributes.

Ids are looked up in environments.json, which benchmarks/lint_environments.py makes from the installed packages.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from math import prod
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Reference, SpaceInfo, whole
from holdall.tools.lint.source.arrays import dtype_of, shape_of, space_sample
from holdall.tools.lint.source.values import (
    BoundMethod,
    TableValue,
    known_items,
    length_of,
    likely,
)
from holdall.tools.plan.environments import parse_observation, parse_space
from holdall.tools.plan.spec import leaves_of

SPACES = {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"}


_LEAST_PICTURE = 4096  # bytes: beside a picture, the numbers of which the shape is not known are few
_NOWHERE = SourceRange("", 0, 0, 0, 0)


_ALE = re.compile(r"^(?:ALE/)?(?P<game>[A-Za-z]+?)(?:-ram)?(?P<kind>NoFrameskip|Deterministic)?-v\d+$")


_CONSOLES = {
    "Genesis": "224x320", "Snes": "224x256", "Nes": "224x240", "Atari2600": "210x160",
    "GbAdvance": "160x240", "Sms": "192x256",
}  # fmt: skip
"""The screens of the games of retro, whose names end with the console's."""
_FAMILIES = {
    "MiniWorld-": "60x80x3:uint8 discrete(3)", "donkey-": "120x160x3:uint8 2", "Duckietown-": "480x640x3:uint8 2",
}  # fmt: skip
"""What all environments of a package show, by how their ids begin."""


def space_of(space: Any, argument: str, place: SourceRange) -> SpaceInfo | None:
    """Return a gymnasium space as leaves and bounds; None if Stable-Baselines3 cannot store it."""
    try:
        leaves = leaves_of(space, argument)
    except HoldallError:
        return None
    children: dict[str, Any] = dict(space.spaces) if hasattr(space, "spaces") else {"": space}
    bounds = {
        name: (float(child.low.min()), float(child.high.max()))
        for name, child in children.items()
        if hasattr(child, "low") and hasattr(child, "high") and child.low.size
    }
    counts = (
        tuple(int(one) for one in np.atleast_1d(getattr(space, "n", getattr(space, "nvec", ()))))
        if not hasattr(space, "spaces")
        else ()
    )
    return SpaceInfo(leaves, hasattr(space, "spaces"), place, bounds, counts)


@cache
def known_environments() -> dict[str, tuple[str, int | None]]:
    """Return the spaces of known ids, as text, and their time limits."""
    text = resources.files("holdall.tools.lint").joinpath("environments.json").read_text(encoding="utf-8")
    table = json.loads(text)
    return {name: (pair, table["steps"].get(name)) for pair, names in table["spaces"].items() for name in names.split()}


_MOST_VERSIONS = 8


def by_id(name: str) -> tuple[SpaceInfo | None, SpaceInfo | None, object]:
    """Return the spaces of a known environment, and its time limit."""
    plain = name.rpartition(":")[2]
    known = known_environments()
    found = known.get(plain)
    if found is None and (game := _ALE.match(plain)):
        alike = known.get(f"ALE/{game['game']}-v5") or known.get(f"{game['game']}NoFrameskip-v4")
        if alike and "-ram" in plain:
            alike = ("128:uint8 " + alike[0].rpartition(" ")[2], alike[1])
        found = alike
    if found is None:  # other versions of a game show the same pictures
        game_name = plain.rpartition("-v")[0]
        others = (known.get(f"{game_name}-v{version}") for version in range(_MOST_VERSIONS))
        found = next((one for one in others if one is not None and "x3:uint8" in one[0]), None)
    console = _CONSOLES.get(plain.rpartition("-")[2].partition("@")[0].removesuffix("-v0"))
    if found is None and console is not None:
        found = (f"{console}x3:uint8 multibinary(12)", None)
    found = found or next(((text, None) for start, text in _FAMILIES.items() if plain.startswith(start)), None)
    if found is None:
        return None, None, UNKNOWN
    observation, _, action = found[0].rpartition(" ")
    texts = observation.split("+") if "=" in observation else [observation]
    try:
        seen = space_of(parse_observation(texts, "obs"), "obs", _NOWHERE)
        acted = space_of(parse_space(action, "action"), "action", _NOWHERE)
    except HoldallError:
        return None, None, UNKNOWN
    return seen, acted, UNKNOWN if found[1] is None else found[1]


def make_space(interpreter: Any, kind: str, arguments: Any, node: ast.AST) -> Any:
    """Make a space of one of Gymnasium's classes."""
    place = interpreter.place_here(node)
    match kind:
        case "Box":
            return _box(arguments, place)
        case "Discrete":
            count = whole(arguments.get(0, "n"))
            return SpaceInfo((Leaf("", (), np.dtype(np.int64)),), False, place, {}, (count or 0,) if count else ())
        case "MultiBinary":
            shape = shape_of(arguments.get(0, "n"))
            if shape is None or any(whole(one) is None for one in shape):
                return UNKNOWN
            return SpaceInfo((Leaf("", tuple(map(int, shape)), np.dtype(np.int8)),), False, place)
        case "MultiDiscrete":
            counts = arguments.get(0, "nvec")
            length = length_of(counts)
            values = tuple(whole(one) or 0 for one in known_items(counts) or ())
            return (
                UNKNOWN
                if length is None
                else SpaceInfo((Leaf("", (length,), np.dtype(np.int64)),), False, place, {}, values)
            )
        case "Dict":
            return _dict(arguments, place)
    return UNKNOWN


def _box(arguments: Any, place: SourceRange) -> Any:
    low, high = arguments.get(0, "low"), arguments.get(1, "high")
    dtype = dtype_of(likely(arguments.get(3, "dtype", Reference("numpy.float32"))))
    given = likely(arguments.get(2, "shape", None))
    shape = shape_of(given)
    if given is None:
        bound = next((one for one in (low, high) if getattr(one, "shape", None) is not None), None)
        shape = None if bound is None else bound.shape
    axes = [whole(one) for one in shape or ()]
    if dtype is None or shape is None or any(axis is None or axis < 0 for axis in axes):
        return UNKNOWN
    leaf = Leaf("", tuple(axis for axis in axes if axis is not None), dtype)
    return SpaceInfo((leaf,), False, place, {"": (_number(low), _number(high))})


def _number(value: Any) -> object:
    return value if isinstance(value, int | float) else UNKNOWN


def _dict(arguments: Any, place: SourceRange) -> Any:
    given = arguments.get(0, "spaces", None)
    entries: dict[Any, Any] = {}
    if isinstance(given, TableValue) and given.is_complete:
        entries |= given
    elif isinstance(given, SpaceInfo) or given not in (None,):
        items = known_items(given)
        if items is None or not all(isinstance(one, tuple) and len(one) == 2 for one in items):
            return UNKNOWN
        entries |= dict(items)
    entries |= {name: value for name, value in arguments.named.items() if name not in {"spaces", "seed"}}
    leaves: list[Leaf] = []
    bounds: dict[str, tuple[object, object]] = {}
    is_whole = True
    for name, child in entries.items():
        inner = likely(child)
        if inner is UNKNOWN and isinstance(name, str):
            is_whole = False
            continue
        if not isinstance(inner, SpaceInfo) or inner.is_dict or not isinstance(name, str):
            return UNKNOWN
        leaves.append(Leaf(name, inner.leaves[0].shape, inner.leaves[0].dtype))
        bounds |= {name: inner.bounds[""]} if inner.bounds else {}
    if (
        not leaves
        or not arguments.is_complete
        or (not is_whole and max(leaf.nbytes for leaf in leaves) < _LEAST_PICTURE)
    ):
        return UNKNOWN
    return SpaceInfo(tuple(leaves), True, place, bounds, is_whole=is_whole)


def space_member(space: SpaceInfo, name: str) -> Any:
    """Return an attribute of a space."""
    leaf = space.leaves[0] if space.leaves and not space.is_dict else None
    match name:
        case "shape" if leaf is not None:
            return leaf.shape
        case "dtype" if leaf is not None:
            return Reference(f"numpy.{leaf.dtype.name}")
        case "n" if leaf is not None:
            return space.counts[0] if len(space.counts) == 1 else UNKNOWN
        case "nvec" if leaf is not None:
            return space.counts or UNKNOWN
        case "low" | "high" if leaf is not None:
            return space_sample(replace(space, is_dict=False), name)
        case "spaces" if space.is_dict:
            return TableValue((one.name, child(space, one.name)) for one in space.leaves)
    return BoundMethod(space, name)


def child(space: SpaceInfo, name: str) -> SpaceInfo:
    """Return one of the spaces of a Dict."""
    leaf = next(one for one in space.leaves if one.name == name)
    bounds = {"": space.bounds[name]} if name in space.bounds else {}
    return SpaceInfo((replace(leaf, name=""),), False, space.place, bounds)


def item(base: Any, index: Any) -> Any:
    """Return `space[key]`."""
    if isinstance(base, SpaceInfo) and base.is_dict and isinstance(index, str):
        return child(base, index) if any(one.name == index for one in base.leaves) else UNKNOWN
    return UNKNOWN


def flat_size(space: SpaceInfo) -> int:
    """Return how many numbers a flattened value has."""
    return sum(prod(leaf.shape) for leaf in space.leaves)
