"""One base to catch them all, and the builtin that each of them also is."""

import pytest

import holdall

BUILTIN_BY_ERROR = {
    "ArgumentError": ValueError,
    "SpaceError": TypeError,
    "TransitionIdError": IndexError,
    "ClosedError": RuntimeError,
    "DamageError": OSError,
    "MissingPackageError": ImportError,
}


@pytest.mark.parametrize(("name", "builtin"), BUILTIN_BY_ERROR.items())
def test_every_error_is_a_holdall_error_and_a_builtin(name: str, builtin: type[Exception]) -> None:
    """Code written for the builtin goes on to work; code written for holdall catches one class."""
    error = getattr(holdall, name)
    assert issubclass(error, holdall.HoldallError)
    assert issubclass(error, builtin)
