"""Compare what `holdall plan` predicts with real training runs.

    python benchmarks/plan.py [NAME ...]   measure all configurations, or those that are named
    python benchmarks/plan.py --docs       measure nothing, and write the table of docs/benchmarks.md

In:  configurations of Stable-Baselines3 on real environments. Each is planned, and then run in a process of its own
until its buffer is full and updates were made.
Out: benchmarks/results/plan.json, a row for each configuration. The measured peak is the resident peak of the trainer
(VmHWM) plus the unique bytes of its worker processes. Rows of configurations that are not named stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
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

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
RESULTS = HERE / "results" / "plan.json"
MIB = 2**20
BAR = 0.05
"""The largest error of a planned peak, as a share of the measured peak."""
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


def compare(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Plan one configuration, run it, and return both peaks."""
    from process import commit  # noqa: PLC0415  A training must not import what it does not use.

    plan = make_plan(name, settings)
    command = [sys.executable, __file__, "--run", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {
        "name": name,
        "settings": settings,
        "buffer_bytes": plan.needs.experience.allocated_bytes,
        "planned_bytes": plan.needs.need_bytes(plan.needs.holdall),
        "most_bytes": plan.needs.most_bytes(plan.needs.holdall),
        "measured_bytes": measured["peak_bytes"],
        "transitions_held": measured["transitions_held"],
        "parts": [[part.name, part.nbytes, str(part.source)] for part in plan.needs.parts(plan.needs.holdall)],
        "commit": commit(),
    }


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
        transitions = run.changes["buffer_size"]
        model = build_model(run.arguments | {"capacity": transitions})
        fill(model, transitions)
    children = psutil.Process().children(recursive=True)
    peak = peak_bytes() + sum(held_bytes(child.pid).unique for child in children)
    return {"peak_bytes": peak, "transitions_held": transitions}


def fill(model: Any, capacity: int) -> None:
    """Fill a replay buffer with random steps, and make `UPDATES` updates."""
    model.learning_starts = capacity
    model.learn(capacity + UPDATES * model.n_envs)


def count_off(row: dict[str, Any]) -> float:
    """Return the error of a planned peak, as a share of the measured one."""
    return float(row["planned_bytes"] / row["measured_bytes"] - 1)


def write_table(rows: list[dict[str, Any]]) -> str:
    """Return the table and its summary as Markdown."""
    lines = ["| run | buffer | planned | at most | measured | off by | bound holds |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sizes = " | ".join(
            f"{row[key] / MIB:,.0f}" for key in ("buffer_bytes", "planned_bytes", "most_bytes", "measured_bytes")
        )
        holds = "yes" if row["most_bytes"] >= row["measured_bytes"] else "NO"
        lines.append(f"| {row['name']} | {sizes} | {count_off(row):+.1%} | {holds} |")
    near = sum(abs(count_off(row)) <= BAR for row in rows)
    bounded = sum(row["most_bytes"] >= row["measured_bytes"] for row in rows)
    lines.append("")
    lines.append(
        f"{near} of {len(rows)} plans are within {100 * BAR:.0f} % of the measured peak. "
        f"In {bounded} of {len(rows)} runs, the measured peak is below the bound."
    )
    return "\n".join(lines)


def write_page(text: str, results: dict[str, Any]) -> str:
    """Return the page with the table of the results."""
    table = write_table(results["runs"])
    missing = [name for name in RUNS if name not in {row["name"] for row in results["runs"]}]
    if missing:
        table = f"{table}\nNot measured with this version: {'; '.join(missing)}."
    new = f"<!-- plan -->\n{table}\n<!-- end of plan -->"
    return re.sub(r"<!-- plan -->.*?<!-- end of plan -->", new, text, flags=re.DOTALL)


def read_results() -> dict[str, Any]:
    """Return what was measured before."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": []}


def main() -> None:
    """Measure all configurations, or those that are named, or write the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(train(json.loads(given.run))))
    elif given.script:
        run_script(json.loads(given.script))
    elif given.docs:
        PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
    else:
        from process import machine, versions  # noqa: PLC0415  As above.

        for name in given.names or RUNS:
            row = compare(name, RUNS[name])
            print(write_table([row]).splitlines()[2], flush=True)
            rows = {one["name"]: one for one in read_results()["runs"]} | {name: row}
            ordered = [rows[one] for one in RUNS if one in rows]
            results = {"machine": machine(), "versions": versions(), "runs": ordered}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
