"""Leaks: memory that grows with every step though no buffer fills.

In:  the history.  Out: what grows, by how much a step, and how sure that is.

What live objects take is asked of the allocators, always at the same place in a training step, and without the arrays
of buffers: there is no fill in it, no cache of the C library, and no library that another process began to share. Where
a process says nothing of itself, its anonymous memory stands in, without the mappings that are still being touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.units import format_bytes
from holdall.watch.history import History, Live
from holdall.watch.reading import Reading
from holdall.watch.trend import Trend, steady_growth
from holdall.watch.verdicts.verdict import Verdict

_WARM_UP = 0.25
"""Share of the history that is not looked at: what a training makes once, it makes in the beginning."""
_LEAST_GROWTH = 2 * 2**20
_LEAST_SLOPE = 48.0
"""Bytes a step; a wrapper that notes the return of every episode takes less."""
_LEAST_SLOPE_IN_TIME = 4096.0
"""The same by the second, for processes that tell no steps."""
_LEAST_GROWTH_OF_SUMS = 32 * 2**20

_PYTHON = ("Python objects", "look for lists that keep something of every step: losses, infos, observations")
_ARRAYS = (
    "arrays, tensors and large objects",
    "look for tensors kept with their graph (use .item() or .detach()), or arrays in lists",
)
_GROUPS = {
    "anonymous": ("the heap and small mappings", "start it with 'holdall watch -- ...' to see buffers by name"),
    "workers": ("environment workers", "look for what an environment keeps of every step or episode"),
    "shared": ("shared mappings", "look for shared memory that is made anew and never unlinked"),
}


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that grows."""

    trend: Trend
    verdict: Verdict


def leaks(history: History) -> list[Leak]:
    """Return what grows steadily after the buffers' fill is taken out."""
    found = [_of_live(history)] if history.live else [_of_readings(history, "anonymous")]
    found += [_of_readings(history, group) for group in ("workers", "shared")]
    return [leak for leak in found if leak is not None]


def _of_live(history: History) -> Leak | None:
    live = history.live_in_same_phase()
    live = live[int(len(live) * _WARM_UP) :]
    places = [_place(one, history) for one in live]
    found = _notable(history, steady_growth(places, [one.heap for one in live]), _LEAST_GROWTH)
    if found is None:
        return None
    python = steady_growth(places, [one.python for one in live])
    if python is not None and python.slope > 0.5 * found.slope:
        where, remedy = _PYTHON
    else:
        where, remedy = _ARRAYS
    return Leak(found, _told(history, "live objects", where, remedy, found))


def _of_readings(history: History, of: str) -> Leak | None:
    readings = history.same_phase()
    readings = readings[int(len(readings) * _WARM_UP) :]
    xs, ys = history.series(lambda reading: _value(reading, of), readings)
    found = _notable(history, steady_growth(xs, ys), _LEAST_GROWTH_OF_SUMS)
    return None if found is None else Leak(found, _told(history, of, *_GROUPS[of], found))


def _notable(history: History, found: Trend | None, least_growth: int) -> Trend | None:
    least_slope = _LEAST_SLOPE if history.counts_steps else _LEAST_SLOPE_IN_TIME
    if found is None or found.slope < least_slope or found.slope * (found.last - found.first) < least_growth:
        return None
    return found


def _place(live: Live, history: History) -> float:
    return float(live.step or 0) if history.counts_steps else live.time


def _value(reading: Reading, of: str) -> float | None:
    if of != "anonymous":
        return reading.of(of)
    filling = sum(p.resident for p in reading.parts if p.group == "unattributed" and p.resident < 0.98 * p.allocated)
    return reading.of("torch") + reading.of("python") + reading.of("unattributed") - filling


def _told(history: History, of: str, where: str, remedy: str, found: Trend) -> Verdict:
    unit = "a step" if history.counts_steps else "a second"
    grown = found.slope * (found.last - found.first)
    return Verdict(
        name="leak",
        severity="warning",
        text=(
            f"{where} grow by {found.slope:,.0f} B {unit} (surely between {found.low:,.0f} and {found.high:,.0f}), "
            f"{format_bytes(grown)} so far; no buffer's fill is in that"
        ),
        remedy=remedy,
        evidence={
            "of": of, "unit": unit, "slope": found.slope, "low": found.low, "high": found.high,
            "from": found.first, "to": found.last, "grown": grown,
        },
    )  # fmt: skip
