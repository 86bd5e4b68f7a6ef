"""Put the measured tables into the README, docs/benchmarks.md and the guide for Stable-Baselines3.

    python benchmarks/readme.py

Reads the JSON lines in results/ and rewrites what stands between the markers of the pages: the memory as it is by
default and compressed (replay.py), and beside other libraries (`holdall bench buffers`). The README has five rows.
tests/test_readme.py fails where a page and JSON disagree.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdall.tools.bench.compare_buffers import HEADINGS, cases_of, table_rows

README = Path(__file__).parents[1] / "README.md"
PAGE = README.parent / "docs" / "benchmarks.md"
GUIDE = README.parent / "docs" / "guides" / "sb3.md"
RESULTS = Path(__file__).parent / "results"
MARKERS = r"(<!-- {0}: [^>]*-->\n).*?(<!-- end of {0} -->)"
NAMES = {
    "atari": "Atari Seaquest, stack of 4 frames",
    "camera": "camera 84x84x3 and 31 floats, Dict",
    "market": "market window of 504 days, 1.9 MB",
    "market20k": "market window of 504 days, random episodes",
    "market_noise": "the same, fresh noise on every observation",
    "montezumarevenge": "Atari Montezuma's Revenge",
    "mspacman": "Atari Ms. Pac-Man",
    "pong": "Atari Pong",
    "breakout": "Atari Breakout",
    "vector1": "17 floats, 1 environment",
    "vector16": "17 floats, 16 environments",
}
BUFFER_CASES = {
    "atari": "Atari Seaquest, {:,} transitions of 4 stacked frames",
    "camera": "The demo's rover, {:,} transitions of an 84x84x3 camera and 6 floats, Dict",
}

COLUMNS = (
    "a transition takes",
    "SB3",
    "holdall",
    "less by",
    "`sample(256)`, of SB3's time",
    "`add`, of SB3's time",
    "wrong rows",
)
Records = Sequence[dict[str, Any]]


def row(result: dict[str, Any]) -> str:
    """Write one case as a row of the table."""
    ours, theirs = (result["memory"][side]["bytes_per_transition"] for side in ("holdall", "sb3"))
    times = result["times"]
    add, sample = (times[act]["holdall"]["median_us"] / times[act]["sb3"]["median_us"] for act in ("add", "sample"))
    wrong = sum(result["rows"]["wrong"].values())
    name = NAMES[result["case"]]
    if result.get("compressed"):
        name += f', `prefer="{result.get("compressed")}"`'
    cells = (
        name,
        f"{theirs:,.0f} B",
        f"**{ours:,.0f} B**",
        f"{theirs / ours:,.1f} x",
        f"{sample:.2f}",
        f"{add:.2f}",
        f"{wrong} of {result['rows']['compared']:,}",
    )
    return "| " + " | ".join(cells) + " |"


def beside_sb3(results: Records) -> list[str]:
    """Write the results of replay.py."""
    return ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *(row(result) for result in results)]


def beside_others(records: Records) -> list[str]:
    """Write the results of `holdall bench buffers`."""
    lines: list[str] = []
    for case in cases_of(records):
        held = next(record for record in records if record["kind"] == "buffer" and record["case"] == case)
        lines += [*([""] if lines else []), f"{BUFFER_CASES[case].format(held['transitions'])}:", ""]
        table = [HEADINGS, ("---",) * len(HEADINGS), *table_rows(records, case)]
        lines += ["| " + " | ".join(line) + " |" for line in table]
    return [*lines, "", _conditions(records[0])]


def _conditions(header: dict[str, Any]) -> str:
    """Say how often and on what it was measured; times of a busy machine are no claim."""
    rounds, machine = header["rounds"], header["machine"]
    load, cores = machine["load_average"][0], machine["cores"]
    often = "One process" if rounds == 1 else f"Medians over {rounds} processes"
    busy = "; others used the machine, so the times are rough" if load > cores else ""
    return f"{often} a row, on {cores} cores with a load of {load:.1f} when it began{busy}."


SHORT = (
    ("replay.jsonl", "atari", None),
    ("compressed.jsonl", "atari", "balanced"),
    ("compressed.jsonl", "camera", "balanced"),
    ("replay.jsonl", "market", None),
    ("replay.jsonl", "vector1", None),
)
"""The README's rows: the file, the case, and how it was compressed."""
SHORT_NAMES = {
    "atari": "Atari, 4 frames",
    "camera": "camera, 84x84x3",
    "market": "market window, 1.9 MB",
    "vector1": "17 floats",
}


def short() -> list[str]:
    """Write the README's five rows."""
    lines = ["| a transition takes | SB3 | holdall | `sample(256)` | wrong rows |", "|---" * 5 + "|"]
    for file, case, compressed in SHORT:
        result = next(one for one in _records(file) if one["case"] == case and one.get("compressed") == compressed)
        ours, theirs = (result["memory"][side]["bytes_per_transition"] for side in ("holdall", "sb3"))
        times = result["times"]["sample"]
        speed = times["holdall"]["median_us"] / times["sb3"]["median_us"]
        name = SHORT_NAMES[case] + (", compressed" if compressed else "")
        wrong, compared = sum(result["rows"]["wrong"].values()), result["rows"]["compared"]
        lines.append(
            f"| {name} | {theirs:,.0f} B | **{ours:,.0f} B** | {speed:.2f} of SB3's time | {wrong} of {compared:,} |"
        )
    return lines


def guide() -> list[str]:
    """Write what changing the buffer changes on Atari: as it is by default, and compressed."""
    sides = [
        next(one for one in _records(file) if one["case"] == case and one.get("compressed") == compressed)
        for file, case, compressed in SHORT[:2]
    ]

    def of_sb3s(act: str) -> list[str]:
        times = [side["times"][act] for side in sides]
        return ["1", *(f"{one['holdall']['median_us'] / one['sb3']['median_us']:.2f}" for one in times)]

    taken = [sides[0]["memory"]["sb3"], *(side["memory"]["holdall"] for side in sides)]
    rows = {
        "a transition": [f"{one['bytes_per_transition']:,.0f} B" for one in taken],
        "`add`, of the time before": of_sb3s("add"),
        "`sample(256)`, of the time before": of_sb3s("sample"),
    }
    head = ["| | before | after | after, with `budget=None` |", "|---|---|---|---|"]
    return head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def _records(file: str) -> Records:
    return [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]


PLACES: dict[Path, dict[str, Callable[[], list[str]]]] = {
    README: {"short": short},
    GUIDE: {"atari": guide},
    PAGE: {
        "measured": lambda: beside_sb3(_records("replay.jsonl")),
        "compressed": lambda: beside_sb3(_records("compressed.jsonl")),
        "buffers": lambda: beside_others(_records("buffers.jsonl")),
    },
}
"""By page and marker: how the table is written."""


def rewritten(page: Path) -> str:
    """Return a page whose tables are those of the files."""
    text = page.read_text(encoding="utf-8")
    for place, write in PLACES[page].items():
        found = re.search(MARKERS.format(place), text, re.DOTALL)
        if found is None:
            sys.exit(f"{page.name} has no place marked '{place}'")
        text = text[: found.end(1)] + "\n".join(write()) + "\n" + text[found.start(2) :]
    return text


def main() -> None:
    """Rewrite the tables of all pages."""
    for page in PLACES:
        page.write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
