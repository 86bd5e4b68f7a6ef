"""Put the measured table into the README.

    python benchmarks/readme.py benchmarks/results/replay.jsonl

Reads the JSON lines of replay.py and rewrites what stands between two markers of the README: one place for the memory
as it is by default, one for `--compressed`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
MARKERS = r"(<!-- {0}: .*? -->\n).*?(<!-- end of {0} -->)"
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

COLUMNS = (
    "a transition takes",
    "SB3",
    "holdall",
    "less by",
    "`sample(256)`, of SB3's time",
    "`add`, of SB3's time",
    "wrong rows",
)


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


def main() -> None:
    """Rewrite the README's table."""
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
        *(row(result) for result in results),
    ]
    text = README.read_text(encoding="utf-8")
    table = "\n".join(lines) + "\n"
    place = "compressed" if results[0].get("compressed") else "measured"
    pattern = re.compile(MARKERS.format(place), re.DOTALL)
    changed, found = pattern.subn(lambda marks: marks[1] + table + marks[2], text)
    if found != 1:
        sys.exit(f"README.md has no place marked '{place}'")
    README.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
