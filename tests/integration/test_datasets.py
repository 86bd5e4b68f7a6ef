"""Minari datasets: moved out and in again, every number as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.cli.checkpoint import export_minari, import_minari
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits

pytest.importorskip("minari", reason="needs the extra [minari]")

SPACES: dict[str, tuple[spaces.Space[Any], list[LeafPlan]]] = {
    "vector": (spaces.Box(-1, 1, (5,), np.float32), [LeafPlan()]),
    "images": (
        spaces.Dict({"image": spaces.Box(0, 255, (24, 24, 3), np.uint8), "state": spaces.Box(-1, 1, (3,), np.float64)}),
        [LeafPlan(), LeafPlan()],
    ),
}


@pytest.mark.parametrize("kind", SPACES)
def test_a_memory_is_exported_and_imported_bit_for_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lane by lane; images without loss, silent breaks between episodes kept apart."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    space, plans = SPACES[kind]
    mishaps = Mishaps(ends=0.05, silent_resets=0.03, foreign_next=0.02)
    stream = Stream(space, spaces.Box(-1, 1, (2,), np.float32), 2, plans=plans, mishaps=mishaps, seed=2)
    with ReplayMemory(space, stream.action_space, 2000, 2) as memory:
        for _ in range(300):
            memory.add(**stream.tick().arguments())
        assert export_minari(memory, "holdall/test-v0") > 2
        with import_minari("holdall/test-v0") as again:
            assert len(again) == len(memory)
            expected = memory.gather(np.concatenate([np.arange(0, 600, 2), np.arange(1, 600, 2)]))
            found = again.gather(np.arange(600))
            for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
                assert_same_bits(getattr(found, name), getattr(expected, name))
