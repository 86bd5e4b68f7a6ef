"""A rule in words: what it does, why it matters, an example, the fix.

In:  a rule.  Out: Markdown, for `--explain` and for the documentation.
"""

from __future__ import annotations

import inspect

from holdall.lint.rule import Case, Rule


def explain(rule: Rule) -> str:
    """Write one rule."""
    return "\n".join(
        [
            f"### {rule.id} {rule.name} ({rule.severity.word})",
            "",
            rule.what,
            "",
            f"**Why it matters.** {_flowing(rule.why)}",
            "",
            "**Example.**",
            "",
            _fenced(rule.BAD[0]),
            "",
            f"**Fix.** {_flowing(rule.fix)}",
            "",
            _fenced(rule.GOOD[0]),
        ]
    )


def _flowing(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


def _fenced(case: Case) -> str:
    language = "yaml" if case.file.endswith(".yml") else "python"
    name = [f"# {case.file}"] if language == "yaml" else []
    return "\n".join([f"```{language}", *name, case.source.rstrip("\n"), "```"])
