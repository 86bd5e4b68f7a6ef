"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

settings.py, run.py and ranking.py measure whole trainings; training.py is one of them. search.py looks for the best
settings. compare_buffers.py compares replay buffers alone; trace.py is the experience that they are given. All names
are imported when they are asked for: a measured process must load nothing that it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdall.tools.bench.buffer_libraries import setups_named
    from holdall.tools.bench.child_process import emit, folder_bytes, messages, module_command
    from holdall.tools.bench.compare_buffers import (
        CASES,
        BufferCase,
        case_named,
        case_table,
        cases_of,
        markdown,
        measure_buffers,
        remarks,
    )
    from holdall.tools.bench.ranking import bench_tables, rankings
    from holdall.tools.bench.run import (
        ResultWriter,
        expected_seconds,
        header,
        planned_runs,
        read_results,
        run_bench,
        runs_of,
    )
    from holdall.tools.bench.search import Search, SearchTrial
    from holdall.tools.bench.settings import BenchSettings, Calibration, calibrate, settings_of
    from holdall.tools.bench.trace import Trace
    from holdall.tools.bench.training import CameraExtractor, MeasureCallback, late_slope

__all__ = [
    "CASES", "BenchSettings", "BufferCase", "Calibration", "CameraExtractor", "MeasureCallback", "ResultWriter",
    "Search", "SearchTrial", "Trace", "bench_tables", "calibrate", "case_named", "case_table", "cases_of", "emit",
    "expected_seconds", "folder_bytes", "header", "late_slope", "markdown", "measure_buffers", "messages",
    "module_command", "planned_runs", "rankings", "read_results", "remarks", "run_bench", "runs_of", "settings_of",
    "setups_named",
]  # fmt: skip

_LAZY = {
    "buffer_libraries": "setups_named",
    "child_process": "emit folder_bytes messages module_command",
    "compare_buffers": "BufferCase CASES case_named case_table cases_of measure_buffers markdown remarks",
    "ranking": "bench_tables rankings",
    "run": "ResultWriter expected_seconds header planned_runs read_results run_bench runs_of",
    "search": "Search SearchTrial",
    "settings": "BenchSettings Calibration calibrate settings_of",
    "trace": "Trace",
    "training": "CameraExtractor MeasureCallback late_slope",
}


def __getattr__(name: str) -> Any:
    """Import a name's module when it is asked for."""
    for module, names in _LAZY.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
