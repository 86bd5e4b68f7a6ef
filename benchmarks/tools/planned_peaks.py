"""Compare what `holdall plan` predicts with real training runs.

    python benchmarks/tools/planned_peaks.py ['SAC, camera' ...] [--json FILE]

Each configuration trains a model of Stable-Baselines3 on a real environment. It is planned, and then run in a process
of its own until its buffer is full and updates were made. The measured peak is the resident peak of the trainer (VmHWM)
plus the unique bytes of its worker processes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from holdall.machine import held_bytes, peak_bytes
from holdall.tools.plan.environments import make_env
from holdall.tools.plan.planner import Plan, plan_command, plan_settings
from holdall.tools.plan.stand_in import build_model, describe_run

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
    "SAC, camera, holdall, 64 MiB and disk": {
        "algo": "sac",
        "env": CAMERA,
        "capacity": 12_000,
        "batch_size": 64,
        "budget": "64MiB",
        "has_disk": True,
    },
    "TD3, camera, holdall, 128 MiB": {
        "algo": "td3",
        "env": CAMERA,
        "capacity": 12_000,
        "batch_size": 64,
        "budget": "128MiB",
    },
}
"""The settings of each run. A run with a `budget` uses holdall's buffer: its script is planned, not a stand-in."""


def measure_all(names: list[str], file: Path | None) -> None:
    """Compare the plan of each configuration with a run of it, and store the figures in `file`."""
    # A training must not import what it does not use, so these modules are not imported above.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from results import Figure, describe_run, show, store  # noqa: PLC0415

    this_run = describe_run({name: RUNS[name] for name in names})
    for name in names:
        plan = make_plan(name, RUNS[name])
        measured = run_training(RUNS[name])
        peak_mib = measured["peak_bytes"] / MIB
        planned_mib = plan.needs.need_bytes() / MIB
        most_mib = plan.needs.most_bytes() / MIB
        figures = [
            Figure(name, "buffer", "MiB", plan.needs.experience.allocated_bytes / MIB),
            Figure(name, "planned", "MiB", planned_mib),
            Figure(name, "at most", "MiB", most_mib),
            Figure(name, "measured", "MiB", peak_mib),
            Figure(name, "off by", "%", 100 * (planned_mib / peak_mib - 1), "at most 5 %"),
            Figure(name, "bound holds", "", "yes" if most_mib >= peak_mib else "no", "yes"),
            Figure(name, "transitions held", "", measured["transitions_held"]),
        ]
        show(figures)
        if file is not None:
            store(file, figures, this_run)


def run_training(settings: dict[str, Any]) -> dict[str, int]:
    """Return the peak of one configuration, which trains in a process of its own."""
    command = [sys.executable, __file__, "--run", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def make_plan(name: str, settings: dict[str, Any]) -> Plan:
    """Plan one configuration."""
    if "budget" in settings:
        return plan_command([sys.executable, __file__, "--script", json.dumps(settings)])
    return plan_settings(settings | {"name": name})


def build_holdall_model(settings: dict[str, Any], folder: str) -> Any:
    """Return a model with holdall's buffer and a budget."""
    kind = getattr(importlib.import_module("stable_baselines3"), settings["algo"].upper())
    tiers = {"budget": settings["budget"]}
    if settings.get("has_disk"):
        tiers["spill_dir"] = folder
    return kind(
        "MultiInputPolicy",
        make_env(settings["env"], ""),
        buffer_size=settings["capacity"],
        batch_size=settings["batch_size"],
        replay_buffer_class=importlib.import_module("holdall.sb3").ReplayBuffer,
        replay_buffer_kwargs=tiers,
    )


def run_script(settings: dict[str, Any]) -> None:
    """Train with holdall's buffer, as a script that plan stops would."""
    with tempfile.TemporaryDirectory() as folder:
        build_holdall_model(settings, folder).learn(10**9)


def train(settings: dict[str, Any]) -> dict[str, int]:
    """Fill the run's buffer, make updates, and return the peak."""
    if "budget" in settings:
        with tempfile.TemporaryDirectory() as folder:
            model = build_holdall_model(settings, folder)
            fill(model, settings["capacity"])
            return {"peak_bytes": peak_bytes(), "transitions_held": model.replay_buffer.size()}
    run = describe_run(settings)
    steps = run.changes.get("n_steps")
    if steps is not None:
        model = build_model(run.arguments | {"n_steps": steps})
        model.n_epochs = 1
        model.learn(3 * model.n_steps * model.n_envs)
        transitions = model.n_steps * model.n_envs
    else:
        transitions = run.changes["capacity"]
        model = build_model(run.arguments | {"capacity": transitions})
        fill(model, transitions)
    children = psutil.Process().children(recursive=True)
    peak = peak_bytes() + sum(held_bytes(child.pid).unique for child in children)
    return {"peak_bytes": peak, "transitions_held": transitions}


def fill(model: Any, capacity: int) -> None:
    """Fill a replay buffer with random steps, and make `UPDATES` updates."""
    model.learning_starts = capacity
    model.learn(capacity + UPDATES * model.n_envs)


def main() -> None:
    """Measure all configurations, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations to measure; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(train(json.loads(given.run))))
        return
    if given.script:
        run_script(json.loads(given.script))
        return
    names = given.names or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"there is no configuration {', '.join(sorted(unknown))}")
    measure_all(names, given.json)


if __name__ == "__main__":
    main()
