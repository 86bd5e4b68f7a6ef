"""The examples in the docstrings of public names run, with the names that docs/api.md defines at its start."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import holdall

API = Path(__file__).parents[1] / "docs" / "api.md"
NO_EXAMPLE = {
    "holdall.sb3.contrib.MaskableDictRolloutBuffer",  # as MaskableRolloutBuffer
    "holdall.lerobot.install",  # replaces classes of LeRobot: docs/guides/lerobot.md
    "holdall.drqv2",  # docs/guides/drqv2.md has a whole program
    "holdall.ray",  # needs a cluster: docs/scale.md
    "holdall.sampling.Sampler",  # a protocol: docs/extending.md
    "holdall.testing",  # docs/extending.md
    "holdall.plan.command",  # runs a script until it trains: docs/plan.md
    "holdall.sb3.resume",  # in the example of CheckpointCallback
    "holdall.watch.Watch",  # in the example of start
    "holdall.lint.Finding",  # in the example of model
    "holdall.lint.Settings",
    "holdall.lint.Machine",
}
"""Names whose example is elsewhere, and records of settings."""
PLAIN_MEMBERS = {"close", "first_id", "next_id", "fill", "disk_bytes"}


def find_names() -> list[str]:
    """Return the classes and functions that docs/api.md lists."""
    names = []
    for match in re.finditer(r"^::: ([\w.]+)\n    options: ?(.*?)(?=\n\n|\Z)", API.read_text(), re.M | re.S):
        module = match[1].rpartition(".")[2]
        members = re.search(r"members: \[(.*?)\]", match[2], re.S)
        if module[0].isupper() or members is None:
            names.append(match[1])
        else:
            names += [f"{match[1]}.{name}" for name in re.split(r",\s*", members[1])]
    return [name for name in names if name not in {"holdall.errors", "holdall.threads"}]


def find_methods() -> list[str]:
    """Return the members of `ReplayMemory` that docs/api.md lists, without those that are one number, and `close`."""
    match = re.search(r"^::: holdall.ReplayMemory\n.*?members: \[(.*?)\]", API.read_text(), re.M | re.S)
    assert match is not None
    return [name for name in re.split(r",\s*", match[1]) if name not in PLAIN_MEMBERS]


def import_name(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


NAMES = find_names()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that docs/api.md defines."""
    monkeypatch.chdir(tmp_path)
    match = re.search(r"^```python\n(.*?)^```$", API.read_text(), re.M | re.S)
    assert match is not None
    defined: dict[str, Any] = {}
    exec(match[1], defined)
    return defined


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3, of large buffers on a small machine
def test_the_example_of_a_public_name_runs(name: str, names: dict[str, Any]) -> None:
    examples = doctest.DocTestFinder(recurse=False).find(import_name(name), name, globs=names)
    if not any(example.examples for example in examples):
        assert any(name == other or name.startswith(f"{other}.") for other in NO_EXAMPLE), "there is no example"
    for example in examples:
        assert doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(example).failed == 0


@pytest.mark.parametrize("name", find_methods())
def test_the_example_of_a_method_runs(name: str, names: dict[str, Any]) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(vars(holdall.ReplayMemory)[name], name, False, names)
    assert example.examples, "there is no example"
    assert doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(example).failed == 0


def test_the_reference_lists_every_public_name() -> None:
    text = API.read_text(encoding="utf-8")
    errors = {name for name in holdall.__all__ if name.endswith("Error")}  # `holdall.errors` documents all of them.
    assert not [name for name in holdall.__all__ if name not in errors and f"::: holdall.{name}\n" not in text]


def test_every_name_without_an_example_is_in_the_reference() -> None:
    assert all(any(name == other or name.startswith(f"{other}.") for name in NAMES) for other in NO_EXAMPLE)
