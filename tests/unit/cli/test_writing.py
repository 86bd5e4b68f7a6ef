"""Errors of files that a command cannot write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdall import ArgumentError
from holdall.cli import writing


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOENT, "Name a file in a directory that exists."),
        (errno.ENOSPC, "Free disk space, or name a path on another disk."),
        (errno.EACCES, "Name a path that you may write to."),
        (errno.EISDIR, "Name another path."),
    ],
)
def test_the_error_of_a_file_that_cannot_be_written_has_the_remedy_of_its_cause(number: int, remedy: str) -> None:
    with pytest.raises(ArgumentError) as refusal, writing("out", Path("page.html")):
        raise OSError(number, os.strerror(number))
    assert str(refusal.value) == f"out (page.html) cannot be written: {os.strerror(number)}. {remedy}"
