"""Which transitions come next: the contract of a sampler, and the samplers."""

from holdall.sampling.draw import (
    Held,
    PrioritySampler,
    Sampler,
    SmallFields,
    Stateless,
    Uniform,
    require_enough,
    required_sampler,
    resume,
    sampler_state,
    sampler_to_resume,
    set_priorities,
)
from holdall.sampling.episodic import Hindsight, NStep, RolloutSequences, Sequence, drawn_from
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
    "require_enough",
    "required_sampler",
    "resume",
    "sampler_state",
    "sampler_to_resume",
    "set_priorities",
]
