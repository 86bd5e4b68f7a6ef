"""The last assignment that a use of a name can see, and the values of simple expressions."""

import ast

import pytest

from holdall.tools.lint.source import Source


def assignment(text: str) -> str | None:
    """Return the last assignment of the name in the only call `show(name)`."""
    source = Source("a.py", text)
    (call,) = [call for call in source.calls if getattr(call.func, "id", "") == "show"]
    value = source.find_last_assignment(call.args[0])
    return None if value is None else ast.unparse(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nshow(x)", "1"),
        ("x = 1\nx = 2\nshow(x)\nx = 3", "2"),
        ("x = 1\nif y:\n    x = 2\nshow(x)", "2"),
        ("x: int = 1\nshow(x)", "1"),
        ("x, y = 1, 2\nshow(y)", "2"),
        ("x, y = f()\nshow(y)", None),
        ("x = 1\nx += 1\nshow(x)", None),
        ("x = 1\nfor x in y:\n    show(x)", None),
        ("x = 1\ndef f(x):\n    show(x)", None),
        ("x = 1\ndef f():\n    show(x)", "1"),
        ("x = 1\nx = 2\ndef f():\n    show(x)", None),
        ("x = 1\ndef f():\n    x = 2\n    return lambda: show(x)", "2"),
        ("class A:\n    x = 1\n    def f(self):\n        show(x)", None),
        ("class A:\n    def __init__(self):\n        self.x = 1\n    def f(self):\n        show(self.x)", "1"),
        ("class A:\n    def f(self):\n        self.x = 1\n        self.x = 2\n        show(self.x)", None),
        ("x = 1\nx = show(x)", "1"),
        ("with open(y) as x:\n    show(x)", None),
        ("show(x)", None),
    ],
)
def test_the_last_assignment_in_scope_is_found(text: str, expected: str | None) -> None:
    assert assignment(text) == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1024**3", 2**30),
        ("N * 4", 40),
        ("-N", -10),
        ("int(1e6)", 10**6),
        ("int(100 / 3)", 33),
        ("int('5')", None),
        ("10 / 0", None),
        ("2**10**9", None),
        ("'a' * 10", None),
        ("f()", None),
        ("-'a'", None),
    ],
)
def test_only_constant_expressions_are_evaluated(expression: str, value: object) -> None:
    source = Source("a.py", f"N = 10\nresult = {expression}\nshow(result)")
    assert source.evaluate(source.calls[-1].args[0]) == value


def test_a_long_chain_of_names_is_not_followed_to_its_end() -> None:
    text = "N0 = 1\n" + "".join(f"N{i} = N{i - 1}\n" for i in range(1, 2000)) + "show(N1999)"
    source = Source("a.py", text)
    assert source.evaluate(source.calls[-1].args[0]) is None
