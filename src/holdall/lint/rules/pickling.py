"""Rules about buffers that are pickled by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.finding import Edit, Finding, Place, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, ScriptRule, Subject
from holdall.lint.source.script import Function, Script
from holdall.lint.values import whole

_PROTOCOL = 5


_DEFAULT_IS_ENOUGH = (3, 14)  # pickle's default protocol is 5 from this version on


# What holds arrays by the gigabyte; a pickled dict of settings does not matter.
_LARGE = re.compile(r"buffer|memory|replay|transition|trajector|experience|rollout|episode|dataset", re.IGNORECASE)


class OldPickleProtocol(ScriptRule):
    """Finds buffers that are pickled with a protocol before 5."""

    id = "S03"
    name = "pickle-copies-arrays"
    severity = Severity.WARNING
    why = """
    Up to protocol 4 (the default before Python 3.14) every array is copied into a bytes object before it is written:
    one array of 100 GB needs 100 GB more. Protocol 5 writes arrays from where they lie.
    """
    fix = "`pickle.dump(buffer, file, protocol=5)`; into a gzip file too, it streams."
    BAD: ClassVar = (
        Case('import pickle\nwith open("buffer.pkl", "wb") as file:\n    pickle.dump(replay_buffer, file)'),
        Case('import pickle\nwith open("buffer.pkl", "wb") as file:\n    pickle.dump(replay_buffer, file, protocol=4)'),
    )
    GOOD: ClassVar = (
        Case('import pickle\nwith open("buffer.pkl", "wb") as file:\n    pickle.dump(replay_buffer, file, protocol=5)'),
        Case('import pickle\nwith open("buffer.pkl", "wb") as file:\n    pickle.dump(replay_buffer, file, -1)'),
        Case('import pickle\nwith open("settings.pkl", "wb") as file:\n    pickle.dump(settings, file)'),
        Case("import pickle\npickle.dump(replay_buffer, file)", machine={"python": (3, 14)}),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every dump that copies."""
        script = subject.script
        for call in _pickles(script, "dump"):
            given = [*call.args[2:3], *(k.value for k in call.keywords if k.arg == "protocol")]
            if any(k.arg is None for k in call.keywords):
                continue
            protocol = subject.training.evaluator.value(given[0]) if given else None
            number = whole(protocol)
            if given and (number is None or number < 0 or number >= _PROTOCOL):
                continue
            if not given and machine.python >= _DEFAULT_IS_ENOUGH:
                continue
            used = "the default protocol (4)" if not given else f"protocol {number}"
            yield self.finding(
                f"{ast.unparse(call.args[0])} is pickled with {used}: each array is copied before it is written",
                script.place(call),
                self._edit(script, call, given),
                protocol=number if number is not None else 4,
            )

    @staticmethod
    def _edit(script: Script, call: ast.Call, given: list[ast.expr]) -> Edit | None:
        if given:
            is_written_out = isinstance(given[0], ast.Constant)
            return Edit(script.place(given[0]), ast.unparse(given[0]), str(_PROTOCOL)) if is_written_out else None
        last = script.place([*call.args, *(k.value for k in call.keywords)][-1])
        end = Place(script.path, last.end_line, last.end_column, last.end_line, last.end_column)
        return Edit(end, "", f", protocol={_PROTOCOL}")


def _pickles(script: Script, function: str) -> Iterator[ast.Call]:
    """Yield the calls that pickle something large."""
    for call in script.calls:
        dotted = script.dotted(call.func)
        is_pickle = dotted in {f"pickle.{function}", f"cloudpickle.{function}"}
        if is_pickle and call.args and _LARGE.search(ast.unparse(call.args[0])):
            yield call


class PickledIntoMemory(ScriptRule):
    """Finds buffers that are pickled into one bytes object."""

    id = "S05"
    name = "pickled-into-memory"
    severity = Severity.WARNING
    why = "`pickle.dumps` holds the whole buffer a second time, and compressing the result holds a third."
    fix = "Stream it: `with gzip.open(path, 'wb') as file: pickle.dump(buffer, file, protocol=5)`."
    BAD: ClassVar = (
        Case(
            """
            import gzip
            import pickle
            data = gzip.compress(pickle.dumps(replay_buffer))
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            import gzip
            import pickle
            with gzip.open("buffer.pkl.gz", "wb") as file:
                pickle.dump(replay_buffer, file, protocol=5)
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every dumps of a buffer."""
        for call in _pickles(subject.script, "dumps"):
            yield self.finding(
                f"pickle.dumps holds {ast.unparse(call.args[0])} once more in memory", subject.script.place(call)
            )


class PickledWhileAdding(ScriptRule):
    """Finds a buffer that a thread pickles while the training adds to it."""

    id = "S07"
    name = "pickled-in-a-thread"
    severity = Severity.WARNING
    why = """
    The file mixes old and new rows, or the dump fails because the container changed size. The thread also needs the
    copy's memory at a moment when nobody watches.
    """
    fix = "Save between updates, or use a memory whose `save` may run beside `add` (`holdall.ReplayMemory.save`)."
    BAD: ClassVar = (
        Case(
            """
            import pickle
            import threading

            def save(replay_buffer):
                with open("buffer.pkl", "wb") as file:
                    pickle.dump(replay_buffer, file, protocol=5)

            threading.Thread(target=save, args=(buffer,)).start()
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            import pickle

            def save(replay_buffer):
                with open("buffer.pkl", "wb") as file:
                    pickle.dump(replay_buffer, file, protocol=5)

            save(buffer)
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every thread whose function pickles a buffer."""
        script = subject.script
        pickling = {
            owner.name
            for kind in ("dump", "dumps")
            for call in _pickles(script, kind)
            if isinstance(owner := script.function(call), Function)
        }
        for call in script.calls:
            name = _run_in_thread(script, call)
            if name in pickling:
                yield self.finding(
                    f"{name} pickles a buffer in a thread, while others may add to it", script.place(call)
                )


def _run_in_thread(script: Script, call: ast.Call) -> str:
    """Return the name of the function that a call hands to a thread."""
    target: ast.expr | None = None
    if script.dotted(call.func) == "threading.Thread":
        target = next((k.value for k in call.keywords if k.arg == "target"), None)
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "submit" and call.args:
        target = call.args[0]
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
