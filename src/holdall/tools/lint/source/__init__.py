"""Where runs are read from: Python scripts, hyperparameter files, live models."""

from __future__ import annotations
