"""Settings of a memory over shards that are no part of what it holds, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdall.errors import ArgumentError
from holdall.experience.sealing.choice import COST_CAPS
from holdall.ray.cluster import POLICIES
from holdall.ray.limiter import RateLimit
from holdall.sampling.draw import Sampler, require_number
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.uniform import Uniform

DURABILITIES = ("memory", "segment")
PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}


@dataclass(frozen=True, slots=True)
class Settings:
    """See `holdall.ray.ReplayMemory`."""

    durability: str
    url: str | os.PathLike[str] | None
    on_shard_loss: str
    prefer: str
    device: str | None
    patience_s: float
    limit: RateLimit | None = None
    placement: str = "spread"
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        known = {
            "durability": DURABILITIES,
            "on_shard_loss": POLICIES,
            "prefer": tuple(COST_CAPS),
            "placement": tuple(PLACEMENTS),
        }
        for argument, values in known.items():
            value = getattr(self, argument)
            if value not in values:
                raise ArgumentError(f"{argument} ({value!r}) must be one of {', '.join(values)}; pass one of these")
        require_number("patience_s", self.patience_s, 0.1)
        if (self.url is None) == (self.durability == "segment"):
            raise ArgumentError(
                f"url ({self.url!r}) does not go with durability={self.durability!r}; name where journals are kept for "
                "durability='segment', and nothing for 'memory'"
            )

    @property
    def options(self) -> dict[str, Any]:
        """What Ray is told of a shard's place."""
        named = dict(self.resources or {})
        own: dict[str, Any] = {name: named.pop(name) for name in ("memory", "num_cpus") if name in named}
        return {"scheduling_strategy": PLACEMENTS[self.placement], "num_cpus": 0, "resources": named, **own}


def single(sampler: Sampler | None) -> Sampler:
    """Return the sampler of a memory over shards: one that draws single transitions."""
    chosen: Sampler = Uniform() if sampler is None else sampler
    if type(chosen) not in (Uniform, Prioritized):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) draws more than single transitions, and an episode may lie on several "
            "shards; use Uniform() or Prioritized(), and make n-step returns where steps are added"
        )
    return chosen
