"""A draw becomes a batch: NumPy arrays, or tensors on a device."""

from __future__ import annotations
