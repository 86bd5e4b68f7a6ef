"""A file of the kernel's about one process, open for some reads by position.

In:  a process, and the file's name.  Out: its descriptor; None where the kernel does not show it to this user.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self


class ProcFile:
    """One file of `/proc/PID`; also a context manager."""

    def __init__(self, pid: int, name: str, proc: Path) -> None:
        try:
            self._file: int | None = os.open(proc / str(pid) / name, os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
