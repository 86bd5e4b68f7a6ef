"""Evidence in words: sizes with units, rates with theirs, shares in per cent."""

from __future__ import annotations

from holdall.tools.report.recording_page import evidence_in_words


def test_evidence_is_written_with_its_units() -> None:
    leak = [("of", "live objects"), ("unit", "a step"), ("slope", 526.0), ("grown", 14.0 * 2**20), ("phase", None)]
    expected = [("of", "live objects"), ("slope", "526 B a step"), ("grown", "14.0 MiB")]
    assert list(evidence_in_words(leak)) == expected
    filling = [("buffer", "replay"), ("fill", 0.5), ("left", 1000.0), ("final_pss", 2.0**30)]
    assert list(evidence_in_words(filling))[1:] == [("fill", "50%"), ("left", "1,000"), ("final pss", "1.0 GiB")]
    out = [("left", 2.0**30), ("seconds", 90.0), ("sure", True)]
    assert list(evidence_in_words(out)) == [("left", "1.0 GiB"), ("seconds", "1 min 30 s"), ("sure", "yes")]
