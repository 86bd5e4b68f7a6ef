"""Which loops touch the bytes: the compiled ones if they were built, else NumPy's.

Invariant: both give the same bytes; tests/contract holds one to the other.
"""

from __future__ import annotations

import os
from typing import Protocol

from holdall.errors import ArgumentError
from holdall.experience.arena import Bytes
from holdall.experience.crew import Crew
from holdall.experience.native import native_kernels
from holdall.experience.native_unique import SliceNamer
from holdall.experience.part import OpenPart, Places
from holdall.experience.portable import PortableKernels
from holdall.experience.sealing.portable_codec import Coder
from holdall.experience.slices import SliceBlock
from holdall.experience.window import Window


class Kernels(Protocol):
    """Batches in, batches out; the caller never handles a row alone."""

    name: str
    coder: Coder

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block of unique slices in `arena`."""

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""

    def gather(self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, crew: Crew, /) -> None:
        """Fill `obs` and `next_obs`, rows of bytes, with one field of the places; None for one not wanted."""

    def namer(self) -> SliceNamer | None:
        """Return what names the slices of a batch, each once; None where that is not compiled."""


def chosen_kernels() -> Kernels:
    """Return the compiled loops if they were built, else the portable ones.

    HOLDALL_KERNELS=portable or native asks for one of the two.
    """
    wish = os.environ.get("HOLDALL_KERNELS", "")
    if wish not in {"", "portable", "native"}:
        raise ArgumentError(f"HOLDALL_KERNELS ({wish}) is neither portable nor native; unset it")
    native = None if wish == "portable" else native_kernels()
    if wish == "native" and native is None:
        raise ArgumentError(
            "HOLDALL_KERNELS is native, but no compiled library of this version was built; "
            "install a C compiler and run 'pip install --force-reinstall holdall'"
        )
    return native or PortableKernels()
