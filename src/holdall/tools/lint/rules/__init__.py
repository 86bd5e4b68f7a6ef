"""All rules by code. Every class in a module of this package that derives from `Rule` and sets `code` is in force."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from holdall.tools.lint.rule import Rule


def collect_rules(values: Iterable[Any]) -> dict[str, Rule]:
    """Return the rules among `values` by code. Raise ValueError if two rules have one code."""
    found: dict[str, Rule] = {}
    for value in values:
        if isinstance(value, type) and issubclass(value, Rule) and hasattr(value, "code"):
            rule = found.setdefault(value.code, value())
            if type(rule) is not value:
                raise ValueError(
                    f"{type(rule).__name__} and {value.__name__} have the code {value.code}. Choose another."
                )
    return dict(sorted(found.items()))


_MODULES = [import_module(module.name) for module in pkgutil.iter_modules(__path__, f"{__name__}.")]
RULES = collect_rules(value for module in _MODULES for value in vars(module).values())
