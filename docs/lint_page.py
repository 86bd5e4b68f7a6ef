"""Write the lists of rules in docs/lint.md: `python docs/lint_page.py`. With `--check`, only compare them."""

import re
import sys
from pathlib import Path

from holdall.tools.lint.rule import Rule
from holdall.tools.lint.rules import RULES

PAGE = Path(__file__).with_name("lint.md")
MARKED = re.compile(r"(<!-- rules -->\n).*?(<!-- end -->)", re.DOTALL)


def write_list(rules: list[Rule]) -> str:
    """Return one line for each rule: its code, its severity and the first sentence of its documentation."""
    lines = [f"- **{rule.code}** {rule.severity.word}: {rule.doc.what.partition('. ')[0]}" for rule in rules]
    return "\n".join(f"{line.removesuffix('.')}." for line in lines)


def write_page(page: str) -> str:
    """Return the page with its lists as they should be."""
    in_files = [rule for rule in RULES.values() if not rule.needs_run]
    in_runs = [rule for rule in RULES.values() if rule.needs_run]
    text = (
        f"### {len(in_files)} rules about files\n\n{write_list(in_files)}\n\n"
        f"### {len(in_runs)} rules about values\n\n{write_list(in_runs)}\n"
    )
    current, count = MARKED.subn(lambda found: f"{found[1]}{text}{found[2]}", page)
    if count != 1:
        raise SystemExit(f"{PAGE.name} must have '<!-- rules -->' and '<!-- end -->' once, and has them {count} times")
    return current


def main() -> None:
    """Rewrite the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(write_page(page), encoding="utf-8")
    elif page != write_page(page):
        raise SystemExit(f"{PAGE} is not current; run python docs/lint_page.py")


if __name__ == "__main__":
    main()
