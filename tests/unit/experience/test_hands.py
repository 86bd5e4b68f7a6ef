"""Hands come when they are needed, and are gone when they are not."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdall.native import kernels as native
from holdall.threads import CopyThreads

pytestmark = pytest.mark.skipif(native.native_kernels() is None, reason="hands wait in the compiled loops")


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> CopyThreads:
    monkeypatch.setenv("HOLDALL_THREADS", "3")
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return CopyThreads(ctypes.CDLL(str(Path(native.__file__).with_name("_kernels" + suffix))), most=8)


def waiting() -> int:
    return sum(thread.name.startswith("holdall-hand") for thread in threading.enumerate())


def test_threads_start_when_they_are_needed_and_end_when_dismissed(hands: CopyThreads) -> None:
    """The caller is one of the hands, so there is one thread less; they may be called again."""
    assert (hands.helpers, waiting()) == (2, 0)
    for _ in range(3):
        with hands.at_work() as address:
            assert address
            assert waiting() == 2
        hands.dismiss()
        hands.dismiss()
        assert waiting() == 0


def test_threads_end_when_nobody_refers_to_the_hands(hands: CopyThreads) -> None:
    """A memory that was never closed leaves no threads behind."""
    own = CopyThreads(hands._library, most=2)
    with own.at_work():
        assert waiting() == 1
    del own
    gc.collect()
    assert waiting() == 0


def test_one_hand_has_no_threads(hands: CopyThreads) -> None:
    """Where there is one core, or one is asked for, the caller does it all."""
    with CopyThreads(hands._library, most=1).at_work() as address:
        assert (address, waiting()) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # forking beside threads is the very thing tested
def test_a_forked_child_has_hands_of_its_own(hands: CopyThreads) -> None:
    """Threads do not survive a fork; a child starts its own, and ends them."""
    with hands.at_work():
        pass
    child = os.fork()
    if child == 0:
        with hands.at_work():
            found = waiting()
        hands.dismiss()
        os._exit(0 if (found, waiting()) == (2, 0) else 1)
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    hands.dismiss()


def test_a_process_ends_with_hands_waiting(hands: CopyThreads) -> None:
    """Nobody has to dismiss them."""
    code = (
        "import ctypes, sys; from holdall.threads import CopyThreads\n"
        "hands = CopyThreads(ctypes.CDLL(sys.argv[1]), most=3)\n"
        "with hands.at_work(): print('at work')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, hands._library._name], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "at work\n"
