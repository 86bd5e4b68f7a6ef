"""Segment files: where blocks lie that are not in memory.

In:  positions.  Out: the bytes that stand there, by positioned reads; nothing is ever mapped, since mapped pages count
as the process's own memory and a file that is cut short under a mapping ends the process.
Invariant: a file stays open, and so readable, for as long as somebody refers to it, even if it is deleted meanwhile.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, HoldallError

_SEEKING = threading.Lock()


class SegmentFile:
    """A file that is open for reading.

    Args:
        descriptor: Open, and closed by this object when nobody refers to it any more.
        is_temporary: Whether it is deleted then, too.
    """

    def __init__(self, path: Path, descriptor: int, *, is_temporary: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_growing = False  # whether records are still added to it
        self.is_awaited = False  # whether parts of it may have to be brought here before C reads them
        weakref.finalize(self, _close, descriptor, path if is_temporary else None, os.getpid())

    def read(self, start: int, nbytes: int) -> bytes:
        """Read from a position; shorter at the file's end."""
        pieces = []
        while nbytes > 0 and (piece := _pread(self.descriptor, nbytes, start)):
            pieces.append(piece)
            start, nbytes = start + len(piece), nbytes - len(piece)
        return b"".join(pieces)

    def bring(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """See to it that ranges can be read soon: the disk is told of all of them at once."""
        if hasattr(os, "posix_fadvise"):
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the units of a sealed block lie in a file, and what they must sum up to."""

    file: SegmentFile
    start: int
    nbytes: int
    checks: NDArray[np.uint32]  # per unit
    record_start: int = -1  # of the record that they are part of, if they are

    def bring(self) -> None:
        """See to it that all units can be read."""
        self.file.bring(np.array([self.start]), np.array([self.start + self.nbytes]))

    def read(self, first: int, end: int) -> bytes:
        """Read bytes [first, end) of the units."""
        try:
            content = self.file.read(self.start + first, end - first)
        except HoldallError:
            raise
        except OSError as error:
            raise DamageError(
                f"{self.file.path} cannot be read ({error.strerror}); nothing of it is returned"
            ) from error
        if len(content) != end - first:
            raise DamageError(f"{self.file.path} was cut short; nothing of it is returned")
        return content


def _pread(descriptor: int, nbytes: int, start: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, start)
    # Windows has no positioned reads; there a second descriptor would not help either: they share one position.
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, nbytes)


def write_at(descriptor: int, data: memoryview, start: int) -> int:
    """Write some of `data` from a position on; return how many bytes it was."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, start)
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)


def _close(descriptor: int, doomed: Path | None, process: int) -> None:
    os.close(descriptor)
    # A fork's child has the descriptor, not the file.
    if doomed is not None and process == os.getpid():
        doomed.unlink(missing_ok=True)
