"""A callback that lints the model it is passed with, as training starts.

In:  the model, the steps and the callbacks of `learn`.  Out: one warning a finding, or an error before the first step.
"""

from __future__ import annotations

import warnings
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from holdall import lint
from holdall.errors import HoldallError
from holdall.lint.finding import Finding, Severity
from holdall.lint.output.plain import as_line


class LintWarning(UserWarning):
    """Something that `holdall.lint` found in a model."""


class LintError(HoldallError, RuntimeError):
    """Training was not started, because of what `holdall.lint` found."""


class LintCallback(BaseCallback):
    """Looks for mistakes in the configuration when `learn` begins.

    Args:
        settings: Which rules, against which limits; `fail_on="error"`, the default, stops training before its first
            step if an error is found, `"never"` only warns.
        verbose: 1 warns of errors and warnings, 2 of infos too.
    """

    def __init__(self, settings: lint.Settings | None = None, verbose: int = 1) -> None:
        super().__init__(verbose)
        self.settings = settings or lint.Settings()
        self.findings: list[Finding] = []

    def _on_training_start(self) -> None:
        steps: Any = self.locals.get("total_timesteps")
        self.findings = lint.model(self.model, steps, [self.locals.get("callback", self)], self.settings)
        fails_from = self.settings.fails_from
        fatal = [one for one in self.findings if fails_from is not None and one.severity >= fails_from]
        if fatal:
            raise LintError("; ".join(map(as_line, fatal)))
        least = Severity.INFO if self.verbose > 1 else Severity.WARNING
        for finding in self.findings:
            if finding.severity >= least:
                warnings.warn(as_line(finding), LintWarning, stacklevel=2)

    def _on_step(self) -> bool:
        return True
