"""The documentation: every link leads somewhere, every page is in the site, its programs run, and it reads easily."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("[A-Z]*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
QUAINT = re.compile(
    r"\b(tell|tells|told|telling|anew|dear|befall|befalls|befell|ere|is to be|are to be|thereof|hitherto|whilst"
    r"|oftener)\b",
    re.IGNORECASE,
)
MAX_AVERAGE_WORDS = 18


def keep_prose(text: str) -> str:
    """Return the sentences of a page, without programs, tables, comments and headings."""
    text = re.sub(r"^(```+|~~~+).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!", ":::")))


def split_sentences(text: str) -> list[str]:
    """Split prose into sentences. An item of a list is a sentence, and code is one word."""
    text = re.sub(r"`[^`]*`", "code", keep_prose(text))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    parts = re.split(r"(?<=[.?!:])\s+(?=[\"'A-Z0-9-]|code)|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [part for part in parts if len(part.split()) > 2]


def find_anchors(page: Path) -> set[str]:
    """Return the places of a page that a link may name."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_names_an_existing_file_and_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for found in LINK.finditer(text):
        link = found[1] or found[2]
        path, _, place = link.partition("#")
        if re.match(r"[a-z]+:", link) or place.startswith("only-"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (place and target.suffix == ".md" and place not in find_anchors(target)):
            broken.append(link)
    assert not broken


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    assert not [page.name for page in (DOCS / "decisions").glob("0*.md") if f"({page.name})" not in index]


def test_every_extra_is_in_the_install_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    extras = project["optional-dependencies"].keys() - {"dev", "docs"}
    assert not [extra for extra in sorted(extras) if f"| `{extra}` |" not in page]


def test_every_page_is_in_the_site() -> None:
    """`make docs` fails on such a page, too, but takes longer."""
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in pages - named if not page.startswith("decisions/0")} == set()
    assert named - pages == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_short_sentences(page: Path) -> None:
    """At most 18 words on average."""
    found = split_sentences(page.read_text(encoding="utf-8"))
    assert found
    average = sum(len(sentence.split()) for sentence in found) / len(found)
    longest = max(found, key=lambda sentence: len(sentence.split()))
    assert average <= MAX_AVERAGE_WORDS, f"{average:.1f} words; the longest is: {longest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_quaint_word(page: Path) -> None:
    assert not QUAINT.findall(keep_prose(page.read_text(encoding="utf-8")))


def test_the_checks_of_prose_find_quaint_words_and_count_sentences() -> None:
    assert QUAINT.findall("It is told anew.") == ["told", "anew"]
    assert not QUAINT.findall("It is retold; dearly, here.")
    assert len(split_sentences("One two three four. Five six `a b c` seven: eight nine ten.\n\n- An item of it\n")) == 3


def test_the_repository_has_one_address() -> None:
    """pyproject.toml has it, and `python release/addresses.py ADDRESS` sets the others."""
    assert not runpy.run_path(str(ROOT / "release" / "addresses.py"))["find_wrong_files"]()


def test_the_readme_of_the_package_index_has_whole_addresses() -> None:
    """A package index does not have the repository's files."""
    hook = runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"]
    text = hook((ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/a/b")
    assert 'src="https://example.org/a/b/raw/main/docs/memory-light.svg"' in text
    assert "(https://example.org/a/b/blob/main/docs/install.md)" in text
    found = [first or second for first, second in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))]
    assert found
    assert all(link.startswith("https://") for link in found)


def test_workflows_are_yaml_with_pinned_actions() -> None:
    """actionlint checks them in `make workflows`. Each action is named by owner, name and version."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [file.stem for file in files] == ["docs", "nightly", "release", "tests"]
    for file in files:
        jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
        for job in jobs.values():
            assert job["timeout-minutes"] <= 360
            for step in job["steps"]:
                assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])
