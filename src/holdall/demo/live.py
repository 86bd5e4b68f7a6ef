"""What a training holds right now, in one line: the newest reading of its watch's record.

In:  the file that `holdall.sb3.WatchCallback` writes.  Out: text for a progress bar; nothing before the first reading.
"""

from __future__ import annotations

import json
from pathlib import Path

from holdall.units import format_bytes

_TAIL_BYTES = 65_536
_SHOWN = ("buffers", "torch", "python", "libraries")


def newest(record: Path) -> str:
    """Return the newest reading in words."""
    try:
        with record.open("rb") as file:
            file.seek(max(record.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            reading = json.loads(line)
        except ValueError:
            continue
        if isinstance(reading, dict) and reading.get("kind") == "reading":
            return _said(reading)
    return ""


def _said(reading: dict[str, object]) -> str:
    sums = dict.fromkeys(_SHOWN, 0)
    parts = reading.get("parts")
    for part in parts if isinstance(parts, list | tuple) else ():
        if part["group"] in sums:
            sums[part["group"]] += int(part["resident"])
    shown = ", ".join(f"{group} {format_bytes(size)}" for group, size in sums.items() if size)
    return f"{format_bytes(float(str(reading['pss'])))}: {shown}"
