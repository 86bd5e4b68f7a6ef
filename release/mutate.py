"""Make small mistakes in a copy of the source tree, one at a time, and count those that the tests notice.

    python release/mutate.py --mutants 150 --json mutants.jsonl     # about two hours on two cores
    python release/mutate.py --only src/holdall/sampling --mutants 10

A mutant flips a comparison or a condition, shifts an index, swaps plus and minus, or drops a call such as a sync. The
seed decides which mutants are made, so a run can be repeated and continued: mutants that are in the file already are
not made again. Each mutant is tested with the tests of its part (`PARTS`), which end at the first failure. A mutant
that makes the tests hang counts as noticed. Mutants in C are compiled first.

The exit status is 1 if fewer than 90 % were noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "release", "third_party", "build", ".ci", ".github")
LIMIT_S = 240
MIN_NOTICED = 0.9


@dataclass(frozen=True, slots=True)
class Part:
    """Source files, and the tests that must notice a mistake in them."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    share: float  # Of all mutants.


_CORE_TESTS = ("tests/contract", "tests/unit/store", "tests/property", "tests/unit/test_replay.py")
PARTS = (
    Part("store", ("src/holdall/store/*.py", "src/holdall/memory.py"), (*_CORE_TESTS, "tests/unit"), 0.25),
    Part("codec", ("src/holdall/codec/*.py",), ("tests/contract", "tests/unit/codec", "tests/unit"), 0.08),
    Part("native", ("src/holdall/_native/*.c",), (*_CORE_TESTS, "tests/unit", "tests/format"), 0.12),
    Part("sampling", ("src/holdall/sampling/*.py",), ("tests/unit/sampling", "tests/contract", "tests/unit"), 0.15),
    Part(
        "checkpoint",
        ("src/holdall/checkpoint/*.py",),
        ("tests/unit/checkpoint", "tests/contract", "tests/crash", "tests/format"),
        0.2,
    ),
    Part("sb3", ("src/holdall/sb3/*.py",), ("tests/integration/sb3",), 0.12),
    Part("cleanrl", ("src/holdall/cleanrl.py",), ("tests/unit/test_cleanrl.py",), 0.03),
    Part("torchrl", ("src/holdall/torchrl/*.py",), ("tests/unit/test_torchrl.py", "tests/property"), 0.05),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. `source` is the whole text of the file with the mistake in it."""

    part: Part
    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """Text that identifies the mutant in results."""
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


# ---------------------------------------------------------------- mistakes in Python

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_HARMLESS = re.compile(r"^(_LOG|logging|warnings|print|self\._log)\b|\.(debug|info|warning)\(")
"""Calls that change no result when they are dropped."""


def mutate_python(part: Part, path: Path) -> Iterator[Mutant]:
    """Yield every mistake that can be made in a Python file."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    tree = ast.parse(text)
    annotations = {id(inner) for node in ast.walk(tree) for inner in _find_annotations(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt) or id(node) in annotations:
            continue
        for kind, changed in _mistakes_of(node):
            before = ast.get_source_segment(text, node)
            if before is None or "\n" in before:
                continue
            after = ast.unparse(changed)
            lines = text.splitlines(keepends=True)
            row = lines[node.lineno - 1].encode()
            mutated = row[: node.col_offset] + after.encode() + row[node.end_col_offset :]
            lines[node.lineno - 1] = mutated.decode()
            yield Mutant(part, name, node.lineno, kind, before, after, "".join(lines))


def _find_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of annotations, which have no effect when the code runs."""
    for field in ("annotation", "returns"):
        annotation = getattr(node, field, None)
        if isinstance(annotation, ast.AST):
            yield from ast.walk(annotation)


def _mistakes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield kinds of mistakes, and the node that replaces `node`."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield "comparison", ast.Compare(left, [_COMPARISONS[type(op)]()], right)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if not isinstance(right, ast.Constant | ast.JoinedStr):
            yield "operator", ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield "operator", ast.BinOp(left, ast.Add(), right)
        case ast.BinOp(left=left, op=op, right=ast.Constant(value=int(number))) if not isinstance(number, bool):
            yield "shift", ast.BinOp(left, op, ast.Constant(number + 1))
        case ast.Subscript(value=value, slice=ast.Constant(value=int(number)), ctx=ast.Load()):
            yield "index", ast.Subscript(value, ast.Constant(number + 1), ast.Load())
        case ast.BoolOp(op=op, values=values):
            yield "condition", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", operand
        case ast.Expr(value=ast.Call()) if not _HARMLESS.search(ast.unparse(node)):
            yield "dropped call", ast.Pass()


# ---------------------------------------------------------------- mistakes in C

_C_MISTAKES = (
    ("comparison", re.compile(r"(?<=[\w)\]] )(<|<=|>|>=|==|!=)(?= [\w(-])"), None),
    ("operator", re.compile(r"(?<=[\w)\]] )(\+|-)(?= [\w(])"), {"+": "-", "-": "+"}),
    ("condition", re.compile(r"(?<= )(&&|\|\|)(?= )"), {"&&": "||", "||": "&&"}),
)
_C_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


def mutate_c(part: Part, path: Path) -> Iterator[Mutant]:
    """Yield mistakes in the statements of a C file. Comments and preprocessor lines stay as they are."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not line.startswith("    ") or stripped.startswith(("//", "*", "/*", "#")) or '"' in line:
            continue
        for kind, pattern, replacements in _C_MISTAKES:
            for match in pattern.finditer(line.split("//")[0]):
                after = (replacements or _C_COMPARISONS)[match[1]]
                changed = line[: match.start(1)] + after + line[match.end(1) :]
                source = "".join([*lines[: number - 1], changed, *lines[number:]])
                yield Mutant(part, name, number, kind, stripped, changed.strip(), source)


# ---------------------------------------------------------------- running


def choose_mutants(count: int, seed: int, only: str | None) -> list[Mutant]:
    """Return `count` mutants, spread over the parts by their shares."""
    generator = random.Random(seed)
    parts = [part for part in PARTS if only is None or any(source.startswith(only) for source in part.sources)]
    total = sum(part.share for part in parts)
    chosen = []
    for part in parts:
        candidates = []
        for pattern in part.sources:
            for path in sorted(ROOT.glob(pattern)):
                candidates += list(mutate_c(part, path) if path.suffix == ".c" else mutate_python(part, path))
        chosen += generator.sample(candidates, min(len(candidates), round(count * part.share / total)))
    return chosen


def make_copy(folder: Path) -> None:
    """Copy all that tests need."""
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)


def run_tests(folder: Path, part: Part, limit_s: float) -> str:
    """Return "survived" if all tests pass, "timed out" if they hang, and else "noticed"."""
    tests = [path for path in part.tests if (folder / path).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider", "-n", "2"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "pytest.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--timeout=60", *tests],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end_group(process)
    return "survived" if status == 0 else "noticed"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def build(folder: Path) -> bool:
    """Compile the native module in the copy. Return whether that worked."""
    command = [sys.executable, "setup.py", "-q", "build_clib", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def try_mutant(folder: Path, mutant: Mutant) -> str:
    """Return what the tests make of a mutant. The copy is as before afterwards."""
    path = folder / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        if path.suffix == ".c" and not build(folder):
            return "does not compile"
        return run_tests(folder, mutant.part, LIMIT_S)
    finally:
        path.write_text(original, encoding="utf-8")
        if path.suffix == ".c":
            build(folder)


def main() -> int:
    """Make the mutants, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a folder below src, or a file pattern of PARTS")
    parser.add_argument("--json", type=Path, help="a file of JSON lines, to which results are appended")
    options = parser.parse_args()
    mutants = choose_mutants(options.mutants, options.seed, options.only)
    rows = []
    if options.json is not None and options.json.exists():
        rows = [json.loads(line) for line in options.json.read_text().splitlines()]
    known = {row["key"] for row in rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_copy(folder)
        for number, mutant in enumerate(mutants, 1):
            if mutant.key in known:
                continue
            begun = time.monotonic()
            outcome = try_mutant(folder, mutant)
            seconds = time.monotonic() - begun
            row = {key: value for key, value in asdict(mutant).items() if key not in ("part", "source")}
            row |= {"key": mutant.key, "part": mutant.part.name, "outcome": outcome, "seconds": round(seconds, 1)}
            rows.append(row)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{number} of {len(mutants)}: {outcome}, {seconds:.0f} s: {mutant.key}", flush=True)
    return print_table(rows)


def print_table(rows: list[dict[str, object]]) -> int:
    """Print the share that was noticed, by part, and the mutants that survived."""
    rows = [row for row in rows if row["outcome"] != "does not compile"]
    print(f"\n{'part':12}{'mutants':>8}{'noticed':>9}")
    for part in PARTS:
        of_part = [row for row in rows if row["part"] == part.name]
        print(f"{part.name:12}{len(of_part):8}{sum(row['outcome'] != 'survived' for row in of_part):9}")
    survivors = [row for row in rows if row["outcome"] == "survived"]
    for row in survivors:
        print(f"survived: {row['key']}")
    share = 1 - len(survivors) / max(len(rows), 1)
    print(f"\n{share:.1%} of {len(rows)} mutants were noticed")
    return int(share < MIN_NOTICED)


if __name__ == "__main__":
    sys.exit(main())
