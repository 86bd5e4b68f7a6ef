"""Lint from Python: `holdall.lint.files(...)`, `.text(...)`, `.model(...)`; the rules are in `holdall.tools.lint`."""

from holdall.tools.lint import RULES, Edit, Finding, Machine, Severity, files, model, text
from holdall.tools.lint import LintSettings as Settings
from holdall.tools.lint import SourceRange as Place

__all__ = ["RULES", "Edit", "Finding", "Machine", "Place", "Settings", "Severity", "files", "model", "text"]
