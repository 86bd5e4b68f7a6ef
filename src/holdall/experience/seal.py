"""Sealing: full blocks are compressed by one worker outside the training thread.

In:  blocks that take no more slices.  Out: the same slices, sealed; readers change over when they
next look a place up.
Invariant: a block stays raw until its sealed form is complete; whatever goes wrong, it stays raw.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as attribute

from holdall.experience.arena import Bytes
from holdall.experience.choice import choose
from holdall.experience.codec import Codec, Method
from holdall.experience.portable_codec import Coder
from holdall.experience.sealed import SealedSlices
from holdall.experience.slices import SliceBlock
from holdall.experience.window import Window
from holdall.schema import Leaf

_WAIT_FROM = 1
"""Blocks waiting from which on `add` waits, so that memory stays bounded: beside these there are the
one being sealed and the open one."""
_DRIFT = 0.85
"""A block that shrinks this much worse than the one the codec was chosen on asks for a new choice."""
_REST = 8
"""Blocks of a field between two choices, so that data that defies compression costs little."""

_LOG = logging.getLogger("holdall")

Keep = Callable[[SliceBlock, SealedSlices], None]


@dataclass(frozen=True, slots=True)
class FrozenBlock:
    """A block to seal, and what it holds."""

    field: int
    leaf: Leaf
    window: Window
    block: SliceBlock


@dataclass(slots=True)
class _Habit:
    """What was chosen for a field's slices, and how well it did then."""

    codec: Codec
    ratio: float
    age: int = 0  # blocks since


@dataclass(slots=True)
class _Queue:
    """What the worker and the memory share."""

    blocks: deque[FrozenBlock] = attribute(default_factory=deque)
    changed: threading.Condition = attribute(default_factory=threading.Condition)
    at_work: int = 0
    stopped: bool = False
    failure: str = ""


class Sealer:
    """Seals blocks in the order in which they come, one at a time.

    Args:
        cap: How dear sampling may become, over a raw gather.
        hands: Threads that share out the decoding of a batch.
        keep: Takes a block and its sealed form; a bound method, held weakly, so that a memory
            which is simply dropped ends its worker too.
    """

    def __init__(self, coder: Coder, cap: float, hands: int, keep: Keep) -> None:
        self._queue = _Queue()
        self._work = _Work(coder, cap, hands)
        self._keep = weakref.WeakMethod(keep)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _stop, self._queue)

    def submit(self, frozen: FrozenBlock) -> None:
        """Put a block in the queue; the worker is started with the first one."""
        with self._queue.changed:
            self._queue.blocks.append(frozen)
            self._queue.changed.notify_all()
        # A fork leaves its child with a thread that does not run.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_run, args=(self._queue, self._work, self._keep), name="holdall-sealer", daemon=True
            )
            self._thread.start()

    @property
    def backlog(self) -> int:
        """Blocks that wait or are being sealed."""
        return len(self._queue.blocks) + self._queue.at_work

    @property
    def failure(self) -> str:
        """What went wrong last, if anything."""
        return self._queue.failure

    @property
    def is_crowded(self) -> bool:
        """Whether so many blocks are queued that no more should come."""
        return len(self._queue.blocks) >= _WAIT_FROM

    def wait_for_room(self) -> None:
        """Wait while too many blocks are queued; not to be called under the memory's lock."""
        if not self.is_crowded:
            return
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: len(self._queue.blocks) < _WAIT_FROM or self._queue.stopped)

    def drain(self) -> None:
        """Wait until everything submitted is sealed."""
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: self.backlog == 0 or self._queue.stopped)

    def stop(self) -> None:
        """End the worker after the block that it is at."""
        _stop(self._queue)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None


class _Work:
    """Chooses codecs and seals; used by the worker alone."""

    def __init__(self, coder: Coder, cap: float, hands: int) -> None:
        self._coder = coder
        self._cap = cap
        self._hands = hands
        self._habits: dict[tuple[int, Window], _Habit] = {}

    def seal(self, frozen: FrozenBlock, hurry: bool) -> SealedSlices | None:
        """Seal one block; None if nothing pays."""
        block = frozen.block
        slices = block.arena[: block.used * block.slice_bytes].reshape(block.used, block.slice_bytes)
        key = (frozen.field, frozen.window)
        habit = self._habits.get(key)
        if habit is None:
            habit = self._habits[key] = _Habit(self._choose(frozen, slices), 0.0)
        habit.age += 1
        if habit.codec.method is Method.STORED:
            if habit.age > _REST:
                del self._habits[key]
            return None
        sealed = self._coder.seal(slices, habit.codec.hurried() if hurry else habit.codec)
        ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        habit.ratio = habit.ratio or ratio
        if ratio < _DRIFT * habit.ratio and habit.age > _REST and not hurry:
            codec = self._choose(frozen, slices)
            self._habits[key] = habit = _Habit(codec, 0.0)
            sealed = None if codec.method is Method.STORED else self._coder.seal(slices, codec)
            habit.ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        return sealed if sealed is not None and sealed.nbytes < slices.nbytes else None

    def _choose(self, frozen: FrozenBlock, slices: Bytes) -> Codec:
        return choose(self._coder, frozen.leaf, frozen.window, slices, self._cap, self._hands)


def _run(queue: _Queue, work: _Work, keep: weakref.WeakMethod[Keep]) -> None:
    hurry = False
    while True:
        with queue.changed:
            queue.changed.wait_for(lambda: queue.blocks or queue.stopped)
            if queue.stopped:
                return
            frozen = queue.blocks.popleft()
            queue.at_work = 1
            queue.changed.notify_all()
        try:
            sealed = work.seal(frozen, hurry)
            take = keep()
            if sealed is not None and take is not None:
                take(frozen.block, sealed)
        except Exception as error:  # the block stays raw, and training goes on
            queue.failure = f"{type(error).__name__}: {error}"
            _LOG.warning("a block could not be compressed and stays raw (%s)", queue.failure, exc_info=error)
        finally:
            del frozen
            sealed = take = None
            with queue.changed:
                queue.at_work = 0
                hurry = bool(queue.blocks)  # one that is there already: the worker falls behind
                queue.changed.notify_all()


def _stop(queue: _Queue) -> None:
    with queue.changed:
        queue.stopped = True
        queue.changed.notify_all()
