"""Report: one self-contained HTML page from a file that holdall wrote. No requests, no frameworks, light and dark.

file -> JsonLine -> recording, results -> recording_page, results_page -> page

In:  a path to JSON lines, whose header names the kind of file.  Out: the text of a page, and a summary as plain data.
A file may have any origin, so every value is checked before it is used. A value has the requested type and size, or a
HoldallError names file, line and rule. A missing value and null are None. An unfinished last line is ignored, because
the writer was stopped there. Texts of the file are data of the page and never markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from holdall.errors import ArgumentError
from holdall.tools.recording_format import RECORDING_FORMAT

_MAX_LINE_BYTES = 8 * 2**20
_MAX_TEXT_LENGTH = 2_000
_MAX_ITEMS = 100_000
_MAX_NUMBER = 1e18
_Value = TypeVar("_Value")


class JsonLine:
    """A JSON object of a file. `where` names the object in errors. Every method checks the value that it returns."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @property
    def kind(self) -> str:
        """The kind of the line, or an empty text if the line names none."""
        return self.text("kind") or ""

    @property
    def unchecked(self) -> dict[str, Any]:
        """All values as they were read."""
        return self._values

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self._value(name, int | float, "must be a number")
        if value is None:
            return None
        # In this order, because a large whole number cannot become a float.
        if abs(value) > _MAX_NUMBER or not math.isfinite(value):
            self._refuse(name, value, "must be a finite number, and not above 10^18")
        return float(value)

    def size(self, name: str) -> float | None:
        """Return a number of at least zero: bytes, a count, a time."""
        value = self.number(name)
        if value is not None and value < 0:
            self._refuse(name, value, "must not be negative")
        return value

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers without its nulls. A missing list is empty."""
        known = [item.number("item") for item in self._items(name)]
        return [number for number in known if number is not None]

    def text(self, name: str) -> str | None:
        """Return text, cut off after 2,000 characters."""
        value: str | None = self._value(name, str, "must be text")
        return value if value is None or len(value) <= _MAX_TEXT_LENGTH else value[:_MAX_TEXT_LENGTH] + "…"

    def texts(self, name: str) -> list[str]:
        """Return a list of texts. A missing list is empty."""
        return [item.text("item") or "" for item in self._items(name)]

    def flag(self, name: str) -> bool | None:
        """Return a truth value."""
        flag: bool | None = self._value(name, bool, "must be true, false or null")
        return flag

    def inner(self, name: str) -> JsonLine | None:
        """Return an object inside this object."""
        value = self._value(name, dict, "must be an object")
        return None if value is None else self._inner(value, name)

    def inners(self, name: str) -> list[JsonLine]:
        """Return a list of objects. A missing list is empty."""
        items = self._list(name)
        for item in items:
            if not isinstance(item, dict):
                self._refuse(name, item, "must hold objects only")
        return [self._inner(item, name) for item in items]

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Return a list of lists of two texts. A missing list is empty."""
        return [self._pair(name, item.texts("item")) for item in self._items(name)]

    def pair_pairs(self, name: str) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        """Return a list of lists of two pairs. A missing list is empty."""
        return [self._pair(name, item.pairs("item")) for item in self._items(name)]

    def facts(self, name: str) -> list[tuple[str, Any]]:
        """Return the names and plain values of an object, including those of objects inside it."""
        inner = self.inner(name)
        return [] if inner is None else list(inner._list_facts())

    def sizes(self, name: str) -> dict[str, float | None] | None:
        """Return the values of an object by name, each of them at least zero."""
        inner = self.inner(name)
        return None if inner is None else {key: inner.size(key) for key in inner._values}

    def _list_facts(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield names and plain values. Values of an object inside have the name of that object as their prefix."""
        for key, value in list(self._values.items())[:_MAX_ITEMS]:
            name = f"{prefix}{key}"[:_MAX_TEXT_LENGTH]
            if isinstance(value, dict) and not prefix:
                yield from self._inner(value, key)._list_facts(f"{name} ")
            elif isinstance(value, bool | None):
                yield name, value
            elif isinstance(value, int | float):
                yield name, self.number(key)
            elif isinstance(value, list):
                yield name, ", ".join(str(item)[:_MAX_TEXT_LENGTH] for item in value[:20])
            else:
                yield name, str(value)[:_MAX_TEXT_LENGTH]

    def _list(self, name: str) -> list[Any]:
        rule = f"must be a list of at most {_MAX_ITEMS:,} items"
        values: list[Any] = self._value(name, list, rule) or []
        if len(values) > _MAX_ITEMS:
            self._refuse(name, values, rule)
        return values

    def _items(self, name: str) -> list[JsonLine]:
        """Return the items of a list, each as a line whose only value is `item`."""
        return [self._inner({"item": value}, name) for value in self._list(name)]

    def _pair(self, name: str, values: list[_Value]) -> tuple[_Value, _Value]:
        if len(values) != 2:
            self._refuse(name, values, "must hold lists of two")
        return values[0], values[1]

    def _value(self, name: str, kind: Any, rule: str) -> Any:
        """Return a value of the type `kind`, or None. True and false do not count as numbers."""
        value = self._values.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            self._refuse(name, value, rule)
        return value

    def _inner(self, values: dict[str, Any], name: str) -> JsonLine:
        return JsonLine(values, f"{self._where}, {name!r}")

    def _refuse(self, name: str, value: Any, rule: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:60] + "…"
        raise ArgumentError(
            f"{self._where}: {name!r} ({shown}) {rule}. The file is damaged, or holdall did not write it."
        )


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file one by one, so that the file is never in memory as a whole."""
    try:
        with path.open("rb") as file:
            for count, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                if not raw.endswith(b"\n") and len(raw) < _MAX_LINE_BYTES and not _is_whole(raw):
                    return
                if raw.strip():
                    yield _parse_line(raw, f"file ({path}), line {count}")
    except OSError as error:
        raise ArgumentError(
            f"file ({path}) cannot be read: {error.strerror}. Name a file that holdall watch or bench wrote."
        ) from error


def _is_whole(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def _parse_line(raw: bytes, where: str) -> JsonLine:
    if len(raw) >= _MAX_LINE_BYTES:
        raise ArgumentError(f"{where}: is longer than {_MAX_LINE_BYTES:,} bytes. holdall did not write this file.")
    try:
        values = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ArgumentError(
            f"{where}: is not JSON ({reason}). The file is damaged, or holdall did not write it."
        ) from error
    if not isinstance(values, dict):
        raise ArgumentError(f"{where}: must be a JSON object. holdall did not write this file.")
    return JsonLine(values, where)


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's parser accepts although they are not JSON."""
    raise ValueError(name)


BENCH_FORMAT = "holdall-bench-1"
BUFFERS_FORMAT = "holdall-bench-buffers-1"
_PAGE_MODULES = {RECORDING_FORMAT: "recording_page", BENCH_FORMAT: "results_page", BUFFERS_FORMAT: "results_page"}
"""Modules that read and draw a kind of file. Each is imported with the first file of its kind."""


@dataclass(frozen=True, slots=True)
class Report:
    """A file that was read: its format, and the functions that write its page and its summary."""

    format_name: str
    page: Callable[[], str]
    summary: Callable[[], dict[str, Any]]


def read_report(path: Path) -> Report:
    """Read a file of `holdall watch --record`, `holdall bench` or `holdall bench buffers`."""
    header, lines = read_header(path, tuple(_PAGE_MODULES))
    format_name = header.text("format") or ""
    read, write_page, summarize = import_module(f"{__name__}.{_PAGE_MODULES[format_name]}").KINDS[format_name]
    content = read(header, lines)
    return Report(format_name, lambda: write_page(content), lambda: summarize(content))


def read_header(path: Path, formats: tuple[str, ...]) -> tuple[JsonLine, Iterator[JsonLine]]:
    """Read the header of a file that must have one of `formats`. Return it with the remaining lines."""
    lines = read_lines(path)
    header = next(lines, None)
    format_name = ""
    if header is not None and header.kind == "header":
        format_name = header.text("format") or ""
    if header is None or format_name not in formats:
        start = _describe_start(header, format_name)
        raise ArgumentError(
            f"file ({path}) {start}. Name a file that `holdall watch --record`, `holdall "
            f"bench` or `holdall bench buffers` wrote ({', '.join(formats)})."
        )
    return header, lines


def _describe_start(header: JsonLine | None, format_name: str) -> str:
    if header is None:
        return "is empty"
    return f"begins with format {format_name!r}" if format_name else "does not begin with a header"
