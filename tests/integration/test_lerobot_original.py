"""LeRobot's own classes beside holdall's: the wrong rows of its buffer, and its learner with holdall's buffers.

HOLDALL_LEROBOT names a checkout of LeRobot. Without it, the package that `make nightly` fetches is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdall.lerobot import ReplayBuffer, install

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".cache" / "lerobot"
FOLDER = Path(os.environ["HOLDALL_LEROBOT"]) if "HOLDALL_LEROBOT" in os.environ else FETCHED

# LeRobot and what it imports give warnings of their own.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

KEY = "observation.state"


@pytest.fixture
def load_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The function that imports a module of LeRobot. Afterwards nothing of LeRobot is imported any more."""
    if not FOLDER.is_dir():
        pytest.skip(
            "needs LeRobot: set HOLDALL_LEROBOT to a checkout; `make nightly` fetches it where there is a network"
        )
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "adapters"))
    before = set(sys.modules)
    finders = list(sys.meta_path)
    paths = list(sys.path)
    from lerobot_source import load_module

    yield lambda name: load_module(FOLDER, name).module
    sys.meta_path[:] = finders
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"lerobot", "lerobot_source"}:
            del sys.modules[name]


def play(count: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield the transitions of episodes that a time limit ends. Two rows in five are interventions."""
    generator = np.random.default_rng(0)

    def observe() -> dict[str, torch.Tensor]:
        return {KEY: torch.from_numpy(generator.normal(size=(1, 5)).astype(np.float32))}

    state = observe()
    for i in range(count):
        following = observe()
        is_end = i % length == length - 1
        yield {
            "state": state,
            "action": torch.zeros(1, 2),
            "reward": float(i),
            "next_state": following,
            "done": False,
            "truncated": is_end,
            "complementary_info": {"is_intervention": i % 5 < 2},
        }
        state = observe() if is_end else following


def find_wrong_rows(kind: Any, transitions: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of rows whose next state is not the one that was added. Used as LeRobot's learner does."""
    buffer = kind(len(transitions), "cpu", [KEY], use_drq=False, optimize_memory=True)
    for transition in transitions:
        buffer.add(**transition)
    given = {transition["reward"]: transition for transition in transitions}
    wrong: set[int] = set()
    drawn: set[float] = set()
    torch.manual_seed(0)
    for _ in range(40):
        batch = buffer.sample(len(transitions))
        for row, reward in enumerate(batch["reward"].tolist()):
            drawn.add(reward)
            assert torch.equal(batch["state"][KEY][row], given[reward]["state"][KEY][0])
            if not torch.equal(batch["next_state"][KEY][row], given[reward]["next_state"][KEY][0]):
                wrong.add(int(reward))
    assert drawn == given.keys()
    return sorted(wrong - {int(transitions[-1]["reward"])})  # The slot after the newest row has the oldest one.


CASES: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "time limit": (list(play(30, 10)), [9, 19]),
    "intervention": ([t for t in play(30, 100) if t["complementary_info"]["is_intervention"]], [1, 6, 11, 16, 21]),
    "skipped row": ([t for i, t in enumerate(play(20, 100)) if i not in {4, 11, 12}], [3, 10]),
}


@pytest.mark.parametrize(("transitions", "wrong"), CASES.values(), ids=CASES)
def test_rows_that_lerobots_buffer_returns_with_a_wrong_next_state_are_right(
    transitions: list[dict[str, Any]], wrong: list[int], load_module: Callable[[str], Any]
) -> None:
    original = load_module("rl.buffer").ReplayBuffer
    assert original is not ReplayBuffer
    assert find_wrong_rows(original, transitions) == wrong
    assert find_wrong_rows(ReplayBuffer, transitions) == []


def test_one_seed_draws_the_rows_of_lerobots_buffer(load_module: Callable[[str], Any]) -> None:
    buffers = [kind(40, "cpu", [KEY], use_drq=False) for kind in (load_module("rl.buffer").ReplayBuffer, ReplayBuffer)]
    for transition in play(70, 10):
        for buffer in buffers:
            buffer.add(**transition)
        drawn: list[Any] = []
        for buffer in buffers:
            torch.manual_seed(int(transition["reward"]))
            drawn.append(buffer.sample(16))
        for part in ("state", "next_state", "complementary_info"):
            for key, tensor in drawn[0][part].items():
                assert torch.equal(tensor, drawn[1][part][key])
        for part in ("action", "reward", "done", "truncated"):
            assert torch.equal(drawn[0][part], drawn[1][part])


def test_lerobots_learner_makes_saves_and_resumes_holdalls_buffer(
    load_module: Callable[[str], Any], tmp_path: Path
) -> None:
    learner = load_module("rl.learner")
    install(budget=None)
    policy = SimpleNamespace(online_buffer_capacity=50, input_features={KEY: None})
    cfg = SimpleNamespace(output_dir=str(tmp_path), resume=False, policy=policy, dataset=None)
    buffer = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
    assert isinstance(buffer, ReplayBuffer)
    assert (buffer.capacity, buffer.state_keys, buffer.optimize_memory) == (50, [KEY], True)
    for transition in play(30, 10):
        buffer.add(**transition)
    mixer = load_module("rl.data_sources.data_mixer").OnlineOfflineMixer(buffer)
    batches = mixer.get_iterator(8)
    next(batches)
    buffer.to_lerobot_dataset(repo_id="name", fps=10, root=str(tmp_path / "dataset"))
    wanted = [next(batches) for _ in range(4)]
    cfg.resume = True
    resumed = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
    assert isinstance(resumed, ReplayBuffer)
    mixer = load_module("rl.data_sources.data_mixer").OnlineOfflineMixer(resumed)
    for batch, expected in zip(mixer.get_iterator(8), wanted, strict=False):
        assert torch.equal(batch["reward"], expected["reward"])
        assert torch.equal(batch["next_state"][KEY], expected["next_state"][KEY])
    buffer.close()
    resumed.close()
