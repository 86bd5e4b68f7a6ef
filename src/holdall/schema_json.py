"""Conversion of a schema to JSON and back.

Files are not trusted: dtypes, shapes and sizes are checked, and a DamageError is raised if they are impossible.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from holdall.errors import CheckpointError, DamageError
from holdall.schema import MAX_LANES, MAX_LEAF_BYTES, Leaf, Schema, Tree
from holdall.space_leaves import Structure

_MAX_DEPTH = 32
_MAX_AXES = 32
_MAX_AXIS = 2**31
_DTYPE = re.compile(r"(\|b1|[<|][iuf](1|2|4|8|16))")


def dtype_to_json(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in little-endian byte order."""
    return str(dtype.newbyteorder("<").str)


def dtype_from_json(text: Any) -> np.dtype[Any]:
    """Return the dtype for a name that `dtype_to_json` returned."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DamageError(f"Corrupt checkpoint: {text!r} is not a dtype that holdall stores.")
    return np.dtype(text)


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """Return a schema as plain dicts, lists and numbers."""
    trees = {"observation": schema.observation, "action": schema.action, "extras": schema.extras}
    fields: dict[str, Any] = {"num_envs": schema.num_envs}
    fields |= {name: _tree_to_json(tree, name) for name, tree in trees.items()}
    if schema.reward_shape:
        fields["reward_shape"] = list(schema.reward_shape)
    return fields


def schema_from_json(fields: dict[str, Any]) -> Schema:
    """Return the schema that `schema_to_json` described."""
    lanes = fields["num_envs"]
    if type(lanes) is not int or not 1 <= lanes <= MAX_LANES:
        raise DamageError(f"Corrupt checkpoint: {lanes!r} is not a possible number of environments.")
    reward = _leaf_from_json("reward", "<f8", fields.get("reward_shape", ()))  # Only its shape is used.
    return Schema(
        observation=_tree_from_json(fields["observation"]),
        action=_tree_from_json(fields["action"]),
        extras=_tree_from_json(fields["extras"]),
        num_envs=lanes,
        reward_shape=reward.shape,
    )


def _tree_to_json(tree: Tree, name: str) -> dict[str, Any]:
    leaves = [[leaf.name, dtype_to_json(leaf.dtype), list(leaf.shape)] for leaf in tree.leaves]
    return {"leaves": leaves, "structure": _structure_to_json(tree.structure, name)}


def _structure_to_json(structure: Structure, name: str) -> Any:
    if isinstance(structure, int):
        return structure
    if isinstance(structure, tuple):
        return {"tuple": [_structure_to_json(child, name) for child in structure]}
    if not all(isinstance(key, str) for key in structure):
        raise CheckpointError(f"The {name} space has keys that are not text. Rename them to save the memory.")
    return {"dict": [[key, _structure_to_json(child, name)] for key, child in structure.items()]}


def _tree_from_json(fields: Any) -> Tree:
    leaves = tuple(_leaf_from_json(*leaf) for leaf in fields["leaves"])
    numbers: list[int] = []
    structure = _structure_from_json(fields["structure"], numbers, 0)
    if numbers != list(range(len(leaves))):
        raise DamageError("Corrupt checkpoint: the leaves of its schema are not in order.")
    return Tree(leaves, structure)


def _structure_from_json(fields: Any, numbers: list[int], depth: int) -> Structure:
    """Return a nested structure, and append the numbers of its leaves to `numbers`."""
    if depth > _MAX_DEPTH:
        raise DamageError("Corrupt checkpoint: its schema is nested too deeply.")
    if type(fields) is int:
        numbers.append(fields)
        return fields
    if "tuple" in fields:
        return tuple(_structure_from_json(child, numbers, depth + 1) for child in fields["tuple"])
    return {str(key): _structure_from_json(child, numbers, depth + 1) for key, child in fields["dict"]}


def _leaf_from_json(name: Any, dtype: Any, shape: Any) -> Leaf:
    lengths = tuple(shape)
    are_lengths = all(type(length) is int and 0 <= length < _MAX_AXIS for length in lengths)
    stored = dtype_from_json(dtype)
    if not isinstance(name, str) or not are_lengths or len(lengths) > _MAX_AXES:
        raise DamageError(f"Corrupt checkpoint: its schema has an impossible leaf {name!r} of shape {lengths}.")
    if math.prod(lengths) * stored.itemsize > MAX_LEAF_BYTES:
        raise DamageError(f"Corrupt checkpoint: its schema has a leaf {name!r} of shape {lengths}, which is too large.")
    return Leaf(name, lengths, stored)
