"""Random number generators as plain trees: NumPy's, whose states are numbers of 128 bits and more."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall.errors import CheckpointError, DamageError

_KNOWN = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return all that the next draws of a generator depend on."""
    state = generator.bit_generator.state
    if state["bit_generator"] not in _KNOWN:
        raise CheckpointError(
            f"the memory draws from a {state['bit_generator']}, which cannot be saved; seed it with a number, or pass "
            f"a generator over one of {', '.join(_KNOWN)}"
        )
    return dict(state)


def restored_generator(state: Any) -> np.random.Generator:
    """Make a generator that goes on where the saved one stood."""
    try:
        bits = getattr(np.random, _KNOWN[_KNOWN.index(state["bit_generator"])])(0)
        bits.state = state
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(f"the saved generator makes no sense ({error}); load an older checkpoint") from error
    return np.random.Generator(bits)
