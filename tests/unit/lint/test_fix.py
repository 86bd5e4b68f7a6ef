"""--fix changes what is safe, exactly there, and nothing else."""

import ast

import pytest

from holdall.tools.lint.engine import check_text
from holdall.tools.lint.finding import apply_edits
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES


def fixed(text: str, path: str = "train.py") -> str:
    corrected, made = apply_edits(text, check_text(text, path, RULES, REFERENCE_MACHINE))
    again = check_text(corrected, path, RULES, REFERENCE_MACHINE)
    assert not {one.rule for one in made} & {one.rule for one in again if one.edit}
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
        ("x = 1  # holdall: ignore[L05]\n", "x = 1\n"),
        (
            'from stable_baselines3 import DQN\nDQN("CnnPolicy", "P", buffer_size=9, optimize_memory_usage=True)\n',
            'from stable_baselines3 import DQN\nDQN("CnnPolicy", "P", buffer_size=9, optimize_memory_usage=False)\n',
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
        'from stable_baselines3 import DQN\nS = True\nDQN("CnnPolicy", "P", buffer_size=9, optimize_memory_usage=S)\n',
        "losses = []\nfor b in c:\n    loss = f(b)\n    loss.backward()\n    losses.append(loss)\n",
    ],
)
def test_what_is_not_written_out_or_not_safe_is_left_alone(text: str) -> None:
    assert fixed(text) == text


def test_yaml_is_corrected_too() -> None:
    before = "A-v0:\n  policy: MultiInputPolicy\n  optimize_memory_usage: True\n  batch_size: 64\n"
    assert fixed(before, "sac.yml") == before.replace("True", "False")


def test_several_corrections_in_one_line_do_not_meet() -> None:
    line = "pickle.dump(buffer, a); pickle.dump(memory, b)"
    assert fixed(f"import pickle\n{line}") == (
        "import pickle\npickle.dump(buffer, a, protocol=5); pickle.dump(memory, b, protocol=5)"
    )
