"""How long `holdall lint` takes: the whole command for one script, and a directory of 1,000 files.

    python benchmarks/lint.py [--runs 9] [--files 1000] [--docs]

Both sides of the first take turns: the command, and an interpreter that only imports holdall. CPU seconds are those of
the process itself; on a busy machine the wall clock also counts the others. The directory holds the package's own
examples and modules, copied until there are enough of them. Results go to benchmarks/results/lint.json; `--docs` writes
them into docs/lint.md.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "notes" / "note_004.py"
RESULTS = ROOT / "benchmarks" / "results" / "lint.json"
IMPORT, LINT = ["-c", "import holdall"], ["-m", "holdall", "lint", "--fail-on", "never"]


def timed(arguments: list[str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of one process."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def many_files(count: int, into: Path) -> None:
    """Copy examples and modules of this repository until there are so many files."""
    found = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "src").rglob("*.py"))]
    for number in range(count):
        file = found[number % len(found)]
        folder = into / f"project_{number // 100}"
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder / f"file_{number}.py")


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    sides = {"import": IMPORT, "script": [*LINT, str(SCRIPT)]}
    for arguments in sides.values():
        timed(arguments)  # compiles what is imported for the first time
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(options.runs):
        for name, arguments in sides.items():
            taken[name].append(timed(arguments))
    with tempfile.TemporaryDirectory() as folder:
        many_files(options.files, Path(folder))
        taken["files"] = [timed([*LINT, folder]) for _ in range(3)]
    results = {
        name: {"wall_s": statistics.median(w for w, _ in both), "cpu_s": statistics.median(c for _, c in both),
               "least_cpu_s": min(c for _, c in both)}
        for name, both in taken.items()
    }  # fmt: skip
    results["files"]["count"] = options.files
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for name, one in results.items():
        print(f"{name:8} wall {one['wall_s']:.2f} s, CPU {one['cpu_s']:.2f} s, least CPU {one['least_cpu_s']:.2f} s")
    if options.docs:
        page = ROOT / "docs" / "lint.md"
        said = (
            f"The whole command takes {results['script']['wall_s']:.2f} s for a script, and "
            f"{results['files']['wall_s']:.1f} s for {options.files:,} files (medians on 2 cores;\n"
            "`python benchmarks/lint.py --docs`)."
        )
        text = page.read_text(encoding="utf-8")
        text, count = re.subn(
            r"The whole command takes .*?`python benchmarks/lint\.py[^`]*`\)\.", said, text, flags=re.S
        )
        assert count == 1
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
