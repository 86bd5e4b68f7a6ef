"""A name is taken for an assignment only where no other one can have happened."""

import ast

import pytest

from holdall.tools.lint.run import UNKNOWN, KnownLength, OneOf, Reference
from holdall.tools.lint.source.evaluate import Evaluator
from holdall.tools.lint.source.script import Script


def value_of(text: str) -> object:
    """Return what the argument of the one call of `use` is."""
    script = Script.parse(text, "train.py")
    (call,) = [call for call in script.calls if isinstance(call.func, ast.Name) and call.func.id == "use"]
    return Evaluator(script).value(call.args[0])


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
    "text",
    [
        "use(N)",
        "from config import N\nuse(N + 1)",
        "def f(n=4):\n    use(n)",
        "def f(n):\n    use(n)\nf(4)",
        "if x:\n    N = 4\nelse:\n    N = 5\nuse(N)",
        "N = 4\nif x:\n    N = 5\nuse(N)",
        "N = 4\nN += 1\nuse(N)",
        "N = 4\ndef f():\n    global N\n    N = 5\nuse(N)",
        "N = 4\nN = 5\ndef f():\n    use(N)",
        "N = 4\nfor _ in y:\n    use(N)\n    N = 5",
        "N = 4\nwhile x:\n    N = 5\nuse(N)",
        "try:\n    N = 4\nexcept Error:\n    N = 5\nuse(N)",
        "N = 4\n[use(N) for N in y]",
        "for n in y:\n    use(n)",
        "use(int(input()))",
        "use(x if y else 4)",
        "use(4 if y else 4)",
        "use([f for i in range(6) if i])",
        "use([f(i, j) for i in range(6) for j in range(2)])",
        "use([f for _ in range(n)])",
        "use({'a': 1}['b'])",
        "use({**x, 'a': 1})",
        "use(1 // 0)",
        "use(2 ** 10_000_000)",
        "use(1 << 10_000_000)",
        "use(9 ** 60 * 9 ** 60)",
        "class C:\n    N = 5\nC.N = 6\nuse(C.N)",
        "class C:\n    def __init__(self, n):\n        self.n = n\n    def go(self):\n        use(self.n)",
        "class C:\n    def a(self):\n        self.n = 5\n    def b(self):\n        self.n = 6\n        use(self.n)",
        "N = N\nuse(N)",
        "N = 4\nfor _ in y:\n    N = use(N)",
        "for n in (1, 2):\n    n = n + 1\n    use(n)",
        "a = b\nb = a\nuse(a)",
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\nuse(args.n)",
    ],
)
def test_what_is_not_certain_is_unknown(text: str) -> None:
    assert value_of(text) is UNKNOWN


@pytest.mark.parametrize(
    "change",
    [
        "kwargs['n'] = 2",
        "kwargs.update(n=2)",
        "kwargs.pop('n')",
        "tweak(kwargs)",
        "tweak(settings=kwargs)",
        "other = kwargs\nother['n'] = 2",
        "del kwargs['n']",
        "kwargs |= {'n': 2}",
    ],
)
def test_a_dict_that_something_may_have_changed_is_unknown(change: str) -> None:
    assert value_of("kwargs = dict(n=1)\nuse(kwargs)\nprint(kwargs)") is UNKNOWN
    assert value_of("kwargs = dict(n=1)\nuse(kwargs['n'])\nprint(kwargs)") == 1
    assert value_of(f"kwargs = dict(n=1)\n{change}\nuse(kwargs['n'])") is UNKNOWN


def test_columns_count_characters_and_not_bytes() -> None:
    script = Script.parse("näme = 'ß'; call(1)", "train.py")
    (call,) = script.calls
    place = script.place(call)
    assert script.text[place.column - 1 : place.end_column - 1] == "call(1)"
