"""The settings of a memory over shards, and the checks of these settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdall.checkpoint import normalized_url
from holdall.checks import require_choice, require_number
from holdall.cluster.limiter import RateLimit
from holdall.cluster.tuning import ClusterTuning
from holdall.codec.choice import PREFERENCES
from holdall.errors import ArgumentError, ShardError
from holdall.sampling import ComposedSampler, Hindsight, Sampler, Uniform, has_likelihood

NAMESPACE = "holdall"
"""Ray namespace of all rosters. The name of a roster is that of its memory."""
PLACEMENTS = {"spread": "SPREAD", "pack": "DEFAULT"}
"""Ray's scheduling strategy of every `placement`."""

_STAY_DIVISOR = 4
"""While episodes continue, a writer fills at most a quarter of a shard. Then it cuts them and goes to another shard."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings that `holdall.ray.ReplayMemory` and its method `load` both accept, and that every process gets.

    The docstring of `holdall.ray.ReplayMemory` describes them. Raises ArgumentError for settings that are wrong or
    contradict each other.
    """

    durability: str = "memory"
    url: str | None = None  # Place of the journals, see `normalize_journal_url`. None: there are no journals.
    on_shard_loss: str = "degrade"
    prefer: str = "balanced"
    limit: RateLimit | None = None
    placement: str = "spread"
    resources: Mapping[str, float] = field(default_factory=dict)
    patience_s: float | None = None
    tuning: ClusterTuning = field(default_factory=ClusterTuning)

    def __post_init__(self) -> None:
        require_choice("durability", self.durability, ("memory", "segment"))
        require_choice("on_shard_loss", self.on_shard_loss, ("degrade", "block", "raise"))
        require_choice("prefer", self.prefer, PREFERENCES)
        require_choice("placement", self.placement, PLACEMENTS)
        if self.patience_s is not None:
            require_number("patience_s", self.patience_s, 0.1)
        if (self.url is None) == (self.durability == "segment"):
            raise ArgumentError(
                f"url ({self.url!r}) does not fit durability={self.durability!r}. Pass the place of the journals for "
                "durability='segment', and no url for 'memory'."
            )

    @property
    def learner_patience_s(self) -> float:
        """Seconds after which a learner counts a silent shard as lost."""
        return self.tuning.learner_patience_s if self.patience_s is None else self.patience_s

    @property
    def writer_patience_s(self) -> float:
        """Seconds that a writer waits for a shard."""
        return self.tuning.writer_patience_s if self.patience_s is None else self.patience_s


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """The facts about a memory that all of its processes need."""

    schema_json: dict[str, Any]  # The memory's schema, see `schema_to_json`.
    name: str  # Name of the roster. A restarted actor finds the roster by it.
    sampler: Sampler
    shard_rows: int  # Rows that a shard holds at most.
    shards: int  # Number of shards at the start.
    settings: ClusterSettings

    @property
    def stay_rows(self) -> int:
        """Rows after which a writer leaves a shard even if episodes continue.

        0: a writer chooses a shard for every segment, because the sampler does not follow episodes.
        """
        if not isinstance(self.sampler, ComposedSampler):
            return 0
        return max(1, self.shard_rows // _STAY_DIVISOR)


def normalize_journal_url(url: str | os.PathLike[str] | None) -> str | None:
    """Return the place of the journals so that it means the same in every process."""
    return None if url is None else normalized_url(url)


def require_sampler(sampler: Sampler | None) -> Sampler:
    """Return the sampler of a memory over shards, `Uniform()` for None.

    Raise ArgumentError unless holdall knows how likely the sampler draws each transition, which weights depend on.
    """
    chosen: Sampler = Uniform() if sampler is None else sampler
    if has_likelihood(chosen):
        return chosen
    if isinstance(chosen, ComposedSampler) and not has_likelihood(chosen.by):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) draws by {type(chosen.by).__name__}, which cannot be used over shards. "
            "Pass by=Uniform() or by=Prioritized()."
        )
    raise ArgumentError(
        f"sampler ({type(chosen).__name__}) cannot be used over shards, because weights depend on how a sampler "
        "draws. Use Uniform(), Prioritized(), NStep(), Sequence() or Hindsight()."
    )


def strip_sampler(sampler: Sampler) -> Sampler:
    """Return the sampler for shards, without a reward function, which may refer to an environment.

    Only learners compute rewards.
    """
    if not isinstance(sampler, Hindsight):
        return sampler
    stripped = copy.copy(sampler)
    stripped.reward_fn = _refuse_rewards
    return stripped


def _refuse_rewards(*_: Any) -> Any:
    raise ShardError("Rewards for other goals are computed by learners, not by shards. Report this.")
