"""Lint from Python: `holdall.lint.files(...)`, `.text(...)`, `.model(...)`; the rules are in `holdall.tools.lint`."""

from holdall.tools.lint import files, model, text
from holdall.tools.lint.engine import LintSettings as Settings
from holdall.tools.lint.finding import Edit, Finding, Severity
from holdall.tools.lint.finding import SourceRange as Place
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.run import Machine

__all__ = ["RULES", "Edit", "Finding", "Machine", "Place", "Settings", "Severity", "files", "model", "text"]
