"""Processes that measure: their messages, their other output, and their end."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from holdall.errors import HoldallError
from holdall.tools.bench import SaveFigures
from holdall.tools.bench.child import ChildError, ChildProgress, read_result, run_child
from holdall.tools.bench.measure_buffer import RoundFigures, RowComparison
from holdall.tools.bench.task import TrainingFigures

TRAINING = TrainingFigures(1, 2, 0.5, 10.0, None, 3.5, [1.0], SaveFigures(0.1, 5, None), {"train": 7}, 9.0)
ROUND = RoundFigures(0.1, 2, 0.3, 0.4, None, 6, 0.7, RowComparison(8, 1, ["reward"], []), None)
EMITS_PID = """
import os
from holdall.tools.bench.child import ChildProgress, emit
emit(ChildProgress(os.getpid(), 0))
"""


def make_command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize("message", [ChildProgress(1, 4, "fill", 10), ChildProgress(1, 4), TRAINING, ROUND], ids=str)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    program = f"""
from holdall.tools.bench import SaveFigures
from holdall.tools.bench.child import ChildProgress, emit
from holdall.tools.bench.measure_buffer import RoundFigures, RowComparison
from holdall.tools.bench.task import TrainingFigures
emit({message!r})
"""
    assert list(run_child(make_command(program), TrainingFigures, RoundFigures)) == [message]


def test_other_output_is_not_among_the_messages() -> None:
    program = EMITS_PID + "print('{hello'); os.system('echo from another process'); emit(ChildProgress(2, 4))"
    assert list(run_child(make_command(program)))[1:] == [ChildProgress(2, 4)]


def test_a_child_does_not_outlive_its_reader() -> None:
    messages = run_child(make_command(EMITS_PID + "import time; time.sleep(600)"))
    pid = next(iter(messages)).done
    assert psutil.pid_exists(pid)
    messages.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(not hasattr(os, "kill"), reason="needs signals")
def test_a_killed_child_is_reported_with_its_signal() -> None:
    with pytest.raises(ChildError, match="killed by signal 9"):
        list(run_child(make_command(EMITS_PID + "os.kill(os.getpid(), 9)")))


def test_a_failed_child_is_reported_with_its_last_line() -> None:
    with pytest.raises(HoldallError, match=r"exit code 1 \(out of luck\)"):
        list(run_child(make_command("raise SystemExit('out of luck')")))


def test_the_result_is_the_last_message_that_is_no_progress() -> None:
    shares: list[float] = []
    messages = [ChildProgress(0, 4), ChildProgress(2, 4), ROUND]
    assert read_result(messages, lambda progress: shares.append(progress.share)) == ROUND
    assert shares == [0.0, 0.5]


def test_a_child_without_a_result_is_an_error() -> None:
    with pytest.raises(ChildError, match="without a result"):
        read_result([ChildProgress(0, 4)])
