"""Saving a sampler in a checkpoint, and making the sampler of a loaded memory.

A checkpoint has the name of the sampler's class, its settings if `SAVED_SETTINGS` lists them, and its state. It has no
code: only classes in `SAVED_SETTINGS` are ever constructed from a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdall.errors import ArgumentError, DamageError
from holdall.sampling.calls import check_sampler
from holdall.sampling.composed import ComposedSampler
from holdall.sampling.registry import SAVED_SETTINGS, find_sampler_class, has_saved_settings
from holdall.sampling.sampler import Sampler

_MAX_SAVED_STEPS = 2**20
"""Largest number of steps per row of a sampler in a checkpoint. Every draw takes memory in proportion to it."""


def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """Return the name of a sampler's class, and its settings if they can be saved."""
    described: dict[str, Any] = {"kind": type(sampler).__name__}
    if not has_saved_settings(sampler):
        return described
    names = SAVED_SETTINGS[type(sampler)] or ()
    described["settings"] = {name: getattr(sampler, name) for name in names}
    if isinstance(sampler, ComposedSampler):
        described["by"] = describe_sampler(sampler.by)
    return described


def choose_sampler(sampler: Sampler | None, saved: Mapping[str, Any], *, has_same_ids: bool) -> Sampler:
    """Return the sampler of a loaded memory: `sampler`, or a new one with the saved settings.

    Args:
        sampler: Sampler that the caller passed. None: make one.
        saved: Result of `describe_sampler`, perhaps with the state of the sampler as "state".
        has_same_ids: Whether transitions have the ids that they had in the saved memory, so that the state fits.
    """
    if sampler is not None:
        return check_sampler(sampler)
    kind = saved["kind"]
    reason = "The checkpoint does not have its settings."
    if "settings" in saved:
        constructed = _construct_sampler(saved)
        if has_same_ids or constructed.state() == {}:
            return constructed
        reason = "Its priorities do not fit the new lanes or shards."
    raise ArgumentError(
        f"sampler was not given, but the checkpoint was saved with {kind}. {reason} To continue, pass "
        f"sampler={kind}(...), or another sampler, which begins without the saved state."
    )


def resume_sampler(sampler: Sampler, saved: Mapping[str, Any], capacity: int, first_id: int) -> bool:
    """Restore the saved state if `sampler` has the class that was saved. Return whether it has.

    Args:
        sampler: Sampler of the loaded memory.
        saved: Result of `describe_sampler`, with the state of the sampler as "state".
        capacity: Capacity of the loaded memory.
        first_id: Lowest id that the loaded memory holds.
    """
    if type(sampler).__name__ != saved["kind"]:
        return False
    sampler.restore(saved["state"])
    resize: Callable[[int, int], None] | None = getattr(sampler, "resize", None)
    if resize is not None:
        resize(capacity, first_id)
    return True


def _construct_sampler(saved: Mapping[str, Any]) -> Sampler:
    """Make a sampler from a result of `describe_sampler`. Raise DamageError if its class refuses the settings."""
    sampler_class: Any = find_sampler_class(saved["kind"])
    if sampler_class is None:
        raise DamageError(f"The checkpoint has settings of an unknown sampler ({saved['kind']!r}). Pass sampler=...")
    arguments: dict[str, Any] = {}
    if "by" in saved:
        arguments["by"] = _construct_sampler(saved["by"])
    try:
        sampler: Any = sampler_class(**saved.get("settings", {}), **arguments)
    except (ArgumentError, TypeError) as error:
        raise DamageError(f"The saved settings of {saved['kind']} are damaged ({error}). Pass sampler=...") from error
    if isinstance(sampler, ComposedSampler) and sampler.steps_per_row > _MAX_SAVED_STEPS:
        raise DamageError(
            f"The saved {saved['kind']} draws {sampler.steps_per_row} steps per row, more than {_MAX_SAVED_STEPS}. "
            "Pass sampler=... if that is intended."
        )
    constructed: Sampler = sampler
    return constructed
