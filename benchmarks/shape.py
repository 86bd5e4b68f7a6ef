"""The shape of the code: files that one datum passes, files, lines, names with two meanings: `make shape`.

In:  the source tree beside this script.  Out: a table of figures, before the second design and now; or JSON of now.
A walk runs one piece of work for real and lists the source files whose functions were called, in all threads of this
process. What is constructed before the work begins does not count. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from gymnasium import spaces

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "holdall"
BEFORE = HERE / "results" / "shape_before.json"
TARGETS = {
    "add": 10,
    "sample": 8,
    "cuda": 11,
    "save": 16,
    "ray": 16,
    "files": 200,
    "code_lines": 27_000,
    "names_defined_twice": 0,
}
TWINS = frozenset({"ReplayMemory", "ReplayBuffer", "RolloutBuffer"})
"""Public classes that are named like what they replace, or like the local class that they stand for."""

_SPACE = spaces.Dict(
    {"camera": spaces.Box(0, 255, (84, 84, 3), np.uint8), "state": spaces.Box(-9, 9, (6,), np.float32)}
)
_ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
_SETTLED, _WALKED = 1200, 1400  # steps before a walk, enough for a codec to be chosen, and steps of the walk itself


class Walk:
    """The files of holdall whose functions run, in the order in which they are entered first."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self._root = f"{SOURCE}/"

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; the interpreter's profiling hook."""
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self._root):
            file = name.removeprefix(self._root)
            self.files[file] = self.files.get(file, 0) + 1

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Follow threads that are started in the block for as long as they live."""
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Follow what this thread, and those that are followed already, do in the block, and only that."""
        self.files.clear()
        with self.in_new_threads():
            sys.setprofile(self)
            try:
                yield
            finally:
                sys.setprofile(None)
        self.files = dict(self.files)


def _frame(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a picture that compresses somewhat, and differs from every other one."""
    picture = np.random.default_rng(number % 400).integers(0, 9, (1, 84, 84, 3), dtype=np.uint8)
    picture[0, 0, 0] = number % 251, number // 251 % 251, 0
    return picture


def _observed(number: int) -> dict[str, Any]:
    return {"camera": _frame(number), "state": np.full((1, 6), number, np.float32)}


def _add(buffer: Any, first: int, end: int) -> None:
    action, reward = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    for number in range(first, end):
        done = np.array([number % 200 == 199])
        buffer.add(_observed(number), _observed(number + 1), action, reward, done, [{}])


def _buffer(device: str = "cpu", **settings: Any) -> Any:
    from holdall.sb3 import ReplayBuffer  # noqa: PLC0415  importing it is no part of a walk

    return ReplayBuffer(20_000, _SPACE, _ACTIONS, device=device, **settings)


def walk_add(walk: Walk) -> None:
    """Follow steps from the drop-in's `add` until their slices are compressed and on disk."""
    with tempfile.TemporaryDirectory() as folder, walk.in_new_threads():
        buffer = _buffer(budget=None, spill_dir=folder)
        _add(buffer, 0, _SETTLED)
        buffer.memory.drain()
        with walk.under_way():
            _add(buffer, _SETTLED, _SETTLED + _WALKED)
            buffer.memory.drain()
        buffer.memory.close()


def walk_sample(walk: Walk, device: str = "cpu") -> None:
    """Follow `sample(256)` over raw, compressed and spilled transitions until it returns tensors."""
    with tempfile.TemporaryDirectory() as folder:
        buffer = _buffer(device, budget=None, spill_dir=folder)
        _add(buffer, 0, _SETTLED + _WALKED)
        buffer.memory.drain()
        buffer.sample(256)
        with walk.under_way():
            buffer.sample(256)
        buffer.memory.close()


def walk_cuda(walk: Walk) -> None:
    """Follow the same `sample(256)` until it returns CUDA tensors."""
    walk_sample(walk, "cuda")


def walk_save(walk: Walk) -> None:
    """Follow `save` and `load`."""
    from holdall import ReplayMemory  # noqa: PLC0415  as above

    with tempfile.TemporaryDirectory() as folder:
        buffer = _buffer(budget=None)
        _add(buffer, 0, _SETTLED + _WALKED)
        with walk.under_way():
            buffer.memory.save(folder).result()
            ReplayMemory.load(folder).close()
        buffer.memory.close()


def walk_ray(walk: Walk) -> None:
    """Follow a writer's `add` until a learner's batch, in this process; the shard's files come on top."""
    import ray  # noqa: PLC0415  heavy, and only for this walk

    import holdall.ray  # noqa: PLC0415

    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    flags = np.array([False])
    with holdall.ray.ReplayMemory(_SPACE, _ACTIONS, 20_000, shards=1) as memory, walk.under_way():
        for number in range(300):
            action, reward = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
            memory.add(_observed(number), action, reward, _observed(number + 1), flags, flags)
        memory.flush()
        memory.sample(64)
    ray.shutdown()


WALKS: dict[str, Callable[[Walk], None]] = {
    "add": walk_add,
    "sample": walk_sample,
    "cuda": walk_cuda,
    "save": walk_save,
    "ray": walk_ray,
}


def code_lines(text: str) -> int:
    """Count the lines of a module that are neither blank, comment nor docstring."""
    counted = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                counted -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(counted)


def names_defined_twice() -> dict[str, list[str]]:
    """Return the class names that several files define, but for public twins."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(file.relative_to(SOURCE)))
    return {name: files for name, files in homes.items() if len(set(files)) > 1 and name not in TWINS}


def measure(walks: list[str]) -> dict[str, Any]:
    """Take all figures."""
    files = sorted(SOURCE.rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [len(text.splitlines()) for text in texts]
    found: dict[str, Any] = {
        "files": len(files),
        "code_lines": sum(map(code_lines, texts)),
        "median_lines": int(np.median(lines)),
        "longest": max(zip(lines, (str(file.relative_to(SOURCE)) for file in files), strict=True)),
        "names_defined_twice": sorted(names_defined_twice()),
        "walks": {},
    }
    for name in walks:
        walk = Walk()
        WALKS[name](walk)
        found["walks"][name] = list(walk.files)
    return found


def _walked(name: str, figures: dict[str, Any]) -> int:
    return len(figures["walks"].get(name, []))


def table(found: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Write the figures beside earlier ones and their targets."""
    rows = [("", "before", "now", "at most")]

    def row(title: str, key: str, pick: Callable[[dict[str, Any]], object]) -> None:
        rows.append((title, str(pick(before)) if before else "", str(pick(found)), str(TARGETS.get(key, ""))))

    for name, walk in WALKS.items():
        if name in found["walks"]:
            title = f"files on the walk `{name}`: {(walk.__doc__ or '').removeprefix('Follow ').rstrip('.')}"
            row(title, name, partial(_walked, name))
    row("Python files in src", "files", lambda figures: figures["files"])
    row("lines of code, without comments, docstrings and blanks", "code_lines", lambda figures: figures["code_lines"])
    row("lines of the median file", "", lambda figures: figures["median_lines"])
    row("lines of the longest file", "", lambda figures: figures["longest"][0])
    row("class names with two meanings", "names_defined_twice", lambda figures: len(figures["names_defined_twice"]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], ("---",) * 4, *rows[1:]])


def _has_device() -> bool:
    import torch  # noqa: PLC0415  heavy, and no part of a walk

    return torch.cuda.is_available()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Print the shape of the code.")
    parser.add_argument(
        "walks",
        nargs="*",
        help=f"which walks to take; all by default, `cuda` where there is a device ({', '.join(WALKS)})",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, the files of walks among them")
    parser.add_argument("--files", action="store_true", help="also list the files of every walk")
    asked = parser.parse_args()
    if unknown := set(asked.walks) - set(WALKS):
        parser.error(f"unknown walks: {', '.join(sorted(unknown))}; choose from {', '.join(WALKS)}")
    found = measure(asked.walks or [name for name in WALKS if name != "cuda" or _has_device()])
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else None
    print(table(found, before))
    if asked.files:
        for name, files in found["walks"].items():
            print(f"\n{name}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
