"""Run benchmarks: `python benchmarks/run.py [NAME ...] [--short] [--out FOLDER] [--data FOLDER]`.

A NAME is a claim of benchmarks.toml or one of its parts. Without a name, the claims and parts are listed. `all` runs
every part that needs nothing special. Each command runs in a process of its own and writes its figures to
FOLDER/PART.json. At the end, a table shows what ran, how long it took, and what missed a bar. The exit status is 1 if a
command failed or missed a bar.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import HERE

LIST = HERE / "benchmarks.toml"
OUT = HERE.parent / ".cache" / "benchmarks"


@dataclass(frozen=True)
class Part:
    """A part of a claim: its commands, and what they need. They share one file of results."""

    name: str
    commands: tuple[str, ...]
    short: tuple[str, ...]
    needs: str | None
    takes_json: bool

    def list_commands(self, out: Path, data: Path | None, *, is_short: bool) -> list[list[str]]:
        """Return the command lines."""
        commands = []
        for line in self.short if is_short else self.commands:
            if "DATA" in line and data is None:
                sys.exit(f"{self.name} needs {self.needs}. Name the folder DATA with --data.")
            script, *options = shlex.split(line.replace("DATA", shlex.quote(str(data))))
            if self.takes_json:
                options += ["--json", str(out / f"{self.name}.json")]
            commands.append([sys.executable, str(HERE / script), *options])
        return commands


@dataclass(frozen=True)
class Claim:
    """A claim of the documentation. A claim with one part shares its name with the part."""

    name: str
    text: str
    parts: tuple[Part, ...]


def read_claims() -> list[Claim]:
    """Return the claims of benchmarks.toml."""
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))
    claims = []
    for name, table in tables.items():
        parts = {key: value for key, value in table.items() if isinstance(value, dict)} or {name: table}
        claims.append(Claim(name, table["claim"], tuple(_read_part(part, parts[part]) for part in parts)))
    return claims


def _read_part(name: str, table: dict[str, Any]) -> Part:
    commands = table["commands"]
    short = table.get("short", [f"{command} --short" for command in commands])
    return Part(name, tuple(commands), tuple(short), table.get("needs"), table.get("takes_json", True))


def show_list(claims: list[Claim]) -> None:
    """Print every claim with its parts, and what they need."""
    for claim in claims:
        print(f"{claim.name}: {claim.text}")
        for part in claim.parts:
            needs = "" if part.needs is None else f"needs {part.needs}"
            shown = f"{part.name}  {needs}" if len(claim.parts) > 1 else needs
            if shown:
                print(f"    {shown.rstrip()}")


def choose_parts(claims: list[Claim], names: list[str]) -> list[Part]:
    """Return the parts that are named, each once, in the order of the list."""
    chosen = []
    for claim in claims:
        for part in claim.parts:
            is_in_all = "all" in names and part.needs is None
            if is_in_all or claim.name in names or part.name in names:
                chosen.append(part)
    return chosen


def main() -> int:
    """Run what is named."""
    claims = read_claims()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a claim, a part, or all")
    parser.add_argument("--short", action="store_true", help="fewer repetitions, for a look at the figures")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="folder of the results")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of recordings and checkouts")
    given = parser.parse_args()
    if not given.names:
        show_list(claims)
        return 0
    known = {claim.name for claim in claims} | {part.name for claim in claims for part in claim.parts}
    if unknown := set(given.names) - known - {"all"}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    outcomes = []
    for part in choose_parts(claims, given.names):
        for command in part.list_commands(given.out.resolve(), given.data, is_short=given.short):
            shown = " ".join([str(Path(command[1]).relative_to(HERE)), *command[2:]])
            print(f"\n{part.name}: {shown}", flush=True)
            begun = time.monotonic()
            status = subprocess.run(command, check=False).returncode
            outcomes.append((shown, status, time.monotonic() - begun))
    print("\n| command | exit status | seconds |\n|---|---|---|")
    for shown, status, seconds in outcomes:
        print(f"| {shown} | {status} | {seconds:.0f} |")
    return int(any(status for _, status, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
