"""Amounts in words: bytes in both units, counts with separators.

In:  numbers.  Out: text that never leaves open whether a GB has 10^9 or 2^30 bytes.
"""

from __future__ import annotations

_DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_BINARY = {"GB": (2**30, "GiB"), "MB": (2**20, "MiB"), "kB": (2**10, "KiB")}


def both(count: float) -> str:
    """Write bytes in decimal and in binary units: `42.63 GB (39.70 GiB)`."""
    for size, name in _DECIMAL:
        if abs(count) >= size:
            binary, binary_name = _BINARY[name]
            return f"{count / size:,.2f} {name} ({count / binary:,.2f} {binary_name})"
    return f"{count:,.0f} B"


def percent(part: float, of: float) -> str:
    """Write a share: `83 %`."""
    return f"{100 * part / of:.0f} %"
