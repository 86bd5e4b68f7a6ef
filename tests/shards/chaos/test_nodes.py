"""A machine is lost, frozen or cut off: nothing acknowledged is lost, and what comes back writes nothing."""

from __future__ import annotations

import sys

import pytest

from ..nodes import can_be_apart
from .telling import STORIES, told


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("story", STORIES)
def test_a_machine_may_go_at_any_time(story: str, capsys: pytest.CaptureFixture[str]) -> None:
    if story == "cut" and not can_be_apart():
        pytest.skip("pulling a cable needs root and `ip`, for network namespaces")
    found = told(story)
    times = f"next batch after {found['first_batch_s']:.1f} s, all shards again after {found['recovered_s']:.1f} s"
    with capsys.disabled():
        sys.stdout.write(f"\n{story}: {times}; {found['transitions']} transitions settled\n")
