"""Lint: find mistakes in a training's configuration, with their numbers, before it starts.

`text(source)` and `files(paths)` read scripts and hyperparameter files as syntax and execute nothing;
`model(model)` looks at a live model. The public name of this package is `holdall.lint`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdall.tools.lint.engine import FileChecker, LintSettings, check_runs, check_text, find_files
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.source.models import read_model


def text(source: str, path: str = "train.py", settings: LintSettings | None = None) -> list[Finding]:
    """Return what is wrong with a script, or with YAML if `path` ends so."""
    chosen = settings or LintSettings()
    return check_text(source, path, chosen.rules(), chosen.machine())


def files(paths: Iterable[Path], settings: LintSettings | None = None) -> list[Finding]:
    """Return what is wrong with files, and with the scripts and YAML files in directories."""
    chosen = settings or LintSettings()
    rules, machine = chosen.rules(), chosen.machine()
    given = list(paths)
    checker = FileChecker(rules, machine)
    named = {path for path in given if not path.is_dir()}
    found = find_files(given, chosen.exclude)
    return [finding for path in found for finding in checker.check(path, walked=path not in named)]


def model(
    model: Any, total_timesteps: int | None = None, callbacks: Iterable[Any] = (), settings: LintSettings | None = None
) -> list[Finding]:
    """Return what is wrong with a model of Stable-Baselines3 that is about to be trained.

    Args:
        total_timesteps: What `learn` will get; rules about the length of the run are silent without it.
        callbacks: Those that `learn` will get.
    """
    chosen = settings or LintSettings()
    run = read_model(model, total_timesteps, callbacks)
    return sorted(check_runs([run], chosen.rules(), chosen.machine()), key=lambda one: (-one.severity, one.rule))
