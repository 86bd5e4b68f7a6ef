"""Which transitions come next: the contract of a sampler, and the samplers."""

from holdall.sampling.draw import (
    LANE,
    Held,
    PrioritySampler,
    Sampler,
    SmallFields,
    Stateless,
    StepOrder,
    Uniform,
    require_enough,
    required_sampler,
    resume,
    set_priorities,
)
from holdall.sampling.episodic import (
    ComposedSampler,
    Hindsight,
    NStep,
    RolloutSequences,
    Sequence,
    drawn_from,
    sampler_to_resume,
    sampler_words,
)
from holdall.sampling.prioritized import Prioritized
