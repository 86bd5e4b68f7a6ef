"""The newest reading as a page for Prometheus, served on the loopback unless asked otherwise.

In:  turns.  Out: plain text in the exposition format 0.0.4, at /metrics.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from holdall.errors import WatchError
from holdall.watch.turn import Turn


class Exposition:
    """A small server."""

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
                """Say nothing: the terminal belongs to the view."""

        self.text = "# no reading yet\n"
        try:
            self._server = ThreadingHTTPServer((bind, port), Handler)
        except (OSError, OverflowError) as error:
            raise WatchError(f"--prometheus ({bind}:{port}) cannot be served ({error}); take another port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="holdall-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served; of use if 0 was asked for."""
        return int(self._server.server_address[1])

    def show(self, turn: Turn) -> None:
        """Serve a turn."""
        self.text = exposed(turn)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


def exposed(turn: Turn) -> str:
    """Write a turn in the exposition format."""
    reading = turn.reading
    lines = [
        "# HELP holdall_memory_bytes Proportional set size of the process tree, by part.",
        "# TYPE holdall_memory_bytes gauge",
    ]
    lines += [
        f'holdall_memory_bytes{{group="{part.group}",name="{_escaped(part.name)}"}} {part.resident}'
        for part in reading.parts
    ]
    lines += [
        "# HELP holdall_allocated_bytes Addresses of a part, touched or not.",
        "# TYPE holdall_allocated_bytes gauge",
    ]
    lines += [
        f'holdall_allocated_bytes{{group="{part.group}",name="{_escaped(part.name)}"}} {part.allocated}'
        for part in reading.parts
    ]
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
        for name in ("requested", "allocated", "reserved", "fragmented", "other", "limit"):
            gauges[f"holdall_gpu_{name}_bytes"] = getattr(reading.gpu, name)
    for name, value in gauges.items():
        if value is not None:
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    lines.append("# TYPE holdall_verdict gauge")
    lines += [f'holdall_verdict{{name="{_escaped(one.name)}",severity="{one.severity}"}} 1' for one in turn.verdicts]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
