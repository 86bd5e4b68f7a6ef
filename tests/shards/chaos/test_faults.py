"""Random faults, see faults.py. To run two hundred: `python -m tests.shards.chaos.faults --faults 200`."""

from __future__ import annotations

import sys

import pytest

from .faults import KINDS, inject_faults


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_outlives_random_faults(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    said = inject_faults(50, seed)
    with capsys.disabled():
        sys.stdout.write(f"\nseed {seed}: {said}\n")
    assert sum(said["kinds"].values()) == 50
    assert set(said["kinds"]) <= set(KINDS)
    assert said["transitions"] >= said["acknowledged"] > 0
    assert said["drawn"] > 0
