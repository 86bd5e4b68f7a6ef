"""Groups of the parts of a process's memory.

`holdall watch` sorts the memory of a process into these groups. The terminal and the page of a recorded run show them.
A new group is one entry of `PART_GROUPS`, a colour of page.css, and the code that finds its parts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartGroup:
    """A group of parts."""

    name: str
    """Name in recordings and metrics."""
    title: str
    """Words in the terminal and on pages."""
    colour: str
    """Class of page.css."""
    has_rows: bool = False
    """Whether the terminal shows the parts of the group below the group."""


PART_GROUPS = (
    PartGroup("buffers", "buffers", "c0", has_rows=True),
    PartGroup("torch", "torch and heap in use", "c1", has_rows=True),
    PartGroup("python", "Python", "c2"),
    PartGroup("heap_retained", "heap, kept", "c3"),
    PartGroup("stacks", "thread stacks", "c4"),
    PartGroup("libraries", "libraries", "c5"),
    PartGroup("shared", "shared memory", "c6", has_rows=True),
    PartGroup("workers", "workers", "c7", has_rows=True),
    PartGroup("other", "other", "c8", has_rows=True),
    PartGroup("unattributed", "unattributed", "c9", has_rows=True),
)
"""All groups, in the order in which they are shown and recorded."""
GROUP_NAMES = tuple(group.name for group in PART_GROUPS)
GROUP_BY_NAME = {group.name: group for group in PART_GROUPS}
