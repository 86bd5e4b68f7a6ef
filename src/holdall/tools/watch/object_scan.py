"""A scan of another process's Python objects: its large arrays, found by reading its memory; nothing runs in it.

In:  the memory of a process without an agent, which this user may trace.  Out: regions with the names of arrays.
An array is found by the address of its type, which stands in every object; its name is the key of the dict, or the
attribute of the object, that refers to it. CPython keeps attributes in one of three ways: 3.11, 3.12, and from 3.13 on.
Invariant: every pointer is checked before it is followed, and what does not look as expected is left out. A process
that changes while it is read, or an unknown version, costs names and nothing else.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.machine import Mapping
from holdall.tools.watch.agent_files import Region
from holdall.tools.watch.attribution import ProcessMemory, is_nameless

LEAST_BYTES = 2**20
_CHUNK_BYTES = 8 * 2**20
_MOST_SCANNED_BYTES = 4 * 2**30
_LIBRARIES = {"_multiarray_umath": b"numpy.ndarray\0", "libtorch_python": b"torch._C.TensorBase\0"}
_TYPE, _TYPE_NAME, _TYPE_SIZE, _TYPE_BASE = 8, 24, 32, 256
"""Where an object has its type, and a type its name, the size of its objects, and its base."""
_CACHED_KEYS = (872, 880)
"""Where a class has the names of its objects' attributes: Python 3.11; 3.12 and 3.13."""
_KEYS_HEADER, _MOST_ATTRIBUTES = 32, 30
_MOST_KEYS = 11
"""Keys of the largest dict that is recognised, as a power of two."""
_MOST_DIMENSIONS = 64

Words = NDArray[np.uint64]


class FoundArray(NamedTuple):
    """An array, or a tensor."""

    object: int
    data: int
    nbytes: int
    title: str  # what it is called if nobody names it
    group: str


def scan_arrays(memory: ProcessMemory, found: list[Mapping]) -> list[Region]:
    """Return the arrays and tensors of at least 1 MiB in a process, by name."""
    scan = _Scan(memory, found)
    arrays = {one.data: one for one in scan.arrays()}
    names = scan.names([one.object for one in arrays.values()]) if arrays else {}
    return [
        Region(one.group, names.get(one.object, one.title), one.data, one.nbytes)
        for one in sorted(arrays.values(), key=lambda one: -one.nbytes)
    ]


class _Scan:
    def __init__(self, memory: ProcessMemory, found: list[Mapping]) -> None:
        self._memory, self._found = memory, found
        self._starts = [one.start for one in found]
        plain = [one for one in found if is_nameless(one) and one.permissions.startswith("rw-p")]
        blocks = list(memory.blocks(plain))  # these hold data, and no objects
        heaps = [one for one in found if one.name == "[heap]"]
        self._ranges = [cut for one in [*heaps, *plain] for cut in _without(one.start, one.end, blocks)]

    def arrays(self) -> Iterator[FoundArray]:
        """Find arrays and tensors."""
        kinds = {name: self._static_type(name, text) for name, text in _LIBRARIES.items()}
        arrays, tensors = kinds["_multiarray_umath"], kinds["libtorch_python"]
        places = self._places_of([kind for kind in kinds.values() if kind])
        for place in places.get(arrays, ()):
            yield from self._array(place - _TYPE)
        types = {place - _TYPE_BASE for place in places.get(tensors, ())}
        for _ in range(2):  # torch.Tensor, and then what is made of it, such as Parameter
            places = self._places_of([kind for kind in types if self._text_at(self._word(kind + _TYPE_NAME))])
            for place in (place for some in places.values() for place in some):
                yield from self._tensor(place - _TYPE)
            types = {place - _TYPE_BASE for some in places.values() for place in some}

    def names(self, objects: list[int]) -> dict[int, str]:
        """Return how some objects are called: by a key of a dict, or by class and attribute."""
        names: dict[int, str] = {}
        attributes: dict[int, int] = {}  # where an object stands among attributes
        for one, places in self._places_of(objects).items():
            for place in places:
                if one not in names and (key := self._dict_key(place)):
                    names[one] = key
                attributes.setdefault(place, one)
        left = {place: one for place, one in attributes.items() if one not in names}
        for place, one in left.items():
            name = self._attribute_in_object(place)  # from Python 3.13 on
            if name and one not in names:
                names[one] = name
        rest = {place: one for place, one in left.items() if one not in names}
        return names | self._attribute_names(rest)

    def _attribute_names(self, places: dict[int, int]) -> dict[int, str]:
        """Name objects by where they stand among attributes that lie apart from their object: Python 3.11 and 3.12."""
        starts: dict[int, list[tuple[int, int]]] = {}  # of such attributes, of which several may be named
        for place, one in places.items():
            for index in range(_MOST_ATTRIBUTES):
                if self._has_attribute(place - 8 * index, index):
                    starts.setdefault(place - 8 * index, []).append((one, index))
        names: dict[int, str] = {}
        pointers = [start - less for start in starts for less in (0, 1)]
        for pointer, holders in self._places_of(pointers).items():
            for start, back in ((pointer, 32), (pointer + 1, 24)):  # Python 3.11, and 3.12
                for (one, index), holder in product(starts.get(start, ()), holders):
                    kind, keys = self._word(holder + back + _TYPE), self._word(holder - 8)
                    if name := self._attribute(kind, index) or self._key(keys, index):
                        names.setdefault(one, name)
        return names

    def _has_attribute(self, start: int, index: int) -> bool:
        """Whether attributes begin at an address, one of this number among them: their order stands before them."""
        before = self._memory.read(start - 64, 64)
        used = before[-2] if len(before) == 64 else 0
        return (
            used <= _MOST_ATTRIBUTES and used + 2 <= before[-1] and index in before[-2 - used : -2] if used else False
        )

    def _static_type(self, library: str, text: bytes) -> int:
        """Return the address of a type that a library defines, by the text of its name; 0 if there is none."""
        own = [one for one in self._found if library in one.name]
        names: list[int] = []
        for one in own:
            content = self._memory.read(one.start, one.nbytes)
            at = content.find(b"\0" + text)
            while at >= 0:
                names.append(one.start + at + 1)
                at = content.find(b"\0" + text, at + 1)
        for one in own if names else ():
            if one.permissions.startswith("rw"):
                words = _words(self._memory.read(one.start, one.nbytes))
                for place in np.flatnonzero(np.isin(words, np.array(names, np.uint64))).tolist():
                    return one.start + 8 * int(place) - _TYPE_NAME
        return 0

    def _places_of(self, pointers: list[int]) -> dict[int, list[int]]:
        """Return where some pointers stand in memory."""
        places: dict[int, list[int]] = {}
        if not pointers:
            return places
        wanted = np.unique(np.array(pointers, np.uint64))
        left = _MOST_SCANNED_BYTES
        for start, end in self._ranges:
            for address in range(start, end, _CHUNK_BYTES):
                words = _words(self._memory.read(address, min(_CHUNK_BYTES, end - address)))
                left -= 8 * len(words)
                if left < 0:
                    return places
                near = np.flatnonzero((words >= wanted[0]) & (words <= wanted[-1]))
                for at in near[np.isin(words[near], wanted)].tolist():
                    places.setdefault(int(words[at]), []).append(address + 8 * at)
        return places

    def _array(self, address: int) -> Iterator[FoundArray]:
        """Yield an array, if there is one that owns a lot of memory."""
        fields = _words(self._memory.read(address, 80))
        if len(fields) < 10 or not 0 < int(fields[0]) < 1 << 32:
            return
        data, count, dims, strides = (int(fields[at]) for at in (2, 3, 4, 5))
        count &= 0xFFFFFFFF
        if not 1 <= count <= _MOST_DIMENSIONS or int(fields[6]):  # a view has a base
            return
        shape = _words(self._memory.read(dims, 8 * count)).astype(np.int64)
        steps = _words(self._memory.read(strides, 8 * count)).astype(np.int64)
        if len(shape) == len(steps) == count and (shape > 0).all():
            nbytes = int((shape * np.abs(steps)).max())
            if self._is_there(data, nbytes):
                title = f"array of {' x '.join(map(str, shape.tolist()))}"
                yield FoundArray(address, data, nbytes, title, "buffers")

    def _tensor(self, address: int) -> Iterator[FoundArray]:
        """Yield a tensor, if there is one on the host whose storage is large."""
        for offset in (16, 24):  # in newer and in older versions of torch
            storage = self._word(self._word(address + offset) + 16)
            fields = _words(self._memory.read(storage, 56)) if storage else _words(b"")
            if len(fields) == 7 and self._is_there(int(fields[2]), int(fields[6])):
                yield FoundArray(address, int(fields[2]), int(fields[6]), "tensors without a name", "torch")
                return

    def _is_there(self, address: int, nbytes: int) -> bool:
        """Whether so many bytes, and not few, begin at an address and lie in mappings."""
        at = bisect.bisect_right(self._starts, address) - 1
        here = address
        while 0 <= at < len(self._found) and self._found[at].start <= here < address + nbytes:
            here = self._found[at].end
            at += 1
        return nbytes >= LEAST_BYTES and here >= address + nbytes

    def _dict_key(self, place: int) -> str:
        """Return the key of a dict's value; nothing if no dict with texts as keys stands around it."""
        length = _KEYS_HEADER + (16 << _MOST_KEYS) + 8
        before = self._memory.read(place - length, length)
        for size in range(3, _MOST_KEYS + 1) if len(before) == length else ():
            index_bytes = size if size < 8 else size + 1  # as a power of two
            most = (2 << size) // 3
            for entry in range(most):
                at = length - 8 - 16 * entry - (1 << index_bytes) - _KEYS_HEADER
                if at < 0:
                    break
                if before[at + 8 : at + 11] != bytes([size, index_bytes, 1]):
                    continue
                free, used = (int.from_bytes(before[at + i : at + i + 8], "little") for i in (16, 24))
                if entry < used and free + used == most:
                    return self._string(self._word(place - 8))
        return ""

    def _attribute_in_object(self, place: int) -> str:
        """Name an attribute that stands in its object, behind what the class says is its size."""
        for index in range(_MOST_ATTRIBUTES):
            values = place - 8 * index - 8
            for size in (16, 24, 32, 48):
                kind = self._word(values - size + _TYPE)
                if kind and self._word(kind + _TYPE_SIZE) == size and (name := self._attribute(kind, index)):
                    return name
        return ""

    def _attribute(self, kind: int, index: int) -> str:
        """Return class and name of an object's attribute, by its number."""
        if not kind:
            return ""
        for offset in _CACHED_KEYS:
            name = self._key(self._word(kind + offset), index)
            if name:
                return f"{self._text_at(self._word(kind + _TYPE_NAME)).rpartition('.')[2]}.{name}"
        return ""

    def _key(self, keys: int, index: int) -> str:
        header = self._memory.read(keys, _KEYS_HEADER) if keys else b""
        if len(header) < _KEYS_HEADER or header[9] > 10 or index >= int.from_bytes(header[24:32], "little"):
            return ""
        return self._string(self._word(keys + _KEYS_HEADER + (1 << header[9]) + 16 * index))

    def _string(self, address: int) -> str:
        """Return a str that is a name; nothing if there is none."""
        content = self._memory.read(address, 160) if address % 8 == 0 and address else b""
        length = int.from_bytes(content[16:24], "little")
        for start in (40, 48):  # from Python 3.12 on, and before
            text = content[start : start + length]
            if 0 < length <= 100 and len(text) == length and content[start + length : start + length + 1] == b"\0":
                name = text.decode("ascii", "replace")
                if name.isidentifier():
                    return name
        return ""

    def _text_at(self, address: int) -> str:
        text, end, _ = self._memory.read(address, 100).partition(b"\0") if address else (b"", b"", b"")
        name = text.decode("ascii", "replace")
        return name if end and name.replace(".", "_").isidentifier() else ""

    def _word(self, address: int) -> int:
        content = self._memory.read(address, 8) if 4096 <= address < 1 << 47 else b""
        return int.from_bytes(content, "little") if len(content) == 8 else 0


def _words(content: bytes) -> Any:
    return np.frombuffer(content, np.uint64, len(content) // 8)


def _without(start: int, end: int, blocks: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is left of a range without some others, which are in order."""
    for first, last in blocks[bisect.bisect_left(blocks, (start, 0)) :]:
        if first >= end:
            break
        if start < first:
            yield start, first
        start = max(start, last)
    if start < end:
        yield start, end
