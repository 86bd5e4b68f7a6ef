"""The format of a recorded run, which `holdall watch` writes and `holdall report` reads. docs/watch.md describes it."""

from __future__ import annotations

RECORDING_FORMAT = "holdall-watch-1"
"""`format` in the header of a recording."""

# Units of the evidence of a verdict. Evidence without a unit is a count, a step, or text. Any other unit, such as
# "objects", is a word that follows the number.
BYTES = "B"
SECONDS = "s"
STEPS = "steps"
SHARE = "share"
"""A fraction from 0 to 1."""
TIME = "time"
"""Seconds since 1970."""
