"""Predicted against measured, and how long predicting takes: `python benchmarks/plan.py --docs`.

In:  configurations of Stable-Baselines3 on real environments. Each is planned, without and with a probe, and then run
in a process of its own until its buffer is full and updates were made.
Out: the tables of docs/plan.md, on stdout and with --docs in the page. Every run is a line of
benchmarks/results/plan.jsonl as soon as it is done; a table shows the last line of each, and --missing makes only those
without one.
The measured peak is the resident peak of the trainer (VmHWM) and the unique bytes of its environments' processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plan_times import time_all
from process import commit, machine, versions
from readme import MARKERS

from holdall.machine import held_bytes
from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.environments import run_probe
from holdall.tools.plan.phases import HoldallNeed
from holdall.tools.plan.planner import Plan, make_plan
from holdall.tools.plan.spec import Spec

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
RESULTS = Path(__file__).parent / "results" / "plan.jsonl"
Table = tuple[list[dict[str, Any]], list[str], bool]
"""Results, the lines that show them, and whether all bars are met."""
_PROBE = 2_000
_PAUSE = 250
_CART, _PENDULUM, _CAMERA = "CartPole-v1", "Pendulum-v1", "holdall.tools.demo:CameraRover"
_ATARI = {"env": "ale_py:SeaquestNoFrameskip-v4", "wrapper": "atari", "frame_stack": 4}
_BREAKOUT = _ATARI | {"env": "ale_py:BreakoutNoFrameskip-v4"}

RUNS: dict[str, dict[str, Any]] = {
    "DQN, MLP, 1 env": {"algo": "dqn", "env": _CART, "capacity": 50_000},
    "DQN, CNN, 1 env": {"algo": "dqn", "capacity": 20_000, **_ATARI},
    "DQN, CNN, 4 envs, Dummy": {"algo": "dqn", "capacity": 20_000, "num_envs": 4, "batch_size": 256, **_BREAKOUT},
    "SAC, MLP, 1 env": {"algo": "sac", "env": _PENDULUM, "capacity": 20_000},
    "SAC, MultiInput, 1 env": {"algo": "sac", "env": _CAMERA, "capacity": 20_000},
    "SAC, MultiInput, 4 envs, Subproc forkserver": {
        "algo": "sac", "env": _CAMERA, "capacity": 20_000, "num_envs": 4, "vec_env": "subproc",
    },
    "TD3, MLP, 4 envs, Dummy": {"algo": "td3", "env": _PENDULUM, "capacity": 40_000, "num_envs": 4},
    "TD3, MultiInput, 1 env": {"algo": "td3", "env": _CAMERA, "capacity": 20_000, "batch_size": 64},
    "DDPG, MLP, 1 env": {"algo": "ddpg", "env": _PENDULUM, "capacity": 20_000},
    "PPO, MLP, 4 envs, Dummy": {"algo": "ppo", "env": _CART, "num_envs": 4},
    "PPO, CNN, 4 envs, Dummy": {"algo": "ppo", "n_steps": 512, "num_envs": 4, "batch_size": 256, **_ATARI},
    "PPO, CNN, 4 envs, Subproc fork": {
        "algo": "ppo", "n_steps": 128, "num_envs": 4, "batch_size": 256, "vec_env": "subproc", "start_method": "fork",
        **_BREAKOUT,
    },
    "PPO, MultiInput, 1 env": {"algo": "ppo", "env": _CAMERA, "n_steps": 2048},
    "PPO, MultiInput, 4 envs, Dummy": {"algo": "ppo", "env": _CAMERA, "n_steps": 4096, "num_envs": 4},
    "A2C, MLP, 4 envs, Subproc spawn": {
        "algo": "a2c", "env": _CART, "num_envs": 4, "vec_env": "subproc", "start_method": "spawn",
    },
    "A2C, CNN, 4 envs, Dummy": {"algo": "a2c", "n_steps": 64, "num_envs": 4, **_ATARI},
}  # fmt: skip
FRESH: dict[str, dict[str, Any]] = {
    "DQN, CNN, batch 128, 1 env": {"algo": "dqn", "capacity": 12_000, "batch_size": 128, **_BREAKOUT},
    "QRDQN, CNN, 1 env": {"algo": "qrdqn", "capacity": 8_000, **_ATARI},
    "TQC, MLP, 1 env": {"algo": "tqc", "env": _PENDULUM, "capacity": 30_000},
    "SAC, large MLP, 1 env": {
        "algo": "sac", "env": _PENDULUM, "capacity": 20_000, "batch_size": 512,
        "policy_kwargs": {"net_arch": [2048, 2048]},
    },
    "TD3, deep MLP, 1 env": {
        "algo": "td3", "env": _PENDULUM, "capacity": 20_000, "policy_kwargs": {"net_arch": [1024, 1024, 1024, 1024]},
    },
    "SAC, MultiInput, 2 envs, Dummy": {"algo": "sac", "env": _CAMERA, "capacity": 8_000, "num_envs": 2},
    "TD3, MultiInput, 2 envs, Subproc fork": {
        "algo": "td3", "env": _CAMERA, "capacity": 6_000, "num_envs": 2, "vec_env": "subproc", "start_method": "fork",
    },
    "PPO, CNN, batch 512, 2 envs, Dummy": {
        "algo": "ppo", "n_steps": 1024, "num_envs": 2, "batch_size": 512, **_BREAKOUT,
    },
    "PPO, MultiInput, 2 envs, Subproc spawn": {
        "algo": "ppo", "env": _CAMERA, "n_steps": 1024, "num_envs": 2, "vec_env": "subproc", "start_method": "spawn",
    },
    "A2C, CNN, 8 envs, Dummy": {"algo": "a2c", "n_steps": 128, "num_envs": 8, **_ATARI},
    "TRPO, MLP, 2 envs, Dummy": {"algo": "trpo", "env": _CART, "num_envs": 2},
}  # fmt: skip
"""Configurations that nothing was adjusted to."""
COMPARED = {"runs": RUNS, "fresh": FRESH}
_BAR = 0.05
"""How far a planned peak may be off."""


def compare(name: str, settings: dict[str, Any], probe_steps: int) -> dict[str, Any]:
    """Plan one configuration twice, run it, and put the figures side by side."""
    spec, environment = spec_from_settings(settings | {"name": name})
    plain = make_plan(spec, environment=environment)
    probed = make_plan(spec, environment=environment, probe_steps=probe_steps)
    command = [sys.executable, str(Path(__file__).with_name("plan_run.py"))]
    done = subprocess.run(command, input=json.dumps(spec.as_dict()), capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {
        "name": name,
        "settings": settings,
        "buffer_bytes": spec.layout().nbytes,
        "planned_bytes": _peak(plain),
        "most_bytes": plain.peak.most_bytes,
        "probed_bytes": _peak(probed),
        **measured,
    }


def _peak(plan: Plan) -> int:
    return max(phase.nbytes for phase in plan.phases if phase.happens)


HELD: dict[str, dict[str, Any]] = {
    "CartPole, 1 env": {"algo": "dqn", "env": _CART},
    "Pendulum, 4 envs": {"algo": "sac", "env": _PENDULUM, "num_envs": 4},
    "camera rover, 1 env": {"algo": "sac", "env": _CAMERA},
    "Seaquest, stack of 4, 1 env": {"algo": "dqn", **_ATARI},
}
_HELD = 100_000
_HELD_BAR = 0.1


def hold(spec: Spec, prefer: str | None) -> dict[str, Any]:
    """Add real transitions to a memory in this process, and read what it took at most."""
    from holdall.memory import ReplayMemory  # noqa: PLC0415
    from holdall.tools.plan.measure_memory import environment_steps, stored_space, wait_until_compressed  # noqa: PLC0415 no part of a run with SB3

    steps = environment_steps(spec)
    first = next(steps)  # the environments are there now
    before = held_bytes().anonymous
    memory = ReplayMemory(
        stored_space(spec.observation),
        spec.action,
        spec.capacity,
        spec.num_envs,
        **({"budget": "auto"} if prefer is None else {"budget": None, "prefer": prefer}),
    )
    most = 0
    for tick, step in enumerate(itertools.chain([first], itertools.islice(steps, spec.capacity // spec.num_envs - 1))):
        memory.add(*step)
        if tick * spec.num_envs % _PAUSE == 0:
            if len(memory) >= spec.batch:
                batch = memory.sample(spec.batch)  # it lives until the next one is there, as in a training loop
            most = max(most, held_bytes().anonymous - before)  # before the wait: what is being sealed counts
            wait_until_compressed(memory)  # training is slower than this loop, and the worker is not behind in it
    del batch
    return {"measured_bytes": most}


def compare_held(name: str, settings: dict[str, Any], prefer: str | None) -> dict[str, Any]:
    """Probe 2,000 steps, then hold 100,000."""
    spec, _ = spec_from_settings(settings | {"name": name, "capacity": _HELD})
    experience = HoldallNeed(**run_probe("experience", spec=spec, steps=_PROBE, prefer=prefer or "memory"))
    command = [sys.executable, __file__, "--hold", *([prefer] if prefer else [])]
    done = subprocess.run(command, input=json.dumps(spec.as_dict()), capture_output=True, text=True, check=True)
    planned = experience.raw_need(_HELD) if prefer is None else experience.need(_HELD)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {"name": name, "prefer": prefer, "sb3_bytes": spec.layout().nbytes, "planned_bytes": planned, **measured}


def held_table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Write the second table of docs/plan.md."""
    yield "| 100,000 transitions | SB3's buffer | holdall, planned | measured | off by |"
    yield "|---|---|---|---|---|"
    for result in results:
        sizes = [f"{result[key] / 2**20:,.1f}" for key in ("sb3_bytes", "planned_bytes", "measured_bytes")]
        kept = "raw" if result["prefer"] is None else f'compressed, prefer="{result["prefer"]}"'
        off = 100 * (result["planned_bytes"] / result["measured_bytes"] - 1)
        yield f"| {result['name']}, {kept} | {sizes[0]} | {sizes[1]} | {sizes[2]} | {off:+.1f} % |"


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Write the comparison as a table of docs/plan.md."""
    yield "| run | buffer | planned | off by | with `--probe` | off by | measured peak | upper bound holds |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        measured = result["measured_bytes"]
        sizes = [f"{result[key] / 2**20:,.0f}" for key in ("buffer_bytes", "planned_bytes", "probed_bytes")]
        off = [f"{100 * (result[key] / measured - 1):+.1f} %" for key in ("planned_bytes", "probed_bytes")]
        holds = "yes" if result["most_bytes"] >= measured else "**no**"
        yield (
            f"| {result['name']} | {sizes[0]} | {sizes[1]} | {off[0]} | {sizes[2]} | {off[1]} | "
            f"{measured / 2**20:,.0f} | {holds} |"
        )


def missed(result: dict[str, Any]) -> list[str]:
    """Name the bars that a result does not meet."""
    measured = result["measured_bytes"]
    far = [key for key in ("planned_bytes", "probed_bytes") if abs(result[key] / measured - 1) > _BAR]
    return far + (["most_bytes"] if result["most_bytes"] < measured else [])


def main() -> int:
    """Read the command line, compare, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", metavar="runs|fresh|held|times", help="tables to make; all of them by default"
    )
    parser.add_argument("--only", help="of runs, fresh and held, those whose name holds this text")
    parser.add_argument("--probe", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further run after so many")
    parser.add_argument("--missing", action="store_true", help="of runs and fresh, those that have no line yet")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/plan.md")
    parser.add_argument("--hold", nargs="?", const="", help="hold transitions of the one on stdin")
    wanted = parser.parse_args()
    if wanted.hold is not None:
        print(json.dumps(hold(Spec.from_dict(json.load(sys.stdin)), wanted.hold or None)))
        return 0
    makers = {
        "runs": lambda: compare_all("runs", wanted),
        "fresh": lambda: compare_all("fresh", wanted),
        "held": lambda: compare_all_held(wanted.only or ""),
        "times": time_all,
    }
    if unknown := set(wanted.what) - set(makers):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(makers)}")
    fine = True
    for name in wanted.what or makers:
        results, lines, met = makers[name]()
        fine &= met
        if name not in COMPARED:
            record({name: results})
        print("\n".join(lines))
        if wanted.docs:
            put(name, lines)
    return 0 if fine else 1


def compare_all(which: str, wanted: argparse.Namespace) -> Table:
    """Compare real runs with their plans, and show them beside those that were compared before."""
    end = time.monotonic() + 60 * wanted.minutes
    for name, settings in COMPARED[which].items():
        is_wanted = (wanted.only or "").lower() in name.lower() and time.monotonic() < end
        if is_wanted and not (wanted.missing and name in _known(which)):
            result = compare(name, settings, wanted.probe)
            record({which: [result]})
            print(list(table([result]))[-1], missed(result) or "", file=sys.stderr, flush=True)
    known = _known(which)
    results = [known[name] for name in COMPARED[which] if name in known]
    return results, list(table(results)), not any(missed(result) for result in results)


def _known(which: str) -> dict[str, dict[str, Any]]:
    """Return the last result of each run."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {result["name"]: result for line in lines for result in json.loads(line).get(which, ())}


def compare_all_held(only: str) -> Table:
    """Compare what holdall's memory needs."""
    results = []
    for name, settings in HELD.items():
        for prefer in (None, "memory"):
            if only.lower() in name.lower():
                results.append(compare_held(name, settings, prefer))
                print(list(held_table(results))[-1], file=sys.stderr, flush=True)
    off = [abs(result["planned_bytes"] / result["measured_bytes"] - 1) for result in results]
    return results, list(held_table(results)), max(off, default=0) <= _HELD_BAR


def put(name: str, lines: list[str]) -> None:
    """Put a table between its two markers in the page."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(MARKERS.format(name), re.DOTALL)
    changed, found = pattern.subn(lambda marks: marks[1] + "\n".join(lines) + "\n" + marks[2], text)
    if found != 1:
        sys.exit(f"{PAGE.name} has no place marked '{name}'")
    PAGE.write_text(changed, encoding="utf-8")


def record(found: dict[str, Any]) -> None:
    """Append results to the file, with where they come from."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"machine": machine(), "versions": versions(), "commit": commit()} | found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
