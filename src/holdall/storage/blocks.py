"""Blocks: how the unique slices of a field are coded, and where they lie: in an arena, in memory, or in a file.

In:  slices as bytes.  Out: their numbers in a block, and the bytes behind a number.
Invariant: a block only grows. A slice that was numbered never moves and never changes, so it can be read without a
lock for as long as the block is referred to. Files are read by position and never mapped. Every code is lossless: a
palette holds the very bits that it numbers, predictors are differences modulo 256, the rest is stored as it is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage.coded_units import SlicePlaces, in_memory, place_dtype

_MAP_NORESERVE = 0x4000  # Linux's flag; the mmap module names it from Python 3.13 on

_HUGE_PAGES_FROM = 4 * 2**20
"""From this size on, as NumPy does, ask for large pages: random reads miss fewer entries of the address cache."""


def reserve(nbytes: int, *, in_small_pages: bool = False) -> Bytes:
    """Reserve zeroed memory whose pages cost nothing until they are written to.

    It is mapped on its own, not taken from the heap, so that freeing it gives it back to the system at once, whatever
    else was allocated in between. Who writes to small pages never waits long for one.
    """
    size = max(nbytes, 1)
    if sys.platform == "win32":
        block = mmap.mmap(-1, size)
    else:
        # Without NORESERVE a kernel that does not overcommit counts pages never written to.
        lazily = _MAP_NORESERVE if sys.platform == "linux" else 0
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
    if size >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_NOHUGEPAGE if in_small_pages else mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)[:nbytes]


def address(array: NDArray[Any]) -> int:
    """Return where a contiguous array's first byte lies; the caller keeps the array alive."""
    try:
        # A third of the cost of array.ctypes.
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # read-only or empty
        return int(array.ctypes.data)


def mapping_of(array: Bytes) -> Any:
    """Return the memory that an array from `reserve` lies in; None, or anything, if it is from elsewhere."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner


def release_tail(array: Bytes, used_bytes: int) -> None:
    """Give back the pages of a reserved array behind its first bytes, where that can be done; large ones in part."""
    owner = mapping_of(array)
    start = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and start < len(owner):
        owner.madvise(mmap.MADV_DONTNEED, start, len(owner) - start)


def first_bytes(memory: Any, nbytes: int) -> Bytes:
    """Return an array over the first bytes of memory to which nothing refers, see `mapping_of`; give back the rest."""
    try:
        memory.resize(max(nbytes, 1))
    except (BufferError, OSError, SystemError, TypeError, ValueError):  # not everywhere, nor if somebody looks at it
        release_tail(np.frombuffer(memory, np.uint8), nbytes)
    return np.frombuffer(memory, np.uint8)[:nbytes]


SEEKING = threading.Lock()
_LAST_BYTE = 2**63 - 1
"""No file is longer."""


class SegmentFile:
    """A file that is open for reading.

    Args:
        descriptor: Open, and closed by this object when nobody refers to it any more.
        is_temporary: Whether it is deleted then, too.
    """

    def __init__(self, path: Path, descriptor: int, *, is_temporary: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_growing = False  # whether records are still added to it
        self.is_awaited = False  # whether parts of it may have to be brought here before C reads them
        weakref.finalize(self, _close, descriptor, path if is_temporary else None, os.getpid())

    def read(self, start: int, nbytes: int) -> bytes:
        """Read from a position; shorter at the file's end."""
        pieces = []
        try:
            while nbytes > 0 and (piece := _pread(self.descriptor, nbytes, start)):
                pieces.append(piece)
                start, nbytes = start + len(piece), nbytes - len(piece)
        except OSError as error:
            raise DamageError(
                error.errno, f"{self.path} cannot be read ({error.strerror}); nothing of it is returned"
            ) from error
        return b"".join(pieces)

    def bring(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the disk for all of these ranges at once, so that they can be read soon."""
        if hasattr(os, "posix_fadvise"):
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the units of a sealed block lie in a file, and what they must sum up to."""

    file: SegmentFile
    start: int
    nbytes: int
    checks: NDArray[np.uint32]  # per unit
    record_start: int = -1  # of the record that they are part of, if they are

    def bring(self) -> None:
        """See to it that all units can be read."""
        self._require_within(self.nbytes)
        self.file.bring(np.array([self.start]), np.array([self.start + self.nbytes]))

    def read(self, first: int, end: int) -> bytes:
        """Read bytes [first, end) of the units."""
        self._require_within(end)
        content = self.file.read(self.start + first, end - first)
        if len(content) != end - first:
            raise DamageError(f"{self.file.path} was cut short; nothing of it is returned")
        return content

    def _require_within(self, end: int) -> None:
        if not 0 <= self.start <= _LAST_BYTE - end:  # the system's calls take no other; decode.c checks the same
            raise DamageError(f"{self.file.path} has no byte {self.start + end}; nothing of it is returned")


def _pread(descriptor: int, nbytes: int, start: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, start)
    # Windows has no positioned reads; there a second descriptor would not help either: they share one position.
    with SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, nbytes)


def _close(descriptor: int, doomed: Path | None, process: int) -> None:
    os.close(descriptor)
    # A fork's child has the descriptor, not the file.
    if doomed is not None and process == os.getpid():
        doomed.unlink(missing_ok=True)


COLOUR_PALETTE_BYTES = 1024
"""A palette of colours: 256, of four bytes each; those of 0xFFFFFFFF are free."""
NO_COLOUR = 0xFFFFFFFF
MOST_UNIT_COLOURS = 255
"""Colours that a unit may have besides those of its block's palette; the numbers are those of codec.h."""
_REPEATED_DIFFERENCES = 6
"""Shorter runs of differences repeat by chance: referring to them takes longer to decode and no less room."""
_MOST_IN_A_UNIT = 64


class Method(IntEnum):
    """How bytes are compressed; the numbers are those of codec.h."""

    STORED = 0
    LZ4 = 1
    ZSTD = 2


class Predictor(IntEnum):
    """What a byte is predicted from; the numbers are those of codec.h."""

    NOTHING = 0
    LEFT = 1
    UP = 2
    PIXELS = 3  # nothing: planes are coded pixel by pixel
    COLOURS = 4  # nothing: a pixel becomes the number of its colour
    COLUMNS = 5  # the same, column by column
    CHANGES = 6  # the slice before it in its unit: of slices together, the first is whole, of others it is what changed


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a slice before it is compressed, in this order; see codec.h."""

    slice_bytes: int
    word_bytes: int = 0
    predictor: Predictor = Predictor.NOTHING
    planes: int = 0
    rows: int = 0
    columns: int = 0
    interleaved: bool = False
    green: bool = False
    shuffle: int = 0
    coded_bytes: int = field(init=False, repr=False, compare=False)  # of a slice that reach the compressor
    is_of_colours: bool = field(init=False, repr=False, compare=False)  # whether pixels become numbers of their colours
    is_of_differences: bool = field(init=False, repr=False, compare=False)  # whether neighbours predict each other
    palette_bytes: int = field(init=False, repr=False, compare=False)  # of a block
    # That may stand in front of a unit: how many colours it has of its own, and these.
    head_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_of_colours = self.predictor in {Predictor.COLOURS, Predictor.COLUMNS}
        for name, value in (
            ("coded_bytes", self.slice_bytes // (3 if is_of_colours else max(self.word_bytes, 1))),
            ("is_of_colours", is_of_colours),
            ("is_of_differences", self.predictor in {Predictor.LEFT, Predictor.UP}),
            ("palette_bytes", COLOUR_PALETTE_BYTES if is_of_colours else 256 * self.word_bytes),
            ("head_bytes", 1 + 4 * MOST_UNIT_COLOURS if is_of_colours else 0),
        ):
            object.__setattr__(self, name, value)

    def is_sound(self) -> bool:
        """Whether the numbers agree with each other: they may come from a file. See decode.c."""
        whole = 0 < self.slice_bytes < 2**31 and self.word_bytes in {0, 2, 4, 8} and self.shuffle >= 0
        if not whole or (self.word_bytes and self.slice_bytes % self.word_bytes):
            return False
        if self.predictor in {Predictor.NOTHING, Predictor.CHANGES}:
            return self.shuffle == 0 or self.coded_bytes % self.shuffle == 0
        image = min(self.planes, self.rows, self.columns) >= 1 and (self.planes >= 3 or not self.green)
        image = image and not (self.predictor == Predictor.PIXELS and (self.interleaved or self.green))
        if self.is_of_colours:
            whole = not self.green and self.planes == 3 and self.word_bytes == 0 == self.shuffle
            return image and whole and 3 * self.rows * self.columns == self.slice_bytes
        return image and self.shuffle == 0 and self.planes * self.rows * self.columns == self.coded_bytes


TRANSFORM_FIELDS = tuple(each.name for each in fields(Transform) if each.init)
"""What says all about a transform, in the order in which the compiled loops expect it."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Bytes that slices of one field have in common; compared by identity.

    Where slices are numbers of colours, it begins with the palette that these are of.
    """

    content: bytes

    @functools.cached_property
    def name(self) -> str:
        """Name it by its content."""
        return hashlib.sha256(self.content).hexdigest()

    @functools.cached_property
    def behind_palette(self) -> bytes:
        """What follows on a palette; once for all codecs of a field, each block of which may have its own."""
        return self.content[COLOUR_PALETTE_BYTES:]


@dataclass(frozen=True, slots=True)
class Codec:
    """One way of coding slices."""

    method: Method
    level: int
    transform: Transform
    dictionary: Dictionary | None = None
    group: int = 1  # neighbours that are compressed together: a unit
    reason: str = field(default="", repr=False, compare=False)  # why it was chosen, for people
    is_sound: bool = field(init=False, repr=False, compare=False)  # it may come from a file
    # How many bytes must repeat for Zstandard to refer to them; 0: as many as it says itself.
    shortest_match: int = field(init=False, repr=False, compare=False)
    is_of_colours: bool = field(init=False, repr=False, compare=False)
    known_palette: bytes = field(init=False, repr=False, compare=False)  # the colours that its dictionary numbers
    common: bytes = field(init=False, repr=False, compare=False)  # what the compressor is given beforehand
    unit_bytes: int = field(init=False, repr=False, compare=False)  # of memory that reading a unit takes

    def __post_init__(self) -> None:
        palette = common = b""
        if self.dictionary is not None:
            common = self.dictionary.content
            if self.transform.is_of_colours:
                palette, common = common[:COLOUR_PALETTE_BYTES], self.dictionary.behind_palette
        object.__setattr__(self, "is_of_colours", self.transform.is_of_colours)
        object.__setattr__(self, "known_palette", palette)
        object.__setattr__(self, "common", common)
        # Units are of a size that readers make room for, see codec.h.
        fits = 1 <= self.group <= _MOST_IN_A_UNIT and self.group * self.transform.coded_bytes < 2**31
        if self.is_of_colours:
            fits = fits and (self.dictionary is None or len(palette) == COLOUR_PALETTE_BYTES)
        form = self.transform
        object.__setattr__(self, "is_sound", fits and form.is_sound())
        object.__setattr__(self, "shortest_match", _REPEATED_DIFFERENCES if form.is_of_differences else 0)
        object.__setattr__(self, "unit_bytes", self.group * form.coded_bytes + form.head_bytes)

    @property
    def is_of_changes(self) -> bool:
        """Whether slices together are coded as changes of each other."""
        return self.transform.predictor is Predictor.CHANGES


@functools.cache
def stored(slice_bytes: int) -> Codec:
    """Return the codec of slices that stay as they are."""
    return Codec(Method.STORED, 0, Transform(slice_bytes))


@dataclass(frozen=True, slots=True)
class Coded:
    """What a block became: all that is needed to read it."""

    codec: Codec
    count: int  # slices
    offsets: NDArray[np.uint32]  # (units + 1,)
    palette: Bytes  # 256 words or colours, or nothing
    data: Bytes | Extent
    places: SlicePlaces | None = None  # all different; None: slices are in the order of their numbers

    def __post_init__(self) -> None:
        form, group = self.codec.transform, self.codec.group
        if not (self.codec.is_sound and self.count >= 0 and self._fits(-(-self.count // group))):
            raise DamageError(
                f"a block of {self.count} slices claims to be coded by {form} in groups of {group} with a palette of "
                f"{self.palette.size} bytes and {len(self.offsets)} offsets, which do not go together; nothing of it "
                "is returned"
            )

    def _fits(self, units: int) -> bool:
        """Whether offsets, sums and palette are those of so many units."""
        checked = not isinstance(self.data, Extent) or len(self.data.checks) == units
        whole = len(self.offsets) == units + 1 and self.palette.size == self.codec.transform.palette_bytes
        placed = self.places is None or (
            len(self.places) == self.count and self.places.dtype == place_dtype(self.count)
        )
        return checked and whole and placed


class SealedSlices(ABC):
    """Compressed slices that a coder can read."""

    def __init__(self, coded: Coded) -> None:
        self.coded = coded

    def __reduce__(self) -> tuple[Any, ...]:
        coded = in_memory(self.coded)
        return _carry, (coded.codec, coded.count, coded.offsets, coded.palette, coded.data, coded.places)

    @property
    @abstractmethod
    def address(self) -> int:
        """The number under which records name these slices."""

    @property
    def codec(self) -> Codec:
        """How they are coded."""
        return self.coded.codec

    @property
    def count(self) -> int:
        """Slices held."""
        return self.coded.count

    @property
    def extent(self) -> Extent | None:
        """Where they lie in a file, if they do."""
        return self.coded.data if isinstance(self.coded.data, Extent) else None

    @property
    def nbytes(self) -> int:
        """Bytes in memory; a dictionary belongs to many blocks."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in memory."""
        coded = self.coded
        data = coded.data.checks if isinstance(coded.data, Extent) else coded.data
        placed = [] if coded.places is None else [coded.places]
        return [data, coded.offsets, coded.palette, *placed]

    @property
    def disk_bytes(self) -> int:
        """Bytes in a file."""
        return 0 if self.extent is None else self.extent.nbytes


class CarriedSlices(SealedSlices):
    """Sealed slices on their way from one process to another; a coder has to adopt them."""

    @property
    def address(self) -> int:
        """Refuse: nobody can read them yet."""
        raise DamageError("sealed slices were read before a coder adopted them; report this")


def _carry(*coded: Any) -> CarriedSlices:
    return CarriedSlices(Coded(*coded))


class SliceBlock(ABC):
    """An arena of equally long slices; how they are found by their bytes is the kernels' affair."""

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        self.slice_bytes = slice_bytes
        self.capacity = arena.size // slice_bytes
        self.arena = arena
        self.sealed: SealedSlices | None = None

    def replace_by(self, sealed: SealedSlices) -> None:
        """Keep the slices in their sealed form alone; readers of the raw form hold on to it."""
        self.sealed = sealed
        self.arena = np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        arena = self.arena  # looked at first: once it is empty, the sealed form is there
        content = self.sealed or arena[: self.used * self.slice_bytes]
        return KeptBlock, (self.slice_bytes, self.used, content)

    @property
    def is_on_disk(self) -> bool:
        """Whether the slices lie in a file."""
        return self.extent is not None

    @property
    def extent(self) -> Extent | None:
        """Where the slices lie in a file, if they do."""
        return None if self.sealed is None else self.sealed.extent

    @property
    def raw(self) -> Bytes:
        """The slices as rows, while they are raw."""
        return self.arena[: self.used * self.slice_bytes].reshape(self.used, self.slice_bytes)

    @property
    def held(self) -> object:
        """Return what a record of this block points into."""
        return self.arena if self.sealed is None else self.sealed

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays that the slices lie in."""
        return [self.arena] if self.sealed is None else self.sealed.arrays()

    @property
    @abstractmethod
    def used(self) -> int:
        """Slices held."""

    @abstractmethod
    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""

    @property
    def used_bytes(self) -> int:
        """Bytes that the slices held take in memory."""
        return self.used * self.slice_bytes if self.sealed is None else self.sealed.nbytes


class KeptBlock(SliceBlock):
    """A block that was filled elsewhere and takes no more slices."""

    def __init__(self, slice_bytes: int, used: int, content: Bytes | SealedSlices) -> None:
        self.slice_bytes, self.capacity = slice_bytes, used
        self.sealed = content if isinstance(content, SealedSlices) else None
        self.arena = np.empty(0, np.uint8) if isinstance(content, SealedSlices) else content

    @property
    def used(self) -> int:
        """Slices held."""
        return self.capacity

    def freeze(self) -> None:
        """Do nothing: there is no index."""
