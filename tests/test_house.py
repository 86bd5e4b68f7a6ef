"""Conventions of the source tree: a class name has one meaning, and a package is imported through its `__init__`."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdall"
TWINS = {"ReplayMemory", "ReplayBuffer", "RolloutBuffer", "Snapshot"}
"""Public classes that are named after the class that they replace, or after the local class that they represent.
A `Snapshot` is what a checkpoint is made of, and what a probe found."""
VAGUE = re.compile(r"(utils|helpers|common|misc|manager)")


@functools.cache
def _list_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _iterate_statements(file: Path) -> Iterator[ast.AST]:
    """Yield every statement of a file, without looking into expressions."""
    waiting: list[ast.AST] = [_parse(file)]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, None)
            waiting += inside if isinstance(inside, list) else []


def test_a_class_name_is_defined_in_one_file() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for file in _list_files():
        for node in _iterate_statements(file):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(str(file.relative_to(SOURCE)))
    assert not {name: sorted(files) for name, files in homes.items() if len(files) > 1 and name not in TWINS}


def test_no_file_has_a_vague_name() -> None:
    assert not [str(file) for file in _list_files() if VAGUE.search(file.name)]


PACKAGES = ("sampling", "checkpoint", "testing")
"""Packages that other packages import only through their `__init__`. The others are imported file by file."""


def _find_direct_imports(file: Path) -> list[str]:
    """Return the submodules of other packages that a file imports directly."""
    own = file.relative_to(SOURCE).parts[0]
    named = [node.module for node in _iterate_statements(file) if isinstance(node, ast.ImportFrom) and node.module]
    reached = [name for name in named if name.startswith("holdall.") and name.count(".") > 1]
    return [name for name in reached if name.split(".")[1] in PACKAGES and name.split(".")[1] != own]


def test_three_packages_are_imported_only_through_their_init() -> None:
    reached = {str(file): _find_direct_imports(file) for file in _list_files()}
    assert not {file: modules for file, modules in reached.items() if modules}


NAMED_PATH = re.compile(r"(?<![\w/.<@-])(?:tests|benchmarks|examples|release)/[\w./-]*[\w/]")


def test_paths_that_workflows_and_release_scripts_name_exist() -> None:
    """A test file that was renamed would otherwise only be missed when a release is made. A final `_` ends a prefix."""
    files = [ROOT / "Makefile", *(ROOT / ".github" / "workflows").glob("*.yml"), *(ROOT / "release").glob("*.*")]
    files += [ROOT / name for name in ("CONTRIBUTING.md", "benchmarks/README.md")]
    named = {
        path: file.name for file in files if file.is_file() for path in NAMED_PATH.findall(file.read_text("utf-8"))
    }
    assert len(named) > 10
    assert not {
        path: file
        for path, file in named.items()
        if not any(ROOT.glob(path.rstrip("/") + ("*" if path.endswith("_") else "")))
    }


def test_every_slow_test_is_in_a_suite_of_the_nightly_run() -> None:
    """A new folder with slow tests would otherwise never run."""
    suites = runpy.run_path(str(ROOT / "release" / "nightly.py"), run_name="nightly")["SUITES"]
    paths = [ROOT / path.split("::")[0] for suite in suites for path in suite.arguments if path.startswith("tests/")]
    slow = [
        file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.nightly", file.read_text("utf-8"))
    ]
    assert len(slow) > 20
    assert not [str(file) for file in slow if not any(path in (file, *file.parents) for path in paths)]


def test_files_outside_of_packages_have_names_of_their_own() -> None:
    """Two modules of one name stop mypy before it checks any file."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if not (file.parent / "__init__.py").exists()]
    names = Counter(file.name for file in files)
    assert not [str(file) for file in files if names[file.name] > 1 and file.name != "conftest.py"]
