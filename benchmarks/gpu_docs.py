"""Write what the benchmarks on a GPU measured into the docs: `python benchmarks/gpu_docs.py [--check]`.

In:  benchmarks/results/gpu_*.json, which gpu_sb3.py, gpu_delivery.py, gpu_resident.py and gpu_rollout.py write.  Out:
their tables in docs/benchmarks.md. `--check` only says what differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def found(name: str) -> Any:
    """Return the results of one benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table(head: str, rows: list[list[str]]) -> str:
    """Return a table as the docs write it."""
    rule = "|" + "---|" * (head.count("|") - 1)
    lines = ("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows)
    return "\n".join([head, rule, *lines])


def drop_in() -> tuple[str, str]:
    """Return the tables of the drop-in for Stable-Baselines3: batches, and gradient steps."""
    results = found("gpu_sb3")
    batches = [
        [
            str(row["rows"]),
            f"{row['holdall']:.2f} ms",
            f"{row['sb3']:.2f} ms",
            f"{row['holdall'] / row['sb3']:.3f}",
            f"{row['alone']:.2f} ms",
            f"{row['host']:.2f} ms",
        ]
        for row in results["batches"]
    ]
    names = {
        "no cost": "one batch, again and again",
        "no cost, again": "the same once more",
        "holdall": "`holdall.sb3`",
        "holdall, prefetch": "`holdall.sb3`, `prefetch=2`",
        "sb3": "Stable-Baselines3",
    }
    rates = results["steps_per_second"]
    steps = [[names[name], f"{rates[name]:.1f}", f"{rates[name] / rates['no cost']:.3f}"] for name in names]
    return (
        table(
            "| rows | `holdall.sb3` | Stable-Baselines3 | ratio | `holdall.sb3` alone | of that, the host |", batches
        ),
        table("| batches of | gradient steps a second | ratio |", steps),
    )


def resident() -> str:
    """Return the table of data that is made on the GPU."""
    rows = []
    for name, what, ours, theirs in found("gpu_resident")["rows"]:
        shown = [f"{v / 2**20:.0f} MiB" if what == "bytes" else f"{v:.3f} ms" for v in (ours, theirs)]
        rows.append([name, what, *shown, f"{ours / theirs:.2f}"])
    return table("| data | what | holdall | plain torch | ratio |", rows)


def delivery() -> str:
    """Return the table of batches for a GPU."""
    results = found("gpu_delivery")
    large, small, store, few_stored, stacks = (
        results[name] for name in ("4096", "256", "store", "store, few rows", "stacks")
    )

    def ms(way: Any) -> float:
        return float(way.get("mean_ms", way["median_ms"]))

    bus = ms(large["bus alone"])
    flowing = ms(large["holdall, prefetch"])
    alone, turns = (ms(large[name]) for name in ("holdall, alone", "holdall, no prefetch"))
    by_hand = "gather into pinned memory, copy"
    as_sb3 = "NumPy and .to(device), as SB3"
    few, in_turns, gathered = (ms(small[name]) for name in ("holdall, alone", "holdall, no prefetch", by_hand))
    part = ms(store["on the device alone"])

    def stored(name: str, found: Any) -> list[str]:
        until = ms(found["holdall, store on the device"])
        plain = ms(found["plain torch, indexed"])
        shown = f"{until:.2f} ms, flowing {ms(found['holdall, store on the device, prefetch']):.2f}"
        return [name, shown, f"plain torch, indexed {plain:.2f}"]

    stacked, stacked_alone, stacked_turns = (
        ms(stacks[name]) for name in ("holdall, prefetch", "holdall, alone", "holdall, no prefetch")
    )
    rows = [
        [
            "4,096 frames (87 MB), flowing",
            f"{flowing:.2f} ms",
            f"the bus alone {bus:.2f}",
        ],
        [
            "the same, `prefetch=0`",
            f"{alone:.2f} ms, {turns:.2f} in turns with the others",
            f"by hand {ms(large[by_hand]):.2f}, as SB3 {ms(large[as_sb3]):.1f}",
        ],
        [
            "256 frames, `prefetch=0`",
            f"{few:.2f} ms, {in_turns:.2f} in turns",
            f"by hand {gathered:.2f}, as SB3 {ms(small[as_sb3]):.2f}; the bus {ms(small['bus alone']):.2f}",
        ],
        ["the same, flowing", f"{ms(small['holdall, prefetch']):.2f} ms", ""],
        ['4,096 frames, `store_device="cuda"`: the GPU\'s own part', f"{part:.2f} ms", ""],
        stored("the same, until the consumer has it", store),
        stored("512 frames, the same", few_stored),
        [
            "4,096 stacks of 4, flowing",
            f"{stacked:.2f} ms",
            f"8 frames a row over the bus alone {ms(stacks['bus alone, 8 frames a row']):.2f}",
        ],
        [
            "the same, `prefetch=0`",
            f"{stacked_alone:.2f} ms, {stacked_turns:.2f} in turns",
            "",
        ],
    ]
    return table("| batch | holdall | for comparison |", rows)


def rollouts() -> str:
    """Return the table of trajectories on their way to a GPU."""
    results = found("gpu_rollout")
    rows = []
    for name, case in results["updates"].items():
        usual, moved, ours = (case[way] for way in ("cat then to", "to then cat", "holdall"))
        extra = f"{ours['extra_mib']:.0f} MiB; the others {usual['extra_mib']:.0f} and {moved['extra_mib']:.0f}"
        alone = results["slots"][name]["slots of 8 MiB"]["median_ms"]
        times = [usual["median_ms"], moved["median_ms"], ours["median_ms"], ours["first_of_turn_median_ms"], alone]
        rows.append([f"{name}, {case['payload_mib']:.1f} MiB", *(f"{time:.2f}" for time in times), extra])
    columns = "join, then move | move, then join | holdall, in turn | the first of a turn | alone | beside the tensors"
    return table(f"| 3 workers x 1,024 steps of | {columns} |", rows)


def replaced(text: str, new: str) -> str:
    """Put a table in the place of the one whose first column is called the same."""
    first = new.split("|")[1]
    lines = text.split("\n")
    begin = 0
    while not (lines[begin].startswith(f"|{first}|") and lines[begin + 1].startswith("|---")):
        begin += 1
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:begin], *new.split("\n"), *lines[end:]])


def main() -> int:
    """Write all tables."""
    batches, steps = drop_in()
    pages = {
        "docs/benchmarks.md": [batches, steps, resident(), delivery(), rollouts()],
    }
    differs = 0
    for name, tables in pages.items():
        before = after = (ROOT / name).read_text(encoding="utf-8")
        for each in tables:
            after = replaced(after, each)
        if after != before:
            differs += 1
            print(f"{name} differs from the results")
            if "--check" not in sys.argv:
                (ROOT / name).write_text(after, encoding="utf-8")
    return int("--check" in sys.argv and differs > 0)


if __name__ == "__main__":
    sys.exit(main())
