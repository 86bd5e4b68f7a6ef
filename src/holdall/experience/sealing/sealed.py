"""Sealed slices: a block's slices, compressed in units of one or a few, in memory or in a file.

In:  what an encoder wrote.  Out: the same, kept for reading.
Invariant: it never changes. Unit i lies between offsets i and i + 1; a unit that did not shrink is stored as it was
coded; one that lies in a file is returned only if its checksum fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.arena import Bytes
from holdall.experience.disk.segment_file import Extent
from holdall.experience.sealing.codec import Codec


@dataclass(frozen=True, slots=True)
class Coded:
    """What a block became: all that is needed to read it."""

    codec: Codec
    count: int  # slices
    offsets: NDArray[np.uint32]  # (units + 1,)
    palette: Bytes  # 256 words, or nothing
    data: Bytes | Extent

    def __post_init__(self) -> None:
        form, group = self.codec.transform, self.codec.group
        units = -(-self.count // group) if self.codec.is_cut_soundly() else -1
        checked = not isinstance(self.data, Extent) or len(self.data.checks) == units
        fits = self.count >= 0 and len(self.offsets) == units + 1 and self.palette.size == 256 * form.word_bytes
        if not (form.is_sound() and fits and checked):
            raise DamageError(
                f"a block of {self.count} slices claims to be coded by {form} in groups of {group} with a palette of "
                f"{self.palette.size} bytes and {len(self.offsets)} offsets, which do not go together; nothing of it "
                "is returned"
            )

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
        coded = self.coded
        data = coded.data
        if isinstance(data, Extent):
            data.bring()
            units = b"".join(coded.unit(number) for number in range(len(coded.offsets) - 1))
            data = np.frombuffer(units, np.uint8)
        return _carry, (coded.codec, coded.count, coded.offsets, coded.palette, data)

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
        coded = self.coded
        data = coded.data.checks if isinstance(coded.data, Extent) else coded.data
        return data.nbytes + coded.offsets.nbytes + coded.palette.nbytes

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in memory."""
        coded = self.coded
        return [coded.data.checks if isinstance(coded.data, Extent) else coded.data, coded.offsets, coded.palette]

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


def _carry(codec: Codec, count: int, offsets: NDArray[np.uint32], palette: Bytes, data: Bytes) -> CarriedSlices:
    return CarriedSlices(Coded(codec, count, offsets, palette, data))


class Coder(Protocol):
    """Seals blocks of slices and reads them."""

    def adopt(self, coded: Coded) -> SealedSlices:
        """Make slices readable that were sealed elsewhere, or moved to a file."""

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """Code all rows of `slices`; None if a palette does not hold their words."""

    def keeping(self) -> Coder:
        """Return a coder for many small blocks, of one thread: making a compressor anew would cost as much as each."""

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Sum every unit of sealed slices up, for when it is read from a file."""

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """Decode slices into the rows of `out`."""

    def chill(self, block: Bytes) -> None:
        """Push a block out of the caches, if that can be done, before its reading is timed."""
