"""Attachments: a trainer's own files, checked before anything is saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdall.checkpoint.manifest import ATTACHMENT_NAME
from holdall.errors import ArgumentError


def checked_attachments(attach: Mapping[str, Any] | None) -> dict[str, Path | bytes]:
    """Return files by name, as bytes or as paths that are there."""
    if attach is None:
        return {}
    if not isinstance(attach, Mapping):
        raise ArgumentError(f"attach ({attach!r}) must map names to bytes or paths; pass a dict")
    return {_checked_name(name): _checked_content(name, content) for name, content in attach.items()}


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not ATTACHMENT_NAME.fullmatch(name):
        raise ArgumentError(
            f"attach has the name {name!r}; use letters, digits, '_', '-', '.', and '/' between parts that begin with "
            "none of the last two"
        )
    return name


def _checked_content(name: str, content: Any) -> Path | bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, str | os.PathLike):
        path = Path(content)
        if path.is_file():
            return path
        raise ArgumentError(f"attach[{name!r}] ({str(path)!r}) is no file; write it first, or pass its bytes")
    raise ArgumentError(f"attach[{name!r}] is a {type(content).__name__}; pass bytes or the path of a file")
