"""Which transitions come next: the contract of a sampler, and the samplers."""

from holdall.sampling.draw import (
    Held,
    PrioritySampler,
    Sampler,
    SmallFields,
    Stateless,
    Uniform,
    checked_priorities,
    childs_generator,
    decode_state,
    drawn_from,
    encode_state,
    generator_of,
    generator_state,
    pack_state,
    require_enough,
    required_sampler,
    restored_generator,
    resume,
    sampler_to_resume,
    sampler_words,
    set_priorities,
    unpack_state,
)
from holdall.sampling.episodic import ComposedSampler, Hindsight, Likelihood, NStep, RolloutSequences, Sequence
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.row_order import LANE, RowOrder, WriterRun
