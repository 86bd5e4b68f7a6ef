"""Run benchmarks: `python benchmarks/run.py [NAME ...] [--short] [--out FOLDER] [--data FOLDER]`.

Without a name, it lists the benchmarks of benchmarks.toml with their claims. `all` runs every one that needs nothing
special. Each command runs in a process of its own and writes its figures to FOLDER/NAME.json. At the end, a table shows
what ran, how long it took, and what missed a bar. The exit status is 1 if a command failed or missed a bar.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import HERE, read_list

OUT = HERE.parent / ".cache" / "benchmarks"


def list_commands(
    name: str, benchmark: dict[str, Any], out: Path, data: Path | None, *, is_short: bool
) -> list[list[str]]:
    """Return the command lines of a benchmark."""
    lines = benchmark.get("short", benchmark["commands"]) if is_short else benchmark["commands"]
    commands = []
    for line in lines:
        if "DATA" in line and data is None:
            sys.exit(f"{name} needs {benchmark['needs']}. Name the folder DATA with --data.")
        script, *options = shlex.split(line.replace("DATA", shlex.quote(str(data))))
        if is_short and "short" not in benchmark:
            options.append("--short")
        if benchmark.get("writes", True):
            options += ["--json", str(out / f"{name}.json")]
        commands.append([sys.executable, str(HERE / script), *options])
    return commands


def show_list(benchmarks: dict[str, dict[str, Any]]) -> None:
    """Print every benchmark with its claim and what it needs."""
    for name, benchmark in benchmarks.items():
        print(f"{name}: {benchmark['claim']}")
        if "needs" in benchmark:
            print(f"    needs {benchmark['needs']}")


def main() -> int:
    """Run what is named."""
    benchmarks = read_list()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--short", action="store_true", help="fewer repetitions, for a look at the figures")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="folder of the results")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of recordings and checkouts")
    given = parser.parse_args()
    if not given.names:
        show_list(benchmarks)
        return 0
    if unknown := set(given.names) - {"all", *benchmarks}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    names = given.names
    if "all" in names:
        names = [name for name, benchmark in benchmarks.items() if "needs" not in benchmark]
    outcomes = []
    for name in names:
        for command in list_commands(name, benchmarks[name], given.out.resolve(), given.data, is_short=given.short):
            shown = " ".join([Path(command[1]).name, *command[2:]])
            print(f"\n{name}: {shown}", flush=True)
            begun = time.monotonic()
            status = subprocess.run(command, check=False).returncode
            outcomes.append((shown, status, time.monotonic() - begun))
    print("\n| command | exit status | seconds |\n|---|---|---|")
    for shown, status, seconds in outcomes:
        print(f"| {shown} | {status} | {seconds:.0f} |")
    return int(any(status for _, status, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
