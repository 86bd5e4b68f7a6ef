"""Checks of plain arguments that every memory shares.

In:  a value and the name of its argument.  Out: nothing, or an ArgumentError that says what it must be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall.errors import ArgumentError


def require_count(argument: str, value: Any, least: int = 1, reason: str = "") -> None:
    """Refuse what is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number of at least {least}{reason}; pass one")


def require_share(argument: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value <= 1:
        raise ArgumentError(f"{argument} ({value!r}) must be a number from 0 to 1; pass one")


def generator_of(seed: Any) -> np.random.Generator:
    """Make a generator of a seed."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"seed ({seed!r}) is none that NumPy takes ({error}); pass None or a whole number of at least 0"
        ) from error
