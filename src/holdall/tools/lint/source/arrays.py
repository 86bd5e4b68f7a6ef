"""Arrays and tensors by shape and dtype: what numpy's, torch's and OpenCV's functions make of them.

In:  the full name of a function, or an array and the name of its method, and the arguments.
Out: an ArrayValue, a number, or UNKNOWN. Whether memory is new or shared is kept: it decides what a buffer costs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    InstanceValue,
    ListValue,
    TableValue,
    filled_deque,
    known_items,
    length_of,
    likely,
)

WORTH_RECORDING = 2**20
_FILLED = {"zeros", "ones", "empty", "full", "rand", "randn", "random", "uniform", "normal", "empty_strided"}
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
_FROM = {"array", "asarray", "ascontiguousarray", "tensor", "as_tensor", "from_numpy", "asanyarray", "float32", "uint8"}
_TENSORS = {
    "FloatTensor": "float32",
    "ByteTensor": "uint8",
    "LongTensor": "int64",
    "Tensor": "float32",
    "DoubleTensor": "float64",
}
_VIEWS = {"from_numpy", "asarray", "as_tensor", "ascontiguousarray", "asanyarray"}
_NAMES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "byte": "uint8",
          "bfloat16": "float16", "short": "int16", "float_": "float64", "bool_": "bool", "int_": "int64",
          "single": "float32", "char": "int8", "long_": "int64"}  # fmt: skip
_SAME_MEMORY = {"view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "detach", "flatten", "ravel"}
_SAME_MEMORY |= {"numpy", "contiguous", "swapaxes", "expand", "requires_grad_", "pin_memory", "share_memory_"}
_TO_DTYPE = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
}
_PACKAGES = {"numpy", "torch", "cv2", "jax", "cupy", "skimage"}


def dtype_of(value: Any, package: str = "numpy") -> np.dtype[Any] | None:
    """Return the dtype that an argument names."""
    if isinstance(value, np.dtype):
        return value
    name = value.last if isinstance(value, Reference) else value
    if not isinstance(name, str):
        return None
    is_torch = (isinstance(value, Reference) and value.dotted.startswith("torch")) or package == "torch"
    if name == "float" and isinstance(value, Reference) and value.dotted.startswith("builtins"):
        name = "float64"
    elif name == "int" and not is_torch:
        name = "int64"
    elif name in _NAMES and (is_torch or name not in {"float", "double", "long", "int"} or package == "numpy"):
        name = "float64" if name == "float" and not is_torch else _NAMES[name]
    try:
        found = np.dtype(name)
    except TypeError:
        return None
    return found if found.kind in "biuf" else None


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return a shape that an argument gives: a number, or a sequence of them."""
    value = likely(value)
    if isinstance(value, ArrayValue) or value is UNKNOWN or value is None:
        return None
    if (items := known_items(value)) is not None:
        return tuple(likely(one) for one in items)
    return (value,) if whole(value) is not None else None


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a function of an array library makes; NotImplemented if it is none that is known here."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package not in _PACKAGES or last == "prod":
        return NotImplemented
    if package == "cv2":
        return _image(last, arguments, node)
    if last in _FILLED and not (package == "numpy" and last in {"rand", "randn"} and not arguments.values):
        return _filled(interpreter, package, last, arguments, node)
    first = unwrapped(arguments.get(0, "", UNKNOWN))
    if last in _LIKE:
        made = first.made_by(node) if isinstance(first, ArrayValue) else UNKNOWN
        return _recorded(interpreter, made, node)
    if last in _FROM or last in _TENSORS:
        return _converted(interpreter, package, last, first, arguments, node)
    return _function(package, last, first, arguments, node)


def _filled(interpreter: Any, package: str, last: str, arguments: Any, node: ast.AST) -> Any:
    shape = arguments.get(0, "size" if "size" in arguments.named else "shape", UNKNOWN)
    if package == "torch" and len(arguments.values) > 1 and last != "full" and whole(arguments.values[1]) is not None:
        shape = tuple(arguments.values)
    if last in {"uniform", "normal"}:
        shape = arguments.get(2, "size", UNKNOWN)
    axes = shape_of(likely(shape))
    default = "float32" if package == "torch" else "float64"
    at = {"full": 2}.get(last, 1) if package != "torch" else None
    given = arguments.get(at, "dtype", None)
    if isinstance(given, Reference) and given.last in {"object", "object_"}:
        return ListValue([], whole((axes or (None,))[0]), node=node, is_fixed=True)
    dtype = np.dtype(default) if given is None else dtype_of(likely(given), package)
    device = arguments.get(None, "device", "")
    name = device if isinstance(device, str) else "cuda" if device not in (None, "", UNKNOWN) else ""
    return _recorded(interpreter, ArrayValue(axes, dtype, frozenset({node}), name), node)


def _recorded(interpreter: Any, made: Any, node: ast.AST) -> Any:
    if isinstance(made, ArrayValue) and (made.nbytes or 0) >= WORTH_RECORDING:
        interpreter.record("array", made, None, node, times=interpreter.repeats_here)
    return made


def _converted(  # noqa: C901  one case for each kind of value
    interpreter: Any, package: str, last: str, first: Any, arguments: Any, node: ast.AST
) -> Any:
    given = arguments.get(None, "dtype", None)
    if package == "numpy" and len(arguments.values) > 1 and given is None:
        given = arguments.values[1]
    wanted = dtype_of(given, package) if given is not None else None
    if last in _TENSORS:
        wanted = np.dtype(_TENSORS[last])
        if whole(first) is not None:
            return _recorded(interpreter, ArrayValue(tuple(arguments.values), wanted, frozenset({node})), node)
    if isinstance(first, OneOf):
        first = next((one for one in first.values if isinstance(one, ArrayValue)), first.values[0])
    if isinstance(first, InstanceValue):
        first = unwrapped(interpreter.converted_to_array(first))
    if isinstance(first, ArrayValue):
        if last in _VIEWS and wanted in {None, first.dtype} and first.shared_frames == 1:
            return first
        if (
            first.dtype == np.float64
            and package == "torch"
            and wanted is None
            and last not in {"from_numpy", "as_tensor", "tensor"}
        ):
            wanted = np.dtype("float32")
        return first.made_by(node, dtype=wanted or first.dtype)
    items = known_items(filled_deque(first))
    if items is not None:
        inner = unwrapped(items[0]) if items else UNKNOWN
        if isinstance(inner, ArrayValue) and inner.shape is not None:
            return ArrayValue((len(items), *inner.shape), wanted or inner.dtype, frozenset({node}))
        if items and all(isinstance(one, int | float) for one in items):
            default = "float32" if package == "torch" else "float64"
            is_float = any(isinstance(one, float) for one in items)
            return ArrayValue((len(items),), wanted or np.dtype(default if is_float else "int64"), frozenset({node}))
        return ArrayValue(None, wanted, frozenset({node}))
    if isinstance(first, int | float):
        return ArrayValue((), wanted or np.dtype("float32"), frozenset({node}))
    return ArrayValue(None, wanted, frozenset({node}))


def _function(package: str, last: str, first: Any, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each function
    match last:
        case "isscalar":
            return isinstance(first, int | float | str) if first is not UNKNOWN else UNKNOWN
        case "device":
            return first if isinstance(first, str) else UNKNOWN
        case "dtype":
            found = dtype_of(first)
            return UNKNOWN if found is None else Reference(f"numpy.{found.name}")
        case "stack" | "concatenate" | "cat" | "vstack" | "hstack" | "dstack":
            return _stacked(last, first, arguments, node)
        case "expand_dims" | "unsqueeze" if isinstance(first, ArrayValue) and first.shape is not None:
            return replace(first, shape=(1, *first.shape))
        case "transpose" | "moveaxis" | "swapaxes" | "rollaxis" | "squeeze" | "flip" if isinstance(first, ArrayValue):
            return call_method(first, "transpose" if last != "squeeze" else last, _rest(arguments), node)
        case "resize" if isinstance(first, ArrayValue) and first.shape is not None:
            shape = shape_of(arguments.get(1, "output_shape"))
            return UNKNOWN if shape is None else first.made_by(node, shape=shape, dtype=np.dtype("float64"))
        case "rgb2gray" if isinstance(first, ArrayValue) and first.shape is not None:
            return first.made_by(node, shape=first.shape[:2], dtype=np.dtype("float64"))
        case "append" if isinstance(first, ArrayValue):
            both = ListValue([first, unwrapped(arguments.get(1, "values"))], 2)
            return _stacked("concatenate", both, type(arguments)([], {"axis": arguments.get(2, "axis", 0)}), node)
        case "clip" | "abs" | "round" | "nan_to_num" | "copy" | "roll" | "sign" | "maximum" | "minimum" if isinstance(
            first, ArrayValue
        ):
            return first.made_by(node)
        case "arange" | "linspace":
            count = whole(first) if last == "arange" else whole(arguments.get(2, "num", 50))
            return ArrayValue((count if count is not None else UNKNOWN,), np.dtype("int64"), frozenset({node}))
        case "randint":
            shape = shape_of(arguments.get(2, "size"))
            return ArrayValue(shape, np.dtype("int64"), frozenset({node}))
        case "log2" | "ceil" | "floor" | "sqrt" if isinstance(first, int | float) and first > 0:
            return float(getattr(np, last)(first))
        case "inf" | "pi":
            return UNKNOWN
    if last[:1].isupper() or last in {"manual_seed", "seed", "load", "save"}:
        return InstanceValue(Reference(f"{package}.{last}"), node=node) if last[:1].isupper() else UNKNOWN
    return ArrayValue() if isinstance(first, ArrayValue) else UNKNOWN


def _rest(arguments: Any) -> Any:
    return type(arguments)(arguments.values[1:], arguments.named, arguments.is_complete)


def _stacked(last: str, first: Any, arguments: Any, node: ast.AST) -> Any:
    first = filled_deque(first)
    items = known_items(first)
    samples = items or getattr(first, "items", None) or getattr(first, "added", None) or [UNKNOWN]
    sample = unwrapped(likely(samples[0]))
    count = length_of(first)
    if isinstance(first, ListValue) and first.is_deque:
        count = whole(first.maxlen)
    if not isinstance(sample, ArrayValue) or sample.shape is None:
        return ArrayValue(None, None, frozenset({node}))
    length: Any = UNKNOWN if count is None else count
    axis = whole(arguments.get(1, "axis" if "axis" in arguments.named else "dim", 0))
    shape = list(sample.shape)
    if last == "stack":
        at = (axis or 0) if (axis or 0) >= 0 else len(shape) + 1 + (axis or 0)
        shape.insert(at, length)
    elif shape:
        at = {"vstack": 0, "hstack": min(1, len(shape) - 1), "dstack": -1}.get(last, axis if axis is not None else 0)
        if -len(shape) <= at < len(shape):
            numbers = [_size_along(unwrapped(likely(one)), at) for one in items or ()]
            size = whole(shape[at])
            whole_size = None if size is None or count is None else size * count
            shape[at] = sum(n or 0 for n in numbers) if numbers and None not in numbers else (whole_size or UNKNOWN)
    return ArrayValue(tuple(shape), sample.dtype, frozenset({node}))


def _size_along(array: Any, axis: int) -> int | None:
    shape = array.shape if isinstance(array, ArrayValue) else None
    return whole(shape[axis]) if shape and -len(shape) <= axis < len(shape) else None


def _image(last: str, arguments: Any, node: ast.AST) -> Any:
    first = unwrapped(arguments.get(0, "src", UNKNOWN))
    if isinstance(first, OneOf):
        first = next((one for one in first.values if isinstance(one, ArrayValue)), UNKNOWN)
    is_image = isinstance(first, ArrayValue) and first.shape is not None
    if last == "resize":
        size = shape_of(arguments.get(1, "dsize"))
        if size is None or len(size) != 2:
            return ArrayValue(None, np.dtype("uint8"), frozenset({node}))
        dtype = first.dtype if isinstance(first, ArrayValue) else np.dtype("uint8")
        channels = tuple(first.shape[2:]) if is_image else (UNKNOWN,)
        channels = () if channels == (1,) else channels
        return ArrayValue((size[1], size[0], *channels), dtype, frozenset({node}))
    if last == "threshold" and is_image:
        return (UNKNOWN, first.made_by(node))
    if last == "cvtColor" and is_image:
        code = arguments.get(1, "code")
        is_gray = isinstance(code, Reference) and code.last.endswith("GRAY")
        return first.made_by(node, shape=first.shape[:2] if is_gray else first.shape)
    return UNKNOWN


# ------------------------------------------------------------ members and methods


def array_member(array: ArrayValue, name: str) -> Any:
    """Return an attribute of an array."""
    match name:
        case "shape":
            return UNKNOWN if array.shape is None else tuple(array.shape)
        case "ndim":
            return UNKNOWN if array.shape is None else len(array.shape)
        case "dtype":
            return UNKNOWN if array.dtype is None else Reference(f"numpy.{array.dtype.name}")
        case "nbytes":
            return UNKNOWN if array.nbytes is None else array.nbytes
        case "T" | "data":
            return replace(array, shape=array.shape[::-1]) if name == "T" and array.shape else array
        case "device":
            return array.device or UNKNOWN
    return BoundMethod(array, name)


def call_method(array: ArrayValue, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each method
    """Return what a method of an array returns."""
    match name:
        case "astype" | "type":
            wanted = dtype_of(arguments.get(0, "dtype"))
            return array.made_by(node, dtype=wanted) if wanted != array.dtype else array.made_by(node)
        case "float" | "double" | "half" | "long" | "int" | "byte":
            wanted = np.dtype(_TO_DTYPE[name])
            return array if array.dtype == wanted else array.made_by(node, dtype=wanted)
        case "to":
            target = arguments.get(0, "device")
            wanted = dtype_of(arguments.get(1, "dtype", None) or target)
            device = target if isinstance(target, str) and wanted is None else array.device
            moved = array.made_by(node, device=device) if device != array.device else array
            return moved if wanted is None else moved.made_by(node, dtype=wanted)
        case "cuda":
            return array.made_by(node, device="cuda")
        case "cpu":
            return array.made_by(node, device="") if array.device else array
        case "copy" | "clone" | "div" | "mul" | "sub" | "add":
            return array.made_by(node)
        case "reshape" | "view":
            given = arguments.values if len(arguments.values) != 1 else [arguments.values[0]]
            axes = tuple(given) if len(given) != 1 else shape_of(likely(given[0]))
            return replace(array, shape=_reshaped(array, axes))
        case "unsqueeze" if array.shape is not None:
            return replace(array, shape=(1, *array.shape))
        case "squeeze" if array.shape is not None:
            return replace(array, shape=tuple(axis for axis in array.shape if axis != 1))
        case "repeat" if array.shape:
            return _repeated(array, whole(arguments.get(0, "repeats")), whole(arguments.get(1, "axis")), node)
        case "transpose" | "permute" | "swapaxes" | "moveaxis" if array.shape is not None:
            given = (
                arguments.values if len(arguments.values) > 1 else known_items(arguments.get(0, "")) or arguments.values
            )
            order = [number % max(len(array.shape), 1) for number in map(whole, given) if number is not None]
            if sorted(order) == list(range(len(array.shape))):
                return replace(array, shape=tuple(array.shape[one] for one in order))
            return replace(array, shape=array.shape if given else array.shape[::-1])
        case "flatten" | "ravel":
            size = array.shape and all(whole(one) is not None for one in array.shape)
            count = prod(whole(one) or 0 for one in array.shape or ()) if size else UNKNOWN
            made = replace(array, shape=(count,))
            return made.made_by(node) if name == "flatten" else made
        case "size":
            if not arguments.values:
                return UNKNOWN if array.shape is None else tuple(array.shape)
            return item(ArrayValue(), 0) if array.shape is None else _axis(array.shape, arguments.values[0])
        case "item" | "tolist" | "any" | "all" | "sum" | "max" | "min" | "argmax" | "mean" | "nonzero":
            return UNKNOWN
    return array if name in _SAME_MEMORY else ArrayValue()


def _repeated(array: ArrayValue, count: int | None, axis: int | None, node: ast.AST) -> ArrayValue:
    sides = list(array.shape or ())
    if count is None or axis is None or not -len(sides) <= axis < len(sides):
        return ArrayValue(None, array.dtype)
    size = whole(sides[axis])
    sides[axis] = UNKNOWN if size is None else size * count
    return array.made_by(node, shape=tuple(sides))


def _axis(shape: tuple[Any, ...], index: Any) -> Any:
    number = whole(index)
    return shape[number] if number is not None and -len(shape) <= number < len(shape) else UNKNOWN


def _reshaped(array: ArrayValue, axes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if axes is None:
        return None
    if -1 not in axes:
        return axes
    total = array.nbytes
    if total is None or array.dtype is None:
        return tuple(UNKNOWN if one == -1 else one for one in axes)
    known = [whole(one) for one in axes if one != -1]
    rest = prod(one or 1 for one in known)
    size = UNKNOWN if None in known or not rest else total // array.dtype.itemsize // rest
    return tuple(size if one == -1 else one for one in axes)


def item(array: ArrayValue, index: Any) -> ArrayValue:
    """Return `array[index]`: a part of the same memory."""
    if array.shape is None:
        return replace(array, shape=None)
    if isinstance(index, tuple):
        rest = list(array.shape)
        kept: list[Any] = []
        for one in index:
            if one is None:
                kept.append(1)
            elif one is Ellipsis:
                return replace(array, shape=None)
            elif rest:
                axis = rest.pop(0)
                if isinstance(one, slice):
                    kept.append(_length_of_slice(axis, [one.start, one.stop, one.step]))
                elif whole(one) is None:
                    kept.append(UNKNOWN)
        return replace(array, shape=(*kept, *rest))
    if index is None:
        return replace(array, shape=(1, *array.shape))
    return replace(array, shape=array.shape[1:]) if whole(index) is not None else replace(array, shape=None)


def sliced(array: ArrayValue, bounds: list[Any]) -> ArrayValue:
    """Return `array[a:b]`."""
    if not array.shape:
        return array
    return replace(array, shape=(_length_of_slice(array.shape[0], bounds), *array.shape[1:]))


def _length_of_slice(axis: object, bounds: list[Any]) -> object:
    size, numbers = whole(axis), [None if one is None else whole(one) for one in bounds]
    is_known = all(n is not None or b is None for n, b in zip(numbers, bounds, strict=True)) and numbers[2] != 0
    return len(range(*slice(*numbers).indices(size))) if is_known and size is not None else UNKNOWN


def calculated(op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
    """Return what an operator makes of arrays: floats from a division, the larger shape."""
    both = [one for one in (left, right) if isinstance(one, ArrayValue)]
    known = [one for one in both if one.shape is not None] or both
    base = max(known, key=lambda one: len(one.shape or ()))
    dtype = base.dtype
    others = [one for one in (left, right) if isinstance(one, float)]
    is_integer = dtype is not None and dtype.kind in "biu"
    if is_integer and (isinstance(op, ast.Div) or others):
        dtype = np.dtype("float64")
    return base.made_by(node, dtype=dtype)


def unwrapped(value: Any) -> Any:
    """Return the observation of what `env.reset()` returned; any other value as it is."""
    return value.observation if isinstance(value, ReturnedValues) else value


class ReturnedValues(tuple[Any, ...]):
    """What `reset` or `step` returned: an observation first; older environments return fewer values."""

    __slots__ = ()

    @property
    def observation(self) -> Any:
        """The first of the values."""
        return self[0]


def leaf_arrays(value: Any, depth: int = 0) -> Iterable[ArrayValue]:
    """Yield the arrays that a record, tuple or dict holds."""
    value = unwrapped(_largest(value) if isinstance(value, OneOf) else value)
    if isinstance(value, ArrayValue):
        yield value
    elif depth < 4:
        inner: Iterable[Any] = ()
        if isinstance(value, tuple):
            inner = value
        elif isinstance(value, ListValue):
            inner = value.items if value.is_known else ()
        elif isinstance(value, TableValue):
            inner = value.values()
        elif isinstance(value, InstanceValue):  # what an attribute was given last
            inner = [one.values[-1] if isinstance(one, OneOf) else one for one in value.attributes.values()]
        for one in inner:
            yield from leaf_arrays(one, depth + 1)


def _largest(value: OneOf) -> Any:
    arrays_ = [one for one in value.values if isinstance(unwrapped(one), ArrayValue)]
    return max(arrays_, key=lambda one: unwrapped(one).nbytes or 0) if arrays_ else value.values[0]


def space_sample(space: SpaceInfo, node: Any, shared_frames: int = 1) -> Any:
    """Return a value of a space: an array, or a dict of them."""
    made = {
        leaf.name: ArrayValue(leaf.shape, leaf.dtype, frozenset({(node, leaf.name)}), "", shared_frames)
        for leaf in space.leaves
    }
    return TableValue(made.items()) if space.is_dict else made.get("", UNKNOWN)
