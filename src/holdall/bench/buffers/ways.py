"""The ways to keep experience that are compared: which library, set up how.

In:  what is installed.  Out: those that can be measured here; the others with the reason.
Invariant: a library that is not installed is said to be, and never left out in silence.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymnasium import spaces

from holdall.bench.machine import version_of
from holdall.bench.trace import Step
from holdall.errors import ArgumentError


class Buffer(ABC):
    """One buffer of one lane, of whichever library."""

    @abstractmethod
    def arranged(self, step: Step) -> Any:
        """Bring a step into the form that `add` takes; not timed."""

    @abstractmethod
    def add(self, arranged: Any) -> None:
        """Add one transition."""

    @abstractmethod
    def sample(self, batch_size: int) -> Any:
        """Draw a batch, as torch tensors."""

    @abstractmethod
    def rows(self, ids: Any) -> dict[str, Any]:
        """Return obs, action, reward, next_obs, terminated, truncated of transitions, counted from the first.

        A buffer that does not tell the two ends apart returns `done` in place of both.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the content into an empty folder."""

    @abstractmethod
    def load(self, folder: Path) -> Buffer:
        """Return a buffer with what was saved there."""

    def settle(self) -> None:  # noqa: B027 most have no background to wait for
        """Wait for whatever goes on in the background."""

    def close(self) -> None:
        """Let go of the content; what `load` needs stays."""
        vars(self).pop("buffer", None)


@dataclass(frozen=True, slots=True)
class Way:
    """One library, set up in one way."""

    name: str
    distribution: str
    module: str  # of this package
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_box_only: bool = False
    needs: str = ""  # a further distribution

    @property
    def version(self) -> str | None:
        """The installed version."""
        return version_of(self.distribution)

    def missing(self, space: spaces.Space[Any] | None = None) -> str | None:
        """Say why it cannot be measured; None: it can."""
        for distribution in (self.distribution, self.needs):
            if distribution and version_of(distribution) is None:
                return f"{distribution} is not installed"
        if self.is_box_only and isinstance(space, spaces.Dict):
            return "it takes no Dict observations"
        return None

    def open(self, observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> Buffer:
        """Make the buffer."""
        module = importlib.import_module(f"holdall.bench.buffers.{self.module}")
        opened: Buffer = module.opened(observation, action, capacity, **self.settings)
        return opened


_SB3, _EXTRA, _CPPRB = "stable-baselines3", "sb3-extra-buffers", "cpprb"

WAYS = {
    way.name: way
    for way in (
        Way("sb3", _SB3, "sb3_own"),
        Way("sb3 optimize_memory_usage", _SB3, "sb3_own", {"optimize_memory_usage": True}, is_box_only=True),
        Way("sb3-extra-buffers zstd", _EXTRA, "sb3_extra", {"method": "zstd-3"}, needs="zstd"),
        Way("sb3-extra-buffers lz4", _EXTRA, "sb3_extra", {"method": "lz4-frame/1"}, needs="lz4"),
        Way("cpprb next_of", _CPPRB, "cpprb_own"),
        Way("torchrl", "torchrl", "torchrl_own"),
        Way("tianshou", "tianshou", "tianshou_own", needs="h5py"),
        Way("tianshou ignore_obs_next", "tianshou", "tianshou_own", {"ignore_obs_next": True}, needs="h5py"),
        Way("holdall", "holdall", "holdall_own"),
        Way("holdall compressed", "holdall", "holdall_own", {"budget": None}),
    )
}
LIBRARIES = ("sb3", "sb3-extra-buffers", "cpprb", "torchrl", "tianshou", "holdall")
"""What a name on the command line may stand for: all ways of a library."""


def ways_of(names: list[str]) -> list[Way]:
    """Return the ways that are meant by names of libraries or of single ways."""
    found: dict[str, Way] = {}
    for name in names:
        meant = [way for way in WAYS.values() if name in {"all", way.name} or way.name.startswith(f"{name} ")]
        if not meant:
            raise ArgumentError(f"libraries ({name!r}) must be among all, {', '.join(LIBRARIES)}, or {', '.join(WAYS)}")
        found |= {way.name: way for way in meant}
    return list(found.values())
