"""Every error is a `HoldallError`, and also the builtin error of the same meaning."""

import errno
import pickle

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
    """Code written for the builtin error still works, and code written for holdall catches one class."""
    error = getattr(holdall, name)
    assert issubclass(error, holdall.HoldallError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("kind", [holdall.DamageError, holdall.CheckpointError])
def test_the_number_of_an_error_is_not_part_of_its_message(kind: type[OSError]) -> None:
    error = pickle.loads(pickle.dumps(kind(errno.ENOENT, "The place is empty.")))
    assert str(error) == "The place is empty."
    assert error.errno == errno.ENOENT
    assert str(kind("The place is empty.")) == "The place is empty."
