"""All rules, one file a family: a class that stands in one of them is in force, documented and tested."""

from __future__ import annotations

import inspect

from holdall.tools.lint import rule
from holdall.tools.lint.rule import Rule
from holdall.tools.lint.rules import (
    allocator,
    callbacks,
    memory,
    observations,
    processes,
    saving,
    tensors,
    training_loop,
)

_FAMILIES = (rule, allocator, callbacks, memory, observations, processes, saving, tensors, training_loop)


def _rules() -> dict[str, Rule]:
    classes = {cls for family in _FAMILIES for _, cls in inspect.getmembers(family, inspect.isclass)}
    rules = [cls() for cls in classes if issubclass(cls, Rule) and not inspect.isabstract(cls) and cls is not Rule]
    return {rule.id: rule for rule in sorted(rules, key=lambda rule: rule.id)}


RULES = _rules()
