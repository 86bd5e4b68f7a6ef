"""Evidence of a verdict in words: every value with its unit."""

from __future__ import annotations

from typing import Any

import pytest

from holdall.tools.report.recording import RecordedEvidence
from holdall.tools.report.recording_page import format_evidence


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14.0 * 2**20, "B", "14.0 MiB"),
        (526.0, "B a step", "526 B a step"),
        (1.04, "objects a step", "1.04 objects a step"),
        (17_989.0, "steps", "17,989 steps"),
        (90.0, "s", "1 min 30 s"),
        (0.5, "share", "50%"),
        (0.0, "time", "01 January 1970, 00:00 UTC"),
        (1_000.0, "", "1,000"),
        (True, "", "yes"),
        ("live objects", "", "live objects"),
    ],
)
def test_a_value_is_written_with_its_unit(value: Any, unit: str, text: str) -> None:
    assert list(format_evidence([RecordedEvidence("final_pss", value, unit)])) == [("final pss", text)]


def test_unknown_evidence_is_left_out() -> None:
    assert list(format_evidence([RecordedEvidence("phase", None, "")])) == []
