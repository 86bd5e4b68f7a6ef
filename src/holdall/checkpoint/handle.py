"""Handles: what `save` returns at once, while the checkpoint is still being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdall.errors import ArgumentError, CheckpointError

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

    def __init__(
        self,
        url: str,
        interrupt: Callable[[], None],
        wait_for_mirror: Callable[[int, float | None], None] | None = None,
    ) -> None:
        self.url = url
        self._interrupt = interrupt
        self._wait_for_mirror = wait_for_mirror
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

    def mirrored(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint, or a newer one, stands in the mirror too, and return it."""
        if self._wait_for_mirror is None:
            raise ArgumentError("mirrored() was called, but the save had no mirror; call save(path, mirror=url)")
        began = time.monotonic()
        checkpoint = self.result(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        self._wait_for_mirror(checkpoint.number, left)
        return checkpoint

    def cancel(self) -> None:
        """Give up waiting for an object store that does not answer; saves to it fail from now on."""
        self._interrupt()

    def succeed(self, checkpoint: Checkpoint) -> None:
        """End well."""
        self._checkpoint = checkpoint
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End badly."""
        self._error = error
        self._ended.set()
