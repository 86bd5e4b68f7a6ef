"""Settings of lint: which rules are in force, what fails, and the limits to compare with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine, detect_machine
from holdall.tools.lint.rule import Rule
from holdall.tools.lint.rules import RULES
from holdall.units import parse_bytes

ALL_RULES = "ALL"


@dataclass(frozen=True, slots=True)
class LintSettings:
    """Rules in force and limits.

    Args:
        select: Codes of rules, or prefixes of codes, or `ALL`.
        ignore: Codes or prefixes of rules that are not in force.
        fail_on: Lowest severity that makes the command fail: `error`, `warning`, `info` or `never`.
        budget: Memory to compare with, such as `"32GB"`, instead of this machine's.
        vram: Memory of the GPU, such as `"16GiB"`; unknown otherwise.
        exclude: Names or patterns of paths that are left out when a directory is searched.
    """

    select: tuple[str, ...] = (ALL_RULES,)
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    budget: str | int | None = None
    vram: str | int | None = None
    exclude: tuple[str, ...] = ()

    def rules(self) -> dict[str, Rule]:
        """Return the rules in force by code."""
        for prefix in (*self.select, *self.ignore):
            if prefix != ALL_RULES and not any(code.startswith(prefix) for code in RULES):
                raise ArgumentError(
                    f"rule ({prefix!r}) does not exist. Use one of {', '.join(RULES)}, a prefix such as M, "
                    f"or {ALL_RULES}"
                )
        return {
            code: rule
            for code, rule in RULES.items()
            if _has_prefix(code, self.select) and not _has_prefix(code, self.ignore)
        }

    def machine(self) -> Machine:
        """Return this machine with the limits that were set."""
        budget_bytes = None if self.budget is None else parse_bytes(self.budget, "budget")
        vram_bytes = None if self.vram is None else parse_bytes(self.vram, "vram")
        return detect_machine(budget_bytes, vram_bytes)

    @property
    def fails_from(self) -> Severity | None:
        """The lowest severity that makes the command fail; None for `never`."""
        if self.fail_on == "never":
            return None
        if self.fail_on.upper() not in Severity.__members__:
            raise ArgumentError(f"fail_on ({self.fail_on!r}) must be one of error, warning, info, never")
        return Severity[self.fail_on.upper()]

    def change(self, changes: Mapping[str, Any]) -> LintSettings:
        """Return the settings with all `changes` that are not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _has_prefix(code: str, prefixes: Sequence[str]) -> bool:
    return any(prefix == ALL_RULES or code.startswith(prefix) for prefix in prefixes)


def find_settings(directory: Path) -> LintSettings:
    """Read `[tool.holdall.lint]` of the nearest pyproject.toml, from `directory` upwards."""
    for parent in (directory, *directory.parents):
        file = parent / "pyproject.toml"
        if file.is_file():
            return read_settings(file)
    return LintSettings()


def read_settings(file: Path) -> LintSettings:
    """Read `[tool.holdall.lint]` of a file."""
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} cannot be read: {error}") from error
    for name in ("tool", "holdall", "lint"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise ArgumentError(f"{file}: {name} ({table!r}) must be a table. Write [tool.holdall.lint]")
    defaults = LintSettings()
    known = {field.name.replace("_", "-"): field.name for field in fields(LintSettings)}
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} is unknown. Known are {', '.join(known)}")
        default = getattr(defaults, known[key])
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted = ""
        if isinstance(default, tuple) and not is_list:
            wanted = "a list of strings"
        elif isinstance(default, str) and not isinstance(value, str):
            wanted = "a string"
        elif default is None and isinstance(value, list):
            wanted = "one value"
        if wanted:
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} ({value!r}) must be {wanted}")
        given[known[key]] = tuple(value) if is_list else value
    return defaults.change(given)
