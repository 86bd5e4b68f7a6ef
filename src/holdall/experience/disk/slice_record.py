"""Sealed slices and dictionaries as records of a segment file.

In:  a block as a coder made it.  Out: buffers to write; and back, the block with its units left where they stand.
Invariant: what is read back is checked for sense before a coder sees it; units are checked one by one, when they are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.disk.record import Buffer, Read, Record, numbers, pack
from holdall.experience.disk.segment_file import Extent, SegmentFile
from holdall.experience.sealing.codec import Codec, Dictionary, Method, Predictor, Transform
from holdall.experience.sealing.sealed import Coded

SLICES, DICTIONARY = "slices", "dictionary"
_MOST_DICTIONARY_BYTES = 16 * 2**20
_OF_TRANSFORM = tuple(field.name for field in fields(Transform))


def dictionary_name(dictionary: Dictionary) -> str:
    """Name a dictionary by its content."""
    return dictionary.name


def pack_dictionary(dictionary: Dictionary) -> list[Buffer]:
    """Return a dictionary as a record."""
    return pack(DICTIONARY, {"name": dictionary_name(dictionary)}, {"content": dictionary.content}, frozenset())


def unpack_dictionary(record: Record, file: SegmentFile) -> Dictionary:
    """Read a dictionary back."""
    if record.parts.get("content") is not None and record.parts["content"].nbytes > _MOST_DICTIONARY_BYTES:
        raise DamageError(f"the dictionary at byte {record.start} of {file.path} is larger than any; it is not used")
    dictionary = Dictionary(record.part("content", file.read))
    if dictionary_name(dictionary) != record.head.get("name"):
        raise DamageError(f"the dictionary at byte {record.start} of {file.path} is not what its name says")
    return dictionary


def pack_slices(coded: Coded, checks: NDArray[np.uint32]) -> list[Buffer]:
    """Return a block as a record, its units last."""
    if isinstance(coded.data, Extent):
        raise TypeError("the block lies in a file already")
    head = {"count": coded.count} | codec_words(coded.codec)
    parts: dict[str, Buffer] = {
        "palette": coded.palette.data,
        "offsets": coded.offsets.astype("<u4").data,
        "checks": checks.astype("<u4").data,
        "units": coded.data.data,
    }
    return pack(SLICES, head, parts, frozenset({"units"}))


def unpack_slices(
    record: Record, file: SegmentFile, dictionaries: Mapping[str, Dictionary], read: Read | None = None
) -> Coded:
    """Read all of a block but its units; `read` may know some of the file's bytes already."""
    try:
        codec, count = codec_of(record.head, dictionaries), _whole(record.head["count"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"the block at byte {record.start} of {file.path} makes no sense ({error})") from error
    palette, offsets, checks = (record.part(name, read or file.read) for name in ("palette", "offsets", "checks"))
    units = record.parts.get("units")
    if units is None:
        raise DamageError(f"the block at byte {record.start} of {file.path} has no units")
    extent = Extent(file, units.start, units.nbytes, numbers(checks, "u4"), record.start)
    return Coded(codec, count, numbers(offsets, "u4"), np.frombuffer(palette, np.uint8), extent)


def codec_words(codec: Codec) -> dict[str, Any]:
    """Describe a codec; its dictionary by name."""
    return {
        "method": int(codec.method),
        "level": codec.level,
        "group": codec.group,
        "transform": {name: int(getattr(codec.transform, name)) for name in _OF_TRANSFORM},
        "dictionary": None if codec.dictionary is None else dictionary_name(codec.dictionary),
    }


def codec_of(head: Mapping[str, Any], dictionaries: Mapping[str, Dictionary]) -> Codec:
    """Make a codec of its description; KeyError, TypeError or ValueError if that makes no sense."""
    claimed = {name: _whole(head["transform"][name]) for name in _OF_TRANSFORM}
    predictor, interleaved, green = (claimed.pop(name) for name in ("predictor", "interleaved", "green"))
    transform = Transform(
        **claimed, predictor=Predictor(predictor), interleaved=bool(interleaved), green=bool(green)
    )  # fmt: skip
    name = head["dictionary"]
    dictionary = None if name is None else dictionaries[name]
    method, level, group = Method(_whole(head["method"])), _whole(head["level"]), _whole(head["group"])
    return Codec(method, level, transform, dictionary, group)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise ValueError(f"{value!r} is no count")
    return value
