"""Lint: find mistakes in a training run, with figures, before it starts. The public name is `holdall.lint`.

`files` and `text` read scripts as syntax trees and execute nothing. `model` looks at a live model. `snapshot` looks at
the models and buffers that a command had built when `holdall.tools.probe` stopped it.

    rule, rules/        one class per rule, in files by subject
    source, source_sb3  a file as a syntax tree, for rules about files
    arguments           positions of arguments in calls of other libraries
    run                 places and titles of the objects of a run, for rules about runs
    check               runs the rules over files and runs, and returns findings
    settings, machine   rules in force, limits to compare with
    output              findings as lines and JSON, a rule as Markdown
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.lint.check import check_file, check_run, check_text, find_files
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.settings import LintSettings
from holdall.tools.probe.inspection import inspect_model
from holdall.tools.probe.snapshot import Snapshot


def text(source: str, path: str = "train.py", settings: LintSettings | None = None) -> list[Finding]:
    """Return the findings in the text of a script.

    Examples:
        >>> from holdall import lint
        >>> lint.text("import gymnasium")
        []
    """
    chosen = settings or LintSettings()
    return check_text(source, path, chosen.rules(), chosen.machine())


def files(paths: Iterable[Path], settings: LintSettings | None = None) -> list[Finding]:
    """Return the findings in scripts, and in the scripts of directories.

    Examples:
        >>> from pathlib import Path
        >>> from holdall import lint
        >>> _ = Path("script.py").write_text("import gymnasium")
        >>> lint.files([Path("script.py")])
        []
    """
    chosen = settings or LintSettings()
    rules = chosen.rules()
    machine = chosen.machine()
    given = list(paths)
    findings: list[Finding] = []
    for path in find_files(given, chosen.exclude):
        findings += check_file(path, rules, machine, is_named=path in given)
    return findings


def model(
    model: Any, total_timesteps: int | None = None, callbacks: Iterable[Any] = (), settings: LintSettings | None = None
) -> list[Finding]:
    """Return the findings in a model of Stable-Baselines3 that is about to be trained, the worst first.

    Args:
        total_timesteps: The argument of `learn`. Without it, rules about the length of the run find nothing.
        callbacks: The callbacks that `learn` will get.

    Examples:
        >>> from holdall import lint
        >>> from stable_baselines3 import DQN
        >>> [finding.rule for finding in lint.model(DQN("MlpPolicy", env, buffer_size=2_000), total_timesteps=1_000)]
        ['M09']
    """
    run = Snapshot("", "live", **inspect_model(model, total_timesteps, list(callbacks)))
    if not run.models:
        raise ArgumentError(f"model ({type(model).__name__}) must be a model of Stable-Baselines3 or sb3-contrib")
    return snapshot(run, settings)


def snapshot(snapshot: Snapshot, settings: LintSettings | None = None) -> list[Finding]:
    """Return the findings in the models and buffers of a run, the worst first."""
    chosen = settings or LintSettings()
    return check_run(snapshot, chosen.rules(), chosen.machine())
