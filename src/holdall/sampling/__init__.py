"""Samplers, which decide which transitions form a batch, and what a memory does with its sampler.

Other packages import these names from here.
"""

from holdall.sampling.calls import (
    check_priorities,
    check_sampler,
    draw_from,
    draws_once,
    require_enough,
    set_priorities,
)
from holdall.sampling.composed import ComposedSampler, Likelihood
from holdall.sampling.episodes import Episodes
from holdall.sampling.generators import get_generator_state, new_generator, restore_generator
from holdall.sampling.held import Held, SmallFields
from holdall.sampling.hindsight import Hindsight
from holdall.sampling.n_step import NStep
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.registry import SAVED_SETTINGS, has_likelihood
from holdall.sampling.row_order import PLACES_PER_LANE, RowOrder, WriterRun
from holdall.sampling.sampler import PrioritySampler, Sampler, Stateless
from holdall.sampling.saving import choose_sampler, describe_sampler, resume_sampler
from holdall.sampling.sequence import Sequence
from holdall.sampling.uniform import Uniform
