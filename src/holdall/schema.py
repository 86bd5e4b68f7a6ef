"""Schema of a transition: every field as a list of named leaves, and checks of the values of fields.

    Schema.of(spaces)                             once per memory
    Tree.flatten(nested value) -> [array, ...]    checked arrays in leaf order
    Tree.build([array, ...]) -> nested value

Guarantee: no value is cast, clipped or broadcast. A value that does not fit raises ArgumentError, which names the
argument, its value, the rule and the remedy. There are two exceptions: integers of any integer dtype are accepted if
their values fit into the leaf's integer dtype, and the lane axis may be left out if there is one lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, SpaceError
from holdall.space_leaves import STORABLE_KINDS, LeafForm, Structure, flatten_space, join_path

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

MAX_LANES = 2**24 - 1
"""Maximum number of lanes."""
MAX_LEAF_BYTES = 2**30
"""Maximum bytes of one lane of a leaf at one step."""

_MAX_SHOWN_NUMBERS = 8
"""Arrays of at most this size are shown in error messages."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a field: its name within the field, and the shape and dtype of one lane at one step."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int = field(init=False, repr=False, compare=False)  # Bytes of one lane at one step.

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)

    def fit(self, value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> Array:
        """Return `value` as an array of shape `leading + shape`, or raise ArgumentError.

        Args:
            leading: Lengths of the leading axes: lanes, or steps and lanes.
            argument: Name of the field in error messages.
            axes: Description of the leading axes in error messages. With one, the lane axis must not be left out.
        """
        array = value if type(value) is np.ndarray else as_array(value, self.describe(argument))
        if array.dtype != self.dtype:
            array = self._convert_integers(array, argument)
        array = unify_type(array, self.dtype)
        if array.shape == leading + self.shape:
            return array
        if not axes and lacks_lane_axis(array.shape, leading, self.shape):
            return array.reshape(leading + self.shape)
        remedy = suggest_axis_order(array.shape, self.shape) or "pass an array of that shape"
        raise ArgumentError(
            f"{self.describe(argument)} has shape {array.shape}, expected {leading + self.shape}: "
            f"{axes or _describe_axes(leading)} then the space's {self.shape}; {remedy}"
        )

    def _convert_integers(self, array: Array, argument: str) -> Array:
        """Return integers in the leaf's integer dtype, or raise ArgumentError."""
        converted = convert_integers(array, self.dtype)
        if converted is not None:
            return converted
        remedy = suggest_dtype(
            str(array.dtype),
            self.dtype,
            f"np.asarray(value, dtype=np.{self.dtype.name})",
            is_float=array.dtype.kind == "f",
            overflows=_overflows(array, self.dtype, "iu"),
        )
        raise ArgumentError(
            f"{self.describe(argument)} has dtype {array.dtype}, but the space has dtype {self.dtype}. holdall never "
            f"casts. {remedy}"
        )

    def describe(self, argument: str) -> str:
        """Return the name of the leaf in errors about `argument`."""
        return f"{argument}[{self.name!r}]" if self.name else argument


Fit = Callable[[Leaf, Any, tuple[int, ...], str], Any]
"""A check of one leaf, with the arguments of `Leaf.fit`. It returns the checked array."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A space as a list of leaves, with its nesting."""

    leaves: tuple[Leaf, ...]
    structure: Structure
    keys: tuple[str, ...] | None = field(init=False)  # Keys of a Dict whose values are all leaves. Otherwise None.

    def __post_init__(self) -> None:
        structure = self.structure
        is_flat = isinstance(structure, dict) and all(isinstance(child, int) for child in structure.values())
        object.__setattr__(self, "keys", tuple(structure) if isinstance(structure, dict) and is_flat else None)

    @classmethod
    def of(cls, space: spaces.Space[Any] | None, argument: str) -> Tree:
        """Return the tree of `space`. Raise SpaceError if it cannot be stored bit for bit."""
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

        def fit_leaf(leaf: Leaf, part: Any) -> Any:
            return fit(leaf, part, leading, argument)

        self._collect(self.structure, value, fit_leaf, argument, "", arrays)
        return arrays

    def flatten_some(self, values: Mapping[str, Any], leading: tuple[int, ...], fit: Fit) -> dict[int, Any]:
        """Return checked arrays of some keys of a Dict, by leaf number. Errors name each key as an argument."""
        arrays_by_leaf: dict[int, Any] = {}
        structure = self.structure if isinstance(self.structure, dict) else {}
        for key, value in values.items():
            if key not in structure:
                raise ArgumentError(
                    f"{key} is not an extra of this memory, which has {sorted(structure)}. Pass one of these, or "
                    f"declare it when the memory is made: extras={{{key!r}: Box(...)}}."
                )
            arrays: list[Any] = []
            self._collect(structure[key], value, partial(_fit_below_key, fit, leading, key), key, "", arrays)
            arrays_by_leaf.update(zip(_list_leaf_numbers(structure[key]), arrays, strict=True))
        return arrays_by_leaf

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return one array per leaf in the nesting of the space."""
        return _build_nested(self.structure, arrays)

    def _collect(
        self,
        structure: Structure,
        value: Any,
        fit: Callable[[Leaf, Any], Any],
        argument: str,
        path: str,
        arrays: list[Any],
    ) -> None:
        """Append the checked arrays of a nested value to `arrays`."""
        if isinstance(structure, int):
            arrays.append(fit(self.leaves[structure], value))
            return
        where = f"{argument}[{path!r}]" if path else argument
        if isinstance(structure, dict):
            _require_keys(structure, value, where)
            for key, child in structure.items():
                self._collect(child, value[key], fit, argument, join_path(path, key), arrays)
            return
        if not isinstance(value, tuple | list) or len(value) != len(structure):
            raise ArgumentError(
                f"{where} is a {type(value).__name__}, the space is a Tuple of "
                f"{len(structure)}; pass a tuple of {len(structure)} batched values"
            )
        for index, child in enumerate(structure):
            self._collect(child, value[index], fit, argument, join_path(path, str(index)), arrays)


def _require_keys(structure: dict[str, Structure], value: Any, where: str) -> None:
    """Raise unless `value` is a mapping with exactly the keys of a Dict space."""
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


def _fit_below_key(fit: Fit, leading: tuple[int, ...], key: str, leaf: Leaf, value: Any) -> Any:
    """Check a leaf below `key` of a Dict. Errors name `key` as the argument, so the leaf's name is used without it."""
    return fit(replace(leaf, name=leaf.name[len(key) + 1 :]), value, leading, key)


def _list_leaf_numbers(structure: Structure) -> list[int]:
    if isinstance(structure, int):
        return [structure]
    children = structure.values() if isinstance(structure, dict) else structure
    return [number for child in children for number in _list_leaf_numbers(child)]


def _build_nested(structure: Structure, arrays: Sequence[Any]) -> Any:
    if isinstance(structure, int):
        return arrays[structure]
    if isinstance(structure, dict):
        return {key: _build_nested(child, arrays) for key, child in structure.items()}
    return tuple(_build_nested(child, arrays) for child in structure)


@dataclass(frozen=True, slots=True)
class Schema:
    """All fields of a transition, and the number of lanes."""

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
        """Return the schema for the arguments of a memory's constructor."""
        extra_spaces: Any = {} if extras is None else extras
        is_mapping = isinstance(extra_spaces, Mapping)
        if not is_mapping or not all(isinstance(space, spaces.Space) for space in extra_spaces.values()):
            raise SpaceError(f"extras ({extras!r}) must map names to spaces; pass a dict of gymnasium spaces")
        return cls(
            observation=Tree.of(observation_space, "observation_space"),
            action=Tree.of(action_space, "action_space"),
            extras=Tree.of(spaces.Dict(dict(extra_spaces)), "extras"),
            num_envs=num_envs,
            reward_shape=_require_reward_shape(reward_shape),
        )

    def reward_leaf(self, dtype: np.dtype[Any], name: str = "") -> Leaf:
        """Return the leaf of the reward. The first `add` sets its dtype."""
        return Leaf(name, self.reward_shape, dtype)

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves of a transition, except reward and flags."""
        return [*self.observation.leaves, *self.action.leaves, *self.extras.leaves]


# ---------------------------------------------------------------- checks of rewards and flags


def fit_flags(value: Any, leading: tuple[int, ...], argument: str, axes: str = "") -> NDArray[np.bool_]:
    """Return `value` as booleans of shape `leading`, or raise ArgumentError. `axes` is that of `Leaf.fit`."""
    array = value if type(value) is np.ndarray else as_array(value, argument)
    if array.dtype != np.bool_:
        raise ArgumentError(f"{argument} has dtype {array.dtype}, flags are bool; pass np.asarray(value, dtype=bool)")
    if array.shape == leading:
        return array
    if not axes and lacks_lane_axis(array.shape, leading, ()):
        return array.reshape(leading)
    raise ArgumentError(
        f"{argument} has shape {array.shape}, expected {leading}: {axes or _describe_axes(leading)}; "
        "pass an array of that shape"
    )


def fit_reward(value: Any, leading: tuple[int, ...], dtype: np.dtype[Any] | None, shape: tuple[int, ...] = ()) -> Array:
    """Return `value` as rewards of shape `leading + shape`, or raise ArgumentError.

    Args:
        dtype: Dtype of all rewards. None before the first reward, which sets it. Python numbers are then float64.
        shape: The memory's `reward_shape`.
    """
    if type(value) in {int, float} and dtype is None:
        dtype = np.dtype(np.float64)
    array = value if type(value) is np.ndarray else as_array(value, "reward")
    if dtype is None:
        _require_reward_dtype(array.dtype)
        dtype = np.dtype(array.dtype.str)
    elif array.dtype != dtype:
        array = _convert_reward(array, dtype)
    array = unify_type(array, dtype)
    if array.shape == leading + shape:
        return array
    if lacks_lane_axis(array.shape, leading, shape):
        return array.reshape(leading + shape)
    own_axes = f" then reward_shape={shape}" if shape else ""
    shown_value = f" instead of {array.tolist()}" if array.size <= _MAX_SHOWN_NUMBERS else ""
    remedy = "; for several rewards a step, make the memory with reward_shape=(n,)" if array.ndim and not shape else ""
    raise ArgumentError(
        f"reward has shape {array.shape}, expected {leading + shape}: {_describe_axes(leading)}{own_axes}; pass an "
        f"array of that shape{shown_value}{remedy}"
    )


def _require_reward_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in STORABLE_KINDS or not dtype.isnative:
        raise ArgumentError(
            f"reward has dtype {dtype}; rewards are bool, integer or floating point numbers in this machine's "
            "byte order, so pass np.asarray(reward, dtype=np.float32) or another of these"
        )


def _convert_reward(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return whole rewards in the dtype of the first reward, or raise ArgumentError."""
    converted = convert_integers(array, dtype, to_floats=True)
    if converted is not None:
        return converted
    remedy = suggest_dtype(
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


def _require_reward_shape(shape: Any) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, tuple | list) else None
    if lengths is None or not all(type(n) is not bool and isinstance(n, Integral) and int(n) > 0 for n in lengths):
        raise ArgumentError(
            f"reward_shape ({shape!r}) must be a tuple of whole numbers of at least 1; pass (n,) for n rewards a step, "
            "or () for one"
        )
    return tuple(map(int, lengths))


# ---------------------------------------------------------------- arrays


def move_to_host(value: Any) -> Any:
    """Return a tensor of any device on the CPU. Return any other value, or a tensor without data, unchanged."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().cpu()
    except NotImplementedError:  # The tensor is on torch's device "meta". `as_array` refuses it.
        return value


def as_array(value: Any, argument: str) -> Array:
    """Return a list, a scalar or an array of another library as a NumPy array. NumPy chooses the dtype."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(
            f"{argument} is a masked array, whose mask would be lost; pass value.filled(...), which has no mask"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{argument} is a {type(value).__name__} that NumPy cannot read as one array ({error}); "
            "pass an array on the CPU"
        ) from error
    if array.dtype == np.object_:
        raise ArgumentError(
            f"{argument} is a {type(value).__name__} of unequal or unknown objects; pass one array of numbers"
        )
    return array


def unify_type(array: Array, dtype: np.dtype[Any]) -> Array:
    """Give an array whose dtype equals `dtype` the type number of `dtype`, without a copy.

    C has several integer types of the same size, such as long and long long. Their dtypes are equal, but have different
    type numbers, which the native module compares.
    """
    return array if array.dtype.num == dtype.num else array.view(dtype)


def convert_integers(array: Array, dtype: np.dtype[Any], *, to_floats: bool = False) -> Array | None:
    """Return integers in the integer dtype `dtype`. Return None if a value does not fit, or if a dtype is not accepted.

    With `to_floats`, `dtype` may also be a floating-point dtype.
    """
    accepted_kinds = "iuf" if to_floats else "iu"
    if array.dtype.kind not in "iu" or not array.dtype.isnative or dtype.kind not in accepted_kinds:
        return None
    if dtype.kind == "f":
        most = 2 ** (np.finfo(dtype).nmant + 1)
        least = -most
    else:
        most = int(np.iinfo(dtype).max)
        least = int(np.iinfo(dtype).min)
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        return None
    return array.astype(dtype)


def lacks_lane_axis(shape: tuple[int, ...], leading: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether only the axis of a single lane, which is the last one of `leading`, is missing in `shape`.

    `own` is the shape of one lane. With and without the lane axis, arrays differ in the number of dimensions, so the
    answer is never ambiguous.
    """
    return leading[-1:] == (1,) and shape == leading[:-1] + own


# ---------------------------------------------------------------- parts of error messages


def suggest_dtype(
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
        is_reward: Whether the field is the reward, whose dtype was set by the first `add` and not by a space.
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


def suggest_axis_order(given: tuple[int, ...], own: tuple[int, ...], library: str = "np") -> str:
    """Return the advice for an image whose channels are first and in the space last, or the other way round.

    Return an empty string if the shape `given` differs in another way from the shape `own` of the space. `library` is
    the name of the module that has `moveaxis` for the value.
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
    """Return whether `convert_integers` refused an array because of its values, and not because of its dtype.

    `kinds` are the kinds of dtypes that the field may have.
    """
    return array.dtype.kind in "iu" and array.dtype.isnative and dtype.kind in kinds


def _describe_axes(leading: tuple[int, ...]) -> str:
    if len(leading) == 1:
        return f"num_envs={leading[0]} lanes"
    return f"{leading[0]} steps of num_envs={leading[1]} lanes"
