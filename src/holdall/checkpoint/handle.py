"""Handles: what `save` returns at once, while the checkpoint is still being written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdall.errors import CheckpointError

Progress = Callable[[str, int], None]
"""Is told of what is written now ("rows", "logs", "blocks", "files", "commit"), and the bytes written so far."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was acknowledged."""

    url: str
    number: int
    bytes_written: int  # by this save: what earlier checkpoints wrote is not written again
    bytes_total: int  # of all files that the checkpoint names
    transitions: int
    seconds: float


class SaveHandle:
    """A save under way."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._ended = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is safe, and return it; raise what went wrong if it is not."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the checkpoint at {self.url} was not complete after {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            raise CheckpointError(f"the checkpoint at {self.url} ended without a result; report this")
        return self._checkpoint

    def succeed(self, checkpoint: Checkpoint) -> None:
        """End well."""
        self._checkpoint = checkpoint
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End badly."""
        self._error = error
        self._ended.set()
