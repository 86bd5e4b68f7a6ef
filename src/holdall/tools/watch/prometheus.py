"""Metrics of the newest reading for Prometheus, served through prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from holdall.errors import MissingPackageError, WatchError
from holdall.tools.watch.watcher import WatchPass

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily
except ImportError as error:
    raise MissingPackageError(
        "Metrics for Prometheus need prometheus_client; run \"pip install 'holdall[prometheus]'\"."
    ) from error


class Exporter:
    """Server of the pass that was last assigned to `latest`."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.latest: WatchPass | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise WatchError(f"{address}:{port} cannot be served ({error}). Use another port.") from error
        self.port = int(self._server.server_port)  # The system chooses one for 0.

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. Called by prometheus_client."""
        if self.latest is None:
            return
        reading = self.latest.reading
        resident = GaugeMetricFamily("holdall_memory_bytes", "Share of PSS, by part.", labels=("group", "name"))
        allocated = GaugeMetricFamily("holdall_allocated_bytes", "Addresses, by part.", labels=("group", "name"))
        for part in reading.parts:
            resident.add_metric((part.group, part.name), part.resident)
            allocated.add_metric((part.group, part.name), part.allocated)
        yield resident
        yield allocated
        gauges: dict[str, float | None] = {
            "holdall_pss_bytes": reading.pss,
            "holdall_peak_bytes": reading.peak,
            "holdall_attributed_ratio": reading.attributed,
            "holdall_step": reading.step,
            "holdall_steps_per_second": reading.steps_per_second,
            "holdall_threads": reading.threads,
            "holdall_pressure_percent": reading.pressure,
            "holdall_spilled_bytes": reading.spilled,
            "holdall_headroom_bytes": min(reading.headroom.values()) if reading.headroom else None,
        }
        if reading.gpu is not None:
            gauges |= {f"holdall_gpu_{name}_bytes": value for name, value in asdict(reading.gpu).items()}
        for name, value in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, name.replace("_", " "), value=value)
        verdicts = GaugeMetricFamily("holdall_verdict", "Verdicts that hold now.", labels=("name", "severity"))
        for verdict in self.latest.verdicts:
            verdicts.add_metric((verdict.name, verdict.severity), 1)
        yield verdicts

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
