"""Never "fits" for a run that then dies: plans and runs inside one control group with a real limit.

The limit is a memory control group of its own (version 1 or 2) below the one that the test runs in. The kernel kills a
process that goes beyond it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("stable_baselines3")

from holdall.machine import list_control_groups

_PLANNER_BYTES = 128 * 2**20
"""Bytes of the process that plans, which is in the same group."""
RUNS: dict[str, dict[str, Any]] = {
    "replay": {"algo": "dqn", "obs": "600", "action": "discrete(4)", "capacity": 60_000},
    "rollout": {
        "algo": "ppo",
        "obs": "84x84x4:uint8",
        "action": "discrete(4)",
        "n_steps": 1024,
        "num_envs": 4,
        "batch_size": 256,
    },
    "activations": {"algo": "dqn", "obs": "84x84x4:uint8", "action": "discrete(4)", "capacity": 600, "batch_size": 512},
}
_RUN = """
import json, sys, warnings
warnings.simplefilter("ignore")
from holdall.tools.plan.stand_in import build_model, describe_run
run = describe_run(json.load(sys.stdin))
if "n_steps" in run.changes:
    model = build_model(run.arguments | {"n_steps": run.changes["n_steps"]})
    model.learn(3 * model.n_steps * model.n_envs)
else:
    capacity = run.changes["capacity"]
    model = build_model(run.arguments | {"capacity": capacity})
    model.learning_starts = capacity
    model.learn(capacity + 60)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a memory control group below this process's own, or skip."""
    found = next(iter(list_control_groups(Path("/proc"))), None)
    if found is None:
        pytest.skip("no memory control group is mounted")
    made = found[0] / f"holdall-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    for process in (made / "cgroup.procs").read_text().split():  # Processes of an interrupted test.
        os.kill(int(process), signal.SIGKILL)
        time.sleep(1.0)
    made.rmdir()


def _limit(group: Path, limit_bytes: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            try:
                (group / name).write_text(str(limit_bytes))
            except OSError as error:
                pytest.skip(f"the limit cannot be set: {error}")
            return
    pytest.skip("the memory controller is not handed down to new groups")


def _inside(group: Path, command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", join, str(group), *command], input=text, capture_output=True, text=True, timeout=600, check=False
    )


def _flags(settings: dict[str, Any]) -> list[str]:
    return [flag for name, value in settings.items() for flag in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_said_to_fit_lives_and_one_far_beyond_the_limit_dies(name: str, group: Path) -> None:
    settings = RUNS[name]
    plan = [sys.executable, "-m", "holdall", "plan", *_flags(settings), "--json"]
    free = json.loads(_inside(group, plan).stdout)
    need = free["checks"][0]["need_bytes"]
    most = free["checks"][0]["most_bytes"]
    ends = {}
    for limit in (int(0.7 * need), (need + most) // 2, most + _PLANNER_BYTES):
        _limit(group, limit)
        verdict = json.loads(_inside(group, plan).stdout)["verdict"]
        done = _inside(group, [sys.executable, "-c", _RUN], json.dumps(settings))
        ends[limit] = (verdict, done.returncode)
        assert verdict != "fits" or done.returncode == 0, (limit, done.stderr[-500:])
    verdicts = [verdict for verdict, _ in ends.values()]
    assert verdicts[0] == "does not fit"
    assert verdicts[-1] == "fits"
    codes = [code for _, code in ends.values()]
    assert codes[0] != 0, "the limit is not real"
    assert codes[-1] == 0
