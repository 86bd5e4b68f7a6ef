"""No false errors on what others publish: rl-baselines3-zoo's hyperparameters, Stable-Baselines3's own code."""

import importlib.util
import re
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path

import pytest

from holdall.tools.lint.engine import check_text, find_files, read_text
from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.run import Machine
from holdall.tools.lint.source.hyperparameters import read_runs

LARGE = replace(REFERENCE_MACHINE, ram_bytes=128 * 2**30, limit_bytes=128 * 2**30)


def zoo() -> Path:
    """Return where rl_zoo3 lies."""
    found = importlib.util.find_spec("rl_zoo3")
    if found is None or found.origin is None:
        pytest.skip("needs the package rl_zoo3")
    return Path(found.origin).parent


def errors(path: Path, machine: Machine = LARGE) -> list[Finding]:
    found = check_text(read_text(path), str(path), RULES, machine)
    return [finding for finding in found if finding.severity is Severity.ERROR]


def test_the_zoos_hyperparameters_hold_no_error() -> None:
    files = sorted((zoo() / "hyperparams").glob("*.yml"))
    runs = sum(len(read_runs(read_text(path), str(path))) for path in files)
    assert len(files) >= 10
    assert runs >= 200
    assert [error for path in files for error in errors(path)] == []
    assert [error for path in files for error in errors(path, replace(LARGE, sb3=(2, 7, 0)))] == []


def test_on_32_gib_the_one_error_is_true() -> None:
    # QRDQN's entry for Atari leaves buffer_size at a million: 2 x 84 x 84 x 4 bytes each, and more.
    found = [
        error for path in sorted((zoo() / "hyperparams").glob("*.yml")) for error in errors(path, REFERENCE_MACHINE)
    ]
    assert [error.rule for error in found] == ["M01"]
    assert found[0].place.path.endswith("qrdqn.yml")
    assert found[0].numbers["needed_bytes"] == 1_000_000 * (2 * 84 * 84 * 4 + 3 * 4)


def test_the_zoos_scripts_hold_no_error() -> None:
    files = find_files([zoo()])
    assert [error for path in files if path.suffix == ".py" for error in errors(path)] == []


def test_stable_baselines3_itself_holds_no_error() -> None:
    found = importlib.util.find_spec("stable_baselines3")
    if found is None or found.origin is None:
        pytest.skip("needs Stable-Baselines3")
    files = list(Path(found.origin).parent.rglob("*.py"))
    assert len(files) > 50
    assert [error for path in files for error in errors(path)] == []


def test_the_examples_of_stable_baselines3s_own_page_hold_no_error() -> None:
    if importlib.util.find_spec("stable_baselines3") is None:
        pytest.skip("needs Stable-Baselines3")
    page = metadata("stable_baselines3")["Description"]
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        found = check_text(block, "example.py", RULES, REFERENCE_MACHINE)
        assert [finding for finding in found if finding.severity > Severity.INFO] == []
