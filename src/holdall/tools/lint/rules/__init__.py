"""All rules by code. Every class in a module of this package that derives from `Rule` and sets `code` is in force."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from holdall.tools.lint.rule import Rule


def _find_rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Rule) and hasattr(value, "code"):
                found[value.code] = value()
    return dict(sorted(found.items()))


RULES = _find_rules()
