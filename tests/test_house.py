"""The rules of the house: a file is a chapter, a name has one meaning, a package is entered through its front door."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdall"
MOST_LINES = 500
MOST_LINES_OF_REPLAY = 350
TWINS = {"ReplayMemory", "ReplayBuffer", "RolloutBuffer"}
"""Public classes named like what they replace, or like the local class that they stand for."""
VAGUE = re.compile(r"(utils|helpers|common|misc|manager)")


@functools.cache
def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _statements(file: Path) -> Iterator[ast.AST]:
    """Yield every statement of a file; what is inside of expressions is passed over."""
    waiting: list[ast.AST] = [_tree(file)]
    while waiting:
        yield (node := waiting.pop())
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, None)
            waiting += inside if isinstance(inside, list) else []


def test_a_class_name_is_defined_in_one_file() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for file in _files():
        for node in _statements(file):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(str(file.relative_to(SOURCE)))
    assert not {name: sorted(files) for name, files in homes.items() if len(files) > 1 and name not in TWINS}


@pytest.mark.parametrize("file", _files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_is_no_longer_than_a_chapter(file: Path) -> None:
    most = MOST_LINES_OF_REPLAY if file == SOURCE / "replay.py" else MOST_LINES
    assert len(file.read_text(encoding="utf-8").splitlines()) <= most


def test_a_files_name_says_what_is_inside() -> None:
    assert not [str(file) for file in _files() if VAGUE.search(file.name)]


PACKAGES = ("storage", "native", "delivery", "sampling", "checkpoint", "testing")
"""Packages that are entered through their `__init__` alone. Tools and the cluster are imported file by file, since what
a command or a worker loads decides how fast it starts."""


def _reached_into(file: Path) -> list[str]:
    """Return the modules of other packages that a file imports past their `__init__`."""
    own = file.relative_to(SOURCE).parts[0]
    named = [node.module for node in _statements(file) if isinstance(node, ast.ImportFrom) and node.module]
    reached = [name for name in named if name.startswith("holdall.") and name.count(".") > 1]
    return [name for name in reached if name.split(".")[1] in PACKAGES and name.split(".")[1] != own]


def test_a_package_is_entered_through_its_front_door() -> None:
    assert not {str(file): reached for file in _files() if (reached := _reached_into(file))}
