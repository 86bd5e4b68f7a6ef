"""Bench of profiles: runs of every profile, buffer and seed, each in a fresh process, their file, and rankings.

Results are JSON lines, flushed one by one: a header, then one record per run. A failed run is a record, too. Ctrl-C
keeps finished runs, and `--resume` makes the remaining runs. Runs are not ranked by memory if a buffer was not full,
nor by a figure that differs less between runs than between seeds. The ranking then has the reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.tools.bench import OnProgress, make_header
from holdall.tools.bench.child import ChildError, ChildProgress, read_result
from holdall.tools.bench.settings import BenchSettings, Calibration
from holdall.tools.bench.task import run_task
from holdall.tools.report import BENCH_FORMAT, JsonLine, read_header, results
from holdall.units import count_noun, format_bytes

_PHASE_SHARES = {"construct": 0.0, "fill": 0.1, "train": 0.4, "save": 0.95}
"""Rough progress of a run at the beginning of each phase, for the progress bar."""


class PlannedRun(NamedTuple):
    """Profile, buffer and seed, which identify a run in the results."""

    profile: str
    buffer: str
    seed: int


def make_results_header(settings: BenchSettings, calibration: Calibration, seconds: float) -> dict[str, Any]:
    """Return the first line of the results: settings, machine, and the expected seconds."""
    return make_header(BENCH_FORMAT) | {
        "env": settings.env,
        "algo": settings.algo,
        "limit": settings.limit_bytes,
        "announced_seconds": seconds,
        "settings": asdict(settings),
        "calibration": asdict(calibration),
    }


def plan_runs(settings: BenchSettings) -> list[PlannedRun]:
    """Return the runs. Their order changes with every seed, so that no profile always runs at the quietest time."""
    runs = []
    names = list(product(settings.profiles, settings.buffers))
    for seed in range(settings.seeds):
        first = seed * max(len(names) // max(settings.seeds, 1), 1) % len(names)
        runs += [PlannedRun(*name, seed) for name in names[first:] + names[:first]]
    return runs


def predict_seconds(
    settings: BenchSettings, calibration: Calibration, done: Sequence[results.TrainingRun] = ()
) -> float:
    """Return the expected seconds of the remaining runs."""
    return sum(_predict_run_seconds(planned, calibration) for planned in _list_remaining(settings, done))


def _list_remaining(settings: BenchSettings, done: Sequence[results.TrainingRun]) -> list[PlannedRun]:
    finished = {run.key for run in done if run.status in {"done", "does not fit"}}
    return [planned for planned in plan_runs(settings) if planned not in finished]


def run_bench(
    settings: BenchSettings, calibration: Calibration, done: Sequence[results.TrainingRun], on_progress: OnProgress
) -> Iterator[results.TrainingRun]:
    """Make the remaining runs. Yield every run when it ends.

    `on_progress` gets the name of the run, and the expected seconds of the work that is done.
    """
    done_s = 0.0
    for planned in _list_remaining(settings, done):
        run_s = _predict_run_seconds(planned, calibration)
        title = f"{planned.profile}, {planned.buffer}, seed {planned.seed}"
        yield _run(planned, settings, calibration, lambda share: on_progress(title, done_s + share * run_s))  # noqa: B023  It is called before the next run begins.
        done_s += run_s
        on_progress(title, done_s)


def _run(
    planned: PlannedRun, settings: BenchSettings, calibration: Calibration, on_progress: Callable[[float], None]
) -> results.TrainingRun:
    size = calibration.sizes[planned.profile]
    run = results.TrainingRun(planned.profile, planned.buffer, planned.seed, "does not fit", size.size, size.batch_size)
    if planned.buffer not in size.fits:
        why = f"{size.share:.0%} of the limit is too little for the process and one batch with this buffer"
        return replace(run, reason=why)

    task = settings.make_task(planned.buffer, size.size, size.batch_size, settings.timesteps, planned.seed)
    start = time.perf_counter()
    try:
        figures = read_result(run_task(task), lambda progress: on_progress(_compute_share(progress)))
    except ChildError as error:
        return replace(run, status="failed", reason=str(error), seconds=time.perf_counter() - start)
    saved = figures.checkpoint
    return replace(
        run,
        status="done",
        steps=figures.steps,
        filled=figures.filled,
        steps_per_second=figures.steps_per_second,
        peaks=figures.peaks,
        bytes_per_transition=figures.bytes_per_transition,
        rewards=tuple(figures.rewards),
        checkpoint={"seconds": saved.seconds, "bytes": saved.nbytes, "extra": saved.extra_bytes},
        seconds=time.perf_counter() - start,
    )


def _compute_share(progress: ChildProgress) -> float:
    """Return the share of a run that is done."""
    begin = _PHASE_SHARES[progress.phase]
    end = min((share for share in _PHASE_SHARES.values() if share > begin), default=1.0)
    return begin + (end - begin) * progress.share


def _predict_run_seconds(planned: PlannedRun, calibration: Calibration) -> float:
    return calibration.seconds.get(f"{planned.profile}/{planned.buffer}", 0.0)


def write_line(file: TextIO | None, record: Mapping[str, Any]) -> None:
    """Write one JSON line and flush it. Do nothing if `file` is None."""
    if file is not None:
        print(json.dumps(record), file=file, flush=True)


def read_results(path: Path) -> tuple[JsonLine, list[results.TrainingRun]]:
    """Return the header and the runs of a file. A repeated run has its last record. An unfinished line is ignored."""
    header, lines = read_header(path, (BENCH_FORMAT,))
    runs = (results.TrainingRun.read(line) for line in lines if line.kind == "run")
    return header, list({run.key: run for run in runs}.values())


def open_results(path: Path, *, is_resumed: bool) -> TextIO:
    """Open a file of results for writing. A resumed file loses its last line if the line is unfinished."""
    if is_resumed:
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a" if is_resumed else "w", encoding="utf-8")


_SAME_PEAK_SHARE = 0.05
"""Peaks that differ by less count as the same. Two benches of one setting differed by up to 2.6 % in one profile,
because the size of a profile is computed from trials."""
_NEARLY_FULL = 0.999
"""Filled share from which on a buffer counts as full."""
_HEADS = ("profile", "buffer", "holds", "batch", "peak", "B each", "steps/s", "reward", "saved")
_BEST = {"memory": "Least memory", "speed": "Fastest", "reward": "Highest reward"}


def rank_runs(runs: Sequence[results.TrainingRun], missing: int = 0) -> list[results.ProfileRanking]:
    """Rank by memory, speed and reward. Rank by nothing if runs are missing."""
    if missing:
        why = f"{count_noun(missing, 'run is', 'runs are')} missing. --resume makes them"
        return [results.ProfileRanking(by, (), why) for by in ("memory", "speed", "reward")]
    known = results.summarize_seeds(runs)
    measured = [summary for summary in known if summary.done]
    return [
        _rank_by_memory(known, measured),
        _rank_by_interval("speed", [(summary.name, summary.speed) for summary in measured]),
        _rank_by_interval("reward", [(summary.name, summary.reward) for summary in measured]),
    ]


def _rank_by_memory(
    known: Sequence[results.SeedsSummary], measured: Sequence[results.SeedsSummary]
) -> results.ProfileRanking:
    reasons = [_explain_exclusion(run) for summary in known for run in summary.runs]
    refused = next(filter(None, reasons), None)
    if refused is None and not measured:
        refused = "nothing was measured"
    if refused is not None:
        return results.ProfileRanking("memory", (), refused)
    groups = _group_similar_peaks(measured)
    names = tuple(summary.name for group in groups for summary in group)
    same = tuple((one.name, other.name) for group in groups for one, other in pairwise(group))
    return results.ProfileRanking("memory", names, None, same)


def _explain_exclusion(run: results.TrainingRun) -> str | None:
    """Return the reason why the memory of a run cannot be compared, or None if it can."""
    named = f"{run.profile} with {run.buffer}"
    if run.status == "done" and run.filled < _NEARLY_FULL:
        held = f"{int(run.filled * run.size):,} of {run.size:,} transitions when it was measured"
        return f"{named} held {held}. Fill the buffers to rank them by memory"
    return f"{named} {run.status}; --resume runs it again" if run.status in {"failed", "stopped"} else None


def _group_similar_peaks(measured: Sequence[results.SeedsSummary]) -> list[list[results.SeedsSummary]]:
    """Group the summaries whose peaks count as the same. A group has the order of `measured`."""
    groups: list[list[results.SeedsSummary]] = []
    last_peak = 0.0
    for summary in sorted(measured, key=lambda one: one.peak or 0.0):
        peak = summary.peak or 0.0
        if groups and peak - last_peak < _SAME_PEAK_SHARE * last_peak:
            groups[-1].append(summary)
        else:
            groups.append([summary])
        last_peak = peak
    return [sorted(group, key=measured.index) for group in groups]


def _rank_by_interval(
    by: str, intervals: Sequence[tuple[results.ProfileAndBuffer, results.Interval | None]]
) -> results.ProfileRanking:
    known = sorted(((name, value) for name, value in intervals if value is not None), key=lambda pair: -pair[1].mean)
    if not known:
        return results.ProfileRanking(by, (), f"no {by} was measured")
    if any(interval.half is None for _, interval in known):
        return results.ProfileRanking(by, (), "one seed does not show how much seeds differ. Pass --seeds 3 or more")
    neighbours = list(pairwise(known))
    same = [(one[0], other[0]) for one, other in neighbours if one[1].overlaps(other[1])]
    if neighbours and len(same) == len(neighbours):
        return results.ProfileRanking(
            by, (), "the intervals of all neighbours overlap. More seeds or steps may separate them"
        )
    return results.ProfileRanking(by, tuple(name for name, _ in known), None, tuple(same))


def draw_results(
    header: dict[str, Any], runs: Sequence[results.TrainingRun], rankings: Sequence[results.ProfileRanking]
) -> Iterator[RenderableType]:
    """Yield the table of a bench, its rankings, and its failed runs."""
    title = f"{header['algo'].upper()} on {header['env']}, profiles of {format_bytes(header['limit'])}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(_HEADS):
        # In a narrow terminal, a mean and its interval may be on two lines. A single figure may not.
        is_pair = head in {"steps/s", "reward"}
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=not is_pair, min_width=len(head))
    for summary in results.summarize_seeds(runs):
        table.add_row(*_format_summary(summary), style="" if summary.done else "dim")
    yield table
    for ranking in rankings:
        yield _describe_ranking(ranking)
    for run in runs:
        if run.status == "failed":
            yield Text(f"{run.profile} with {run.buffer}, seed {run.seed}: {run.reason}", "yellow")


def _format_summary(summary: results.SeedsSummary) -> tuple[str, ...]:
    run = summary.runs[0]
    sizes = (*summary.name, f"{run.size:,}", f"{run.batch_size:,}")
    if not summary.done:
        return *sizes, run.status, "", "", "", ""
    each = summary.bytes_per_transition
    saved = summary.compute_checkpoint("bytes")
    memory = (format_bytes(summary.peak or 0), "-" if each is None else f"{each:,.0f}")
    checkpoint = "-" if saved is None else format_bytes(saved)
    return *sizes, *memory, _format_interval(summary.speed), _format_interval(summary.reward), checkpoint


def _format_interval(value: results.Interval | None) -> str:
    if value is None:
        return "-"
    digits = 1 if abs(value.mean) < 10 else 0
    return f"{value.mean:.{digits}f}" + ("" if value.half is None else f" ± {value.half:.{digits}f}")


def _describe_ranking(ranking: results.ProfileRanking) -> Text:
    if ranking.refused is not None:
        return Text(f"Not ranked by {ranking.by}: {ranking.refused}.", style="yellow")
    first = " with ".join(ranking.order[0])
    tied = next((" with ".join(other) for one, other in ranking.same if one == ranking.order[0]), None)
    doubt = f" (no clear difference to {tied})" if tied else ""
    return Text.assemble((f"{_BEST[ranking.by]}: ", "bold"), f"{first}{doubt}.")
