"""Spaces as a script writes them: `spaces.Box(0, 255, (84, 84, 3), np.uint8)`, and as gymnasium has them.

In:  an expression that makes a space, or a space.  Out: its leaves and bounds, or None where a part is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.lint.finding import Place
from holdall.lint.run import Space
from holdall.lint.source.evaluate import Evaluator
from holdall.lint.values import UNKNOWN, Reference, whole
from holdall.plan.buffers import leaves_of
from holdall.schema import Leaf

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_PACKAGES = ("gymnasium", "gym")

# AtariWrapper's own output; WarpFrame resizes to this by default.
ATARI_SHAPE = (84, 84, 1)


def box(name: str, shape: tuple[int, ...], dtype: str) -> Leaf:
    """Return a leaf by its dtype's name."""
    return Leaf(name, shape, np.dtype(dtype))


def atari(place: Place) -> Space:
    """Return what AtariWrapper gives: one grey frame of 84 x 84."""
    return Space((box("", ATARI_SHAPE, "uint8"),), is_dict=False, place=place, bounds={"": (0, 255)})


def space_of(space: Any, argument: str, place: Place) -> Space | None:
    """Return a gymnasium space as leaves and bounds; None if Stable-Baselines3 cannot store it."""
    try:
        leaves = leaves_of(space, argument)
    except HoldallError:
        return None
    children: Mapping[str, Any] = space.spaces if hasattr(space, "spaces") else {"": space}
    bounds = {
        name: (float(child.low.min()), float(child.high.max()))
        for name, child in children.items()
        if hasattr(child, "low") and hasattr(child, "high") and child.low.size
    }
    return Space(leaves, hasattr(space, "spaces"), place, bounds)


def read_space(evaluator: Evaluator, node: ast.expr | None) -> Space | None:
    """Read an expression that makes a space."""
    if isinstance(node, ast.Name):
        found = evaluator.script.definition(node)
        node = found.value if found else None
    if not isinstance(node, ast.Call):
        return None
    dotted = evaluator.script.dotted(node.func)
    if dotted.partition(".")[0] not in _PACKAGES:
        return None
    kind = dotted.rpartition(".")[2]
    place = evaluator.script.place(node)
    if kind == "Dict":
        return _dict(evaluator, node, place)
    leaf = _leaf(evaluator, node, kind)
    if leaf is None:
        return None
    bounds = (
        {"": (_argument(evaluator, node, 0, "low"), _argument(evaluator, node, 1, "high"))} if kind == "Box" else {}
    )
    return Space((leaf,), is_dict=False, place=place, bounds=bounds)


def _dict(evaluator: Evaluator, node: ast.Call, place: Place) -> Space | None:
    leaves: list[Leaf] = []
    bounds: dict[str, tuple[object, object]] = {}
    for name, value in _children(evaluator, node):
        child = read_space(evaluator, value)
        if name is None or child is None or child.is_dict:
            return None
        leaves.append(Leaf(name, child.leaves[0].shape, child.leaves[0].dtype))
        bounds |= {name: child.bounds[""]} if child.bounds else {}
    return Space(tuple(leaves), is_dict=True, place=place, bounds=bounds) if leaves else None


def _children(evaluator: Evaluator, node: ast.Call) -> Iterator[tuple[str | None, ast.expr | None]]:
    """Yield the entries of a Dict space; one without a name stands for entries that are not known."""
    given = [*node.args, *(k.value for k in node.keywords if k.arg in {"spaces", None})]
    for argument in given:
        found = evaluator.script.definition(argument) if isinstance(argument, ast.Name) else None
        entries = found.value if found else argument
        if not isinstance(entries, ast.Dict):
            yield None, None
            return
        for key, value in zip(entries.keys, entries.values, strict=True):
            name = evaluator.value(key) if key is not None else UNKNOWN
            yield (name if isinstance(name, str) else None), value
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in {"spaces", "seed"}:
            yield keyword.arg, keyword.value


def _leaf(evaluator: Evaluator, node: ast.Call, kind: str) -> Leaf | None:
    match kind:
        case "Box":
            return _box(evaluator, node)
        case "Discrete":
            return box("", (), "int64")
        case "MultiBinary":
            count = whole(_argument(evaluator, node, 0, "n"))
            return None if count is None else box("", (count,), "int8")
        case "MultiDiscrete":
            counts = _argument(evaluator, node, 0, "nvec")
            return box("", (len(counts),), "int64") if isinstance(counts, list | tuple) else None
    return None


def _box(evaluator: Evaluator, node: ast.Call) -> Leaf | None:
    dtype = _argument(evaluator, node, 3, "dtype", Reference("numpy.float32"))
    name = dtype.last if isinstance(dtype, Reference) else dtype
    shape = _argument(evaluator, node, 2, "shape")
    if not isinstance(name, str) or name not in _DTYPES or not isinstance(shape, list | tuple):
        return None
    axes = [whole(axis) for axis in shape]
    known = tuple(axis for axis in axes if axis is not None and axis >= 0)
    return box("", known, name) if len(known) == len(axes) else None


def _argument(evaluator: Evaluator, node: ast.Call, index: int, name: str, default: object = UNKNOWN) -> object:
    for keyword in node.keywords:
        if keyword.arg == name:
            return evaluator.value(keyword.value)
        if keyword.arg is None:
            return UNKNOWN
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return UNKNOWN
    return evaluator.value(node.args[index]) if index < len(node.args) else default
