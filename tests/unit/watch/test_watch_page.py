"""The programs of docs/watch.md run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "watch.md"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3, of a logger without TensorBoard
def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(program, str(PAGE), "exec"), names)
    names["memory"].close()
    assert {"model", "watched", "memory"} <= names.keys()
