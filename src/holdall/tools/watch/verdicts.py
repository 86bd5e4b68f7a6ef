"""Verdicts on the readings of a process, each with evidence and a remedy, the most severe first.

A leak is steady growth in one phase of training. If there is an agent, it counts live objects without the arrays of
buffers, always at the same point of a step. So neither a filling buffer nor free heap that the C library keeps looks
like a leak.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from holdall.tools.recording_format import BYTES, SECONDS, SHARE, STEPS, TIME
from holdall.tools.watch.reading import BYTES_PER_PYTHON_OBJECT, AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.trend import Trend, fit_steady_growth
from holdall.units import count_noun, format_bytes, format_seconds

Severity = Literal["error", "warning", "info"]

# Distances and slopes are counted in steps if the process reports its steps, and else in seconds.

_MIN_FILL_READINGS = 4
_FULL_SHARE = 0.995
_WARM_UP_SHARE = 0.25
"""Share of the history that is skipped, because a training allocates most objects at its beginning."""
_MIN_LEAK_BYTES = 2 * 2**20
_MIN_LEAK_BYTES_OF_SUMS = 32 * 2**20
"""Smallest leak in a group of parts, whose sum is less steady than counts of live objects."""
_MIN_LEAK_BYTES_PER_STEP = 48.0
_MIN_LEAK_BYTES_PER_SECOND = 4096.0
_MIN_LEAKED_OBJECTS = 8_000
_MIN_OBJECTS_PER_STEP = 0.75
"""More than a wrapper keeps that records the return of every episode."""
_MIN_OBJECTS_PER_SECOND = 50.0
_SOURCES = {
    "python": ("Python objects", "Look for lists that keep something of every step: losses, infos, observations."),
    "arrays": (
        "arrays, tensors and large objects",
        "Look for tensors that keep their graph (use .item() or .detach()), or arrays in lists.",
    ),
    "anonymous": ("the heap and small mappings", "Start it with 'holdall watch -- ...' to see buffers by name."),
    "workers": (
        "environment workers",
        "Look for lists of an environment that keep something of every step or episode.",
    ),
    "shared": ("shared mappings", "Look for shared memory that is created again and again, and never unlinked."),
}
"""By the place where memory grows: the words for it in the text of a verdict, and the remedy."""
_SWING_READINGS = 40
"""Number of recent readings whose maximum counts as the peak of a step."""
_NEVER = float("inf")
_MIN_RETAINED_BYTES = 64 * 2**20
_MIN_RETAINED_SHARE = 0.05
_MIN_THREADS = 16
_MIN_THREADS_PER_CORE = 4
_MIN_SHAPE_READINGS = 12
_STEADY_SHARE = 0.02
_SWING_SHARE = 0.10
_MIN_CROSSINGS = 6


@dataclass(frozen=True, slots=True)
class WatchVerdict:
    """A statement about the memory of a process, such as a leak or a buffer that fills."""

    name: str
    severity: Severity
    text: str
    remedy: str
    evidence: dict[str, Any] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    """Units of the evidence by its names, as in `recording_format`. Counts, steps and texts have no unit."""

    def as_dict(self, moment: float) -> dict[str, Any]:
        """Return the verdict as plain data, as it is recorded."""
        return {"kind": "verdict", "time": moment, **asdict(self)}


class Evidence(NamedTuple):
    """A figure or a text that supports a verdict."""

    name: str
    value: Any
    unit: str = ""  # One of the units of `recording_format`, or words.


def _make_verdict(name: str, severity: Severity, text: str, remedy: str, evidence: Sequence[Evidence]) -> WatchVerdict:
    values = {one.name: one.value for one in evidence}
    units = {one.name: one.unit for one in evidence if one.unit}
    return WatchVerdict(name, severity, text, remedy, values, units)


def judge(history: ReadingHistory, command: Sequence[str] = ()) -> list[WatchVerdict]:
    """Return the verdicts on a history of readings. `command` started the process."""
    if not history.readings:
        return []
    leaks = find_leaks(history, command)
    filling = find_filling_buffers(history)
    verdicts = [*_judge_limits(history, filling, leaks), *(leak.verdict for leak in leaks)]
    verdicts += _judge_filling(history, filling)
    verdicts += _judge_retained_heap(history.newest)
    verdicts += _judge_threads(history.newest)
    verdicts += _judge_shape(history, is_steady_possible=not leaks and not filling)
    return sorted(verdicts, key=lambda verdict: ("error", "warning", "info").index(verdict.severity))


# ---------------------------------------------------------------- buffers that fill


@dataclass(frozen=True, slots=True)
class FillingBuffer:
    """A buffer that is not full yet."""

    name: str
    share: float  # Fraction that is filled.
    resident: float  # Bytes now.
    slope: float  # Bytes per step or second.
    left: float  # Steps or seconds until the buffer is full.
    max_bytes: float = _NEVER  # Bytes that the buffer never exceeds: what is allocated for it, or its budget.
    has_budget: bool = False  # Whether `max_bytes` is a budget.

    @property
    def final_bytes(self) -> float:
        """Bytes of the full buffer."""
        return max(min(self.resident + self.slope * self.left, self.max_bytes), self.resident)

    @property
    def growth_left(self) -> float:
        """Steps or seconds until the buffer stops growing."""
        return (self.final_bytes - self.resident) / self.slope if self.slope > 0 else 0.0


class _FillPoint(NamedTuple):
    """A buffer in one reading."""

    position: float  # Step or time.
    share: float  # Fraction that is filled.
    resident: int


def find_filling_buffers(history: ReadingHistory) -> list[FillingBuffer]:
    """Return the buffers that only grow and are not full."""
    filling = []
    recent = history.readings[len(history.readings) // 3 :]
    for name, parts in _group_buffers(history.newest).items():
        points = []
        for reading in recent:
            recent_parts = _group_buffers(reading).get(name, [])
            if recent_parts:
                share = max(part.fill or 0.0 for part in recent_parts)
                resident = sum(part.resident for part in recent_parts)
                points.append(_FillPoint(history.get_position(reading), share, resident))
        # A rollout is emptied again and again. A replay buffer only fills.
        only_grows = all(after.share >= before.share for before, after in pairwise(points))
        if len(points) >= _MIN_FILL_READINGS and only_grows and points[-1].share < _FULL_SHARE:
            buffer = _extrapolate_fill(name, parts, points)
            if buffer is not None:
                filling.append(buffer)
    return filling


def _extrapolate_fill(name: str, parts: list[AttributedPart], points: list[_FillPoint]) -> FillingBuffer | None:
    """Return when a buffer will be full, and its size then. None if it did not fill between `points`."""
    first = points[0]
    last = points[-1]
    distance = last.position - first.position
    filled = last.share - first.share
    if distance <= 0 or filled <= 0:
        return None
    left = (1.0 - last.share) * distance / filled
    if any(part.grows for part in parts):
        budgets = [part.budget for part in parts if part.budget is not None]
        slope = max((last.resident - first.resident) / distance, 0.0)
        return FillingBuffer(
            name, last.share, last.resident, slope, left, max(budgets, default=_NEVER), has_budget=bool(budgets)
        )
    # Every page of an array of fixed size is touched when its last row is written.
    allocated = sum(part.allocated for part in parts)
    slope = max(allocated - last.resident, 0) / left
    return FillingBuffer(name, last.share, last.resident, slope, left, allocated)


def _group_buffers(reading: MemoryReading) -> dict[str, list[AttributedPart]]:
    """Return the parts of buffers by the buffer's name: `replay.rewards` is part of `replay`."""
    parts_by_buffer: dict[str, list[AttributedPart]] = {}
    for part in reading.parts:
        if part.group == "buffers" and part.fill is not None:
            parts_by_buffer.setdefault(part.name.partition(".")[0], []).append(part)
    return parts_by_buffer


def _judge_filling(history: ReadingHistory, filling: list[FillingBuffer]) -> Iterator[WatchVerdict]:
    newest = history.newest
    for buffer in filling:
        final_pss = newest.pss + buffer.final_bytes - buffer.resident
        note = " (its budget)" if buffer.has_budget and buffer.final_bytes == buffer.max_bytes else ""
        text = (
            f"{buffer.name} is {buffer.share:.0%} full and takes {format_bytes(buffer.resident)}; "
            f"full{_say_when(history, buffer.left)} with {format_bytes(buffer.final_bytes)}{note}; "
            f"the process then takes {format_bytes(final_pss)}"
        )
        evidence = [
            Evidence("buffer", buffer.name),
            Evidence("fill", buffer.share, SHARE),
            Evidence("resident", buffer.resident, BYTES),
            Evidence("slope", buffer.slope, f"{BYTES} {_get_rate_unit(history)}"),
            Evidence("left", buffer.left, _get_distance_unit(history)),
            Evidence("final", buffer.final_bytes, BYTES),
            Evidence("final_pss", final_pss, BYTES),
        ]
        yield _make_verdict("filling", "info", text, "Nothing to do: growth ends when the buffer is full.", evidence)


def _get_distance_unit(history: ReadingHistory) -> str:
    """Return the unit of distances between positions of a history."""
    return STEPS if history.counts_steps else SECONDS


def _get_rate_unit(history: ReadingHistory) -> str:
    return "a step" if history.counts_steps else "a second"


def _say_when(history: ReadingHistory, distance: float) -> str:
    """Return when a position is reached that is `distance` ahead: ` at step 7,050, in 30 s`."""
    words = []
    if history.counts_steps:
        words.append(f" at step {history.get_position(history.newest) + distance:,.0f}")
    seconds = _count_seconds(history, distance)
    if seconds is not None:
        words.append(f" in {format_seconds(round(seconds))}")
    return ",".join(words)


def _count_seconds(history: ReadingHistory, distance: float) -> float | None:
    if not history.counts_steps:
        return distance
    rate = history.newest.steps_per_second
    return distance / rate if rate else None


# ---------------------------------------------------------------- leaks


class Leak(NamedTuple):
    """Memory that grows without end."""

    slope: float  # Bytes per step or second. An estimate if the verdict counts objects.
    verdict: WatchVerdict


def find_leaks(history: ReadingHistory, command: Sequence[str] = ()) -> list[Leak]:
    """Return the steady growth of memory outside of buffers: at most one leak for each source."""
    leaks = [_find_leak_of_group(history, group) for group in ("workers", "shared")]
    if history.live:
        leaks.insert(0, _find_leak_of_objects(history, command))
    else:
        leaks.insert(0, _find_leak_of_group(history, "anonymous"))
    return [leak for leak in leaks if leak is not None]


def _find_leak_of_objects(history: ReadingHistory, command: Sequence[str]) -> Leak | None:
    live = history.select_training(history.live)
    live = live[int(len(live) * _WARM_UP_SHARE) :]
    positions = [history.get_position(one) for one in live]
    heap = fit_steady_growth(positions, [one.heap for one in live])
    if heap is not None and not _is_large(history, heap, _MIN_LEAK_BYTES):
        heap = None
    objects = fit_steady_growth(positions, [one.python for one in live])
    if objects is not None and not _is_many(history, objects):
        objects = None
    heap_slope = 0.0 if heap is None else heap.slope
    objects_slope = 0.0 if objects is None else objects.slope * BYTES_PER_PYTHON_OBJECT
    if objects is not None and objects_slope > heap_slope:
        verdict = _describe_leak_of_objects(history, objects, command)
    elif heap is not None:
        verdict = _describe_leak(history, "arrays", heap, command)
    else:
        return None
    return Leak(heap_slope + objects_slope, verdict)


def _find_leak_of_group(history: ReadingHistory, group: str) -> Leak | None:
    readings = history.select_training(history.readings)
    readings = readings[int(len(readings) * _WARM_UP_SHARE) :]
    positions, values = history.collect_series(lambda reading: _count_candidate_bytes(reading, group), readings)
    trend = fit_steady_growth(positions, values)
    if trend is None or not _is_large(history, trend, _MIN_LEAK_BYTES_OF_SUMS):
        return None
    return Leak(trend.slope, _describe_leak(history, group, trend))


def _count_candidate_bytes(reading: MemoryReading, group: str) -> float:
    if group != "anonymous":
        return reading.of(group)
    # A large mapping of which not all pages are touched is a buffer that fills.
    filling = 0
    for part in reading.parts:
        if part.group == "unattributed" and part.resident < 0.98 * part.allocated:
            filling += part.resident
    return reading.of("torch") + reading.of("python") + reading.of("unattributed") - filling


def _is_large(history: ReadingHistory, trend: Trend, min_growth: int) -> bool:
    min_slope = _MIN_LEAK_BYTES_PER_STEP if history.counts_steps else _MIN_LEAK_BYTES_PER_SECOND
    return trend.slope >= min_slope and trend.growth >= min_growth


def _is_many(history: ReadingHistory, trend: Trend) -> bool:
    min_slope = _MIN_OBJECTS_PER_STEP if history.counts_steps else _MIN_OBJECTS_PER_SECOND
    return trend.slope >= min_slope and trend.growth >= _MIN_LEAKED_OBJECTS


def _describe_leak(history: ReadingHistory, source: str, trend: Trend, command: Sequence[str] = ()) -> WatchVerdict:
    unit = _get_rate_unit(history)
    where, remedy = _SOURCES[source]
    text = (
        f"{where} grow by {trend.slope:,.0f} B {unit} (between {trend.low:,.0f} and {trend.high:,.0f}), "
        f"{format_bytes(trend.growth)} so far, without the buffers"
    )
    evidence = _list_trend_evidence(history, source, trend, BYTES)
    return _advise_memray(_make_verdict("leak", "warning", text, remedy, evidence), command)


def _describe_leak_of_objects(history: ReadingHistory, trend: Trend, command: Sequence[str]) -> WatchVerdict:
    unit = _get_rate_unit(history)
    _, remedy = _SOURCES["python"]
    text = (
        f"Python keeps {trend.slope:,.1f} more objects {unit} (between {trend.low:,.1f} and {trend.high:,.1f}), "
        f"{trend.growth:,.0f} so far, about {format_bytes(trend.growth * BYTES_PER_PYTHON_OBJECT)}"
    )
    evidence = _list_trend_evidence(history, "python", trend, "objects")
    return _advise_memray(_make_verdict("leak", "warning", text, remedy, evidence), command)


def _list_trend_evidence(history: ReadingHistory, source: str, trend: Trend, unit: str) -> list[Evidence]:
    """Return the evidence of a leak of `source`, which is counted in `unit`."""
    rate_unit = f"{unit} {_get_rate_unit(history)}"
    position_unit = "" if history.counts_steps else TIME
    return [
        Evidence("of", source),
        Evidence("slope", trend.slope, rate_unit),
        Evidence("low", trend.low, rate_unit),
        Evidence("high", trend.high, rate_unit),
        Evidence("from", trend.first, position_unit),
        Evidence("to", trend.last, position_unit),
        Evidence("grown", trend.growth, unit),
    ]


def _advise_memray(verdict: WatchVerdict, command: Sequence[str]) -> WatchVerdict:
    """Add the command that finds the line, if the command that was watched is a Python program."""
    profile = suggest_memray(command)
    if not profile:
        return verdict
    remedy = f"{verdict.remedy} To find the line, run: {profile}"
    return replace(verdict, remedy=remedy, evidence=verdict.evidence | {"profile": profile})


def suggest_memray(command: Sequence[str]) -> str:
    """Return the command line that shows which line of a Python program keeps memory. Empty for other programs."""
    if not command or not PurePath(command[0]).name.startswith(("python", "pypy")):
        return ""
    run = [command[0], "-m", "memray", "run", "--trace-python-allocators", "-fo", "leak.bin", *command[1:]]
    show = [command[0], "-m", "memray", "flamegraph", "--leaks", "-fo", "leak.html", "leak.bin"]
    return f"{shlex.join(run)}; {shlex.join(show)}"


# ---------------------------------------------------------------- limits


def _judge_limits(history: ReadingHistory, filling: list[FillingBuffer], leaks: list[Leak]) -> Iterator[WatchVerdict]:
    """Report the limit that is reached first, unless training ends earlier."""
    newest = history.newest
    swing = max(reading.pss for reading in history.readings[-_SWING_READINGS:]) - newest.pss
    slope = sum(leak.slope for leak in leaks)
    distances: list[tuple[float, str, int]] = []  # Steps or seconds until a limit is reached, its name, bytes left.
    for name, left in (newest.headroom or {}).items():
        distances.append((compute_distance(left - swing, filling, slope), name, left))
    distances += _extrapolate_limit(history, "GPU memory", _get_gpu_reserved, _count_gpu_left(newest))
    distances += _extrapolate_limit(history, "disk that memories spill to", lambda one: one.spilled, newest.disk_free)
    distance, name, left = min(distances, default=(_NEVER, "", 0))
    distance_to_goal = _NEVER
    if history.counts_steps and newest.goal:
        distance_to_goal = newest.goal - (newest.step or 0)
    if distance == _NEVER or distance > distance_to_goal:
        return
    text = f"{name}: {format_bytes(left)} are left, used up{_say_when(history, distance)}"
    if left <= 0:
        text = f"{name}: exceeded by {format_bytes(-left)}"
    # A training that counts steps without a goal may end before the limit.
    severity: Severity = "warning" if history.counts_steps and newest.goal is None else "error"
    step = history.get_position(newest) + distance if history.counts_steps else None
    evidence = [
        Evidence("limit", name),
        Evidence("left", left, BYTES),
        Evidence("distance", distance, _get_distance_unit(history)),
        Evidence("step", step),
        Evidence("seconds", _count_seconds(history, distance), SECONDS),
    ]
    remedy = (
        "Use a smaller buffer, holdall's memory with a budget and spill_dir, or on_pressure='spill'. "
        "'holdall plan' shows what fits."
    )
    yield _make_verdict("running out", severity, text, remedy, evidence)


def compute_distance(left: float, filling: list[FillingBuffer], slope: float) -> float:
    """Return the steps or seconds until `left` bytes are used up, or infinity.

    The bytes are taken by leaks, which grow by `slope` per step or second, and by the buffers that still grow.
    """
    if left <= 0:
        return 0.0
    distance = 0.0
    growing = sorted(filling, key=lambda buffer: buffer.growth_left)
    while True:
        rate = slope + sum(buffer.slope for buffer in growing)
        to_next_end = growing[0].growth_left - distance if growing else _NEVER
        if rate > 0 and left <= rate * to_next_end:
            return distance + left / rate
        if not growing:
            return _NEVER
        left -= rate * to_next_end
        distance += to_next_end
        growing.pop(0)


def _extrapolate_limit(
    history: ReadingHistory, name: str, value: Callable[[MemoryReading], float | None], left: int | None
) -> list[tuple[float, str, int]]:
    """Return the distance to a limit of which `left` bytes are left. Empty if `value` does not grow steadily."""
    trend = fit_steady_growth(*history.collect_series(value))
    return [] if left is None or trend is None else [(left / trend.slope, name, left)]


def _get_gpu_reserved(reading: MemoryReading) -> int | None:
    return None if reading.gpu is None else reading.gpu.reserved


def _count_gpu_left(reading: MemoryReading) -> int | None:
    gpu = reading.gpu
    if gpu is None or gpu.limit is None or gpu.reserved is None:
        return None
    return gpu.limit - gpu.reserved - (gpu.other or 0)


# ---------------------------------------------------------------- heap, threads, and the shape of the curve


def _judge_retained_heap(newest: MemoryReading) -> Iterator[WatchVerdict]:
    kept = newest.of("heap_retained")
    if kept >= max(_MIN_RETAINED_BYTES, _MIN_RETAINED_SHARE * newest.pss):
        text = f"{format_bytes(kept)} of the heap are free, but the C library keeps them"
        remedy = "It is used again, so it matters only if RAM is short. psutil.heap_trim() in the training returns it."
        yield _make_verdict("retained heap", "info", text, remedy, [Evidence("retained", kept, BYTES)])


def _judge_threads(newest: MemoryReading) -> Iterator[WatchVerdict]:
    if newest.threads < max(_MIN_THREADS, _MIN_THREADS_PER_CORE * newest.cores):
        return
    stacks = [part for part in newest.parts if part.group == "stacks"]
    resident = sum(part.resident for part in stacks)
    allocated = sum(part.allocated for part in stacks)
    text = (
        f"{newest.threads} threads for {count_noun(newest.cores, 'core')}; they wait for each other. Their stacks take "
        f"{format_bytes(resident)}, not the {format_bytes(allocated)} of addresses"
    )
    remedy = "Use holdall.threads.limit(workers=...), or OMP_NUM_THREADS=1 for workers. It saves time, hardly memory."
    evidence = [
        Evidence("threads", newest.threads),
        Evidence("cores", newest.cores),
        Evidence("torch_threads", newest.torch_threads),
        Evidence("stacks_resident", resident, BYTES),
        Evidence("stacks_virtual", allocated, BYTES),
    ]
    yield _make_verdict("threads", "warning", text, remedy, evidence)


def _judge_shape(history: ReadingHistory, *, is_steady_possible: bool) -> Iterator[WatchVerdict]:
    """Report that memory goes up and down in the newer half of the history, or that it is steady there."""
    recent = history.readings[len(history.readings) // 2 :]
    if len(recent) < _MIN_SHAPE_READINGS:
        return
    levels = [reading.pss for reading in recent]
    low = min(levels)
    high = max(levels)
    bounds = [Evidence("low", low, BYTES), Evidence("high", high, BYTES)]
    is_above = [level > (low + high) / 2 for level in levels]
    crossings = sum(before != after for before, after in pairwise(is_above))
    if high - low >= _SWING_SHARE * high and crossings >= _MIN_CROSSINGS:
        phase = max(recent, key=lambda reading: reading.pss).phase
        where = f", highest in phase {phase!r}" if phase else ""
        text = f"up and down between {format_bytes(low)} and {format_bytes(high)}{where}; the peak has to fit"
        evidence = [*bounds, Evidence("crossings", crossings), Evidence("phase", phase)]
        remedy = "A smaller batch or a shorter rollout lowers the peak. It is not a leak."
        yield _make_verdict("sawtooth", "info", text, remedy, evidence)
    elif high - low <= _STEADY_SHARE * high and is_steady_possible:
        text = f"steady at {format_bytes(levels[-1])}, within {format_bytes(high - low)}"
        yield _make_verdict("plateau", "info", text, "Nothing to do.", [*bounds, Evidence("readings", len(levels))])
