"""Measurements in processes of their own: the messages of a child, and the parent that reads them.

A message is a dataclass. A child prints one line of JSON for each message, and the parent reads each line at once. A
child never outlives its reader.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TextIO, TypeVar, get_args, get_type_hints

from holdall.errors import HoldallError

Message = TypeVar("Message")
_channel: dict[str, TextIO] = {}
"""The stream of messages to the parent, as `lines`. Empty until the first message."""


class ChildError(HoldallError, RuntimeError):
    """A measurement in a process of its own failed."""


@dataclass(frozen=True, slots=True)
class ChildProgress:
    """How much of its work a child has done. Every child may send this message."""

    done: int
    total: int
    phase: str = ""
    """Part of the work, if the work has several parts."""
    resident_bytes: int | None = None
    """Resident set of the child; None if it was not measured."""

    @property
    def share(self) -> float:
        """Share of the work that is done, from 0 to 1."""
        return min(self.done / max(self.total, 1), 1.0)


def emit(message: Any) -> None:
    """Write one line and flush it, because the parent's progress bar waits for it.

    Libraries print greetings on stdout. After the first line, all other output goes to stderr.
    """
    if not _channel:
        sys.stdout.flush()
        _channel["lines"] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    line = json.dumps({"kind": type(message).__name__, "values": asdict(message)})
    print(line, file=_channel["lines"], flush=True)


def run_child(command: list[str], *kinds: type[Message]) -> Generator[ChildProgress | Message, None, None]:
    """Yield the messages of `command`: `ChildProgress`, and objects of `kinds`.

    Raise ChildError with the child's last error line if it fails.
    """
    known: list[type[Any]] = [ChildProgress, *kinds]
    kind_by_name = {kind.__name__: kind for kind in known}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8") as child,
    ):
        try:
            for line in child.stdout or ():
                message = json.loads(line)
                yield _build(kind_by_name[message["kind"]], message["values"])
        except BaseException:  # After Ctrl-C, or if the reader stops, the child must not outlive its parent.
            child.kill()
            raise
        if child.wait() != 0:
            errors.seek(0)
            last_line = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            end = f"ended with exit code {child.returncode}"
            if child.returncode < 0:
                end = f"was killed by signal {-child.returncode}"
            raise ChildError(f"The process {end} ({last_line}). Run `{shlex.join(command)}` alone.")


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the dataclass, with the dataclasses in it, from which `asdict` made `values`."""
    built: dict[str, Any] = dict(values)
    for name, hint in get_type_hints(kind).items():
        inner = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if inner is not None and built[name] is not None:
            built[name] = _build(inner, built[name])  # type: ignore[arg-type]  # `inner` is a class.
    return kind(**built)


def read_result(
    messages: Iterable[ChildProgress | Message], on_progress: Callable[[ChildProgress], None] = lambda _progress: None
) -> Message:
    """Pass every `ChildProgress` of a child to `on_progress`. Return the last other message: the result."""
    result: Message | None = None
    for message in messages:
        if isinstance(message, ChildProgress):
            on_progress(message)
        else:
            result = message
    if result is None:
        raise ChildError("The process ended without a result.")
    return result


def make_module_command(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of holdall with this Python.

    Because of -P, modules of the working directory cannot replace other modules.
    """
    return [sys.executable, "-P", "-m", f"holdall.{name}", *map(str, arguments)]
