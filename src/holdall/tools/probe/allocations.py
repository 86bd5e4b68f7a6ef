"""Failed allocations: reads from an error how much memory could not be allocated."""

from __future__ import annotations

import re

from .snapshot import FailedAllocation

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_TORCH_CPU = re.compile(r"tried to allocate (\d+) bytes")
_TORCH_CUDA = re.compile(r"Tried to allocate ([\d.]+) (\w+)")


def read_allocation(error: BaseException | None) -> FailedAllocation | None:
    """Return the failed allocation of an error, or None if the error has another cause."""
    while error is not None:
        found = _read_one_allocation(error)
        if found is not None:
            return found
        error = error.__cause__ or error.__context__
    return None


def _read_one_allocation(error: BaseException) -> FailedAllocation | None:
    if isinstance(error, MemoryError) and hasattr(error, "shape") and hasattr(error, "dtype"):
        shape = tuple(int(side) for side in error.shape)
        dtype = error.dtype
        nbytes = int(dtype.itemsize)
        for side in shape:
            nbytes *= side
        return FailedAllocation(nbytes, shape, str(dtype), "numpy", is_exact=True)
    text = str(error)
    if "allocate" not in text:
        return None
    exact = _TORCH_CPU.search(text)
    if exact:
        return FailedAllocation(int(exact[1]), (), "", "torch", is_exact=True)
    rounded = _TORCH_CUDA.search(text)
    if rounded:
        nbytes = int(float(rounded[1]) * _UNITS.get(rounded[2], 1))
        return FailedAllocation(nbytes, (), "", "torch", is_exact=False)
    return None
