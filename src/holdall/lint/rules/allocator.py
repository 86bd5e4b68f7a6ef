"""Rules about caches, garbage and environment variables of the allocators."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.finding import Finding, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, ScriptRule, Subject
from holdall.lint.source.script import Script

# Methods that a training calls once a step or once an update.
_REPEATED = ("update", "step", "_on_step", "_on_rollout", "train_step", "training_step", "optimize", "optimise")
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
_POOLS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_READ_AT_IMPORT = {"torch", "numpy", "stable_baselines3", "scipy"}
_STARTS_PROCESSES = {"multiprocessing", "subprocess", "concurrent", "joblib", "ray", "SubprocVecEnv", "AsyncVectorEnv"}
_HARMLESS = {"torch.cuda.is_available", "torch.cuda.device_count"}


def _is_repeated(script: Script, node: ast.AST) -> str | None:
    """Say what repeats a node: a loop, a method of every step, or a loop that calls its function; None if nothing."""
    if script.loop(node) is not None:
        return "in a loop"
    owner = script.function(node)
    if owner is None:
        return None
    if owner.name.startswith(_REPEATED):
        return f"in {owner.name}, which runs at every update"
    for call in script.calls:
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name == owner.name and script.loop(call) is not None:
            return f"in {owner.name}, which a loop calls"
    return None


class EmptyCacheInLoop(ScriptRule):
    """Finds `torch.cuda.empty_cache()` in loops and in what they call."""

    id = "P02"
    name = "empty-cache-in-loop"
    severity = Severity.WARNING
    why = """
    It hands the allocator's free blocks back to the driver, and the next step asks for them again: slower, and with no
    more memory for this process. It waits for the GPU. It never lowers the memory of the host.
    """
    fix = "Delete it. If the GPU is short of memory, lower the batch."
    BAD: ClassVar = (
        Case("import torch\nfor step in range(1000):\n    train()\n    torch.cuda.empty_cache()"),
        Case("import torch\ndef tidy():\n    torch.cuda.empty_cache()\nfor step in range(1000):\n    tidy()"),
        Case(
            "import torch\nclass Buffer(list):\n    def update_buffer(self, items):\n        torch.cuda.empty_cache()"
        ),
    )
    GOOD: ClassVar = (
        Case("import torch\nfor step in range(1000):\n    train()\ntorch.cuda.empty_cache()"),
        Case("import torch\ndef tidy():\n    torch.cuda.empty_cache()\nfor step in range(1000):\n    train()\ntidy()"),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call."""
        yield from _repeated_calls(self, subject, "torch.cuda.empty_cache", "torch.cuda.empty_cache()")


class CollectInLoop(ScriptRule):
    """Finds `gc.collect()` in loops and in what they call."""

    id = "P06"
    name = "collect-in-loop"
    severity = Severity.INFO
    why = """
    Tensors and arrays are freed with their last reference, without the collector; it only finds reference cycles, and
    goes through every object of the process to do so.
    """
    fix = "Delete it; where memory grows, look for what still refers to it."
    BAD: ClassVar = (Case("import gc\nfor step in range(1000):\n    train()\n    gc.collect()"),)
    GOOD: ClassVar = (Case("import gc\nfor step in range(1000):\n    train()\ngc.collect()"),)

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call."""
        yield from _repeated_calls(self, subject, "gc.collect", "gc.collect()")


class SynchronizeInLoop(ScriptRule):
    """Finds `torch.cuda.synchronize()` in loops and in what they call."""

    id = "P09"
    name = "synchronize-in-loop"
    severity = Severity.INFO
    why = "The host waits until the GPU has done all its work, and the GPU then waits for the host. It frees nothing."
    fix = "Delete it, except around a measurement of time."
    BAD: ClassVar = (Case("import torch\nfor step in range(1000):\n    train()\n    torch.cuda.synchronize()"),)
    GOOD: ClassVar = (
        Case("import torch\nfor step in range(1000):\n    train()\ntorch.cuda.synchronize()"),
        Case(
            """
            import time
            import torch
            for step in range(1000):
                began = time.perf_counter()
                train()
                torch.cuda.synchronize()
                took = time.perf_counter() - began
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call in a file that measures no time."""
        timers = {"time.perf_counter", "time.time", "time.monotonic", "torch.cuda.Event"}
        if not any(subject.script.dotted(call.func) in timers for call in subject.script.calls):
            yield from _repeated_calls(self, subject, "torch.cuda.synchronize", "torch.cuda.synchronize()")


def _repeated_calls(rule: ScriptRule, subject: Subject, dotted: str, words: str) -> Iterator[Finding]:
    for call in subject.script.calls:
        if subject.script.dotted(call.func) == dotted:
            where = _is_repeated(subject.script, call)
            if where:
                yield rule.finding(f"{words} {where}", subject.script.place(call))


def _variables(script: Script) -> Iterator[tuple[ast.AST, str]]:
    """Yield where a file sets an environment variable of its own process, and which."""
    for node in script.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base, slice=ast.Constant(value=str() as name))]):
                if script.dotted(base) == "os.environ":
                    yield node, name
            case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]):
                if script.dotted(function) in {"os.environ.setdefault", "os.putenv"}:
                    yield node, name


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


class AllocatorSetLate(ScriptRule):
    """Finds the settings of torch's GPU allocator behind the first use of the GPU."""

    id = "P03"
    name = "allocator-set-too-late"
    severity = Severity.WARNING
    why = (
        "The allocator reads them once, when it starts. They are about the GPU's memory and change nothing on the host."
    )
    fix = "Set it in the shell, or before torch is imported."
    BAD: ClassVar = (
        Case(
            """
            import os
            import torch
            torch.cuda.empty_cache()
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            import os
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"
            import torch
            torch.cuda.empty_cache()
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield if the GPU was used before, in the same block of code."""
        script = subject.script
        for node, name in _variables(script):
            used = [
                call
                for call in script.calls
                if script.dotted(call.func).startswith("torch.cuda.")
                and script.dotted(call.func) not in _HARMLESS
                and script.scope(call) is script.scope(node)
                and _line(call) < _line(node)
            ]
            if name in _ALLOCATOR and used:
                yield self.finding(
                    f"{name} is set after the GPU was used in line {_line(used[0])}",
                    script.place(node),
                    used_line=_line(used[0]),
                )


class ThreadsSetLate(ScriptRule):
    """Finds the number of OpenMP threads set behind the import that reads it."""

    id = "P11"
    name = "threads-set-too-late"
    severity = Severity.WARNING
    why = "OpenMP and the BLAS libraries read these variables once, when they are loaded."
    fix = "Set it in the shell, or before the first import; `torch.set_num_threads(n)` works at any time."
    BAD: ClassVar = (
        Case('import os\nimport torch\nos.environ["OMP_NUM_THREADS"] = "1"'),
        Case('import os\nfrom torch import nn\nos.environ.setdefault("MKL_NUM_THREADS", "1")'),
    )
    GOOD: ClassVar = (
        Case('import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch'),
        Case('import os\nimport json\nos.environ["OMP_NUM_THREADS"] = "1"'),
        Case('import os\nimport torch\nimport torch.multiprocessing as mp\nos.environ["OMP_NUM_THREADS"] = "1"'),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield if a library was imported before, and no process is started that would read it anew."""
        script = subject.script
        if any(part in _STARTS_PROCESSES for full in _imported(script) for part in full.split(".")):
            return
        imported = [node for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node, name in _variables(script):
            before = [statement for statement in imported if _line(statement) < _line(node) and _reads(statement)]
            if name in _POOLS and before:
                yield self.finding(
                    f"{name} is set after the import in line {_line(before[0])} has read it",
                    script.place(node),
                    import_line=_line(before[0]),
                )


def _imported(script: Script) -> Iterator[str]:
    """Yield the full names of all that is imported."""
    for node in script.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reads(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.ImportFrom):
        names = [statement.module or ""]
    else:
        names = [alias.name for alias in statement.names]
    return any(name.partition(".")[0] in _READ_AT_IMPORT for name in names)
