"""Ticks on their way to C: all fields of one are written by one call of append.c.

In:  the rows of a tick; or the arguments of an `add` that need no change, as they are.
Out: ticks written and counted. For arguments as they are, built-in functions of Python, made without headers.
Invariant: C reads the fields of Python's and NumPy's objects only if real ones have them at the places it expects. All
other interpreters go the general way, and store the same.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.native.library import (
    MOST_DIMENSIONS,
    ArgumentFormStruct,
    FastTickStruct,
    FlatFieldStruct,
    LayoutStruct,
    PythonStruct,
    SlicedFieldStruct,
    TickWriterStruct,
)
from holdall.schema import Array, Bytes
from holdall.storage import Arguments, FastTick, FlatField, Form, OpenPart, Repair, SlicedTick, TickWriter, address

_MOST_FIELDS = 32
"""Observation fields that arguments.c has room for."""
_BOOL = np.dtype(np.bool_)
_METH_FASTCALL = 0x80
_CUT_KEY = "TimeLimit.truncated"
_HEAD_BYTES, _OWNER_AT = 16, 24
_FUNCTIONS = {
    "number": "PyLong_FromLongLong", "bytes": "PyBytes_FromStringAndSize", "dict_size": "PyDict_Size",
    "dict_next": "PyDict_Next", "dict_item": "PyDict_GetItemWithError", "list_size": "PyList_Size",
    "list_item": "PyList_GetItem", "str_compare": "PyUnicode_Compare", "error": "PyErr_Occurred", "take": "Py_IncRef",
    "drop": "Py_DecRef",
}  # fmt: skip
_OBJECTS = {
    "array_type": np.ndarray, "dict_type": dict, "ordered_dict_type": OrderedDict, "list_type": list, "str_type": str,
    "is_false": False, "is_none": None,
}  # fmt: skip


class DenseLayout:
    """How C walks through an array whose elements fill its memory, but in another order.

    `order` is the permutation of axes that makes it contiguous, or None if none does.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        self.order = tuple(axes) if array.transpose(axes).flags.c_contiguous else None
        lengths: list[int] = []
        strides: list[int] = []
        for length, stride in zip(array.shape, array.strides, strict=True):
            if lengths and strides[-1] == length * stride:
                lengths[-1], strides[-1] = lengths[-1] * length, stride
            elif length > 1 or not lengths:
                lengths.append(length)
                strides.append(stride)
        if len(lengths) > MOST_DIMENSIONS:
            self.order = None
            return
        numbers = ctypes.c_int64 * MOST_DIMENSIONS
        self._struct = LayoutStruct(len(lengths), numbers(*lengths), numbers(*strides), array.itemsize)
        self.address = ctypes.addressof(self._struct)


def struct_field(name: str) -> Any:
    """Return a property that is a field of an object's `_struct`, read without a call of Python: C counts there."""
    return property(attrgetter(f"_struct.{name}"), lambda self, value: setattr(self._struct, name, value))


class _MethodDef(ctypes.Structure):
    """PyMethodDef, of the stable interface."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _ArrayFields(ctypes.Structure):
    """PyArrayObject_fields, as arguments.c declares it, behind the head of every object."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("dimensions", ctypes.c_int), ("lengths", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("base", ctypes.c_void_p), ("dtype", ctypes.c_void_p), ("flags", ctypes.c_int),
    ]  # fmt: skip


class NativeTickWriter(TickWriter):
    """Writes a tick, or several, by one call of append.c."""

    has_runs = True
    next_tick, pause_tick = struct_field("next_tick"), struct_field("pause_tick")

    def __init__(
        self, library: ctypes.CDLL, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int]
    ) -> None:
        super().__init__(flat, ring_ticks, ticks[0])
        self._write, self._write_ticks = library.holdall_write_tick, library.holdall_write_ticks
        rings = [
            FlatFieldStruct(
                address(field.rows),
                None if field.following is None else address(field.following),
                field.tick_bytes,
                field.is_observation,
            )
            for field in flat
        ]
        self._flat = (FlatFieldStruct * len(rings))(*rings)
        self._sliced = (SlicedFieldStruct * 0)()
        self._parts: list[OpenPart] = []
        self._struct = TickWriterStruct(
            next_tick=ticks[1],
            first_tick=ticks[0],
            ring_ticks=ring_ticks,
            packed_bytes=sum((1 + field.is_observation) * field.tick_bytes for field in flat),
            flat=ctypes.addressof(self._flat),
            flat_count=len(rings),
        )
        self._address = ctypes.addressof(self._struct)

    @property
    def places(self) -> tuple[TickWriterStruct, Any]:
        """The struct that C writes ticks by, and what must live as long as it."""
        return self._struct, (self._flat, self.flat)

    def write(self, rows: Sequence[Array], sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter.write`."""
        return self.write_packed(b"".join([row.tobytes() for row in rows]), sliced, is_kept=is_kept)

    def write_packed(self, packed: bytes, sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter.write_packed`."""
        kept = None if sliced is None else self._aim(sliced)
        ticks = self._write(self._address, packed, len(packed), int(is_kept))
        del kept
        return int(ticks)

    def write_run(self, packed: Bytes, sliced: SlicedTick | None) -> int:
        """See `TickWriter.write_run`."""
        kept, observed = None, [] if sliced is None else [*sliced.obs, *sliced.next_obs]
        if not (packed.flags.c_contiguous and all(a.flags.c_contiguous and len(a) == len(packed) for a in observed)):
            return 0
        if sliced is not None:
            first, next_first = ([array[0] for array in arrays] for arrays in (sliced.obs, sliced.next_obs))
            kept = self._aim(sliced._replace(obs=first, next_obs=next_first))
        written = self._write_ticks(self._address, address(packed), packed.shape[1], len(packed))
        del kept
        return int(written)

    def _aim(self, sliced: SlicedTick) -> list[tuple[Array, Array]]:
        """Point C to the slices of the tick to come."""
        parts: Any = sliced.parts
        if self._parts is not parts:
            rings = [
                SlicedFieldStruct(part.address, address(ring)) for part, ring in zip(parts, sliced.cursors, strict=True)
            ]
            fields = (SlicedFieldStruct * len(rings))(*rings)
            self._struct.sliced_count = 0
            self._sliced = fields
            self._struct.sliced, self._struct.sliced_count = ctypes.addressof(fields), len(rings)
            self._parts = parts
        arrays = zip(parts, self._sliced, sliced.obs, sliced.next_obs, sliced.cursors, strict=True)
        return [part.aim(field, obs, next_obs, ring.shape[1]) for part, field, obs, next_obs, ring in arrays]


class NativeFastTick(FastTick):
    """Two built-in functions over one struct, which is described again when ticks are written to other places.

    Args:
        lock: The memory's own.
    """

    is_open = struct_field("is_open")

    def __init__(self, library: ctypes.CDLL, lock: Any, repair: Repair) -> None:
        self._writer: Any = None
        self._is_readable = False
        pending = np.frombuffer(repair.is_pending, np.uint8)
        self._struct = FastTickStruct(
            python=ctypes.addressof(_python()), lock_owner=owner_address(lock), is_pending=address(pending),
            cut_key=id(_CUT_KEY),
        )  # fmt: skip
        self._kept: list[Any] = []
        # A tuple, and not an array that has all: the collector of cycles looks into tuples.
        owner = (np.frombuffer(memoryview(self._struct).cast("B"), np.uint8), lock, pending, self._kept)
        self.add, self.pack = (built_in(name, library, owner) for name in ("holdall_fast_add", "holdall_fast_pack"))

    def offer(self, writer: Any, describe: Callable[[], Arguments | None]) -> None:
        """See `FastTick.offer`."""
        if self._writer is not writer:
            arguments = describe()
            if arguments is None:
                return
            self._is_readable = _is_readable(arguments, writer.places[0].packed_bytes)
            self._describe(arguments, *writer.places)
            self._writer = writer
        self._struct.is_open = self._is_readable

    def end(self) -> None:
        """See `FastTick.end`."""
        self._struct.is_open = 0

    def close(self) -> None:
        """See `FastTick.close`."""
        self._struct.is_open = 0
        self._writer = None
        self._kept.clear()

    def _describe(self, arguments: Arguments, writer: TickWriterStruct, kept: Any) -> None:
        """Say what arguments must be and where they go, while nothing is written this way."""
        self.fills_blocks, self.is_dict = bool(arguments.large), arguments.is_dict
        self.small_keys, self.large_keys = list(arguments.small), list(arguments.large)
        observed = [_form(form, key) for fields in (arguments.small, arguments.large) for key, form in fields.items()]
        rest = [arguments.action, arguments.reward, *[_flags(arguments)] * 2]
        forms, packed = (ArgumentFormStruct * len(observed))(*observed), np.empty(writer.packed_bytes, np.uint8)
        self._kept[:] = [writer, kept, forms, packed, arguments]
        struct = self._struct
        struct.writer, struct.observed = ctypes.addressof(writer), ctypes.addressof(forms)
        struct.observed_count, struct.small_count = len(observed), len(arguments.small)
        struct.is_dict, struct.rest = arguments.is_dict, (ArgumentFormStruct * 4)(*map(_form, rest))
        struct.packed, struct.packed_bytes = address(packed), packed.size


def _is_readable(arguments: Arguments, packed_bytes: int) -> bool:
    """Whether arguments.c has room for such arguments, and packs them into so many bytes."""
    small, rest = list(arguments.small.values()), [arguments.action, arguments.reward, *[_flags(arguments)] * 2]
    forms = [*small, *arguments.large.values(), *rest]
    if len(forms) > _MOST_FIELDS or any(len(shape) > MOST_DIMENSIONS for shape, _ in forms):
        return False
    return sum(map(_form_bytes, [*small, *small, *rest])) == packed_bytes


def has_expected_objects(lock: Any) -> bool:
    """Whether this interpreter's objects are as arguments.c expects them, the lock too."""
    return type(lock) is type(threading.RLock()) and _has_expected_layout()


@functools.cache
def _has_expected_layout() -> bool:
    """Compare where objects of this interpreter have their fields with what arguments.c expects."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    if object.__basicsize__ != _HEAD_BYTES or np.ndarray.__basicsize__ < _HEAD_BYTES + ctypes.sizeof(_ArrayFields):
        return False
    if not all(hasattr(ctypes.pythonapi, name) for name in (*_FUNCTIONS.values(), "PyCFunction_NewEx")):
        return False
    if not _has_expected_lock():
        return False
    pair, plane = (object(), object()), np.zeros((3, 4), np.int16)
    arrays: list[Array] = [np.zeros((2, 3, 5), np.float32), plane.T, plane[::2], np.zeros((), np.bool_), np.ones(7)]
    items = ctypes.c_void_p * 3
    return list(items.from_address(id(pair) + _HEAD_BYTES)) == [len(pair), *map(id, pair)] and all(
        map(_is_as_expected, arrays)
    )


def owner_address(lock: Any) -> int:
    """Return where C sees which thread holds a lock that is as expected."""
    return id(lock) + _OWNER_AT


def _has_expected_lock() -> bool:
    """Whether a lock says where arguments.c looks which thread holds it."""
    lock: Any = threading.RLock()
    if type(lock).__basicsize__ < _OWNER_AT + 8:
        return False
    owner, found = ctypes.c_uint64.from_address(id(lock) + _OWNER_AT), []
    changes: list[Callable[[], object]] = [int, lock.acquire, lock.acquire, lock.release, lock.release]
    for change in changes:
        change()
        found.append(owner.value)
    here = threading.get_ident()
    return found == [0, here, here, here, 0]


def _is_as_expected(array: Array) -> bool:
    """Whether an array's fields lie where arguments.c reads them; nothing is followed before its place is certain."""
    if ctypes.c_void_p.from_address(id(array) + 8).value != id(np.ndarray):
        return False
    found = _ArrayFields.from_address(id(array) + _HEAD_BYTES)
    given = (found.data, found.dimensions, found.dtype, found.flags)
    if given != (array.ctypes.data, array.ndim, id(array.dtype), array.flags.num):
        return False
    if found.base != (None if array.base is None else id(array.base)):
        return False
    if not array.ndim:
        return True
    if found.lengths is None or found.strides != found.lengths + 8 * array.ndim:
        return False
    numbers = ctypes.c_int64 * array.ndim
    return all(
        tuple(numbers.from_address(place)) == expected
        for place, expected in ((found.lengths, array.shape), (found.strides, array.strides))
    )


@functools.cache
def _python() -> PythonStruct:
    """Return the functions and objects that arguments.c needs; they live as long as the process."""
    functions = {
        field: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for field, name in _FUNCTIONS.items()
    }
    return PythonStruct(**functions, **{field: id(each) for field, each in _OBJECTS.items()})


@functools.cache
def _method(name: str, function: int) -> _MethodDef:
    return _MethodDef(name.encode(), function, _METH_FASTCALL, None)


def built_in(name: str, library: ctypes.CDLL, owner: tuple[Any, ...]) -> Any:
    """Make a function of C a function of Python, whose first argument is `owner`."""
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return _maker()(ctypes.addressof(_method(name, function)), owner, None)


@functools.cache
def _maker() -> Any:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return prototype(("PyCFunction_NewEx", ctypes.pythonapi))


def _flags(arguments: Arguments) -> Form:
    return arguments.action[0][:1], _BOOL


def _form_bytes(form: Form) -> int:
    return prod(form[0]) * form[1].itemsize


def _form(form: Form, key: str = "") -> ArgumentFormStruct:
    """Describe an argument to C; the caller keeps the key and the dtype alive."""
    shape, dtype = form
    lengths = (ctypes.c_int64 * MOST_DIMENSIONS)(*shape)
    return ArgumentFormStruct(id(key), id(dtype), len(shape), lengths, _form_bytes(form))
