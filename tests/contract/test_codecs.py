"""Every codec: what was compressed comes back bit for bit, and a second implementation can read it."""

from __future__ import annotations

import functools
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
from reference_coder import ReferenceCoder

from holdall.native import NativeCoder
from holdall.schema import Bytes
from holdall.storage.blocks import Codec, Dictionary, Method, Predictor, Transform
from holdall.storage.coded_units import Order, unit_of
from holdall.storage.ticks import Coder

COUNT = 9
SIZES = [(1, 1), (9, 1), (1, 17), (4, 16), (5, 15), (7, 33), (8, 84)]
"""Rows and columns: one-pixel rows and columns, and widths on both sides of what 16 divides."""


NATIVE = NativeCoder()
REFERENCE = ReferenceCoder()
WAYS: list[Any] = [
    pytest.param(NATIVE, NATIVE, id="native"),
    pytest.param(NATIVE, REFERENCE, id="native to reference"),
    pytest.param(REFERENCE, NATIVE, id="reference to native"),
]
"""Which coder compresses, and which one reads what it made."""


@pytest.fixture(scope="module")
def coder() -> Coder:
    return NATIVE


# ---------------------------------------------------------------- what is coded


def trained_dictionary() -> Dictionary:
    generator = np.random.default_rng(0)
    words = [generator.bytes(24) for _ in range(40)]
    samples: list[Any] = [b"".join(words[i] for i in generator.integers(0, 40, 20)) for _ in range(300)]
    return Dictionary(zstandard.train_dictionary(4096, samples).as_bytes())


METHODS = {
    "stored": (Method.STORED, 0, None),
    "lz4": (Method.LZ4, 0, None),
    "lz4hc": (Method.LZ4, 5, None),
    "zstd": (Method.ZSTD, 3, None),
    "zstd and dictionary": (Method.ZSTD, 3, trained_dictionary()),
    "zstd and any bytes": (Method.ZSTD, 1, Dictionary(b"frames of a film " * 30)),
}
COMMON = [None, trained_dictionary(), Dictionary(b"x"), Dictionary(np.random.default_rng(8).bytes(90_000))]
"""Dictionaries: none, a trained one, a short one, and more than LZ4 looks back."""


def images(predictor: Predictor, word_bytes: int = 0) -> Iterator[Transform]:
    """Name every image that is predicted: channels first and last, with and without green."""
    for planes, (rows, columns), interleaved in itertools.product(range(1, 5), SIZES, (False, True)):
        whole = Transform(planes * rows * columns * max(word_bytes, 1), word_bytes, predictor)
        image = replace(whole, planes=planes, rows=rows, columns=columns, interleaved=interleaved)
        yield image
        if planes >= 3:
            yield replace(image, green=True)


FAMILIES: dict[str, Callable[[], Iterator[Transform]]] = {
    "nothing": lambda: map(Transform, (1, 2, 15, 16, 17, 1000, 7056)),
    "palette": lambda: (Transform(words * size, size) for size in (2, 4, 8) for words in (1, 5, 16, 333)),
    "left": lambda: images(Predictor.LEFT),
    "up": lambda: images(Predictor.UP),
    "pixels": lambda: (form for form in images(Predictor.PIXELS) if not (form.interleaved or form.green)),
    "colours": lambda: (form for form in images(Predictor.COLOURS) if form.planes == 3 and not form.green),
    "columns": lambda: (form for form in images(Predictor.COLUMNS) if form.planes == 3 and not form.green),
    "palette and left": lambda: images(Predictor.LEFT, 4),
    "palette and up": lambda: images(Predictor.UP, 8),
    "changes": lambda: (
        Transform(size, word_bytes, Predictor.CHANGES, shuffle=shuffle)
        for size, word_bytes, shuffle in ((1, 0, 0), (17, 0, 0), (7056, 0, 0), (332, 4, 0), (40, 0, 8))
    ),
    "shuffle": lambda: (
        Transform(words * size, shuffle=size) for size in (2, 4, 8) for words in (1, 3, 15, 16, 17, 333)
    ),
}


def contents(form: Transform, seed: int = 0) -> Iterator[tuple[str, Bytes]]:
    """Draw slices that shrink well, a little and not at all; with a palette, of at most 256 words."""
    generator = np.random.default_rng(seed)
    size = form.slice_bytes
    if form.word_bytes:
        for name, kinds in (("one word", 1), ("three words", 3), ("256 words", 256)):
            words = rare_words(form.word_bytes, kinds, generator)
            rows = words[generator.integers(0, kinds, (COUNT, size // form.word_bytes))]
            yield name, rows.view(np.uint8).reshape(COUNT, size)
        return
    if form.is_of_colours:
        for name, kinds in (
            ("one colour", 1),
            ("three colours", 3),
            ("17", 17),
            ("40", 40),
            ("100", 100),
            ("256", 256),
        ):
            numbers = generator.integers(0, kinds, (COUNT, size // 3)) ** 2 // kinds  # some far more often than others
            yield name, coloured(form, generator.integers(0, 1 << 24, kinds), numbers)
        numbers = generator.integers(0, 60, (COUNT, size // 3)) + 60 * np.arange(COUNT)[:, None]
        yield "others in every slice", coloured(form, generator.integers(0, 1 << 24, 60 * COUNT), numbers)
        return
    yield "zeros", np.zeros((COUNT, size), np.uint8)
    yield "equal", np.full((COUNT, size), 255, np.uint8)
    steps = generator.integers(0, 3, (COUNT, size)).cumsum(axis=1)
    yield "smooth", steps.astype(np.uint8)
    yield "noise", generator.integers(0, 256, (COUNT, size), np.uint8)


def coloured(form: Transform, colours: NDArray[np.int64], numbers: NDArray[np.int64]) -> Bytes:
    """Paint slices with some of the colours."""
    pixels = colours.astype("<u4").view(np.uint8).reshape(-1, 4)[numbers, :3]
    return np.ascontiguousarray(pixels if form.interleaved else pixels.transpose(0, 2, 1)).reshape(len(numbers), -1)


def fitting(form: Transform, dictionary: Dictionary | None) -> Dictionary | None:
    """Return a dictionary for such slices: of colours it begins with a palette."""
    if dictionary is None or not form.is_of_colours:
        return dictionary
    palette = np.random.default_rng(3).integers(0, 1 << 24, 256).astype("<u4")
    palette[50:] = 0xFFFFFFFF
    palette[7] = palette[6]
    return Dictionary(palette.tobytes() + dictionary.content)


def rare_words(word_bytes: int, kinds: int, generator: np.random.Generator) -> NDArray[Any]:
    """Draw different words; among them negative zeros and NaNs with payloads, as floats of that size."""
    top = 1 << (8 * word_bytes - 1)
    exponent = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}[word_bytes]
    rare = {top, 0, exponent + 1, exponent + top + 5, exponent + top}
    drawn = generator.integers(0, top, 4 * kinds, np.uint64).tolist()
    words = [*rare, *(word for word in dict.fromkeys(drawn) if word not in rare)]
    return np.array(words[:kinds], f"u{word_bytes}")


def decoded(coder: Coder, sealed: Any, numbers: NDArray[np.int64]) -> Bytes:
    out = np.full((len(numbers), sealed.codec.transform.slice_bytes), 7, np.uint8)
    coder.decode(sealed, numbers, out)
    return out


def adopted(sealer: Coder, reader: Coder, sealed: Any) -> Any:
    """Return what one coder sealed as another is to read it."""
    return sealed if reader is sealer else reader.adopt(sealed.coded)


def handed_over(sealer: Coder, reader: Coder, slices: Bytes, codec: Codec, order: Order | None = None) -> Any:
    """Seal with one coder what another is to read."""
    sealed = sealer.seal(slices, codec, order)
    assert sealed is not None, codec
    return adopted(sealer, reader, sealed)


@functools.lru_cache(maxsize=1)  # both readers read what was sealed once
def sealed_family(sealer: Coder, family: str, method: str) -> list[tuple[str, Bytes, Any]]:
    """Seal contents of every transform of a family, each with its name."""
    kind, level, dictionary = METHODS[method]
    found = []
    for form in FAMILIES[family]():
        codec = Codec(kind, level, form, fitting(form, dictionary))
        found += [(name, slices, sealer.seal(slices, codec)) for name, slices in contents(form)]
    assert all(sealed is not None for _, _, sealed in found)
    return found


@functools.lru_cache(maxsize=1)
def sealed_changes(sealer: Coder, method: str) -> list[tuple[str, Bytes, Any]]:
    """Seal slices of which few or many bytes change, together and in two orders, each with its name."""
    kind, level, dictionary = METHODS[method]
    generator = np.random.default_rng(6)
    found = []
    for size, runs, longest in itertools.product((20, 900), (0, 1, 9), (1, 5, 17, 900)):
        slices = changing(70, size, runs, longest, generator)
        for group, order in itertools.product((1, 2, 7, 32, 64), (None, generator.permutation(70).astype(np.uint32))):
            codec = Codec(kind, level, Transform(size, predictor=Predictor.CHANGES), dictionary, group)
            sealed = sealer.seal(slices, codec, order)
            assert sealed is not None
            found.append((f"{size} bytes, {runs} runs of up to {longest}, {group} together", slices, sealed))
    return found


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_codec_gives_the_same_bits_back(family: str, method: str, sealer: Any, reader: Coder) -> None:
    """Every transform with every method; slices may be asked for in any order, and more than once."""
    order = np.array([*range(COUNT), 0, 8, 3, 3, 0], np.int64)
    for name, slices, sealed in sealed_family(sealer, family, method):
        read = decoded(reader, adopted(sealer, reader, sealed), order)
        assert read.tobytes() == slices[order].tobytes(), (sealed.codec.transform, name)


def test_slices_in_another_order_keep_their_numbers(coder: Coder) -> None:
    """Neighbours in the units shrink together; who asks for a slice need not know."""
    generator = np.random.default_rng(0)
    scenes = generator.integers(0, 256, (4, 1, 600), np.uint8).repeat(8, axis=1)
    lanes = np.ascontiguousarray(scenes.transpose(1, 0, 2)).reshape(32, 600)  # the four in turns
    order = np.arange(32).reshape(8, 4).T.reshape(-1).astype(np.uint32)
    codec = Codec(Method.ZSTD, 3, Transform(600), group=8)
    mixed, sorted_ = coder.seal(lanes, replace(codec, group=2)), coder.seal(lanes, codec, order)
    assert mixed is not None
    assert sorted_ is not None
    assert sorted_.nbytes < mixed.nbytes / 3
    assert sorted_.coded.places is not None
    assert sorted_.coded.places[:6].tolist() == [0, 8, 16, 24, 1, 9]  # four lanes in turns
    numbers = np.array([5, 31, 0, 5, *range(32)])
    assert decoded(coder, sorted_, numbers).tobytes() == lanes[numbers].tobytes()
    plain = coder.seal(lanes, codec, np.arange(32, dtype=np.uint32))
    assert plain is not None
    assert plain.coded.places is None


def changing(count: int, size: int, runs: int, longest: int, generator: np.random.Generator) -> Bytes:
    """Draw slices each of which differs from the one before in some runs of bytes, or in none."""
    slices = generator.integers(0, 256, (count, size), np.uint8)
    for before, slice_ in itertools.pairwise(slices):
        slice_[:] = before
        for _ in range(generator.integers(0, runs + 1)):
            start = generator.integers(0, size)
            slice_[start : start + generator.integers(1, longest + 1)] ^= np.uint8(generator.integers(0, 256))
    return slices


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_slices_that_are_changes_of_each_other_come_back(method: str, sealer: Any, reader: Coder) -> None:
    """However many change, together and in whatever order they are asked for: forth, back, and again."""
    asked = np.array([0, 69, 3, 4, 5, 4, 3, 2, 63, 64, 65, 64, 1, 1, *range(70)], np.int64)
    for name, slices, sealed in sealed_changes(sealer, method):
        read = decoded(reader, adopted(sealer, reader, sealed), asked)
        assert read.tobytes() == slices[asked].tobytes(), name


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@given(data=st.data())
def test_any_changes_come_back(sealer: Coder, reader: Coder, data: st.DataObject) -> None:
    """Sizes, groups, runs and orders that nobody thought of; and both coders note the same changes."""
    count, size = data.draw(st.integers(0, 70)), data.draw(st.integers(1, 700))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    slices = changing(count, size, data.draw(st.integers(0, 12)), data.draw(st.integers(1, size)), generator)
    method = data.draw(st.sampled_from([(Method.STORED, 0), (Method.LZ4, 0), (Method.LZ4, 3), (Method.ZSTD, 1)]))
    form = Transform(size, predictor=Predictor.CHANGES)
    codec = Codec(*method, form, data.draw(st.sampled_from(COMMON)), data.draw(st.integers(1, 64)))
    order = generator.permutation(count).astype(np.uint32) if data.draw(st.booleans()) else None
    sealed = handed_over(sealer, reader, slices, codec, order)
    asked = generator.integers(0, count, 50) if count else np.zeros(0, np.int64)
    assert decoded(reader, sealed, asked).tobytes() == slices[asked].tobytes()
    if codec.method is Method.STORED:
        other = reader.seal(slices, codec, order)
        assert other is not None
        assert np.asarray(other.coded.data).tobytes() == np.asarray(sealed.coded.data).tobytes()


@pytest.mark.parametrize("size", [1, 2, 5, 40, 387])
def test_changes_are_noted_up_to_the_last_byte_that_they_spare(size: int) -> None:
    """Both coders keep a unit whole at the same length, and not some bytes before it."""
    generator, codec = np.random.default_rng(0), Codec(Method.STORED, 0, Transform(size, predictor=Predictor.CHANGES))
    for number in range(300):
        slices = changing(9, size, number % 12, size, generator)
        sealed = [
            REFERENCE.seal(slices, replace(codec, group=3)),
            NATIVE.seal(slices, replace(codec, group=3)),
        ]
        one, other = (None if each is None else np.asarray(each.coded.data).tobytes() for each in sealed)
        assert one == other


def test_a_slice_costs_what_changed_in_it(coder: Coder) -> None:
    """One change of 3 bytes takes these, where it stands, how long it is, and that there is one: 7 bytes at most."""
    slices = np.random.default_rng(0).integers(0, 256, (1, 2000), np.uint8).repeat(64, axis=0)
    for number in range(1, 64):
        slices[number:, 30 * number : 30 * number + 3] ^= 5
    for method, more in ((Method.STORED, 0), (Method.LZ4, 30), (Method.ZSTD, 30)):
        sealed = coder.seal(slices, Codec(method, 3, Transform(2000, predictor=Predictor.CHANGES), group=64))
        assert sealed is not None
        assert sealed.coded.data.nbytes <= 2000 + 63 * 7 + more


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@given(data=st.data())
def test_any_group_and_any_order_come_back(sealer: Coder, reader: Coder, data: st.DataObject) -> None:
    """Groups, dictionaries, orders and counts that nobody thought of."""
    count, size = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 700))
    method = data.draw(st.sampled_from([(Method.LZ4, 0), (Method.LZ4, 3), (Method.ZSTD, 1), (Method.ZSTD, 12)]))
    codec = Codec(*method, Transform(size), data.draw(st.sampled_from(COMMON)), data.draw(st.integers(1, 9)))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    slices = generator.integers(0, data.draw(st.integers(1, 256)), (1, size), np.uint8).repeat(count, axis=0)
    slices[generator.random(slices.shape) < data.draw(st.sampled_from([0, 0.01, 0.5]))] ^= 5
    order = generator.permutation(count).astype(np.uint32) if data.draw(st.booleans()) else None
    sealed = handed_over(sealer, reader, slices, codec, order)
    asked = generator.integers(0, count, 50) if count else np.zeros(0, np.int64)
    assert decoded(reader, sealed, asked).tobytes() == slices[asked].tobytes()


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@given(data=st.data())
def test_any_size_of_slice_comes_back(sealer: Coder, reader: Coder, data: st.DataObject) -> None:
    """Widths, heights, planes and contents that nobody thought of."""
    planes, rows, columns = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 70)))
    word_bytes = data.draw(st.sampled_from([0, 2, 4, 8]))
    shuffle = 0 if word_bytes else data.draw(st.sampled_from([0, 0, 2, 4, 8]))
    size = planes * rows * columns * (word_bytes or shuffle or 1)
    form = Transform(size, word_bytes, shuffle=shuffle)
    if not shuffle and data.draw(st.booleans()):
        form = replace(
            form,
            predictor=data.draw(st.sampled_from([Predictor.LEFT, Predictor.UP])),
            planes=planes,
            rows=rows,
            columns=columns,
            interleaved=data.draw(st.booleans()),
            green=planes >= 3 and data.draw(st.booleans()),
        )
    kind, level, dictionary = METHODS[data.draw(st.sampled_from(sorted(METHODS)))]
    drawn = dict(contents(form, seed=data.draw(st.integers(0, 1000))))
    slices = drawn[data.draw(st.sampled_from(sorted(drawn)))]
    sealed = handed_over(sealer, reader, slices, Codec(kind, level, form, dictionary))
    assert decoded(reader, sealed, np.arange(COUNT)).tobytes() == slices.tobytes()


@pytest.mark.parametrize(("sealer", "reader"), WAYS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("change", ["palette", "shuffle", "nothing"])
def test_payloads_of_nans_and_signs_of_zeros_come_back(change: str, dtype: str, sealer: Coder, reader: Coder) -> None:
    """Floats are bits: nothing compares them as numbers, for which 0.0 and -0.0 would be one word."""
    size = np.dtype(dtype).itemsize
    words = rare_words(size, 5, np.random.default_rng(0)).view(dtype)
    assert np.isnan(words).sum() == 2
    assert (words == 0).sum() == 2
    slices = np.tile(words, (COUNT, 40)).view(np.uint8)
    whole = Transform(slices.shape[1])
    form = {"palette": replace(whole, word_bytes=size), "shuffle": replace(whole, shuffle=size)}.get(change, whole)
    sealed = handed_over(sealer, reader, slices, Codec(Method.ZSTD, 3, form))
    assert decoded(reader, sealed, np.arange(COUNT)).tobytes() == slices.tobytes()
    assert sealed.coded.data.nbytes < slices.nbytes


@pytest.mark.parametrize("word_bytes", [2, 4, 8])
@pytest.mark.parametrize("where", ["in the first slice", "in the last slice"])
def test_a_palette_holds_256_words_and_refuses_the_257th(where: str, word_bytes: int, coder: Coder) -> None:
    """Then nothing is sealed, rather than a word that is not numbered."""
    words = rare_words(word_bytes, 257, np.random.default_rng(1))
    rows = np.tile(words[:256], (3, 2))
    codec = Codec(Method.LZ4, 0, Transform(rows[0].nbytes, word_bytes))
    sealed = coder.seal(rows.view(np.uint8), codec)
    assert sealed is not None
    assert decoded(coder, sealed, np.arange(3)).tobytes() == rows.tobytes()
    rows[0 if where == "in the first slice" else -1, -1] = words[256]
    assert coder.seal(rows.view(np.uint8), codec) is None


COLOURS = Transform(3 * 20 * 30, 0, Predictor.COLOURS, 3, 20, 30)


@pytest.mark.parametrize("group", [1, 2])
def test_a_unit_has_256_colours_and_no_more(group: int, coder: Coder) -> None:
    """As many as there are numbers; of those that the block's palette lacks, as many as a byte counts."""
    colours, codec = np.arange(1, 400), Codec(Method.LZ4, 7, COLOURS, group=group)
    numbers = np.tile(np.arange(600) % 256, (6, 1))
    slices = coloured(COLOURS, colours, numbers)
    sealed = coder.seal(slices, codec)
    assert sealed is not None
    assert decoded(coder, sealed, np.arange(6)).tobytes() == slices.tobytes()
    numbers[4, 17] = 300
    assert coder.seal(coloured(COLOURS, colours, numbers), codec) is None
    numbers[4] = np.arange(600) % 255 + 140
    few = coder.seal(coloured(COLOURS, colours, numbers), replace(codec, group=1))
    assert few is not None
    numbers[4] = 390  # other slices show 256 more often, so that none of these has a number
    rare = coloured(
        COLOURS, np.append(colours, np.arange(1000, 1256)), np.where(numbers == 390, 399 + numbers[0], numbers)
    )
    assert coder.seal(rare, codec) is None


def test_both_coders_number_colours_alike() -> None:
    """The palette, and what stands in front of every unit: so both make of a block what the other one would."""
    for dictionary in (None, fitting(COLOURS, trained_dictionary())):
        codec = Codec(Method.STORED, 0, COLOURS, dictionary, group=2)
        for name, slices in contents(COLOURS):
            order = np.random.default_rng(1).permutation(COUNT).astype(np.uint32)
            one, other = NATIVE.seal(slices, codec, order), REFERENCE.seal(slices, codec, order)
            assert one is not None
            assert other is not None
            for mine, yours in zip(one.arrays(), other.arrays(), strict=True):
                assert mine.tobytes() == yours.tobytes(), name


def test_colours_that_most_slices_show_are_told_once(coder: Coder) -> None:
    """Of two scenes in a block, with 200 colours each, the rarer one pays for those that have no number."""
    generator = np.random.default_rng(2)
    numbers = generator.integers(0, 30, (20, 600))
    numbers[:12] += 200 * (np.arange(12)[:, None] % 3 == 0)
    slices = coloured(COLOURS, generator.choice(1 << 24, 300, replace=False), numbers)
    sealed = coder.seal(slices, Codec(Method.LZ4, 7, COLOURS))
    assert sealed is not None
    assert [unit_of(sealed.coded, number)[0] for number in range(20)] == [0] * 20
    numbers += 30 * (np.arange(20)[:, None])
    many = coder.seal(
        coloured(COLOURS, generator.choice(1 << 24, 900, replace=False), numbers), Codec(Method.LZ4, 7, COLOURS)
    )
    assert many is not None
    assert sum(unit_of(many.coded, number)[0] for number in range(20)) == len(np.unique(numbers)) - 256


def test_a_dictionary_of_colours_begins_with_a_palette() -> None:
    """What a file claims otherwise is refused before anything is read."""
    assert Codec(Method.LZ4, 7, COLOURS).is_sound
    assert not Codec(Method.LZ4, 7, COLOURS, Dictionary(bytes(1023))).is_sound
    assert Codec(Method.LZ4, 7, COLOURS, Dictionary(bytes(1024))).is_sound
    for wrong in ({"green": True}, {"planes": 4}, {"word_bytes": 2}, {"shuffle": 2}, {"rows": 21}):
        assert not replace(COLOURS, **wrong).is_sound()


@pytest.mark.parametrize("method", METHODS)
def test_a_slice_that_does_not_shrink_costs_its_own_bytes(method: str, coder: Coder) -> None:
    """Noise is stored as it is, byte for byte, whatever a compressor would have made of it."""
    kind, level, dictionary = METHODS[method]
    slices = np.random.default_rng(99).integers(0, 256, (20, 600), np.uint8)
    sealed = coder.seal(slices, Codec(kind, level, Transform(600), dictionary))
    assert sealed is not None
    assert isinstance(sealed.coded.data, np.ndarray)
    assert sealed.coded.data.tobytes() == slices.tobytes()
    assert sealed.coded.offsets.tolist() == list(range(0, 20 * 600 + 1, 600))


@pytest.mark.parametrize("method", METHODS)
def test_a_coder_that_keeps_its_compressors_seals_as_one_that_does_not(method: str, coder: Coder) -> None:
    """Block after block, and with another codec in between; what was sealed stays as it was."""
    kind, level, dictionary = METHODS[method]
    codec, other = Codec(kind, level, Transform(600), dictionary, 3), Codec(Method.ZSTD, 1, Transform(600))
    keeping, generator = coder.keeping(), np.random.default_rng(5)
    blocks = [generator.integers(0, 4, (10 + i, 600), np.uint8) for i in range(4)]
    sealed = [keeping.seal(slices, each) for slices in blocks for each in (codec, other)]
    for one, (slices, each) in zip(sealed, [(s, c) for s in blocks for c in (codec, other)], strict=True):
        plain = coder.seal(slices, each)
        assert one is not None
        assert plain is not None
        assert isinstance(one.coded.data, np.ndarray)
        assert isinstance(plain.coded.data, np.ndarray)
        assert one.coded.data.tobytes() == plain.coded.data.tobytes()
        assert decoded(coder, coder.adopt(one.coded), np.arange(len(slices))).tobytes() == slices.tobytes()


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_threads_that_share_a_block_seal_as_one_does(is_ordered: bool, threads: int, coder: Coder) -> None:
    """Byte for byte: units, offsets, palette and places, whatever has to stay together."""
    words = Transform(8 * 40, 4)
    plain = np.random.default_rng(4).integers(0, 3, (41, 320), np.uint8).cumsum(axis=1, dtype=np.uint8)
    few = np.random.default_rng(5).choice(np.arange(200, dtype="f4"), (41, 80)).view(np.uint8)
    coloured = np.random.default_rng(8).integers(0, 7, (41, 318), np.uint8)  # more colours than a palette holds
    order: Order | None = np.random.default_rng(6).permutation(41).astype(np.uint32) if is_ordered else None
    image = Transform(320, predictor=Predictor.LEFT, planes=1, rows=16, columns=20)
    for codec in (
        Codec(Method.ZSTD, 3, Transform(320), trained_dictionary()),
        Codec(Method.LZ4, 5, Transform(320), trained_dictionary()),
        Codec(Method.LZ4, 0, image, group=4), Codec(Method.ZSTD, 9, image), Codec(Method.LZ4, 0, words),
        Codec(Method.LZ4, 7, Transform(318, 0, Predictor.COLUMNS, 3, 2, 53), group=2),
    ):  # fmt: skip
        slices = few if codec.transform is words else coloured if codec.is_of_colours else plain
        alone, shared = coder.seal(slices, codec, order), coder.seal(slices, codec, order, threads=threads)
        assert alone is not None
        assert shared is not None
        for one, other in zip(alone.arrays(), shared.arrays(), strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        out = np.empty_like(slices)
        coder.decode(shared, np.arange(41), out)
        assert out.tobytes() == slices.tobytes()
    assert (
        coder.seal(
            np.random.default_rng(7).random((41, 40)).view(np.uint8), Codec(Method.LZ4, 0, words), threads=threads
        )
        is None
    )


@pytest.mark.parametrize("predictor", [Predictor.LEFT, Predictor.UP])
def test_a_scaled_image_shrinks_as_its_bytes_do(predictor: Predictor, coder: Coder) -> None:
    """Numbers of a palette are in the order of the values, so a predictor finds the same differences."""
    y, x, number = np.mgrid[0:40, 0:40, 0:COUNT].astype(np.float32)
    waves = 127 + 60 * np.sin(x / 9 + number) + 60 * np.cos(y / 7 + 2 * number)
    pixels = np.ascontiguousarray(waves.astype(np.uint8).transpose(2, 0, 1))
    image = Transform(1600, 0, predictor, 1, 40, 40)
    plain = coder.seal(pixels.reshape(COUNT, -1), Codec(Method.ZSTD, 3, image))
    scaled = (pixels / np.float32(255)).reshape(COUNT, -1).view(np.uint8)
    numbered = coder.seal(scaled, Codec(Method.ZSTD, 3, replace(image, slice_bytes=6400, word_bytes=4)))
    assert plain is not None
    assert numbered is not None
    assert numbered.coded.data.nbytes < 1.1 * plain.coded.data.nbytes


def test_slices_in_any_order_of_memory_are_sealed_as_they_read(coder: Coder) -> None:
    """A view whose rows do not lie one after another is no excuse for other bytes."""
    rows = np.random.default_rng(0).integers(0, 3, (16, 64), dtype=np.uint8)
    for slices in (np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2]):
        sealed = coder.seal(slices, Codec(Method.ZSTD, 1, Transform(64)))
        assert sealed is not None
        out = np.empty_like(rows)
        coder.decode(sealed, np.arange(16), out)
        assert np.array_equal(out, rows)


def test_what_is_told_of_a_block_is_what_it_takes(coder: Coder) -> None:
    """Slices, offsets and palette are counted; the offsets lead from the first byte to the last."""
    slices = np.tile(np.arange(50, dtype="f4"), (COUNT, 3)).view(np.uint8)
    sealed = coder.seal(slices, Codec(Method.ZSTD, 3, Transform(600, 4)))
    assert sealed is not None
    assert sealed.count == COUNT
    assert sealed.nbytes == sealed.coded.data.nbytes + 4 * (COUNT + 1) + 256 * 4
    assert sealed.coded.offsets[0] == 0
    assert sealed.coded.offsets[-1] == sealed.coded.data.nbytes
    assert (np.diff(sealed.coded.offsets.astype(np.int64)) > 0).all()


def test_a_dictionary_spares_what_slices_have_in_common(coder: Coder) -> None:
    """Each slice alone is noise; only the dictionary knows it."""
    generator = np.random.default_rng(0)
    common = generator.bytes(400)
    slices = np.frombuffer(b"".join(common + generator.bytes(8) for _ in range(20)), np.uint8).reshape(20, 408)
    alone = coder.seal(slices, Codec(Method.ZSTD, 3, Transform(408)))
    told = coder.seal(slices, Codec(Method.ZSTD, 3, Transform(408), Dictionary(common)))
    assert alone is not None
    assert told is not None
    assert told.coded.data.nbytes < alone.coded.data.nbytes / 5
    assert decoded(coder, told, np.arange(20)).tobytes() == slices.tobytes()


def test_threads_decode_beside_each_other(coder: Coder) -> None:
    """Every thread has a context and scratch memory of its own, also when slices grow from block to block."""
    blocks = []
    for size in (64, 4096, 300):
        form = Transform(size * 3, 0, Predictor.LEFT, 3, 2, size // 2, interleaved=True, green=True)
        slices = dict(contents(form))["smooth"]
        sealed = coder.seal(slices, Codec(Method.ZSTD, 3, form))
        assert sealed is not None
        blocks.append((sealed, slices.tobytes()))
    wrong: list[int] = []

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(blocks), 60):
            sealed, expected = blocks[number]
            if decoded(coder, sealed, np.arange(COUNT)).tobytes() != expected:
                wrong.append(int(number))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_behind_differences_zstandard_refers_to_long_runs_only(coder: Coder) -> None:
    """Five differences that come again are left as they are: camera noise repeats that often by chance."""
    generator = np.random.default_rng(0)
    whole = Transform(64 * 96)
    image = replace(whole, predictor=Predictor.LEFT, planes=1, rows=64, columns=96)
    words = generator.integers(0, 256, (12, 5), np.uint8)[generator.integers(0, 12, (4, 64 * 12))]
    between = generator.integers(0, 256, (4, 64 * 12, 3), np.uint8)
    differences = np.concatenate([words, between], axis=2).reshape(4, -1)
    rows = np.cumsum(differences.reshape(4, 64, 96)[:, :, 1:], axis=2, dtype=np.uint8)
    slices = np.concatenate([np.zeros((4, 64, 1), np.uint8), rows], axis=2).reshape(4, -1)
    behind, plain = (
        coder.seal(slices, Codec(Method.ZSTD, 9, image)),
        coder.seal(differences, Codec(Method.ZSTD, 9, whole)),
    )
    assert behind is not None
    assert plain is not None
    assert behind.nbytes > 1.3 * plain.nbytes
    assert (decoded(coder, behind, np.arange(4)) == slices).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("predictor", [Predictor.NOTHING, Predictor.CHANGES])
@pytest.mark.parametrize("group", [1, 4])
def test_a_block_is_sealed_piece_by_piece_to_the_same_bytes(
    coder: Coder, group: int, predictor: Predictor, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches is called in between, knows how far it is, and may end it; also if threads share the work."""
    monkeypatch.setattr("holdall.native.writing.WATCHED_BYTES", 5 * 700)
    slices = np.random.default_rng(2).integers(0, 3, (23, 700), np.uint8)
    slices[:, 99:] = slices[0, 99:]
    form, order = Transform(700, predictor=predictor), np.arange(23, dtype=np.uint32)[::-1].copy()
    codec = Codec(Method.ZSTD, 3, form, group=group)
    seen: list[int] = []
    whole = coder.seal(slices, codec, order)
    watched = coder.seal(slices, codec, order, threads=threads, watch=seen.append)
    assert whole is not None
    assert watched is not None
    assert watched.coded.offsets.tobytes() == whole.coded.offsets.tobytes()
    assert np.asarray(watched.coded.data).tobytes() == np.asarray(whole.coded.data).tobytes()
    assert len(seen) >= 3
    assert seen == sorted(set(seen))
    assert 0 < seen[0] < seen[-1] <= 23

    def end(_: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        coder.seal(slices, codec, threads=threads, watch=end)
