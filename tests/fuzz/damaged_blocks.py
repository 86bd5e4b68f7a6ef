"""Damaged blocks, and a script in which the native decoder reads them.

`python damaged_blocks.py KINDS CASES SEED` reads CASES damaged blocks. KINDS are names of `DAMAGES` and `CLAIMS`, or
`WHOLE`, separated by commas. Groups of kinds are separated by slashes and run one after another. After a crash, the
last line of the output is the call that crashed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall._native import Coded, Dictionary, decode, encode
from holdall.checkpoint.data_file import DataFile
from holdall.codec.codec import Codec, Method, Transform

Bytes = NDArray[np.uint8]

COUNT = 12
WHOLE_EVERY = 50
"""Number of damaged blocks between two whole ones. A refused block must not change how the next one is decoded."""
ZSTD_DICTIONARY_MAGIC = b"\x37\xa4\x30\xec"


# ---------------------------------------------------------------- blocks and their damages


@dataclass
class Block:
    """The stored content of a block, and the slices that are read from it."""

    codec: Codec
    data: Bytes
    offsets: NDArray[np.uint32]
    palette: Bytes
    numbers: NDArray[np.int64]
    slices: Bytes | None = None  # The slices before compression.
    count: int = COUNT
    in_file: bool = False
    checks: NDArray[np.uint32] | None = None  # Checksums of the units in a file. None: the right ones.
    cut: int = 0  # Bytes that are missing at the end of the file.
    start: int = 0  # Claimed position of the units in the file.
    places: NDArray[Any] | None = None


IMAGE: dict[str, Any] = {"planes": 3, "rows": 15, "columns": 20}
FORMS = [
    Codec(900),
    Codec(900, word_bytes=4),
    Codec(900, word_bytes=2),
    Codec(900, shuffle_bytes=4),
    Codec(900, transform=Transform.LEFT, is_interleaved=True, subtracts_green=True, **IMAGE),
    Codec(900, transform=Transform.LEFT, **IMAGE),
    Codec(900, transform=Transform.PIXELS, **IMAGE),
    Codec(1200, word_bytes=4, transform=Transform.LEFT, planes=1, rows=15, columns=20),
    Codec(
        1200,
        word_bytes=4,
        transform=Transform.LEFT,
        planes=3,
        rows=10,
        columns=10,
        is_interleaved=True,
        subtracts_green=True,
    ),
    Codec(900, transform=Transform.COLOURS, **IMAGE),
    Codec(900, transform=Transform.COLOUR_COLUMNS, is_interleaved=True, **IMAGE),
    Codec(900, transform=Transform.CHANGES),
    Codec(900, word_bytes=4, transform=Transform.CHANGES),
]


def is_of_colours(codec: Codec) -> bool:
    return codec.transform in (Transform.COLOURS, Transform.COLOUR_COLUMNS)


def make_slices(form: Codec, generator: np.random.Generator) -> tuple[Bytes, Dictionary]:
    """Return slices that a codec can represent, and a dictionary for them."""
    size = form.slice_bytes
    slices: Bytes = (generator.integers(0, 3, (COUNT, size)).cumsum(axis=1) & 15).astype(np.uint8)
    if form.word_bytes:
        words = np.arange(100, dtype=f"u{form.word_bytes}")
        slices = words[generator.integers(0, 9, (COUNT, size // form.word_bytes))].view(np.uint8)
    dictionary = Dictionary(slices[:2].tobytes())
    if is_of_colours(form):
        # Some colours are in all slices and have numbers in the block's palette. Others are in one or two slices.
        colours = generator.integers(0, 256, (20 + 30 * COUNT, 3), np.uint8)
        own = 20 + 30 * np.arange(COUNT)[:, None] + generator.integers(0, 35, (COUNT, 300)) % (30 * COUNT)
        numbers = np.where(generator.random((COUNT, 300)) < 0.7, generator.integers(0, 20, (COUNT, 300)), own)
        pixels = colours[numbers % len(colours)]
        slices = (pixels if form.is_interleaved else pixels.transpose(0, 2, 1)).reshape(COUNT, -1)
        dictionary = Dictionary(slices[:1].tobytes(), np.resize(colours, 1024).tobytes())
    if form.transform is Transform.CHANGES:
        at = size * np.arange(COUNT) // COUNT // 4 * 4
        slices = np.where(np.arange(size) < at[:, None], slices, slices[0])
    return np.ascontiguousarray(slices), dictionary


def make_whole_blocks() -> list[Block]:
    """Encode slices with all codecs that are decoded differently."""
    blocks = []
    for form in FORMS:
        generator = np.random.default_rng(form.slice_bytes)
        slices, common = make_slices(form, generator)
        for codec in (
            replace(form, method=Method.LZ4),
            replace(form, method=Method.LZ4, level=5),
            replace(form, group=6),
            replace(form, method=Method.ZSTANDARD, level=3),
            replace(form, method=Method.ZSTANDARD, level=3, dictionary=common),
            form,
            replace(form, method=Method.LZ4, group=5),
            replace(form, method=Method.ZSTANDARD, level=3, dictionary=common, group=4),
            replace(form, method=Method.LZ4, level=5, dictionary=common),
            replace(form, method=Method.ZSTANDARD, level=4),
            replace(form, method=Method.LZ4, level=4, group=3),
        ):
            # With level 4, slices are not encoded in the order of their numbers.
            order = generator.permutation(COUNT).astype(np.uint32) if codec.level == 4 else None
            coded = encode(slices, codec, order)
            assert coded is not None
            assert coded.data is not None
            block = Block(
                codec,
                coded.data.copy(),
                coded.offsets.copy(),
                coded.palette.copy(),
                np.arange(COUNT),
                slices,
                places=None if coded.places is None else coded.places.copy(),
            )
            blocks.append(block)
    return [*blocks, *(replace(block, in_file=True) for block in blocks)]


BLOCKS = make_whole_blocks()
SINGLES = [block for block in BLOCKS if block.codec.group == 1 and block.places is None]
Damage = Callable[[Block, np.random.Generator], None]


def _spoil_bytes(array: NDArray[Any], generator: np.random.Generator, kinds: int = 4) -> Bytes:
    """Flip, zero, randomise or cut some bytes of a copy."""
    spoilt = array.view(np.uint8).copy()
    if not spoilt.size:
        return spoilt
    first = int(generator.integers(spoilt.size))
    stretch = slice(first, first + int(generator.integers(1, 40)))
    match generator.integers(kinds):
        case 0:
            spoilt[first] ^= 1 << int(generator.integers(8))
        case 1:
            spoilt[stretch] = 0
        case 2:
            spoilt[stretch] = generator.integers(0, 256, len(spoilt[stretch]))
        case _:
            spoilt = spoilt[:first].copy()
    return spoilt


def spoil_data(block: Block, generator: np.random.Generator) -> None:
    """Change compressed bytes, mostly the first few of every slice, which are headers."""
    block.data = _spoil_bytes(block.data, generator)
    for start in block.offsets[:-1].tolist():
        after_magic = 4 * int(generator.integers(2))
        header = block.data[start + after_magic : start + after_magic + 6]
        if generator.random() < 0.5:
            header ^= generator.integers(0, 256, len(header), np.uint8)


def spoil_offsets(block: Block, generator: np.random.Generator) -> None:
    """Put offsets out of order, beyond the data or to their largest value, or leave some out."""
    offsets = block.offsets.copy()
    if not offsets.size:
        return
    some = generator.integers(0, len(offsets), 3)
    match generator.integers(6):
        case 0:
            generator.shuffle(offsets)
        case 1:
            offsets[some] = generator.integers(0, 1 << 32, 3)
        case 2:
            offsets[some] = block.data.size + generator.integers(0, 10, 3)
        case 3:
            offsets[some] = np.iinfo(np.uint32).max
        case 4:
            offsets[:] = 0
        case _:
            offsets = offsets[: int(some[0])].copy()
    block.offsets = offsets


def spoil_palette(block: Block, generator: np.random.Generator) -> None:
    """Change words of the palette."""
    block.palette = _spoil_bytes(block.palette, generator, kinds=3)


def shorten_palette(block: Block, generator: np.random.Generator) -> None:
    """Leave words of the palette out."""
    block.palette = block.palette[: int(generator.integers(block.palette.size + 1))].copy()


def spoil_dictionary(block: Block, generator: np.random.Generator) -> None:
    """Change, shorten or take away the bytes that slices have in common."""
    content = b"?" if block.codec.dictionary is None else block.codec.dictionary.content
    spoilt = _spoil_bytes(np.frombuffer(content, np.uint8), generator).tobytes() or b"!"
    try:
        dictionary = Dictionary(spoilt) if generator.random() < 0.8 else None
    except ValueError:
        return
    block.codec = replace(block.codec, dictionary=dictionary)


def forge_dictionary(block: Block, generator: np.random.Generator) -> None:
    """Replace a dictionary by bytes that only begin like a trained one."""
    content = ZSTD_DICTIONARY_MAGIC + generator.bytes(int(generator.integers(500)))
    try:
        dictionary = Dictionary(content)
    except ValueError:
        return
    block.codec = replace(block.codec, method=Method.ZSTANDARD, dictionary=dictionary)


def request_missing_slices(block: Block, generator: np.random.Generator) -> None:
    """Request slices that the block does not have."""
    beyond = np.array([-1, COUNT, COUNT + 1, 1 << 32, 1 << 62, -(1 << 62)])
    block.numbers = np.append(block.numbers, generator.choice(beyond, 2))


def change_method(block: Block, generator: np.random.Generator) -> None:
    """Read one method's bytes by another."""
    block.codec = replace(block.codec, method=Method(int(generator.integers(3))))


def change_transform(block: Block, generator: np.random.Generator) -> None:
    """Claim a size, a word or an image that does not fit the other settings."""
    names = ("slice_bytes", "word_bytes", "planes", "rows", "columns", "shuffle_bytes", "level", "min_match")
    name = names[int(generator.integers(len(names)))]
    values = [-1, 0, 1, 2, 3, 4, 5, 8, 7, 60, 901, 100_000, 1 << 20, 1 << 40, 1 << 62]
    claimed: dict[str, Any] = {name: values[int(generator.integers(len(values)))]}
    codec = replace(block.codec, **claimed)
    if generator.random() < 0.3:
        transform = list(Transform)[int(generator.integers(len(Transform)))]
        codec = replace(codec, transform=transform, subtracts_green=bool(generator.integers(2)))
    block.codec = codec


def change_group(block: Block, generator: np.random.Generator) -> None:
    """Claim another number of slices per unit: one, many, more than fit into memory, or a negative number."""
    group = int(generator.choice([-(1 << 31), -1, 0, 1, 2, 3, 6, 12, 13, 64, 65, 1 << 20, 1 << 31, 1 << 40, 1 << 62]))
    block.codec = replace(block.codec, group=group)


def spoil_places(block: Block, generator: np.random.Generator) -> None:
    """Make slices share places, have places that do not exist, or be fewer than their number says."""
    places: Any = np.arange(COUNT, dtype=np.uint16)[::-1].copy() if block.places is None else block.places.copy()
    if not places.size:  # Another damage has removed all places.
        return
    match generator.integers(3):
        case 0:
            places[generator.integers(0, len(places), 3)] = generator.integers(0, 1 << 16, 3)
        case 1:
            places = places[: int(generator.integers(len(places)))].copy()
        case _:
            places = places.astype(np.uint32)
    block.places = places


def change_count(block: Block, generator: np.random.Generator) -> None:
    """Claim more slices than there are, or fewer, and sometimes change the number of offsets and sums accordingly."""
    block.count = int(generator.choice([-1, 0, 1, COUNT - 1, COUNT + 1, 2 * COUNT, 1 << 16, 1 << 32, 1 << 62]))
    units = -(-block.count // max(block.codec.group, 1))
    if generator.random() < 0.7 and 0 <= units < 1 << 17:
        block.offsets = np.resize(block.offsets, units + 1)
        block.checks = np.resize(compute_checks(block), units)
        block.numbers = generator.integers(0, max(block.count, 1), COUNT)


def spoil_checks(block: Block, generator: np.random.Generator) -> None:
    """Change the sums that units in a file must have, or leave some out."""
    block.in_file = True
    checks = compute_checks(block)
    if checks.size:
        checks[generator.integers(checks.size)] ^= np.uint32(1 << int(generator.integers(32)))
    block.checks = checks if generator.random() < 0.7 else checks[: int(generator.integers(checks.size + 1))].copy()


def cut_the_file(block: Block, generator: np.random.Generator) -> None:
    """Cut a file, or change the position of its units, also to one before the file or far after it."""
    block.in_file = True
    block.cut = int(generator.integers(1, block.data.size + 2))
    if generator.random() < 0.4:
        block.start = int(generator.choice([-(1 << 62), -(1 << 31), -1, 1, 700, 1 << 31, 1 << 40, (1 << 63) - 1]))


DAMAGES: dict[str, Damage] = {
    "data": spoil_data,
    "offsets": spoil_offsets,
    "palette": spoil_palette,
    "dictionary": spoil_dictionary,
    "numbers": request_missing_slices,
    "method": change_method,
    "checks": spoil_checks,
    "file": cut_the_file,
}
CLAIMS: dict[str, Damage] = {
    "short palette": shorten_palette,
    "transform": change_transform,
    "false dictionary": forge_dictionary,
    "group": change_group,
    "count": change_count,
    "places": spoil_places,
}
"""Damages that are noticed before a slice of the block is read."""
WHOLE = "nothing"
"""With this kind, the script also compresses and reads whole blocks."""


def compute_checks(block: Block) -> NDArray[np.uint32]:
    """Return the checksums that the block claims, or else the checksums of its units."""
    if block.checks is not None:
        return block.checks.copy()
    ends = np.minimum(block.offsets.astype(np.int64), block.data.size).tolist()
    sums = [xxhash.xxh64_intdigest(block.data[a:b].tobytes()) & 0xFFFFFFFF for a, b in pairwise(ends)]
    return np.array(sums, np.uint32)


def make_coded(block: Block) -> Coded:
    """Return the block as an object, with its units in memory or in a file. Raise ValueError if it is refused."""
    if not block.in_file:
        return Coded(block.codec, block.count, block.offsets, block.palette, block.data, block.places)
    with tempfile.TemporaryFile() as temporary:
        temporary.write(block.data.tobytes()[: max(block.data.size - block.cut, 0)])
        temporary.flush()
        file = DataFile(Path("units"), os.dup(temporary.fileno()))
    place = (file.descriptor, block.start, block.data.nbytes)
    checks = compute_checks(block)
    return Coded(block.codec, block.count, block.offsets, block.palette, place, block.places, checks, file)


def read_damaged(block: Block) -> bytes | None:
    """Decode the slices of a block one by one. Return None if they are refused, and raise any other error."""
    try:
        coded = make_coded(block)
        return b"".join(decode(coded, int(number), 1).tobytes() for number in block.numbers)
    except (ValueError, IndexError, OverflowError):
        return None


def make_damaged(number: int, kinds: list[str], seed: int) -> Block:
    """Apply damages of the given kinds to one of the blocks, and read some slices in any order."""
    generator = np.random.default_rng(seed)
    block = replace(BLOCKS[number % len(BLOCKS)])
    block.numbers = generator.permutation(COUNT)[: int(generator.integers(1, COUNT + 1))]
    for kind in kinds:
        (DAMAGES | CLAIMS)[kind](block, generator)
    return block


def encode_and_decode(generator: np.random.Generator) -> None:
    """Encode and decode whole blocks of all kinds and many widths."""
    for width, planes, word_bytes in product(range(1, 40), (1, 3, 4), (0, 2, 4, 8)):
        plain = Codec(planes * 5 * width * max(word_bytes, 1), word_bytes=word_bytes)
        green = planes >= 3
        image = replace(plain, transform=Transform.LEFT, planes=planes, rows=5, columns=width, subtracts_green=green)
        forms = [plain, image, replace(image, is_interleaved=True)]
        forms += [replace(plain, transform=Transform.CHANGES)]
        forms += [replace(image, transform=Transform.PIXELS, subtracts_green=False)]
        if planes == 3 and not word_bytes and width < 17:  # 50 colours per row.
            colours = replace(image, transform=Transform.COLOURS, subtracts_green=False)
            forms += [colours, replace(colours, transform=Transform.COLOUR_COLUMNS, is_interleaved=True)]
            forms += [replace(colours, transform=Transform.COLOUR_COLUMNS), replace(colours, is_interleaved=True)]
        forms += [replace(image, is_interleaved=True), Codec(plain.slice_bytes, shuffle_bytes=word_bytes)]
        words = generator.integers(0, 50, (3, plain.slice_bytes // max(word_bytes, 1)))
        slices = words.astype(f"u{max(word_bytes, 1)}").view(np.uint8)
        methods: list[dict[str, Any]] = [
            {"method": Method.LZ4},
            {"method": Method.ZSTANDARD, "level": 3},
            {"method": Method.LZ4, "group": 2},
        ]
        for form, method in product(forms, methods):
            coded = encode(slices, replace(form, **method))
            assert coded is not None
            assert decode(coded, 0, 3).tobytes() == slices.tobytes(), form


def require_whole_block(number: int) -> None:
    """Read a whole block. Require that its slices are right, also after damaged blocks were read."""
    block = BLOCKS[number]
    assert block.slices is not None
    assert read_damaged(block) == block.slices.tobytes(), f"block {number} has wrong slices"


def main(kinds: list[str], cases: int, seed: int) -> None:
    """Read damaged blocks, one after another."""
    generator = np.random.default_rng(seed)
    if WHOLE in kinds:
        kinds.remove(WHOLE)
        encode_and_decode(generator)
    for case in range(cases):
        damages = [kinds[int(i)] for i in generator.integers(0, len(kinds), generator.integers(1, 4))]
        number = int(generator.integers(len(BLOCKS)))
        case_seed = int(generator.integers(1 << 32))
        # The line is written first. After a crash, the last line is the call that crashed.
        sys.stderr.write(f"make_damaged({number}, {damages}, {case_seed})\n")
        read_damaged(make_damaged(number, damages, case_seed))
        if case % WHOLE_EVERY == 0:
            require_whole_block(number)


if __name__ == "__main__":
    for group in sys.argv[1].split("/"):
        main(group.split(","), int(sys.argv[2]), int(sys.argv[3]))
