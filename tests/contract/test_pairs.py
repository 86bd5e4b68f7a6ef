"""Differences of images as pairs: whatever they are come back bit for bit, by either coder, whatever the tables say."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from holdall import ReplayMemory
from holdall.errors import DamageError
from holdall.native import NativeCoder, PortableCoder, native_kernels
from holdall.schema import Bytes
from holdall.storage import choosing, segment
from holdall.storage.blocks import Codec, Coded, Dictionary, Method, Predictor, Transform
from holdall.storage.pairs import train_pairs
from holdall.storage.ticks import Coder

KERNELS = native_kernels()
NATIVE: Any = None if KERNELS is None or not isinstance(KERNELS.coder, NativeCoder) else KERNELS.coder
PORTABLE = PortableCoder()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the compiled loops, libzstd or liblz4 are missing here")
BOTH: list[Any] = [pytest.param(NATIVE, id="native", marks=needs_native), pytest.param(PORTABLE, id="portable")]
SIZES = [(8, 8), (5, 13), (1, 64), (64, 1), (3, 33), (8, 84), (17, 15), (2, 70), (40, 41)]
"""Rows and columns: even and odd ones, rows shorter and longer than a block of pairs, and what ends inside of one."""
COUNT = 6
CASES, PAIR_TABLE = 3 * 4096 + 3 + 3 * 32, 2 * 16
"""Bytes of what was trained: a table's number for every case, behind two counts, and the shares of a table of pairs."""


# ---------------------------------------------------------------- images, and tables


def form_of(planes: int, rows: int, columns: int, **settings: Any) -> Transform:
    return Transform(planes * rows * columns, 0, Predictor.LEFT, planes, rows, columns, **settings)


def forms() -> Iterator[Transform]:
    for planes, (rows, columns) in itertools.product((1, 2, 3, 5), SIZES):
        yield form_of(planes, rows, columns)
    yield form_of(3, 9, 20, interleaved=True, green=True)
    yield form_of(3, 9, 20, green=True)
    yield replace(form_of(3, 9, 20, green=True), predictor=Predictor.UP)
    yield Transform(4 * 180, 4, Predictor.LEFT, 1, 9, 20)


def camera(form: Transform, count: int = COUNT, seed: int = 0) -> Bytes:
    """Paint walls whose light changes slowly, with dither, and a box or two: as a camera sees a room."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0 : form.rows, 0 : form.columns] / max(form.rows, form.columns)
    rows = np.empty((count, form.planes, form.rows, form.columns), np.uint8)
    for row in rows:
        light = (
            40 + 60 * x * generator.random() + 90 * y * generator.random() + generator.random((form.rows, form.columns))
        )
        for _ in range(2):
            top, left = (int(generator.integers(0, size)) for size in (form.rows, form.columns))
            light[top : top + 9, left : left + 12] += generator.integers(-30, 100)
        row[:] = light * np.linspace(0.8, 1.2, form.planes)[:, None, None]
        row[2:3] = row[:1]
    if form.interleaved:
        rows = np.ascontiguousarray(rows.transpose(0, 2, 3, 1))
    if form.word_bytes:
        rows = rows.astype(np.float32).view(np.uint8)
    return rows.reshape(count, form.slice_bytes)


def contents(form: Transform, seed: int = 0) -> Iterator[tuple[str, Bytes]]:
    generator = np.random.default_rng(seed)
    yield "camera", camera(form, seed=seed)
    if form.word_bytes:
        return
    yield "zeros", np.zeros((COUNT, form.slice_bytes), np.uint8)
    yield "every difference", np.cumsum(np.arange(COUNT * form.slice_bytes) % 256).astype(np.uint8).reshape(COUNT, -1)
    yield "noise", generator.integers(0, 256, (COUNT, form.slice_bytes), np.uint8)
    few = np.zeros((COUNT, form.slice_bytes), np.uint8)
    few[:, :: max(form.slice_bytes // 3, 1)] = generator.integers(0, 256)
    few[:, -1] = generator.integers(1, 256)
    yield "few", few


def differences(slices: Bytes, form: Transform) -> Bytes:
    sealed = PORTABLE.seal(slices, Codec(Method.STORED, 0, form))
    assert sealed is not None
    return np.asarray(sealed.coded.data).reshape(len(slices), -1)


def trained_on(slices: Bytes, form: Transform) -> Dictionary:
    return Dictionary(train_pairs(differences(slices, form), form))


@functools.cache
def trained(form: Transform) -> Dictionary:
    return trained_on(camera(form, 20, 5), form)


def made(pair_shares: list[list[int]], value_shares: list[list[int]], seed: int = 0) -> Dictionary:
    """Put tables together, and share cases out to them by chance."""
    generator = np.random.default_rng(seed)
    of_pairs = generator.integers(0, len(pair_shares), 3 * 4096 + 3, np.uint8)
    of_values = generator.integers(0, len(value_shares), 3 * 32, np.uint8)
    counts = bytes([len(pair_shares), len(value_shares)])
    shares = np.concatenate([np.array(pair_shares).ravel(), np.array(value_shares).ravel()]).astype("<u2")
    return Dictionary(counts + of_pairs.tobytes() + of_values.tobytes() + shares.tobytes())


@functools.cache
def odd_tables() -> list[Dictionary]:
    """Make tables that nothing was trained for: even ones, lopsided ones, and values that have no symbol but any."""
    even, lopsided = [32] * 16, [1] * 7 + [497] + [1] * 8
    any_alone, all_alike = [0] * 31 + [512], [16] * 32
    most = [np.random.default_rng(7).multinomial(496, [1 / 16] * 16) + 1 for _ in range(100)]
    return [
        made([even], [any_alone]),
        made([lopsided, even], [all_alike, any_alone], 1),
        made([row.tolist() for row in most], [all_alike] * 27, 2),
    ]


def decoded(coder: Coder, coded: Coded) -> Bytes:
    out = np.full((coded.count, coded.codec.transform.slice_bytes), 7, np.uint8)
    coder.decode(coder.adopt(coded), np.arange(coded.count), out)
    return out


def verdict(coder: Coder, coded: Coded) -> bytes | None:
    try:
        return decoded(coder, coded).tobytes()
    except DamageError:
        return None


def sealed_by(coder: Coder, slices: Bytes, codec: Codec) -> Coded:
    sealed = coder.seal(slices, codec)
    assert sealed is not None
    return sealed.coded


# ---------------------------------------------------------------- the rules


@needs_native
def test_both_coders_write_the_same_units_and_read_them() -> None:
    """Every form, every content, tables that fit and tables that do not."""
    for form in forms():
        for tables in (trained(form), odd_tables()[1]):
            codec = Codec(Method.PAIRS, 0, form, tables)
            assert codec.is_sound
            for name, slices in contents(form):
                by_c, by_numpy = (sealed_by(coder, slices, codec) for coder in (NATIVE, PORTABLE))
                assert np.asarray(by_c.data).tobytes() == np.asarray(by_numpy.data).tobytes(), (form, name)
                assert by_c.offsets.tolist() == by_numpy.offsets.tolist()
                assert decoded(NATIVE, by_c).tobytes() == slices.tobytes(), (form, name)
                assert decoded(PORTABLE, by_c).tobytes() == slices.tobytes(), (form, name)


@pytest.mark.parametrize("coder", BOTH)
@pytest.mark.parametrize("number", range(3))
def test_tables_that_nothing_was_trained_for_lose_nothing(number: int, coder: Coder) -> None:
    """A unit may then be as long as the slice, which is stored; what comes back is what it was."""
    for form in (form_of(3, 9, 20), form_of(1, 8, 84), form_of(2, 17, 15)):
        codec = Codec(Method.PAIRS, 0, form, odd_tables()[number])
        for name, slices in contents(form, seed=number):
            coded = sealed_by(coder, slices, codec)
            assert (np.diff(coded.offsets) <= form.coded_bytes).all()
            assert decoded(coder, coded).tobytes() == slices.tobytes(), (form, name)


@pytest.mark.parametrize("coder", BOTH)
@given(data=st.data())
def test_any_image_comes_back(coder: Coder, data: st.DataObject) -> None:
    """Sizes, planes, contents and tables that nobody thought of."""
    rows, columns = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 90))
    columns = max(columns, -(-64 // rows))
    form = form_of(data.draw(st.integers(1, 4)), rows, columns)
    form = replace(form, green=form.planes >= 3 and data.draw(st.booleans()), interleaved=data.draw(st.booleans()))
    form = replace(form, predictor=data.draw(st.sampled_from([Predictor.LEFT, Predictor.UP])))
    drawn = dict(contents(form, seed=data.draw(st.integers(0, 1000))))
    slices = drawn[data.draw(st.sampled_from(sorted(drawn)))]
    tables = data.draw(st.sampled_from([None, *odd_tables()])) or trained(form)
    coded = sealed_by(coder, slices, Codec(Method.PAIRS, 0, form, tables))
    assert decoded(coder, coded).tobytes() == slices.tobytes()


def whole_room() -> Iterator[tuple[str, Bytes]]:
    """Yield images of a camera as they are, and turned in ways that they were not trained for."""
    form = form_of(3, 48, 48, green=True)
    images = camera(form, 40, seed=9).reshape(40, 3, 48, 48)
    for name, turned in (("as they are", images), ("dark", 255 - images), ("mirrored", images[..., ::-1])):
        yield name, np.ascontiguousarray(turned).reshape(40, -1)


@pytest.mark.parametrize("coder", BOTH)
def test_images_of_a_camera_are_smaller_than_by_zstandard(coder: Coder) -> None:
    """Also with light and dark, or left and right, exchanged; a plane that equals another one costs next to nothing."""
    form = form_of(3, 48, 48, green=True)
    tables = trained_on(camera(form, 40, seed=8), form)
    for name, slices in whole_room():
        pairs = sealed_by(coder, slices, Codec(Method.PAIRS, 0, form, tables)).data.nbytes
        zstd = sealed_by(coder, slices, Codec(Method.ZSTD, 9, form)).data.nbytes
        assert pairs < 0.85 * zstd, name
    two = replace(form, slice_bytes=2 * 48 * 48, planes=2, green=False)
    without = camera(form, 40, seed=9).reshape(40, 3, -1)[:, 1:].reshape(40, -1)
    alone = sealed_by(coder, without, Codec(Method.PAIRS, 0, two, trained_on(without, two))).data.nbytes
    assert sealed_by(coder, next(whole_room())[1], Codec(Method.PAIRS, 0, form, tables)).data.nbytes < 1.2 * alone


def spoilt_tables() -> Iterator[tuple[str, bytes]]:
    good = made([[32] * 16, [1] * 15 + [497]], [[16] * 32]).content
    shares = 2 + CASES
    yield "nothing", b""
    yield "a count alone", good[:1]
    yield "cut", good[:-1]
    yield "too long", good + b"\0"
    yield "another count", bytes([3]) + good[1:]
    yield "no tables", bytes(2) + good[2:shares]
    yield "too many tables", bytes([100, 28]) + bytes(CASES) + np.array([32] * 1600 + [16] * 896, "<u2").tobytes()
    yield "a case without a table", good[:50] + b"\x02" + good[51:]
    yield "a value without a table", good[: shares - 1] + b"\x01" + good[shares:]
    yield "too large a share", good[:shares] + b"\xff\xff" + good[shares + 2 :]
    yield "too small a sum", good[:shares] + b"\x1f\0" + good[shares + 2 :]
    yield "a pair without a share", good[:shares] + b"\0\0\x40\0" + good[shares + 4 :]
    lacking = np.array([17] * 15 + [257] + [0] * 16, "<u2")
    yield "no share for any value", good[: shares + 2 * PAIR_TABLE] + lacking.tobytes()


@pytest.mark.parametrize("coder", BOTH)
def test_tables_that_are_none_are_refused(coder: Coder) -> None:
    """They come from a file: nothing is read with them, and nothing written."""
    form = form_of(1, 8, 84)
    slices = camera(form)
    good = made([[32] * 16, [1] * 15 + [497]], [[16] * 32])
    coded = sealed_by(coder, slices, Codec(Method.PAIRS, 0, form, good))
    assert verdict(coder, coded) == slices.tobytes()
    for name, content in spoilt_tables():
        bad = replace(coded.codec, dictionary=Dictionary(content))
        assert verdict(coder, replace(coded, codec=bad)) is None, name
        with pytest.raises(DamageError):
            coder.seal(slices, bad)


@pytest.mark.parametrize("coder", BOTH)
def test_a_dictionary_is_read_by_each_method_in_its_own_way(coder: Coder) -> None:
    """A file may claim that one dictionary is both: what one method made of it is never handed to the other."""
    form = form_of(1, 8, 84)
    slices, words = camera(form), Dictionary(b"frames of a film " * 30)
    coded = sealed_by(coder, slices, Codec(Method.ZSTD, 3, form, words))
    assert verdict(coder, replace(coded, codec=Codec(Method.PAIRS, 0, form, words))) is None
    tables = trained(form)
    pairs = sealed_by(coder, slices, Codec(Method.PAIRS, 0, form, tables))
    zstd = sealed_by(coder, slices, Codec(Method.ZSTD, 3, form, tables))
    assert decoded(coder, pairs).tobytes() == decoded(coder, zstd).tobytes() == slices.tobytes()


@needs_native
@given(seed=st.integers(0, 2**32 - 1), is_cut=st.booleans())
def test_both_coders_see_the_same_in_damaged_units(seed: int, is_cut: bool) -> None:
    """The same bytes, or an error: a unit has to end where its length says, with all states as they were at first."""
    generator = np.random.default_rng(seed)
    form = form_of(3, 9, 20, green=True)
    coded = sealed_by(NATIVE, camera(form, 1, seed=seed % 50), Codec(Method.PAIRS, 0, form, trained(form)))
    data = np.asarray(coded.data).copy()
    if is_cut:
        data = data[: int(generator.integers(0, len(data)))]
    else:
        data[generator.integers(0, len(data), generator.integers(1, 4))] ^= np.uint8(1 << int(generator.integers(0, 8)))
    spoilt = replace(coded, data=data, offsets=np.array([0, len(data)], np.uint32))
    assert verdict(NATIVE, spoilt) == verdict(PORTABLE, spoilt)


@pytest.mark.parametrize("coder", BOTH)
def test_most_damage_is_noticed(coder: Coder) -> None:
    """A flipped bit changes what follows, and the end is seldom right by chance."""
    form = form_of(1, 30, 40)
    coded = sealed_by(coder, camera(form, 1), Codec(Method.PAIRS, 0, form, trained(form)))
    unseen = 0
    for place in np.linspace(0, coded.data.nbytes - 1, 40).astype(np.int64):
        data = np.asarray(coded.data).copy()
        data[place] ^= 4
        unseen += verdict(coder, replace(coded, data=data)) is not None
    assert unseen < 20


def test_pairs_are_of_differences_alone_and_of_single_slices() -> None:
    """A block from a file that claims anything else is refused before it is read."""
    form, tables = form_of(3, 9, 20), Dictionary(b"x")
    sound = Codec(Method.PAIRS, 0, form, tables)
    assert sound.is_sound
    for wrong in (
        replace(sound, dictionary=None), replace(sound, group=2), replace(sound, key=2),
        replace(sound, transform=Transform(540)), replace(sound, transform=form_of(3, 7, 9)),
        replace(sound, transform=replace(form, predictor=Predictor.PIXELS)),
        replace(sound, transform=form_of(1, 257, 256)),
    ):  # fmt: skip
        assert not wrong.is_sound, wrong
    assert replace(sound, transform=form_of(1, 256, 256)).is_sound


@pytest.mark.parametrize("coder", BOTH)
def test_a_plane_of_the_most_pixels_comes_back(coder: Coder) -> None:
    """The last pixel has the last number that there is room for."""
    form = form_of(1, 256, 256)
    slices = camera(form, 2)
    slices[:, -3:] = [9, 200, 31]
    coded = sealed_by(coder, slices, Codec(Method.PAIRS, 0, form, trained_on(slices, form)))
    assert coded.data.nbytes < slices.nbytes / 2
    assert decoded(coder, coded).tobytes() == slices.tobytes()


@needs_native
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_share_a_block_write_the_same_units(threads: int) -> None:
    form = form_of(3, 9, 20)
    codec, slices = Codec(Method.PAIRS, 0, form, trained(form)), camera(form, 31)
    order = np.random.default_rng(6).permutation(31).astype(np.uint32)
    alone, shared = NATIVE.seal(slices, codec, order), NATIVE.seal(slices, codec, order, threads=threads)
    assert np.asarray(alone.coded.data).tobytes() == np.asarray(shared.coded.data).tobytes()
    assert decoded(NATIVE, shared.coded).tobytes() == slices.tobytes()


@needs_native
def test_other_units_come_back_beside_pairs() -> None:
    """Reading pairs takes the memory that a group of slices is kept in: that group is read again."""
    form = form_of(1, 8, 84)
    slices = camera(form)
    pairs = NATIVE.seal(slices, Codec(Method.PAIRS, 0, form, trained(form)))
    group = NATIVE.seal(slices, Codec(Method.ZSTD, 3, form, group=3))
    out = np.empty((1, form.slice_bytes), np.uint8)
    for number, sealed in itertools.product(range(COUNT), (group, pairs, group)):
        NATIVE.decode(sealed, np.array([number]), out)
        assert out.tobytes() == slices[number].tobytes()


@pytest.mark.parametrize("coder", BOTH)
def test_what_decoding_has_to_do_goes_by_the_bytes_of_a_unit(coder: Coder) -> None:
    """Which both coders know: without compiled loops the same codec is chosen."""
    form = form_of(3, 9, 20)
    sealed = coder.seal(camera(form), Codec(Method.PAIRS, 0, form, trained(form)))
    assert sealed is not None
    work = coder.count_work(sealed, np.arange(COUNT))
    assert work[:, 0].tolist() == np.diff(sealed.coded.offsets).tolist()
    assert not work[:, 1:].any()


def test_a_memory_keeps_pairs_on_disk_and_in_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files name the tables as they name any dictionary: every transition comes back, also where they are loaded."""
    form, ticks = form_of(1, 24, 30), 700
    codec = Codec(Method.PAIRS, 0, form, trained(form))
    monkeypatch.setattr(choosing, "choose", lambda *_: codec)
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 2**16)
    frames = camera(form, ticks + 1, seed=3).reshape(-1, 1, 24, 30)
    space = spaces.Box(0, 255, (24, 30), np.uint8)
    with ReplayMemory(
        space, spaces.Discrete(2), ticks, budget=150_000, prefer="memory", spill_dir=tmp_path / "spilled"
    ) as memory:
        for tick in range(ticks):
            memory.add(frames[tick], np.zeros(1, np.int64), np.zeros(1), frames[tick + 1], *np.zeros((2, 1), np.bool_))
        memory.drain()
        report = memory.report()
        assert "left+pairs" in str(report.fields[0].finding)
        assert report.disk_bytes > 0
        memory.save(tmp_path / "saved").result()
        ids = np.arange(ticks)
        assert memory.gather(ids).obs.tobytes() == frames[:-1].tobytes()
    with ReplayMemory.load(tmp_path / "saved") as loaded:
        assert loaded.gather(ids).next_obs.tobytes() == frames[1:].tobytes()
