"""`holdall.lint` from Python."""

from pathlib import Path

import pytest

from holdall import lint
from holdall.errors import ArgumentError

DUMP = "import pickle\npickle.dump(replay_buffer, file)\n"


def test_text_and_files_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "save.py"
    file.write_text(DUMP)
    (from_text,) = lint.text(DUMP, str(file))
    assert lint.files([tmp_path]) == [from_text]
    assert lint.files([file, tmp_path, file]) == [from_text]
    assert from_text.severity is lint.Severity.WARNING
    assert lint.text(DUMP, settings=lint.Settings(ignore=("S03",))) == []


def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(b"# -*- coding: utf-8 -*-\n'\xff'")
    with pytest.raises(ArgumentError, match=r"train\.py"):
        lint.files([file])


@pytest.mark.parametrize("text", ["x = " + "(" * 500 + ")" * 500, "x = " + "-" * 5000 + "1", "\x00", "lambda: (yield"])
def test_a_file_that_python_cannot_parse_is_a_finding(text: str) -> None:
    (finding,) = lint.text(text)
    assert finding.rule == "F01"


def test_deep_and_long_files_are_read() -> None:
    deep = "".join(f"{'    ' * depth}if x:\n" for depth in range(90)) + "    " * 90 + "pass\n"
    assert lint.text(deep) == []
    chain = "N0 = 1\n" + "".join(f"N{i} = N{i - 1}\n" for i in range(1, 2000))
    found = lint.text(chain + "from stable_baselines3 import PPO\nPPO('M', 'E', n_steps=N1999, batch_size=3)\n")
    assert {finding.rule for finding in found} == {"L05", "L13"}
