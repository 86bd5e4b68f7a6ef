"""--fix makes safe corrections, and changes nothing else."""

import ast

import pytest

from holdall.tools.lint.check import check_text
from holdall.tools.lint.finding import Finding, apply_edits
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rules import RULES

MACHINE = Machine(cores=8, ram_bytes=32 * 2**30, limit_bytes=32 * 2**30, limit_name="RAM", python=(3, 11))


def check(text: str) -> list[Finding]:
    return check_text(text, "train.py", RULES, MACHINE)


def fixed(text: str) -> str:
    corrected, made = apply_edits(text, check(text))
    again = {finding.rule for finding in check(corrected) if finding.edit}
    assert not {finding.rule for finding in made} & again
    return corrected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import pickle\npickle.dump(buffer, file)\n", "import pickle\npickle.dump(buffer, file, protocol=5)\n"),
        ("import pickle\npickle.dump(buffer, file, 4)\n", "import pickle\npickle.dump(buffer, file, 5)\n"),
        (
            "import pickle\npickle.dump(buffer, file, protocol=2)  # ä\n",
            "import pickle\npickle.dump(buffer, file, protocol=5)  # ä\n",
        ),
        (
            "import pickle\r\npickle.dump(\r\n    buffer,\r\n    'ü' and file,\r\n)\r\n",
            "import pickle\r\npickle.dump(\r\n    buffer,\r\n    'ü' and file, protocol=5,\r\n)\r\n",
        ),
        ("x = 1  # holdall: ignore[S03]\n", "x = 1\n"),
        (
            "import pickle\npickle.dump(buffer, a); pickle.dump(memory, b)\n",
            "import pickle\npickle.dump(buffer, a, protocol=5); pickle.dump(memory, b, protocol=5)\n",
        ),
    ],
)
def test_a_safe_correction_is_made_in_place(before: str, after: str) -> None:
    assert fixed(before) == after
    ast.parse(after)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\nP = 4\npickle.dump(buffer, file, protocol=P)\n",
        "import pickle\npickle.dump(buffer, file, **options)\n",
        "losses = []\nfor b in c:\n    loss = f(b)\n    loss.backward()\n    losses.append(loss)\n",
    ],
)
def test_only_safe_corrections_of_literals_are_made(text: str) -> None:
    assert fixed(text) == text
