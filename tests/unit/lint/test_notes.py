"""Lint finds the mistakes of the notes in examples/notes that are visible in their code."""

from pathlib import Path

import pytest

from holdall.tools.lint.check import check_file
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rules import RULES

MACHINE = Machine(cores=8, ram_bytes=32 * 2**30, limit_bytes=32 * 2**30, limit_name="RAM", python=(3, 11))
NOTES = Path(__file__).parents[3] / "examples" / "notes"


@pytest.mark.parametrize(
    ("note", "codes"),
    [
        ("note_000.py", ["P14"]),
        ("note_001.py", ["P04", "S03", "S05", "S07"]),
        ("note_002.py", ["P08", "P08", "P10", "P05", "P09", "P02", "P06", "P07"]),
        ("note_003.py", ["P03", "P02", "P12", "P14"]),
        ("note_004.py", ["L01"]),
    ],
)
def test_the_mistakes_of_a_note_are_found(note: str, codes: list[str]) -> None:
    assert [finding.rule for finding in check_file(NOTES / note, RULES, MACHINE)] == codes
