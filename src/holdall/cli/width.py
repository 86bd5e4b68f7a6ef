"""A console whose tables are not cut off where nobody looks at a terminal: a pipe or a file has no width."""

from __future__ import annotations

from rich.console import Console

_WIDE = 160


def wide_console() -> Console:
    """Return the console for results."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)
