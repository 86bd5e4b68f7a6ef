"""Arrays and tensors by shape and dtype: how they are made, converted and read.

In:  the full name of a function, or an array and the name of its method, and the arguments.
Out: an ArrayValue, a number, or UNKNOWN. Whether memory is new or shared is kept: it decides what a buffer costs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source import shapes
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    CallArguments,
    ClassValue,
    InstanceValue,
    ListValue,
    TableValue,
    best_array,
    each_part,
    filled_deque,
    known_items,
    length_of,
    likely,
    unwrapped,
)

WORTH_RECORDING = 2**20
_MANY_ROWS = 5_000  # more than a batch has
INDEX = ArrayValue((), np.dtype(np.int64))  # what counts the rounds of a loop
_FILLED = {"zeros", "ones", "empty", "full", "rand", "randn", "random", "uniform", "normal", "memmap"}
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
_NUMBERS = {"float32", "uint8", "float64", "float16", "int64", "int32"}  # called as functions
_FROM = _NUMBERS | {
    "array", "asarray", "ascontiguousarray", "tensor", "as_tensor", "from_numpy", "asanyarray", "convert_to_tensor",
    "constant",
}  # fmt: skip
_TENSORS = {
    "FloatTensor": "float32", "ByteTensor": "uint8", "LongTensor": "int64", "Tensor": "float32",
    "DoubleTensor": "float64",
}  # fmt: skip
_VIEWS = {"from_numpy", "asarray", "as_tensor", "ascontiguousarray", "asanyarray", *_TENSORS}
_NAMES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "byte": "uint8",
          "bfloat16": "float16", "short": "int16", "float_": "float64", "bool_": "bool", "int_": "int64",
          "single": "float32", "char": "int8", "long_": "int64"}  # fmt: skip
_PACKAGES = {"numpy", "torch", "jax", "cupy", "tensorflow"}


def dtype_of(value: Any, package: str = "numpy") -> np.dtype[Any] | None:
    """Return the dtype that an argument names."""
    if isinstance(value, np.dtype):
        return value
    if isinstance(value, ListValue):
        return _record_dtype(value)
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


def _record_dtype(fields: ListValue) -> np.dtype[Any] | None:
    """Return a dtype of several fields: `[("state", np.uint8, (84, 84)), ("action", np.int32)]`."""
    made: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    for entry in known_items(fields) or ():
        name, kind, *shape = known_items(entry) or (None, None)
        dtype, axes = dtype_of(kind), [whole(one) for one in (shape_of(shape[0]) or (None,) if shape else ())]
        if not isinstance(name, str) or dtype is None or None in axes:
            return None
        made.append((name, dtype, tuple(axis or 0 for axis in axes)))
    return np.dtype(made) if made else None


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return a shape that an argument gives: a number, or a sequence of them."""
    value = likely(value)
    if isinstance(value, ArrayValue) or value is UNKNOWN or value is None:
        return None
    if (items := known_items(value)) is not None:
        return tuple(likely(one) for one in items)
    return (value,) if whole(value) is not None else None


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a function of an array library makes; NotImplemented if it is none that is known here."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    is_other = package == "tensorflow" and (".image" in dotted or ".keras" in dotted or last[:1].isupper())
    if package not in _PACKAGES or last == "prod" or is_other:
        return NotImplemented
    if last == "placeholder":  # what a session will be given
        return ArrayValue.new(node, shape_of(arguments.get(1, "shape")), dtype_of(arguments.get(0, "dtype")))
    if last in _FILLED and not (package == "numpy" and last in {"rand", "randn"} and not arguments.values):
        return _filled(interpreter, package, last, arguments, node)
    first = unwrapped(arguments.get(0, ""))
    if last in _LIKE:
        return _recorded(interpreter, first.made_by(node) if isinstance(first, ArrayValue) else UNKNOWN, node)
    if last in _FROM or last in _TENSORS:
        made = _converted(interpreter, package, last, first, arguments, node)
        return replace(made, is_tensor=package == "torch") if isinstance(made, ArrayValue) else made
    return _function(interpreter, dotted, package, last, first, arguments, node)


def _filled(interpreter: Any, package: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    is_torch, is_drawn = package == "torch", last in {"uniform", "normal"}
    at = 4 if last == "memmap" else 2 if is_drawn else 0
    shape = arguments.get(at, "size" if is_drawn else "shape" if at else "size shape")
    if is_torch and len(arguments.values) > 1 and last != "full" and not is_drawn:
        shape = tuple(arguments.values)
    axes = shape_of(shape) if arguments.is_complete else None
    given = arguments.get(None if is_torch else 2 if last == "full" else 1, "dtype", None)
    if isinstance(given, Reference) and given.last in {"object", "object_"}:
        return ListValue([], whole((axes or (None,))[0]), node=node, is_fixed=True)
    default = "float32" if package in {"torch", "tensorflow", "jax"} else "float64"
    dtype = default if given is None else dtype_of(likely(given), package)
    device = arguments.get(None, "device", "")
    name = device if isinstance(device, str) else "cuda" if device not in (None, "", UNKNOWN) else ""
    return _recorded(interpreter, ArrayValue.new(node, axes, dtype, device=name, is_tensor=is_torch), node)


def _recorded(interpreter: Any, made: Any, node: ast.AST) -> Any:
    if isinstance(made, ArrayValue) and (made.nbytes or 0) >= WORTH_RECORDING:
        scope = interpreter.scope
        times = interpreter.times_since(scope.rounds)
        interpreter.record("array", made, None, node, times=times, call=scope.call, maker=scope.maker)
    return made


def _copied(interpreter: Any, array: ArrayValue, made: ArrayValue, node: ast.AST) -> ArrayValue:
    """Record a copy of an array that has a row for each transition: it is allocated as that one was."""
    rows = whole(array.shape[0]) if array.shape else None
    return made if (rows or 0) < _MANY_ROWS else _recorded(interpreter, made, node)


def _converted(interpreter: Any, package: str, last: str, first: Any, arguments: CallArguments, node: ast.AST) -> Any:
    """Return an array or tensor that is made of another one, of a sequence or of a number."""
    given = arguments.get(1 if package == "numpy" else None, "dtype", None)
    wanted = dtype_of(likely(given), package) if given is not None else dtype_of(last) if last in _NUMBERS else None
    if last in _TENSORS:
        wanted = np.dtype(_TENSORS[last])
        if whole(first) is not None:
            return _recorded(interpreter, ArrayValue.new(node, tuple(arguments.values), wanted), node)
    first = best_array(first)
    if isinstance(first, InstanceValue):
        first = unwrapped(interpreter.converted_to_array(first))
    if isinstance(first, ArrayValue):
        is_same = wanted in {None, first.dtype} and first.shared_frames == 1
        is_view = last in _VIEWS or (last == "array" and arguments.get(None, "copy", True) in (False, None))
        made = first.made_by(node, dtype=wanted or first.dtype)
        return first if is_view and is_same else _copied(interpreter, first, made, node)
    if isinstance(first, int | float):
        return ArrayValue.new(node, (), wanted or "float32")
    if wanted is not None and wanted.names and length_of(first) is not None:  # a record for each item
        return _recorded(interpreter, ArrayValue.new(node, (length_of(first),), wanted), node)
    items = known_items(first) or ()
    if len({isinstance(one, ArrayValue) and bool(one.shape) for one in items}) == 2:
        return tuple(items)  # an array of objects: arrays among other things
    made = shapes.call("array", [_of_arrays(interpreter, first)], {}, node, package == "torch")
    if not isinstance(made, ArrayValue):
        is_raw = first is UNKNOWN and getattr(arguments.nodes.get(0), "attr", "") == "raw_data"  # bytes of CARLA
        return ArrayValue.new(node, None, wanted or ("uint8" if is_raw else None))
    return replace(made, dtype=wanted or made.dtype)


def _of_arrays(interpreter: Any, value: Any) -> Any:
    """Return a sequence with the arrays that its objects are: pictures, frames of a class of the program."""
    value = filled_deque(value)
    items = known_items(value)
    if items is None or not any(isinstance(one, InstanceValue) for one in items):
        return value
    made = [interpreter.converted_to_array(one) if isinstance(one, InstanceValue) else one for one in items]
    return ListValue(made, len(made))


def named_axes(given: list[Any]) -> tuple[Any, ...] | None:
    """Return the axes that `reshape` names, those among them that are not known as such."""
    axes = tuple(given) if len(given) > 1 else shape_of(given[0]) if given else None
    return None if axes is None else tuple(one if (whole(likely(one)) or 0) > 0 else UNKNOWN for one in axes)


def fixed_shape(given: list[Any]) -> tuple[Any, ...] | None:
    """Return the shape that `reshape` names, if it names every axis: whatever the array was before."""
    axes = named_axes(given)
    return None if axes is None or UNKNOWN in axes else axes


def _function(
    interpreter: Any, dotted: str, package: str, last: str, first: Any, arguments: CallArguments, node: ast.AST
) -> Any:
    if shapes.knows(last, package == "torch") and ".nn." not in dotted:
        made = shapes.call(last, arguments.values, arguments.named, node, package == "torch")
        wanted = dtype_of(arguments.named.get("dtype"), package)
        if isinstance(made, ArrayValue):
            return made if wanted is None else replace(made, dtype=wanted)
    if last in {"reshape", "broadcast_to"} and (axes := fixed_shape(arguments.values[1:])) is not None:
        return ArrayValue.new(node, axes, getattr(first, "dtype", None))
    match last:
        case "interpolate" if isinstance(first, ArrayValue) and first.shape:
            sides = shape_of(arguments.get(1, "size", None)) or (UNKNOWN, UNKNOWN)
            return first.made_by(node, shape=(*first.shape[:-2], sides[0], sides[-1]))
        case "frombuffer" | "fromstring":
            return ArrayValue.new(node, (UNKNOWN,), dtype_of(arguments.get(1, "dtype", "float64"), package))
        case "dot" | "matmul" if _is_luma(arguments.get(1, "b")):  # of a picture whose sides are not known
            return ArrayValue.new(node, (UNKNOWN, UNKNOWN), "float64")
        case "isscalar":
            return isinstance(first, int | float | str) if first is not UNKNOWN else UNKNOWN
        case "device":
            return first if isinstance(first, str) else UNKNOWN
        case "dtype":
            found = dtype_of(first)
            return UNKNOWN if found is None else found if found.names else Reference(f"numpy.{found.name}")
        case "copy" | "identity" if isinstance(first, ArrayValue):
            return _copied(interpreter, first, first.made_by(node), node)
        case "cast" if isinstance(first, ArrayValue):
            return first.made_by(node, dtype=dtype_of(arguments.likely(1, "dtype")))
        case "arange" | "linspace":
            count = whole(first) if last == "arange" else whole(arguments.get(2, "num", 50))
            return ArrayValue.new(node, (UNKNOWN if count is None else count,), "int64")
        case "randint":
            return ArrayValue.new(node, shape_of(arguments.get(2, "size")), "int64")
        case "log2" | "ceil" | "floor" | "sqrt" if isinstance(first, int | float) and first > 0:
            return float(getattr(np, last)(first))
    if last[:1].isupper():
        return InstanceValue(Reference(f"{package}.{last}"), node=node)
    is_array = any(isinstance(one, ArrayValue) for one in (first, *(known_items(first) or ())))
    return ArrayValue.new(node) if is_array else UNKNOWN


def _is_luma(weights: Any) -> bool:
    items = known_items(weights) or ()
    return len(items) == 3 and all(isinstance(one, float) for one in items)


# ------------------------------------------------------------ members and methods


def array_member(array: ArrayValue, name: str) -> Any:
    """Return an attribute of an array."""
    match name:
        case "shape" | "ndim":
            axes = array.shape
            return UNKNOWN if axes is None else len(axes) if name == "ndim" else tuple(axes)
        case "dtype":
            return UNKNOWN if array.dtype is None else Reference(f"numpy.{array.dtype.name}")
        case "nbytes":
            return UNKNOWN if array.nbytes is None else array.nbytes
        case "T" | "data":
            return replace(array, shape=array.shape[::-1]) if name == "T" and array.shape else array
        case "device":
            return array.device or UNKNOWN
    return BoundMethod(array, name)


def call_method(interpreter: Any, array: ArrayValue, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method of an array returns."""
    match name:
        case "astype" | "type":
            return array.made_by(node, dtype=dtype_of(arguments.get(0, "dtype")))
        case "float" | "double" | "half" | "long" | "int" | "byte":
            same = array.dtype == np.dtype(_NAMES[name])
            return array if same else array.made_by(node, dtype=np.dtype(_NAMES[name]))
        case "to":
            target = arguments.get(0, "device")
            wanted = dtype_of(arguments.get(1, "dtype", None) or target)
            device = target if isinstance(target, str) and wanted is None else array.device
            moved = array.made_by(node, device=device) if device != array.device else array
            return moved if wanted is None else moved.made_by(node, dtype=wanted)
        case "cuda" | "cpu":
            is_there = name == "cpu" and not array.device
            return array if is_there else array.made_by(node, device="cuda" if name == "cuda" else "")
        case "copy" | "clone" | "__array__" | "_force" | "eval":
            return _copied(interpreter, array, array.made_by(node), node)
        case "tobytes":
            return array.made_by(node, shape=(array.nbytes or UNKNOWN,), dtype=np.dtype(np.uint8))
        case "numpy" | "detach" | "contiguous" | "requires_grad_" | "pin_memory" | "share_memory_":
            return replace(array, is_tensor=array.is_tensor and name != "numpy")
        case "size" | "dim" if array.shape is not None:
            axes, number = tuple(array.shape), whole(arguments.get(0, "dim", None))
            if name == "dim" or number is None:
                return len(axes) if name == "dim" else axes
            return axes[number] if -len(axes) <= number < len(axes) else UNKNOWN
        case "size" | "dim" | "tolist" | "item" | "any" | "all" | "nonzero":
            return UNKNOWN
    if not shapes.knows_method(name, array.is_tensor):
        return ArrayValue()
    made = shapes.call(name, [array, *arguments.values], arguments.named, node, array.is_tensor)
    if made is UNKNOWN and name in {"reshape", "view"} and arguments.is_complete and array.nbytes is None:
        return replace(array, shape=named_axes(arguments.values))
    if made is UNKNOWN and name == "mean" and array.nbytes is None:
        return ArrayValue.new(node, None, "float64")
    is_number = made is UNKNOWN and array.nbytes is not None
    return made if made is not UNKNOWN or is_number else ArrayValue(None, array.dtype, array.origins)


def copied(value: Any, node: ast.AST) -> Any:
    """Return a copy of a value: its arrays are others."""
    value = unwrapped(value)
    if isinstance(value, ArrayValue):
        return value.made_by(node)
    if isinstance(value, ListValue) and not value.is_deque:
        return replace(value, items=[copied(one, node) for one in value.items])
    return each_part(value, lambda one: copied(one, node))


def leaf_arrays(value: Any, depth: int = 0) -> Iterable[ArrayValue]:
    """Yield the arrays that a record, tuple or dict holds."""
    value = best_array(value)
    if isinstance(value, ArrayValue):
        yield value
    elif depth < 4:
        for one in _held(value):
            yield from leaf_arrays(one, depth + 1)


def _held(value: Any) -> Iterable[Any]:
    """Return what a record, tuple or dict holds."""
    match value:
        case tuple():
            return value
        case ListValue():
            return value.items if value.is_known else ()
        case TableValue():
            return value.values()
        case InstanceValue() if value.kind.endswith("TensorDict"):
            return value.arguments.values()
        case InstanceValue(made_of=ClassValue(fields=(_, *_))):
            return value.attributes.values()
        case InstanceValue():  # what an attribute was given last
            return [one.values[-1] if isinstance(one, OneOf) else one for one in value.attributes.values()]
    return ()


def space_sample(space: SpaceInfo, node: Any, shared_frames: int = 1) -> Any:
    """Return a value of a space: an array, or a dict of them."""
    made = {
        leaf.name: ArrayValue(leaf.shape, leaf.dtype, frozenset({(node, leaf.name)}), "", shared_frames)
        for leaf in space.leaves
    }
    return TableValue(made.items()) if space.is_dict else made.get("", UNKNOWN)
