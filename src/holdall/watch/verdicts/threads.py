"""Too many threads: they cost time, not memory."""

from __future__ import annotations

from holdall.units import format_bytes
from holdall.watch.history import History
from holdall.watch.verdicts.verdict import Verdict

_TIMES_CORES = 4
_FEWEST = 16


def too_many_threads(history: History) -> list[Verdict]:
    """Say that there are far more threads than cores, and what their stacks really take."""
    newest = history.newest
    if newest.threads < max(_FEWEST, _TIMES_CORES * newest.cores):
        return []
    stacks = [part for part in newest.parts if part.group == "stacks"]
    resident, virtual = sum(part.resident for part in stacks), sum(part.allocated for part in stacks)
    return [
        Verdict(
            name="threads",
            severity="warning",
            text=(
                f"{newest.threads} threads for {newest.cores} cores; they wait for each other. Their stacks take "
                f"{format_bytes(resident)}, not the {format_bytes(virtual)} of addresses"
            ),
            remedy="holdall.threads.limit(workers=...), or OMP_NUM_THREADS=1 for workers; it saves time, hardly memory",
            evidence={
                "threads": newest.threads, "cores": newest.cores, "torch_threads": newest.torch_threads,
                "stacks_resident": resident, "stacks_virtual": virtual,
            },
        )
    ]  # fmt: skip
