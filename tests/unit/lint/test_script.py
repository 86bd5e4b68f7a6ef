"""What an expression is: one value, or each that it can have with its condition, or unknown; never a guess."""

import ast

import pytest

from holdall.tools.lint.run import UNKNOWN, KnownLength, OneOf, Reference
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

PARSER = "import argparse\np = argparse.ArgumentParser()\n"
BIG = PARSER + "p.add_argument('--big', action='store_true')\n"
DATA = "from dataclasses import dataclass\nimport tyro\n@dataclass\nclass Args:\n    n: int = 7\n"
HOLDER = "class C:\n    def __init__(self, n):\n        self.n = n\n    def go(self):\n        use(self.n)\n"


def value_of(text: str) -> object:
    """Return what the argument of the one call of `use` is."""
    script = Script.parse(text, "train.py")
    (call,) = [call for call in script.calls if isinstance(call.func, ast.Name) and call.func.id == "use"]
    return TrainingReader(script).value(call.args[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("use(1_000_000)", 1_000_000),
        ("use(1e6)", 1e6),
        ("N = 4\nuse(N * 2 ** 10)", 4096),
        ("N = 4\nM = N\nuse(M // 3)", 1),
        ("use(int(1e6))", 1_000_000),
        ("use(max(10 // 4, 1))", 2),
        ("use(-1)", -1),
        ("use((84, 84, 3))", (84, 84, 3)),
        ("use(dict(a=1, b=[2]))", {"a": 1, "b": [2]}),
        ("use({'a': 1}['a'])", 1),
        ("a, b = 1, 2\nuse(b)", 2),
        ("use(len([f, g, h]))", 3),
        ("use([f for _ in range(6)])", KnownLength(6)),
        ("use([f(i) for i in range(2, 6)])", KnownLength(4)),
        ("use([f] * 4)", KnownLength(4)),
        ("use(8 if True else 4)", 8),
        ("import numpy as np\nuse(np.uint8)", Reference("numpy.uint8")),
        ("class C:\n    N = 5\nuse(C.N)", 5),
        ("class C:\n    N = 5\nc = C()\nuse(c.N)", 5),
        ("class C:\n    def __init__(self):\n        self.n = 5\n    def go(self):\n        use(self.n)", 5),
        ("N = 4\ndef main():\n    use(N)", 4),
        ("N = 4\nwith open('x') as f:\n    N = 5\nuse(N)", 5),
        ("N = 4\nN = 5\nuse(N)", 5),
        ("if x:\n    N = 4\nuse(N)", 4),
        ("for n in (1, 2):\n    use(n)", OneOf((1, 2))),
        ("def objective(trial):\n    use(trial.suggest_categorical('b', [64, 128]))", OneOf((64, 128))),
        ("def objective(trial):\n    n = trial.suggest_int('n', 4, 15)\n    use(n)", OneOf((4, 15))),
        ("for n in (1, 2):\n    k = 3\n    use(k)", 3),
        ("for n in (1, 2):\n    pass\nfor n in (3, 4):\n    use(n)", OneOf((3, 4))),
    ],
)
def test_constants_are_found(text: str, value: object) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("def f(n=4):\n    use(n)", 4),
        ("def f(n):\n    use(n)\nf(4)", 4),
        ("N = 4\nN += 1\nuse(N)", 5),
        ("N = 4\nN = 5\ndef f():\n    use(N)", 5),
        ("use(4 if y else 4)", 4),
        ("class C:\n    N = 5\nC.N = 6\nuse(C.N)", 6),
        (HOLDER + "C(3).go()", 3),
        ("class C:\n    def b(self):\n        self.n = 5\n        self.n = 6\n        use(self.n)", 6),
        ("try:\n    N = 4\nexcept Error:\n    N = 5\nuse(N)", 4),
        ("for n in (1, 2):\n    n = n + 1\n    use(n)", OneOf((2, 3))),
        ("kwargs = dict(n=1)\nkwargs['n'] = 2\nuse(kwargs['n'])", 2),
        ("kwargs = dict(n=1)\nkwargs.update(n=2)\nuse(kwargs['n'])", 2),
        ("kwargs = dict(n=1)\nother = kwargs\nother['n'] = 2\nuse(kwargs['n'])", 2),
        ("kwargs = dict(n=1)\nkwargs |= {'n': 2}\nuse(kwargs['n'])", 2),
        (PARSER + "p.add_argument('--size-of-it', type=int, default=10 ** 6)\nuse(p.parse_args().size_of_it)", 10**6),
        (DATA + "args = tyro.cli(Args)\nuse(args.n)", 7),
        ("import click\n@click.command()\n@click.option('--n', default=9)\ndef main(n):\n    use(n)\nmain()", 9),
        ("from absl import flags\nflags.DEFINE_integer('n', 3, 'help')\nFLAGS = flags.FLAGS\nuse(FLAGS.n)", 3),
        ("import functools\ndef f(a, b):\n    use(b)\nfunctools.partial(f, 1)(2)", 2),
        ("from typing import NamedTuple\nclass T(NamedTuple):\n    n: int = 2\nuse(T(5).n)", 5),
    ],
)  # fmt: skip
def test_values_are_followed_as_a_reader_would(text: str, value: object) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "values", "conditions"),
    [
        ("if x:\n    N = 4\nelse:\n    N = 5\nuse(N)", (4, 5), ("x", "not x")),
        ("N = 4\nif x:\n    N = 5\nuse(N)", (5, 4), ("x", "not x")),
        ("use(3 if y else 4)", (3, 4), ("y", "not (y)")),
        ("N = 4\nwhile x:\n    N = 5\nuse(N)", (5, 4), ("", "")),
        (BIG + "if p.parse_args().big:\n    N = 5\nelse:\n    N = 4\nuse(N)", (4, 5), ("", "p.parse_args().big")),
    ],
)  # fmt: skip
def test_what_branches_set_is_each_of_its_values_under_its_condition(
    text: str, values: tuple[object, ...], conditions: tuple[str, ...]
) -> None:
    found = value_of(text)
    assert isinstance(found, OneOf)
    assert (found.values, found.conditions) == (values, conditions)


@pytest.mark.parametrize(
    "text",
    [
        "use(N)",
        "from config import N\nuse(N + 1)",
        "N = 4\n[use(N) for N in y]",
        "for n in y:\n    use(n)",
        "use(int(input()))",
        "use(x if y else x)",
        "use([f for i in range(6) if i])",
        "use([f(i, j) for i in range(6) for j in range(2)])",
        "use([f for _ in range(n)])",
        "use({'a': 1}['b'])",
        "use({**x, 'a': 1})",
        "use(1 // 0)",
        "use(2 ** 10_000_000)",
        "use(1 << 10_000_000)",
        "use(9 ** 60 * 9 ** 60)",
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def go(self):\n        use(self.n)",
        "N = N\nuse(N)",
        "a = b\nb = a\nuse(a)",
        "n = 0\nfor _ in y:\n    n += 1\nuse(n)",
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\nuse(args.n)",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', required=True)\nuse(p.parse_args().n)",
    ],
)
def test_what_is_not_known_is_unknown(text: str) -> None:
    assert value_of(text) is UNKNOWN


@pytest.mark.parametrize("change", ["tweak(kwargs)", "tweak(settings=kwargs)", "kwargs.update(read())"])
def test_a_dict_that_something_may_have_changed_is_unknown(change: str) -> None:
    assert value_of("kwargs = dict(n=1)\nprint(kwargs)\nuse(kwargs['n'])") == 1
    assert value_of(f"kwargs = dict(n=1)\n{change}\nuse(kwargs['n'])") is UNKNOWN


def test_a_change_under_a_condition_keeps_the_value_from_before() -> None:
    found = value_of("kwargs = dict(n=1)\nif x:\n    kwargs['n'] = 2\nuse(kwargs['n'])")
    assert isinstance(found, OneOf)
    assert (found.values, found.conditions) == ((1, 2), ("", "x"))


def test_columns_count_characters_and_not_bytes() -> None:
    script = Script.parse("näme = 'ß'; call(1)", "train.py")
    (call,) = script.calls
    place = script.place(call)
    assert script.text[place.column - 1 : place.end_column - 1] == "call(1)"
