"""Mistakes planted into public training scripts: how many does `holdall lint` find?

    python benchmarks/planted_mistakes.py --checkouts DIR --python new=PATH --python old=PATH --json FILE

`planted_mistakes.toml` has one change for each mistake. It is made in a copy of the script. Rules about files read the
copy; rules about values run it until it is about to train. A mistake counts as found if its own rule finds more in the
changed script than in the script as it is, which is read or run in the same way. `--files` leaves out the mistakes
whose rules need a run. `--only RULE` measures the mistakes of one rule and keeps the other rows of FILE. DIR and the
environments are those of `probe_scripts.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from probe_scripts import TIMEOUT_S, read_block
from process import commit, emit, machine

from holdall.tools import lint
from holdall.tools.probe.launch import probe

LIST = Path(__file__).parent / "planted_mistakes.toml"
_FOUND_BEFORE: dict[str, list[dict[str, Any]]] = {}
"""The findings of unchanged scripts that were run, by script and arguments. Several mistakes have the same script."""


def read_script(mistake: dict[str, Any], checkouts: Path) -> str:
    """Return the script as it is."""
    if "block" in mistake:
        return read_block(checkouts, f"{mistake['file']}:{mistake['block']}")
    script: Path = checkouts / mistake["file"]
    return script.read_text(encoding="utf-8")


def plant(text: str, mistake: dict[str, Any]) -> str:
    """Return the script with the mistake."""
    anchor = mistake.get("anchor")
    if anchor is not None:
        found = re.search(anchor, text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{mistake['file']} has no line that matches {anchor!r}")
        if "replace" in mistake:
            text = text[: found.start()] + mistake["replace"] + text[found.end() :]
        else:
            end = text.find("\n", found.end()) + 1
            begin = text.rfind("\n", 0, found.start()) + 1
            indent = re.match(r"[ \t]*", text[begin:])[0]  # type: ignore[index]
            lines = "".join(f"{indent}{line}\n" for line in mistake["insert"].splitlines())
            text = text[:end] + lines + text[end:]
    return f"{mistake['first']}\n{text}" if "first" in mistake else text


def find(mistake: dict[str, Any], text: str, checkouts: Path, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """Return what lint finds in a script."""
    if "command" not in mistake:
        found = lint.text(text)
    elif "block" in mistake:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(text, encoding="utf-8")
            command = [pythons[mistake["environment"]], str(script), *shlex.split(mistake["command"])]
            found = lint.snapshot(probe(command, TIMEOUT_S, cwd=folder))
    else:
        script = checkouts / mistake["file"]
        command = [pythons[mistake["environment"]], script.name, *shlex.split(mistake["command"])]
        found = lint.snapshot(probe(command, TIMEOUT_S, cwd=script.parent))
    return [{"rule": one.rule, "message": one.message} for one in found]


def find_before(mistake: dict[str, Any], text: str, checkouts: Path, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """Return what lint finds in the script as it is, started with the arguments that have no mistake."""
    if "command" not in mistake:
        return find(mistake, text, checkouts, pythons)
    command = mistake.get("before", mistake["command"])
    key = json.dumps([mistake["file"], mistake.get("block"), mistake["environment"], command])
    if key not in _FOUND_BEFORE:
        _FOUND_BEFORE[key] = find(mistake | {"command": command}, text, checkouts, pythons)
    return _FOUND_BEFORE[key]


def read_rows(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows that were measured before."""
    if file is None or not file.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["mistakes"]
    return rows


def main() -> None:
    """Plant every mistake and print whether it was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--only", action="append", metavar="RULE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ |= {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    pythons = dict(text.split("=", 1) for text in args.python)
    old = {row["number"]: row for row in read_rows(args.json) if "number" in row}
    rows = []
    for number, mistake in enumerate(tomllib.loads(LIST.read_text(encoding="utf-8"))["mistake"]):
        is_named = not args.only or mistake["rule"] in args.only
        if not is_named or (args.files and "command" in mistake):
            rows += [old[number]] if number in old else []
            continue
        text = read_script(mistake, args.checkouts)
        before = find_before(mistake, text, args.checkouts, pythons)
        after = find(mistake, plant(text, mistake), args.checkouts, pythons)
        own_before = sum(one["rule"] == mistake["rule"] for one in before)
        own_after = sum(one["rule"] == mistake["rule"] for one in after)
        is_found = own_after > own_before
        rows.append(
            {
                "number": number,
                "rule": mistake["rule"],
                "file": mistake["file"],
                "needs_run": "command" in mistake,
                "is_found": is_found,
                "before": before,
                "findings": after,
            }
        )
        print(f"{mistake['rule']} {'found ' if is_found else 'MISSED'} {mistake['file']}", file=sys.stderr, flush=True)
    summary = {"planted": len(rows), "found": sum(row["is_found"] for row in rows)}
    if args.json:
        result = {"machine": machine(), "commit": commit(), "summary": summary, "mistakes": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(summary)


if __name__ == "__main__":
    main()
