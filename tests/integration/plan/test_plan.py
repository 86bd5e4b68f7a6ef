"""`holdall plan` as people call it: real processes, real libraries, real environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("stable_baselines3")

import holdall.plan
import holdall.tools.plan.config
from holdall.cli import app
from holdall.errors import ArgumentError
from holdall.tools.bench import module_command
from holdall.tools.plan import planner
from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.environments import ProbeError, run_probe
from holdall.tools.plan.measure_memory import need_from_spaces
from holdall.tools.plan.phases import HoldallNeed


def _plan(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "holdall", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, done.stdout, done.stderr


ROVER = ("--obs", "image=84x84x3:uint8", "--obs", "vector=31:float32", "--action", "8", "--algo", "sac")


def test_flags_give_a_verdict_in_json_and_on_a_page(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    code, out, _ = _plan(
        *ROVER, "--capacity", "1e6", "--num-envs", "4", "--budget", "8GiB", "--json", "--html", str(html)
    )
    found = json.loads(out)
    assert (code, found["verdict"]) == (2, "does not fit")
    assert found["buffer"]["bytes"] == 1_000_000 * 42_628
    assert {part["how"] for phase in found["phases"] for part in phase["parts"]} >= {"exact", "measured", "traced"}
    assert found["limits"][0]["free_bytes"] <= 8 * 2**30
    assert 0 < found["largest"]["sb3_size"] < found["largest"]["holdall_size"] < 1_000_000
    assert "<svg" in html.read_text()


def test_exit_codes_are_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--obs", "4", "--action", "discrete(2)", "--algo", "dqn", "--capacity", "1000", "--no-networks")
    monkeypatch.setattr(planner, "run_probe", _Remembered())

    def plan(*arguments: str) -> tuple[int, str]:
        told = CliRunner().invoke(app, ["plan", *small, *arguments])
        return told.exit_code, told.stdout

    code, out = plan("--json")
    assert (code, json.loads(out)["verdict"]) == (0, "fits")
    need = json.loads(out)["checks"][0]
    code, out = plan("--budget", str((need["need_bytes"] + need["most_bytes"]) // 2))
    assert code == 1
    assert "tight" in out
    assert plan("--budget", "1MiB")[0] == 2


class _Remembered:
    """Measures once what is asked for several times: only the budget differs."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] = {}

    def __call__(self, task: str, **arguments: Any) -> dict[str, Any]:
        key = f"{task} {arguments}"
        if key not in self._answers:
            self._answers[key] = run_probe(task, **arguments)
        return self._answers[key]


def test_a_configuration_that_cannot_be_read_is_one_line_and_no_verdict() -> None:
    code, out, err = _plan("--obs", "4", "--action", "2", "--algo", "dqn")
    assert (code, out) == (64, "")
    assert err.startswith("holdall: action")
    assert err.count("\n") == 1


def test_an_environment_is_made_in_another_process_and_probed(tmp_path: Path) -> None:
    asked = ("--env", "CartPole-v1", "--algo", "dqn", "--capacity", "5000", "--probe", "600", "--no-networks")
    code, out, _ = _plan(*asked, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["spec"]["observation"]["shape"] == [4]
    assert found["holdall"]["steps"] == 600
    assert found["holdall"]["compressed_bytes"] is not None
    assert found["phases"][-1]["name"] == "load"


def test_an_environment_that_is_not_there_is_named() -> None:
    with pytest.raises(ArgumentError, match="NoSuchGame-v9"):
        spec_from_settings({"algo": "dqn", "env": "NoSuchGame-v9"})


def test_an_environment_that_kills_its_process_is_an_error_and_not_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\nclass Env:\n    def __init__(self):\n        os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(ProbeError, match="signal 9"):
        run_probe("environment", env_id="deadly:Env", wrapper="", with_torch=False)


def test_a_live_model_is_planned_as_it_was_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries take, which a process of its own would measure, is made up here."""
    from stable_baselines3 import DQN

    from holdall.sb3 import ReplayBuffer

    made_up = {"imported": 300 * 2**20, "imported_anonymous": 100 * 2**20}
    monkeypatch.setattr(planner, "run_probe", lambda task, **_: {"baseline": made_up}[task])
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=12_345, policy_kwargs={"net_arch": [32]}, device="cpu")
    plan = holdall.plan.model(model, networks=False)
    assert model.replay_buffer is not None
    arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    real = sum(getattr(model.replay_buffer, name).nbytes for name in arrays)
    assert plan.spec.layout().nbytes == real
    assert (plan.spec.policy_name, dict(plan.spec.policy_kwargs)) == ("MlpPolicy", {"net_arch": [32]})
    ours = DQN("MlpPolicy", "CartPole-v1", buffer_size=500, replay_buffer_class=ReplayBuffer, device="cpu")
    assert holdall.tools.plan.config.spec_from_model(ours).uses_holdall


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentError, match="dict"):
        holdall.plan.model({})


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_made_up_steps_are_an_upper_bound_that_knows_of_stacks(frame_stack: int) -> None:
    spec, _ = spec_from_settings(
        {"algo": "dqn", "obs": "84x84x1:uint8", "action": "discrete(6)", "frame_stack": frame_stack}
    )
    found = need_from_spaces(spec)
    assert found.compressed_bytes is None
    assert found.raw_bytes == pytest.approx(84 * 84, rel=0.02)  # a frame a step, whatever the stack


def test_the_need_is_the_smaller_of_raw_and_compressed() -> None:
    found = HoldallNeed(7000.0, 200.0, 0, 2000, {}, sealing_bytes=5, segment_bytes=16 * 2**20)
    assert found.need(1_000_000) == 200 * 1_000_000 + 16 * 2**20 + 5
    assert found.most(1_000_000) > found.need(1_000_000) + 2 * 16 * 2**20
    assert found.need(10) <= found.raw_need(10)
    assert HoldallNeed(100.0, None, 5, 0, {}).need(10) == 1005


def test_the_upper_bound_allows_for_the_worse_of_the_codecs_that_were_chosen() -> None:
    found = HoldallNeed(7000.0, 200.0, 0, 2000, {}, 5, 2**24, most_compressed_bytes=900.0)
    assert found.need(1_000_000) < 220e6
    assert found.most(1_000_000) > 900e6


def test_nothing_of_the_working_directory_runs_but_the_environment_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `random.py` of the user's own stands in the way of nothing, and a stranger's is not run."""
    for name in ("random", "gymnasium", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "their_robot.py").write_text(
        "from gymnasium.envs.classic_control import PendulumEnv\nclass Robot(PendulumEnv):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    found = run_probe("environment", env_id="their_robot:Robot", wrapper="", with_torch=False)
    assert found["observation"]["shape"] == [3]
    assert "-P" in module_command("tools.bench.training")
