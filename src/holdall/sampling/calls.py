"""The calls of a memory to its sampler, and the checks of their arguments and results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Ids, check_ids_of_any_shape
from holdall.errors import ArgumentError, TransitionIdError
from holdall.sampling.held import Held
from holdall.sampling.registry import is_shipped
from holdall.sampling.sampler import Sampler
from holdall.sampling.uniform import Uniform
from holdall.schema import as_array, move_to_host

_HALF_PRECISION_BYTES = 2


def check_sampler(sampler: Any) -> Sampler:
    """Return the sampler of a memory, `Uniform()` for None. Raise ArgumentError if it is not an object with methods."""
    if sampler is None:
        return Uniform()
    methods = [getattr(sampler, name, None) for name in ("draw", "state", "restore")]
    if isinstance(sampler, type) or not all(callable(method) for method in methods):
        raise ArgumentError(
            f"sampler ({sampler!r}) is not an object with the methods draw, state and restore. Pass a sampler, such as "
            "Uniform() or Prioritized()."
        )
    checked: Sampler = sampler
    return checked


def require_enough(count: int, transitions: int, min_transitions: int) -> None:
    """Raise ArgumentError for a batch of `count` rows if fewer than `min_transitions` transitions are held."""
    if transitions < min_transitions:
        raise ArgumentError(
            f"batch_size ({count}) is more than the {transitions} transitions held. Add more first, or draw a smaller "
            "batch."
        )


def draws_once(sampler: Sampler) -> bool:
    """Return whether a draw is one call to the generator if every transition may be drawn.

    Always False for samplers that do not ship with holdall, even if they inherit the attribute `draws_once`.
    """
    return getattr(sampler, "draws_once", False) and is_shipped(sampler)


def draw_from(sampler: Sampler, held: Held, count: int, generator: np.random.Generator) -> Draw:
    """Draw `count` rows. Verify the draw if the sampler does not ship with holdall."""
    draw = sampler.draw(held, count, generator)
    return draw if is_shipped(sampler) else held.check_draw(draw)


def set_priorities(sampler: Sampler, held: Held, ids: Any, priorities: Any) -> None:
    """Check priorities, and pass them to the sampler. Raise ArgumentError if the sampler has no priorities."""
    checked_ids, checked_priorities = check_priorities(sampler, ids, priorities)
    priority_sampler: Any = sampler
    priority_sampler.update_priorities(held, checked_ids, checked_priorities)


def check_priorities(sampler: Sampler, ids: Any, priorities: Any) -> tuple[Ids, NDArray[Any]]:
    """Return `ids` and `priorities` as arrays. Raise ArgumentError if the sampler has no priorities."""
    if not hasattr(sampler, "update_priorities"):
        raise ArgumentError(
            f"update_priorities was called, but the memory's sampler ({type(sampler).__name__}) has no priorities. "
            "Construct the memory with sampler=Prioritized(...)."
        )
    checked_ids = check_ids_of_any_shape(ids)
    if checked_ids.size and checked_ids.min() < 0:
        raise TransitionIdError(f"ids holds {checked_ids.min()}, but ids are at least 0. Pass the ids of a batch.")
    return checked_ids, as_array(_widen_half_precision(priorities), "priorities")


def _widen_half_precision(priorities: Any) -> Any:
    """Copy a tensor to the host, and convert half precision to float32. NumPy does not have the dtype bfloat16."""
    values = move_to_host(priorities)
    is_half = hasattr(values, "detach") and values.is_floating_point() and values.itemsize == _HALF_PRECISION_BYTES
    return values.float() if is_half else values
