"""LeRobot's buffer: a learner that is killed during a checkpoint loses nothing, and draws the same batches again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdall.lerobot import ReplayBuffer

if sys.platform == "win32":
    pytest.skip("processes are killed as POSIX does", allow_module_level=True)

KEY = "observation.images.front"
ROWS_PER_SAVE = 40
CAPACITY = 10_000


def transitions(start: int, count: int) -> Iterator[dict[str, Any]]:
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


def learn(folder: str) -> None:
    """Add and save for ever. Print the number of rows before each save, and when it is safe."""
    torch.manual_seed(0)
    buffer = ReplayBuffer(CAPACITY, "cpu", [KEY], use_drq=False, budget=None)
    while True:
        for transition in transitions(len(buffer), ROWS_PER_SAVE):
            buffer.add(**transition)
        buffer.sample(8)
        sys.stdout.write(f"begun {len(buffer)}\n")
        sys.stdout.flush()
        buffer.save(folder).result()
        sys.stdout.write(f"saved {len(buffer)}\n")
        sys.stdout.flush()


def replay(rows: int) -> list[Any]:
    """Return the batches that a learner draws after the save of so many rows, if nobody kills it."""
    torch.manual_seed(0)
    buffer = ReplayBuffer(CAPACITY, "cpu", [KEY], use_drq=False, budget=None)
    while len(buffer) < rows:
        for transition in transitions(len(buffer), ROWS_PER_SAVE):
            buffer.add(**transition)
        buffer.sample(8)
    batches = [buffer.sample(8) for _ in range(3)]
    buffer.close()
    return batches


@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.015])
def test_a_buffer_killed_while_it_saves_resumes_with_the_same_batches(delay_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        for line in learner.stdout:
            if line.split() == ["begun", str(3 * ROWS_PER_SAVE)]:
                break
        time.sleep(delay_s)
        learner.send_signal(signal.SIGKILL)
        printed = learner.stdout.read()
    safe = [2 * ROWS_PER_SAVE, *[int(line.split()[1]) for line in printed.splitlines() if line.startswith("saved")]]
    buffer = ReplayBuffer.load(folder, "cpu")
    assert len(buffer) >= safe[-1]
    assert len(buffer) % ROWS_PER_SAVE == 0
    resumed = [buffer.sample(8) for _ in range(3)]
    for loaded, batch in zip(resumed, replay(len(buffer)), strict=True):
        for part in ("state", "next_state"):
            assert torch.equal(loaded[part][KEY], batch[part][KEY])
        for part in ("action", "reward", "done", "truncated"):
            assert torch.equal(loaded[part], batch[part])  # type: ignore[literal-required]
    for slot, wanted in enumerate(transitions(0, len(buffer))):
        if slot % 7 == 0:
            assert torch.equal(buffer.states[KEY][slot], wanted["state"][KEY][0])
    buffer.close()


if __name__ == "__main__":
    learn(sys.argv[1])
