"""Verdicts: what readings mean, each with evidence and a remedy.

In:  the history of readings.  Out: buffers that fill, leaks, limits that will be reached, retained heap, too many
threads, sawtooth, plateau; the most severe first.
Leaks are looked for in what the allocators report as live, at the same point of a step and without the buffers' arrays,
so that neither a filling buffer nor cached heap counts as a leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from holdall.tools.watch import reading as series
from holdall.tools.watch.reading import AttributedPart, GrowingLine, MemoryReading, ReadingHistory, Trend
from holdall.units import counted, format_bytes, format_seconds

_FEWEST_FILL_READINGS = 4
_FULL_SHARE = 0.995
_WARM_UP_SHARE = 0.25
"""Share of the history that is skipped: what a training allocates once, it allocates at the beginning."""
_LEAST_GROWTH = 2 * 2**20
_LEAST_SLOPE = 48.0
"""Bytes a step; a wrapper that notes the return of every episode takes less."""
_LEAST_SLOPE_IN_TIME = 4096.0
"""The same by the second, for processes that report no steps."""
_LEAST_GROWTH_OF_SUMS = 32 * 2**20
_PYTHON_SOURCE = ("Python objects", "look for lists that keep something of every step: losses, infos, observations")
_ARRAY_SOURCE = (
    "arrays, tensors and large objects",
    "look for tensors kept with their graph (use .item() or .detach()), or arrays in lists",
)
_READING_SOURCES = {
    "anonymous": ("the heap and small mappings", "start it with 'holdall watch -- ...' to see buffers by name"),
    "workers": ("environment workers", "look for what an environment keeps of every step or episode"),
    "shared": ("shared mappings", "look for shared memory that is created again and again, and never unlinked"),
}
LIVE_OBJECTS = "live objects"
_RECENT_READINGS = 40
"""Readings whose highest is what a step needs at its peak."""
_NEVER = float("inf")
_LEAST_RETAINED_BYTES = 64 * 2**20
_LEAST_RETAINED_SHARE = 0.05
_TRIM_REMEDY = (
    "'holdall trim PID', or start with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=131072; "
    "torch.cuda.empty_cache() does nothing about it"
)
_TIMES_CORES = 4
_FEWEST_THREADS = 16
_FEWEST_SHAPE_READINGS = 12
_STEADY_SHARE = 0.02
_SWING_SHARE = 0.10
_FEWEST_CROSSINGS = 6


def verdicts_for(history: ReadingHistory) -> list[WatchVerdict]:
    """Judge a process by its history; the most severe verdict comes first."""
    if not history.readings:
        return []
    leaking = find_leaks(history)
    judges = [filling_verdicts, retained_heap_verdicts, thread_verdicts, sawtooth_verdicts]
    judges += [] if leaking else [plateau_verdicts]
    found = [*running_out_verdicts(history, leaking), *(leak.verdict for leak in leaking)]
    found += [verdict for judge in judges for verdict in judge(history)]
    return sorted(found, key=lambda verdict: ("error", "warning", "info").index(verdict.severity))


Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class WatchVerdict:
    """What readings mean."""

    name: str
    severity: Severity
    text: str
    remedy: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, moment: float) -> dict[str, Any]:
        """Return plain numbers and text, as they are recorded."""
        return {"kind": "verdict", "time": moment, **asdict(self)}


@dataclass(frozen=True, slots=True)
class FillingBuffer:
    """A buffer that is not full yet."""

    name: str
    share: float
    resident: int
    slope: float  # bytes a step, or a second
    left: float  # steps, or seconds, until it is full

    @property
    def bytes_left(self) -> float:
        """Bytes that it will still take."""
        return self.slope * self.left


def _filling_buffer(name: str, newest: list[AttributedPart], known: list[tuple[float, float, int]]) -> FillingBuffer:
    """Judge a buffer by position, share and bytes of its readings."""
    distance, filled, taken = (last - first for first, last in zip(known[0], known[-1], strict=True))
    share, resident = known[-1][1:]
    left, slope = (1.0 - share) / (filled / distance), max(taken / distance, 0.0)
    if not any(part.grows for part in newest):  # arrays of a fixed size never take more than they were given
        slope = min(slope, max(sum(part.allocated for part in newest) - resident, 0) / left)
    return FillingBuffer(name, share, resident, slope, left)


def filling_buffers(history: ReadingHistory) -> list[FillingBuffer]:
    """Return the buffers that only grow, and are not full."""
    readings = history.readings
    if len(readings) < _FEWEST_FILL_READINGS:
        return []
    found = []
    for name, parts in series.buffers_of(history.newest).items():
        share = max((part.fill for part in parts if part.fill is not None), default=1.0)
        if share >= _FULL_SHARE:
            continue
        past = [(reading, series.buffers_of(reading).get(name, [])) for reading in readings[len(readings) // 3 :]]
        known = [
            (history.position(reading), max(part.fill or 0.0 for part in held), sum(part.resident for part in held))
            for reading, held in past
            if held
        ]
        grows = all(after[1] >= before[1] for before, after in pairwise(known))
        if len(known) < _FEWEST_FILL_READINGS or not grows:
            continue  # a rollout starts again and again: that is no filling
        # Few rows touch no new page: what is full then is not known before pages have come, or all of them are there.
        says_how_much = known[-1][2] > known[0][2] or known[-1][2] >= sum(part.allocated for part in parts)
        if known[-1][0] > known[0][0] and known[-1][1] > known[0][1] and says_how_much:
            found.append(_filling_buffer(name, parts, known))
    return found


def filling_verdicts(history: ReadingHistory) -> Iterator[WatchVerdict]:
    """Report which buffers fill, until when, and up to what size."""
    newest = history.newest
    rate = (newest.steps_per_second or 0.0) if history.counts_steps else 1.0
    for fill in filling_buffers(history):
        final, final_pss = fill.resident + fill.bytes_left, newest.pss + fill.bytes_left
        end = f" at step {history.position(newest) + fill.left:,.0f}" if history.counts_steps else ""
        when = f", in {format_seconds(round(fill.left / rate))}" if rate > 0 else ""
        text = (
            f"{fill.name} is {100 * fill.share:.0f} % full and takes {format_bytes(fill.resident)}; full{end}{when}, "
            f"with {format_bytes(final)}; the whole then takes {format_bytes(final_pss)}"
        )
        evidence = {
            "buffer": fill.name, "fill": fill.share, "resident": fill.resident, "slope": fill.slope,
            "left": fill.left, "final": final, "final_pss": final_pss,
        }  # fmt: skip
        remedy = "nothing to do: this growth ends when the buffer is full"
        yield WatchVerdict("filling", "info", text, remedy, evidence)


class Leak(NamedTuple):
    """Something that grows."""

    trend: Trend
    verdict: WatchVerdict


def find_leaks(history: ReadingHistory) -> list[Leak]:
    """Return what grows steadily after the buffers' fill is taken out."""
    found = [_leak_in_live_objects(history)] if history.live else [_leak_in_readings(history, "anonymous")]
    found += [_leak_in_readings(history, group) for group in ("workers", "shared")]
    return [leak for leak in found if leak is not None]


def _leak_in_live_objects(history: ReadingHistory) -> Leak | None:
    live = series.in_common_phase(history.of_training(history.live))
    live = live[int(len(live) * _WARM_UP_SHARE) :]
    positions = [history.position(one) for one in live]
    found = _if_large_enough(history, series.steady_growth(positions, [one.heap for one in live]), _LEAST_GROWTH)
    if found is None:
        return None
    python = series.steady_growth(positions, [one.python for one in live])
    is_python = python is not None and python.slope > 0.5 * found.slope
    source = _PYTHON_SOURCE if is_python else _ARRAY_SOURCE
    return Leak(found, _leak_verdict(history, LIVE_OBJECTS, *source, found, history.growing))


def _leak_in_readings(history: ReadingHistory, of: str) -> Leak | None:
    readings = series.in_common_phase(history.of_training(history.readings))
    readings = readings[int(len(readings) * _WARM_UP_SHARE) :]
    xs, ys = history.series(lambda reading: _leak_candidate(reading, of), readings)
    found = _if_large_enough(history, series.steady_growth(xs, ys), _LEAST_GROWTH_OF_SUMS)
    return None if found is None else Leak(found, _leak_verdict(history, of, *_READING_SOURCES[of], found))


def _if_large_enough(history: ReadingHistory, found: Trend | None, least_growth: int) -> Trend | None:
    least_slope = _LEAST_SLOPE if history.counts_steps else _LEAST_SLOPE_IN_TIME
    if found is None or found.slope < least_slope or found.slope * (found.last - found.first) < least_growth:
        return None
    return found


def _leak_candidate(reading: MemoryReading, of: str) -> float | None:
    if of != "anonymous":
        return reading.of(of)
    filling = sum(p.resident for p in reading.parts if p.group == "unattributed" and p.resident < 0.98 * p.allocated)
    return reading.of("torch") + reading.of("python") + reading.of("unattributed") - filling


def _leak_verdict(
    history: ReadingHistory, of: str, where: str, remedy: str, found: Trend, lines: tuple[GrowingLine, ...] = ()
) -> WatchVerdict:
    unit = "a step" if history.counts_steps else "a second"
    grown = found.slope * (found.last - found.first)
    text = (
        f"{where} grow by {found.slope:,.0f} B {unit} (certainly between {found.low:,.0f} and {found.high:,.0f}), "
        f"{format_bytes(grown)} so far, without the buffers"
    )
    evidence = {
        "of": of, "unit": unit, "slope": found.slope, "low": found.low, "high": found.high,
        "from": found.first, "to": found.last, "grown": grown,
    }  # fmt: skip
    for line in lines[:1]:
        name = PurePath(line.file).name
        text += f"; {name}:{line.number} allocates what stays: {line.code}"
        remedy = f"look at who keeps what {name}:{line.number} makes"
        evidence |= {
            "line": f"{line.file}:{line.number}", "code": line.code, "traced_bytes": line.nbytes,
            "traced_seconds": line.seconds,
        }  # fmt: skip
    return WatchVerdict("leak", "warning", text, remedy, evidence)


def running_out_verdicts(history: ReadingHistory, leaking: list[Leak]) -> Iterator[WatchVerdict]:
    """Report which limit is reached first, and when; nothing if none is reached before the training ends."""
    newest = history.newest
    swing = max(reading.pss for reading in history.readings[-_RECENT_READINGS:]) - newest.pss
    slope = sum(leak.trend.slope for leak in leaking)
    filling, room = filling_buffers(history), (newest.headroom or {}).items()
    ahead = [(distance_to(left - swing, filling, slope), name, left) for name, left in room]
    ahead += _gpu_limit(history) + _disk_limit(history)
    distance, name, left = min(ahead, default=(_NEVER, "", 0))
    to_goal = (newest.goal or _NEVER) - (newest.step or 0) if history.counts_steps else _NEVER
    if distance != _NEVER and distance <= to_goal:
        yield _running_out_verdict(history, distance, name, left)


def distance_to(left: float, filling: list[FillingBuffer], slope: float) -> float:
    """Return after how many steps `left` bytes are used up; infinity if they never are."""
    if left <= 0:
        return 0.0
    here = 0.0
    growing = sorted(filling, key=lambda fill: fill.left)
    while True:
        rate = slope + sum(fill.slope for fill in growing)
        until = growing[0].left - here if growing else _NEVER
        if rate > 0 and left <= rate * until:
            return here + left / rate
        if not growing:
            return _NEVER
        left -= rate * until
        here += until
        growing.pop(0)


def _gpu_limit(history: ReadingHistory) -> list[tuple[float, str, int]]:
    def held(reading: MemoryReading) -> float | None:
        return None if reading.gpu is None or reading.gpu.reserved is None else float(reading.gpu.reserved)

    gpu = history.newest.gpu
    found = series.steady_growth(*history.series(held))
    if gpu is None or gpu.limit is None or gpu.reserved is None or found is None:
        return []
    left = gpu.limit - gpu.reserved - (gpu.other or 0)
    return [(left / found.slope, "GPU memory", left)]


def _disk_limit(history: ReadingHistory) -> list[tuple[float, str, int]]:
    left = history.newest.disk_free
    found = series.steady_growth(*history.series(lambda reading: float(reading.spilled)))
    return [] if left is None or found is None else [(left / found.slope, "disk that memories spill to", left)]


def _running_out_verdict(history: ReadingHistory, distance: float, name: str, left: int) -> WatchVerdict:
    newest = history.newest
    rate = (newest.steps_per_second or 0.0) if history.counts_steps else 1.0
    step = history.position(newest) + distance if history.counts_steps else None
    seconds = distance / rate if rate > 0 else None
    at = [] if step is None else [f"at step {step:,.0f}"]
    ends = at if seconds is None else [*at, f"in {format_seconds(round(seconds))}"]
    text = f"{name}: {format_bytes(left)} are left, used up {', '.join(ends) or 'soon'}"
    if left <= 0:
        text = f"{name}: exceeded by {format_bytes(-left)}"
    severity: Severity = "error" if step is None or newest.goal is not None else "warning"
    remedy = (
        "a smaller buffer, holdall's memory with a budget and spill_dir, or on_pressure='spill'; see 'holdall plan'"
    )
    evidence = {"limit": name, "left": left, "distance": distance, "step": step, "seconds": seconds}
    return WatchVerdict("running out", severity, text, remedy, evidence)


def retained_heap_verdicts(history: ReadingHistory) -> Iterator[WatchVerdict]:
    """Report how much a trim would return, if that is worth it."""
    kept = history.newest.of("heap_retained")
    if kept >= max(_LEAST_RETAINED_BYTES, _LEAST_RETAINED_SHARE * history.newest.pss):
        text = f"{format_bytes(kept)} are free, but the C library keeps them; a trim would return at most that"
        yield WatchVerdict("retained heap", "info", text, _TRIM_REMEDY, {"retained": kept})


def thread_verdicts(history: ReadingHistory) -> Iterator[WatchVerdict]:
    """Report that there are far more threads than cores, and what their stacks really take."""
    newest = history.newest
    if newest.threads < max(_FEWEST_THREADS, _TIMES_CORES * newest.cores):
        return
    stacks = [part for part in newest.parts if part.group == "stacks"]
    resident, virtual = sum(part.resident for part in stacks), sum(part.allocated for part in stacks)
    text = (
        f"{newest.threads} threads for {counted(newest.cores, 'core')}; they wait for each other. Their stacks take "
        f"{format_bytes(resident)}, not the {format_bytes(virtual)} of addresses"
    )
    remedy = "holdall.threads.limit(workers=...), or OMP_NUM_THREADS=1 for workers; it saves time, hardly memory"
    evidence = {
        "threads": newest.threads, "cores": newest.cores, "torch_threads": newest.torch_threads,
        "stacks_resident": resident, "stacks_virtual": virtual,
    }  # fmt: skip
    yield WatchVerdict("threads", "warning", text, remedy, evidence)


def plateau_verdicts(history: ReadingHistory) -> Iterator[WatchVerdict]:
    """Report that memory is steady, if the newest third of the history is."""
    recent = history.readings[-len(history.readings) // 3 :]
    levels = [reading.pss for reading in recent]
    low, high = min(levels, default=0), max(levels, default=0)
    is_steady = len(levels) >= _FEWEST_SHAPE_READINGS and high - low <= _STEADY_SHARE * high
    if is_steady and not filling_buffers(history):
        text = f"steady at {format_bytes(levels[-1])}, within {format_bytes(high - low)}"
        evidence = {"low": low, "high": high, "readings": len(levels)}
        yield WatchVerdict("plateau", "info", text, "nothing to do", evidence)


def sawtooth_verdicts(history: ReadingHistory) -> Iterator[WatchVerdict]:
    """Report that memory goes up and down, and in which phase it is highest."""
    recent = history.readings[-len(history.readings) // 2 :]
    levels = [reading.pss for reading in recent]
    low, high = min(levels, default=0), max(levels, default=0)
    above = [level > (low + high) / 2 for level in levels]
    crossings = sum(before != after for before, after in pairwise(above))
    if len(levels) < _FEWEST_SHAPE_READINGS or high - low < _SWING_SHARE * high or crossings < _FEWEST_CROSSINGS:
        return
    peak = max(recent, key=lambda reading: reading.pss)
    phase = f", highest in phase {peak.phase!r}" if peak.phase else ""
    text = f"up and down between {format_bytes(low)} and {format_bytes(high)}{phase}; the peak has to fit"
    remedy = "a smaller batch or a shorter rollout lowers the peak; it is no leak"
    evidence = {"low": low, "high": high, "crossings": crossings, "phase": peak.phase}
    yield WatchVerdict("sawtooth", "info", text, remedy, evidence)
