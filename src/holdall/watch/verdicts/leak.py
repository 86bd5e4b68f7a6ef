"""Leaks: memory that grows with every step though no buffer fills.

In:  the history.  Out: what grows, by how much a step, and how sure that is.

What live objects take is asked of the allocators, always at the same place in a training step, and without the arrays of
buffers: there is no fill in it, no cache of the C library, and no library that another process began to share. Where a
process says nothing of itself, its anonymous memory stands in, without the mappings that are still being touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.units import format_bytes
from holdall.watch.history import History
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


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that grows."""

    trend: Trend
    verdict: Verdict


def leaks(history: History) -> list[Leak]:
    """Return what grows steadily after the buffers' fill is taken out."""
    readings = history.same_phase()
    readings = readings[int(len(readings) * _WARM_UP) :]
    if not readings:
        return []
    found = []
    if readings[-1].live_heap is not None:
        found.append(_leak(history, readings, "live_heap", _LEAST_GROWTH))
    else:
        found.append(_leak(history, readings, "anonymous", _LEAST_GROWTH_OF_SUMS))
    found.append(_leak(history, readings, "workers", _LEAST_GROWTH_OF_SUMS))
    found.append(_leak(history, readings, "shared", _LEAST_GROWTH_OF_SUMS))
    return [leak for leak in found if leak is not None]


def _leak(history: History, readings: list[Reading], of: str, least_growth: int) -> Leak | None:
    xs, ys = history.series(lambda reading: _value(reading, of), readings)
    found = steady_growth(xs, ys)
    least_slope = _LEAST_SLOPE if history.counts_steps else _LEAST_SLOPE_IN_TIME
    if found is None or found.slope < least_slope or found.slope * (found.last - found.first) < least_growth:
        return None
    return Leak(found, _told(history, readings, of, found))


def _value(reading: Reading, of: str) -> float | None:
    if of == "live_heap":
        return reading.live_heap
    if of == "anonymous":
        filling = sum(p.resident for p in reading.parts if p.group == "unattributed" and p.resident < 0.98 * p.allocated)
        return reading.of("torch") + reading.of("python") + reading.of("unattributed") - filling
    return reading.of(of)


def _told(history: History, readings: list[Reading], of: str, found: Trend) -> Verdict:
    unit = "a step" if history.counts_steps else "a second"
    where, remedy = _where(history, readings, of, found)
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


def _where(history: History, readings: list[Reading], of: str, found: Trend) -> tuple[str, str]:
    if of == "workers":
        return "environment workers", "look for what an environment keeps of every step or episode"
    if of == "shared":
        return "shared mappings", "look for shared memory that is made anew and never unlinked"
    if of == "anonymous":
        return "the heap and small mappings", "start it with 'holdall watch -- ...' to see buffers and objects by name"
    xs, ys = history.series(lambda reading: reading.live_python, readings)
    python = steady_growth(xs, ys)
    if python is not None and python.slope > 0.5 * found.slope:
        return "Python objects", "look for lists that keep something of every step: losses, infos, observations"
    return "arrays, tensors and large objects", "look for tensors kept with their graph (use .item() or .detach()), or arrays in lists"
