"""All rules, one file a family: a rule that stands in one of them is in force, documented and tested."""

from __future__ import annotations

from holdall.tools.lint import rule
from holdall.tools.lint.rule import Rule
from holdall.tools.lint.rules import allocator, buffers, callbacks, observations, processes, saving, training_loop

_FAMILIES = (rule, allocator, buffers, callbacks, observations, processes, saving, training_loop)
_FOUND = [found for family in _FAMILIES for found in vars(family).values() if isinstance(found, Rule)]
RULES = {found.id: found for found in sorted(_FOUND, key=lambda found: found.id)}
