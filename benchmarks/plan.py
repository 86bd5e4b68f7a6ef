"""Compare what `holdall plan` predicts with real training runs: `python benchmarks/plan.py [--docs] [NAME ...]`.

In:  configurations of Stable-Baselines3 on real environments. Each is planned, and then run in a process of its own
until its buffer is full and updates were made.
Out: a table, on stdout and with --docs in docs/plan.md. The measured peak is the resident peak of the trainer (VmHWM)
plus the unique bytes of its worker processes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from holdall.machine import held_bytes, peak_bytes
from holdall.tools.plan.planner import plan_settings
from holdall.tools.plan.stand_in import build_model, describe_run

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
MIB = 2**20
UPDATES = 40
CART = "CartPole-v1"
PENDULUM = "Pendulum-v1"
CAMERA = "holdall.tools.demo:CameraRover"
RUNS: dict[str, dict[str, Any]] = {
    "DQN, MLP": {"algo": "dqn", "env": CART, "capacity": 50_000},
    "SAC, MLP": {"algo": "sac", "env": PENDULUM, "capacity": 20_000},
    "SAC, camera": {"algo": "sac", "env": CAMERA, "capacity": 12_000, "batch_size": 64},
    "SAC, camera, 2 processes": {
        "algo": "sac",
        "env": CAMERA,
        "capacity": 12_000,
        "batch_size": 64,
        "num_envs": 2,
        "vec_env": "subproc",
    },
    "TD3, camera": {"algo": "td3", "env": CAMERA, "capacity": 12_000, "batch_size": 64},
    "TD3, deep MLP": {
        "algo": "td3",
        "env": PENDULUM,
        "capacity": 20_000,
        "policy_kwargs": {"net_arch": [1024, 1024, 1024, 1024]},
    },
    "DDPG, MLP, 4 envs": {"algo": "ddpg", "env": PENDULUM, "capacity": 40_000, "num_envs": 4},
    "PPO, MLP, 4 envs": {"algo": "ppo", "env": CART, "num_envs": 4},
    "PPO, camera, 4 envs": {"algo": "ppo", "env": CAMERA, "n_steps": 2048, "num_envs": 4},
    "A2C, MLP, 4 processes": {
        "algo": "a2c",
        "env": CART,
        "num_envs": 4,
        "vec_env": "subproc",
        "start_method": "spawn",
    },
}


def compare(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Plan one configuration, run it, and return both peaks."""
    plan = plan_settings(settings | {"name": name})
    command = [sys.executable, __file__, "--run", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        "name": name,
        "buffer": plan.needs.experience.allocated_bytes,
        "planned": plan.needs.need_bytes(None),
        "most": plan.needs.most_bytes(None),
        "measured": json.loads(done.stdout.splitlines()[-1]),
    }


def train(settings: dict[str, Any]) -> int:
    """Fill the run's buffer, make updates, and return the peak."""
    run = describe_run(settings)
    sizes = (
        {"n_steps": run.changes["n_steps"]} if "n_steps" in run.changes else {"capacity": run.changes["buffer_size"]}
    )
    model = build_model(run.arguments | sizes)
    if "n_steps" in sizes:
        model.n_epochs = 1
        model.learn(3 * model.n_steps * model.n_envs)
    else:
        model.learning_starts = sizes["capacity"]
        model.learn(sizes["capacity"] + UPDATES * model.n_envs)
    children = psutil.Process().children(recursive=True)
    return peak_bytes() + sum(held_bytes(child.pid).unique for child in children)


def write_table(found: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = ["| run | buffer | planned | at most | measured | off by | bound holds |", "|---|---|---|---|---|---|---|"]
    for one in found:
        sizes = " | ".join(f"{one[key] / MIB:,.0f}" for key in ("buffer", "planned", "most", "measured"))
        off = one["planned"] / one["measured"] - 1
        holds = "yes" if one["most"] >= one["measured"] else "NO"
        lines.append(f"| {one['name']} | {sizes} | {off:+.1%} | {holds} |")
    return "\n".join(lines)


def main() -> None:
    """Run all configurations, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--run")
    given = parser.parse_args()
    if given.run:
        print(train(json.loads(given.run)))
        return
    found = []
    for name in given.names or RUNS:
        found.append(compare(name, RUNS[name]))
        print(write_table(found[-1:]).splitlines()[-1], flush=True)
    if given.docs:
        text = PAGE.read_text(encoding="utf-8")
        new = f"<!-- runs: python benchmarks/plan.py --docs -->\n{write_table(found)}\n<!-- end of runs -->"
        PAGE.write_text(re.sub(r"<!-- runs:.*?<!-- end of runs -->", new, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
