"""Lint from Python: `holdall.lint.files(...)`, `.text(...)`, `.model(...)`. The rules are in `holdall.tools.lint`."""

from holdall.tools.lint import files, model, text
from holdall.tools.lint.finding import Edit, Finding, Place, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.settings import LintSettings as Settings

__all__ = ["RULES", "Edit", "Finding", "Machine", "Place", "Settings", "Severity", "files", "model", "text"]
