"""LeRobot's buffers: a learner that is killed during a checkpoint resumes with the same rows and the same batches."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdall.lerobot import install

if sys.platform == "win32":
    pytest.skip("processes are killed as POSIX does", allow_module_level=True)

KEY = "observation.images.front"
ROWS_PER_SAVE = 40
CAPACITY = 10_000
OFFLINE_CAPACITY = 30  # So that rows are evicted after they were drawn.
NAMES = ("dataset", "dataset_offline")


def make_transitions(start: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield transitions that depend on their numbers only."""
    for number in range(start, start + count):
        images = np.random.default_rng(number).integers(0, 256, (2, 3, 32, 32)).astype(np.uint8)
        before, after = (torch.from_numpy(image)[None].float() / 255 for image in images)
        yield {
            "state": {KEY: before},
            "action": torch.full((1, 2), float(number)),
            "reward": float(number),
            "next_state": {KEY: after},
            "done": number % 11 == 0,
            "truncated": number % 13 == 0,
        }


class Learner:
    """A learner like LeRobot's, with holdall's buffers.

    Args:
        folder: Its output folder.
        resume: Whether it continues the run in that folder.
    """

    def __init__(self, folder: str, *, resume: bool) -> None:
        self.folder = Path(folder)
        module = ModuleType("lerobot.rl.learner")

        def initialize(capacity: int) -> Any:
            return module.ReplayBuffer(capacity, "cpu", [KEY], use_drq=False)

        names: Any = module
        names.initialize_replay_buffer = lambda cfg, *_: initialize(cfg.policy.online_buffer_capacity)
        names.initialize_offline_replay_buffer = lambda cfg, *_: initialize(cfg.policy.offline_buffer_capacity)
        sys.modules.update(
            {"lerobot": ModuleType("lerobot"), "lerobot.rl": ModuleType("lerobot.rl"), "lerobot.rl.learner": module}
        )
        install(budget=None)
        policy = SimpleNamespace(online_buffer_capacity=CAPACITY, offline_buffer_capacity=OFFLINE_CAPACITY)
        cfg = SimpleNamespace(output_dir=self.folder, resume=resume, policy=policy)
        torch.manual_seed(0)
        self.online: Any = names.initialize_replay_buffer(cfg, "cpu", "cpu")
        self.offline: Any = names.initialize_offline_replay_buffer(cfg, "cpu", "cpu")
        for name in ("lerobot", "lerobot.rl", "lerobot.rl.learner"):
            del sys.modules[name]
        self.iterators = [buffer.get_iterator(8, queue_size=2) for buffer in (self.online, self.offline)]

    def train(self) -> None:
        """Add transitions, of which every fourth is an intervention. Draw batches and random numbers meanwhile."""
        for number, transition in enumerate(make_transitions(len(self.online), ROWS_PER_SAVE)):
            self.online.add(**transition)
            if number % 4 == 0:
                self.offline.add(**transition)
            if number % 10 == 5:
                self.draw()

    def draw(self) -> list[Any]:
        """Return the next batch of each buffer."""
        batches = [next(iterator) for iterator in self.iterators]
        torch.rand(2)
        return batches

    def save(self) -> None:
        """Write a checkpoint."""
        for buffer, name in zip((self.online, self.offline), NAMES, strict=True):
            buffer.to_lerobot_dataset("name", root=self.folder / name)

    def close(self) -> None:
        """Close both buffers."""
        self.online.close()
        self.offline.close()


def learn(folder: str) -> None:
    """Add and save for ever. Print the number of rows before each save, and after it."""
    learner = Learner(folder, resume=False)
    while True:
        learner.train()
        sys.stdout.write(f"begun {len(learner.online)}\n")
        sys.stdout.flush()
        learner.save()
        sys.stdout.write(f"saved {len(learner.online)}\n")
        sys.stdout.flush()


def replay(folder: Path, rows: int) -> list[Any]:
    """Return the batches that a learner draws after the save of `rows` rows, if it is not killed."""
    learner = Learner(str(folder), resume=False)
    while len(learner.online) < rows:
        learner.train()
    batches = [batch for _ in range(5) for batch in learner.draw()]
    learner.close()
    return batches


def wait_for_offline(folder: Path, count: int) -> None:
    """Wait until checkpoint `count` of the offline buffer is complete. The online buffer is saved after it."""
    manifests = folder / "holdall" / NAMES[1] / "manifests"
    while len(list(manifests.glob(f"{count:016d}*"))) == 0:
        time.sleep(0.0002)


@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.015, None], ids=["0ms", "4ms", "15ms", "between the buffers"])
def test_a_learner_killed_while_it_saves_resumes_with_the_same_batches(delay_s: float | None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split() == ["begun", str(3 * ROWS_PER_SAVE)]:
                break
        if delay_s is None:
            wait_for_offline(folder, 3)
        else:
            time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        printed = process.stdout.read()
    safe = [2 * ROWS_PER_SAVE, *[int(line.split()[1]) for line in printed.splitlines() if line.startswith("saved")]]
    learner = Learner(str(folder), resume=True)
    rows = len(learner.online)
    assert rows >= safe[-1]
    assert rows % ROWS_PER_SAVE == 0
    resumed = [batch for _ in range(5) for batch in learner.draw()]
    for loaded, batch in zip(resumed, replay(tmp_path / "other", rows), strict=True):
        for part in ("state", "next_state"):
            assert torch.equal(loaded[part][KEY], batch[part][KEY])
        for part in ("action", "reward", "done", "truncated"):
            assert torch.equal(loaded[part], batch[part])
    for slot, wanted in enumerate(make_transitions(0, rows)):
        if slot % 7 == 0:
            assert torch.equal(learner.online.states[KEY][slot], wanted["state"][KEY][0])
    interventions = [number for number in range(rows) if number % ROWS_PER_SAVE % 4 == 0][-OFFLINE_CAPACITY:]
    assert sorted(learner.offline.rewards[:].tolist()) == interventions
    learner.close()


if __name__ == "__main__":
    learn(sys.argv[1])
