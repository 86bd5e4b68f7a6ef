"""Rules about calls that do no harm once, but cost time in every step of a training."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Source

_MIN_RARE_PERIOD = 10_000
"""Smallest period of a condition such as `step % 50_000 == 0` that makes a call in a loop rare."""
_TIMERS = ("time.perf_counter", "time.time", "time.monotonic", "torch.cuda.Event")


class EmptyCacheInLoop(Rule):
    """Finds `torch.cuda.empty_cache()` in a loop, or in a function that a loop calls.

    Why: The call returns the allocator's free blocks to the driver, and the next step requests them again. That is
    slower and gives this process no more memory. The call waits for the GPU, and it never frees memory of the host.
    Fix: Delete the call. If the GPU is short of memory, use a smaller batch.

    Bad:
        import torch
        for step in range(1000):
            train()
            torch.cuda.empty_cache()

    Good:
        import torch
        for step in range(1000):
            train()
        torch.cuda.empty_cache()
    """

    code = "P02"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for repeated calls."""
        yield from _find_repeated(source, "torch.cuda.empty_cache")


class CollectInLoop(Rule):
    """Finds `gc.collect()` in a loop, or in a function that a loop calls.

    Why: Tensors and arrays are freed with their last reference, without the collector. The collector only finds
    reference cycles, and it visits every object of the process to do so.
    Fix: Delete the call. Where memory grows, look for the reference that keeps objects alive.

    Bad:
        import gc
        for step in range(1000):
            train()
            gc.collect()

    Good:
        import gc
        for step in range(1000):
            train()
        gc.collect()
    """

    code = "P06"
    severity = Severity.INFO

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for repeated calls."""
        yield from _find_repeated(source, "gc.collect")


class SynchronizeInLoop(Rule):
    """Finds `torch.cuda.synchronize()` in a loop, or in a function that a loop calls.

    Why: The host waits until the GPU has finished all its work, and the GPU then waits for the host. No memory is
    freed.
    Fix: Delete the call, except around a measurement of time.

    Bad:
        import torch
        for step in range(1000):
            train()
            torch.cuda.synchronize()

    Good:
        import torch
        for step in range(1000):
            train()
        torch.cuda.synchronize()
    """

    code = "P09"
    severity = Severity.INFO

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for repeated calls in files that measure no time."""
        if not any(source.find_calls(*_TIMERS)):
            yield from _find_repeated(source, "torch.cuda.synchronize")


def _find_repeated(source: Source, name: str) -> Iterator[Match]:
    """Yield the calls of the function `name` that are repeated often."""
    for call in source.find_calls(name):
        where = source.describe_repetition(call)
        if where and not _is_rare(source, call):
            yield Match(f"{name}() {where}", source.get_place(call))


def _is_rare(source: Source, node: ast.AST) -> bool:
    """Return whether a condition such as `step % 50_000 == 0` makes the node run rarely."""
    tests = [parent.test for parent in source.ancestors(node) if isinstance(parent, ast.If)]
    parts = [part for test in tests for part in ast.walk(test) if isinstance(part, ast.BinOp)]
    periods = [source.evaluate_whole_number(part.right) for part in parts if isinstance(part.op, ast.Mod)]
    return any(period is not None and period >= _MIN_RARE_PERIOD for period in periods)
