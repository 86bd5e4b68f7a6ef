"""The nightly run counts every test, and names every test that failed."""

from __future__ import annotations

import runpy
from pathlib import Path

LOG = """\
collected 6 items

tests/a/test_a.py::test_one PASSED                                    [ 16%]
tests/a/test_a.py::test_one[a file-1] FAILED                          [ 33%]
tests/a/test_a.py::test_that_prints[2]  a line of the test
seed 2: 14 draws
FAILED                                                                [ 50%]
tests/a/test_a.py::test_that_prints[3]
PASSED [ 66%]
tests/a/test_a.py::test_two SKIPPED (no server) [ 83%]
tests/a/test_a.py::test_that_is_ended
=========================== short test summary info ===========================
FAILED tests/a/test_a.py::test_one[a file-1] - AssertionError
FAILED tests/a/test_a.py::test_that_prints[2] - AssertionError
"""


def test_outcomes_are_read_also_after_lines_that_a_test_printed() -> None:
    """A suite that is ended has no report, so its log is read."""
    nightly = runpy.run_path(str(Path(__file__).parents[1] / "release" / "nightly.py"), run_name="nightly")
    outcome = nightly["read_log"](nightly["SUITES"][0], LOG, 1.0)
    assert outcome.passed == 2
    assert outcome.failed == (
        "tests/a/test_a.py::test_one[a file-1]",
        "tests/a/test_a.py::test_that_prints[2]  a line of the test",
    )
    assert outcome.skipped == {"no server": 1}
