"""Every rule about runs finds the mistake of its bad example in a real model, and nothing in its good one.

The examples are those of the rules' docstrings. They run in this process until `learn` is about to start, which the
probe's own trigger detects. Examples without Stable-Baselines3 run as commands.
"""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common import base_class

from holdall.tools.lint.check import check_run
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Rule, RuleExample
from holdall.tools.lint.rules import RULES
from holdall.tools.probe.inspection import inspect_model
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot
from holdall.tools.probe.triggers import Learn
from holdall.units import parse_bytes

MACHINE = Machine(cores=8, ram_bytes=32 * 2**30, limit_bytes=32 * 2**30, limit_name="RAM")
MACHINE_NAMES = {field.name for field in fields(Machine)}


class Stopped(Exception):  # noqa: N818  This is not an error.
    """The trigger was reached: training is about to start."""

    def __init__(self, context: dict[str, Any]) -> None:
        super().__init__()
        self.context = context


class Stopper:
    """The side of the probe that the trigger calls."""

    def reach(self, trigger: str, words: str, **context: Any) -> None:
        raise Stopped(context)


@pytest.fixture(autouse=True)
def _stop_at_learn() -> Iterator[None]:
    algorithm = base_class.BaseAlgorithm
    before = dict(vars(algorithm))
    stopper: Any = Stopper()
    Learn("stable_baselines3.common.base_class").install(base_class, stopper)
    yield
    for name, attribute in before.items():
        if vars(algorithm)[name] is not attribute:
            setattr(algorithm, name, attribute)


def run(example: RuleExample, folder: Path) -> Snapshot:
    """Run an example until `learn`, or until its end if it has no model."""
    if "stable_baselines3" not in example.source:
        script = folder / "train.py"
        script.write_text(example.source)
        return probe([sys.executable, str(script)], 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Stopped) as stopped:
            exec(example.source, {"__name__": "__main__"})
    context = stopped.value.context
    model = context["model"]
    facts = inspect_model(model, context["total_timesteps"], context["callback"])
    model.get_env().close()
    return Snapshot("", "learn", **facts)


def check(example: RuleExample, folder: Path) -> list[Finding]:
    """Check an example, with the attributes of the machine and the model that its options name."""
    machine = MACHINE
    snapshot = run(example, folder)
    for name, text in example.machine.items():
        value: Any = text
        if name.endswith("_bytes"):
            value = parse_bytes(text)
        elif name == "cores":
            value = int(text)
        if name in MACHINE_NAMES:
            machine = replace(machine, **{name: value})
        elif name == "sb3_version":
            snapshot = replace(snapshot, versions={"stable_baselines3": text})
        else:
            changed = tuple(replace(model, **{name: value}) for model in snapshot.models)
            snapshot = replace(snapshot, models=changed)
    return check_run(snapshot, RULES, machine)


RUN_RULES = [rule for rule in RULES.values() if rule.needs_run]


@pytest.mark.parametrize("rule", RUN_RULES, ids=lambda rule: rule.code)
def test_a_bad_example_is_found(rule: Rule, tmp_path: Path) -> None:
    (example,) = rule.doc.bad
    findings = [finding for finding in check(example, tmp_path) if finding.rule == rule.code]
    assert len(findings) == 1
    assert findings[0].severity is rule.severity
    assert "\n" not in findings[0].message


@pytest.mark.parametrize("rule", RUN_RULES, ids=lambda rule: rule.code)
def test_a_good_example_has_no_finding(rule: Rule, tmp_path: Path) -> None:
    (example,) = rule.doc.good
    assert [finding for finding in check(example, tmp_path) if finding.rule == rule.code] == []


def check_bad_example(code: str, folder: Path) -> Finding:
    (example,) = RULES[code].doc.bad
    (finding,) = [finding for finding in check(example, folder) if finding.rule == code]
    return finding


def test_the_figures_of_a_finding_are_those_of_the_buffer(tmp_path: Path) -> None:
    pendulum_bytes = 2 * 3 * 4 + 4 + 3 * 4  # Both observations, action, reward, done, timeout.
    too_large = check_bad_example("M01", tmp_path)
    assert too_large.numbers == {"needed_bytes": 50_000 * pendulum_bytes, "limit_bytes": 10**6}
    assert "1.9 MiB" in too_large.message
    fitting = int(0.8 * 10**6 // pendulum_bytes)
    assert f"a capacity of {fitting:,} would take 80 % of it" in too_large.message

    repeated = check_bad_example("M07", tmp_path)
    assert repeated.numbers["repeated_bytes"] == 10_000 * 3 * 4
    assert repeated.numbers["needed_bytes"] == 10_000 * pendulum_bytes

    rollout = check_bad_example("M05", tmp_path)
    image_bytes = 84 * 84
    assert rollout.numbers["flatten_bytes"] == 512 * 2 * image_bytes
    assert rollout.numbers["rollout_bytes"] == 512 * 2 * (image_bytes + 8 + 6 * 4)

    large = check_bad_example("M19", tmp_path)
    assert large.numbers["repeated_bytes"] == 80_000 * image_bytes

    checkpoints = check_bad_example("S01", tmp_path)
    assert checkpoints.numbers["checkpoints"] == 100
    assert checkpoints.numbers["checkpoint_bytes"] == 10_000 * pendulum_bytes
