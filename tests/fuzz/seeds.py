"""Where a fuzz begins: at another seed every day, which is printed, or at the one that HOLDALL_FUZZ_SEED names."""

from __future__ import annotations

import datetime
import os


def rotating_seed() -> int:
    """Return today's seed, and print it: pytest shows it when a test fails."""
    today = datetime.datetime.now(datetime.UTC).date()
    seed = int(os.environ.get("HOLDALL_FUZZ_SEED") or today.toordinal())
    os.write(1, f"HOLDALL_FUZZ_SEED={seed}\n".encode())
    return seed
