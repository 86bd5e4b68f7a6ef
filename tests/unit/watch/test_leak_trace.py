"""The lines that allocate what stays are named, and no others."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.tools.watch.agent import agent
from holdall.tools.watch.agent_files import read_agent_report
from holdall.tools.watch.reading import GrowingLine, trace_growth


class Legs:
    """An event that is never set, and that has something done while it is waited for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def wait(self, _seconds: float) -> bool:
        """Work instead of waiting, in a thread as a training's is: without the trace below it."""
        worker = threading.Thread(target=self.work)
        worker.start()
        worker.join()
        return False


def lines_of(work: Callable[[], Any]) -> tuple[GrowingLine, ...]:
    legs: Any = Legs(work)
    return trace_growth(legs)


def test_the_line_that_keeps_most_comes_first() -> None:
    kept: list[Any] = []
    arrays: list[Any] = []

    def work() -> None:
        for number in range(50):
            kept.append(bytearray(2_000))
            arrays.append(np.ones(10_000))  # the larger part
            bytearray(number)  # goes at once

    found = lines_of(work)
    assert [line.code for line in found[:2]] == [
        "arrays.append(np.ones(10_000))  # the larger part", "kept.append(bytearray(2_000))",
    ]  # fmt: skip
    assert found[0].file == __file__
    assert found[0].nbytes >= 100 * 80_000
    assert found[0].blocks >= 100
    assert not any("number)" in line.code for line in found)
    assert not tracemalloc.is_tracing()


def test_a_line_of_a_library_is_named_by_who_calls_it() -> None:
    kept: list[Any] = []

    def work() -> None:
        kept.extend(json.loads(text) for text in ['{"a": [1.5, 2.5, 3.5]}'] * 500)

    found = lines_of(work)
    assert found[0].file == __file__
    assert found[0].code.startswith("kept.extend(json.loads(text)")


def test_what_comes_and_goes_is_not_named() -> None:
    held: list[Any] = []

    def work() -> None:
        held[:] = [bytearray(100_000) for _ in range(10)]

    assert not any("held[:]" in line.code for line in lines_of(work))


def test_a_memory_that_fills_is_not_named() -> None:
    no = np.zeros(1, np.bool_)
    with ReplayMemory(spaces.Box(0, 255, (64, 64), np.uint8), spaces.Discrete(2), 10_000, budget="1GiB") as memory:
        draw = np.random.default_rng(0)

        def work() -> None:
            for _ in range(60):
                now, after = draw.integers(0, 256, (2, 1, 64, 64), np.uint8)
                memory.add(now, np.zeros(1, np.int64), np.zeros(1), after, no, no)

        assert not any("memory.add" in line.code for line in lines_of(work))


def test_a_trace_of_the_users_own_goes_on() -> None:
    tracemalloc.start(3)
    try:
        lines_of(lambda: None)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_an_agent_reports_what_python_objects_take_while_allocations_are_traced() -> None:
    own = agent()
    own.publish()
    before = read_agent_report(os.getpid())
    tracemalloc.start()
    try:
        own.publish()
        during = read_agent_report(os.getpid())
    finally:
        tracemalloc.stop()
    assert before is not None
    assert during is not None
    assert during.time > before.time
    assert before.python == during.python is not None
