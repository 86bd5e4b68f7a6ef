"""PPO on an Atari game, with Stable-Baselines3's rollout buffer and with holdall's: one curve, two footprints.

    python benchmarks/rollout_training.py [--steps 100000] [--game BreakoutNoFrameskip-v4] [--json FILE]

Each side trains in a process of its own, from one seed, on the same number of threads. Compared are all values that
Stable-Baselines3 logs after every rollout (rewards, losses, explained variance), and every byte of the weights.
Memory is the process's unique set size (USS) at the end of each rollout, and the high-water mark of its resident set.
Exit status 1 if a bit differs or holdall takes more. Some 20 minutes a side on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import torch
from process import commit, emit, machine, versions
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from holdall.machine import held_bytes
from holdall.sb3 import RolloutBuffer

MIB = 2**20
LANES, ROLLOUT_STEPS, BATCH, EPOCHS, SEED, THREADS = 4, 1_024, 256, 2, 0, 2


class Curve(BaseCallback):
    """Takes down what was logged and held, rollout by rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, str]] = []
        self.held: list[int] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        logged = self.model.logger.name_to_value  # of the update before
        row = {name: repr(value) for name, value in logged.items() if not name.startswith("time/")}
        episodes = [(info["r"], info["l"]) for info in self.model.ep_info_buffer or ()]
        self.rows.append({**row, "episodes": repr(episodes), "step": repr(self.num_timesteps)})
        self.held.append(held_bytes().unique)


def train(side: str, steps: int, game: str) -> dict[str, Any]:
    """Train one side and return its curve, a digest of its weights and its memory."""
    torch.set_num_threads(THREADS)
    gym.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(game, n_envs=LANES, seed=SEED), n_stack=4)
    buffer_class = {"sb3": None, "holdall": RolloutBuffer}[side]
    model = PPO(
        "CnnPolicy", envs, n_steps=ROLLOUT_STEPS, batch_size=BATCH, n_epochs=EPOCHS, learning_rate=2.5e-4,
        clip_range=0.1, ent_coef=0.01, seed=SEED, device="cpu", rollout_buffer_class=buffer_class,
    )  # fmt: skip
    curve, start = Curve(), time.perf_counter()
    model.learn(steps, callback=curve)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.policy.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return {
        "curve": curve.rows,
        "weights_sha256": digest.hexdigest(),
        "seconds": time.perf_counter() - start,
        "uss_after_rollout_mib": max(curve.held) / MIB,
        "peak_resident_mib": peak_kib / 1024,
    }


def main() -> int:
    """Train both sides and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--game", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--side", choices=("sb3", "holdall"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        emit(train(arguments.side, arguments.steps, arguments.game))
        return 0
    sides: dict[str, Any] = {}
    for side in ("sb3", "holdall"):
        command = [sys.executable, __file__, "--side", side, "--steps", str(arguments.steps), "--game", arguments.game]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sides[side] = json.loads(done.stdout.splitlines()[-1])
        told = {name: value for name, value in sides[side].items() if name != "curve"}
        print(f"{side}: {json.dumps(told)}", flush=True)
    plain, ours = sides["sb3"], sides["holdall"]
    result = {
        "benchmark": "rollout_training", "game": arguments.game, "steps": arguments.steps, "sides": sides,
        "same_curve": plain["curve"] == ours["curve"],
        "same_weights": plain["weights_sha256"] == ours["weights_sha256"],
        "less_memory_after_rollout_mib": plain["uss_after_rollout_mib"] - ours["uss_after_rollout_mib"],
        "less_peak_mib": plain["peak_resident_mib"] - ours["peak_resident_mib"],
        "commit": commit(), "versions": versions(), "machine": machine(),
    }  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    names = ("same_curve", "same_weights", "less_memory_after_rollout_mib", "less_peak_mib")
    print(f"{len(plain['curve'])} rollouts: " + ", ".join(f"{name} {result[name]}" for name in names))
    met = result["same_curve"] and result["same_weights"]
    return 0 if met and result["less_memory_after_rollout_mib"] > 0 and result["less_peak_mib"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
