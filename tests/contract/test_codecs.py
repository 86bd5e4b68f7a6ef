"""Every codec: slices are decoded bit for bit, by holdall and by a second implementation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_decoder import decode_slice

from holdall._native import Coded, Dictionary, decode, encode
from holdall.codec.codec import Codec, Method, Transform

Bytes = NDArray[np.uint8]

COUNT = 9
SIZES = [(1, 1), (9, 1), (1, 17), (4, 16), (5, 15), (7, 33), (8, 84)]
"""Rows and columns: one-pixel rows and columns, and widths just below and above multiples of 16."""
COLOURS = {Transform.COLOURS, Transform.COLOUR_COLUMNS}


# ---------------------------------------------------------------- codecs and slices


def train_dictionary() -> Dictionary:
    rng = np.random.default_rng(0)
    words = [rng.bytes(24) for _ in range(40)]
    samples: list[Any] = [b"".join(words[i] for i in rng.integers(0, 40, 20)) for _ in range(300)]
    return Dictionary(zstandard.train_dictionary(4096, samples).as_bytes())


DICTIONARIES: dict[str, Dictionary | None] = {
    "none": None,
    "trained": train_dictionary(),
    "one byte": Dictionary(b"x"),
    "beyond 64 KiB": Dictionary(np.random.default_rng(8).bytes(90_000)),
}
METHODS: dict[str, tuple[Method, int, str]] = {
    "stored": (Method.STORED, 0, "none"),
    "lz4": (Method.LZ4, 0, "none"),
    "lz4 high": (Method.LZ4, 5, "none"),
    "lz4 and dictionary": (Method.LZ4, 5, "trained"),
    "zstandard": (Method.ZSTANDARD, 3, "none"),
    "zstandard and dictionary": (Method.ZSTANDARD, 3, "trained"),
    "zstandard and any bytes": (Method.ZSTANDARD, 1, "beyond 64 KiB"),
}


def list_images(transform: Transform, word_bytes: int = 0) -> Iterator[Codec]:
    """Yield images of several sizes: channels first and last, with and without green."""
    for planes, (rows, columns), is_interleaved in itertools.product(range(1, 5), SIZES, (False, True)):
        image = Codec(
            planes * rows * columns * max(word_bytes, 1),
            transform=transform,
            word_bytes=word_bytes,
            planes=planes,
            rows=rows,
            columns=columns,
            is_interleaved=is_interleaved,
        )
        if transform in COLOURS and planes != 3:
            continue
        if transform is Transform.PIXELS and is_interleaved:
            continue
        yield image
        if transform is Transform.LEFT and planes >= 3:
            yield replace(image, subtracts_green=True)


FAMILIES: dict[str, Callable[[], Iterator[Codec]]] = {
    "plain": lambda: map(Codec, (1, 2, 15, 16, 17, 1000, 7056)),
    "palette": lambda: (Codec(words * size, word_bytes=size) for size in (2, 4, 8) for words in (1, 5, 16, 333)),
    "left": lambda: list_images(Transform.LEFT),
    "pixels": lambda: list_images(Transform.PIXELS),
    "colours": lambda: list_images(Transform.COLOURS),
    "colour columns": lambda: list_images(Transform.COLOUR_COLUMNS),
    "palette and left": lambda: list_images(Transform.LEFT, 4),
    "palette and pixels": lambda: list_images(Transform.PIXELS, 8),
    "changes": lambda: (
        Codec(size, group=4, transform=Transform.CHANGES, word_bytes=word_bytes, shuffle_bytes=shuffle_bytes)
        for size, word_bytes, shuffle_bytes in ((1, 0, 0), (17, 0, 0), (7056, 0, 0), (332, 4, 0), (40, 0, 8))
    ),
    "shuffle": lambda: (
        Codec(words * size, shuffle_bytes=size) for size in (2, 4, 8) for words in (1, 3, 15, 16, 17, 333)
    ),
}


def list_contents(codec: Codec, seed: int = 0) -> Iterator[Bytes]:
    """Yield slices that compress well, a little and not at all. A palette gets at most 256 words or colours."""
    rng = np.random.default_rng(seed)
    size = codec.slice_bytes
    if codec.word_bytes:
        for kinds in (1, 3, 256):
            words = list_rare_words(codec.word_bytes, kinds, rng)
            rows = words[rng.integers(0, kinds, (COUNT, size // codec.word_bytes))]
            yield rows.view(np.uint8).reshape(COUNT, size)
        return
    if codec.transform in COLOURS:
        for kinds in (1, 3, 17, 40, 100, 256):
            # Some colours are far more frequent than others.
            numbers = rng.integers(0, kinds, (COUNT, size // 3)) ** 2 // kinds
            yield paint(codec, rng.integers(0, 1 << 24, kinds), numbers)
        # Every slice has colours of its own.
        numbers = rng.integers(0, 60, (COUNT, size // 3)) + 60 * np.arange(COUNT)[:, None]
        yield paint(codec, rng.integers(0, 1 << 24, 60 * COUNT), numbers)
        return
    yield np.zeros((COUNT, size), np.uint8)
    yield np.full((COUNT, size), 255, np.uint8)
    yield rng.integers(0, 3, (COUNT, size)).cumsum(axis=1).astype(np.uint8)
    yield rng.integers(0, 256, (COUNT, size), np.uint8)
    yield change_slowly(COUNT, size, 3, 5, rng)


def paint(codec: Codec, colours: NDArray[np.int64], numbers: NDArray[np.int64]) -> Bytes:
    pixels = colours.astype("<u4").view(np.uint8).reshape(-1, 4)[numbers, :3]
    ordered = pixels if codec.is_interleaved else pixels.transpose(0, 2, 1)
    return np.ascontiguousarray(ordered).reshape(len(numbers), -1)


def list_rare_words(word_bytes: int, kinds: int, rng: np.random.Generator) -> NDArray[Any]:
    """Return different words, among them negative zeros and NaNs with payloads of floats of that size."""
    top = 1 << (8 * word_bytes - 1)
    exponent = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}[word_bytes]
    rare = [top, 0, exponent + 1, exponent + top + 5, exponent + top]
    drawn = rng.integers(0, top, 4 * kinds, np.uint64).tolist()
    words = list(dict.fromkeys([*rare, *drawn]))
    return np.array(words[:kinds], f"u{word_bytes}")


def change_slowly(count: int, size: int, runs: int, longest: int, rng: np.random.Generator) -> Bytes:
    """Return slices of which at most `runs` runs of bytes differ from the slice before."""
    slices = np.repeat(rng.integers(0, 256, (1, size), np.uint8), count, axis=0)
    for number in range(1, count):
        slices[number] = slices[number - 1]
        for _ in range(runs):
            start = int(rng.integers(0, size))
            end = min(start + int(rng.integers(1, longest + 1)), size)
            slices[number, start:end] = rng.integers(0, 256, end - start)
    return slices


def apply_method(codec: Codec, method: str) -> Codec:
    kind, level, dictionary = METHODS[method]
    known = DICTIONARIES[dictionary]
    if known is not None and codec.transform in COLOURS:
        palette = np.random.default_rng(3).integers(0, 1 << 24, 256).astype("<u4")
        palette[50:] = 0xFFFFFFFF  # Unused numbers.
        palette[7] = palette[6]
        known = Dictionary(known.content, palette.tobytes())
    return replace(codec, method=kind, level=level, dictionary=known)


def encode_fitting(slices: Bytes, codec: Codec, order: NDArray[np.uint32] | None = None) -> Coded:
    coded = encode(slices, codec, order)
    assert coded is not None, codec
    return coded


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_implementations_read_the_same_bits(family: str, method: str) -> None:
    """Every transform is tested with every compressor."""
    for base in FAMILIES[family]():
        for slices, group in itertools.product(list_contents(base), {base.group, 4}):
            codec = replace(apply_method(base, method), group=group)
            coded = encode(slices, codec)
            if coded is None:  # A unit of four slices may have too many colours.
                assert codec.transform in COLOURS, codec
                assert group > 1, codec
                continue
            assert decode(coded, 0, COUNT).tobytes() == slices.tobytes(), codec
            for number in (0, 5, COUNT - 1):
                assert decode_slice(coded, number) == slices[number].tobytes(), codec


@pytest.mark.parametrize("method", METHODS)
def test_changes_of_any_size_come_back(method: str) -> None:
    """The units have several sizes, and the slices are in two orders."""
    rng = np.random.default_rng(6)
    for size, runs, longest in itertools.product((20, 900), (0, 1, 9), (1, 5, 17, 900)):
        slices = change_slowly(70, size, runs, longest, rng)
        for group, order in itertools.product((1, 2, 7, 64), (None, rng.permutation(70).astype(np.uint32))):
            codec = replace(apply_method(Codec(size, transform=Transform.CHANGES), method), group=group)
            coded = encode_fitting(slices, codec, order)
            assert decode(coded, 0, 70).tobytes() == slices.tobytes(), codec
            assert decode_slice(coded, 69) == slices[69].tobytes(), codec


@pytest.mark.parametrize("dictionary", DICTIONARIES)
@pytest.mark.parametrize("method", [Method.LZ4, Method.ZSTANDARD])
def test_every_dictionary_is_read_back(method: Method, dictionary: str) -> None:
    """Some slices repeat the beginning of a dictionary that is longer than the window of LZ4."""
    known = DICTIONARIES[dictionary]
    content = b"" if known is None else known.content
    rng = np.random.default_rng(1)
    pieces = [content[start : start + 900].ljust(900, b"-") for start in (0, 3000, 80_000)] + [rng.bytes(900)]
    slices = np.frombuffer(b"".join(pieces), np.uint8).reshape(4, 900)
    for group in (1, 2):
        coded = encode_fitting(slices, Codec(900, method, 5, group, dictionary=known))
        assert decode(coded, 0, 4).tobytes() == slices.tobytes()
        assert [decode_slice(coded, number) for number in range(4)] == pieces


def test_slices_in_another_order_keep_their_numbers() -> None:
    """Similar slices in one unit compress better."""
    rng = np.random.default_rng(0)
    scenes = rng.integers(0, 256, (4, 1, 600), np.uint8).repeat(8, axis=1)
    # The order is tick by tick, with four lanes in each tick.
    lanes = np.ascontiguousarray(scenes.transpose(1, 0, 2)).reshape(32, 600)
    order = np.arange(32).reshape(8, 4).T.reshape(-1).astype(np.uint32)
    codec = Codec(600, Method.ZSTANDARD, 3, 8)
    mixed = encode_fitting(lanes, replace(codec, group=2))
    by_lane = encode_fitting(lanes, codec, order)
    assert by_lane.nbytes < mixed.nbytes / 3
    assert by_lane.places is not None
    assert by_lane.places[:6].tolist() == [0, 8, 16, 24, 1, 9]
    assert decode(by_lane, 0, 32).tobytes() == lanes.tobytes()
    assert decode_slice(by_lane, 30) == lanes[30].tobytes()


@given(data=st.data())
def test_generated_slices_come_back(data: st.DataObject) -> None:
    """Bytes, group, order and transform are random."""
    count = data.draw(st.integers(1, 12), "count")
    rows, columns = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 20)), "shape")
    size = 3 * rows * columns
    alphabet = data.draw(st.sampled_from([2, 20, 256]), "alphabet")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    slices = np.random.default_rng(seed).integers(0, alphabet, (count, size)).astype(np.uint8)
    codec = Codec(
        size,
        data.draw(st.sampled_from(list(Method)), "method"),
        3,
        data.draw(st.integers(1, 64), "group"),
        data.draw(st.sampled_from([Transform.NONE, Transform.LEFT, *COLOURS, Transform.CHANGES]), "transform"),
        planes=3,
        rows=rows,
        columns=columns,
        is_interleaved=data.draw(st.booleans(), "interleaved"),
    )
    order = np.array(data.draw(st.permutations(range(count)), "order"), np.uint32)
    coded = encode(slices, codec, data.draw(st.sampled_from([None, order]), "ordered"))
    if coded is None:
        assert codec.transform in COLOURS
        return
    assert decode(coded, 0, count).tobytes() == slices.tobytes()
    assert decode_slice(coded, count - 1) == slices[-1].tobytes()


def test_too_many_words_or_colours_are_refused() -> None:
    words = np.arange(300, dtype=np.float32).view(np.uint8).reshape(1, -1)
    assert encode(words, Codec(1200, Method.LZ4, 7, word_bytes=4)) is None
    pixels = np.arange(3 * 40_000, dtype=np.uint32).astype("<u4").view(np.uint8).reshape(-1, 4)[:40_000, :3]
    image = Codec(120_000, Method.LZ4, 7, 1, Transform.COLOURS, planes=3, rows=200, columns=200, is_interleaved=True)
    assert encode(np.ascontiguousarray(pixels).reshape(1, -1), image) is None


def test_palette_numbers_of_scaled_images_are_predicted_as_bytes() -> None:
    """The palette is in the order of its values, so differences of its numbers are as small as those of bytes."""
    y, x, number = np.mgrid[0:40, 0:40, 0:COUNT].astype(np.float32)
    waves = 127 + 60 * np.sin(x / 9 + number) + 60 * np.cos(y / 7 + 2 * number)
    pixels = np.ascontiguousarray(waves.astype(np.uint8).transpose(2, 0, 1)).reshape(COUNT, -1)
    image = Codec(1600, Method.ZSTANDARD, 3, 1, Transform.LEFT, planes=1, rows=40, columns=40)
    plain = encode_fitting(pixels, image)
    scaled = (pixels / np.float32(255)).view(np.uint8)
    numbered = encode_fitting(scaled, replace(image, slice_bytes=6400, word_bytes=4))
    assert plain.data is not None
    assert numbered.data is not None
    assert numbered.data.nbytes < 1.1 * plain.data.nbytes


def test_nbytes_counts_units_offsets_and_palette() -> None:
    slices = np.tile(np.arange(50, dtype="f4"), (COUNT, 3)).view(np.uint8)
    coded = encode_fitting(slices, Codec(600, Method.ZSTANDARD, 3, word_bytes=4))
    assert coded.slice_count == COUNT
    assert coded.data is not None
    assert coded.nbytes == coded.data.nbytes + 4 * (COUNT + 1) + 256 * 4
    assert coded.offsets[0] == 0
    assert coded.offsets[-1] == coded.data.nbytes
    assert (np.diff(coded.offsets.astype(np.int64)) > 0).all()


def test_a_dictionary_saves_the_bytes_that_slices_have_in_common() -> None:
    """A slice is noise, which only the dictionary can compress."""
    rng = np.random.default_rng(0)
    common = rng.bytes(400)
    slices = np.frombuffer(b"".join(common + rng.bytes(8) for _ in range(20)), np.uint8).reshape(20, 408)
    alone = encode_fitting(slices, Codec(408, Method.ZSTANDARD, 3))
    with_dictionary = encode_fitting(slices, Codec(408, Method.ZSTANDARD, 3, dictionary=Dictionary(common)))
    assert with_dictionary.nbytes < alone.nbytes / 5


def test_huge_slices_come_back() -> None:
    rng = np.random.default_rng(0)
    slices = rng.integers(0, 3, (2, 3_000_000)).astype(np.uint8)
    for method, group in itertools.product((Method.LZ4, Method.ZSTANDARD), (1, 2)):
        coded = encode_fitting(slices, Codec(3_000_000, method, 1, group))
        assert decode(coded, 0, 2).tobytes() == slices.tobytes()


def test_several_threads_decode_at_once() -> None:
    blocks = []
    for size in (64, 4096, 300):
        codec = Codec(size * 3, Method.ZSTANDARD, 3, 1, Transform.LEFT, 0, 3, 2, size // 2, True, True)
        slices = np.random.default_rng(size).integers(0, 3, (COUNT, size * 3)).cumsum(axis=1).astype(np.uint8)
        blocks.append((encode_fitting(slices, codec), slices.tobytes()))
    wrong: list[int] = []

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(blocks), 60).tolist():
            coded, expected = blocks[number]
            if decode(coded, 0, COUNT).tobytes() != expected:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
