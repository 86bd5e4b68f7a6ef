"""Write the generated parts of docs/lint.md: `python docs/lint_page.py`; with `--check`, say whether it is current.

In:  the rules, and the notes in examples/.  Out: the page, between its markers.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

from holdall.tools.lint.engine import as_text, check_text, explain
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.run import Machine

PAGE = Path(__file__).with_name("lint.md")
ROOT = PAGE.parents[1]

_FAMILIES = {
    "F": "the file itself",
    "L": "the logic of the training loop",
    "M": "memory",
    "P": "tensors, processes and figures",
    "S": "saving and loading",
}


def _limited(limit_bytes: int, name: str) -> Machine:
    return replace(REFERENCE_MACHINE, ram_bytes=limit_bytes, limit_bytes=limit_bytes, limit_name=name)


# The machines that the notes speak of; cores and versions are those of the reference machine.
_MACHINES = {
    "note_000.py": _limited(9_210_000_000, "free memory"),
    "note_001.py": _limited(175 * 10**9, "RAM"),
    "note_002.py": REFERENCE_MACHINE,
    "note_003.py": _limited(31 * 10**9, "RAM"),
    "note_004.py": _limited(32 * 10**9, "RAM"),
}


def notes() -> dict[str, str]:
    """Return what lint says of each note."""
    said = {}
    for name, machine in _MACHINES.items():
        path = ROOT / "examples" / "notes" / name
        said[name] = as_text(check_text(path.read_text(encoding="utf-8"), f"examples/notes/{name}", RULES, machine))
    old = {name: RULES[name] for name in ("M01", "M04", "M05")}
    path = ROOT / "examples" / "notes" / "note_004.py"
    machine = replace(_MACHINES[path.name], sb3=(2, 7, 0))
    found = check_text(path.read_text(encoding="utf-8"), f"examples/notes/{path.name}", old, machine)
    return said | {f"{path.name} with 2.7.0": as_text(found)}


def table() -> str:
    """Return all rules as a table."""
    lines = ["| rule | | severity | `--fix` | |", "|---|---|---|---|---|"]
    fixable = {
        finding.rule
        for rule in RULES.values()
        for case in rule.doc.bad
        for finding in check_text(case.source, case.file, RULES, REFERENCE_MACHINE)
        if finding.edit
    }
    for rule in RULES.values():
        anchor = f"{rule.id}-{rule.name}-{rule.severity.word}".lower()
        mark = "yes" if rule.id in fixable else ""
        lines.append(f"| [{rule.id}](#{anchor}) | {rule.name} | {rule.severity.word} | {mark} | {rule.doc.what} |")
    return "\n".join(lines)


def rules() -> str:
    """Return every rule in words, by family."""
    parts = []
    for letter, family in _FAMILIES.items():
        parts.append(f"## {letter}: {family}")
        parts += [explain(rule) for rule in RULES.values() if rule.id.startswith(letter)]
    return "\n\n".join(parts)


def current(page: str) -> str:
    """Return the page with its generated parts as they should be."""
    parts = {"table": table(), "rules": rules()}
    parts |= {f"says {name}": f"```text\n{said}\n```" for name, said in notes().items()}
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
        if count != 1:
            raise SystemExit(f"{PAGE.name} must have one '<!-- {name} -->', and has {count}")
    return page


def main() -> None:
    """Rewrite the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(current(page), encoding="utf-8")
    elif page != current(page):
        raise SystemExit(f"{PAGE} is not current; run python docs/lint_page.py")


if __name__ == "__main__":
    main()
