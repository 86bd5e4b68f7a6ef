"""Minari datasets are exported and imported bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.errors import ArgumentError
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits
from holdall.tools.datasets import export_minari, import_minari

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
    """The imported memory has one lane after the other. Breaks between episodes stay breaks."""
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


def test_extras_and_vector_rewards_are_exported_and_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The infos of the dataset have the extras, nested as in the memory."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = spaces.Box(-1, 1, (3,), np.float32)
    generator = np.random.default_rng(0)
    nested = spaces.Tuple([spaces.Box(-9, 9, (2,), np.float64), spaces.Dict({"n": spaces.Discrete(4)})])
    extras = {"log_prob": spaces.Box(-9, 9, (), np.float32), "hidden": nested}
    with ReplayMemory(box, box, 100, 2, extras=extras, reward_shape=(2,)) as memory:
        for step in range(40):
            obs, following = generator.random((2, 2, 3), np.float32)
            kept = {
                "log_prob": generator.random(2, np.float32),
                "hidden": (generator.random((2, 2)), {"n": generator.integers(0, 4, 2)}),
            }
            ended, cut = np.array([[step % 7 == 6, False], [False, step % 5 == 4]])
            memory.add(obs, obs, generator.random((2, 2)), following, ended, cut, extras=kept)
        export_minari(memory, "holdall/extras-v0")
        with import_minari("holdall/extras-v0") as again:
            expected = memory.gather(np.concatenate([np.arange(0, 80, 2), np.arange(1, 80, 2)]))
            found = again.gather(np.arange(80))
            for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
                assert_same_bits(getattr(found, name), getattr(expected, name))
            assert_same_bits(found.extras["log_prob"], expected.extras["log_prob"])
            for part in (0, 1):
                assert_same_bits(found.extras["hidden"][part], expected.extras["hidden"][part])


@pytest.mark.parametrize("key", ["", ".", "camera/front", "a\0b"])
def test_a_key_that_minari_would_lose_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = spaces.Box(-1, 1, (3,), np.float32)
    zeros = np.zeros((1, 3), np.float32)
    flag = np.zeros(1, np.bool_)
    with ReplayMemory(spaces.Dict({key: box}), box, 10) as memory:
        memory.add({key: zeros}, zeros, np.zeros(1), {key: zeros}, flag, flag)
        with pytest.raises(ArgumentError, match="cannot have"):
            export_minari(memory, "holdall/keys-v0")
    assert not list(tmp_path.iterdir())


def test_an_export_to_a_disk_with_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 would end the process if it could not write a file."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=10))
    box = spaces.Box(-1, 1, (3,), np.float32)
    zeros = np.zeros((1, 3), np.float32)
    flag = np.zeros(1, np.bool_)
    with ReplayMemory(box, box, 10) as memory:
        memory.add(zeros, zeros, np.zeros(1), zeros, flag, flag)
        with pytest.raises(ArgumentError, match="No space left"):
            export_minari(memory, "holdall/room-v0")
    assert not list(tmp_path.iterdir())
