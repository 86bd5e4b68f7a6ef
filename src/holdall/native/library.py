"""Declarations of the functions of `holdall._native` that are called through ctypes.

In:  the file of the extension module `holdall._native`, which has Zstandard and LZ4 inside.
Out: their functions, with the types of all arguments declared; the structs that C and Python share.
Invariant: a library is used only if its version, and the size and every offset of its structs, are those of this file.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdall import _native
from holdall.storage import APART_FIELDS, COLUMN_FIELDS, COLUMN_TABLES, RECORD_FIELDS, TRANSFORM_FIELDS

_VERSION = 33
"""What holdall_version must return; raised with every change of an exported function."""

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
_NATURAL = ctypes.c_uint64
MOST_DIMENSIONS = 8


# ---------------------------------------------------------------- structs, as structs.h declares them


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, POINTER) for name in names.split()]


def _numbers(names: str) -> list[tuple[str, Any]]:
    return [(name, NUMBER) for name in names.split()]


class TransformStruct(ctypes.Structure):
    """What is done to a slice before it is compressed."""

    _fields_ = _numbers(" ".join(TRANSFORM_FIELDS))


class SealedBlockStruct(ctypes.Structure):
    """A sealed block, in memory or in a file."""

    _fields_ = [
        *_pointers("data offsets checks palette places ddict common"),
        *_numbers("common_bytes place_bytes data_bytes slice_count"),
        *_numbers("group method file file_start"),
        ("form", TransformStruct),
    ]


class DecodedSliceStruct(ctypes.Structure):
    """Where a slice stands that was decoded for a batch."""

    _fields_ = [("batch", _NATURAL), *_numbers("sealed number"), *_pointers("slice")]


class DecoderStruct(ctypes.Structure):
    """The memory of one thread that decodes."""

    _fields_ = [
        *_pointers("dctx scratch"), *_numbers("scratch_bytes"),
        *_pointers("unit"), *_numbers("unit_bytes"), *_pointers("unit_behind unit_of"),
        *_numbers("unit_number unit_filled changed"), *_pointers("next_change"),
        *_pointers("read"), *_numbers("read_bytes"), *_pointers("read_of"), *_numbers("read_first read_end"),
        *_pointers("unit_palette colours"), *_numbers("error"),
        ("batch", _NATURAL), *_numbers("decoded_places"), *_pointers("decoded"),
    ]  # fmt: skip


class EncoderStruct(ctypes.Structure):
    """The memory of one thread that encodes."""

    _fields_ = [
        *_pointers("cctx stream loaded scratch"), *_numbers("scratch_bytes"),
        *_pointers("common"), *_numbers("common_bytes group method level"),
    ]  # fmt: skip


class SliceBlockStruct(ctypes.Structure):
    """A block of unique slices, and the table that finds them."""

    _fields_ = [*_pointers("arena hashes slots"), *_numbers("mask capacity used slice_bytes")]


class LayoutStruct(ctypes.Structure):
    """How a tick lies in the caller's memory."""

    _fields_ = [
        *_numbers("dimensions"), ("lengths", NUMBER * MOST_DIMENSIONS), ("strides", NUMBER * MOST_DIMENSIONS),
        *_numbers("run_bytes"),
    ]  # fmt: skip


class OpenPartStruct(ctypes.Structure):
    """One field of the open segment."""

    _fields_ = [
        *_pointers("block direct log last last_raw packed last_layout end scratch"),
        *_numbers("log_rows lanes outer run_bytes window shift longest steps broken_steps pushed"),
    ]


class FlatFieldStruct(ctypes.Structure):
    """A field of a tick that lies in a flat ring."""

    _fields_ = [*_pointers("rows next apart"), *_numbers("tick_bytes is_observation")]


class SlicedFieldStruct(ctypes.Structure):
    """A field of a tick that is cut into slices."""

    _fields_ = _pointers("part cursors obs next_obs order known strides")


class TickWriterStruct(ctypes.Structure):
    """All fields of a memory, and how many ticks were written."""

    _fields_ = [
        *_numbers("next_tick first_tick ring_ticks packed_bytes"),
        *_pointers("flat sliced"),
        *_numbers("flat_count sliced_count pause_tick blocks_pause_tick"),
        *_pointers("sealed_bytes"),
        *_numbers("most_ahead lanes"),
        *_pointers("is_changed"),
    ]


class PythonStruct(ctypes.Structure):
    """Functions of Python's stable interface, and objects that are known by their addresses."""

    _fields_ = [
        *_pointers("array_type dict_type ordered_dict_type list_type str_type is_false is_true is_none"),
        *_pointers("number bytes dict_size dict_next dict_item list_size list_item str_compare"),
        *_pointers("error take drop"),
    ]


class ArgumentFormStruct(ctypes.Structure):
    """What an argument must be to be written as it is."""

    _fields_ = [
        *_pointers("key dtype"), *_numbers("dimensions"), ("lengths", NUMBER * MOST_DIMENSIONS), *_numbers("bytes"),
    ]  # fmt: skip


class FastTickStruct(ctypes.Structure):
    """Ticks whose arguments need no change."""

    _fields_ = [
        *_pointers("python writer observed"), *_numbers("observed_count small_count large_bytes is_dict"),
        ("rest", ArgumentFormStruct * 4), *_pointers("packed"), *_numbers("packed_bytes is_open"),
        *_pointers("cut_key lock_owner is_pending"),
    ]  # fmt: skip


def _table(name: str, fields: Sequence[str]) -> type[ctypes.Structure]:
    """Describe a row of a table."""
    return type(name, (ctypes.Structure,), {"_fields_": _numbers(" ".join(fields))})


class NamesStruct(ctypes.Structure):
    """The slices of a batch, each named once."""

    _fields_ = [*_pointers("part number slots"), *_numbers("mask room count")]


_MOST_BATCH_FIELDS, KEPT_MEMORIES = 16, 16
ArrayMakerStruct = _table("ArrayMakerStruct", (
    "array_type", "byte_dtype", "id_dtype", "new_array", "set_base", "new_tuple", "set_item", "as_number", "number",
    "clear_error", "save_thread", "restore_thread", "own_thread", "take", "drop",
))  # fmt: skip
BatchFieldStruct = _table("BatchFieldStruct", ("parts", "part_count", "obs_bytes", "cursor_column", "is_sealed"))


class BatchArrayStruct(ctypes.Structure):
    """An array of a batch for the host."""

    _fields_ = [
        *_pointers("dtype"), *_numbers("dimensions"), ("lengths", NUMBER * MOST_DIMENSIONS),
        *_numbers("column field is_next"),
    ]  # fmt: skip


class BatchReaderStruct(ctypes.Structure):
    """What batches for the host are read from, and what they are made with."""

    _fields_ = [
        *_pointers("maker writer columns"), *_numbers("column_count"), *_pointers("arrays"), *_numbers("array_count"),
        *_pointers("gathered"), *_numbers("gathered_count"),
        ("field", BatchFieldStruct * _MOST_BATCH_FIELDS), *_numbers("field_count"), *_pointers("first_ticks"),
        *_numbers("segments"), *_pointers("kept"), *_numbers("first_tick capacity_ticks lanes ring_rows most_rows"),
        *_pointers("ids drawn_lanes segment lane decoders pool"),
        *_numbers("most_helpers bytes_per_thread sealed_bytes_per_thread piece_bytes bytes_without_gil"),
        *_numbers("one_memory_bytes"),
        *_numbers("least_kept_bytes most_kept_bytes kept_bytes"), ("kept_owner", POINTER * KEPT_MEMORIES),
        ("kept_length", NUMBER * KEPT_MEMORIES),
        *_pointers("generator next_uint32 generator_state generator_is_locked lock_owner is_pending is_changed"),
        *_numbers("is_open is_busy"),
    ]  # fmt: skip


MOST_DEVICE_FIELDS, _MOST_COPIED = 16, 4


class DeviceFieldStruct(ctypes.Structure):
    """A field of a batch in slices, as device.cu declares it, too."""

    _fields_ = [
        *_pointers("places positions repeats base to"), *_numbers("first end end_repeat window outer run_bytes"),
    ]  # fmt: skip


class AssemblyStruct(ctypes.Structure):
    """What one launch does."""

    _fields_ = [
        *_pointers("head_from head_to"), *_numbers("head_bytes fields"),
        ("field", DeviceFieldStruct * MOST_DEVICE_FIELDS),
    ]  # fmt: skip


class SlicedSourceStruct(ctypes.Structure):
    """Where a field of a batch lies on the host."""

    _fields_ = [
        *_pointers("parts"), *_numbers("part_count"), *_pointers("cursors starts"),
        *_numbers("are_named places positions repeats to"),
    ]  # fmt: skip


class CopiedArrayStruct(ctypes.Structure):
    """An array that is copied into pinned memory as it is."""

    _fields_ = [*_pointers("source"), *_numbers("offset bytes")]


class RowPlaceStruct(ctypes.Structure):
    """Where a row's observation lies."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("segment", "lane", "cursor", "unused")]


class BatchRequestStruct(ctypes.Structure):
    """A batch that a device is to put together."""

    _fields_ = [
        *_pointers("ids last_ids"), *_numbers("rows"), *_pointers("next_uint32 generator_state"), *_numbers("filled"),
        *_numbers("drawn_slots newest"), *_pointers("drawn_lanes"), *_numbers("first_id next_id ring_rows lanes"),
        *_pointers("columns"), *_numbers("column_count"), *_pointers("first_ticks"), *_numbers("segments"),
        *_pointers("head block"), *_numbers("observed rest last_observed last_rest"),
        ("copied", CopiedArrayStruct * _MOST_COPIED), *_numbers("copied_count"),
        ("source", SlicedSourceStruct * MOST_DEVICE_FIELDS), *_pointers("slots"), *_numbers("slot_count"),
        *_pointers("found"), *_numbers("first_rows"), *_pointers("launch bring finish stream record event"),
        *_numbers("most_blocks wrong"), ("task", AssemblyStruct),
    ]  # fmt: skip


_TABLES = {"part": RECORD_FIELDS, "row_column": COLUMN_FIELDS, "apart_rows": APART_FIELDS, **COLUMN_TABLES}
"""Rows of tables that Python writes as arrays."""
_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "transform": TransformStruct, "sealed_block": SealedBlockStruct, "decoded_slice": DecodedSliceStruct,
    "decoder": DecoderStruct, "encoder": EncoderStruct, "slice_block": SliceBlockStruct, "layout": LayoutStruct,
    "open_part": OpenPartStruct, "flat_field": FlatFieldStruct, "sliced_field": SlicedFieldStruct,
    "tick_writer": TickWriterStruct, "python": PythonStruct, "argument_form": ArgumentFormStruct,
    "fast_tick": FastTickStruct, "names": NamesStruct,
    "array_maker": ArrayMakerStruct, "batch_array": BatchArrayStruct, "batch_field": BatchFieldStruct,
    "batch_reader": BatchReaderStruct, "device_field": DeviceFieldStruct, "assembly": AssemblyStruct,
    "sliced_source": SlicedSourceStruct, "copied_array": CopiedArrayStruct, "row_place": RowPlaceStruct,
    "batch_request": BatchRequestStruct,
    **{name: _table(name, fields) for name, fields in _TABLES.items()},
}  # fmt: skip
"""By the name of the struct in C."""


class _StructField(ctypes.Structure):
    """A row of what holdall_structs returns; without a field, the struct itself."""

    _fields_ = [("type", ctypes.c_char_p), ("field", ctypes.c_char_p), *_numbers("offset size")]


def _struct_problem(library: ctypes.CDLL) -> str | None:
    """Compare the structs of a library with those of this file; return the first difference."""
    count = NUMBER()
    rows = library.holdall_structs(ctypes.addressof(count))
    found = {(row.type.decode(), row.field.decode()): (int(row.offset), int(row.size)) for row in rows[: count.value]}
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    for name, struct in _STRUCTS.items():
        expected[name, ""] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            expected[name, field] = (place.offset, place.size)
    for name, field in sorted(expected.keys() | found.keys()):
        if (here := expected.get((name, field))) != (there := found.get((name, field))):
            return f"{name}.{field} has (offset, size) {there} in C and {here} in Python"
    return None


# ---------------------------------------------------------------- functions

_TYPES = {
    "p": POINTER, "n": NUMBER, "u": _NATURAL, "i": ctypes.c_int, "j": ctypes.c_uint, "f": ctypes.c_float,
    "d": ctypes.c_double, "z": ctypes.c_size_t, "s": ctypes.c_char_p, "t": ctypes.POINTER(_StructField), "v": None,
}  # fmt: skip


def _signatures(text: str) -> dict[str, tuple[Any, list[Any]]]:
    """Read what functions return and take: a name, the letter of its result, and those of its arguments."""
    read = (line.split() for line in text.replace(",", "\n").strip().splitlines())
    return {name: (_TYPES[result], [_TYPES[one] for one in taken.strip("-")]) for name, result, taken in read}


_SIGNATURES = _signatures("""
    holdall_structs t p
    holdall_append n ppppp
    holdall_append_next n pppnp
    holdall_write_tick n ppnn
    holdall_fast_add p ppn
    holdall_fast_pack p ppn
    holdall_fast_draw p ppn
    holdall_fast_gather p ppn
    holdall_write_ticks n ppnn
    holdall_encode n ppppnnnpnppp
    holdall_count_work v ppnp
    holdall_checksums v ppnp
    holdall_decode n pppnp
    holdall_pack_columns n ppnnpnpp
    holdall_release n pn
    holdall_read_rows n pnpnnnnpp
    holdall_draw v ppnnnnnpp
    holdall_find v pnpnnpp
    holdall_expect v pnpppnn
    holdall_gather n pnpppnnpnnpppnpnp
    holdall_name n pnpppnnnnppp
    holdall_collect n ppnppnnpnpupp
    holdall_assemble n p
    holdall_launch_here i pjjjjjjjppp
    holdall_send_here i upzp
    holdall_send_slots i pnpnppnnppnpupppp
    holdall_advantages v ppppffnnpp
    holdall_part_channels v ppnnn
    holdall_tree_put v pnppnn
    holdall_tree_update n pnppnnnndp
    holdall_tree_find v pnpnpp
    holdall_threads_new p -
    holdall_threads_help v p
    holdall_threads_dismiss v p
    holdall_threads_free v p
""")
"""What every exported function returns and takes."""


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions; raise OSError with the reason if it cannot be used."""
    library = ctypes.CDLL(str(path))
    try:
        library.holdall_version.restype = NUMBER
        version = library.holdall_version()
        if version != _VERSION:
            raise OSError(f"{path.name} is of version {version}, and this is version {_VERSION}")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)  # ctypes keeps it, so that its types stay declared
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise OSError(f"{path.name} is of another version ({error})") from error
    if problem := _struct_problem(library):
        raise OSError(f"{path.name} was built from other structs: {problem}")
    return library


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return the functions of `holdall._native` that are called through ctypes."""
    return open_library(Path(_native.__file__))
