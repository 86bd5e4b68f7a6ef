"""Schemas as plain words, and back: so that a memory is made again without its environment.

Invariant: whatever is read back is a schema that the constructor could have made.
"""

from __future__ import annotations

from math import prod
from typing import Any

from holdall.checkpoint.plain import dtype_name, dtype_of
from holdall.errors import CheckpointError, DamageError
from holdall.schema import Leaf, Schema, Structure, Tree

_MOST_LEAF_BYTES = 2**30
_MOST_DEPTH = 32


def schema_words(schema: Schema) -> dict[str, Any]:
    """Describe a schema."""
    trees = {"observation": schema.observation, "action": schema.action, "extras": schema.extras}
    return {"num_envs": schema.num_envs} | {name: _tree_words(tree, name) for name, tree in trees.items()}


def schema_of(words: dict[str, Any]) -> Schema:
    """Make a schema of its description."""
    lanes = words["num_envs"]
    if type(lanes) is not int or not 1 <= lanes < 2**24:
        raise DamageError(f"a checkpoint of {lanes!r} lanes is none of holdall's")
    return Schema(_tree_of(words["observation"]), _tree_of(words["action"]), _tree_of(words["extras"]), lanes)


def _tree_words(tree: Tree, what: str) -> dict[str, Any]:
    leaves = [[leaf.name, dtype_name(leaf.dtype), list(leaf.shape)] for leaf in tree.leaves]
    return {"leaves": leaves, "structure": _structure_words(tree.structure, what)}


def _structure_words(structure: Structure, what: str) -> Any:
    if isinstance(structure, int):
        return structure
    if isinstance(structure, tuple):
        return {"tuple": [_structure_words(child, what) for child in structure]}
    if not all(isinstance(key, str) for key in structure):
        raise CheckpointError(f"the {what} space has keys that are no text; rename them to save the memory")
    return {"dict": [[key, _structure_words(child, what)] for key, child in structure.items()]}


def _tree_of(words: Any) -> Tree:
    leaves = tuple(_leaf_of(*leaf) for leaf in words["leaves"])
    named: list[int] = []
    structure = _structure_of(words["structure"], named, 0)
    if named != list(range(len(leaves))):
        raise DamageError("a checkpoint's schema names its leaves in no order of holdall's")
    shallow = isinstance(structure, dict) and all(isinstance(child, int) for child in structure.values())
    return Tree(leaves, structure, tuple(structure) if isinstance(structure, dict) and shallow else None)


def _structure_of(words: Any, named: list[int], depth: int) -> Structure:
    if depth > _MOST_DEPTH:
        raise DamageError("a checkpoint's schema is nested too deeply")
    if type(words) is int:
        named.append(words)
        return words
    if "tuple" in words:
        return tuple(_structure_of(child, named, depth + 1) for child in words["tuple"])
    return {str(key): _structure_of(child, named, depth + 1) for key, child in words["dict"]}


def _leaf_of(name: Any, dtype: Any, shape: Any) -> Leaf:
    lengths = tuple(shape)
    sound = isinstance(name, str) and all(type(length) is int and 0 <= length < 2**31 for length in lengths)
    leaf = Leaf(name, lengths, dtype_of(dtype))
    if not sound or len(lengths) > 32 or prod(lengths) * leaf.dtype.itemsize > _MOST_LEAF_BYTES:
        raise DamageError(f"a checkpoint's schema has a leaf {name!r} of shape {lengths}, which is none of holdall's")
    return leaf
