"""Random generators: making them from seeds, and saving and restoring their states."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall.errors import ArgumentError, CheckpointError, DamageError

_BIT_GENERATORS: dict[str, Any] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}
"""NumPy's bit generators by name. Only their states can be saved."""


def new_generator(seed: Any) -> np.random.Generator:
    """Return a new generator. Raise ArgumentError for a seed that NumPy refuses, and for bools."""
    try:
        # NumPy would use a bool as the seed 0 or 1. Converted to text, a bool is refused like any other wrong seed.
        given: Any = str(seed) if isinstance(seed, bool) else seed
        return np.random.default_rng(given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"seed ({seed!r}) is not a seed that NumPy takes ({error}). Pass None or an integer of at least 0."
        ) from error


def get_generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return the state of a generator. Raise CheckpointError if `restore_generator` could not restore it."""
    state = generator.bit_generator.state
    kind = state["bit_generator"]
    if kind not in _BIT_GENERATORS:
        raise CheckpointError(
            f"The memory draws from a {kind}, which cannot be saved. Pass a number as seed, or a generator over one of "
            f"{', '.join(_BIT_GENERATORS)}."
        )
    return dict(state)


def restore_generator(state: Any) -> np.random.Generator:
    """Return a generator that continues from a result of `get_generator_state`. Raise DamageError for other values."""
    try:
        bit_generator = _BIT_GENERATORS[state["bit_generator"]](0)
        bit_generator.state = state
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(f"The saved generator is damaged ({error}). Load an older checkpoint.") from error
    return np.random.Generator(bit_generator)
