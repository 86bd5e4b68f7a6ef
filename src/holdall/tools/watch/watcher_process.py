"""The watcher process: `python -m holdall.tools.watch.watcher_process PID OPTIONS`, started by `holdall.watch.start`.

In:  the id of the process to watch, and options as JSON.  Out: its latest reading in the private folder; if wanted, a
record of JSON lines (docs/watch.md has the format) and a Prometheus page. `holdall watch` uses the same recorder and
server. It ends with the process that it watches.
"""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from holdall.errors import WatchError
from holdall.machine import Limit, memory_limits
from holdall.tools.watch.process_watcher import WatchLoop, WatchPass, publish_latest

RECORD_FORMAT = "holdall-watch-1"
_PART_METRICS = (
    ("resident", "holdall_memory_bytes", "Proportional set size of the process tree, by part."),
    ("allocated", "holdall_allocated_bytes", "Addresses of a part, touched or not."),
)


def record_header(
    pid: int, command: Sequence[str], interval_s: float, limit_bytes: int | None = None
) -> dict[str, Any]:
    """Return the first line of a record."""
    given = {} if limit_bytes is None else {"given": limit_bytes}
    limits = memory_limits(process=pid)
    groups = [limit.total_bytes for limit in limits if limit.name.startswith("control group")]
    machine = next((limit for limit in limits if limit.name.startswith("free memory")), Limit("", 0, 0))
    return {
        "kind": "header", "format": RECORD_FORMAT, "pid": pid, "command": list(command), "host": socket.gethostname(),
        "started": time.time(), "interval": interval_s, "system": platform.system(),
        "limits": {
            "memory": machine.total_bytes, "cgroup": min(groups, default=None), "vram": None, "disk": None, **given,
        },
    }  # fmt: skip


class WatchRecorder:
    """Writes a record, line by line, to a file or an open descriptor: that of stdout by default."""

    def __init__(self, target: Path | int = 1, first: dict[str, Any] | None = None) -> None:
        try:
            self._file = open(target, "w", encoding="utf-8", closefd=isinstance(target, Path))  # noqa: SIM115  see close
        except OSError as error:
            raise WatchError(f"--record ({target}) cannot be written ({error.strerror}); name another file") from error
        if first is not None:
            self.begin(first)

    def begin(self, first: dict[str, Any]) -> None:
        """Write the first line."""
        self._write([first])

    def show(self, latest: WatchPass) -> None:
        """Add a pass."""
        self._write(latest.lines())

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        self._file.flush()


class PrometheusServer:
    """Serves the newest pass to Prometheus."""

    def __init__(self, port: int, bind: str = "127.0.0.1") -> None:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in {"/", "/metrics"}
                body = page.text.encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing: the terminal belongs to the view."""

        self.text = "# no reading yet\n"
        try:
            self._server = ThreadingHTTPServer((bind, port), Handler)
        except (OSError, OverflowError) as error:
            raise WatchError(f"--prometheus ({bind}:{port}) cannot be served ({error}); use another port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="holdall-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served; the system chooses one for 0."""
        return int(self._server.server_address[1])

    def show(self, latest: WatchPass) -> None:
        """Serve a pass."""
        self.text = prometheus_text(latest)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


def prometheus_text(latest: WatchPass) -> str:
    """Write a pass in Prometheus's text format."""
    reading = latest.reading
    lines = []
    for name, metric, meaning in _PART_METRICS:
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} gauge"]
        for part in reading.parts:
            labels = f'group="{part.group}",name="{_escaped_label(part.name)}"'
            lines.append(f"{metric}{{{labels}}} {getattr(part, name)}")
    gauges: dict[str, float | None] = {
        "holdall_pss_bytes": reading.pss,
        "holdall_peak_bytes": reading.peak,
        "holdall_attributed_ratio": reading.attributed,
        "holdall_step": reading.step,
        "holdall_steps_per_second": reading.steps_per_second,
        "holdall_threads": reading.threads,
        "holdall_pressure_percent": reading.pressure,
        "holdall_spilled_bytes": reading.spilled,
        "holdall_page_cache_bytes": reading.page_cache,
        "holdall_headroom_bytes": min(reading.headroom.values()) if reading.headroom else None,
    }
    if reading.gpu is not None:
        gauges |= {f"holdall_gpu_{name}_bytes": count for name, count in asdict(reading.gpu).items()}
    for name, value in gauges.items():
        if value is not None:
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    lines.append("# TYPE holdall_verdict gauge")
    for one in latest.verdicts:
        lines.append(f'holdall_verdict{{name="{_escaped_label(one.name)}",severity="{one.severity}"}} 1')
    return "\n".join(lines) + "\n"


def _escaped_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def main() -> None:
    """Read the command line, and watch until the process ends."""
    pid, wanted = int(sys.argv[1]), json.loads(sys.argv[2])
    loop = WatchLoop(pid, wanted["interval_s"], wanted["limit_bytes"])
    outputs: list[WatchRecorder | PrometheusServer] = []
    if wanted["record"] is not None:
        header = record_header(pid, psutil.Process(pid).cmdline(), wanted["interval_s"], wanted["limit_bytes"])
        outputs.append(WatchRecorder(Path(wanted["record"]), header))
    if wanted["prometheus"] is not None:
        outputs.append(PrometheusServer(wanted["prometheus"]))
    while loop.watcher.is_alive():
        try:
            latest = loop.run_pass()
        except WatchError:
            break
        with contextlib.suppress(OSError):
            publish_latest(pid, latest)
        for output in outputs:
            output.show(latest)
        loop.pause()


if __name__ == "__main__":
    main()
