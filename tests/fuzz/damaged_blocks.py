"""Damaged blocks, made on purpose, and a script that has the compiled decoder read them in a process of its own.

`python damaged_blocks.py KINDS CASES SEED [sanitized]`: KINDS are names of `DAMAGES` and `CLAIMS`, or "nothing", with
commas between them, and slashes between those that are done one after another; "sanitized" says that a sanitizer
watches memory. After a crash the last line says what to run again.
"""

from __future__ import annotations

import ctypes
import mmap
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

from holdall.errors import DamageError
from holdall.native import NativeCoder
from holdall.schema import Bytes
from holdall.storage.blocks import Codec, Coded, Dictionary, Extent, Method, Predictor, SegmentFile, Transform
from holdall.storage.coded_units import SlicePlaces
from holdall.storage.ticks import Coder

COUNT = 12
MARGIN = 64
WHOLE_EVERY = 50
"""After so many damaged blocks one that is whole is read: what is refused must leave nothing behind in the decoder."""
ZSTD_DICTIONARY_MAGIC = b"\x37\xa4\x30\xec"


# ---------------------------------------------------------------- blocks, and what befalls them


@dataclass
class Block:
    """What a block consists of where it is stored, and which slices are asked for."""

    codec: Codec
    data: Bytes
    offsets: NDArray[np.uint32]
    palette: Bytes
    numbers: NDArray[np.int64]
    slices: Bytes | None = None  # what was compressed
    count: int = COUNT
    in_file: bool = False
    checks: NDArray[np.uint32] | None = None  # of the units in a file; None: those that are right
    cut: int = 0  # bytes that the file lacks at its end
    start: int = 0  # where in the file the units are said to begin
    places: SlicePlaces | None = None


def whole_blocks() -> list[Block]:
    """Seal slices in every way that reads them differently."""
    rgb = Transform(900, 0, Predictor.LEFT, 3, 15, 20, interleaved=True, green=True)
    forms = [
        Transform(900),
        Transform(900, 4),
        Transform(900, 2),
        Transform(900, shuffle=4),
        rgb,
        replace(rgb, predictor=Predictor.UP, interleaved=False, green=False),
        replace(rgb, predictor=Predictor.PIXELS, interleaved=False, green=False),
        Transform(1200, 4, Predictor.LEFT, 1, 15, 20),
        Transform(1200, 4, Predictor.UP, 3, 10, 10, interleaved=True, green=True),
        Transform(900, 0, Predictor.COLOURS, 3, 15, 20),
        Transform(900, 0, Predictor.COLUMNS, 3, 15, 20, interleaved=True),
        Transform(900, 0, Predictor.CHANGES),
        Transform(900, 4, Predictor.CHANGES),
    ]
    blocks = []
    for form in forms:
        generator = np.random.default_rng(form.slice_bytes)
        slices: Bytes = (generator.integers(0, 3, (COUNT, form.slice_bytes)).cumsum(axis=1) & 15).astype(np.uint8)
        if form.word_bytes:
            words = np.arange(100, dtype=f"u{form.word_bytes}")
            slices = words[generator.integers(0, 9, (COUNT, form.slice_bytes // form.word_bytes))].view(np.uint8)
        common = Dictionary(slices[:2].tobytes())
        if form.is_of_colours:
            # Some in all slices, which have numbers in the block's palette, and some in one or two.
            colours = generator.integers(0, 256, (20 + 30 * COUNT, 3), np.uint8)
            own = 20 + 30 * np.arange(COUNT)[:, None] + generator.integers(0, 35, (COUNT, 300)) % (30 * COUNT)
            numbers = np.where(generator.random((COUNT, 300)) < 0.7, generator.integers(0, 20, (COUNT, 300)), own)
            pixels = colours[numbers % len(colours)]
            slices = (pixels if form.interleaved else pixels.transpose(0, 2, 1)).reshape(COUNT, -1)
            common = Dictionary(colours.tobytes()[:1024] + slices[:1].tobytes())
        if form.predictor is Predictor.CHANGES:
            at = form.slice_bytes * np.arange(COUNT) // COUNT // 4 * 4
            changed = np.arange(form.slice_bytes) < at[:, None]
            slices = np.where(changed, slices, slices[0])
        for codec in (
            Codec(Method.LZ4, 0, form),
            Codec(Method.LZ4, 5, form),
            Codec(Method.STORED, 0, form, group=6),
            Codec(Method.ZSTD, 3, form),
            Codec(Method.ZSTD, 3, form, common),
            Codec(Method.STORED, 0, form),
            Codec(Method.LZ4, 0, form, group=5),
            Codec(Method.ZSTD, 3, form, common, group=4),
            Codec(Method.LZ4, 5, form, common),
            Codec(Method.ZSTD, 4, form),
            Codec(Method.LZ4, 4, form, group=3),
        ):
            # Codecs of level 4 are sealed in another order than their numbers'.
            order = generator.permutation(COUNT).astype(np.uint32) if codec.level == 4 else None
            sealed = NativeCoder().seal(slices, codec, order)
            assert sealed is not None
            coded = sealed.coded
            assert isinstance(coded.data, np.ndarray)
            block = Block(
                codec, coded.data, coded.offsets, coded.palette, np.arange(COUNT), slices, places=coded.places
            )
            blocks.append(block)
    return [*blocks, *(replace(block, in_file=True) for block in blocks)]


BLOCKS = whole_blocks()
SINGLES = [block for block in BLOCKS if block.codec.group == 1 and block.places is None]
Damage = Callable[[Block, np.random.Generator], None]


def _spoil(array: NDArray[Any], generator: np.random.Generator, kinds: int = 4) -> Bytes:
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
    """Change compressed bytes, those of every slice's first few above all: headers stand there."""
    block.data = _spoil(block.data, generator)
    for start in block.offsets[:-1].tolist():
        behind_magic = 4 * int(generator.integers(2))
        header = block.data[start + behind_magic : start + behind_magic + 6]
        if generator.random() < 0.5:
            header ^= generator.integers(0, 256, len(header), np.uint8)


def spoil_offsets(block: Block, generator: np.random.Generator) -> None:
    """Put offsets out of order, beyond the data, at the end of what they can say, or leave some out."""
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
    block.palette = _spoil(block.palette, generator, kinds=3)


def shorten_palette(block: Block, generator: np.random.Generator) -> None:
    """Leave words of the palette out."""
    block.palette = block.palette[: int(generator.integers(block.palette.size + 1))].copy()


def spoil_dictionary(block: Block, generator: np.random.Generator) -> None:
    """Change, shorten or take away the bytes that slices have in common."""
    content = b"" if block.codec.dictionary is None else block.codec.dictionary.content
    spoilt = Dictionary(_spoil(np.frombuffer(content, np.uint8), generator).tobytes())
    block.codec = replace(block.codec, dictionary=spoilt if generator.random() < 0.8 else None)


def pretend_a_dictionary(block: Block, generator: np.random.Generator) -> None:
    """Put bytes in a dictionary's place that begin like a trained one and are none."""
    content = ZSTD_DICTIONARY_MAGIC + generator.bytes(int(generator.integers(500)))
    block.codec = replace(block.codec, method=Method.ZSTD, dictionary=Dictionary(content))


def ask_for_others(block: Block, generator: np.random.Generator) -> None:
    """Ask for slices that the block does not hold."""
    beyond = np.array([-1, COUNT, COUNT + 1, 1 << 32, 1 << 62, -(1 << 62)])
    block.numbers = np.append(block.numbers, generator.choice(beyond, 2))


def mistake_the_method(block: Block, generator: np.random.Generator) -> None:
    """Read one method's bytes by another."""
    block.codec = replace(block.codec, method=Method(int(generator.integers(3))))


def mistake_the_transform(block: Block, generator: np.random.Generator) -> None:
    """Claim a size, a word or an image that does not go with the others."""
    names = ("slice_bytes", "word_bytes", "planes", "rows", "columns", "shuffle")
    name = names[int(generator.integers(len(names)))]
    values = [-1, 0, 1, 2, 3, 4, 5, 8, 7, 60, 901, 100_000, 1 << 20]
    claimed: dict[str, Any] = {name: values[int(generator.integers(len(values)))]}
    form = replace(block.codec.transform, **claimed)
    if generator.random() < 0.3:
        form = replace(form, predictor=Predictor(int(generator.integers(7))), green=bool(generator.integers(2)))
    block.codec = replace(block.codec, transform=form)


def mistake_the_group(block: Block, generator: np.random.Generator) -> None:
    """Claim other numbers of neighbours in a unit: one, many, all of memory, or less than none."""
    group = int(generator.choice([-(1 << 31), -1, 0, 1, 2, 3, 6, 12, 13, 64, 65, 1 << 20, 1 << 31, 1 << 40, 1 << 62]))
    block.codec = replace(block.codec, group=group)


def spoil_places(block: Block, generator: np.random.Generator) -> None:
    """Let slices share places, have places that do not exist, or be fewer than are counted."""
    places: Any = np.arange(COUNT, dtype=np.uint16)[::-1].copy() if block.places is None else block.places.copy()
    if not places.size:  # spoilt before
        return
    match generator.integers(3):
        case 0:
            places[generator.integers(0, len(places), 3)] = generator.integers(0, 1 << 16, 3)
        case 1:
            places = places[: int(generator.integers(len(places)))].copy()
        case _:
            places = places.astype(np.uint32)
    block.places = places


def mistake_the_count(block: Block, generator: np.random.Generator) -> None:
    """Claim more slices than there are, or fewer; now and then with as many offsets and sums as would go with that."""
    block.count = int(generator.choice([-1, 0, 1, COUNT - 1, COUNT + 1, 2 * COUNT, 1 << 16, 1 << 32, 1 << 62]))
    units = -(-block.count // max(block.codec.group, 1))
    if generator.random() < 0.7 and 0 <= units < 1 << 17:
        block.offsets = np.resize(block.offsets, units + 1)
        block.checks = np.resize(checks_of(block), units)
        block.numbers = generator.integers(0, max(block.count, 1), COUNT)


def spoil_checks(block: Block, generator: np.random.Generator) -> None:
    """Change the sums that units in a file must have, or leave some out."""
    block.in_file = True
    checks = checks_of(block)
    if checks.size:
        checks[generator.integers(checks.size)] ^= np.uint32(1 << int(generator.integers(32)))
    block.checks = checks if generator.random() < 0.7 else checks[: int(generator.integers(checks.size + 1))].copy()


def cut_the_file(block: Block, generator: np.random.Generator) -> None:
    """Let a file be shorter than it was, or its units be said to begin elsewhere, before it or far behind."""
    block.in_file = True
    block.cut = int(generator.integers(1, block.data.size + 2))
    if generator.random() < 0.4:
        block.start = int(generator.choice([-(1 << 62), -(1 << 31), -1, 1, 700, 1 << 31, 1 << 40, (1 << 63) - 1]))


DAMAGES: dict[str, Damage] = {
    "data": spoil_data,
    "offsets": spoil_offsets,
    "palette": spoil_palette,
    "dictionary": spoil_dictionary,
    "numbers": ask_for_others,
    "method": mistake_the_method,
    "checks": spoil_checks,
    "file": cut_the_file,
}
CLAIMS: dict[str, Damage] = {
    "short palette": shorten_palette,
    "transform": mistake_the_transform,
    "false dictionary": pretend_a_dictionary,
    "group": mistake_the_group,
    "count": mistake_the_count,
    "places": spoil_places,
}
"""What is wrong with a block before a slice of it is read."""
WHOLE = "nothing"
"""A child that is given this word also seals and reads blocks that are whole."""


def guarded(array: NDArray[Any]) -> NDArray[Any]:
    """Copy an array to where its last byte is the last before a page that may not be touched."""
    if sys.platform != "linux":
        return array.copy()
    pages = -(-max(array.nbytes, 1) // mmap.PAGESIZE)
    block = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    memory = np.frombuffer(block, np.uint8)
    guard = ctypes.c_void_p(memory.ctypes.data + pages * mmap.PAGESIZE)
    if ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError("mprotect failed")
    end = pages * mmap.PAGESIZE
    copy = memory[end - array.nbytes : end].view(array.dtype)
    copy[:] = array
    return copy


def checks_of(block: Block) -> NDArray[np.uint32]:
    """Return the sums that the block claims, or those of its units as they are, wherever its offsets lead."""
    if block.checks is not None:
        return block.checks.copy()
    ends = np.minimum(block.offsets.astype(np.int64), block.data.size).tolist()
    sums = [xxhash.xxh64_intdigest(block.data[a:b].tobytes()) & 0xFFFFFFFF for a, b in pairwise(ends)]
    return np.array(sums, np.uint32)


def laid(block: Block, lay: Callable[[NDArray[Any]], NDArray[Any]]) -> Bytes | Extent:
    """Put the units into memory, or into a file."""
    if not block.in_file:
        return lay(block.data)
    descriptor, name = tempfile.mkstemp(suffix=".seg")
    os.write(descriptor, block.data.tobytes())
    os.truncate(descriptor, max(block.data.size - block.cut, 0))
    file = SegmentFile(Path(name), descriptor, is_temporary=True)
    return Extent(file, block.start, block.data.nbytes, lay(checks_of(block)))


def read_damaged(coder: Coder, block: Block, lay: Callable[[NDArray[Any]], NDArray[Any]]) -> bytes | None:
    """Decode a block and return what came back, None if it was refused. Any error but DamageError is one."""
    slice_bytes = max(block.codec.transform.slice_bytes, 0)
    room = np.full(2 * MARGIN + len(block.numbers) * slice_bytes, 7, np.uint8)
    out = room[MARGIN:-MARGIN].reshape(len(block.numbers), slice_bytes)
    try:
        units = laid(block, lay)
        told, places = (lay(block.offsets), lay(block.palette)), None if block.places is None else lay(block.places)
        sealed = coder.adopt(Coded(block.codec, block.count, *told, units, places))
        coder.decode(sealed, block.numbers, out)
    except DamageError:
        return None
    finally:
        assert (room[:MARGIN] == 7).all(), "wrote before the rows"
        assert (room[-MARGIN:] == 7).all(), "wrote behind the rows"
    return out.tobytes()


def damaged(number: int, kinds: list[str], seed: int) -> Block:
    """Let damages of the given kinds befall one of the blocks; some slices are asked for, in any order."""
    generator = np.random.default_rng(seed)
    block = replace(BLOCKS[number % len(BLOCKS)])
    block.numbers = generator.permutation(COUNT)[: int(generator.integers(1, COUNT + 1))]
    for kind in kinds:
        (DAMAGES | CLAIMS)[kind](block, generator)
    return block


def peek() -> None:
    """Read one byte behind a guarded array."""
    array = guarded(np.zeros(100, np.uint8))
    ctypes.string_at(array.ctypes.data, 100)
    ctypes.string_at(array.ctypes.data, 101)


def seal_and_read(coder: Coder, generator: np.random.Generator, lay: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Seal and read whole blocks of all kinds and many widths, in memory that is no larger than they are."""
    for width, planes, word_bytes in product(range(1, 40), (1, 3, 4), (0, 2, 4, 8)):
        plain = Transform(planes * 5 * width * max(word_bytes, 1), word_bytes)
        image = replace(plain, predictor=Predictor.LEFT, planes=planes, rows=5, columns=width, green=planes >= 3)
        forms = [plain, image, replace(image, predictor=Predictor.UP, interleaved=True)]
        forms += [replace(plain, predictor=Predictor.CHANGES)]
        forms += [replace(image, predictor=Predictor.PIXELS, green=False)]
        if planes == 3 and not word_bytes and width < 17:  # 50 colours a row
            colours = replace(image, predictor=Predictor.COLOURS, green=False)
            forms += [colours, replace(colours, predictor=Predictor.COLUMNS, interleaved=True)]
            forms += [replace(colours, predictor=Predictor.COLUMNS), replace(colours, interleaved=True)]
        forms += [replace(image, interleaved=True), Transform(plain.slice_bytes, shuffle=word_bytes)]
        words = generator.integers(0, 50, (3, plain.slice_bytes // max(word_bytes, 1)))
        slices = words.astype(f"u{max(word_bytes, 1)}").view(np.uint8)
        rows = lay(slices.reshape(-1)).reshape(slices.shape)
        methods = (Codec(Method.LZ4, 0, plain), Codec(Method.ZSTD, 3, plain), Codec(Method.LZ4, 0, plain, group=2))
        for form, method in product(forms, methods):
            sealed = coder.seal(rows, replace(method, transform=form))
            assert sealed is not None
            out = lay(np.zeros(slices.size, np.uint8)).reshape(slices.shape)
            coder.decode(sealed, np.arange(3), out)
            assert out.tobytes() == slices.tobytes(), form


def require_the_rest_is_well(coder: Coder, number: int, lay: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Read a block that is whole, after all those that were not: no claim of theirs is left in the decoder."""
    block = BLOCKS[number]
    assert block.slices is not None
    assert read_damaged(coder, block, lay) == block.slices.tobytes(), f"block {number} is read otherwise"


def main(kinds: list[str], cases: int, seed: int, *, is_sanitized: bool) -> None:
    """Read damaged blocks with the compiled coder, one after another."""
    coder = NativeCoder()
    lay = np.copy if is_sanitized else guarded  # a sanitizer has guards of its own around what is allocated
    generator = np.random.default_rng(seed)
    if WHOLE in kinds:
        kinds.remove(WHOLE)
        seal_and_read(coder, generator, lay)
    for case in range(cases):
        befalling = [kinds[int(i)] for i in generator.integers(0, len(kinds), generator.integers(1, 4))]
        number, case_seed = int(generator.integers(len(BLOCKS))), int(generator.integers(1 << 32))
        # Told before it is done: after a crash, the last line says what to run again.
        sys.stderr.write(f"damaged({number}, {befalling}, {case_seed})\n")
        read_damaged(coder, damaged(number, befalling, case_seed), lay)
        if case % WHOLE_EVERY == 0:
            require_the_rest_is_well(coder, number, lay)


if __name__ == "__main__":
    for together in sys.argv[1].split("/"):
        main(together.split(","), int(sys.argv[2]), int(sys.argv[3]), is_sanitized="sanitized" in sys.argv[4:])
