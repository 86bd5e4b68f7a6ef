"""Processes that measure: their lines, their noise, and their end."""

import sys
import time

import psutil
import pytest

from holdall.tools.bench import ChildError, run_child

EMITS = "import os; from holdall.tools.bench import emit; emit({'pid': os.getpid()}); "


def test_whatever_libraries_print_is_not_among_the_lines() -> None:
    program = EMITS + "print('{hello'); os.system('echo from another process'); emit({'done': 2})"
    found = list(run_child([sys.executable, "-c", program]))
    assert found[0].keys() == {"pid"}
    assert found[1:] == [{"done": 2}]


def test_a_child_does_not_outlive_whoever_reads_it() -> None:
    lines = run_child([sys.executable, "-c", EMITS + "import time; time.sleep(600)"])
    pid = next(iter(lines))["pid"]
    assert psutil.pid_exists(pid)
    lines.close()
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)


def test_a_child_that_was_killed_says_by_which_signal() -> None:
    program = EMITS + "os.kill(os.getpid(), 9)"
    with pytest.raises(ChildError, match="killed by signal 9"):
        list(run_child([sys.executable, "-c", program]))
