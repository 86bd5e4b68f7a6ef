"""How the suite is run: Hypothesis profiles, GPU tests that say why they are skipped, and an interrupt at a line."""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import pytest

# Explaining traces every line of the code under test, for minutes; a small example tells as much.
_PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]

# The fast slice is the same in every run, so that a red check is about the change at hand.
hypothesis.settings.register_profile("fast", max_examples=100, deadline=None, derandomize=True, phases=_PHASES)
hypothesis.settings.register_profile("nightly", max_examples=3_000, deadline=None, print_blob=True, phases=_PHASES)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def _agent_ends_with_its_test() -> Iterator[None]:
    """An agent that a test had started in this process is not there in the next."""
    yield
    module = sys.modules.get("holdall.tools.watch.agent")
    if module is not None:
        module.stop_agent()


@pytest.fixture(autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """At the sizes of tests, torch's threads wait for each other longer than they work, most of all in `pytest -n`."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else None
    if torch is not None:
        torch.set_num_threads(1)
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.fixture
def interrupted() -> Callable[[int, Callable[[], Any]], bool]:
    """Return a function that makes a call, interrupts it at one line of holdall.device, and says whether it did."""

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
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which torch refuses everything that waits for the device."""
    import torch

    @contextmanager
    def refused() -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first call of a process says that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refused


SERVERS = ("cluster", "weed")
"""Fixtures of a session that take seconds to start: Ray, an S3 server."""


def _server_of(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(SERVERS) if name in getattr(item, "fixturenames", ())), len(SERVERS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # xdist gives every process a run of the list, and others take from its end. So one process has all tests of a
    # server, and it is started once.
    items.sort(key=_server_of)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _has_cuda():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))


def pytest_configure() -> None:
    gc.disable()  # nothing that is imported or collected becomes garbage


def pytest_collection_finish() -> None:
    # Thousands of tests and all their libraries are there for good. Frozen, they are not looked through each time that
    # Python, or a test, looks for garbage.
    gc.freeze()
    gc.enable()


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
