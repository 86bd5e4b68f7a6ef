"""Places of checkpoints: a path of this machine, or a URL of an object store."""

from __future__ import annotations

import os
import re

from holdall.checks import require_path
from holdall.errors import ArgumentError

SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://?(.*)", re.DOTALL)
"""Scheme and rest of a URL. `pathlib.Path` removes one of its two slashes."""


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Return whether a URL names a prefix of an object store."""
    found = _URL.fullmatch(os.fspath(url))
    return found is not None and "://" in os.fspath(url) and found[1].lower() in SCHEMES


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return the canonical form of a path or a URL. Raise ArgumentError for a URL that holdall does not support."""
    text = require_path("url", url)
    found = _URL.fullmatch(text)
    if found is None or (found[1].lower() not in SCHEMES and "://" not in text):
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  # links are not followed
    scheme = found[1].lower()
    if scheme not in SCHEMES:
        raise ArgumentError(
            f"url ({text!r}) has the unsupported scheme {found[1]!r}. Pass a directory, or a URL that starts with "
            "s3://, gs:// or az://."
        )
    bucket_and_prefix = found[2].strip("/")
    if "://" not in text:
        raise ArgumentError(
            f"url ({text!r}) has one slash after {found[1]!r}, as pathlib.Path writes it. Pass a str with two slashes: "
            f"'{scheme}://{bucket_and_prefix}'."
        )
    if not bucket_and_prefix or found[2].startswith("/"):
        container = "container" if scheme == "az" else "bucket"
        raise ArgumentError(f"url ({text!r}) names no {container}. Pass a URL like {scheme}://{container}/run.")
    return f"{scheme}://{bucket_and_prefix}"
