"""Mistakes planted into public training scripts: how many does `holdall lint` find?

    python benchmarks/tools/planted_mistakes.py --checkouts DIR --python new=PATH --python old=PATH --json FILE

`planted_mistakes.toml` has one change for each mistake. It is made in a copy of the script. Rules about files read the
copy. Rules about values run it until it is about to train. A mistake counts as found if its own rule finds more in the
changed script than in the script as it is, which is read or run in the same way. DIR and the environments are those of
`probe_scripts.py`.
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

from holdall.tools import lint
from holdall.tools.probe.launch import probe

sys.path.insert(0, str(Path(__file__).parents[1]))

from probe_scripts import TIMEOUT_S, read_block
from results import Figure, describe_run, read_values, show, store

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


TOGETHER = "all: "
"""The cases of the figures over all mistakes begin with this word."""


def name_case(number: int, mistake: dict[str, Any]) -> str:
    """Return the case of a mistake. Its number distinguishes two mistakes of one rule in one file."""
    return f"mistake {number}: {mistake['rule']} in {mistake['file']}"


def figures_of(case: str, rule: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Figure]:
    """Return whether the rule of a mistake found more than before, and what the rule reports."""
    own_before = [one["message"] for one in before if one["rule"] == rule]
    own_after = [one["message"] for one in after if one["rule"] == rule]
    is_found = len(own_after) > len(own_before)
    return [
        Figure(case, "found", "", "yes" if is_found else "no", "yes"),
        Figure(case, "messages of the rule", "", "; ".join(own_after)),
    ]


def summarize(are_found: list[bool]) -> list[Figure]:
    """Return the figures over all mistakes."""
    return [
        Figure(f"{TOGETHER}mistakes planted into them", "number", "", len(are_found)),
        Figure(f"{TOGETHER}of these, found by lint", "number", "", sum(are_found)),
    ]


def main() -> None:
    """Plant every mistake, and store whether it was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR", help="folder of the checkouts")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of an environment of the list"
    )
    parser.add_argument("--files", action="store_true", help="leave out the mistakes whose rules need a run")
    parser.add_argument("--only", action="append", metavar="RULE", help="only the mistakes of this rule")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    args = parser.parse_args()
    os.environ |= {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    pythons = dict(text.split("=", 1) for text in args.python)
    mistakes = tomllib.loads(LIST.read_text(encoding="utf-8"))["mistake"]
    run = describe_run()
    are_found: dict[str, bool] = {}
    for number, mistake in enumerate(mistakes):
        is_named = not args.only or mistake["rule"] in args.only
        if not is_named or (args.files and "command" in mistake):
            continue
        text = read_script(mistake, args.checkouts)
        before = find_before(mistake, text, args.checkouts, pythons)
        after = find(mistake, plant(text, mistake), args.checkouts, pythons)
        case = name_case(number, mistake)
        figures = figures_of(case, mistake["rule"], before, after)
        show(figures)
        are_found[case] = figures[0].value == "yes"
        if args.json is not None:
            store(args.json, figures, run)
    if args.json is not None:
        stored = read_values(args.json)
        cases = [name_case(number, mistake) for number, mistake in enumerate(mistakes)]
        are_found = {case: stored[case]["found"] == "yes" for case in cases if case in stored}
    together = summarize(list(are_found.values()))
    show(together)
    if args.json is not None:
        store(args.json, together, run)


if __name__ == "__main__":
    main()
