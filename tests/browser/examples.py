"""Files of every kind: large ones, and ones with hostile texts."""

from __future__ import annotations

import json
import math
from typing import Any

MIB = 2**20
GIB = 2**30
HOSTILE = "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>\"'&"


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def long_run(readings: int) -> str:
    """A recorded run with a GPU, verdicts, events and one short spike, whose texts try to break out of the page."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "header",
            "format": "holdall-watch-1",
            "pid": 7,
            "command": ["python", "train.py", HOSTILE],
            "host": HOSTILE,
            "started": 1.7e9,
            "interval": 1.0,
            "system": "Linux",
            "limits": {"memory": 24 * GIB, "cgroup": 8 * GIB, "vram": 16 * GIB, "disk": None},
        }
    ]
    for at in range(readings):
        fill = at / readings
        spike = GIB if at == readings // 2 else 0
        parts = [
            ("buffers", HOSTILE, 3 * GIB * fill, 3 * GIB, fill),
            ("torch", "tensors", 400 * MIB + spike, 500 * MIB, None),
            ("python", "objects", (200 + 100 * fill) * MIB, 0, None),
            ("unattributed", "", 20 * MIB, 0, None),
        ]
        named = [
            {"group": group, "name": name, "resident": int(size), "allocated": int(whole), "fill": share}
            for group, name, size, whole, share in parts
        ]
        gpu = {
            "requested": 2 * GIB,
            "allocated": int(2.1 * GIB),
            "reserved": 3 * GIB,
            "fragmented": 200 * MIB,
            "other": 500 * MIB,
            "limit": 16 * GIB,
        }
        lines.append(
            {
                "kind": "reading",
                "time": 1.7e9 + at,
                "step": 100 * at,
                "phase": "train",
                "peak": 4 * GIB,
                "gpu": gpu,
                "pss": sum(part["resident"] for part in named),
                "parts": named,
                "pressure": None,
                "steps_per_second": 100 + 10 * math.sin(at / 30),
            }
        )
    lines += [
        {
            "kind": "verdict",
            "time": 1.7e9 + 900,
            "name": "leak",
            "severity": "warning",
            "text": HOSTILE,
            "evidence": {HOSTILE: HOSTILE, "slope": 512.0},
            "units": {HOSTILE: HOSTILE, "slope": "B a step"},
            "remedy": HOSTILE,
        },
        {"kind": "event", "time": 1.7e9 + 1_000, "text": HOSTILE},
        {"kind": "phase", "name": HOSTILE, "peak": 4 * GIB, "count": 3, "seconds": 9.0},
        {"kind": "something new", "value": 1},
    ]
    return _text(lines)


def results() -> str:
    """Results of a bench with three seeds, a run that does not fit, and a ranking that is refused."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "header",
            "format": "holdall-bench-1",
            "command": ["bench"],
            "env": "demo",
            "algo": "sac",
            "machine": {"cores": 2, "memory_bytes": 24 * GIB},
            "versions": {"holdall": "0.1.0"},
            "limit": 2 * GIB,
        }
    ]
    for share, profile in ((0.25, "memory-efficient"), (0.55, "balanced"), (0.7, "quality")):
        for buffer in ("sb3", "holdall"):
            for seed in range(3):
                peak = int(share * 2 * GIB * (1 if buffer == "sb3" else 0.6))
                lines.append(
                    {
                        "kind": "run",
                        "profile": profile,
                        "buffer": buffer,
                        "seed": seed,
                        "status": "done",
                        "steps": 900,
                        "filled": 1.0,
                        "steps_per_second": 90.0 + seed,
                        "bytes_per_transition": 18_000.0,
                        "seconds": 9.0,
                        "peaks": {"construct": peak // 3, "train": peak},
                        "rewards": [-9.0 + seed, -5.0, -4.0 - seed],
                        "checkpoint": {"seconds": 0.4, "bytes": peak // 2, "extra": MIB},
                        "reason": None,
                    }
                )
    why = "55% of the limit is too little for the process and one batch"
    lines += [
        {"kind": "run", "profile": "aggressive", "buffer": "sb3", "seed": 0, "status": "does not fit", "reason": why},
        {"kind": "ranking", "by": "memory", "order": [["memory-efficient", "holdall"], ["balanced", "holdall"]]},
        {"kind": "ranking", "by": "reward", "order": [], "refused": "the intervals of all neighbours overlap"},
    ]
    return _text(lines)


def buffers() -> str:
    """A comparison of buffers, one of which returned wrong rows."""
    lines: list[dict[str, Any]] = [{"kind": "header", "format": "holdall-bench-buffers-1", "machine": {"cores": 2}}]
    for case in ("atari", "camera"):
        for library, size, exact in (("holdall", 190, True), ("sb3", 56_000, True), ("other", 28_000, False)):
            lines.append(
                {
                    "kind": "buffer",
                    "library": library,
                    "version": "1.0",
                    "case": case,
                    "transitions": 20_000,
                    "bytes": 20_000 * size,
                    "add_us": 12.5,
                    "sample_ms": 2.5,
                    "save_s": 0.5,
                    "load_s": None,
                    "exact": exact,
                    "note": "" if exact else "next observations wrong in 61 rows",
                }
            )
    return _text(lines)
