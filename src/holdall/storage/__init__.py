"""One transition's way into memory and out again."""

from __future__ import annotations
