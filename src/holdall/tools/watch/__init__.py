"""Watch: where the memory of a training process is, how it grows, and why.

`start()` watches this process from inside; `holdall watch` watches any process from outside. Slow work happens in
another process. The watched process only publishes names and counters. NumPy is not imported here. What serves and
records is imported when it is asked for, so that a training does not load an HTTP server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdall.tools.watch.agent_files import trim_process, trim_self
from holdall.tools.watch.guard import OnPressure
from holdall.tools.watch.one_pass import AlertThrottle, WatchLoop, WatchPass
from holdall.tools.watch.process_watcher import ProcessWatcher
from holdall.tools.watch.reading import GROUPS, AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.session import LaunchedCommand, Watch, start, track
from holdall.tools.watch.verdicts import Severity, WatchVerdict, filling_verdicts, format_time_span

if TYPE_CHECKING:
    from holdall.tools.watch.watcher_process import RECORD_FORMAT, PrometheusServer, WatchRecorder, record_header

__all__ = [
    "GROUPS", "RECORD_FORMAT", "AlertThrottle", "AttributedPart", "LaunchedCommand", "MemoryReading", "OnPressure",
    "ProcessWatcher", "PrometheusServer", "ReadingHistory", "Severity", "Watch", "WatchLoop", "WatchPass",
    "WatchRecorder", "WatchVerdict", "filling_verdicts", "format_time_span", "record_header", "start", "track",
    "trim_process", "trim_self",
]  # fmt: skip

_LAZY = {
    "watcher_process": "PrometheusServer RECORD_FORMAT WatchRecorder record_header",
}


def __getattr__(name: str) -> Any:
    """Import a name's module when it is asked for."""
    for module, names in _LAZY.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
