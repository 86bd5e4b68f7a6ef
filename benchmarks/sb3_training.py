"""DQN on an Atari game, before and after the lines that the guides for Stable-Baselines3 and rl-zoo change.

    python benchmarks/sb3_training.py [--steps 12000] [--rounds 3] [--json FILE]

Every side is a whole training in a process of its own, from one seed, on one thread; the sides take turns, round by
round. Memory is the high-water mark of the process's resident set, torch and all; below the table stands what the
process holds before it trains. Time is the process's CPU time, so that other work on the machine counts little.
Weights are compared byte by byte with those of the plain side. Needs ale-py, and rl_zoo3 for its sides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from process import commit, machine, versions

GAME = "SeaquestNoFrameskip-v4"
SETTINGS = {"buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 16, "batch_size": 32}
SIDES = {
    "SB3 DQN": ("sb3", "plain"),
    "with `holdall.sb3.ReplayBuffer`": ("sb3", "holdall"),
    "the same, `budget=None`": ("sb3", "compressed"),
    "`PrioritizedDQN`": ("sb3", "prioritized"),
    "rl-zoo DQN": ("zoo", "plain"),
    "with `--gym-packages holdall.zoo`": ("zoo", "holdall"),
}


def train(kind: str, steps: int, folder: Path) -> None:
    """Train one side with Stable-Baselines3 alone."""
    import ale_py  # noqa: PLC0415  each side imports what it needs, and no more
    import gymnasium as gym  # noqa: PLC0415
    from stable_baselines3 import DQN  # noqa: PLC0415
    from stable_baselines3.common.env_util import make_atari_env  # noqa: PLC0415
    from stable_baselines3.common.vec_env import VecFrameStack  # noqa: PLC0415

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env(GAME, seed=1), n_stack=4)
    chosen: dict[str, Any] = SETTINGS | {"seed": 1, "device": "cpu"}
    algorithm: Any = DQN
    if kind != "plain":
        from holdall.sb3 import PrioritizedDQN, ReplayBuffer  # noqa: PLC0415

        algorithm = PrioritizedDQN if kind == "prioritized" else DQN
        chosen |= {} if kind == "prioritized" else {"replay_buffer_class": ReplayBuffer}
        chosen |= {"replay_buffer_kwargs": {"budget": None}} if kind == "compressed" else {}
    model = algorithm("CnnPolicy", env, **chosen)
    model.learn(steps)
    model.save(folder / "model.zip")


def command(side: tuple[str, str], steps: int, folder: Path) -> list[str]:
    """Return the command that trains one side."""
    family, kind = side
    if family == "sb3":
        return [sys.executable, __file__, "--train", kind, "--steps", str(steps), "--folder", str(folder)]
    settings = [f"{name}:{value}" for name, value in SETTINGS.items()]
    given = [] if kind == "plain" else ["--gym-packages", "holdall.zoo"]
    run = [sys.executable, "-m", "rl_zoo3.train", "--algo", "dqn", "--env", GAME, "--seed", "1", "--device", "cpu"]
    return [*run, "-n", str(steps), "-f", str(folder), "--eval-freq", "-1", *given, "-params", *settings]


def measure(side: tuple[str, str], steps: int) -> dict[str, Any]:
    """Train one side, and read what its process took."""
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = subprocess.Popen(
            command(side, steps, folder), env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(started.pid, 0)
        if status:
            raise SystemExit(f"{side} ended with status {status}; run {' '.join(command(side, steps, folder))}")
        with zipfile.ZipFile(next(folder.rglob("*.zip"))) as model:
            weights = hashlib.sha256(model.read("policy.pth")).hexdigest()
    return {"peak_bytes": used.ru_maxrss * 1024, "cpu_s": used.ru_utime + used.ru_stime, "weights": weights}


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians, and whether weights are those of the plain side of the family."""
    found = {}
    for name, measured in rounds.items():
        plain = next(other for other, side in SIDES.items() if side == (SIDES[name][0], "plain"))
        found[name] = {
            "peak_mib": round(statistics.median(one["peak_bytes"] for one in measured) / 2**20),
            "cpu_s": round(statistics.median(one["cpu_s"] for one in measured), 1),
            "cpu_of_plain": round(
                statistics.median(
                    one["cpu_s"] / other["cpu_s"] for one, other in zip(measured, rounds[plain], strict=True)
                ),
                2,
            ),
            "same_weights": {one["weights"] for one in measured} == {one["weights"] for one in rounds[plain]},
        }
    return found


def main() -> None:
    """Measure all sides, or train one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", choices=["plain", "holdall", "compressed", "prioritized"])
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train, asked.steps, asked.folder)
        return
    idle = measure(SIDES["SB3 DQN"], 1)["peak_bytes"]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for number in range(asked.rounds):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        for name in order:
            rounds[name].append(measure(SIDES[name], asked.steps))
            print(f"round {number + 1}: {name}: {rounds[name][-1]['peak_bytes'] >> 20} MiB", file=sys.stderr)
    found = summary(rounds)
    print("| | peak memory | CPU time, of the plain side's | weights |\n|---|---|---|---|")
    for name, row in found.items():
        weights = "the same" if row["same_weights"] else "its own"
        print(f"| {name} | {row['peak_mib']:,} MiB | {row['cpu_of_plain']} | {weights} |")
    print(f"\nBefore training the process holds {idle / 2**20:,.0f} MiB.")
    result = {"steps": asked.steps, "rounds": asked.rounds, "before_training_mib": round(idle / 2**20), "sides": found}
    result |= {"machine": machine(), "versions": versions("rl_zoo3"), "commit": commit()}
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
