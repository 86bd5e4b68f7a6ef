"""Codec: one way to encode the slices of a field, without loss.

Slices are encoded in units of `group` neighbours. Each slice is transformed first, and the unit is then compressed:

    words -> numbers in a palette      where a block has at most 256 different words
    image -> differences               each byte minus its left neighbour
    image -> numbers of colours        where a block has few colours
    unit  -> changes                   the first slice, and how each later slice differs from the slice before it
    words -> shuffled bytes            the first bytes of all words, then the second ones, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from holdall._native import Dictionary


class Method(IntEnum):
    """How the bytes of a unit are compressed. The numbers are those of codec.h."""

    STORED = 0
    LZ4 = 1
    ZSTANDARD = 2


class Transform(IntEnum):
    """Changes of an image or a unit before compression. Files store these numbers, and codec.h has the same ones.

    Number 2 is free. It was differences to the row above, see decision 027.
    """

    NONE = 0
    LEFT = 1  # Differences to the left neighbour.
    PIXELS = 3  # Separate planes become interleaved pixels.
    COLOURS = 4  # Pixels become numbers of their colours, row by row.
    COLOUR_COLUMNS = 5  # Pixels become numbers of their colours, column by column.
    CHANGES = 6  # A unit becomes its first slice and the changes from each slice to the next one.


@dataclass(frozen=True, slots=True)
class Codec:
    """How slices are encoded. `holdall._native.encode` refuses numbers that do not fit together."""

    slice_bytes: int  # Bytes of one slice.
    method: Method = Method.STORED  # Compression of a unit.
    level: int = 0  # Level of the method. LZ4: 0 is its fast compressor, others are its high compression.
    group: int = 1  # Slices of a unit.
    transform: Transform = Transform.NONE
    word_bytes: int = 0  # Bytes of the words that become numbers in a palette. 0: no palette.
    planes: int = 0  # Planes of an image.
    rows: int = 0  # Rows of an image.
    columns: int = 0  # Columns of an image.
    is_interleaved: bool = False  # Whether an image is stored pixel by pixel, instead of plane by plane.
    subtracts_green: bool = False  # Whether planes 0 and 2 are stored as differences to plane 1.
    shuffle_bytes: int = 0  # Bytes of the words whose bytes are shuffled. 0: no shuffle.
    min_match: int = 0  # Shortest repetition that Zstandard looks for. 0: the default of the level.
    dictionary: Dictionary | None = None  # Bytes that the slices of the field have in common.

    @property
    def parameters(self) -> tuple[int, ...]:
        """The numbers that `holdall._native.encode` reads, in the order of coded.c."""
        return (
            self.slice_bytes,
            self.word_bytes,
            int(self.transform),
            self.planes,
            self.rows,
            self.columns,
            int(self.is_interleaved),
            int(self.subtracts_green),
            self.shuffle_bytes,
            int(self.method),
            self.level,
            self.min_match,
            self.group,
        )
