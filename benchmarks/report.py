"""How long `holdall report` takes for a long recording, and how large its page is.

    python benchmarks/report.py [--readings 100000]

Writes a made-up recording of `holdall watch` to a temporary file, has the command make its page, and prints the sizes,
the CPU time and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUPS = ("buffers", "torch", "python", "heap_retained", "stacks", "libraries", "workers", "unattributed")
MIB = 2**20


def write_recording(path: Path, readings: int) -> None:
    """Write a run whose buffers fill, with twelve parts a reading."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        header = {"kind": "header", "format": "holdall-watch-1", "command": ["python", "train.py"], "interval": 1.0}
        file.write(json.dumps(header | {"limits": {"memory": 24 * 2**30, "cgroup": None}}) + "\n")
        for at in range(readings):
            parts = [
                {"group": group, "name": f"{group}.{number}", "resident": int(rng.random() * 400 * MIB), "fill": None,
                 "allocated": 400 * MIB}
                for number, group in enumerate([*GROUPS, *GROUPS[:4]])
            ]  # fmt: skip
            reading = {"kind": "reading", "time": float(at), "step": 100 * at, "phase": "train", "parts": parts}
            total = sum(part["resident"] for part in parts)  # type: ignore[misc]  # all of them are whole numbers
            more = {"pss": total, "peak": total, "gpu": None, "steps_per_second": rng.random(), "pressure": None}
            file.write(json.dumps(reading | more) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readings", type=int, default=100_000)
    readings = parser.parse_args().readings
    with tempfile.TemporaryDirectory() as folder:
        file, page = Path(folder) / "run.jsonl", Path(folder) / "run.html"
        write_recording(file, readings)
        began = time.perf_counter()
        command = [sys.executable, "-m", "holdall", "report", str(file), "-o", str(page)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        if status:
            sys.exit("holdall report failed")
        print(
            f"{readings:,} readings, {file.stat().st_size / 1e6:.0f} MB: a page of {page.stat().st_size / 1e3:.0f} kB "
            f"in {wall:.1f} s ({used.ru_utime + used.ru_stime:.1f} s of CPU) and {used.ru_maxrss / 1024:.0f} MiB"
        )


if __name__ == "__main__":
    main()
