"""The loss of a machine: nothing acknowledged is lost, and a shard that Ray gave up writes nothing more."""

from __future__ import annotations

import sys

import pytest

from ..nodes import can_be_apart
from .machine_loss import FAULTS, lose_machine


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_acknowledged_transitions_outlive_the_loss_of_a_machine(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    if fault == "cut" and not can_be_apart():
        pytest.skip("pulling a cable needs root and `ip`, for network namespaces")
    found = lose_machine(fault)
    times = f"next batch after {found['first_batch_s']:.1f} s, all shards again after {found['recovered_s']:.1f} s"
    with capsys.disabled():
        sys.stdout.write(f"\n{fault}: {times}; {found['transitions']} transitions checked\n")
