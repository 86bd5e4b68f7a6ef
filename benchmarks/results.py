"""The one format of results: a JSON file for each part of a claim in benchmarks.toml.

    {"runs": [{"commit", "date", "command", "machine", "versions", "settings"}, ...],
     "cases": [{"case", "figure", "unit", "value", "bar", "run"}, ...]}

A case is what was measured, for example "Atari, 4 frames, compressed". A figure is one number or one short text about
it, and `bar` is the limit that the figure must keep, or null. `run` is the index of the run that measured the figure,
because the cases of a file are often measured at different times. A new run replaces the figures that it measured and
keeps the others. Null in a run means that an early version of the script did not record it.

Only results/gate.json has another form: gate.py compares with it, and keeps one table for each kind of processor.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.process import commit, machine, versions

HERE = Path(__file__).resolve().parent
STORED = HERE / "results"
"""The results that README.md and docs/benchmarks.md show."""
Value = float | int | str | None


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Args:
        unit: "B", "MiB", "us", "ms", "s", "%" and so on; "times" for a factor, "of ..." for a share, "" for a count
            or a text.
        bar: The limit in words, for example "at most 1.3".
    """

    case: str
    figure: str
    unit: str
    value: Value
    bar: str | None = None


def describe_run(settings: dict[str, Any] | None = None, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Return the commit, the date, the command, the machine and the versions of this run."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(HERE.parent) if script.is_relative_to(HERE) else script.name
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", str(shown), *_list_options()]),
        "machine": machine(),
        "versions": versions(*packages),
        "settings": settings or {},
    }


def _list_options() -> list[str]:
    """Return the options of the command line as others can use them: without the file of results, and without paths."""
    options = sys.argv[1:]
    if "--json" in options:
        at = options.index("--json")
        del options[at : at + 2]
    return ["DATA" if Path(option).is_absolute() else option for option in options]


def store(file: Path, figures: Iterable[Figure], run: dict[str, Any]) -> None:
    """Write `figures` of `run` to `file`, in place of earlier values of the same figures.

    A script may store several times during one run: an equal `run` is written once.
    """
    document = read(file) if file.exists() else {"runs": [], "cases": []}
    new = {(figure.case, figure.figure): asdict(figure) | {"value": _round(figure.value)} for figure in figures}
    runs: list[dict[str, Any]] = document["runs"]
    run = json.loads(json.dumps(run))  # as it is read from a file, where a tuple is a list
    if run not in runs:
        runs.append(run)
    index = runs.index(run)
    rows = []
    for row in document["cases"]:
        measured = new.pop((row["case"], row["figure"]), None)
        rows.append(row if measured is None else measured | {"run": index})
    rows += [row | {"run": index} for row in new.values()]
    used = sorted({row["run"] for row in rows})
    rows = [row | {"run": used.index(row["run"])} for row in rows]
    write(file, [runs[index] for index in used], rows)


def write(file: Path, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Write a file of results with one line for each run and each figure."""
    lines = ["{"]
    for key, entries in (("runs", runs), ("cases", rows)):
        lines.append(f' "{key}": [')
        lines.append(",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries))
        lines.append(" ]," if key == "runs" else " ]")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def _round(value: Value) -> Value:
    """Return a number with the six digits that a measurement has at most."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(file: Path) -> dict[str, Any]:
    """Return a file of results."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def read_stored(name: str) -> dict[str, dict[str, Any]]:
    """Return the values of a stored result by case and figure."""
    return read_values(STORED / f"{name}.json")


def read_values(file: Path) -> dict[str, dict[str, Any]]:
    """Return the values of a file of results by case and figure."""
    rows: dict[str, dict[str, Any]] = {}
    for row in read(file)["cases"]:
        rows.setdefault(row["case"], {})[row["figure"]] = row["value"]
    return rows


def show(figures: Iterable[Figure]) -> None:
    """Print figures to stderr, one per line."""
    for figure in figures:
        bar = f" ({figure.bar})" if figure.bar else ""
        print(f"{figure.case} | {figure.figure}: {format_value(figure.value, figure.unit)}{bar}", file=sys.stderr)


def format_value(value: Value, unit: str) -> str:
    """Return a value with its unit, with as many digits as a reader needs."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if unit == "times":
        return f"{value:,.1f} x"
    if unit.startswith("of "):
        return _format_small(value)
    is_whole = isinstance(value, int) or abs(value) >= 100 or unit == "B"
    number = f"{value:,.0f}" if is_whole else _format_small(value)
    return f"{number} {unit}".strip()


def _format_small(value: float) -> str:
    if value == 0 or abs(value) >= 10:
        return f"{value:,.1f}" if value else "0"
    return f"{value:,.2f}" if abs(value) >= 0.01 else f"{value:.2g}"
