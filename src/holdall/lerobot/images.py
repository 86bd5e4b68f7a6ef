"""Float32 images as 8-bit words, if these give exactly the same values.

LeRobot passes camera images as float32. Unless they were resized, their values are `k / 255` for the 8-bit words `k` of
a camera. `ImageEncoder` finds these words and verifies them. `decode` computes the float32 values from them.

Guarantee: decoding returns, bit for bit, the image that was encoded. Images of other values stay float32.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.errors import ArgumentError

Floats = NDArray[np.float32]
Words = NDArray[np.uint8]

_MAX_WORD = 255
_RECIPROCAL = np.float32(1) / np.float32(_MAX_WORD)
_PROBE_STEP = 499
"""Step between the values that are tried first. They rule out most wrong forms without encoding the whole image."""


class ImageForm(IntEnum):
    """How the values of an image are computed from the stored float32 values or words `k`."""

    FLOATS = 0  # The values are stored as float32.
    DIVIDED = 1  # k / 255, as a CPU divides.
    MULTIPLIED = 2  # k * (1 / 255), as a GPU divides by a number.
    WHOLE = 3  # k


_WORD_FORMS = (ImageForm.DIVIDED, ImageForm.MULTIPLIED, ImageForm.WHOLE)


class EncodedImage(NamedTuple):
    """An image in its smallest exact form. The unused array is all zeros, and shared by all images."""

    form: ImageForm
    words: Words
    floats: Floats


class ImageEncoder:
    """Encoder of the images of one key. Not thread-safe.

    Args:
        is_lossy: Round every image to the nearest `k / 255`.
    """

    def __init__(self, shape: tuple[int, ...], *, is_lossy: bool) -> None:
        self._is_lossy = is_lossy
        self._no_words = np.zeros(shape, np.uint8)
        self._no_floats = np.zeros(shape, np.float32)
        self._latest = self._no_floats
        self._encoded = EncodedImage(ImageForm.DIVIDED, self._no_words, self._no_floats)

    def encode(self, image: Floats, name: str) -> EncodedImage:
        """Return `image` as words if these give exactly its values, else as float32. `name` is for errors."""
        # A state usually equals the next state of the transition before it.
        if not (image.view(np.uint32) == self._latest.view(np.uint32)).all():
            latest = image.copy()
            self._encoded = self._find_form(_round(latest, name) if self._is_lossy else latest)
            self._latest = latest
        return self._encoded

    def _find_form(self, image: Floats) -> EncodedImage:
        likely = self._encoded.form
        some = image.reshape(-1)[::_PROBE_STEP]
        for form in sorted(_WORD_FORMS, key=lambda form: form is not likely):
            if not _is_exact(some, _find_words(some, form), form):
                continue
            words = _find_words(image, form)
            if _is_exact(image, words, form):
                return EncodedImage(form, words, self._no_floats)
        return EncodedImage(ImageForm.FLOATS, self._no_words, image)


def _is_exact(image: Floats, words: Words, form: ImageForm) -> bool:
    """Return whether `words` give the values of `image`, bit for bit."""
    return bool((_to_values(words, form).view(np.uint32) == image.view(np.uint32)).all())


def _to_values(words: Words, form: ImageForm) -> Floats:
    """Return the values of words. Computing them is faster than a table of the 256 values."""
    values = words.astype(np.float32)
    if form is ImageForm.DIVIDED:
        values /= np.float32(_MAX_WORD)
    elif form is ImageForm.MULTIPLIED:
        values *= _RECIPROCAL
    return values


def decode(stored: torch.Tensor, forms: NDArray[np.uint8], into: torch.Tensor) -> None:
    """Write the values of images to `into`, which is float32 and on the device of `stored`.

    Args:
        stored: Words of the images, or float32 where their form is `FLOATS`.
        forms: The `ImageForm` of every image.
    """
    used = np.unique(forms)
    for form in used:
        if len(used) == 1:
            _decode_all(stored, ImageForm(form), into)
        else:
            rows = torch.from_numpy((forms == form).nonzero()[0]).to(into.device)
            values = torch.empty((len(rows), *into.shape[1:]), device=into.device)
            _decode_all(stored[rows], ImageForm(form), values)
            into[rows] = values


def _decode_all(stored: torch.Tensor, form: ImageForm, into: torch.Tensor) -> None:
    into.copy_(stored)
    if form is ImageForm.DIVIDED:
        # The divisor is a tensor, because a GPU multiplies by the reciprocal of a number.
        into.div_(torch.tensor(_MAX_WORD, dtype=torch.float32, device=into.device))
    elif form is ImageForm.MULTIPLIED:
        into.mul_(float(_RECIPROCAL))


def _find_words(image: Floats, form: ImageForm) -> Words:
    """Return the words that are nearest to the values of an image, and arbitrary words for values out of range."""
    scale = 1 if form is ImageForm.WHOLE else _MAX_WORD
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Any = image * np.float32(scale)
        words: Words = np.rint(scaled, out=scaled).astype(np.uint8)
    return words


def _round(image: Floats, name: str) -> Floats:
    if not (image >= 0).all() or not (image <= 1).all():
        raise ArgumentError(
            f"{name} has values outside of [0, 1], which lossy_8bit_images=True cannot round to 8 bits. Pass images "
            "from 0 to 1, or use lossy_8bit_images=False."
        )
    return _to_values(_find_words(image, ImageForm.DIVIDED), ImageForm.DIVIDED)
