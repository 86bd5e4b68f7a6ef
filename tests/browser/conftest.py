"""One browser for the session, or the reason why it is missing, and pages that holdall makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.tools.report import read_report

from .chromium import Browser, Page, find
from .examples import buffers, long_run, results

Open = Callable[..., Page]
TESTS = Path(__file__).parents[1]
REAL = {
    "recorded": TESTS / "unit" / "watch" / "run.jsonl",
    "bench": TESTS / "results" / "bench.jsonl",
    "bench buffers": TESTS / "browser" / "buffers.jsonl",
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium."""
    path = find()
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium), and there is none here")
    started = Browser(path)
    yield started
    started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page, by name."""
    folder = tmp_path_factory.mktemp("pages")
    files = dict(REAL)
    for name, text in (("long", long_run(5_000)), ("results", results()), ("buffers", buffers())):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text(text, encoding="utf-8")
    made = {name: folder / f"{name}.html" for name in files}
    for name, file in files.items():
        made[name].write_text(read_report(file).page(), encoding="utf-8")
    return made


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens pages, and closes them when the test is over."""
    open_pages: list[Page] = []

    def open_page(path: Path, width: int = 1200, **settings: Any) -> Page:
        open_pages.append(Page(browser, path, width, **settings))
        return open_pages[-1]

    yield open_page
    for page in open_pages:
        page.close()
