"""The rules of a codec, as a test class."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import _native
from holdall._native import Coded, Dictionary
from holdall.codec.codec import Codec, Method
from holdall.codec.presets import list_codecs, list_fast_codecs, list_kinds
from holdall.schema import Bytes, Leaf
from holdall.store.windows import Window
from holdall.testing.rules import require, require_raises
from holdall.testing.streams import DTYPES, random_rows

_REFUSALS = (ValueError, IndexError)
"""Errors of a decoder that refuses its arguments."""
_SLICES = 9
_CONTENTS = ("zeros", "smooth", "few", "still", "noise")
_SOME_DTYPES = DTYPES[5:10:2]


class CodecContract:
    """The rules of `holdall.codec.Codec`. Override `list_codecs` to test codecs of your own.

    `encode` and `decode` are the functions of `holdall._native`. Override them to test another implementation.
    """

    shapes: tuple[tuple[int, ...], ...] = ((), (5,), (12, 17), (3, 9, 11), (10, 12, 3))

    def list_codecs(self, leaf: Leaf) -> Iterable[Codec]:
        """Yield the codecs that are tested on whole observations of `leaf`. By default these are holdall's own."""
        window = Window.whole(leaf)
        yield Codec(leaf.nbytes)
        yield Codec(leaf.nbytes, Method.ZSTANDARD, 3, dictionary=Dictionary(b"frames of a film " * 30))
        yield Codec(leaf.nbytes, Method.ZSTANDARD, 3, group=4)
        for kind in list_kinds(leaf, window):
            yield from list_codecs(kind, leaf, window)
            yield from list_fast_codecs(kind, leaf, window)

    def encode(self, slices: Bytes, codec: Codec, order: NDArray[np.uint32] | None = None) -> Coded | None:
        """Compress slices. Return None if the codec cannot represent them."""
        return _native.encode(slices, codec, order)

    def decode(self, coded: Coded, first: int, count: int) -> NDArray[np.uint8]:
        """Return slices as (count, slice_bytes)."""
        return _native.decode(coded, first, count)

    def test_every_dtype_and_shape_comes_back_bit_for_bit(self) -> None:
        """The slices are zeros, smooth values, few values, a still scene, and noise with NaN payloads."""
        for slices, coded in self._make_cases():
            require(coded.slice_count == len(slices), f"{coded.codec}: {coded.slice_count} slices of {len(slices)}")
            self._require_slices(coded, slices, 0, len(slices))

    def test_any_slices_can_be_read(self) -> None:
        """This holds for one slice, no slice and the last slices, also from a pickled copy."""
        for slices, coded in self._make_cases(_SOME_DTYPES):
            for source in (coded, pickle.loads(pickle.dumps(coded))):
                for first, count in ((8, 1), (0, 1), (3, 4), (5, 4), (4, 0)):
                    self._require_slices(source, slices, first, count)

    def test_every_number_of_slices_comes_back(self) -> None:
        """The numbers are one slice, a whole unit, and one slice more than a unit."""
        for slices, coded in self._make_cases(_SOME_DTYPES[:1], ("few", "still")):
            group = coded.codec.group
            for count in (1, group, group + 1):
                repeated = np.resize(slices, (count, slices.shape[1]))
                other = self.encode(repeated, coded.codec)
                if other is not None:
                    self._require_slices(other, repeated, 0, count)

    def test_slices_in_another_order_keep_their_numbers(self) -> None:
        """A slice is read by its number, wherever it is stored."""
        order = np.random.default_rng(3).permutation(_SLICES).astype(np.uint32)
        for slices, coded in self._make_cases(_SOME_DTYPES, ("few", "still")):
            other = self.encode(slices, coded.codec, order)
            require(other is not None, f"{coded.codec}: slices are refused in another order")
            if other is not None:
                self._require_slices(other, slices, 0, len(slices))

    def test_a_dictionary_changes_no_bit(self) -> None:
        """A dictionary may have much or nothing in common with the slices."""
        for slices, coded in self._make_cases(_SOME_DTYPES[:1], ("few", "noise")):
            for content in (slices.tobytes() + b"end", b"frames of a film " * 30):
                other = self.encode(slices, replace(coded.codec, dictionary=Dictionary(content)))
                require(other is not None, f"{coded.codec}: slices are refused with a dictionary")
                if other is not None:
                    self._require_slices(other, slices, 0, len(slices))

    def test_noise_takes_no_more_than_its_own_bytes(self) -> None:
        """Offsets, places and palette are counted separately."""
        for slices, coded in self._make_cases(contents=("noise",)):
            index_bytes = coded.offsets.nbytes + coded.palette.nbytes
            if coded.places is not None:
                index_bytes += coded.places.nbytes
            data_bytes = 0 if coded.data is None else coded.data.nbytes
            require(data_bytes <= slices.nbytes, f"{coded.codec}: {slices.nbytes} bytes grew to {data_bytes}")
            require(coded.nbytes <= data_bytes + index_bytes + 4096, f"{coded.codec}: nbytes is {coded.nbytes}")

    def test_a_slice_that_is_not_in_the_block_is_refused(self) -> None:
        """Slice numbers may come from a damaged file."""
        for slices, coded in self._make_cases(_SOME_DTYPES[:1]):
            for first, count in ((-1, 1), (len(slices), 1), (0, len(slices) + 1), (2**40, 1)):
                self._require_refused(coded, first, count)

    def test_offsets_outside_of_the_data_are_refused(self) -> None:
        """Either making a `Coded` of such offsets raises, or decoding it."""
        for _, coded in self._make_cases(_SOME_DTYPES[:1]):
            for wrong in (0, 2**32 - 1):
                offsets = coded.offsets.copy()
                if offsets[-1] == wrong:
                    continue
                offsets[-1] = wrong

                def decode_all(coded: Coded = coded, offsets: Any = offsets) -> None:
                    changed = _copy_with(coded, offsets=offsets)
                    self.decode(changed, 0, changed.slice_count)

                require_raises(_REFUSALS, decode_all, f"{coded.codec}, offset {wrong}: decode")

    def test_damaged_bytes_are_an_error_or_bytes_of_the_right_size(self) -> None:
        """A compressor does not notice every flipped bit, but it does not crash."""
        generator = np.random.default_rng(0)
        for slices, coded in self._make_cases(_SOME_DTYPES):
            for _ in range(4):
                data = _damage_bytes(np.asarray(coded.data), generator)
                with suppress(*_REFUSALS):
                    rows = self.decode(_copy_with(coded, data=data), 0, len(slices))
                    require(rows.shape == slices.shape, f"{coded.codec}: {rows.shape} slices of {slices.shape}")

    def test_damage_in_a_file_is_always_noticed(self) -> None:
        """Units in files have checksums, so wrong bytes are never returned."""
        generator = np.random.default_rng(1)
        for slices, coded in self._make_cases(_SOME_DTYPES):
            data = np.asarray(coded.data)
            checks = _native.checksums(coded)
            damaged = data.copy()
            damaged[generator.integers(len(damaged))] ^= 1 << int(generator.integers(8))
            with tempfile.TemporaryFile(buffering=0) as file:
                file.write(data.tobytes() + damaged.tobytes())
                whole = _copy_with(coded, data=(file.fileno(), 0, data.nbytes), checks=checks)
                self._require_slices(whole, slices, 0, len(slices))
                broken = _copy_with(coded, data=(file.fileno(), data.nbytes, data.nbytes), checks=checks)
                self._require_refused(broken, 0, len(slices))

    def _make_cases(
        self, dtypes: Iterable[np.dtype[Any]] = DTYPES, contents: Iterable[str] = _CONTENTS
    ) -> Iterator[tuple[Bytes, Coded]]:
        """Yield slices of every kind, raw and compressed by every codec that can represent them."""
        generator = np.random.default_rng(2)
        for dtype in dtypes:
            for shape in self.shapes:
                leaf = Leaf("slice", shape, dtype)
                codecs = list(self.list_codecs(leaf))
                for content in contents:
                    slices = _make_slices(leaf, content, generator)
                    for codec in codecs:
                        coded = self.encode(slices, codec)
                        if coded is not None:
                            yield slices, coded

    def _require_slices(self, coded: Coded, slices: Bytes, first: int, count: int) -> None:
        rows = self.decode(coded, first, count)
        expected = slices[first : first + count]
        require(rows.tobytes() == expected.tobytes(), f"{coded.codec}: slices {first} to {first + count} have changed")

    def _require_refused(self, coded: Coded, first: int, count: int) -> None:
        what = f"{coded.codec}: decoding {count} slices from {first} on"
        require_raises((*_REFUSALS, OverflowError), lambda: self.decode(coded, first, count), what)


def _copy_with(coded: Coded, **changes: Any) -> Coded:
    """Return a copy of compressed slices with some of its arrays replaced."""
    arrays: dict[str, Any] = {
        "offsets": coded.offsets,
        "palette": coded.palette,
        "data": coded.data,
        "places": coded.places,
        "checks": coded.checks,
    }
    return Coded(coded.codec, coded.slice_count, **(arrays | changes))


def _make_slices(leaf: Leaf, content: str, generator: np.random.Generator) -> Bytes:
    """Return slices of whole observations, as rows of bytes."""
    noise = random_rows(leaf, (_SLICES,), generator)
    if content == "zeros":
        noise = np.zeros_like(noise)
    elif content == "few":
        noise = noise.reshape(-1)[generator.integers(0, min(3, noise.size), noise.shape)]
    elif content == "still":  # Consecutive slices differ in one value.
        fresh = noise.reshape(_SLICES, -1)
        still = np.repeat(fresh[:1], _SLICES, axis=0)
        changed = generator.integers(0, still.shape[1], _SLICES)
        still[np.arange(_SLICES), changed] = fresh[np.arange(_SLICES), changed]
        noise = still
    rows: Bytes = np.ascontiguousarray(noise).reshape(_SLICES, -1).view(np.uint8)
    if content == "smooth":
        rows = generator.integers(0, 3, rows.shape).cumsum(axis=1).astype(np.uint8)
    return rows


def _damage_bytes(data: Bytes, generator: np.random.Generator) -> Bytes:
    """Flip a bit, overwrite a range, or cut off the end."""
    damaged = data.copy()
    first = int(generator.integers(len(data)))
    kind = generator.integers(3)
    if kind == 0:
        damaged[first] ^= 1 << int(generator.integers(8))
    elif kind == 1:
        damaged[first : first + 20] = generator.integers(0, 256, len(damaged[first : first + 20]))
    else:
        damaged = damaged[:first]
    return damaged
