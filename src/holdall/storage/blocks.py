"""Blocks: where the unique slices of a field lie: raw in an arena, compressed in memory, or in a file.

In:  slices as bytes.  Out: their numbers in a block, and the bytes behind a number.
Invariant: a block only grows. A slice that was numbered never moves and never changes, so it can be read without a
lock for as long as the block is referred to. Files are read by position and never mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage.codec import Codec, Order, SlicePlaces

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


class _SpareArena(NamedTuple):
    memory: Any
    nbytes: int
    seen: weakref.ref[NDArray[Any]]  # the array that every view of the memory refers to


class ArenaPool:
    """Arenas that were given up and can be written to again, without the cost of fresh pages.

    An arena may still be read by a batch that is being built: it is handed out when nothing refers to it any more.

    Args:
        most: How many are kept.
        most_raw: Bytes that may stay raw. If all that is held takes more, new arenas are sealed soon: then they are in
            small pages. Who adds may wait milliseconds for a large one, and who reads raw slices gains a sixth by them.
    """

    def __init__(self, most: int = 1, most_raw: int = 1 << 62) -> None:
        self._most, self._most_raw = most, most_raw
        self._spare: list[_SpareArena] = []

    def take(self, nbytes: int, all_bytes: int = 0) -> Bytes:
        """Return an arena of `nbytes`, used before or new, for slices that take up to `all_bytes` in all arenas."""
        for position, spare in enumerate(self._spare):
            if spare.nbytes == nbytes and spare.seen() is None:
                del self._spare[position]
                return np.frombuffer(spare.memory, np.uint8)[:nbytes]
        return reserve(nbytes, in_small_pages=all_bytes > self._most_raw)

    def give_up(self, arena: Bytes) -> None:
        """Keep an arena from `reserve` that its owner no longer needs, if there is room for it."""
        # NumPy lets every view refer to the array over the whole memory.
        whole = arena.base
        if arena.nbytes and isinstance(whole, np.ndarray):
            others = [spare for spare in self._spare if spare.memory is not whole.base]
            self._spare = [*others, _SpareArena(whole.base, arena.nbytes, weakref.ref(whole))][-self._most :]

    def clear(self) -> None:
        """Keep none."""
        self._spare = []

    @property
    def spare(self) -> list[Bytes]:
        """Arenas kept; they are handed out again once nobody looks at these arrays any more."""
        arrays = []
        for position, spare in enumerate(self._spare):
            whole = spare.seen()
            if whole is None:
                whole = np.frombuffer(spare.memory, np.uint8)
                self._spare[position] = spare._replace(seen=weakref.ref(whole))
            arrays.append(whole[: spare.nbytes])
        return arrays

    @property
    def nbytes(self) -> int:
        """Bytes kept, whether their pages were touched or not."""
        return sum(spare.nbytes for spare in self._spare)


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


_SEEKING = threading.Lock()
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
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, nbytes)


def write_at(descriptor: int, data: memoryview, start: int) -> int:
    """Write some of `data` from a position on; return how many bytes it was."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, start)
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)


def _close(descriptor: int, doomed: Path | None, process: int) -> None:
    os.close(descriptor)
    # A fork's child has the descriptor, not the file.
    if doomed is not None and process == os.getpid():
        doomed.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Coded:
    """What a block became: all that is needed to read it."""

    codec: Codec
    count: int  # slices
    offsets: NDArray[np.uint32]  # (units + 1,)
    palette: Bytes  # 256 words or colours, or nothing
    data: Bytes | Extent
    places: SlicePlaces | None = None  # of slices in the units; None: in the order of their numbers

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
        return checked and whole and (self.places is None or self.places.are_of(self.count))

    def place(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where slices stand among those of the units; a DamageError names one that is not there."""
        outside = numbers[(numbers < 0) | (numbers >= self.count)]
        if outside.size:
            raise DamageError(f"slice {int(outside[0])} is not in its block; nothing of it is returned")
        return numbers if self.places is None else self.places.find(numbers, self.count)

    def units_for(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the units that are read for slices in some places: theirs, and the keys of those."""
        units = np.unique(places // self.codec.group)
        return np.union1d(units, units - units % self.codec.key) if self.codec.key else units

    def unpacked_bytes(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that come of units: the last one may have fewer slices."""
        group = self.codec.group
        unpacked: NDArray[np.int64] = np.minimum(group, self.count - units * group) * self.codec.transform.coded_bytes
        return unpacked

    def in_memory(self) -> Coded:
        """Return the same with its units in memory; they are read from their file and checked if they lie in one."""
        if not isinstance(self.data, Extent):
            return self
        self.data.bring()
        units = b"".join(self.unit(number) for number in range(len(self.offsets) - 1))
        return replace(self, data=np.frombuffer(units, np.uint8))

    def unit(self, number: int) -> bytes:
        """Return the compressed bytes of one unit."""
        start, end = int(self.offsets[number]), int(self.offsets[number + 1])
        if not start <= end <= self.data.nbytes:
            raise DamageError(f"unit {number} is damaged; nothing of it is returned")
        if not isinstance(self.data, Extent):
            return self.data[start:end].tobytes()
        content = self.data.read(start, end)
        if xxhash.xxh64_intdigest(content) & 0xFFFFFFFF != self.data.checks[number]:
            raise DamageError(f"unit {number} in {self.data.file.path} is damaged; nothing of it is returned")
        return content


class SealedSlices(ABC):
    """Compressed slices that a coder can read."""

    def __init__(self, coded: Coded) -> None:
        self.coded = coded

    def __reduce__(self) -> tuple[Any, ...]:
        coded = self.coded.in_memory()
        lanes = None if coded.places is None else coded.places.lanes
        return _carry, (coded.codec, coded.count, coded.offsets, coded.palette, coded.data, lanes)

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
        placed = [] if coded.places is None else [coded.places.lanes, coded.places.firsts]
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


def _carry(
    codec: Codec, count: int, offsets: NDArray[np.uint32], palette: Bytes, data: Bytes, lanes: Bytes | None = None
) -> CarriedSlices:
    places = None if lanes is None else SlicePlaces.stored(lanes, count)
    return CarriedSlices(Coded(codec, count, offsets, palette, data, places))


Watch = Callable[[int], None]
WATCHED_BYTES = 2**19
"""Of slices that are sealed before a `Watch` is called, if so few can be."""


class Coder(Protocol):
    """Seals blocks of slices and reads them."""

    def adopt(self, coded: Coded) -> SealedSlices:
        """Make slices readable that were sealed elsewhere, or moved to a file."""

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        """Code all rows of `slices`; None if a palette does not hold their words, or one of them has too many colours.

        Args:
            order: Which row comes first, second, ... in the units; each once, lane after lane, and of a lane one after
                another, in at most 256 lanes. Their numbers stay as they are.
            threads: Threads that may share the work; the bytes are the same.
            watch: Called after every piece of the work with how many slices are done; what it raises ends the work.
        """

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count what decoding has to do for some units, so that no clock decides which codec is chosen.

        Returns:
            Three numbers for each: sequences, literals of Huffman's code, and tables of that code.
        """

    def keeping(self) -> Coder:
        """Return a coder for many small blocks, of one thread; it keeps its compressors, which are slow to make."""

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Sum every unit of sealed slices up, for when it is read from a file."""

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """Decode slices into the rows of `out`."""


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
        self.slice_bytes = slice_bytes
        self.capacity = used
        self.arena = np.empty(0, np.uint8)
        self.sealed = None
        if isinstance(content, SealedSlices):
            self.sealed = content
        else:
            self.arena = content

    @property
    def used(self) -> int:
        """Slices held."""
        return self.capacity

    def freeze(self) -> None:
        """Do nothing: there is no index."""
