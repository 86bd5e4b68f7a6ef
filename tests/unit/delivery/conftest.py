"""What tests of memories on a device share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def interrupted() -> Callable[[int, Callable[[], Any]], bool]:
    """Return a function that makes a call, interrupts it at one line of the loops in torch, and says whether it did."""

    def call(line: int, act: Callable[[], Any]) -> bool:
        passed = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal passed
            if event == "line" and frame.f_code.co_filename.endswith("torch_loops.py"):
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
