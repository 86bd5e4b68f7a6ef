"""holdall's own memory, as it is by default, and with all that is sealed compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymnasium import spaces

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step
from holdall.replay import ReplayMemory


def opened(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, budget: str | int | None = "auto"
) -> HoldallBuffer:
    """Make a memory whose batches are torch tensors."""
    return HoldallBuffer(ReplayMemory(observation, action, capacity, device="cpu", seed=0, budget=budget), budget)


class HoldallBuffer(Buffer):
    """A ReplayMemory."""

    def __init__(self, memory: ReplayMemory, budget: str | int | None) -> None:
        self.memory = memory
        self._budget = budget

    def arranged(self, step: Step) -> Any:
        """Hand the arrays over as they are."""
        return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated

    def add(self, arranged: Any) -> None:
        """Add one transition."""
        self.memory.add(*arranged)

    def settle(self) -> None:
        """Wait until everything that is to be compressed is."""
        self.memory.drain()

    def close(self) -> None:
        """Free the blocks at once."""
        self.memory.close()

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        return self.memory.sample(batch_size)

    def rows(self, ids: Any) -> dict[str, Any]:
        """Gather."""
        batch = self.memory.gather(ids)
        names = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
        return {name: getattr(batch, name) for name in names}

    def save(self, folder: Path) -> None:
        """Write a checkpoint and wait for it."""
        self.memory.save(folder).result()

    def load(self, folder: Path) -> HoldallBuffer:
        """Load the checkpoint."""
        return HoldallBuffer(ReplayMemory.load(folder, device="cpu", budget=self._budget), self._budget)
