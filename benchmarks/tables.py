"""Write the measured tables and pictures of README.md and docs/benchmarks.md: `python benchmarks/tables.py`.

Reads results/*.json and replaces the text between `<!-- NAME -->` and `<!-- end of NAME -->`. Every row of a table is a
case of a result, and every column is one of its figures. A line below each table says when and with which commit it was
measured. tests/test_benchmarks.py fails if a page and the results differ.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pictures import kinds, memory
from results import HERE, STORED, format_value, read, read_stored

ROOT = HERE.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
MAX_PLAN_OFF_PERCENT = 5
LAST_DAY_OF_FORMER_ENGINE = "2026-11-17"
"""Figures of this day or before have to be measured again. A page says so below each table."""


@dataclass(frozen=True)
class Table:
    """One table of a page.

    Args:
        result: Name of the file of results.
        first: Heading of the column with the names of the cases.
        columns: Headings by figure. A figure without a value leaves its cell empty.
        begins: Only cases whose names begin like this; the rest of the name is shown.
        only: Only these cases, in this order.
        without: Pattern of cases that other tables show.
    """

    result: str
    first: str
    columns: Mapping[str, str]
    begins: str = ""
    only: tuple[str, ...] = ()
    without: str | None = None
    page: Path = field(default=PAGE)

    def write(self) -> str:
        """Return the table as Markdown."""
        document = read(STORED / f"{self.result}.json")
        rows = self._select(document["cases"])
        lines = [_line([self.first, *self.columns.values()]), "|---" * (1 + len(self.columns)) + "|"]
        for case, figures in rows.items():
            cells = [figures[name] for name in self.columns if name in figures]
            if cells:
                shown = [_cell(figures.get(name)) for name in self.columns]
                lines.append(_line([case.removeprefix(self.begins), *shown]))
        used = {figures[name]["run"] for figures in rows.values() for name in self.columns if name in figures}
        lines += ["", _describe_runs([document["runs"][index] for index in sorted(used)])]
        return "\n".join(lines)

    def _select(self, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {case: {} for case in self.only}
        for row in cases:
            case = row["case"]
            is_wanted = case in self.only if self.only else case.startswith(self.begins)
            if is_wanted and not (self.without is not None and re.search(self.without, case)):
                rows.setdefault(case, {})[row["figure"]] = row
        return rows


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else format_value(row["value"], row["unit"])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _describe_runs(runs: list[dict[str, Any]]) -> str:
    """Return the dates and commits of the runs as text. Early scripts did not record both."""
    dates: dict[str, list[str]] = {}
    for run in runs:
        commit = str(run["commit"] or "unknown commit")
        commit = commit if " " in commit else commit[:8]
        short = " short" if run["settings"].get("short") else ""
        commits = dates.setdefault(run["date"] or "", [])
        if f"{commit}{short}" not in commits:
            commits.append(f"{commit}{short}")
    shown = []
    for date, commits in sorted(dates.items()):
        engine = "; former engine" if date and date <= LAST_DAY_OF_FORMER_ENGINE else ""
        shown.append(f"{date or 'an unrecorded date'} ({', '.join(commits)}{engine})")
    return f"Measured on {', '.join(shown)}."


REPLAY = {"SB3": "SB3", "holdall": "holdall", "less by": "less by"}
WRONG = {"wrong rows": "wrong rows"}
LIBRARIES = {
    "memory": "memory",
    "`add`": "`add`",
    "`sample(256)`": "`sample(256)`",
    "save": "save",
    "bytes on disk": "bytes on disk",
    "load": "load",
    "came back right": "came back right",
}
WAYS = {"memory": "memory", "`add`": "one step, CPU time", "`sample(256)`": "a batch of 256"}
SPEED = {
    "steps per CPU second": "steps per CPU second, of SB3's",
    "rounds": "least and most",
    "`sample`": "`sample` inside, of SB3's time",
    "`add`": "`add` inside, of SB3's time",
}
PROCESSES = {"peak memory": "peak memory", "CPU time": "CPU time, of the plain side's", "weights": "weights"}
CLEANRL = {
    "weights": "weights",
    "a transition takes": "a transition takes",
    "`add`": "`add`",
    "`sample`": "`sample`",
    "CPU time of the run": "CPU time of the run",
}
TORCHRL = {
    "an element takes": "an element takes",
    "less by": "less by",
    "`extend`": "`extend`, of LazyTensorStorage's time",
    "`sample`": "`sample`, of its time",
}
TESTS = {
    "passed": "passed",
    "failed": "failed",
    "left out by name": "left out by name",
    "need TorchRL's compiled extension": "need TorchRL's compiled extension",
}
LEROBOT = {
    "LeRobot": "LeRobot",
    "`optimize_memory=True`": "`optimize_memory=True`",
    "holdall, `budget=None`": "holdall, `budget=None`",
    "less by": "less by",
    "`sample(256)`": "`sample(256)`, of LeRobot's time",
    "`add`": "`add`, of LeRobot's time",
}
WORLD_MODELS = {
    "arrays of a step": "arrays of a step",
    "with holdall, `report()`": "with holdall, `report()`",
    "less by": "less by",
    "`add`": "adding a step, of the published time",
    "`sample`": "`sample`, of it",
    "`update`": "`update`, of it",
}
READING = {
    "samples per second": "samples per second",
    "over Lance": "over Lance",
    "processor time of a sample": "processor time of a sample",
}
PACKED = {
    "SB3": "SB3",
    "holdall": "holdall",
    "holdall, `add`": "`add`, of SB3's time",
    "holdall, `sample(256)`": "`sample(256)`, of it",
    "packed": "packed",
    "packed, less by": "less by",
    "packed, `add`": "`add`, of SB3's time",
    "packed, `sample(256)`": "`sample(256)`, of it",
}
FEED = {
    "`add`, mean": "`add`: mean",
    "`add`, p99.9": "p99.9",
    "`add`, longest": "longest",
    "`add`, CPU": "CPU, of SB3's time",
    "`add` to a full buffer, CPU": "on a full buffer",
    "memory": "memory",
}
HELD = {name: name for name in ("transitions held", "in memory", "on disk", "dropped early")}
LIMIT = "limit of 60MiB, 15,000 steps"
GROWTH = {
    "held": "held",
    "each takes": "each takes",
    "`sample(256)`, median": "`sample(256)`: median",
    "`sample(256)`, least": "least",
    "`sample(256)`, CPU": "CPU",
    "`add`, mean": "`add`: mean",
    "`add`, p99.9": "p99.9",
    "`add`, slowest": "slowest",
}
VIDEO = {name: name for name in ("raw", '`prefer="balanced"`', '`prefer="memory"`', "FFV1", "x264")}
RAY = {name: name for name in ("Atari, 4 stacked frames", "camera and vector", "the same, noisy")}
MEASURED = {"measured": "measured"}
PLAN = {name: name for name in ("buffer", "planned", "at most", "measured", "off by", "bound holds")}
DELIVERY = {
    "flowing": "flowing",
    "alone": "alone",
    "in turns": "in turns",
    "the GPU's own part": "the GPU's own part",
    "by hand": "by hand",
    "as SB3": "as SB3",
    "plain torch": "plain torch",
    "the bus alone": "the bus alone",
}
DROP_IN = {
    "`holdall.sb3`": "`holdall.sb3`",
    "Stable-Baselines3": "Stable-Baselines3",
    "ratio": "ratio",
    "`holdall.sb3` alone": "`holdall.sb3` alone",
    "of that, the host": "of that, the host",
}
TRAJECTORIES = {
    "join, then move": "join, then move",
    "move, then join": "move, then join",
    "holdall": "holdall, in turn",
    "holdall, first of a turn": "the first of a turn",
    "holdall alone, slots of 8 MiB": "alone",
    "holdall, extra memory": "beside the tensors",
    "join, then move, extra memory": "joined first",
    "move, then join, extra memory": "moved first",
}

TABLES: dict[str, Table] = {
    "short": Table(
        "replay",
        "a transition takes",
        REPLAY | WRONG,
        only=(
            "Atari Seaquest, 4 frames",
            "Atari Seaquest, 4 frames, compressed",
            "camera, 84x84x3 and 31 floats, compressed",
            "market window of 504 days, 1.9 MB",
            "17 floats",
        ),
        page=README,
    ),
    "replay": Table("replay", "a transition takes", REPLAY | WRONG, without="compressed"),
    "compressed": Table("replay", "a transition takes", REPLAY | WRONG, without="^((?!compressed).)*$|Pong|Breakout"),
    "libraries-atari": Table("libraries", "Seaquest, 20,000 transitions of 4 frames", LIBRARIES, begins="Seaquest: "),
    "libraries-camera": Table("libraries", "rover camera and 6 floats, 20,000", LIBRARIES, begins="camera: "),
    "ways": Table("libraries", "10,000 transitions", WAYS, begins="ways: "),
    "disk": Table(
        "budget",
        "disk tier",
        {name: name for name in ("over its start", "on disk", "median", "least", "over memory")},
        begins="disk tier: ",
    ),
    "limits": Table("budget", LIMIT, HELD, begins=f"{LIMIT}, "),
    "full-disk": Table("budget", "disk of 20 MB, capacity of 200,000", HELD, begins="disk of 20 MB, "),
    "feed": Table("budget", "camera at full speed, recorded", FEED, begins="camera at full speed, recorded: "),
    "growth-atari": Table("growth", "Seaquest, stacks of 4 frames", GROWTH, begins="Seaquest, stacks of 4 frames: "),
    "growth-camera": Table(
        "growth",
        "camera of 84 x 84 x 3 and 31 floats",
        GROWTH,
        begins="camera of 84 x 84 x 3 and 31 floats: ",
    ),
    "video": Table("codecs", "recorded frames", VIDEO, begins="frames: "),
    "vectors": Table("vectors", "vectors", PACKED),
    "speed": Table("training", "training", SPEED),
    "weights": Table("training", "process", PROCESSES | {"memory after a rollout": "memory after a rollout"}),
    "cleanrl": Table("cleanrl", "script and buffer", CLEANRL),
    "torchrl": Table("torchrl", "environment and storage", TORCHRL, without="test_"),
    "torchrl-tests": Table("torchrl", "TorchRL's own tests", TESTS, begins="HoldallStorage: "),
    "lerobot": Table("lerobot", "images", LEROBOT, without="tests"),
    "lerobot-tests": Table(
        "lerobot", "", {"passed": "passed", "failed": "failed", "left out": "left out"}, begins="LeRobot's tests with "
    ),
    "world_models": Table("world_models", "buffer", WORLD_MODELS),
    "offline-bytes": Table("offline", "16,000 steps", {"bytes per step": "bytes per step"}, begins="stored: "),
    "offline-step": Table("offline", "one image, one action", READING, begins="one image, one action: "),
    "offline-window": Table("offline", "two images, 16 actions", READING, begins="two images, 16 actions: "),
    "offline-smallest": Table("offline", "one image, smallest forms", READING, begins="one image, smallest forms: "),
    "offline-memory": Table(
        "offline",
        "main process and four spawned workers",
        {"all processes": "proportional set size"},
        begins="memory, spawn: ",
    ),
    "rollout": Table(
        "rollout",
        "144 x 160 x 3 screens, stack of 4, 8,192 steps, 2 environments",
        {"SB3": "SB3", "holdall": "holdall", "holdall over SB3": "of SB3's time", "as fast as SB3's": "as fast"},
    ),
    "samplers": Table(
        "samplers",
        "1,000,000 transitions on a CPU",
        {
            "`sample(256)`": "`sample(256)`, of a uniform draw's time",
            "hidden": "hidden share of the sampling time",
        },
    ),
    "checkpoint": Table("checkpoint", "", MEASURED),
    "ray": Table("ray", "", RAY),
    "gpu_delivery": Table("gpu", "batch", DELIVERY, begins="delivery: "),
    "gpu_sb3": Table("gpu", "rows", DROP_IN, begins="drop-in: "),
    "gpu_steps": Table(
        "gpu",
        "batches of",
        {"gradient steps a second": "gradient steps a second", "ratio": "ratio"},
        begins="gradient steps: ",
    ),
    "gpu_resident": Table(
        "gpu",
        "data, and what is done",
        {"holdall": "holdall", "plain torch": "plain torch", "ratio": "ratio"},
        begins="resident: ",
    ),
    "gpu_rollout": Table("gpu", "3 workers x 1,024 steps of", TRAJECTORIES, begins="trajectories: "),
    "probe": Table("probe", "public scripts", MEASURED, begins="all scripts: "),
    "plan": Table("plan", "run", PLAN),
    "lint": Table("lint", "public scripts", {"number": "number"}, begins="all: "),
    "watch": Table(
        "watch",
        "case and promise",
        {"measured": "measured", "holds": "holds", "attribution": "attribution"},
        without="^showing: ",
    ),
    "showings": Table("watch", "what", {"measured": "measured", "commits": "commits"}, begins="showing: "),
}
"""The tables by the name of their markers."""


def rewrite(page: Path, text: str) -> str:
    """Return the text of a page with the tables of the results."""
    for name, table in TABLES.items():
        if table.page == page:
            text = replace_marked(text, name, table.write())
    if page == README:
        return replace_marked(text, "times", write_times())
    text = replace_marked(text, "plans", write_plans())
    return replace_marked(text, "gate", write_gate())


def replace_marked(text: str, name: str, written: str) -> str:
    """Return `text` with `written` between the markers of `name`."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no page has a place marked '{name}'")
    return pattern.sub(lambda found: f"{found[1]}{written}\n{found[2]}", text)


def read_gate() -> dict[str, dict[str, float]]:
    """Return the figures of `make gate` by workload and form, of the first processor in its table."""
    stored = next(iter(read(STORED / "gate.json").values()))
    figures: dict[str, dict[str, float]] = stored["figures"]
    return figures


def write_gate() -> str:
    """Return the table of `make gate`."""
    stored = next(iter(read(STORED / "gate.json").values()))
    names = ("add", "sample(1)", "sample(32)", "sample(256)")
    titles = {"atari": "Atari Seaquest, 4 frames", "camera": "the demo's camera and 6 floats", "vector": "17 floats"}
    lines = [_line(["CPU time, of SB3's", *(f"`{name}`" for name in names)]), "|---" * 5 + "|"]
    for row, figures in read_gate().items():
        workload, form = row.split()
        title = titles[workload] + (", compressed" if form == "compressed" else "")
        lines.append(_line([title, *(format_value(figures[name], "of SB3's time") for name in names)]))
    return "\n".join([*lines, "", _describe_runs([stored])])


def write_times() -> str:
    """Return the sentence about speed below the table of README.md."""
    gate = read_gate()
    raw = [row["sample(256)"] for name, row in gate.items() if name.endswith("raw")]
    compressed = [row["sample(256)"] for name, row in gate.items() if name.endswith("compressed")]
    adds = [row["add"] for row in gate.values()]
    return (
        f"In CPU time, `add` takes {min(adds):.2f} to {max(adds):.2f} of what it takes in SB3's buffer, and "
        f"`sample(256)` {min(raw):.2f} to {max(raw):.2f}. Compressed,\n`sample(256)` takes {min(compressed):.2f} to "
        f"{max(compressed):.2f} of it; camera images take longest."
    )


def write_plans() -> str:
    """Return the sentence about all plans below their table."""
    plans = list(read_stored("plan").values())
    near = sum(abs(plan["off by"]) <= MAX_PLAN_OFF_PERCENT for plan in plans)
    bounded = sum(plan["bound holds"] == "yes" for plan in plans)
    return (
        f"{near} of {len(plans)} plans are within {MAX_PLAN_OFF_PERCENT} % of the measured peak. "
        f"In {bounded} of {len(plans)} runs, the measured peak is below the bound."
    )


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield every page with its text now, and as the results have it."""
    for page in (README, PAGE):
        text = page.read_text(encoding="utf-8")
        yield page, text, rewrite(page, text)


def main() -> None:
    """Rewrite the tables of all pages, and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for page, _, new in pages():
        page.write_text(new, encoding="utf-8")
    for picture in (memory, kinds):
        for theme, path in picture.PICTURES.items():
            path.write_text(picture.drawn(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
