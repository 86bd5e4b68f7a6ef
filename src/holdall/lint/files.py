"""Which files a path means, and what they say.

In:  files and directories.  Out: the scripts and YAML files in them, in a fixed order, with their text.
"""

from __future__ import annotations

import codecs
import io
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from holdall.errors import ArgumentError
from holdall.lint.engine import YAML_SUFFIXES

_SUFFIXES = (".py", *YAML_SUFFIXES)
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})


def find_files(paths: Iterable[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """Return the files that paths mean, each once."""
    patterns = tuple(exclude)
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(_walk(path, patterns)))
        elif path.is_file() and path.suffix in _SUFFIXES:
            found[path] = None
        elif path.exists():
            raise ArgumentError(
                f"path ({path}) is no script and no YAML file; holdall lint reads {', '.join(_SUFFIXES)}"
            )
        else:
            raise ArgumentError(f"path ({path}) does not exist")
    return list(found)


def _walk(directory: Path, exclude: tuple[str, ...]) -> Iterator[Path]:
    for entry in directory.iterdir():
        is_excluded = any(fnmatch(entry.name, pattern) or fnmatch(str(entry), pattern) for pattern in exclude)
        if entry.name.startswith(".") or is_excluded:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _SKIPPED and not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry, exclude)
        elif entry.suffix in _SUFFIXES and entry.is_file():
            yield entry


def read_text(path: Path) -> str:
    """Return a file's text, in the encoding that it declares and with the line ends that it has."""
    try:
        data = path.read_bytes()
        return data.decode(_encoding(path, data))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path ({path}) cannot be read: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file's text back, in the encoding that it declared."""
    try:
        path.write_bytes(text.encode(_encoding(path, path.read_bytes())))
    except OSError as error:
        raise ArgumentError(f"path ({path}) cannot be written: {error}") from error


def _encoding(path: Path, data: bytes) -> str:
    if path.suffix in YAML_SUFFIXES:
        return "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
