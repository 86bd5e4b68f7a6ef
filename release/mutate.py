"""Make small mistakes in copies of the source tree, one at a time, and count those that the tests notice.

    python release/mutate.py prepare --mutants 200       # choose the mutants: .cache/mutants/mutants.json
    python release/mutate.py trace --jobs 2              # which tests pass here, and which lines each of them runs
    python release/mutate.py run --jobs 2 --seconds 120  # append one line per mutant to .cache/mutants/results.jsonl
    python release/mutate.py table                       # shares by part, and the survivors

A mutant flips a comparison or a condition, shifts an index, swaps plus and minus, or drops a call such as a sync. The
seed decides which mutants are made. C mutants that compile to the same object file as the original are not made.

`trace` runs the tests of `make test` once, without a mutant. Tests that fail or are skipped on this machine are not
used afterwards. A Python mutant is tried with the tests that run its line, a C mutant with the tests of its part
(`PARTS`). Both end at the first failure. A test that hangs counts as a failure. A mutant whose tests need more than
`--seconds` is "unfinished", and a later run with more time tries it again. `run --again --tests tests/crash` tries
survivors with further tests, and `--nightly` with those that `make test` leaves out.

`trace` needs coverage and pytest-cov, which `make setup` does not install.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "mutants"
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "release", ".ci", ".github")
HANG_S = 90
"""Seconds without a finished test after which the tests count as hanging."""
MAX_FILE_S = 400
MAX_MEMORY_BYTES = 8 << 30
MIN_NOTICED = 0.9

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Source files, and the tests that must notice a mistake in them."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]  # Tried first, in this order.
    share: float  # Of all mutants.
    more: tuple[str, ...] = ()  # Tests that run the sources in other processes.


_CORE_TESTS = ("tests/contract", "tests/unit/store", "tests/property", "tests/unit/test_replay.py")
_CODEC_TESTS = ("tests/contract/test_codecs.py", "tests/unit/codec", "tests/format")
_OTHER_CORE_TESTS = ("tests/unit/sampling", "tests/unit/codec", "tests/format", "tests/unit/test_", "tests/recorder")
PARTS = (
    Part("store", ("src/holdall/store/*.py", "src/holdall/memory.py"), (*_CORE_TESTS, *_OTHER_CORE_TESTS), 0.23),
    Part("codec", ("src/holdall/codec/*.py",), _CODEC_TESTS, 0.06),
    Part("native", ("src/holdall/_native/*.c",), (*_CORE_TESTS, *_OTHER_CORE_TESTS, "tests/integration/sb3"), 0.18),
    Part("sampling", ("src/holdall/sampling/*.py",), ("tests/unit/sampling", "tests/contract"), 0.13),
    Part(
        "checkpoint",
        ("src/holdall/checkpoint/*.py",),
        ("tests/unit/checkpoint", "tests/contract"),
        0.18,
        ("tests/crash",),
    ),
    Part("sb3", ("src/holdall/sb3/*.py",), ("tests/integration/sb3",), 0.1),
    Part("cleanrl", ("src/holdall/cleanrl.py",), ("tests/unit/test_cleanrl.py",), 0.03),
    Part("torchrl", ("src/holdall/torchrl/*.py",), ("tests/unit/test_torchrl.py",), 0.05),
    Part("lerobot", ("src/holdall/lerobot/*.py",), ("tests/unit/test_lerobot.py",), 0.04),
)
TRACED = (
    "tests/contract",
    *(f"tests/unit/{name}" for name in ("checkpoint", "codec", "delivery", "device", "sampling", "store", "testing")),
    "tests/unit/test_*.py",
    *(f"tests/{name}" for name in ("property", "format", "recorder", "crash", "integration/sb3")),
    *(f"tests/integration/test_{name}.py" for name in ("lerobot_original", "torchrl_rules", "shared_observations")),
)
"""Tests that may run the sources of a part in their own process."""
NATIVE_TESTS = {
    "advantages": ("tests/unit/test_advantages.py", "tests/unit/test_rollout.py"),
    "draw": ("tests/unit/test_draw_slots.py", "tests/unit/sampling/test_uniform.py", "tests/unit/sampling"),
    "observation_log": ("tests/unit/test_observation_log.py",),
    "sumtree": ("tests/unit/sampling/test_prioritized.py", "tests/unit/sampling"),
    "coded": _CODEC_TESTS,
    "colours": _CODEC_TESTS,
    "decode": _CODEC_TESTS,
    "decoder": _CODEC_TESTS,
    "encode": _CODEC_TESTS,
    "narrow": _CODEC_TESTS,
    "transforms": _CODEC_TESTS,
}
"""Tests that are tried first for a C file."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: a file, a line, and the text of the line before and after."""

    part: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    old_line: str
    new_line: str

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
    annotations = {id(inner) for node in ast.walk(tree) for inner in (*_find_annotations(node), *_find_typing(node))}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt) or id(node) in annotations:
            continue
        for kind, changed in _list_mistakes(node):
            before = ast.get_source_segment(text, node)
            if before is None or "\n" in before:
                continue
            after = ast.unparse(changed)
            if not _is_same_code(before, node):
                continue
            lines = text.splitlines(keepends=True)
            old_line = lines[node.lineno - 1]
            row = old_line.encode()
            mutated = row[: node.col_offset] + after.encode() + row[node.end_col_offset :]
            lines[node.lineno - 1] = mutated.decode()
            if _is_parsed("".join(lines)):
                yield Mutant(part.name, name, node.lineno, kind, before, after, old_line, lines[node.lineno - 1])


def _is_same_code(text: str, node: ast.AST) -> bool:
    """Return whether `text` is the code of `node`. Older versions of Python give wrong places inside f-strings."""
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        return False
    parsed = statement.value if isinstance(node, ast.expr) and isinstance(statement, ast.Expr) else statement
    return ast.unparse(parsed) == ast.unparse(node)


def _is_parsed(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _find_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of annotations, which have no effect when the code runs."""
    for field in ("annotation", "returns"):
        annotation = getattr(node, field, None)
        if isinstance(annotation, ast.AST):
            yield from ast.walk(annotation)


def _find_typing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        yield from ast.walk(node)
    if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
        yield from ast.walk(node)


def _list_mistakes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
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
                yield Mutant(part.name, name, number, kind, stripped, changed.strip(), line, changed)


# ---------------------------------------------------------------- the native module


class NativeBuild:
    """Object files of the native module, so that a C mutant costs the compilation of one file."""

    def __init__(self, folder: Path) -> None:
        import numpy  # noqa: PLC0415

        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        includes = [sysconfig.get_path("include"), numpy.get_include(), ROOT / "third_party/zstandard"]
        flags = ["-O3", "-std=c11", "-fvisibility=hidden", "-g0", "-fPIC"]
        self._compile = ["gcc", *flags, *(f"-I{path}" for path in (*includes, ROOT / "third_party/lz4"))]
        self._sources = sorted((ROOT / "src/holdall/_native").glob("*.c"))

    def compile_all(self, jobs: int) -> None:
        """Compile every file of the tree as it is."""
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(lambda path: self.compile(path, self._object(path.stem)), self._sources))
        if not all(results):
            raise SystemExit("the native module could not be compiled; `python setup.py build_clib` must have run")

    def compile(self, source: Path, target: Path) -> bool:
        """Compile one file. Return whether that worked."""
        # The folder of the original, for its headers.
        command = [*self._compile, f"-I{ROOT / 'src/holdall/_native'}", "-c", str(source), "-o", str(target)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _object(self, stem: str) -> Path:
        return self._folder / f"{stem}.o"

    def link(self, target: Path, stem: str = "", replacement: Path | None = None) -> None:
        """Link the module to `target`, with `replacement` in place of the object file `stem`."""
        objects = [replacement if path.stem == stem else self._object(path.stem) for path in self._sources]
        library = ROOT / "build/third_party/libholdall_third_party.a"
        # A new file: a process may have mapped the previous one.
        target.unlink(missing_ok=True)
        subprocess.run(["gcc", "-shared", *map(str, objects), library, "-lpthread", "-o", target], check=True)

    def is_same(self, mutant: Mutant) -> bool | None:
        """Return whether a C mutant compiles to the original's object file, or None if it does not compile."""
        source = self._folder / "mutant" / Path(mutant.file).name
        source.parent.mkdir(exist_ok=True)
        source.write_text(apply_mutant(mutant), encoding="utf-8")
        target = source.with_suffix(".o")
        if not self.compile(source, target):
            return None
        return target.read_bytes() == self._object(source.stem).read_bytes()


def apply_mutant(mutant: Mutant) -> str:
    """Return the whole text of the file with the mistake in it."""
    lines = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines(keepends=True)
    lines[find_line(mutant) - 1] = mutant.new_line
    return "".join(lines)


def find_line(mutant: Mutant) -> int:
    """Return the number of the line today, or 0 if the file has changed there."""
    lines = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines(keepends=True)
    places = [number for number, line in enumerate(lines, 1) if line == mutant.old_line]
    return min(places, key=lambda number: abs(number - mutant.line), default=0)


# ---------------------------------------------------------------- prepare


def choose_mutants(count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, spread over the parts by their shares, in random order."""
    generator = random.Random(seed)
    chosen: list[Mutant] = []
    with tempfile.TemporaryDirectory() as name:
        build = NativeBuild(Path(name))
        build.compile_all(os.cpu_count() or 1)
        for part in PARTS:
            wanted = round(count * part.share)
            candidates = []
            for pattern in part.sources:
                for path in sorted(ROOT.glob(pattern)):
                    candidates += list(mutate_c(part, path) if path.suffix == ".c" else mutate_python(part, path))
            generator.shuffle(candidates)
            while wanted and candidates:
                mutant = candidates.pop()
                if any(mutant.key == other.key for other in chosen):
                    continue
                if mutant.file.endswith(".c") and build.is_same(mutant) is not False:
                    continue
                chosen.append(mutant)
                wanted -= 1
    generator.shuffle(chosen)
    return chosen


def prepare(options: argparse.Namespace) -> int:
    """Write the list of mutants."""
    mutants = choose_mutants(options.mutants, options.seed)
    rows = [{name: getattr(mutant, name) for name in Mutant.__dataclass_fields__} for mutant in mutants]
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "mutants.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(mutants)} mutants")
    return 0


def read_mutants(folder: Path) -> list[Mutant]:
    """Return the mutants that `prepare` wrote."""
    return [Mutant(**row) for row in json.loads((folder / "mutants.json").read_text())]


# ---------------------------------------------------------------- tests


class Recorder:
    """A plugin of pytest that writes the outcome of each test to a file as soon as it is tried."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test's call, and of its set-up and tear-down if they failed."""
        if report.when == "call" or not report.passed:
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
            self._file.write(json.dumps(row) + "\n")


def run_pytest(options: argparse.Namespace) -> int:
    """Run pytest in this process, with the recorder."""
    import pytest  # noqa: PLC0415

    del sys.path[0]  # The folder of this script.
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    return int(pytest.main(options.arguments, plugins=[Recorder(options.record)]))


def make_pytest_command(record: Path, *arguments: str) -> list[str]:
    """Return the command of a process that runs pytest."""
    common = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--hypothesis-seed=0", "--timeout=60"]
    return [sys.executable, str(Path(__file__)), "pytest", str(record), *common, *arguments]


def make_environment(copy: Path) -> dict[str, str]:
    """Return environment variables with which `holdall` is imported from a copy."""
    path = os.pathsep.join(filter(None, [str(copy / "src"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def make_copy(folder: Path) -> None:
    """Copy all files that tests need."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    (folder / ".cache").mkdir()
    for name in ("sb3", "lerobot"):
        if (ROOT / ".cache" / name).exists():
            (folder / ".cache" / name).symlink_to(ROOT / ".cache" / name)


def trace(options: argparse.Namespace) -> int:
    """Run the tests without a mutant. Store which tests pass, their seconds, and the lines that each of them runs.

    Every file of tests runs in its own process, so a crash does not affect other files.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in (*options.folder.glob("coverage.*.db"), options.folder / "tests.jsonl"):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "tree")
        make_copy(copy)
        build = NativeBuild(Path(name, "objects"))
        build.compile_all(options.jobs)
        build.link(copy / "src/holdall/_native.abi3.so")
        files = {path for pattern in options.tests or TRACED for path in copy.glob(pattern) if path.is_file()}
        files |= {path for pattern in options.tests or TRACED for path in copy.glob(f"{pattern}/**/test_*.py")}
        by_size = sorted(files, key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(options.jobs) as pool:
            for number, path in enumerate(by_size):
                pool.submit(_trace_file, options, number, copy, path)
    passed = read_passed(options.folder / "tests.jsonl")
    print(f"{len(passed)} tests passed in {sum(passed.values()):.0f} s of one core")
    return int(not passed)


def _trace_file(options: argparse.Namespace, number: int, copy: Path, path: Path) -> None:
    data = options.folder / f"coverage.{number}.db"
    settings = copy.parent / f"coverage{number}.ini"
    settings.write_text(f"[run]\nsource = {copy / 'src/holdall'}\ndata_file = {data}\ncore = ctrace\n")
    coverage = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    chosen = ["-m", "not nightly", f"--basetemp={copy.parent / f'tmp{number}'}", *options.pytest]
    command = make_pytest_command(options.folder / "tests.jsonl", *coverage, *chosen, str(path.relative_to(copy)))
    with (copy.parent / f"trace{number}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=make_environment(copy), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(MAX_FILE_S)
        except subprocess.TimeoutExpired:
            print(f"{path.name} took more than {MAX_FILE_S} s")
        finally:
            _end_group(process)


def read_passed(record: Path) -> dict[str, float]:
    """Return the tests that passed, and their seconds."""
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    failed = {row["test"] for row in rows if row["outcome"] != "passed"}
    return {row["test"]: row["seconds"] for row in rows if row["test"] not in failed}


class Tests:
    """The tests that pass here, and which of them run a line."""

    def __init__(self, folder: Path) -> None:
        self.seconds = read_passed(folder / "tests.jsonl")
        self._by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._by_file: dict[str, set[str]] = defaultdict(set)
        files = {mutant.file for mutant in read_mutants(folder)}
        for path in folder.glob("coverage.*.db"):
            self._read_coverage(path, files)

    def _read_coverage(self, path: Path, files: set[str]) -> None:
        from coverage.numbits import numbits_to_nums  # noqa: PLC0415

        query = (
            "SELECT file.path, context.context, line_bits.numbits FROM line_bits "
            "JOIN file ON file.id = line_bits.file_id JOIN context ON context.id = line_bits.context_id"
        )
        with sqlite3.connect(path) as database:
            for file, context, numbits in database.execute(query):
                source = file[file.index("src/holdall/") :]
                test = context.rpartition("|")[0]
                if source not in files or test not in self.seconds:
                    continue
                self._by_file[source].add(test)
                for line in numbits_to_nums(numbits):
                    self._by_line[source, line].add(test)

    def select(self, mutant: Mutant) -> list[str]:
        """Return the tests for a mutant, the likeliest first.

        A line that runs at import time belongs to no test. Its mutant is tried with all tests that run its file.
        """
        (part,) = (part for part in PARTS if part.name == mutant.part)
        folders = part.tests
        if mutant.file.endswith(".c") or not self._by_file:
            folders = (*NATIVE_TESTS.get(Path(mutant.file).stem, ()), *part.tests)
            tests = {test for test in self.seconds if test.startswith(folders)}
        else:
            tests = self._by_line.get((mutant.file, find_line(mutant))) or self._by_file[mutant.file]
            # Lines that these tests run in other processes are not traced.
            tests = tests | {test for test in self.seconds if part.more and test.startswith(part.more)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            by_file[test.partition("::")[0]].append(test)

        def rank(file: str) -> tuple[int, float]:
            place = next((number for number, folder in enumerate(folders) if file.startswith(folder)), len(folders))
            return place, sum(self.seconds[test] for test in by_file[file])

        return [
            test for file in sorted(by_file, key=rank) for test in sorted(by_file[file], key=self.seconds.__getitem__)
        ]


# ---------------------------------------------------------------- run


class Runner:
    """Tries mutants in several copies of the tree at a time."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options = options
        self._scratch = scratch
        self._tests = None if options.tests else Tests(options.folder)
        self._build = NativeBuild(scratch / "objects")
        self._lock = threading.Lock()
        self._mutants: list[Mutant] = []
        self._end = time.monotonic() + 60 * options.minutes

    def run(self, mutants: list[Mutant]) -> None:
        """Try mutants until the time is over."""
        self._mutants = list(reversed(mutants))
        if any(mutant.file.endswith(".c") for mutant in mutants):
            self._build.compile_all(self._options.jobs)
        with ThreadPoolExecutor(self._options.jobs) as pool:
            for future in [pool.submit(self._work, self._scratch / f"copy{n}") for n in range(self._options.jobs)]:
                future.result()

    def _work(self, folder: Path) -> None:
        copy = folder / "tree"
        make_copy(copy)
        while time.monotonic() < self._end:
            with self._lock:
                if not self._mutants:
                    return
                mutant = self._mutants.pop()
            begun = time.monotonic()
            row = self._try(folder, copy, mutant)
            if row is None:
                continue
            row |= {"key": mutant.key, "part": mutant.part, "seconds": round(time.monotonic() - begun, 1)}
            row["selection"] = "nightly" if self._options.nightly else "fast"
            with self._lock, self._options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['outcome']}, {row['seconds']:.0f} s: {mutant.key}", flush=True)

    def _try(self, folder: Path, copy: Path, mutant: Mutant) -> Row | None:
        """Return the outcome, or None if no test can be used or the time is over."""
        if self._tests is None:
            tests = self._options.tests
        else:
            tests = self._tests.select(mutant)
            if not tests:
                return None
        path = copy / mutant.file
        is_native = path.suffix == ".c"
        original = path.read_text(encoding="utf-8")
        path.write_text(apply_mutant(mutant), encoding="utf-8")
        try:
            if is_native:
                changed = folder / "mutant.o"
                if not self._build.compile(path, changed):
                    return None
                self._build.link(copy / "src/holdall/_native.abi3.so", path.stem, changed)
            return self._run_tests(folder, copy, tests)
        finally:
            path.write_text(original, encoding="utf-8")
            # Python compiles a file again if its time in seconds has changed.
            os.utime(path, (time.time(), time.time() + 10))
            if is_native:
                self._build.link(copy / "src/holdall/_native.abi3.so")

    def _run_tests(self, folder: Path, copy: Path, tests: list[str]) -> Row | None:
        record = folder / "record.jsonl"
        record.write_text("")
        names = folder / "tests.txt"
        names.write_text("\n".join(tests))
        arguments = ["-x", f"--basetemp={folder / 'tmp'}", *self._options.pytest, f"@{names}"]
        if not self._options.nightly:
            arguments[:0] = ["-m", "not nightly"]
        begun = time.monotonic()
        with (folder / "pytest.log").open("w") as log:
            process = subprocess.Popen(
                make_pytest_command(record, *arguments),
                cwd=copy,
                env=make_environment(copy),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while True:
                    try:
                        status = process.wait(0.5)
                        break
                    except subprocess.TimeoutExpired:
                        pass
                    if time.monotonic() > self._end:
                        return None
                    if time.time() - record.stat().st_mtime > HANG_S:
                        return {"outcome": "timed out", "tests": count_lines(record)}
                    if time.monotonic() - begun > self._options.seconds:
                        return {"outcome": "unfinished", "tests": count_lines(record)}
            finally:
                _end_group(process)
        rows = [json.loads(line) for line in record.read_text().splitlines()]
        if status == 0:
            return {"outcome": "survived", "tests": len(rows)}
        failed = [row["test"] for row in rows if row["outcome"] == "failed"]
        by = failed[0] if failed else (folder / "pytest.log").read_text(errors="replace")[-300:]
        return {"outcome": "noticed", "tests": len(rows), "by": by}


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run(options: argparse.Namespace) -> int:
    """Try the mutants that have no result yet, or survivors again."""
    outcomes = read_outcomes(options.results)
    wanted = {None, "unfinished", "survived"} if options.again else {None, "unfinished"}
    mutants = [mutant for mutant in read_mutants(options.folder) if outcomes.get(mutant.key) in wanted]
    mutants = [mutant for mutant in mutants if options.only in mutant.key and find_line(mutant)]
    if options.reverse:
        mutants.reverse()
    mutants.sort(key=lambda mutant: outcomes.get(mutant.key) is not None)  # New ones first.
    # A test that hangs is killed, and may leave a small file system mounted.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Runner(options, Path(name)).run(mutants)
    return 0


# ---------------------------------------------------------------- table


def read_outcomes(*paths: Path, selections: tuple[str, ...] = ("fast", "nightly")) -> dict[str, str]:
    """Return the outcome of each mutant. A mutant that was noticed once is noticed."""
    outcomes: dict[str, str] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            if row["selection"] in selections and outcomes.get(row["key"]) not in ("noticed", "timed out"):
                outcomes[row["key"]] = row["outcome"]
    return outcomes


def table(options: argparse.Namespace) -> int:
    """Print the share that was noticed, by part, and the mutants that survived."""
    mutants = read_mutants(options.folder)
    paths = [options.results, *options.more]
    fast = read_outcomes(*paths, selections=("fast",))
    both = read_outcomes(*paths)
    mutants = [mutant for mutant in mutants if find_line(mutant)]  # Lines of the others were changed later.
    tried = [mutant for mutant in mutants if mutant.key in both]

    def count(outcomes: dict[str, str], name: str) -> int:
        return sum(
            outcomes.get(mutant.key) in ("noticed", "timed out") for mutant in tried if name in ("all", mutant.part)
        )

    # Without a nightly run, its column would only repeat the other one.
    columns = [("`make test`", fast), ("nightly too", both)] if both != fast else [("`make test`", fast)]
    print(f"| part | mutants | {' | '.join(f'noticed by {title}' for title, _ in columns)} |")
    print(f"|---|--:|{'--:|' * len(columns)}")
    for name in (*(part.name for part in PARTS), "all"):
        total = sum(name in ("all", mutant.part) for mutant in tried)
        print(f"| {name} | {total} | {' | '.join(str(count(outcomes, name)) for _, outcomes in columns)} |")
    print()
    for mutant in tried:
        if both[mutant.key] in ("survived", "unfinished"):
            print(f"* {both[mutant.key]}: `{mutant.key}`")
    share = count(fast, "all") / max(len(tried), 1)
    print(f"\n{share:.1%} of {len(tried)} mutants were noticed, {len(mutants) - len(tried)} were not tried")
    return int(share < MIN_NOTICED)


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def add(name: str, function: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=function.__doc__)
        command.set_defaults(function=function)
        if name != "pytest":
            command.add_argument("--folder", type=Path, default=FOLDER, help="where mutants and tests are stored")
        return command

    command = add("prepare", prepare)
    command.add_argument("--mutants", type=int, default=200)
    command.add_argument("--seed", type=int, default=0)
    for name, function in (("trace", trace), ("run", run)):
        command = add(name, function)
        command.add_argument("--jobs", type=int, default=2)
        command.add_argument("--tests", nargs="+", help="use these tests instead of the chosen ones")
        command.add_argument("--pytest", action="append", default=[], help="a further argument for pytest")
    command.add_argument("--seconds", type=float, default=120, help="at most, for one mutant")
    command.add_argument("--minutes", type=float, default=600, help="at most, for all mutants")
    command.add_argument("--only", default="", help="mutants whose file and text contain this")
    command.add_argument("--reverse", action="store_true", help="from the end of the list")
    command.add_argument("--again", action="store_true", help="also mutants that survived")
    command.add_argument("--nightly", action="store_true", help="also tests that `make test` leaves out")
    command.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    command = add("table", table)
    command.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    command.add_argument("--more", type=Path, nargs="*", default=[], help="further files of results")
    command = add("pytest", run_pytest)
    command.add_argument("record", type=Path)
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for name in ("folder", "results"):
        if hasattr(options, name):
            setattr(options, name, getattr(options, name).resolve())
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())
