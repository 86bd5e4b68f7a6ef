"""Running out: at which step a limit is reached, if everything goes on as it does.

In:  the history, and what leaks.  Out: one verdict for the limit that comes first, of RAM, control group, GPU and disk.
A buffer grows until it is full, a leak for ever; the step is where their sum is what is left.
"""

from __future__ import annotations

from holdall.units import format_bytes
from holdall.watch.history import History
from holdall.watch.reading import Reading
from holdall.watch.trend import steady_growth
from holdall.watch.verdicts.filling import Fill, fills
from holdall.watch.verdicts.leak import Leak
from holdall.watch.verdicts.verdict import Severity, Verdict, in_time

_RECENT = 40
"""Readings whose highest is what a step needs at its peak."""
_NEVER = float("inf")


def running_out(history: History, leaking: list[Leak]) -> list[Verdict]:
    """Say which limit is reached first, and when; nothing if none is, before the training's end."""
    newest = history.newest
    swing = max(reading.pss for reading in history.readings[-_RECENT:]) - newest.pss
    slope = sum(leak.trend.slope for leak in leaking)
    ahead: list[tuple[float, str, int]] = []
    for name, left in (newest.headroom or {}).items():
        ahead.append((distance_to(left - swing, fills(history), slope), name, left))
    ahead += _device(history) + _disk(history)
    distance, name, left = min(ahead, default=(_NEVER, "", 0))
    to_goal = (newest.goal or _NEVER) - (newest.step or 0) if history.counts_steps else _NEVER
    if distance == _NEVER or distance > to_goal:
        return []
    return [_told(history, distance, name, left)]


def distance_to(left: float, filling: list[Fill], slope: float) -> float:
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


def _device(history: History) -> list[tuple[float, str, int]]:
    def held(reading: Reading) -> float | None:
        return None if reading.gpu is None or reading.gpu.reserved is None else float(reading.gpu.reserved)

    gpu = history.newest.gpu
    found = steady_growth(*history.series(held))
    if gpu is None or gpu.limit is None or gpu.reserved is None or found is None:
        return []
    left = gpu.limit - gpu.reserved - (gpu.other or 0)
    return [(left / found.slope, "GPU memory", left)]


def _disk(history: History) -> list[tuple[float, str, int]]:
    left = history.newest.disk_free
    found = steady_growth(*history.series(lambda reading: float(reading.spilled)))
    return [] if left is None or found is None else [(left / found.slope, "disk that memories spill to", left)]


def _told(history: History, distance: float, name: str, left: int) -> Verdict:
    newest = history.newest
    rate = (newest.steps_per_second or 0.0) if history.counts_steps else 1.0
    step = history.place(newest) + distance if history.counts_steps else None
    seconds = distance / rate if rate > 0 else None
    ends = [
        *([] if step is None else [f"at step {step:,.0f}"]),
        *([] if seconds is None else [f"in {in_time(seconds)}"]),
    ]
    text = f"{name}: {format_bytes(left)} are left, used up {', '.join(ends) or 'soon'}"
    if left <= 0:
        text = f"{name}: exceeded by {format_bytes(-left)}"
    severity: Severity = "error" if step is None or newest.goal is not None else "warning"
    return Verdict(
        name="running out",
        severity=severity,
        text=text,
        remedy="a smaller buffer, holdall's memory with a budget and a spill_dir, or on_pressure='spill'; "
        "see 'holdall plan'",
        evidence={"limit": name, "left": left, "distance": distance, "step": step, "seconds": seconds},
    )
