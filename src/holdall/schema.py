"""The leaves of a transition, and the checks of everything that users pass and that files contain.

A `Schema` is made of the spaces of a memory. It checks nested values and returns one array per leaf, in a fixed order,
with exactly the shape and dtype of the leaf. A value that does not fit raises ArgumentError, which names the argument,
its value, the rule and the remedy. Invalid content of a file raises DamageError.

Guarantee: no value is changed, clipped or broadcast. Integers of another dtype are converted if the leaf's integer
dtype holds them exactly. With one lane, the lane axis may be left out, because the shape of the space shows whether it
is present.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, CheckpointError, DamageError, HoldallError, SpaceError
from holdall.space_leaves import STORABLE_KINDS, LeafForm, Structure, flatten_space, joined

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_MAX_DEPTH = 32
_MAX_LEAF_BYTES = 2**30
_MAX_COUNT = 2**62
_DTYPE = re.compile(r"(\|b1|[<|][iuf](1|2|4|8|16))")
_MAX_SHOWN = 8
"""Largest number of rewards that an error message quotes."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in files, where it is little-endian."""
    return str(dtype.newbyteorder("<").str)


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype that `dtype_name` named. Raise DamageError for other names."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DamageError(f"Corrupt checkpoint: {text!r} is not a dtype that holdall stores.")
    return np.dtype(text)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space, without the lane axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int = field(init=False, repr=False, compare=False)  # Bytes of one lane's value.

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)

    def fit(self, value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> Array:
        """Return `value` as an array of shape `leading + shape`. Raise ArgumentError if it does not fit.

        `axes` describes the leading axes in the error.
        """
        array = value if type(value) is np.ndarray else as_array(value, self.called(argument))
        if array.dtype != self.dtype:
            whole = as_integers(array, self.dtype)
            if whole is None:
                remedy = dtype_remedy(
                    str(array.dtype),
                    self.dtype,
                    f"np.asarray(value, dtype=np.{self.dtype.name})",
                    is_float=array.dtype.kind == "f",
                    overflows=_overflows(array, self.dtype, "iu"),
                )
                raise ArgumentError(
                    f"{self.called(argument)} has dtype {array.dtype}, but the space has dtype {self.dtype}. holdall "
                    f"never casts. {remedy}"
                )
            array = whole
        if array.shape != leading + self.shape:
            if not axes and is_without_lanes(array.shape, leading, self.shape):
                return array.reshape(leading + self.shape)
            remedy = channels_remedy(array.shape, self.shape) or "pass an array of that shape"
            raise ArgumentError(
                f"{self.called(argument)} has shape {array.shape}, expected {leading + self.shape}: "
                f"{axes or _axes(leading)} then the space's {self.shape}; {remedy}"
            )
        return array

    def called(self, argument: str) -> str:
        """Return the name of the leaf in an error about `argument`."""
        return f"{argument}[{self.name!r}]" if self.name else argument


Fit = Callable[[Leaf, Any, tuple[int, ...], str], Any]
"""Function like `Leaf.fit`. Its arguments are a leaf, a value, the leading axes, and the name of the argument."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The leaves of a space, and how they are nested."""

    leaves: tuple[Leaf, ...]
    structure: Structure
    keys: tuple[str, ...] | None = field(init=False)  # Keys in leaf order if the space is a Dict that nests nothing.

    def __post_init__(self) -> None:
        structure = self.structure
        is_shallow = isinstance(structure, dict) and all(isinstance(child, int) for child in structure.values())
        object.__setattr__(self, "keys", tuple(structure) if isinstance(structure, dict) and is_shallow else None)

    @classmethod
    def of(cls, space: spaces.Space[Any] | None, argument: str) -> Tree:
        """Return the tree of `space`. Raise SpaceError if the space cannot be stored bit for bit."""
        leaves: list[LeafForm] = []
        structure = flatten_space(space, "", argument, leaves)
        return cls(tuple(Leaf(*form) for form in leaves), structure)

    def flatten(self, value: Any, leading: tuple[int, ...], argument: str, fit: Fit = Leaf.fit) -> list[Any]:
        """Return one checked array per leaf, in leaf order. `fit` checks each of them."""
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
        """Return checked arrays of some keys of a Dict, by leaf number. Errors name the key as the argument."""
        found: dict[int, Any] = {}
        structure = self.structure if isinstance(self.structure, dict) else {}
        for key, value in values.items():
            if key not in structure:
                raise ArgumentError(
                    f"{key} is not an extra of this memory, which has {sorted(structure)}; pass one of these, or "
                    f"declare it when the memory is made: extras={{{key!r}: Box(...)}}"
                )
            arrays: list[Any] = []
            self._collect(structure[key], value, partial(_fit_part, fit, leading, key), key, "", arrays)
            found.update(zip(_leaf_numbers(structure[key]), arrays, strict=True))
        return found

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return one array per leaf in the nesting of the space."""
        return _assemble(self.structure, arrays)

    def _collect(
        self,
        structure: Structure,
        value: Any,
        fit: Callable[[Leaf, Any], Any],
        argument: str,
        path: str,
        arrays: list[Any],
    ) -> None:
        """Append the checked arrays of a nested value to `arrays`, in leaf order."""
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
                self._collect(child, value[key], fit, argument, joined(path, key), arrays)
            return
        if not isinstance(value, tuple | list) or len(value) != len(structure):
            raise ArgumentError(
                f"{where} is a {type(value).__name__}, the space is a Tuple of "
                f"{len(structure)}; pass a tuple of {len(structure)} batched values"
            )
        for index, child in enumerate(structure):
            self._collect(child, value[index], fit, argument, joined(path, str(index)), arrays)


def _fit_part(fit: Fit, leading: tuple[int, ...], key: str, leaf: Leaf, value: Any) -> Any:
    """Check a leaf of the Dict's child `key`. Errors name the leaf as it is named within that child."""
    return fit(replace(leaf, name=leaf.name[len(key) + 1 :]), value, leading, key)


def _leaf_numbers(structure: Structure) -> list[int]:
    if isinstance(structure, int):
        return [structure]
    children = structure.values() if isinstance(structure, dict) else structure
    return [number for child in children for number in _leaf_numbers(child)]


@dataclass(frozen=True, slots=True)
class Schema:
    """The leaves of a transition, the number of lanes, and the shape of rewards."""

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
        """Return the schema of the arguments of a memory. Raise SpaceError or ArgumentError if one does not fit."""
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
        """Return the leaf of rewards of `dtype`, which the first `add` sets."""
        return Leaf(name, self.reward_shape, dtype)

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves of a transition, except reward and flags."""
        return [*self.observation.leaves, *self.action.leaves, *self.extras.leaves]


def fit_flags(value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> NDArray[np.bool_]:
    """Return `value` as booleans of shape `leading`. Raise ArgumentError if it does not fit."""
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
    """Return `value` as rewards of shape `leading + shape`. Raise ArgumentError if it does not fit.

    `dtype` is None before the first reward, which sets it. A Python number sets float64.
    """
    if type(value) in {int, float} and dtype is None:
        dtype = np.dtype(np.float64)
    array = value if type(value) is np.ndarray else as_array(value, "reward")
    if dtype is None and (array.dtype.kind not in STORABLE_KINDS or not array.dtype.isnative):
        raise ArgumentError(
            f"reward has dtype {array.dtype}; rewards are bool, integer or floating point numbers in this machine's "
            "byte order, so pass np.asarray(reward, dtype=np.float32) or another of these"
        )
    if dtype is not None and array.dtype != dtype:
        whole = as_integers(array, dtype, into_floats=True)
        if whole is None:
            remedy = dtype_remedy(
                str(array.dtype),
                dtype,
                f"np.asarray(reward, dtype=np.{dtype.name})",
                is_float=array.dtype.kind == "f",
                overflows=_overflows(array, dtype, "iuf"),
                is_reward=True,
            )
            raise ArgumentError(
                f"reward has dtype {array.dtype}, but the first add had dtype {dtype}. holdall never casts. {remedy}"
            )
        array = whole
    if array.shape != leading + shape:
        if is_without_lanes(array.shape, leading, shape):
            return array.reshape(leading + shape)
        several = f" then reward_shape={shape}" if shape else ""
        shown = f" instead of {array.tolist()}" if array.size <= _MAX_SHOWN else ""
        remedy = "; for several rewards a step, make the memory with reward_shape=(n,)"
        if shape or not array.ndim:
            remedy = ""
        raise ArgumentError(
            f"reward has shape {array.shape}, expected {leading + shape}: {_axes(leading)}{several}; pass an array of "
            f"that shape{shown}{remedy}"
        )
    return array


def as_integers(array: Array, dtype: np.dtype[Any], *, into_floats: bool = False) -> Array | None:
    """Return integers in another dtype. None if `array` has none, or `dtype` does not hold all of them exactly."""
    if array.dtype.kind not in "iu" or not array.dtype.isnative or dtype.kind not in ("iuf" if into_floats else "iu"):
        return None
    most = 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else int(np.iinfo(dtype).max)
    least = -most if dtype.kind == "f" else int(np.iinfo(dtype).min)
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        return None
    return array.astype(dtype)


def is_without_lanes(shape: tuple[int, ...], leading: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether an array of `shape` lacks only the axis of a single lane, the last one of `leading`.

    This is unambiguous, because an array with that axis has one dimension more.
    """
    return leading[-1:] == (1,) and shape == leading[:-1] + own


def dtype_remedy(
    given: str,
    stored: np.dtype[Any],
    cast: str,
    *,
    is_float: bool,
    overflows: bool = False,
    is_reward: bool = False,
) -> str:
    """Return the advice for a value of dtype `given` in a field of dtype `stored`.

    Args:
        cast: The expression that casts the value. The advice is to use it, unless it would change values.
        is_float: Whether `given` is a floating-point dtype.
        overflows: Whether integers of the value do not fit into `stored`.
        is_reward: Whether the first `add` has set the dtype, and not a space.
    """
    drops_fractions = is_float and stored.kind in "iub"
    if not drops_fractions and not overflows:
        return f"Pass {cast}."
    wider = f"declare the space with dtype {given}"
    if is_reward:
        wider = f"pass rewards of dtype {given} from the first add on"
    if overflows:
        return f"Not all values fit into {stored}, so {wider}."
    scaling = " For an image from 0 to 1, multiply by 255 and round first." if stored == np.uint8 else ""
    return f"A cast would drop fractions, so {wider}, or pass values of dtype {stored}.{scaling}"


def channels_remedy(given: tuple[int, ...], own: tuple[int, ...], library: str = "np") -> str:
    """Return the advice for an image whose channels are first where the space has them last, or the other way round.

    Empty if the shape `given` differs in another way from the shape `own` of the space. `library` is the name of the
    module that has `moveaxis` for the value.
    """
    image = given[-3:]
    if len(own) != 3 or image == own:
        return ""
    if image == (own[2], *own[:2]):
        return f"the channels are first here and last in the space, so pass {library}.moveaxis(value, -3, -1)"
    if image == (*own[1:], own[0]):
        return f"the channels are last here and first in the space, so pass {library}.moveaxis(value, -1, -3)"
    return ""


def _overflows(array: Array, dtype: np.dtype[Any], kinds: str) -> bool:
    """Return whether `as_integers` refused integers because of their values. It accepts dtypes of `kinds`."""
    return array.dtype.kind in "iu" and array.dtype.isnative and dtype.kind in kinds


def _required_shape(shape: Any) -> tuple[int, ...]:
    """Return `reward_shape` as a tuple. Raise ArgumentError if it is not a shape."""
    given = shape if isinstance(shape, tuple | list) else None
    if given is None or not all(type(n) is not bool and isinstance(n, Integral) and int(n) > 0 for n in given):
        raise ArgumentError(
            f"reward_shape ({shape!r}) must be a tuple of whole numbers of at least 1; pass (n,) for n rewards per "
            "step, or () for one"
        )
    return tuple(map(int, given))


def on_host(value: Any) -> Any:
    """Return a tensor on the CPU, without its graph, so that NumPy can read it. Return other values as they are."""
    return value.detach().cpu() if hasattr(value, "detach") else value


def as_array(value: Any, called: str) -> Array:
    """Return a list, a scalar or a foreign array as an array of its own dtype. Raise ArgumentError if that fails."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{called} is a masked array, whose mask would be lost; pass value.filled(...)")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{called} is a {type(value).__name__} that NumPy cannot read as one array ({error}); "
            "pass an array on the CPU"
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


def _assemble(structure: Structure, arrays: Sequence[Any]) -> Any:
    if isinstance(structure, int):
        return arrays[structure]
    if isinstance(structure, dict):
        return {key: _assemble(child, arrays) for key, child in structure.items()}
    return tuple(_assemble(child, arrays) for child in structure)


# ---------------------------------------------------------------- numbers and text that users pass


def require_count(argument: str, value: Any, least: int = 1, reason: str = "") -> int:
    """Return `value` as an int. Raise ArgumentError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number of at least {least}{reason}; pass one")
    return int(value)


def whole(value: Any) -> Any:
    """Return a float without a fraction, such as 1e6, as an int. Return other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_flag(argument: str, value: Any) -> bool:
    """Return `value` as a bool. Raise ArgumentError unless it is True or False."""
    if isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}:  # NumPy's bool has one of these names.
        return bool(value)
    raise ArgumentError(f"{argument} ({value!r}) must be True or False; pass one of them")


def require_path(argument: str, value: Any) -> str:
    """Return a path or a URL as text. Raise ArgumentError if `value` is neither."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if isinstance(path, bytes):
        raise ArgumentError(f"{argument} ({value!r}) is not a path; pass text or a pathlib.Path")
    return str(path)


def require_choice(argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{argument} ({value!r}) must be one of {', '.join(choices)}; pass one of these")


def require_number(argument: str, value: Any, least: float, most: float = math.inf) -> float:
    """Return `value` as a float. Raise ArgumentError unless it is finite and from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise ArgumentError(f"{argument} ({value!r}) must be a number {bounds}; pass one")
    if not math.isfinite(value):
        raise ArgumentError(f"{argument} ({value!r}) must be finite; pass a finite number")
    return float(value)


# ---------------------------------------------------------------- numbers and text from files


def count_of(value: Any, most: int = _MAX_COUNT) -> int:
    """Return a value from a file if it is a whole number from 0 to `most`. Raise DamageError if not."""
    if type(value) is not int or not 0 <= value <= most:
        raise DamageError(f"Corrupt data: {value!r} is not a whole number from 0 to {most}.")
    return value


def text_of(value: Any, pattern: re.Pattern[str]) -> str:
    """Return a value from a file if it is text that matches `pattern`. Raise DamageError if not."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise DamageError(f"Corrupt data: invalid name {value!r}.")
    return value


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class malformed_refused:  # noqa: N801  A class takes a quarter of the time of a generator, and every record enters it.
    """Context that turns the errors of code that reads malformed JSON into a DamageError, which names the file."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, _MALFORMED) and not isinstance(error, HoldallError):
            raise DamageError(
                f"{self._what} is damaged ({type(error).__name__}: {error}). Nothing of it is used."
            ) from error


# ---------------------------------------------------------------- a schema as JSON


def schema_words(schema: Schema) -> dict[str, Any]:
    """Return a schema as JSON."""
    trees = {"observation": schema.observation, "action": schema.action, "extras": schema.extras}
    words = {"num_envs": schema.num_envs} | {name: _tree_words(tree, name) for name, tree in trees.items()}
    return words | ({"reward_shape": list(schema.reward_shape)} if schema.reward_shape else {})


def schema_of(words: dict[str, Any]) -> Schema:
    """Return the schema that `schema_words` described. Raise DamageError if the description is damaged."""
    lanes = words["num_envs"]
    if type(lanes) is not int or not 1 <= lanes < 2**24:
        raise DamageError(f"Corrupt checkpoint: {lanes!r} is not a number of lanes.")
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
        raise CheckpointError(f"The {what} space has keys that are not text. Rename them to save the memory.")
    return {"dict": [[key, _structure_words(child, what)] for key, child in structure.items()]}


def _tree_of(words: Any) -> Tree:
    leaves = tuple(_leaf_of(*leaf) for leaf in words["leaves"])
    named: list[int] = []
    structure = _structure_of(words["structure"], named, 0)
    if named != list(range(len(leaves))):
        raise DamageError("Corrupt checkpoint: the leaves of its schema are not in order.")
    return Tree(leaves, structure)


def _structure_of(words: Any, named: list[int], depth: int) -> Structure:
    if depth > _MAX_DEPTH:
        raise DamageError("Corrupt checkpoint: its schema is nested too deeply.")
    if type(words) is int:
        named.append(words)
        return words
    if "tuple" in words:
        return tuple(_structure_of(child, named, depth + 1) for child in words["tuple"])
    return {str(key): _structure_of(child, named, depth + 1) for key, child in words["dict"]}


def _leaf_of(name: Any, dtype: Any, shape: Any) -> Leaf:
    lengths = tuple(shape)
    is_sound = isinstance(name, str) and all(type(length) is int and 0 <= length < 2**31 for length in lengths)
    leaf = Leaf(name, lengths, dtype_of(dtype))
    if not is_sound or len(lengths) > 32 or math.prod(lengths) * leaf.dtype.itemsize > _MAX_LEAF_BYTES:
        raise DamageError(
            f"Corrupt checkpoint: its schema has a leaf {name!r} of shape {lengths}, which holdall never writes."
        )
    return leaf
