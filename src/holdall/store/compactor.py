"""Background compression of full blocks.

One worker thread takes blocks from a queue, compresses them, and assigns the result to `block.form`. A block stays
readable in its old form until that assignment, so a failed compression never loses data: the block keeps its form, and
`failure` says why. The worker sees blocks, never the store that they belong to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from holdall._native import Block, Coded, Raw
from holdall.store.tuning import Tuning

Encode = Callable[[Block, bool], Coded]
"""Compresses a block. The second argument asks for a fast codec, because the worker is behind."""


class Compactor:
    """Compresses blocks in the order in which they were submitted.

    All methods may be called from any thread. The worker is a daemon thread that starts with the first block, so a
    program may end without `close`.

    Attributes:
        failure: Message of the last block that could not be compressed. Empty if all could.
    """

    def __init__(self, encode: Encode, tuning: Tuning, max_queued_bytes: int) -> None:
        self.failure = ""
        self._encode = encode
        self._tuning = tuning
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        self._queue: deque[Block] = deque()
        self._pending: set[Block] = set()  # Queued blocks, and the one that is being compressed.
        self._failed: set[Block] = set()  # Blocks that could not be compressed, which are not tried again.
        self._queued_bytes = 0
        self._worker: threading.Thread | None = None
        self._is_closed = False

    @property
    def backlog(self) -> int:
        """Number of blocks that are not compressed yet."""
        return len(self._pending)

    def submit(self, blocks: Iterable[Block]) -> None:
        """Queue closed blocks. Blocks that are queued, compressed or failed already are skipped."""
        with self._changed:
            if self._is_closed:
                return
            for block in blocks:
                if block in self._pending or block in self._failed or not isinstance(block.form, Raw):
                    continue
                self._pending.add(block)
                self._queue.append(block)
                self._queued_bytes += _raw_bytes(block)
            if self._queue and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="holdall compactor", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Wait until at most `max_queued_bytes` are queued."""
        self._wait(lambda: self._queued_bytes <= self._max_queued_bytes)

    def wait_idle(self) -> None:
        """Wait until every submitted block is compressed or failed."""
        self._wait(lambda: not self._pending)

    def forget(self, held: Iterable[Block]) -> None:
        """Release failed blocks that are not among `held`."""
        with self._changed:
            self._failed.intersection_update(held)

    def close(self) -> None:
        """Stop the worker after its current block. Queued blocks keep their form."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join(self._tuning.stop_timeout_s)
        self._pending.clear()
        self._failed.clear()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            while not (is_over() or self._is_closed):
                # With a timeout, Ctrl-C is noticed on every platform.
                self._changed.wait(self._tuning.poll_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                block = self._queue.popleft()
                is_behind = self._queued_bytes > self._max_queued_bytes // 2
            self._compress(block, is_behind=is_behind)
            with self._changed:
                self._pending.discard(block)
                self._queued_bytes -= _raw_bytes(block)
                self._changed.notify_all()
            del block  # The worker must not keep an evicted block alive while it waits.

    def _compress(self, block: Block, *, is_behind: bool) -> None:
        try:
            block.form = self._encode(block, is_behind)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            with self._changed:
                self._failed.add(block)


def _raw_bytes(block: Block) -> int:
    return block.slice_count * block.slice_bytes
