"""The view of `holdall watch`: figures are never cut, and names only in narrow terminals."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from holdall.cli.watch import draw_pass
from holdall.tools.watch.reading import AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.watcher import WatchPass

MIB = 2**20
NAME = "/dev/shm/a-rather-long-name-of-the-frames-that-workers-share"
PARTS = (
    AttributedPart("buffers", "replay.observations", 700 * MIB, 900 * MIB, 0.75),
    AttributedPart("shared", NAME, 1234 * MIB, 1234 * MIB),
)


def view(width: int, parts: tuple[AttributedPart, ...] = PARTS) -> list[str]:
    history = ReadingHistory()
    history.add(MemoryReading(time=0.0, pss=1934 * MIB, peak=1934 * MIB, parts=parts))
    printed = StringIO()
    shown = draw_pass(WatchPass(history.newest, [], []), history, "train.py (7)", width)
    Console(file=printed, width=width, markup=False).print(shown)
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut(width: int) -> None:
    lines = view(width)
    assert max(map(len, lines)) <= width
    (row,) = (line.split() for line in lines if "replay.observations" in line)
    assert [row[1:3], row[-3:]] == [["700.0", "MiB"], ["900.0", "MiB", "75%"]]


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_fewer_figures_and_cuts_no_figure(width: int) -> None:
    """A row has the resident bytes and the fill. A figure that is cut would be wrong."""
    lines = view(width)
    assert max(map(len, lines)) <= width
    (row,) = (line.split() for line in lines if "replay.obs" in line)
    assert row[1:] == ["700.0", "MiB", "75%"]
    (row,) = (line.split() for line in lines if "/dev/shm" in line)
    assert row[1:] == ["1.2", "GiB"]
    assert any("1.9 GiB (peak 1.9 GiB)" in line for line in lines)


def test_a_long_name_is_cut_only_if_the_terminal_is_narrow() -> None:
    assert not any(NAME in line for line in view(80))
    assert any(NAME in line for line in view(120))


def test_brackets_and_escapes_of_a_name_have_no_effect() -> None:
    """A name is neither markup nor a control sequence of the terminal, because any process chooses its names."""
    shown = "\n".join(view(80, (AttributedPart("buffers", "camera[/left]\x1b[2J", 700 * MIB, 900 * MIB, 0.75),)))
    assert "camera[/left]?[2J" in shown
    assert "\x1b" not in shown
