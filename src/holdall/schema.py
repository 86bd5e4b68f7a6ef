"""Spaces as flat, named leaves, the check that a value fits them, and the same as JSON.

In:  gymnasium spaces, once; nested values with a leading lane axis, at every step.
Out: one array per leaf, in a fixed order, of exactly the leaf's shape and dtype.
Invariant: no value is changed, clipped or broadcast; one that does not fit is refused before anything is written.
Integers that another integer dtype holds exactly are stored in that one. With one lane, the lane axis may be left out:
the space's shape says of every field whether it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, CheckpointError, DamageError, SpaceError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_STORABLE_KINDS = "biuf"
_MOST_DEPTH, _MOST_LEAF_BYTES = 32, 2**30
_DTYPE = re.compile(r"(\|b1|[<|][iuf](1|2|4|8|16))")
_MOST_SHOWN = 8
"""Numbers of an argument that an error shows."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name a dtype as it is written down, in little-endian order."""
    return str(dtype.newbyteorder("<").str)


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, if it is one of numbers in little-endian order."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DamageError(f"a checkpoint names the dtype {text!r}, which holdall does not store")
    return np.dtype(text)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space: what a single lane contributes at a single step."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int = field(init=False, repr=False, compare=False)  # of one value

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", prod(self.shape) * self.dtype.itemsize)

    def fit(self, value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> Array:
        """Return `value` as an array of shape `leading + shape`, or say why it is none."""
        array = value if type(value) is np.ndarray else as_array(value, self.called(argument))
        if array.dtype != self.dtype:
            whole = as_integers(array, self.dtype)
            if whole is None:
                unfit = _unfit(array, self.dtype, "iu")
                raise ArgumentError(
                    f"{self.called(argument)} has dtype {array.dtype}, the space says {self.dtype}; {unfit}"
                    f"holdall never casts, so pass np.asarray(value, dtype=np.{self.dtype.name})"
                )
            array = whole
        if array.shape != leading + self.shape:
            if not axes and is_without_lanes(array.shape, leading, self.shape):
                return array.reshape(leading + self.shape)
            raise ArgumentError(
                f"{self.called(argument)} has shape {array.shape}, expected {leading + self.shape}: "
                f"{axes or _axes(leading)} then the space's {self.shape}; pass an array of that shape"
            )
        return array

    def called(self, argument: str) -> str:
        """Name the leaf in an error about an argument."""
        return f"{argument}[{self.name!r}]" if self.name else argument


Fit = Callable[[Leaf, Any, tuple[int, ...], str], Any]
"""Returns a value as an array of a leaf, of given leading axes; the last argument is what the caller calls it."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A space taken apart into leaves, and the way back."""

    leaves: tuple[Leaf, ...]
    structure: Structure
    keys: tuple[str, ...] | None = field(init=False)  # of the leaves, if the space is a Dict of nothing but leaves

    def __post_init__(self) -> None:
        structure = self.structure
        is_shallow = isinstance(structure, dict) and all(isinstance(child, int) for child in structure.values())
        object.__setattr__(self, "keys", tuple(structure) if isinstance(structure, dict) and is_shallow else None)

    @classmethod
    def of(cls, space: spaces.Space[Any] | None, argument: str) -> Tree:
        """Take `space` apart; refuse what cannot be stored bit for bit."""
        leaves: list[Leaf] = []
        structure = _dismantle(space, "", argument, leaves)
        return cls(tuple(leaves), structure)

    def flatten(self, value: Any, leading: tuple[int, ...], argument: str, fit: Fit = Leaf.fit) -> list[Any]:
        """Return one checked array per leaf, in leaf order; `fit` checks one."""
        if type(self.structure) is int:
            return [fit(self.leaves[0], value, leading, argument)]
        if self.keys is not None and type(value) is dict and value.keys() == set(self.keys):
            leaves = zip(self.keys, self.leaves, strict=True)
            return [fit(leaf, value[key], leading, argument) for key, leaf in leaves]
        arrays: list[Any] = []
        self._collect(
            self.structure, value, lambda leaf, part: fit(leaf, part, leading, argument), argument, "", arrays
        )
        return arrays

    def flatten_some(self, values: Mapping[str, Any], leading: tuple[int, ...], fit: Fit) -> dict[int, Any]:
        """Return checked arrays of some keys of a Dict, by leaf; every key is an argument of its own."""
        found: dict[int, Any] = {}
        structure = self.structure if isinstance(self.structure, dict) else {}
        for key, value in values.items():
            if key not in structure:
                raise ArgumentError(
                    f"{key} is no extra of this memory, which has {sorted(structure)}; pass one of these, or declare "
                    f"it when the memory is made: extras={{{key!r}: Box(...)}}"
                )
            called, arrays = partial(_fit_part, fit, leading, key), list[Any]()
            self._collect(structure[key], value, called, key, "", arrays)
            found.update(zip(_leaf_numbers(structure[key]), arrays, strict=True))
        return found

    def build(self, arrays: Sequence[Any]) -> Any:
        """Put one array per leaf back into the space's own nesting."""
        return _assemble(self.structure, arrays)

    def _collect(
        self, structure: Structure, value: Any, fit: Callable[[Leaf, Any], Any], argument: str, path: str,
        arrays: list[Any],
    ) -> None:  # fmt: skip
        if isinstance(structure, int):
            arrays.append(fit(self.leaves[structure], value))
            return
        where = f"{argument}[{path!r}]" if path else argument
        if isinstance(structure, dict):
            if not isinstance(value, Mapping):
                raise ArgumentError(
                    f"{where} is a {type(value).__name__}, the space is a Dict; "
                    f"pass a mapping with the keys {sorted(structure)}"
                )
            if value.keys() != structure.keys():
                missing = sorted(map(str, structure.keys() - value.keys()))
                unknown = sorted(map(str, value.keys() - structure.keys()))
                raise ArgumentError(
                    f"{where} has the keys {sorted(map(str, value))}, the space has "
                    f"{sorted(structure)}: missing {missing}, unknown {unknown}; pass exactly the space's keys"
                )
            for key, child in structure.items():
                self._collect(child, value[key], fit, argument, _join(path, key), arrays)
            return
        if not isinstance(value, tuple | list) or len(value) != len(structure):
            raise ArgumentError(
                f"{where} is a {type(value).__name__}, the space is a Tuple of "
                f"{len(structure)}; pass a tuple of {len(structure)} batched values"
            )
        for index, child in enumerate(structure):
            self._collect(child, value[index], fit, argument, _join(path, str(index)), arrays)


def _fit_part(fit: Fit, leading: tuple[int, ...], key: str, leaf: Leaf, value: Any) -> Any:
    """Check a leaf under a key of a Dict, by the name that it has there."""
    return fit(replace(leaf, name=leaf.name[len(key) + 1 :]), value, leading, key)


def _leaf_numbers(structure: Structure) -> list[int]:
    if isinstance(structure, int):
        return [structure]
    children = structure.values() if isinstance(structure, dict) else structure
    return [number for child in children for number in _leaf_numbers(child)]


Structure = int | dict[str, "Structure"] | tuple["Structure", ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """Everything a transition consists of, leaf by leaf."""

    observation: Tree
    action: Tree
    extras: Tree
    num_envs: int
    reward_shape: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any] | None,
        extras: Mapping[str, spaces.Space[Any]] | None,
        num_envs: int,
        reward_shape: Any = (),
    ) -> Schema:
        """Read the spaces of a memory's constructor."""
        named: Any = {} if extras is None else extras
        if not isinstance(named, Mapping) or not all(isinstance(space, spaces.Space) for space in named.values()):
            raise SpaceError(f"extras ({extras!r}) must map names to spaces; pass a dict of gymnasium spaces")
        return cls(
            Tree.of(observation_space, "observation_space"),
            Tree.of(action_space, "action_space"),
            Tree.of(spaces.Dict(dict(named)), "extras"),
            num_envs,
            _required_shape(reward_shape),
        )

    def reward_leaf(self, dtype: np.dtype[Any], name: str = "") -> Leaf:
        """Describe rewards; the first add sets their dtype."""
        return Leaf(name, self.reward_shape, dtype)

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves of a transition, except reward and flags."""
        return [*self.observation.leaves, *self.action.leaves, *self.extras.leaves]


def fit_flags(value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> NDArray[np.bool_]:
    """Return `value` as booleans of shape `leading`, or say why it is none."""
    array = value if type(value) is np.ndarray else as_array(value, argument)
    if array.dtype != np.bool_:
        raise ArgumentError(f"{argument} has dtype {array.dtype}, flags are bool; pass np.asarray(value, dtype=bool)")
    if array.shape != leading:
        if not axes and is_without_lanes(array.shape, leading, ()):
            return array.reshape(leading)
        raise ArgumentError(
            f"{argument} has shape {array.shape}, expected {leading}: {axes or _axes(leading)}; "
            "pass an array of that shape"
        )
    return array


def fit_reward(value: Any, leading: tuple[int, ...], dtype: np.dtype[Any] | None, shape: tuple[int, ...] = ()) -> Array:
    """Return `value` as rewards of shape `leading + shape`; the first add sets their dtype, a Python number float64."""
    if type(value) in {int, float} and dtype is None:
        dtype = np.dtype(np.float64)
    array = value if type(value) is np.ndarray else as_array(value, "reward")
    if dtype is None and (array.dtype.kind not in _STORABLE_KINDS or not array.dtype.isnative):
        raise ArgumentError(
            f"reward has dtype {array.dtype}; rewards are bool, integer or floating point numbers in this machine's "
            "byte order, so pass np.asarray(reward, dtype=np.float32) or another of these"
        )
    if dtype is not None and array.dtype != dtype:
        whole = as_integers(array, dtype, into_floats=True)
        if whole is None:
            raise ArgumentError(
                f"reward has dtype {array.dtype}, the first add had {dtype}; {_unfit(array, dtype, 'iuf')}"
                f"holdall never casts, so pass np.asarray(reward, dtype=np.{dtype.name})"
            )
        array = whole
    if array.shape != leading + shape:
        if is_without_lanes(array.shape, leading, shape):
            return array.reshape(leading + shape)
        lanes, several = _axes(leading), f" then reward_shape={shape}" if shape else ""
        hint = "; for several rewards a step, make the memory with reward_shape=(n,)"
        remedy = "" if shape or not array.ndim else hint
        raise ArgumentError(
            f"reward has shape {array.shape}, expected {leading + shape}: {lanes}{several}; pass an array of that shape"
            f"{_shown(array)}{remedy}"
        )
    return array


def as_integers(array: Array, dtype: np.dtype[Any], *, into_floats: bool = False) -> Array | None:
    """Return integers as another dtype that holds every one of them exactly; None if it does not, or they are none."""
    if array.dtype.kind not in "iu" or not array.dtype.isnative or dtype.kind not in ("iuf" if into_floats else "iu"):
        return None
    most = 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else int(np.iinfo(dtype).max)
    least = -most if dtype.kind == "f" else int(np.iinfo(dtype).min)
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        return None
    return array.astype(dtype)


def is_without_lanes(shape: tuple[int, ...], leading: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether an array lacks nothing but the axis of a single lane, the last one of `leading`.

    It is never in doubt: with the axis, the array of a field of shape `own` has one dimension more.
    """
    return leading[-1:] == (1,) and shape == leading[:-1] + own


def _unfit(array: Array, dtype: np.dtype[Any], kinds: str) -> str:
    """Say that integers have values which do not fit, if that is what is wrong; `kinds` are the dtypes that may."""
    return "not all of its values fit; " if array.dtype.kind in "iu" and dtype.kind in kinds else ""


def _shown(array: Array) -> str:
    """Show a few numbers."""
    return f" instead of {array.tolist()}" if array.size <= _MOST_SHOWN else ""


def _required_shape(shape: Any) -> tuple[int, ...]:
    """Return `reward_shape` as a tuple, or say why it is none."""
    given = shape if isinstance(shape, tuple | list) else None
    if given is None or not all(type(n) is not bool and isinstance(n, Integral) and int(n) > 0 for n in given):
        raise ArgumentError(
            f"reward_shape ({shape!r}) must be a tuple of whole numbers of at least 1; pass (n,) for n rewards a step, "
            "or () for one"
        )
    return tuple(map(int, given))


def on_host(value: Any) -> Any:
    """Return a tensor where NumPy can read it, and anything else as it is."""
    return value.detach().cpu() if hasattr(value, "detach") else value


def as_array(value: Any, called: str) -> Array:
    """Make an array of a list, a scalar or a foreign array, without choosing a dtype for it."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(
            f"{called} is a masked array, whose mask would be lost; pass value.filled(...), without one"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{called} is a {type(value).__name__} that NumPy cannot read as one array ({error}); "
            "pass an array, on the CPU"
        ) from error
    if array.dtype == np.object_:
        raise ArgumentError(
            f"{called} is a {type(value).__name__} of unequal or unknown objects; pass one array of numbers"
        )
    return array


def _axes(leading: tuple[int, ...]) -> str:
    if len(leading) == 1:
        return f"num_envs={leading[0]} lanes"
    return f"{leading[0]} steps of num_envs={leading[1]} lanes"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _dismantle(space: spaces.Space[Any] | None, path: str, argument: str, leaves: list[Leaf]) -> Structure:
    where = f"{argument}[{path!r}]" if path else argument
    if isinstance(space, spaces.Dict):
        return {key: _dismantle(child, _join(path, str(key)), argument, leaves) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            _dismantle(child, _join(path, str(index)), argument, leaves) for index, child in enumerate(space.spaces)
        )
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        raise SpaceError(
            f"{where} is a {type(space).__name__}; holdall stores Box, Discrete, MultiBinary, "
            "MultiDiscrete, Dict and Tuple spaces, so encode it as one of these"
        )
    if space.shape is None or space.dtype is None:
        raise SpaceError(f"{where} has no fixed shape and dtype; give it both")
    dtype = np.dtype(space.dtype)
    if dtype.kind not in _STORABLE_KINDS:
        as_two = "store real and imaginary part as a last axis of two"
        remedy = as_two if dtype.kind == "c" else "use a bool, integer or floating point dtype"
        raise SpaceError(f"{where} has dtype {dtype}, which holdall does not store; {remedy}")
    if not dtype.isnative:
        raise SpaceError(
            f"{where} has dtype {dtype}, with bytes in the order of other machines; holdall stores this machine's, "
            f"so use np.{dtype.name}"
        )
    leaves.append(Leaf(path, tuple(int(n) for n in space.shape), dtype))
    return len(leaves) - 1


def _assemble(structure: Structure, arrays: Sequence[Any]) -> Any:
    if isinstance(structure, int):
        return arrays[structure]
    if isinstance(structure, dict):
        return {key: _assemble(child, arrays) for key, child in structure.items()}
    return tuple(_assemble(child, arrays) for child in structure)


def stored_space(shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    """Describe a stored array: the bounds say nothing, since values are never checked."""
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(int(limits.min), int(limits.max), shape, dtype.type)


# ---------------------------------------------------------------- rows in memory

_ALIGNMENT_BYTES = 64


def laid_out_bytes(leaves: Iterable[Leaf], rows: int) -> int:
    """Return what so many rows of all leaves take in a block."""
    return sum(_aligned(rows * leaf.nbytes) for leaf in leaves)


def laid_out(block: Bytes, leaves: Iterable[Leaf], rows: int) -> Iterator[Array]:
    """Return where so many rows of each leaf lie in a block."""
    start = 0
    for leaf in leaves:
        nbytes = rows * leaf.nbytes
        yield block[start : start + nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
        start += _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def put_together(parts: Sequence[Any], where: Sequence[NDArray[np.int64]]) -> Any:
    """Return the rows of some arrays as one, those of each at their positions; of tuples and lists of arrays the same.

    What is no array is the same in all parts.
    """
    first = parts[0]
    if isinstance(first, list | tuple):
        merged = [put_together(each, where) for each in zip(*parts, strict=True)]
        return getattr(type(first), "_make", type(first))(merged)
    if not isinstance(first, np.ndarray):
        return first
    rows = np.empty((sum(map(len, parts)), *first.shape[1:]), first.dtype)
    for part, positions in zip(parts, where, strict=True):
        rows[positions] = part
    return rows


# ---------------------------------------------------------------- as JSON


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
    return Tree(leaves, structure)


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
