"""Assertions of the contracts, which need no test framework."""

from __future__ import annotations

from collections.abc import Callable


def require(holds: bool, message: str) -> None:
    """Raise AssertionError with `message` unless a rule holds."""
    if not holds:
        raise AssertionError(message)


def require_raises(
    kinds: type[Exception] | tuple[type[Exception], ...], act: Callable[[], object], what: str = "the call"
) -> Exception:
    """Return the error that `act` raises. Raise AssertionError unless it is one of `kinds`."""
    try:
        act()
    except kinds as error:
        return error
    raise AssertionError(f"{what} raised no {kinds}")
