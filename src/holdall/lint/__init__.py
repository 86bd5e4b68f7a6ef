"""Lint: what is wrong with a training's configuration, with its numbers, before it is started.

`holdall.lint.text(source)` and `holdall.lint.files(paths)` read scripts and hyperparameter files as syntax and execute
nothing; `holdall.lint.model(model)` looks at a live model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdall.lint.engine import check_runs, check_text
from holdall.lint.files import find_files, read_text
from holdall.lint.finding import Edit, Finding, Place, Severity
from holdall.lint.machine import Machine
from holdall.lint.rules import RULES
from holdall.lint.selection import Settings
from holdall.lint.source.live import read_model

__all__ = ["RULES", "Edit", "Finding", "Machine", "Place", "Settings", "Severity", "files", "model", "text"]


def text(source: str, path: str = "train.py", settings: Settings | None = None) -> list[Finding]:
    """Return what is wrong with a script, or with YAML if `path` ends so."""
    chosen = settings or Settings()
    return check_text(source, path, chosen.rules(), chosen.machine())


def files(paths: Iterable[Path], settings: Settings | None = None) -> list[Finding]:
    """Return what is wrong with files, and with the scripts and YAML files in directories."""
    chosen = settings or Settings()
    rules, machine = chosen.rules(), chosen.machine()
    found = find_files(paths, chosen.exclude)
    return [finding for path in found for finding in check_text(read_text(path), str(path), rules, machine)]


def model(
    model: Any,
    total_timesteps: int | None = None,
    callbacks: Iterable[Any] = (),
    settings: Settings | None = None,
) -> list[Finding]:
    """Return what is wrong with a model of Stable-Baselines3 that is about to be trained.

    Args:
        total_timesteps: What `learn` will get; rules about the length of the run are silent without it.
        callbacks: Those that `learn` will get.
    """
    chosen = settings or Settings()
    run = read_model(model, total_timesteps, callbacks)
    return sorted(check_runs([run], chosen.rules(), chosen.machine()), key=lambda one: (-one.severity, one.rule))
