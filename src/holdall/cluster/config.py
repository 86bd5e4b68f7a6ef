"""MemoryConfig, the settings that all processes of a memory over shards have, and the checks of these settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from typing import Any, NamedTuple

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

LEARNER_PATIENCE_S = 10.0
"""Seconds after which a learner counts a silent shard as lost."""
WRITER_PATIENCE_S = 90.0
"""Seconds that a writer waits for a shard. By default Ray needs 70 to give up a frozen machine."""
_STAY_DIVISOR = 4
"""While episodes continue, a writer fills at most a quarter of a shard. Then it cuts them and goes to another shard."""
_CHOICES: dict[str, Collection[str]] = {
    "durability": ("memory", "segment"),
    "on_shard_loss": ("degrade", "block", "raise"),
    "prefer": PREFERENCES,
    "placement": PLACEMENTS,
}


class MemoryConfig(NamedTuple):
    """The settings that every process of a memory has. See `holdall.ray.ReplayMemory`."""

    schema_json: dict[str, Any]  # The memory's schema, see `schema_to_json`.
    name: str  # Name of the roster. A restarted actor finds the roster by it.
    sampler: Sampler
    shard_rows: int  # Rows that a shard holds at most.
    url: str | None  # Place of the journals. None: no journals, and a lost shard loses its rows.
    prefer: str
    on_shard_loss: str
    patience_s: float  # Seconds that a process waits for an answer.
    writer_patience_s: float  # Seconds that a writer waits for a shard.
    limit: RateLimit | None = None
    shards: int = 1  # Number of shards at the start.
    tuning: ClusterTuning = ClusterTuning()

    @property
    def stay_rows(self) -> int:
        """Rows after which a writer leaves a shard even if episodes continue.

        0: a writer chooses a shard for every segment, because the sampler does not follow episodes.
        """
        if not isinstance(self.sampler, ComposedSampler):
            return 0
        return max(1, self.shard_rows // _STAY_DIVISOR)


def require_settings(url: str | os.PathLike[str] | None, patience_s: float | None, **chosen: str) -> None:
    """Raise ArgumentError for settings that are wrong or contradict each other, see `holdall.ray.ReplayMemory`."""
    for argument, value in chosen.items():
        require_choice(argument, value, _CHOICES[argument])
    if patience_s is not None:
        require_number("patience_s", patience_s, 0.1)
    if (url is None) == (chosen["durability"] == "segment"):
        raise ArgumentError(
            f"url ({url!r}) does not fit durability={chosen['durability']!r}. Pass the place of the journals for "
            "durability='segment', and no url for 'memory'."
        )


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
