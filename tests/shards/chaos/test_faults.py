"""Random faults, see faults.py. To run two hundred: `python -m tests.shards.chaos.faults --faults 200`."""

from __future__ import annotations

import sys

import pytest

from .faults import KINDS, inject_faults


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(4))
def test_acknowledged_transitions_outlive_random_faults(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts = inject_faults(50, seed)
    with capsys.disabled():
        sys.stdout.write(f"\nseed {seed}: {counts}\n")
    assert sum(counts["kinds"].values()) == 50
    assert set(counts["kinds"]) <= set(KINDS)
    assert counts["transitions"] >= counts["acknowledged"] > 0
    assert counts["drawn"] > 0
