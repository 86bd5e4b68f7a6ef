"""A recorded trace, played over and over. `holdall.tools.bench.trace` describes the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdall.tools.bench.trace import Trace
from shared.streams import Step, Stream


def stream(file: Path) -> Stream:
    """Play `file` endlessly."""
    trace = Trace.load(file)
    return Stream(trace.observation_space, trace.action_space, 1, _steps(trace))


def _steps(trace: Trace) -> Iterator[Step]:
    for step in trace.repeat_steps():
        yield Step(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)
