"""Rules about code that measures or prints memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.amounts import both
from holdall.lint.finding import Finding, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import GIB, Case, ScriptRule, Subject

_DECIMAL = re.compile(r"\b[GMT]B\b")
_BINARY = re.compile(r"\b[GMT]iB\b")


class SumOfResident(ScriptRule):
    """Finds resident memory that is added up over processes."""

    id = "P12"
    name = "resident-memory-added-up"
    severity = Severity.WARNING
    why = """
    Pages that processes share (libraries, what was there before a fork) are in the RSS of each of them. The sum counts
    them once for every process.
    """
    fix = "Add up `psutil.Process(...).memory_full_info().pss` (Linux), in which a shared page counts once in all."
    BAD: ClassVar = (
        Case(
            """
            import psutil
            total = sum(p.memory_info().rss for p in psutil.Process().children(recursive=True))
            """
        ),
        Case(
            """
            import psutil
            total = 0
            for p in psutil.Process().children():
                total += p.memory_info().rss
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            import psutil
            total = sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True))
            """
        ),
        Case("import psutil\nused = psutil.Process().memory_info().rss"),
        Case("import psutil\nused = [p.memory_info().rss for p in psutil.Process().children()]"),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield where rss is added in a loop or a sum."""
        script = subject.script
        for node in script.nodes:
            if not isinstance(node, ast.Attribute) or node.attr != "rss":
                continue
            above = list(script.ancestors(node))
            summed = any(isinstance(a, ast.Call) and ast.unparse(a.func) == "sum" for a in above)
            repeated = any(isinstance(a, ast.GeneratorExp | ast.ListComp) for a in above)
            added = any(isinstance(a, ast.AugAssign) for a in above) and script.loop(node) is not None
            if (summed and repeated) or added:
                yield self.finding(
                    "RSS is added up over processes: shared pages are counted several times", script.place(node)
                )


class HostMemoryInContainer(ScriptRule):
    """Finds code that asks for the host's memory while a container allows less."""

    id = "P13"
    name = "host-memory-in-container"
    severity = Severity.WARNING
    why = "`psutil.virtual_memory()` and /proc/meminfo know nothing of control groups; the kernel does."
    fix = "`holdall plan` takes the smallest of all limits; or read `memory.max` of the control group."
    BAD: ClassVar = (
        Case(
            "import psutil\nbuffer_size = psutil.virtual_memory().available // 42_628",
            machine={"limit_bytes": 4 * GIB, "limit_name": "control group /"},
        ),
    )
    GOOD: ClassVar = (Case("import psutil\nbuffer_size = psutil.virtual_memory().available // 42_628"),)

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield where the figure is too large on this machine."""
        for call in subject.script.calls:
            if machine.is_contained and subject.script.dotted(call.func) == "psutil.virtual_memory":
                yield self.finding(
                    f"it says {both(machine.ram_bytes)} in all, but {machine.limit_name} allows "
                    f"{both(machine.limit_bytes)}",
                    subject.script.place(call),
                    ram_bytes=machine.ram_bytes,
                    limit_bytes=machine.limit_bytes,
                )


class WrongUnit(ScriptRule):
    """Finds bytes that are divided by 1024 and called GB, or by 1000 and called GiB."""

    id = "P14"
    name = "wrong-unit-of-bytes"
    severity = Severity.WARNING
    why = """
    A GiB is 7.4 % more than a GB. A buffer worked out in one and compared with memory stated in the other is off by
    that, and Stable-Baselines3's own warning counts GB of 10^9 bytes.
    """
    fix = "`/ 1e9` for GB, `/ 2**30` for GiB."
    BAD: ClassVar = (
        Case('print(f"buffer: {nbytes / 1024**3:.1f} GB")'),
        Case('print(f"buffer: {nbytes / 1e9:.1f} GiB")'),
    )
    GOOD: ClassVar = (
        Case('print(f"buffer: {nbytes / 1e9:.1f} GB")'),
        Case('print(f"buffer: {nbytes / 2**30:.1f} GiB")'),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield where a figure's divisor and its unit do not agree."""
        script = subject.script
        for node in script.nodes:
            if not isinstance(node, ast.JoinedStr):
                continue
            for figure, label in zip(node.values, node.values[1:], strict=False):
                if isinstance(figure, ast.FormattedValue) and isinstance(label, ast.Constant):
                    yield from self._compare(subject, figure, str(label.value).lstrip()[:4])

    def _compare(self, subject: Subject, figure: ast.FormattedValue, label: str) -> Iterator[Finding]:
        base = _base(subject, figure.value)
        if base == 1024 and _DECIMAL.match(label):
            unit, right = _DECIMAL.findall(label)[0], "iB"
        elif base == 1000 and _BINARY.match(label):
            unit, right = _BINARY.findall(label)[0], "B"
        else:
            return
        yield self.finding(
            f"divided by a power of {base}, this is {unit[0]}{right}, not {unit}", subject.script.place(figure.value)
        )


def _base(subject: Subject, node: ast.expr) -> int | None:
    """Return 1024 or 1000, whose power the whole divisor of an expression is."""
    divisor = 1.0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        value = subject.training.evaluator.value(node.right)
        if not isinstance(value, int | float) or value <= 0:
            return None
        divisor *= value
        node = node.left
    powers = {float(base**power): base for base in (1000, 1024) for power in (2, 3, 4)}
    return powers.get(divisor)
