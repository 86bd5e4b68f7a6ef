"""State as JSON: trees of numbers and arrays, random generators, schemas; and back, without pickle.

What is read back is checked with `counted`, `text_of` and `malformed_refused`, here and wherever else JSON is read;
records.py has its text.

In:  what samplers, generators and schemas say of themselves.  Out: JSON's own types, arrays apart; and back, checked.
Invariant: every number comes back as it was. Whole numbers beyond 53 bits and NaN are written in hexadecimal, since
JSON's readers cut or refuse them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_number
from holdall.errors import ArgumentError, CheckpointError, DamageError, HoldallError
from holdall.schema import Leaf, Schema, Structure, Tree, dtype_name

_SAFE = 2**53
_MOST_COUNT = 2**62
_MOST_DEPTH = 32
_DTYPE = re.compile(r"(\|b1|[<|][iuf](1|2|4|8|16))")


def counted(value: Any, most: int = _MOST_COUNT) -> int:
    """Return a whole number from 0 to `most` that was read, or refuse it."""
    if type(value) is not int or not 0 <= value <= most:
        raise DamageError(f"{value!r} is no count up to {most}; nothing of it is used")
    return value


def text_of(value: Any, pattern: re.Pattern[str]) -> str:
    """Return text that was read and has the right form, or refuse it."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise DamageError(f"{value!r} is no name here; nothing of it is used")
    return value


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class malformed_refused:  # noqa: N801  entered for every record, at a quarter of the cost of a generator
    """Turn the errors that malformed JSON leads to into a DamageError that names what was read."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, _MALFORMED) and not isinstance(error, HoldallError):
            said = f"{self._what} makes no sense ({type(error).__name__}: {error}); nothing of it is used"
            raise DamageError(said) from error


def encode_state(value: Any, arrays: list[NDArray[Any]], what: str, depth: int = 0) -> Any:
    """Return what JSON can hold; arrays are appended to `arrays` and named by their place there."""
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{what} is nested deeper than {_MOST_DEPTH}; make it flatter")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise CheckpointError(f"{what} has keys that are no text, or begin with $; name them otherwise")
        return {key: encode_state(child, arrays, f"{what}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode_state(child, arrays, what, depth + 1) for child in value]
    if isinstance(value, np.ndarray):
        return _array_words(value, arrays, "$array", what)
    if isinstance(value, bytes):
        return _array_words(np.frombuffer(value, np.uint8), arrays, "$bytes", what)
    return _scalar_words(value.item() if isinstance(value, np.generic) else value, what)


def _array_words(value: NDArray[Any], arrays: list[NDArray[Any]], kind: str, what: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise CheckpointError(f"{what} holds an array of {value.dtype}; only numbers can be saved")
    arrays.append(np.asarray(value, value.dtype.newbyteorder("<")))
    return {kind: len(arrays) - 1, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def _scalar_words(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_SAFE < value < _SAFE else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": value.hex()}
    raise CheckpointError(f"{what} holds a {type(value).__name__}; numbers, text, arrays, dicts and lists can be saved")


def decode_state(value: Any, arrays: Mapping[int, bytes | NDArray[np.uint8]], depth: int = 0) -> Any:
    """Return what `encode_state` was given; lists stand for tuples too."""
    if depth > _MOST_DEPTH:
        raise DamageError("a saved state is nested too deeply to be one of holdall's")
    if isinstance(value, list):
        return [decode_state(child, arrays, depth + 1) for child in value]
    if not isinstance(value, dict):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$bytes" in value:
        return bytes(arrays[value["$bytes"]])
    if "$array" in value:
        rows = np.frombuffer(arrays[value["$array"]], dtype_of(value["dtype"]))
        return rows.reshape([int(length) for length in value["shape"]]).copy()
    return {key: decode_state(child, arrays, depth + 1) for key, child in value.items()}


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, if it is one of numbers in little-endian order."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DamageError(f"a checkpoint names the dtype {text!r}, which holdall does not store")
    return np.dtype(text)


_KNOWN = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return all that the next draws of a generator depend on."""
    state = generator.bit_generator.state
    if state["bit_generator"] not in _KNOWN:
        raise CheckpointError(
            f"the memory draws from a {state['bit_generator']}, which cannot be saved; seed it with a number, or pass "
            f"a generator over one of {', '.join(_KNOWN)}"
        )
    return dict(state)


def restored_generator(state: Any) -> np.random.Generator:
    """Make a generator that goes on where the saved one stood."""
    try:
        bits = getattr(np.random, _KNOWN[_KNOWN.index(state["bit_generator"])])(0)
        bits.state = state
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(f"the saved generator makes no sense ({error}); load an older checkpoint") from error
    return np.random.Generator(bits)


_MOST_LEAF_BYTES = 2**30


def schema_words(schema: Schema) -> dict[str, Any]:
    """Describe a schema."""
    trees = {"observation": schema.observation, "action": schema.action, "extras": schema.extras}
    words = {"num_envs": schema.num_envs} | {name: _tree_words(tree, name) for name, tree in trees.items()}
    return words | ({"reward_shape": list(schema.reward_shape)} if schema.reward_shape else {})


def schema_of(words: dict[str, Any]) -> Schema:
    """Make a schema of its description."""
    lanes = words["num_envs"]
    if type(lanes) is not int or not 1 <= lanes < 2**24:
        raise DamageError(f"a checkpoint of {lanes!r} lanes is none of holdall's")
    reward = _leaf_of("reward", "<f8", words.get("reward_shape", ()))
    observation, action, extras = (_tree_of(words[name]) for name in ("observation", "action", "extras"))
    return Schema(observation, action, extras, lanes, reward.shape)


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


def generator_of(seed: Any) -> np.random.Generator:
    """Make a generator of a seed."""
    try:
        given: Any = "True or False" if isinstance(seed, bool) else seed
        return np.random.default_rng(given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"seed ({seed!r}) is none that NumPy takes ({error}); pass None or a whole number of at least 0"
        ) from error


def childs_generator(generator: np.random.Generator) -> np.random.Generator:
    """Return a generator for a forked child: another one in every child, the same in every run of the same program.

    A child begins with a copy of its parent's generator; its draws would be those of the parent and of all siblings.
    """
    words = generator.integers(0, 2**32, 8, np.uint32)
    return np.random.default_rng([*words.tolist(), fork_number()])
