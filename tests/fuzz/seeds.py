"""The seed of a fuzz run: another one every day, or the value of HOLDALL_FUZZ_SEED."""

from __future__ import annotations

import datetime
import os


def choose_seed() -> int:
    """Return today's seed. Print it, so that pytest shows it when a test fails."""
    today = datetime.datetime.now(datetime.UTC).date()
    seed = int(os.environ.get("HOLDALL_FUZZ_SEED") or today.toordinal())
    os.write(1, f"HOLDALL_FUZZ_SEED={seed}\n".encode())
    return seed
