"""No tracked file contains a merge conflict marker."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Seven `<`, `|` or `>`, followed by a space or the end of the line. A line of seven `=` is not a marker here: it may
# underline a heading, and Git never writes it without the other two.
CONFLICT_MARKER = re.compile(rb"^(?:<{7}|\|{7}|>{7})(?=[ \r\n]|\Z)", re.MULTILINE)


def find_conflict_markers(content: bytes) -> list[int]:
    """Return the line numbers of the conflict markers in `content`."""
    return [content.count(b"\n", 0, match.start()) + 1 for match in CONFLICT_MARKER.finditer(content)]


def test_tracked_files_contain_no_conflict_markers() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone of the repository")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listing.decode().split("\0") if name]
    markers = {
        str(file.relative_to(ROOT)): find_conflict_markers(file.read_bytes()) for file in files if file.is_file()
    }
    marked = {file: lines for file, lines in markers.items() if lines}
    assert not marked, f"conflict markers by file and line: {marked}"


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> other\n", [2, 6]),
        (b"<<<<<<< HEAD\r\nb\r\n||||||| base\r\n=======\r\n>>>>>>> other", [1, 3, 5]),
        (b"Heading\n=======\n", []),
        (b"x <<<<<<< HEAD\n<<<<<<<<\n>>>>>>>a\n", []),
    ],
)
def test_find_conflict_markers(content: bytes, lines: list[int]) -> None:
    assert find_conflict_markers(content) == lines
