"""Mistakes planted into public training scripts: how many does `holdall lint` find?

    python benchmarks/planted_mistakes.py --checkouts DIR --python new=PATH --python old=PATH --json FILE

`planted_mistakes.toml` has one change for each mistake. It is made in a copy of the script. Rules about files read the
copy; rules about values run it until it is about to train. A mistake counts as found if its own rule finds more in the
changed script than in the script as it is. `--files` leaves out the mistakes whose rules need a run. DIR and the
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


def main() -> None:
    """Plant every mistake and print whether it was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ |= {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    pythons = dict(text.split("=", 1) for text in args.python)
    rows = []
    for mistake in tomllib.loads(LIST.read_text(encoding="utf-8"))["mistake"]:
        if args.files and "command" in mistake:
            continue
        text = read_script(mistake, args.checkouts)
        found = find(mistake, plant(text, mistake), args.checkouts, pythons)
        before = [] if "command" in mistake else find(mistake, text, args.checkouts, pythons)
        own = [one for one in found if one["rule"] == mistake["rule"]]
        is_found = len(own) > sum(1 for one in before if one["rule"] == mistake["rule"])
        rows.append({"rule": mistake["rule"], "file": mistake["file"], "is_found": is_found, "findings": found})
        print(f"{mistake['rule']} {'found ' if is_found else 'MISSED'} {mistake['file']}", file=sys.stderr, flush=True)
    summary = {"planted": len(rows), "found": sum(row["is_found"] for row in rows)}
    if args.json:
        result = {"machine": machine(), "commit": commit(), "summary": summary, "mistakes": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(summary)


if __name__ == "__main__":
    main()
