"""The table of arguments is that of the installed libraries."""

import importlib
import inspect
from typing import Any

import pytest

from holdall.tools.lint import arguments
from holdall.tools.lint.arguments import Argument

ARGUMENTS = [value for value in vars(arguments).values() if isinstance(value, Argument)]


def find_object(full_name: str) -> Any:
    """Import what a full name stands for, or skip the test if its library is not installed."""
    pytest.importorskip(full_name.partition(".")[0])
    module = full_name
    names: list[str] = []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("argument", "function"),
    [pytest.param(one, name, id=f"{name}-{one.name}") for one in ARGUMENTS for name in one.functions],
)
def test_an_argument_has_its_position_in_every_function(argument: Argument, function: str) -> None:
    try:
        names = list(inspect.signature(find_object(function)).parameters)
    except ValueError:
        pytest.skip("this function of C has no signature")
    if names[0] == "self":
        del names[0]
    assert names.index(argument.name) == argument.index
