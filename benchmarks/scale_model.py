"""How many machines a training would take, computed from measured unit costs: `python benchmarks/scale_model.py`.

The unit costs are in results/ray.json, which ray_replay.py measured on one machine. The assumptions are options. By
default, the script computes the load of 1,000 actors and 10 TB, the machines for it, and the resource that is exhausted
first. Nothing was measured at this size. `--docs` also writes the measured figures to docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from holdall.units import format_bytes

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "scale.md"
BLOCK_ROWS = 128
BATCH = 256
DAY_S = 86_400
NAMES = {"atari": "Atari, 4 stacked frames", "camera": "camera and vector", "noise": "the same, noisy"}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Load on the system, and properties of the machines. None of it is measured."""

    actors: int = 1_000
    steps_per_s: float = 100.0  # of one actor
    rows_per_s: float = 51_200.0  # drawn by the learner: 100 batches of 512
    plain_tb: float = 10.0  # of held transitions, as plain arrays of obs and next_obs
    host_cores: int = 64
    host_gib: float = 512.0
    host_gbit_s: float = 25.0
    host_usd_h: float = 4.0
    usable: float = 0.6  # share of a machine that may be planned with
    store_usd_gb_month: float = 0.023
    put_usd_1000: float = 0.005
    puts_per_shard_s: float = 5.0  # a journal in an object store gathers 0.2 s
    days_kept: float = 1.0  # of journal, beyond what is held

    @property
    def inserts_per_s(self) -> float:
        """Transitions of all actors."""
        return self.actors * self.steps_per_s


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of one transition or one batch."""

    writer_us: float  # CPU of a transition at its actor
    shard_insert_us: float
    encoded: float  # bytes of a compressed transition, sent and held
    learner_row_us: float
    shard_row_us: float
    wire_row: float
    plain: float  # bytes of a transition's obs and next_obs as plain arrays
    call_us: float  # CPU of all processes for one more shard in a batch

    @classmethod
    def of(cls, found: dict[str, Any], spread: dict[str, Any]) -> Costs:
        """Return the costs of one workload."""
        inserted, ahead = found["insert"], found["sample"]["ahead"]
        # Results of earlier versions have no figures of batches that leave the machine.
        near = {f"{end}_us": ahead[f"{end}_cpu_us"]["holdall"] for end in ("learner", "shard")}
        wire = {"bytes": found["sample"]["wire"].get("answer_bytes")} | near | found["sample"]["wire"]
        return cls(
            writer_us=inserted["steps"]["writer_cpu_us"]["holdall"],
            shard_insert_us=inserted["steps"]["shard_cpu_us"]["holdall"],
            encoded=inserted["encoded_bytes_per_transition"],
            learner_row_us=wire["learner_us"] / BATCH,
            shard_row_us=wire["shard_us"] / BATCH,
            wire_row=wire["bytes"] / BATCH,
            plain=wire["decoded_bytes"] / BATCH,
            call_us=(spread["4"]["cpu_us"] - spread["1"]["cpu_us"]) / 3,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one workload, and the machines for it."""

    transitions: float
    held_bytes: float
    ingest_bytes_s: float
    draw_bytes_s: float
    writer_share: float  # of a core, at every actor
    shard_cores: float
    learner_cores: float
    hosts: dict[str, float]  # for shards, by what they run out of
    learner_hosts: dict[str, float]
    shards: int
    usd_day: float

    @property
    def first_wall(self) -> str:
        """Resource that is exhausted first when everything grows alike."""
        walls = self.hosts | {f"learner's {name}": need for name, need in self.learner_hosts.items()}
        return max(walls, key=lambda name: walls[name])


def load(costs: Costs, asked: Assumptions) -> Load:
    """Compute the load of one workload."""
    transitions = asked.plain_tb * 1e12 / costs.plain
    held = transitions * costs.encoded
    ingest, drawn = asked.inserts_per_s * costs.encoded, asked.rows_per_s * costs.wire_row
    shard_cores = (asked.inserts_per_s * costs.shard_insert_us + asked.rows_per_s * costs.shard_row_us) / 1e6
    host_bytes_s = asked.host_gbit_s / 8 * 1e9 * asked.usable
    cores = asked.host_cores * asked.usable
    hosts = {
        "memory": held / (asked.host_gib * 2**30 * asked.usable),
        "cores": shard_cores / cores,
        "network": (2 * ingest + drawn) / host_bytes_s,  # from actors, to the store, and to the learner
    }
    # A shard is one process with one lock: more than a core's worth of calls waits in line.
    shards = max(1, math.ceil(max(hosts.values())), math.ceil(shard_cores / asked.usable))
    learner_cores = asked.rows_per_s * (costs.learner_row_us + costs.call_us * (shards - 1) / BATCH) / 1e6
    learner = {"cores": learner_cores / cores, "network": drawn / host_bytes_s}
    machines = max(1, math.ceil(max(hosts.values()))) + max(1, math.ceil(max(learner.values())))
    stored_gb = (held + ingest * DAY_S * asked.days_kept) / 1e9
    usd = machines * asked.host_usd_h * 24 + stored_gb * asked.store_usd_gb_month / 30
    usd += shards * asked.puts_per_shard_s * DAY_S / 1000 * asked.put_usd_1000
    writer_share = asked.steps_per_s * costs.writer_us / 1e6
    return Load(
        transitions, held, ingest, drawn, writer_share, shard_cores, learner_cores, hosts, learner, shards, usd
    )  # fmt: skip


def costs_of(results: dict[str, Any]) -> dict[str, Costs]:
    """Return the costs of every workload that has inserts and samples."""
    found = results["found"]
    whole = [name for name in NAMES if {"insert", "sample"} <= found.get(name, {}).keys()]
    if not whole or "spread" not in found.get("atari", {}):
        sys.exit("the results lack cases: run ray_replay.py --case insert --case sample --case spread --json ... first")
    return {name: Costs.of(found[name], found["atari"]["spread"]) for name in whole}


def table(results: dict[str, Any], asked: Assumptions) -> str:
    """Return the loads of all workloads as a Markdown table."""
    loads = {name: load(costs, asked) for name, costs in costs_of(results).items()}
    rows: list[tuple[str, list[str]]] = [
        (
            f"transitions in {asked.plain_tb:g} TB of plain arrays",
            [f"{each.transitions / 1e6:,.0f} M" for each in loads.values()],
        ),
        ("held by all shards", [format_bytes(each.held_bytes) for each in loads.values()]),
        ("into the shards, a second", [format_bytes(each.ingest_bytes_s) for each in loads.values()]),
        ("out to the learner, a second", [format_bytes(each.draw_bytes_s) for each in loads.values()]),
        ("an actor's core spent on encoding", [f"{each.writer_share:.1%}" for each in loads.values()]),
        ("cores of all shards", [f"{each.shard_cores:.1f}" for each in loads.values()]),
        ("cores of the learner, for delivery alone", [f"{each.learner_cores:.1f}" for each in loads.values()]),
        ("shards", [str(each.shards) for each in loads.values()]),
    ]
    rows += [
        (f"machines for shards, by {kind}", [f"{each.hosts[kind]:.2f}" for each in loads.values()])
        for kind in ("memory", "cores", "network")
    ]
    rows += [
        (f"machines for the learner, by {kind}", [f"{each.learner_hosts[kind]:.2f}" for each in loads.values()])
        for kind in ("cores", "network")
    ]
    rows += [
        ("exhausted first", [each.first_wall for each in loads.values()]),
        ("a day, without actors and GPUs", [f"${each.usd_day:,.0f}" for each in loads.values()]),
    ]
    lines = ["| | " + " | ".join(NAMES[name] for name in loads) + " |", "|---|" + "--:|" * len(loads)]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def measured(results: dict[str, Any]) -> str:
    """Return the measured figures as a Markdown table."""
    by_name: dict[str, dict[str, Any]] = {}
    for bar in results["bars"]:
        by_name.setdefault(bar["name"], {})[bar["workload"]] = bar
    lines = ["| | " + " | ".join(NAMES.values()) + " |", "|---|" + "--:|" * len(NAMES)]
    for name, bars in by_name.items():
        cells = [f"{bars[workload]['value']:.3g}" if workload in bars else "" for workload in NAMES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_measured(page: str, results: dict[str, Any]) -> str:
    """Return the text of docs/scale.md with the measured figures of `results`."""
    before, start, rest = page.partition("<!-- measured: made by benchmarks/scale_model.py --docs")
    head, _, rest = rest.partition("\n")
    end = "<!-- end of measured -->"
    return f"{before}{start}{head}\n{measured(results)}{end}{rest.partition(end)[2]}"


def main() -> None:
    """Read the command line, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "ray.json")
    parser.add_argument("--docs", action="store_true", help="put the measured figures into docs/scale.md")
    for field in fields(Assumptions):
        kind = int if isinstance(field.default, int) else float
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    wanted = vars(parser.parse_args())
    asked = Assumptions(**{field.name: wanted[field.name] for field in fields(Assumptions)})
    results = json.loads(wanted["results"].read_text(encoding="utf-8"))
    print(table(results, asked))
    if wanted["docs"]:
        PAGE.write_text(with_measured(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
