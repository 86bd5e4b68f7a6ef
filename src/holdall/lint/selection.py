"""Which rules are in force, and against which limits: the command line over pyproject.toml over the defaults.

In:  prefixes of ids (`M`, `M01`, `ALL`), and a `[tool.holdall.lint]` table.  Out: a mapping of rules, and settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.lint.finding import Severity
from holdall.lint.machine import Machine, detect
from holdall.lint.rule import Rule
from holdall.lint.rules import RULES
from holdall.plan.buffers import parse_version
from holdall.units import parse_bytes

ALL = "ALL"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user can set; None and empty stand for the default."""

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"  # or "warning", "info", "never"
    budget: str | int | None = None  # the memory to judge by, instead of this machine's
    vram: str | int | None = None
    sb3_version: str | None = None  # to judge by, instead of the one that is installed
    exclude: tuple[str, ...] = ()  # names or patterns of paths that a directory's walk leaves out

    def rules(self) -> dict[str, Rule]:
        """Return the rules in force."""
        for prefix in (*self.select, *self.ignore):
            if prefix != ALL and not any(rule.startswith(prefix) for rule in RULES):
                raise ArgumentError(f"rule ({prefix!r}) is none; rules are {', '.join(RULES)}, or a prefix, or {ALL}")
        return {
            name: rule
            for name, rule in RULES.items()
            if _matches(name, self.select) and not _matches(name, self.ignore)
        }

    def machine(self) -> Machine:
        """Return this machine, with the limits that were set."""
        return detect(
            None if self.budget is None else parse_bytes(self.budget, "budget"),
            None if self.vram is None else parse_bytes(self.vram, "vram"),
            None if self.sb3_version is None else parse_version(self.sb3_version),
        )

    @property
    def fails_from(self) -> Severity | None:
        """The least severity that makes the command fail; None: nothing does."""
        if self.fail_on == "never":
            return None
        try:
            return Severity[self.fail_on.upper()]
        except KeyError:
            raise ArgumentError(f"fail_on ({self.fail_on!r}) must be one of error, warning, info, never") from None

    def but(self, **changes: Any) -> Settings:
        """Return the settings with those that are not None changed."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _matches(name: str, prefixes: Sequence[str]) -> bool:
    return any(prefix == ALL or name.startswith(prefix) for prefix in prefixes)


def find_settings(start: Path) -> Settings:
    """Read `[tool.holdall.lint]` of the nearest pyproject.toml, upwards from a directory."""
    for directory in (start, *start.parents):
        file = directory / "pyproject.toml"
        if file.is_file():
            return read_settings(file)
    return Settings()


def read_settings(file: Path) -> Settings:
    """Read `[tool.holdall.lint]` of a file."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} cannot be read: {error}") from error
    table = document.get("tool", {}).get("holdall", {}).get("lint", {})
    known = {field.name.replace("_", "-"): field.name for field in fields(Settings)}
    for key, value in table.items():
        if key not in known:
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} is unknown; known are {', '.join(known)}")
        wants_list = isinstance(getattr(Settings(), known[key]), tuple)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if wants_list != is_list:
            wanted = "a list of strings" if wants_list else "one value"
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} ({value!r}) must be {wanted}")
    return Settings().but(
        **{known[key]: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    )
