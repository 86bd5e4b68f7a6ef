"""`holdall.lint` from Python."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdall import lint
from holdall.errors import ArgumentError

DUMP = "import pickle\npickle.dump(replay_buffer, file, 4)\n"
WORDS = st.sampled_from(
    [
        "import torch",
        "import pickle",
        "x",
        "=",
        "(",
        ")",
        "[",
        "]",
        ".",
        ",",
        ":",
        "\n",
        "\n    ",
        "for x in y:",
        "if x:",
        "def f(x):",
        "class A:",
        "deque(maxlen=5000)",
        "x.append((a, b, c, next_a))",
        "loss.backward()",
        "model.learn(5)",
        "SAC('M', env)",
        "pickle.dump(buffer, x)",
        "lambda",
        "**",
        "1e9",
        "f'{x / 1024**3} GB'",
        "self.x",
        "# holdall: ignore[S03]",
        "from stable_baselines3 import SAC",
        "SubprocVecEnv([f])",
        "env.step(x)",
        "é",
        "\x00",
    ]
)


def test_a_text_and_its_file_have_the_same_findings(tmp_path: Path) -> None:
    file = tmp_path / "save.py"
    file.write_text(DUMP)
    (from_text,) = lint.text(DUMP, str(file))
    assert lint.files([tmp_path]) == [from_text]
    assert lint.files([file, tmp_path, file]) == [from_text]
    assert from_text.severity is lint.Severity.WARNING
    assert lint.text(DUMP, settings=lint.Settings(ignore=("S03",))) == []


def test_a_file_that_cannot_be_decoded_is_named_and_does_not_stop_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(b"# -*- coding: utf-8 -*-\n'\xff'")
    (tmp_path / "save.py").write_text(DUMP)
    with pytest.raises(ArgumentError, match=r"train\.py"):
        lint.files([file])
    assert [finding.rule for finding in lint.files([tmp_path])] == ["S03", "F01"]


@pytest.mark.parametrize("text", ["x = " + "(" * 500 + ")" * 500, "x = " + "-" * 5000 + "1", "\x00", "lambda: (yield"])
def test_a_file_that_python_cannot_parse_is_a_finding(text: str) -> None:
    assert {finding.rule for finding in lint.text(text)} == {"F01"}


def test_deep_and_long_files_are_read() -> None:
    deep = "".join(f"{'    ' * depth}if x:\n" for depth in range(90)) + "    " * 90 + "pass\n"
    assert lint.text(deep) == []
    assert lint.text("N0 = 1\n" + "".join(f"N{i} = N{i - 1}\n" for i in range(1, 2000))) == []


@given(st.lists(WORDS, max_size=40).map(" ".join))
def test_any_text_is_checked_without_an_error(text: str) -> None:
    for finding in lint.text(text):
        assert finding.message
