"""A tick added, or a batch drawn, in one call: functions of C as built-in functions of Python, made without headers.

In:  where all fields lie, and what the arguments of an `add` must be, as the store says it.
Out: `add`, which arguments.c does with arrays as they are; and `draw`, for which batch.c makes the arrays.
Invariant: C reads and makes objects of Python and NumPy only if real ones have their fields where it expects them. All
other interpreters go the general way, and store and read the same.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from holdall.background import tell_of_forks
from holdall.native.library import (
    KEPT_MEMORIES,
    MOST_DIMENSIONS,
    ArgumentFormStruct,
    ArrayMakerStruct,
    BatchArrayStruct,
    BatchFieldStruct,
    BatchReaderStruct,
    FastTickStruct,
    PythonStruct,
    TickWriterStruct,
)
from holdall.native.reading import NativeDecoder, ThreadPool, global_generator, number_function
from holdall.native.writing import struct_field
from holdall.schema import Array
from holdall.storage import (
    ALIGNMENT_BYTES,
    RECORD_FIELDS,
    Arguments,
    BatchArray,
    BatchReader,
    BatchSource,
    FastTick,
    Form,
    Repair,
    SegmentIndex,
    address,
)

_MOST_ARGUMENTS = 32
"""Observation fields that arguments.c has room for."""
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
    "is_false": False, "is_true": True, "is_none": None,
}  # fmt: skip
_BYTES_PER_THREAD, _SEALED_BYTES_PER_THREAD, _PIECE_BYTES = 1 << 20, 1 << 18, 1 << 16
"""A thread is woken only for at least this much to copy, or to decode; and what it takes at once."""
_BYTES_WITHOUT_GIL = 1 << 16
"""Copying less takes no longer than it takes to give up the GIL and to get it back."""
_MOST_SHORT_BYTES = 1 << 20
"""Short fields are copied with the GIL: more would keep other threads waiting."""
_ONE_MEMORY_BYTES = 1 << 15
"""See `RowTable`."""
_LEAST_KEPT_BYTES = 1 << 16
"""Smaller memory is cheap to allocate; above it, fresh pages cost more than the copy."""
_LOOK_AGAIN_S = 0.001
_MOST_COLUMNS, _MOST_FIELDS = 160, 16
_BYTE, _ID = np.dtype(np.uint8), np.dtype(np.int64)
_SEALED = RECORD_FIELDS.index("sealed")
_MAKERS = {
    "new_tuple": "PyTuple_New", "set_item": "PyTuple_SetItem", "as_number": "PyLong_AsLongLong",
    "number": "PyLong_FromLongLong", "clear_error": "PyErr_Clear", "save_thread": "PyEval_SaveThread",
    "restore_thread": "PyEval_RestoreThread", "own_thread": "PyThread_get_thread_ident", "take": "Py_IncRef",
    "drop": "Py_DecRef",
}  # fmt: skip
_NEW_ARRAY, _SET_BASE = 94, 282
"""Places of PyArray_NewFromDescr and PyArray_SetBaseObject in the table that NumPy gives to extensions."""
_ARRAY_INTERFACES = {0x02000000}
"""Versions of that table, which its first function returns."""


# ---------------------------------------------------------------- adding


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
        forms, packed = (ArgumentFormStruct * len(observed))(*observed), np.empty(writer.packed_bytes, np.uint8)
        self._kept[:] = [writer, kept, forms, packed, arguments]
        struct = self._struct
        struct.writer, struct.observed = ctypes.addressof(writer), ctypes.addressof(forms)
        struct.observed_count, struct.small_count = len(observed), len(arguments.small)
        struct.large_bytes = 2 * sum(map(_form_bytes, arguments.large.values()))
        struct.is_dict, struct.rest = arguments.is_dict, (ArgumentFormStruct * 4)(*map(_form, arguments.rest))
        struct.packed, struct.packed_bytes = address(packed), packed.size


def _is_readable(arguments: Arguments, packed_bytes: int) -> bool:
    """Whether arguments.c has room for such arguments, and packs them into so many bytes."""
    small, rest = list(arguments.small.values()), arguments.rest
    forms = [*small, *arguments.large.values(), *rest]
    if len(forms) > _MOST_ARGUMENTS or any(len(shape) > MOST_DIMENSIONS for shape, _ in forms):
        return False
    return sum(map(_form_bytes, [*small, *small, *rest])) == packed_bytes


def _form_bytes(form: Form) -> int:
    return prod(form[0]) * form[1].itemsize


def _form(form: Form, key: str = "") -> ArgumentFormStruct:
    """Describe an argument to C; the caller keeps the key and the dtype alive."""
    shape, dtype = form
    lengths = (ctypes.c_int64 * MOST_DIMENSIONS)(*shape)
    return ArgumentFormStruct(id(key), id(dtype), len(shape), lengths, _form_bytes(form))


# ---------------------------------------------------------------- drawing


class NativeBatchReader(BatchReader):
    """One built-in function over one struct, which is described again when fields lie elsewhere.

    Args:
        lock: The memory's own.
        index: Says when segments, their blocks or rings are others than before, and keeps what is read till then.
        most_kept_bytes: Most memory that is kept for the next batches.
        threads: That share the copying of a batch.
    """

    def __init__(
        self, library: ctypes.CDLL, decoder: NativeDecoder, lock: Any, repair: Repair, index: SegmentIndex,
        most_kept_bytes: int, threads: int,
    ) -> None:  # fmt: skip
        self._library, self._decoder = library, decoder
        self._is_changed, self._index = index.is_changed, index
        self._threads, self._decoders = threads, list[Any]()
        self._pool: ThreadPool | None = None  # made when a batch is worth several threads
        flags = [np.frombuffer(flag, np.uint8) for flag in (repair.is_pending, index.is_changed)]
        self._struct = BatchReaderStruct(
            maker=ctypes.addressof(_array_maker()), bytes_per_thread=_BYTES_PER_THREAD,
            sealed_bytes_per_thread=_SEALED_BYTES_PER_THREAD, piece_bytes=_PIECE_BYTES,
            bytes_without_gil=_BYTES_WITHOUT_GIL, one_memory_bytes=_ONE_MEMORY_BYTES,
            least_kept_bytes=_LEAST_KEPT_BYTES, most_kept_bytes=most_kept_bytes,
            lock_owner=owner_address(lock), is_pending=address(flags[0]), is_changed=address(flags[1]),
        )  # fmt: skip
        self._described: list[Any] = []  # what the struct points into, but for the fields themselves
        # A tuple, and not an array that has all: the collector of cycles looks into tuples.
        struct = np.frombuffer(memoryview(self._struct).cast("B"), np.uint8)
        owner = (struct, lock, flags, self._described, index)
        self.draw, self.gather = (built_in(f"holdall_fast_{name}", library, owner) for name in ("draw", "gather"))
        self._release = weakref.finalize(self, _release_memory, self._struct)
        tell_of_forks(self)

    def needs(self, rows: int) -> bool:
        """See `BatchReader.needs`."""
        struct = self._struct
        return not struct.is_busy and bool(
            not struct.is_open
            or self._is_changed[0]
            or struct.most_rows < rows
            or struct.generator != id(global_generator())
        )

    def offer(self, source: BatchSource, rows: int) -> None:
        """See `BatchReader.offer`."""
        struct, table = self._struct, source.rows.table
        struct.is_open = 0
        columns, row_bytes = table.columns(), sum(table.spans(ALIGNMENT_BYTES)[1:3]) // ALIGNMENT_BYTES
        room = min(max(rows, struct.most_rows), _MOST_SHORT_BYTES // max(row_bytes, 1))
        is_readable = len(columns) <= _MOST_COLUMNS and len(source.rows.large) <= _MOST_FIELDS
        wanted = (*source.arrays, *source.gathered)
        is_readable &= all(0 not in array.shape and len(array.shape) < MOST_DIMENSIONS for array in wanted)
        if struct.is_busy or not is_readable or room < rows:
            return
        self._is_changed[0] = 0
        generator = global_generator()
        arrays, gathered = (
            (BatchArrayStruct * len(some))(*map(_array_struct, some)) for some in (source.arrays, source.gathered)
        )
        scratch = [np.empty(room, dtype) for dtype in (np.int64, np.int64, np.int32, np.int32)]
        kept = (source, columns, tuple(source.rows.records))  # of the tables, whose list changes
        self._described[:], self._index.in_use[:] = [arrays, gathered, scratch, generator], [kept]
        struct.writer, struct.columns = ctypes.addressof(source.writer.places[0]), address(columns)
        struct.column_count, struct.arrays, struct.array_count = len(columns), ctypes.addressof(arrays), len(arrays)
        struct.gathered, struct.gathered_count = ctypes.addressof(gathered), len(gathered)
        struct.kept, struct.first_tick, struct.capacity_ticks = id(kept), source.first_tick, source.capacity_ticks
        struct.lanes, struct.ring_rows, struct.most_rows = source.lanes, source.rows.ring_rows, room
        struct.ids, struct.drawn_lanes, struct.segment, struct.lane = map(address, scratch)
        struct.generator, struct.generator_is_locked = id(generator), id(generator.lock) + _held_at()
        next_uint32, state = number_function(generator)
        struct.next_uint32, struct.generator_state = next_uint32, state
        self._describe_fields(source, len(columns))
        self._call_helpers(source, room)
        struct.is_open = 1

    def _describe_fields(self, source: BatchSource, columns: int) -> None:
        """Say where large fields lie."""
        struct, rows = self._struct, source.rows
        struct.field_count, struct.segments = len(rows.large), len(rows.first_ticks)
        struct.first_ticks = address(rows.first_ticks) if len(rows.first_ticks) else None
        for k, (records, nbytes) in enumerate(zip(rows.records, source.large_bytes, strict=True)):
            is_sealed = bool(records[:, _SEALED].any())
            cursors = columns - len(rows.large) + k
            struct.field[k] = BatchFieldStruct(address(records), len(records), nbytes, cursors, is_sealed)

    def _call_helpers(self, source: BatchSource, rows: int) -> None:
        """Start the threads and make the decoders that batches of so many rows are worth."""
        struct = self._struct
        bytes_of = [2 * rows * nbytes for nbytes in source.large_bytes]
        sealed = [field.is_sealed for field in struct.field[: struct.field_count]]
        least = [_SEALED_BYTES_PER_THREAD if is_sealed else _BYTES_PER_THREAD for is_sealed in sealed]
        wanted = max((nbytes // one for nbytes, one in zip(bytes_of, least, strict=True)), default=0)
        threads = max(1, min(self._threads, wanted))
        struct.pool, struct.most_helpers = None, threads - 1
        if threads > 1:
            self._pool = self._pool or ThreadPool(self._threads)
            struct.pool = self._pool.started(self._library)
        struct.decoders = None
        if any(sealed):
            self._decoders = self._decoder.more_decoders(self._decoders, threads, 3 * max(source.large_bytes))
            addresses = (ctypes.c_void_p * threads)(*(memory.address for memory in self._decoders))
            self._described.append((addresses, self._decoders))
            struct.decoders = ctypes.addressof(addresses)

    def close(self) -> None:
        """See `BatchReader.close`."""
        self._struct.is_open = 0
        while self._struct.is_busy:
            if self._struct.is_busy == threading.get_ident():  # a finalizer that the collector runs in the middle of it
                return  # the rest is freed with this object
            time.sleep(_LOOK_AGAIN_S)
        _release_memory(self._struct)
        if self._pool is not None:
            self._pool.dismiss()
        self._described.clear()
        self._index.in_use.clear()
        self._decoders = []

    def after_fork(self) -> None:
        """Leave the parent's threads, and what one of them is in the middle of."""
        self._struct.is_open = self._struct.is_busy = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # asked of C
        """Bytes kept for the next batches."""
        return int(self._struct.kept_bytes)

    def arrays(self) -> list[Array]:
        """Return what is kept for the next batches."""
        return [ctypes.cast(owner, ctypes.py_object).value for owner in self._struct.kept_owner if owner]


def _release_memory(struct: BatchReaderStruct) -> None:
    """Let go of the memory that is kept; who uses it keeps it."""
    struct.is_open = 0
    for place in range(KEPT_MEMORIES):
        owner, struct.kept_owner[place], struct.kept_length[place] = struct.kept_owner[place], None, 0
        if owner:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(owner))
    struct.kept_bytes = 0


def _array_struct(array: BatchArray) -> BatchArrayStruct:
    """Describe an array to C; the caller keeps the dtype alive."""
    lengths = (ctypes.c_int64 * MOST_DIMENSIONS)(0, *array.shape)
    return BatchArrayStruct(
        id(array.dtype), 1 + len(array.shape), lengths, array.column, array.field, int(array.is_next)
    )


# ---------------------------------------------------------------- what C expects


class _MethodDef(ctypes.Structure):
    """PyMethodDef, of the stable interface."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    ]  # fmt: skip


class _ArrayFields(ctypes.Structure):
    """PyArrayObject_fields, as arguments.c declares it, behind the head of every object."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("dimensions", ctypes.c_int), ("lengths", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("base", ctypes.c_void_p), ("dtype", ctypes.c_void_p), ("flags", ctypes.c_int),
    ]  # fmt: skip


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


def makes_arrays() -> bool:
    """Whether batch.c can make arrays in this interpreter, and see whether a generator is in use."""
    names = (*_MAKERS.values(), "PyCapsule_GetPointer")
    return (
        all(hasattr(ctypes.pythonapi, name) for name in names) and bool(_held_at()) and _array_interface() is not None
    )


@functools.cache
def _array_interface() -> Any:
    """Return the table of functions that NumPy gives to extensions; None if it is not one that is known here."""
    capsule = getattr(sys.modules.get("numpy._core._multiarray_umath"), "_ARRAY_API", None)
    if capsule is None:
        return None
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    table = (ctypes.c_void_p * (_SET_BASE + 1)).from_address(get(capsule, None))
    version = ctypes.PYFUNCTYPE(ctypes.c_uint)(table[0] or 0)()
    return table if version in _ARRAY_INTERFACES else None


@functools.cache
def _array_maker() -> ctypes.Structure:
    """Return the functions and objects that batch.c makes arrays with; they live as long as the process."""
    functions = {
        field: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
        for field, name in _MAKERS.items()
    }
    table = _array_interface()
    return ArrayMakerStruct(
        array_type=id(np.ndarray), byte_dtype=id(_BYTE), id_dtype=id(_ID), new_array=table[_NEW_ARRAY],
        set_base=table[_SET_BASE], **functions,
    )  # fmt: skip


@functools.cache
def _held_at() -> int:
    """Return which byte of a lock says that somebody has it; 0 if that is not found."""
    lock, other = threading.Lock(), threading.Lock()
    for place in range(object.__basicsize__, type(lock).__basicsize__):
        found = []
        for each in (lock, other, lock):
            held = ctypes.c_uint8.from_address(id(each) + place)
            found.append(held.value)
            with each:
                found.append(held.value)
            found.append(held.value)
        if found == [0, 1, 0] * 3:
            return place
    return 0
