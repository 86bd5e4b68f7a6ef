"""One training in a process of its own: `python -m holdall.demo.training --buffer holdall`.

In:  which replay buffer, how many steps to train, how many transitions to hold.
Out: JSON lines on stdout, {"done", "total"} while it runs and {"result"} last.
Two runs that differ only in the buffer must end with the same weights, bit for bit.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback

from holdall.demo.camera import CameraRover
from holdall.demo.eyes import SmallEyes
from holdall.demo.result import Result
from holdall.footprint import held_bytes, peak_bytes
from holdall.sb3 import ReplayBuffer as HoldallReplayBuffer

BUFFERS: dict[str, type[ReplayBuffer]] = {"sb3": DictReplayBuffer, "holdall": HoldallReplayBuffer}
RANDOM_STEPS = 100  # before the first gradient step
READ_EVERY = 500  # transitions between two readings of the process's memory
SEED = 7


class Progress(BaseCallback):
    """Print how far the run is, and read the process's memory at even distances."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.moments: list[float] = []  # when each step was done, in seconds
        self.readings: list[tuple[int, int]] = []  # transitions held, unique bytes

    def _on_step(self) -> bool:
        self.moments.append(time.perf_counter())
        if self.num_timesteps % READ_EVERY == 0:
            self.readings.append((self.num_timesteps, held_bytes().unique))
        if self.num_timesteps % 100 == 0:
            emit({"done": self.num_timesteps, "total": self.total})
        return True


def train(buffer: str, steps: int, transitions: int) -> Result:
    """Train for `steps`, then let random actions fill the same buffer up to `transitions`."""
    # Sums over threads depend on how many there are; one thread keeps the two runs comparable on any machine.
    torch.set_num_threads(1)
    progress = Progress(steps + transitions)
    model = SAC(
        "MultiInputPolicy",
        CameraRover(),
        seed=SEED,
        buffer_size=steps + transitions,
        learning_starts=RANDOM_STEPS,
        batch_size=32,
        replay_buffer_class=BUFFERS[buffer],
        policy_kwargs={"features_extractor_class": SmallEyes, "net_arch": [64, 64], "share_features_extractor": True},
        device="cpu",
    )
    model.learn(steps, callback=progress)
    # The median: on a shared machine the mean tells more about the neighbours than about the buffer.
    seconds_per_step = float(np.median(np.diff(progress.moments[RANDOM_STEPS:])))
    weights = digest(model.policy)

    # SB3's own loop fills the buffer: no gradient step happens before `learning_starts`, only random actions.
    model.learning_starts = steps + transitions + 1
    progress.readings.clear()
    model.learn(transitions, callback=progress, reset_num_timesteps=False)
    return Result(
        buffer=buffer,
        bytes_per_transition=slope(progress.readings),
        peak_bytes=peak_bytes(),
        steps_per_second=1.0 / seconds_per_step,
        transitions=model.num_timesteps,
        weights_sha256=weights,
    )


def digest(policy: torch.nn.Module) -> str:
    """Return a fingerprint of every parameter's name and bytes."""
    fingerprint = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        fingerprint.update(name.encode())
        fingerprint.update(tensor.cpu().contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def slope(readings: list[tuple[int, int]]) -> float:
    """Return the bytes that one more transition costs: a line through the readings."""
    held, taken = np.array(readings, np.float64).T
    return float(np.polyfit(held, taken, 1)[0])


def emit(message: dict[str, Any]) -> None:
    """Write one JSON line and push it out at once: the parent's progress bar waits for it."""
    print(json.dumps(message), flush=True)  # noqa: T201 the line is this program's output


def main() -> None:
    """Read the command line, train, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m holdall.demo.training")
    parser.add_argument("--buffer", choices=sorted(BUFFERS), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--transitions", type=int, required=True)
    wanted = parser.parse_args()
    emit({"result": dataclasses.asdict(train(wanted.buffer, wanted.steps, wanted.transitions))})


if __name__ == "__main__":
    main()
