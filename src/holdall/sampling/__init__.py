"""Which transitions come next: the contract of a sampler, and the samplers."""

from __future__ import annotations

from holdall.sampling.draw import Held, PrioritySampler, Sampler, SmallFields, Stateless, Uniform
from holdall.sampling.episodic import (
    Hindsight,
    NStep,
    RolloutSequences,
    Sequence,
    drawn_from,
    priorities_of,
    resume,
    reward_function_of,
    sampler_to_resume,
)
from holdall.sampling.prioritized import Prioritized

__all__ = [
    "Held",
    "Hindsight",
    "NStep",
    "Prioritized",
    "PrioritySampler",
    "RolloutSequences",
    "Sampler",
    "Sequence",
    "SmallFields",
    "Stateless",
    "Uniform",
    "drawn_from",
    "priorities_of",
    "resume",
    "reward_function_of",
    "sampler_to_resume",
]
