"""Retained heap: memory that nobody uses and the C library keeps."""

from __future__ import annotations

from holdall.units import format_bytes
from holdall.watch.history import History
from holdall.watch.verdicts.verdict import Verdict

_LEAST = 64 * 2**20
_SHARE = 0.05


def retained_heap(history: History) -> list[Verdict]:
    """Say how much a trim would return, if that is worth it."""
    newest = history.newest
    kept = newest.of("heap_retained")
    if kept < max(_LEAST, _SHARE * newest.pss):
        return []
    return [
        Verdict(
            name="retained heap",
            severity="info",
            text=f"{format_bytes(kept)} are free and kept by the C library; a trim would return up to that",
            remedy="'holdall trim PID', or start with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=131072; "
            "torch.cuda.empty_cache() does nothing about it",
            evidence={"retained": kept},
        )
    ]
