"""Bytes in words.

In: a number of bytes.  Out: text for people, always in binary units and named as such.
"""


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit: `16.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
