"""The two trainings beside each other, and whether what was killed goes on as if nothing had happened.

In:  the results of both, and what was drawn before the kill and after it.  Out: a Comparison, its table, its verdict.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from rich.table import Table

from holdall.demo.fitting import Fit
from holdall.demo.result import Drawn, Result
from holdall.units import format_bytes

TITLES = {"sb3": "Stable-Baselines3", "holdall": "holdall"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same training with either buffer; the second one was killed half-way and resumed."""

    fit: Fit
    sb3: Result
    holdall: Result
    saved: Drawn
    resumed: Drawn
    seconds: float = 0.0
    report: str = ""  # the page

    @property
    def weights_identical(self) -> bool:
        """Whether both trainings ended with the same weights, bit for bit."""
        return self.sb3.weights_sha256 == self.holdall.weights_sha256

    @property
    def batches_identical(self) -> bool:
        """Whether the resumed memory draws the batches that the killed one would have drawn."""
        return self.saved.batches_sha256 == self.resumed.batches_sha256

    @property
    def holds(self) -> bool:
        """Whether all is as promised."""
        return self.weights_identical and self.batches_identical

    def as_json(self) -> str:
        """Write the comparison as one JSON object."""
        found = {"weights_identical": self.weights_identical, "batches_identical": self.batches_identical}
        return json.dumps({**dataclasses.asdict(self), **found})


def table(comparison: Comparison) -> Table:
    """Lay the two trainings out as a table for people."""
    drawn = Table(title=f"SAC on a camera and a vector, {comparison.sb3.transitions:,} transitions held")
    drawn.add_column("replay buffer")
    for heading in ("bytes/transition", "peak memory", "within limit", "steps/s"):
        drawn.add_column(heading, justify="right")
    for result in (comparison.sb3, comparison.holdall):
        drawn.add_row(
            TITLES[result.buffer],
            f"{result.bytes_per_transition:,.0f}",
            format_bytes(result.peak_bytes),
            "yes" if result.peak_bytes < comparison.fit.limit_bytes else "no",
            f"{result.steps_per_second:.1f}",
        )
    return drawn


def verdict(comparison: Comparison) -> str:
    """Say whether the two policies are the same, and what the memory came to."""
    ratio = comparison.sb3.bytes_per_transition / comparison.holdall.bytes_per_transition
    if not comparison.batches_identical:
        return (
            f"BATCHES DIFFER: {comparison.saved.batches_sha256[:12]} before the kill, "
            f"{comparison.resumed.batches_sha256[:12]} after it."
        )
    if comparison.weights_identical:
        return (
            f"Weights identical, bit for bit ({comparison.holdall.weights_sha256[:12]}), though holdall's training was "
            f"killed and resumed; {ratio:.1f} x less memory."
        )
    return (
        f"WEIGHTS DIFFER: {comparison.sb3.weights_sha256[:12]} with Stable-Baselines3's buffer, "
        f"{comparison.holdall.weights_sha256[:12]} with holdall's."
    )
