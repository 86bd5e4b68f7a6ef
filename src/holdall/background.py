"""Threads of holdall's own: forks, interrupts, jobs in the background, and the end of all of them.

In:  locks, threads and jobs.  Out: the same, as a fork's child, the next call and the end of Python need them.
Invariant: nothing waits for ever once a memory is closed or the program ends. A thread that cannot be started changes
nothing: the job that needed it is not taken.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from typing import Any, Protocol, TypeVar

from holdall.errors import CheckpointError

_LOG = logging.getLogger("holdall")


def left(lock: Any) -> Any:
    """Return a reentrant lock, for `with`, after this thread left it: it may still be in it if it was interrupted.

    For locks that nobody takes twice.
    """
    while lock._is_owned():
        lock.release()
    return lock


class OwnCall(threading.local):
    """Says whether a thread is still in a call that it made of something, or was interrupted in it.

    It is in two at once if a signal handler, or a finalizer that the collector runs, makes the second one.
    """

    def __init__(self) -> None:
        self._last: Callable[[], object] = lambda: None

    def begin(self) -> object:
        """Return what must live for as long as the call that begins."""
        call = {self}
        self._last = weakref.ref(call)
        return call

    @property
    def is_under_way(self) -> bool:
        """Whether the call that this thread began last has not ended."""
        return self._last() is not None


# ---------------------------------------------------------------- forks

_FORK_PATIENCE_S = 5.0
"""How long a fork waits for locks. They are held for milliseconds, unless it is the forking thread that holds one."""

_Lock = TypeVar("_Lock")


class Forked(Protocol):
    """What has to know that it is in a child now."""

    def after_fork(self) -> None:
        """Leave to the parent what is the parent's; called in the child, by its only thread."""


_LOCKS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_FORKED: weakref.WeakSet[Any] = weakref.WeakSet()


class _Fork(threading.local):
    """The fork that a thread is about to make."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.made = 0  # its number among the forks of this process
        self.number = 0  # of the fork that made this process


_FORK = _Fork()
_FORKS = itertools.count(1)


def fork_safe(lock: _Lock) -> _Lock:
    """Have a lock taken before a fork and let go of after it, so that no child finds it held by a thread it lacks.

    Locks are taken in the order of these calls: one that is taken under another comes later.
    """
    _LOCKS[next(_NUMBERS)] = lock
    return lock


def tell_of_forks(thing: Forked) -> None:
    """Have `after_fork` called in every child, for as long as the thing lives."""
    _FORKED.add(thing)


def fork_number() -> int:
    """Return which of its parent's forks made this process; 0 if none did."""
    return _FORK.number


def _before_fork() -> None:
    deadline = time.monotonic() + _FORK_PATIENCE_S
    for lock in [_LOCKS[number] for number in sorted(_LOCKS) if number in _LOCKS]:
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _FORK.held.append(lock)
    _FORK.made = next(_FORKS)


def _after_fork_in_parent() -> None:
    while _FORK.held:
        _FORK.held.pop().release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    _FORK.number = _FORK.made
    for thing in list(_FORKED):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------- the end of a program

_END_S = 30.0
"""How long the end of a program waits for a thread: a disk may hang."""
_ENDED: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_before_python(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Have a daemon thread stopped and waited for when the program ends.

    Python would end it in the middle of a call, which C++ inside NumPy answers by aborting the process.
    """
    _ENDED[thread] = stop


@atexit.register
def _end_threads() -> None:
    alive = [(thread, stop) for thread, stop in tuple(_ENDED.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(_END_S)


# ---------------------------------------------------------------- jobs

CLOSE_S = 30.0
"""How long `close`, and the end of the program, wait for a job that does not get on."""
LOAD_S = 30.0
"""How long `load`, and commands that read, wait for an object store that does not answer."""
SAY_AFTER_S = 10.0
_GIVE_UP_SHARE = 0.9
"""Of the time that `close` has: after it the job is given up, and has the rest to end."""
_LOOK_S = 0.05
_IDLE_S = 60.0
"""A thread stays this long without a job: to start one takes milliseconds on a busy machine."""
_YIELD_S = 0.001
"""A thread that was woken takes Python's lock, and would make the one that woke it wait for a whole turn."""
_EXIT_PRIORITY = 100


class Waiting:
    """What a job waits for, and since when; who does not want to wait any longer gives it up.

    Args:
        url: What the job reads or writes.
        limit_s: Seconds without an answer after which the job is given up; infinite: never.
    """

    def __init__(self, url: str, limit_s: float = math.inf) -> None:
        self.url, self.limit_s = url, limit_s
        self.reason = ""  # why there is no answer yet
        self._given_up = threading.Event()
        self._moved_at = time.monotonic()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants to wait any longer."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End all waiting, and what is about to wait."""
        self._given_up.set()

    def begin(self) -> None:
        """Begin a job that nobody has given up."""
        self._given_up.clear()
        self.got_on()

    def got_on(self) -> None:
        """Note that the job got on."""
        self.reason = ""
        self._moved_at = time.monotonic()

    def pause(self, seconds: float) -> bool:
        """Wait before the next try; return whether the job was given up meanwhile."""
        return self._given_up.wait(max(0.0, min(seconds, self._moved_at + self.limit_s - time.monotonic())))

    def stuck_since(self, began: float) -> float:
        """Return when the job last got on, or `began` if that is later."""
        return max(began, self._moved_at)

    def require(self) -> None:
        """Raise if the job was given up, or is stuck for longer than it may be."""
        if time.monotonic() - self._moved_at > self.limit_s:
            raise CheckpointError(
                errno.ETIMEDOUT,
                f"{self.url} was given up after {self.limit_s:g} s: {self.reason or 'it does not get on'}; check the "
                "url and the endpoint, or give it a longer timeout",
            )
        if self.is_given_up:
            what = f"did not answer before the save was cancelled ({self.reason})" if self.reason else "was cancelled"
            raise CheckpointError(f"{self.url} {what}, or the memory closed")


class Reminder:
    """Says in the log, once, what is waited for, if that takes long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_said = False

    def look(self, what: Callable[[], str]) -> None:
        """Say it if it is time."""
        if not self._is_said and time.monotonic() - self._began >= SAY_AFTER_S:
            self._is_said = True
            _LOG.warning("still waiting after %.0f s: %s", SAY_AFTER_S, what())


class JobThread:
    """Does jobs one after another in a thread, which is started when it is first needed.

    Args:
        work: Does a job; it raises nothing.
    """

    def __init__(self, name: str, waiting: Waiting, work: Callable[[Any], None]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # all that follows is read and changed under it
        self.waiting = waiting
        self.jobs: deque[Any] = deque()
        self.at_work: Any = None  # the job that is being done
        self.has_given_up = False  # at the end: what is left of the jobs fails
        self._is_ending = False
        self._name = name
        self._work = work
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way, or waits for its turn."""
        return self._process == os.getpid() and (self.at_work is not None or bool(self.jobs))

    def put(self, job: Any) -> None:
        """Have a job done after those before it, unless no thread can be started; called under `changed`."""
        if self._process != os.getpid():  # the child of a fork has what was queued, and nobody who does it
            self._thread, self.at_work, self._process = None, None, os.getpid()
            self.jobs.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # RuntimeError if there are too many: it is not alive then
            _watch_exit(self)
        self.jobs.append(job)
        self.changed.notify_all()

    def end(self, timeout: float, began: float) -> None:
        """Wait until all is done; what does not get on for `timeout` seconds is given up, which is an error.

        Args:
            began: When the waiting began.
        """
        with left(self.lock):
            self._is_ending = True
            self.changed.notify_all()
        reminder, reason = Reminder(), ""
        while self.is_busy:
            waited = time.monotonic() - self.waiting.stuck_since(began)
            if waited >= _GIVE_UP_SHARE * timeout and not reason:
                reason = self.waiting.reason or "it does not get on"
                self.has_given_up = True
                self.waiting.give_up()
            if waited >= timeout:
                break
            reminder.look(lambda: f"{self.waiting.url} is being saved ({self.waiting.reason or 'it gets on'})")
            with left(self.lock):
                self.changed.wait_for(lambda: not self.is_busy, _LOOK_S)
        if reason:
            raise CheckpointError(
                f"{self.waiting.url} was not saved: {reason}, and close() waits {timeout:g} s at most; check the url "
                "and the endpoint. Earlier checkpoints are intact"
            )

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._is_ending or self.jobs, _IDLE_S)
                if not self.jobs:
                    self._thread = None  # under the lock: who puts a job now starts another
                    return
            time.sleep(_YIELD_S)
            with self.changed:
                if not self.jobs:
                    continue  # what there was has been cancelled
                self.at_work = self.jobs.popleft()
                if not self.has_given_up:
                    self.waiting.begin()
            try:
                self._work(self.at_work)
            finally:
                with self.changed:
                    self.at_work = None
                    self.changed.notify_all()


_watched: weakref.WeakSet[JobThread] = weakref.WeakSet()
_watching = 0  # the process that waits for them at its end


def _watch_exit(thread: JobThread) -> None:
    """Have the end of the program wait for a thread, also in a child of multiprocessing, which knows no atexit."""
    global _watching  # noqa: PLW0603  one entry a process
    _watched.add(thread)
    if _watching != os.getpid():
        _watching = os.getpid()
        util.Finalize(None, _at_exit, exitpriority=_EXIT_PRIORITY)


def _at_exit() -> None:
    began = time.monotonic()
    for thread in 2 * list(_watched):  # twice: a save that ends may have given a mirror something to do
        try:
            thread.end(CLOSE_S, began)
        except CheckpointError as error:
            _LOG.error("the program ends: %s", error)
