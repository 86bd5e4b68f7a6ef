"""Settings and fixtures of all tests: Hypothesis profiles, order of tests, skipped GPU tests, interrupts at a line."""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import pytest

# The phase `explain` traces every line of the code under test, which takes minutes. The smallest example is enough.
_PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]

# `make test` draws the same examples in every run, so that a failure is caused by the change at hand.
hypothesis.settings.register_profile("fast", max_examples=100, deadline=None, derandomize=True, phases=_PHASES)
hypothesis.settings.register_profile("nightly", max_examples=3_000, deadline=None, print_blob=True, phases=_PHASES)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def _agent_ends_with_its_test() -> Iterator[None]:
    """Stop the agent of `holdall watch` if a test started it in this process."""
    yield
    module = sys.modules.get("holdall.tools.watch.agent")
    if module is not None:
        module.stop_agent()


@pytest.fixture(autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """Limit torch to one thread. With the small sizes of tests, its threads mostly wait for each other."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else None
    if torch is not None:
        torch.set_num_threads(1)
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.fixture
def interrupt_at_line() -> Callable[[int, Callable[[], Any]], bool]:
    """Return a function that makes a call and interrupts it at the given line of holdall.device.

    The function returns whether the call had that many lines.
    """

    def call(line: int, act: Callable[[], Any]) -> bool:
        passed = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal passed
            if event == "line" and "/holdall/device/" in frame.f_code.co_filename:
                passed += 1
                if passed == line + 1:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    return call


@pytest.fixture
def forbid_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which torch raises an error for every operation that waits for the device."""
    import torch

    @contextmanager
    def refuse_waiting() -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The first call of a process warns that the mode is a prototype.
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refuse_waiting


SERVERS = ("cluster", "weed")
"""Fixtures of servers that take seconds to start: Ray, and an S3 server."""


def _find_server(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(SERVERS) if name in getattr(item, "fixturenames", ())), len(SERVERS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # xdist gives each process consecutive tests of this list. Sorted, all tests of a server run in one process, which
    # starts the server once.
    items.sort(key=_find_server)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))


def pytest_configure() -> None:
    gc.disable()  # Importing and collecting tests makes no garbage worth searching for.


def pytest_collection_finish() -> None:
    # Thousands of tests and their libraries live until the end. Frozen objects are not searched in later collections.
    gc.freeze()
    gc.enable()


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
