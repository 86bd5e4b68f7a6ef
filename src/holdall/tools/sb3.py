"""Callbacks of Stable-Baselines3 for holdall's tools.

`WatchCallback` records `memory/...` in Stable-Baselines3's logger and in TensorBoard, and logs verdicts as warnings.
`LintCallback` warns of every finding when `learn` starts, or stops the training before its first step.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from holdall import lint
from holdall.errors import ArgumentError, HoldallError
from holdall.sb3.checkpoint import CheckpointCallback
from holdall.tools.lint.output import format_line
from holdall.tools.part_groups import GROUP_NAMES
from holdall.tools.watch.guard import OnPressure
from holdall.tools.watch.reading import MemoryReading
from holdall.watch import Watch, start

_MIB = 2.0**20
_LOG = logging.getLogger("holdall")


class WatchCallback(BaseCallback):
    """Watches a training: buffers and networks by name, steps, phases and their peaks.

    `model.learn(100_000, callback=WatchCallback())`

    Args:
        interval_s: Seconds between two readings, which a second process takes.
        record: A file for `holdall report`.
        prometheus: A port of the loopback on which the newest reading is served.
        limit: Memory that the training may use, besides the system's own limits: "8GiB" or bytes.
        on_pressure: Action when memory runs short: "warn", "spill" (holdall's buffers) or "checkpoint".
        pressure_at: Share of a limit above which memory is short.
        checkpoint: The callback that saves a checkpoint before the next rollout, for `on_pressure="checkpoint"`.
        verbose: 1 logs verdicts that are warnings or errors.

    Examples:
        >>> from holdall.sb3 import WatchCallback
        >>> callback = WatchCallback(interval_s=5.0, on_pressure="spill")  # model.learn(..., callback=callback)
    """

    def __init__(
        self,
        interval_s: float = 2.0,
        record: str | os.PathLike[str] | None = None,
        prometheus: int | None = None,
        limit: str | int | None = None,
        on_pressure: OnPressure = "warn",
        pressure_at: float = 0.9,
        checkpoint: CheckpointCallback | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose)
        if on_pressure == "checkpoint" and checkpoint is None:
            raise ArgumentError(
                "on_pressure is 'checkpoint', but checkpoint is None. Pass a holdall.sb3.CheckpointCallback."
            )
        self._checkpoint = checkpoint
        self._is_save_requested = False
        self._settings: dict[str, Any] = {
            "on_pressure": on_pressure,
            "pressure_at": pressure_at,
            "checkpoint": self._request_save,
            "interval_s": interval_s,
            "record": record,
            "prometheus": prometheus,
            "limit": limit,
        }
        self.watch: Watch | None = None
        self._logged_time = 0.0  # Time of the newest reading that was logged.
        self._next_log_time = 0.0  # Time, on the monotonic clock, before which no reading is logged.
        self._warned: set[str] = set()  # Names of the verdicts that were logged.
        self._has_phases = False  # Whether the readings of collecting and of training are distinguished.

    def _on_training_start(self) -> None:
        if self.watch is None:
            self.watch = start(**self._settings)
        agent = self.watch.agent
        agent.follow_model(self.model)
        # Off-policy models change phases many times a second, so no reading would belong to one phase.
        self._has_phases = hasattr(self.model, "rollout_buffer")
        self._publish_if_due = agent.publish_if_due
        agent.publish()

    def _request_save(self) -> None:
        """Request a checkpoint, which is saved before the next rollout."""
        self._is_save_requested = True

    def _on_rollout_start(self) -> None:
        if self._is_save_requested and self._checkpoint is not None:
            self._is_save_requested = False
            self._checkpoint.init_callback(self.model)
            self._checkpoint.num_timesteps = self.num_timesteps
            self._checkpoint.save()
        if self._has_phases and self.watch is not None:
            self.watch.agent.enter("collect")

    def _on_rollout_end(self) -> None:
        if self.watch is None:
            return
        if self._has_phases:
            self.watch.agent.enter("train")
        self._log(self.watch)

    def _on_step(self) -> bool:
        self._publish_if_due()
        return True

    def _on_training_end(self) -> None:
        if self.watch is not None:
            if self._has_phases:
                self.watch.agent.enter(None)
            self.watch.agent.publish()
            self.watch.stop()
            self.watch = None

    def _log(self, watch: Watch) -> None:
        """Log the newest reading, unless it was logged before. Do nothing more often than once per `interval_s`."""
        now = time.monotonic()
        if now < self._next_log_time:
            return
        self._next_log_time = now + self._settings["interval_s"]
        reading = watch.reading()
        if reading is None or reading.time <= self._logged_time:
            return
        self._logged_time = reading.time
        for name, value in compute_metrics(reading).items():
            self.logger.record(name, value)
        for verdict in watch.verdicts():
            if self.verbose and verdict.severity != "info" and verdict.name not in self._warned:
                self._warned.add(verdict.name)
                _LOG.warning("%s: %s; %s", verdict.name, verdict.text, verdict.remedy)


def compute_metrics(reading: MemoryReading) -> dict[str, float]:
    """Return a reading as numbers by name, in MiB."""
    metrics = {"memory/total_mib": reading.pss / _MIB, "memory/peak_mib": reading.peak / _MIB}
    for group in GROUP_NAMES:
        group_bytes = reading.of(group)
        if group_bytes:
            metrics[f"memory/{group}_mib"] = group_bytes / _MIB
    if reading.gpu is not None:
        for name in ("allocated", "reserved", "fragmented"):
            value = getattr(reading.gpu, name)
            if value is not None:
                metrics[f"memory/gpu_{name}_mib"] = value / _MIB
    if reading.headroom:
        metrics["memory/left_mib"] = min(reading.headroom.values()) / _MIB
    return metrics


class LintWarning(UserWarning):
    """A finding of `holdall.lint` in a model."""


class LintError(HoldallError, RuntimeError):
    """Training was not started, because of a finding of `holdall.lint`."""


class LintCallback(BaseCallback):
    """Looks for mistakes in the configuration when `learn` begins.

    Args:
        settings: Rules and limits. `fail_on="error"`, the default, stops training before its first step if an error is
            found. `"never"` only warns.
        verbose: 1 warns of errors and warnings, 2 of infos too.

    Examples:
        >>> from holdall.sb3 import LintCallback
        >>> callback = LintCallback()  # model.learn(..., callback=callback)
    """

    def __init__(self, settings: lint.Settings | None = None, verbose: int = 1) -> None:
        super().__init__(verbose)
        self.settings = settings or lint.Settings()
        self.findings: list[lint.Finding] = []

    def _on_training_start(self) -> None:
        steps: Any = self.locals.get("total_timesteps")
        self.findings = lint.model(self.model, steps, [self.locals.get("callback", self)], self.settings)
        fails_from = self.settings.fails_from
        fatal = [one for one in self.findings if fails_from is not None and one.severity >= fails_from]
        if fatal:
            raise LintError("; ".join(map(format_line, fatal)))
        min_severity = lint.Severity.INFO if self.verbose > 1 else lint.Severity.WARNING
        for finding in self.findings:
            if finding.severity >= min_severity:
                warnings.warn(format_line(finding), LintWarning, stacklevel=2)

    def _on_step(self) -> bool:
        return True
