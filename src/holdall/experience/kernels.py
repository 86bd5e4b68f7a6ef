"""Which loops touch the bytes: the compiled ones if they were built, else NumPy's.

Invariant: both give the same bytes; tests/contract holds one to the other.
"""

from __future__ import annotations

import os

from holdall.errors import ArgumentError
from holdall.experience.native import native_kernels
from holdall.experience.part import Kernels
from holdall.experience.portable import PortableKernels


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
