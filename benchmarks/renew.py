"""Measure one row of docs/benchmarks.md again, or all, and put the results where they are shown.

    python benchmarks/renew.py                    # what there is, and how old each result is
    python benchmarks/renew.py replay/atari       # one row; replay, compressed, buffers, growth: all of these; or all

A row is kept in results/, and then README.md, docs/benchmarks.md, docs/memory.md (growth) and the pictures are written
from what is there. Use an idle machine: a row takes one to three minutes, `buffers` and `growth` longer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from growth import table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MEMORY_PAGE = HERE.parent / "docs" / "memory.md"
GROWTH = re.compile(r"(<!-- growth -->\n).*?(<!-- end of growth -->)", re.DOTALL)
GROWTH_NAMES = {"atari": "Seaquest, stacks of 4 frames", "camera": "A camera of 84 x 84 x 3 and 31 floats, Dict"}


def kept(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def row_name(kind: str, row: dict[str, Any]) -> str:
    """Return how a row is named on the command line."""
    return "/".join([kind, row["case"], *([row["compressed"]] if kind == "compressed" else [])])


def rows() -> dict[str, str]:
    """Return every row that can be measured again, with the commit that it was measured with."""
    found = {row_name(kind, row): row["commit"] for kind in ("replay", "compressed") for row in kept(kind)}
    return found | {"buffers": "", "growth": kept("growth")[0]["commit"]}


def run(*command: str | Path, may_fail: bool = False) -> None:
    """Run a command; end if it fails. A bar that is not met is no failure here: the tables show the figure."""
    print("+", *command, flush=True)
    done = subprocess.run([str(word) for word in command], check=False)
    if done.returncode and not may_fail:
        sys.exit(f"error: exited with {done.returncode}")


def measure(name: str) -> None:
    """Measure a row and keep it."""
    if name == "buffers":
        return run(sys.executable, "-m", "holdall", "bench", "buffers", "--out", RESULTS / "buffers.jsonl")
    if name == "growth":
        return run(sys.executable, HERE / "growth.py", "--json", RESULTS / "growth.jsonl", may_fail=True)
    kind, case, *prefer = name.split("/")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.jsonl")
        options = ["--compressed", *prefer] if prefer else []
        run(sys.executable, HERE / "replay.py", "--case", case, *options, "--json", out, may_fail=True)
        (new,) = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    lines = [new if row_name(kind, old) == name else old for old in kept(kind)]
    (RESULTS / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return None


def growth_text(result: dict[str, Any]) -> str:
    """Return what docs/memory.md shows of a case that grows."""
    smallest, largest = (result["rows"][place]["transitions"] for place in (0, -1))
    median, least = result["sample_ratio"], result["sample_ratio_min"]
    return (
        f"{GROWTH_NAMES[result['case']]}:\n\n{table(result)}\n\n"
        f"A batch from {largest:,} transitions takes {median:.2f} times as long as one from {smallest:,} by median, "
        f"{least:.2f}\nby minimum.\n"
    )


def publish() -> None:
    """Write the pages and the pictures from what is kept."""
    run(sys.executable, HERE / "readme.py")
    run(sys.executable, HERE / "picture.py")
    page = MEMORY_PAGE.read_text(encoding="utf-8")
    text = "\n".join(growth_text(result) for result in kept("growth"))
    MEMORY_PAGE.write_text(GROWTH.sub(lambda found: f"{found[1]}{text}{found[2]}", page), encoding="utf-8")


def main() -> None:
    """Measure what was asked for; without a name, list the rows."""
    wanted = [name for name in rows() if any(name == given or name.startswith(f"{given}/") for given in sys.argv[1:])]
    if sys.argv[1:] == ["all"]:
        wanted = list(rows())
    if not wanted:
        print("\n".join(f"{name:34} {commit[:12]}" for name, commit in rows().items()))
        sys.exit(f"error: there is no {' '.join(sys.argv[1:])}" if sys.argv[1:] else 0)
    for name in wanted:
        measure(name)
    publish()


if __name__ == "__main__":
    main()
