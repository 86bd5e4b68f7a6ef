"""What numpy makes of shapes and dtypes: its own functions are tried on arrays that take no memory.

In:  the name of one of numpy's functions, of an array's method or of an operator, and values of the program.
Out: the shape, the dtype and whose memory the result is; UNKNOWN if numpy refuses, or the result would be large.
An axis that is not known is tried with two lengths: the axes of the result that differ are not known either. torch's
functions are tried under the names that numpy has for them.
Invariant: only the functions listed here are called, on arrays of zeros that this module makes; none of the program's.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, NotKnownError, Reference, whole
from holdall.tools.lint.source.values import (
    ArrayValue,
    ListValue,
    best_array,
    each_part,
    filled_deque,
    known_items,
    likely,
)

_LENGTHS = (11, 13)  # that an axis is tried with if it is not known
_MOST_ELEMENTS = 2**21
_LONGEST_LIST = 64
_MOST_ROUNDS = 1024
_ROUND_BY_ROUND = {"split", "array_split", "diff"}  # numpy goes through a loop of its own, as long as is asked for

_FUNCTIONS = frozenset({
    "reshape", "transpose", "moveaxis", "swapaxes", "rollaxis", "squeeze", "expand_dims", "flip", "fliplr", "flipud",
    "rot90", "concatenate", "stack", "vstack", "hstack", "dstack", "column_stack", "append", "tile", "repeat",
    "broadcast_to", "pad", "roll", "mean", "max", "min", "amax", "amin", "sum", "average", "median", "std", "var",
    "dot", "clip", "abs", "absolute", "round", "around", "rint", "maximum", "minimum", "add", "subtract", "multiply",
    "divide", "true_divide", "floor_divide", "power", "sign", "sqrt", "square", "exp", "log", "tanh", "sin", "cos",
    "floor", "ceil", "where", "split", "array_split", "ravel", "logical_and", "logical_or", "logical_not", "invert",
    "bitwise_and", "bitwise_or", "atleast_1d", "atleast_2d", "atleast_3d", "delete", "take", "argmax", "argmin",
    "cumsum", "nan_to_num", "isnan", "diff", "isfinite", "fmax", "fmin", "mod", "flatten", "array",
})  # fmt: skip
_METHODS = frozenset({
    "reshape", "transpose", "swapaxes", "squeeze", "repeat", "mean", "max", "min", "sum", "std", "var", "clip",
    "round", "flatten", "ravel", "argmax", "argmin", "dot", "cumsum", "take",
})  # fmt: skip
_OF_TORCH: Mapping[str, str] = {
    "cat": "concatenate", "concat": "concatenate", "permute": "transpose", "view": "reshape",
    "unsqueeze": "expand_dims", "expand": "broadcast_to",
    "repeat": "tile", "transpose": "swapaxes", "amax": "max", "amin": "min", "clamp": "clip",
    "movedim": "moveaxis", "div": "divide", "mul": "multiply", "sub": "subtract", "unsqueeze_": "expand_dims",
    "squeeze_": "squeeze", "div_": "divide", "mul_": "multiply", "sub_": "subtract", "view_as": "", "chunk": "",
}  # fmt: skip
_TAKES_AXES = {"transpose", "reshape", "tile", "broadcast_to"}  # as several arguments, where torch is asked
_KEYWORDS = {"dim": "axis", "keepdim": "keepdims", "dims": "axis"}  # torch's, as numpy calls them
_IGNORED = {"dtype", "out", "casting", "order", "interpolation", "device", "copy"}
_SAME_MEMORY = {"ravel", "reshape", "transpose"}
_REDUCING = {"mean", "max", "min", "sum", "average", "median", "std", "var", "amax", "amin", "prod"}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.MatMult: operator.matmul,
}  # fmt: skip


@dataclass(slots=True)
class _Trial:
    """One call with lengths in the place of the axes that are not known."""

    length: int
    made: list[tuple[Any, ArrayValue]] = field(default_factory=list)  # the arrays that stand for those of the program
    has_unknown: bool = False
    has_dtypes: bool = True  # False: that of an array is not known

    def array(self, value: ArrayValue) -> Any:
        if value.shape is None:
            raise NotKnownError
        dtype = value.dtype or np.dtype(np.uint8)
        self.has_dtypes = self.has_dtypes and value.dtype is not None
        if value.shape == () and dtype.kind in "iu":
            return 0  # a number that counts, or chooses
        axes = [whole(likely(axis)) for axis in value.shape]
        self.has_unknown = self.has_unknown or None in axes
        array = np.broadcast_to(np.zeros((), dtype), [self.length if axis is None else axis for axis in axes])
        self.made.append((array, value))
        return array

    def argument(self, value: Any) -> Any:
        """Return what stands for a value of the program."""
        value = best_array(value)
        if isinstance(value, ArrayValue):
            return self.array(value)
        if isinstance(value, Reference) and value.last == "newaxis":
            return None
        if isinstance(value, slice):
            return slice(*(None if one is None else self._number(one) for one in (value.start, value.stop, value.step)))
        if isinstance(value, int | float | str | bool | None) or value is Ellipsis:
            return value
        value = filled_deque(value)
        items = known_items(value)
        if items is not None and len(items) <= _LONGEST_LIST:
            made = [self.argument(one) for one in items]
            return tuple(made) if isinstance(value, tuple) else made
        if isinstance(value, ListValue) and (samples := value.items or value.added):
            self.has_unknown = True
            return [self.argument(samples[0])] * self.length
        raise NotKnownError

    def _number(self, value: Any) -> int:
        number = whole(likely(value))
        self.has_unknown = self.has_unknown or number is None
        return self.length - 1 if number is None else number

    def owned(self, result: Any, node: object, keeps: bool) -> ArrayValue:
        """Return what a result is, in memory of its own or in that of the array that it is a part of."""
        sources = [value for array, value in self.made if keeps or np.may_share_memory(array, result)]
        devices = [value.device for _, value in self.made] or [""]
        dtype = result.dtype if result.dtype.kind in "biuf" and self.has_dtypes else None
        if sources and dtype == sources[0].dtype:
            return replace(sources[0], shape=result.shape)
        return ArrayValue(result.shape, dtype, frozenset({node}), devices[0])


def _tried(attempt: Callable[[_Trial], Any], node: object, keeps: bool = False) -> Any:
    """Call a function with what stands for the program's values, once more if an axis was not known."""
    found: list[Any] = []
    for length in _LENGTHS:
        trial = _Trial(length)
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's, about arrays of zeros
                result = attempt(trial)
        except Exception:
            return UNKNOWN
        found.append(_converted(trial, result, node, keeps))
        if not trial.has_unknown:
            return found[0]
    return _agreed(*found)


def _converted(trial: _Trial, result: Any, node: object, keeps: bool) -> Any:
    if isinstance(result, np.ndarray):
        return trial.owned(result, node, keeps)
    if isinstance(result, tuple | list):
        return tuple(_converted(trial, one, node, keeps) for one in result)
    return UNKNOWN  # a number of the array


def _agreed(one: Any, other: Any) -> Any:
    if not isinstance(one, ArrayValue) or not isinstance(other, ArrayValue):
        return UNKNOWN
    if len(one.shape or ()) != len(other.shape or ()):
        return replace(one, shape=None)
    pairs = zip(one.shape or (), other.shape or (), strict=True)
    return replace(one, shape=tuple(first if first == second else UNKNOWN for first, second in pairs))


def _checked(name: str, values: list[Any]) -> None:
    """Refuse what would make something large."""
    sizes = [one.size for one in values if isinstance(one, np.ndarray)]
    sizes += [sum(np.size(inner) for inner in one) for one in values if isinstance(one, list | tuple)]
    numbers = [abs(number) for number in _numbers(values)]
    total = sum(sizes)
    if name in _ROUND_BY_ROUND and max(numbers, default=0) > _MOST_ROUNDS:
        raise NotKnownError
    if name in {"tile", "repeat"}:
        total *= prod(max(number, 1) + 1 for number in numbers)
    elif name == "pad":
        total = prod(side + 2 * max(numbers, default=0) for side in np.shape(values[0]))
    elif name == "dot":
        total = prod(sizes)
    elif name not in _SAME_MEMORY and name not in {"broadcast_to", "squeeze", "expand_dims", "swapaxes", "moveaxis"}:
        with suppress(ValueError):
            shapes = (one.shape for one in values if isinstance(one, np.ndarray))
            total = max(total, prod(np.broadcast_shapes(*shapes)))
    else:
        return  # a view
    if total > _MOST_ELEMENTS or (name in _REDUCING and 0 in sizes):
        raise NotKnownError


def _numbers(values: Any) -> Iterator[int]:
    """Return the whole numbers among arguments, also those in pairs of pairs."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield value


def knows(name: str, is_torch: bool) -> bool:
    """Whether a function is one that can be tried."""
    return (_OF_TORCH.get(name) or name if is_torch else name) in _FUNCTIONS


def knows_method(name: str, is_torch: bool) -> bool:
    """Whether a method of an array is one that can be tried."""
    return bool(_OF_TORCH.get(name)) or name in _FUNCTIONS if is_torch else name in _METHODS


def call(name: str, values: list[Any], named: Mapping[str, Any], node: object, is_torch: bool) -> Any:
    """Return what a function makes of its arguments; a method has its array first."""
    plain = (_OF_TORCH.get(name) or name) if is_torch else name

    def attempt(trial: _Trial) -> Any:
        given = [trial.argument(one) for one in values]
        if is_torch or plain in {"transpose", "reshape"}:
            given = _axes_together(plain, given)
        extra = {_KEYWORDS.get(key, key): trial.argument(one) for key, one in named.items() if key not in _IGNORED}
        second = given[1] if len(given) > 1 else extra.get("start_dim", extra.get("axis"))
        if plain in {"flatten", "ravel"}:  # numpy would copy what is spread out
            return given[0].reshape((*given[0].shape[: second or 0], -1) if is_torch else -1)
        if is_torch and plain == "squeeze" and second is not None and given[0].shape[second] != 1:
            return given[0]  # torch leaves an axis that is longer than 1
        _checked(plain, [*given, *extra.values()])
        result = getattr(np, plain)(*given, **extra)
        return (result, result) if is_torch and name in {"max", "min"} and (len(given) > 1 or extra) else result

    made = _tried(attempt, node, keeps=plain in _SAME_MEMORY)
    return as_tensor(made, values) if is_torch else made


def _axes_together(name: str, given: list[Any]) -> list[Any]:
    """Return torch's `x.view(a, b)` and numpy's `x.reshape(a, b)` as `reshape(x, (a, b))`."""
    if name in _TAKES_AXES and len(given) > 2 and all(isinstance(one, int) for one in given[1:]):
        given = [given[0], tuple(given[1:])]
    if name == "broadcast_to" and isinstance(given[1], tuple | list):  # -1 leaves an axis as it is
        own = (1,) * (len(given[1]) - given[0].ndim) + given[0].shape
        given[1] = tuple(side if axis == -1 else axis for axis, side in zip(given[1], own, strict=True))
    return given


def as_tensor(made: Any, sources: list[Any]) -> Any:
    """Return a result as torch has it: it makes float32 where numpy makes float64 of whole numbers."""
    if not isinstance(made, ArrayValue):
        return each_part(made, lambda one: as_tensor(one, sources))
    is_wide = any(one.dtype == np.float64 for one in _arrays(sources))
    dtype = np.dtype(np.float32) if made.dtype == np.float64 and not is_wide else made.dtype
    return replace(made, dtype=dtype, is_tensor=True)


def _arrays(values: Any) -> Iterator[ArrayValue]:
    for value in values:
        if isinstance(value, ArrayValue):
            yield value
        elif isinstance(value, tuple | ListValue):
            yield from _arrays(known_items(value) or ())


def item(array: ArrayValue, index: Any, node: object = None) -> Any:
    """Return `array[index]`: a part of the same memory, unless numbers choose the parts."""
    if array.shape is None:
        is_cut = isinstance(index, tuple) and len(index) > 2 and any(isinstance(one, slice) for one in index)
        return replace(array, shape=cut_out(index).shape) if is_cut else array
    if index is UNKNOWN:  # one of them, or several
        return replace(array, shape=None)

    def attempt(trial: _Trial) -> Any:
        chosen = trial.argument(index)
        parts = chosen if isinstance(chosen, tuple) else (chosen,)
        held = trial.array(array)
        chosen_rows = sum(np.size(one) for one in parts if isinstance(one, np.ndarray | list))
        if chosen_rows * held[:1].size > _MOST_ELEMENTS:
            raise NotKnownError
        return held[chosen]

    found = _tried(attempt, node)
    if not isinstance(found, ArrayValue):
        return replace(array, shape=None)
    is_part = found.origins == array.origins and _is_fixed_part(index)
    return replace(found, held=array.kept) if is_part else found


def cut_out(index: tuple[Any, ...]) -> ArrayValue:
    """Return what `x[:, :, :3]` is of something that is not known: nothing but arrays has several axes."""
    if Ellipsis in index:
        return ArrayValue()
    axes = [_side(one) if isinstance(one, slice) else 1 for one in index if isinstance(one, slice | None)]
    return ArrayValue(tuple(axes))


def _side(part: slice) -> Any:
    start, stop = whole(0 if part.start is None else part.start), whole(part.stop)
    is_known = start is not None and stop is not None and 0 <= start < stop and part.step is None
    return (stop or 0) - (start or 0) if is_known else UNKNOWN


def _is_fixed_part(index: Any) -> bool:
    """Whether an index cuts the same part out of every array: not one of many rows, nor a window that moves."""
    parts = index if isinstance(index, tuple) else (index,)
    bounds = [one for part in parts if isinstance(part, slice) for one in (part.start, part.stop, part.step)]
    is_row = not parts or isinstance(parts[0], int)
    return not is_row and bool(bounds) and all(one is None or isinstance(one, int) for one in bounds)


def calculated(op: ast.operator, left: Any, right: Any, node: object) -> Any:
    """Return what an operator makes of arrays."""
    both = [one for one in (left, right) if isinstance(one, ArrayValue)]
    known = [one for one in both if one.shape is not None] or both
    base = max(known, key=lambda one: len(one.shape or ()))
    is_tensor = any(one.is_tensor for one in both)

    def attempt(trial: _Trial) -> Any:
        pair = [trial.argument(one) for one in (left, right)]
        if isinstance(op, ast.MatMult):
            _checked("dot", pair)
            return _OPERATORS[type(op)](*pair)
        small = [np.zeros(1, one.dtype) if isinstance(one, np.ndarray) else one for one in pair]
        shape = np.broadcast_shapes(*(np.shape(one) for one in pair))
        return np.broadcast_to(_OPERATORS[type(op)](*small), shape)

    made = _tried(attempt, node)
    if not isinstance(made, ArrayValue):  # the other operand is not known: a number, most of the time
        made = replace(base.made_by(node), dtype=_divided(op, base.dtype, left, right))
    return as_tensor(made, [left, right]) if is_tensor else made


def _divided(op: ast.operator, dtype: np.dtype[Any] | None, left: Any, right: Any) -> np.dtype[Any] | None:
    is_integer = dtype is not None and dtype.kind in "biu"
    is_float = isinstance(op, ast.Div) or isinstance(left, float) or isinstance(right, float)
    return np.dtype(np.float64) if is_integer and is_float else dtype
