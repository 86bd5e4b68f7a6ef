"""What a mapping is for, as far as its name, its rights and its neighbours tell.

In:  the mappings of a process, in order.  Out: for each, a group and a name, or nothing for memory without a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from holdall.machine import Mapping

ARENA_BYTES = 64 * 2**20
"""The C library's arenas for threads begin at multiples of this, and end in a range that is not used yet."""

_PACKAGE = re.compile(r"/(?:site|dist)-packages/([A-Za-z0-9_-]+)")
_SHARED = re.compile(r"^(?:/dev/shm/|/memfd:|/SYSV|/dev/zero|/run/shm/)")
_DEVICE = re.compile(r"^/dev/(?:nvidia|kfd|dri)")


def is_nameless(mapping: Mapping) -> bool:
    """Whether a mapping is plain memory: no file, and no purpose that the kernel knows of."""
    return not mapping.name or mapping.name.startswith("[anon:")


def named_mappings(found: list[Mapping]) -> Iterator[tuple[Mapping, str, str]]:
    """Yield every mapping that says what it is, with its group and a name."""
    code = {one.name for one in found if "x" in one.permissions and not is_nameless(one)}
    for one in found:
        if not is_nameless(one):
            group, name = _purpose(one, code)
            if group:
                yield one, group, name
        elif "s" in one.permissions:
            yield one, "shared", "shared between processes"


def heap_ranges(found: list[Mapping]) -> list[tuple[int, int]]:
    """Return the ranges of the C library's heap: the first one, and the arenas that threads were given."""
    ranges = [(one.start, one.end) for one in found if one.name == "[heap]"]
    for here, above in zip(found, [*found[1:], None], strict=True):
        if not is_nameless(here) or not here.permissions.startswith("rw-p"):
            continue
        if above is not None and above.start == here.end and above.permissions.startswith("---"):
            # Neighbours below may have been joined to the arena: it begins a whole arena below its end.
            start = above.end - ARENA_BYTES
            if above.end % ARENA_BYTES == 0 and here.start <= start < here.end:
                ranges.append((start, here.end))
        elif here.nbytes == ARENA_BYTES and here.start % ARENA_BYTES == 0:
            ranges.append((here.start, here.end))
    return ranges


def _purpose(mapping: Mapping, code: set[str]) -> tuple[str, str]:
    name = mapping.name
    if name == "[heap]":
        return "", ""
    if name == "[stack]":
        return "stacks", "main thread"
    if name.startswith("["):
        return "other", "kernel"
    if _DEVICE.match(name):
        return "other", "GPU driver"
    if _SHARED.match(name) or ("s" in mapping.permissions and mapping.permissions.startswith("rw")):
        return "shared", name.removesuffix(" (deleted)")
    file = PurePosixPath(name).name
    if name in code or ".so" in file:
        package = _PACKAGE.search(name)
        if package:
            return "libraries", package[1].removesuffix("_libs")
        return "libraries", "Python" if "python" in name else "system"
    return "other", f"file {file}"
