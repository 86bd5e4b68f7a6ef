"""The programs of the guide for Stable-Baselines3 run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdall.sb3 import PrioritizedReplay, ReplayBuffer

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "sb3.md"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3 on rollouts that no minibatch divides
def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    for program in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(program, str(GUIDE), "exec"), names)
    assert issubclass(names["PrioritizedQRDQN"], PrioritizedReplay)
    assert type(names["model"].replay_buffer) is ReplayBuffer
    assert names["model"].replay_buffer.size() == 100, "what Stable-Baselines3 had saved"
