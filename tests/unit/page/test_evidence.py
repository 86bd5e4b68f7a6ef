"""Evidence in words: sizes with units, rates with theirs, shares in per cent."""

from __future__ import annotations

from holdall.tools.report.recording_page import format_evidence


def test_evidence_is_written_with_its_units() -> None:
    leak = [("of", "live objects"), ("unit", "B a step"), ("slope", 526.0), ("grown", 14.0 * 2**20), ("phase", None)]
    expected = [("of", "live objects"), ("slope", "526 B a step"), ("grown", "14.0 MiB")]
    assert list(format_evidence(leak)) == expected
    counted = [("unit", "objects a step"), ("slope", 1.04), ("grown", 9_000.0)]
    assert list(format_evidence(counted)) == [("slope", "1.04 objects a step"), ("grown", "9,000 objects")]
    filling = [("buffer", "replay"), ("fill", 0.5), ("left", 1000.0), ("final_pss", 2.0**30)]
    assert list(format_evidence(filling))[1:] == [("fill", "50%"), ("left", "1,000"), ("final pss", "1.0 GiB")]
    steps = [("buffer", "replay"), ("unit", "B a step"), ("slope", 12_359.0), ("left", 17_989.0)]
    assert list(format_evidence(steps))[1:] == [("slope", "12,359 B a step"), ("left", "17,989 steps")]
    timed = [("buffer", "replay"), ("unit", "B a second"), ("left", 90.0)]
    assert list(format_evidence(timed))[1:] == [("left", "1 min 30 s")]
    out = [("left", 2.0**30), ("seconds", 90.0), ("sure", True)]
    assert list(format_evidence(out)) == [("left", "1.0 GiB"), ("seconds", "1 min 30 s"), ("sure", "yes")]
