"""Put the measured tables into the README.

    python benchmarks/readme.py

Reads the JSON lines in results/ and rewrites what stands between the markers of the README: the memory as it is by
default and compressed (replay.py), and beside other libraries (`holdall bench buffers`). tests/test_readme.py fails
where README and JSON disagree.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdall.tools.bench.compare_buffers import cases_of, markdown

README = Path(__file__).parents[1] / "README.md"
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
        lines += markdown(records, case)
    return [*lines, "", _conditions(records[0])]


def _conditions(header: dict[str, Any]) -> str:
    """Say how often and on what it was measured; times of a busy machine are no claim."""
    rounds, machine = header["rounds"], header["machine"]
    load, cores = machine["load_average"][0], machine["cores"]
    often = "One process" if rounds == 1 else f"Medians over {rounds} processes"
    busy = "; others used the machine, so the times are rough" if load > cores else ""
    return f"{often} a row, on {cores} cores with a load of {load:.1f} when it began{busy}."


PLACES: dict[str, tuple[str, Callable[[Records], list[str]]]] = {
    "measured": ("replay.jsonl", beside_sb3),
    "compressed": ("compressed.jsonl", beside_sb3),
    "buffers": ("buffers.jsonl", beside_others),
}
"""By marker: the file, and how it is written."""


def rewritten(text: str) -> str:
    """Return a README whose tables are those of the files."""
    for place, (file, write) in PLACES.items():
        lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
        table = "\n".join(write([json.loads(line) for line in lines])) + "\n"
        found = re.search(MARKERS.format(place), text, re.DOTALL)
        if found is None:
            sys.exit(f"README.md has no place marked '{place}'")
        text = text[: found.end(1)] + table + text[found.start(2) :]
    return text


def main() -> None:
    """Rewrite the README's tables."""
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
