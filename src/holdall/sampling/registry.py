"""The table of the samplers that holdall ships.

A new sampler needs one line in it. docs/extending.md has the other steps.
"""

from __future__ import annotations

from typing import Any

from holdall.sampling.hindsight import Hindsight
from holdall.sampling.n_step import NStep
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.sequence import Sequence
from holdall.sampling.uniform import Uniform

SAVED_SETTINGS: dict[type, tuple[str, ...] | None] = {
    Uniform: (),
    Prioritized: ("alpha", "beta", "floor"),
    NStep: ("n", "gamma"),
    Sequence: ("length", "burn_in", "stride", "crossing"),
    Hindsight: None,  # `reward_fn` is a function, and checkpoints have no functions.
}
"""The samplers of holdall, each with the settings that checkpoints save. `by` is saved for all samplers that have it.

A setting is an argument of the constructor and an attribute. None: the sampler cannot be restored from settings, so the
caller of `load` passes a sampler. Draws of samplers in this table are trusted, because their tests show that they draw
only held ids. Draws of other samplers are verified.
"""


def is_shipped(sampler: Any) -> bool:
    """Return whether a sampler, and the sampler that it draws `by`, ship with holdall. Subclasses do not count."""
    if type(sampler) not in SAVED_SETTINGS:
        return False
    by = getattr(sampler, "by", None)
    return by is None or type(by) in SAVED_SETTINGS


def has_likelihood(sampler: Any) -> bool:
    """Return whether `Likelihood` knows how likely a sampler draws each transition.

    True for `Uniform`, for `Prioritized`, and for samplers that ship with holdall and draw `by` one of them.
    """
    return is_shipped(sampler) and type(getattr(sampler, "by", sampler)) in {Uniform, Prioritized}


def has_saved_settings(sampler: Any) -> bool:
    """Return whether a checkpoint has all settings of a sampler, and of the sampler that it draws `by`."""
    if SAVED_SETTINGS.get(type(sampler)) is None:
        return False
    by = getattr(sampler, "by", None)
    return by is None or SAVED_SETTINGS.get(type(by)) is not None


def find_sampler_class(name: str) -> type | None:
    """Return the sampler class called `name`, if checkpoints save its settings. None: there is no such class."""
    for sampler_class, settings in SAVED_SETTINGS.items():
        if sampler_class.__name__ == name and settings is not None:
            return sampler_class
    return None
