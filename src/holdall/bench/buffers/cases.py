"""What buffers are compared on: recorded traces, or live environments, which are recorded first.

In:  names, files, environments.  Out: traces in a folder, so that every library is given the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdall.bench.child import messages, module
from holdall.bench.machine import version_of
from holdall.bench.trace import Trace
from holdall.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Case:
    """One source of experience."""

    name: str
    env: str = ""
    wrapper: str = ""
    stack: int = 1
    needs: str = ""  # a distribution
    file: Path | None = None

    @property
    def missing(self) -> str | None:
        """Say why it cannot be played; None: it can."""
        return f"{self.needs} is not installed" if self.needs and version_of(self.needs) is None else None


CASES = {
    "atari": Case("atari", "ale_py:SeaquestNoFrameskip-v4", "atari", stack=4, needs="ale-py"),
    "camera": Case("camera", "holdall.demo.camera:CameraRover"),
    "vector": Case("vector", "Pendulum-v1"),
}
"""Seaquest's screens in stacks of four, as Stable-Baselines3 prepares them; the demo's rover; a few floats."""


def case_named(name: str) -> Case:
    """Return one of the cases that are shipped."""
    if name not in CASES:
        raise ArgumentError(f"case ({name!r}) must be one of {', '.join(CASES)}; or name a --trace or an --env")
    return CASES[name]


def recorded(case: Case, transitions: int | None, folder: Path, tell: Callable[[float], None]) -> tuple[Path, int]:
    """Return the case as a trace, and how many transitions of it are to be held."""
    if case.file is not None:
        return case.file, transitions or len(Trace.load(case.file))
    count = transitions or 20_000
    file = folder / f"{case.name}.npz"
    options = ("--env", case.env, "--wrapper", case.wrapper, "--stack", case.stack)
    for message in messages(module("bench.record", *options, "--transitions", count, "--out", file)):
        tell(message["done"] / message["total"])
    return file, count
