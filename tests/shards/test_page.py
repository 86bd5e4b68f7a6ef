"""The programs of docs/scale.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"


@pytest.mark.usefixtures("cluster")
def test_the_programs_of_the_page_run() -> None:
    """`names` has the values that a reader's program has."""
    obs = np.zeros((1, 4), np.float32)
    never = np.zeros(1, bool)
    names: dict[str, Any] = {
        "observation_space": spaces.Box(-1, 1, (4,), np.float32),
        "action_space": spaces.Discrete(2),
        "obs": obs,
        "action": np.zeros(1, np.int64),
        "reward": np.ones(1, np.float32),
        "next_obs": obs,
        "terminated": never,
        "truncated": never,
        "rank": 0,
        "errors": np.ones(256),
    }
    memories = []
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(program, str(PAGE), "exec"), names)
        memories.append(names["memory"])
    assert len(memories[0]) == 501
    assert names["batch"].obs.shape == (256, 4)
    memories[-1].close()
    memories[0].close()
