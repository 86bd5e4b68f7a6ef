"""Rules about allocators and garbage collection, settings that come too late, and memory figures that mislead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.machine import Machine, sized
from holdall.tools.lint.rule import ScriptRule
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

# Methods that a training calls once a step or once an update.
_REPEATED = ("update", "step", "_on_step", "_on_rollout", "train_step", "training_step", "optimize", "optimise")
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
_POOLS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_READ_AT_IMPORT = {"torch", "numpy", "stable_baselines3", "scipy"}
_STARTS_PROCESSES = {"multiprocessing", "subprocess", "concurrent", "joblib", "ray", "SubprocVecEnv", "AsyncVectorEnv"}
_HARMLESS = {"torch.cuda.is_available", "torch.cuda.device_count"}
_DECIMAL_UNIT = re.compile(r"\b[GMT]B\b")
_BINARY_UNIT = re.compile(r"\b[GMT]iB\b")


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
    """Finds `torch.cuda.empty_cache()` in loops and in what they call.

    Why: It hands the allocator's free blocks back to the driver, and the next step asks for them again: slower, and
    with no more memory for this process. It waits for the GPU. It never lowers the memory of the host.
    Fix: Delete it. If the GPU is short of memory, lower the batch.

    Bad:
        import torch
        for step in range(1000):
            train()
            torch.cuda.empty_cache()

    Good:
        import torch
        for step in range(1000):
            train()
        torch.cuda.empty_cache()
    """

    id, name, severity = "P02", "empty-cache-in-loop", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call."""
        yield from _repeated_calls(self, training, "torch.cuda.empty_cache", "torch.cuda.empty_cache()")


class CollectInLoop(ScriptRule):
    """Finds `gc.collect()` in loops and in what they call.

    Why: Tensors and arrays are freed with their last reference, without the collector; it only finds reference cycles,
    and goes through every object of the process to do so.
    Fix: Delete it; where memory grows, look for what still refers to it.

    Bad:
        import gc
        for step in range(1000):
            train()
            gc.collect()

    Good:
        import gc
        for step in range(1000):
            train()
        gc.collect()
    """

    id, name, severity = "P06", "collect-in-loop", Severity.INFO

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call."""
        yield from _repeated_calls(self, training, "gc.collect", "gc.collect()")


class SynchronizeInLoop(ScriptRule):
    """Finds `torch.cuda.synchronize()` in loops and in what they call.

    Why: The host waits until the GPU has done all its work, and the GPU then waits for the host. It frees nothing.
    Fix: Delete it, except around a measurement of time.

    Bad:
        import torch
        for step in range(1000):
            train()
            torch.cuda.synchronize()

    Good:
        import torch
        for step in range(1000):
            train()
        torch.cuda.synchronize()
    """

    id, name, severity = "P09", "synchronize-in-loop", Severity.INFO

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield for every repeated call in a file that measures no time."""
        timers = {"time.perf_counter", "time.time", "time.monotonic", "torch.cuda.Event"}
        if not any(training.script.dotted(call.func) in timers for call in training.script.calls):
            yield from _repeated_calls(self, training, "torch.cuda.synchronize", "torch.cuda.synchronize()")


def _repeated_calls(rule: ScriptRule, training: TrainingReader, dotted: str, words: str) -> Iterator[Finding]:
    for call in training.script.calls:
        if training.script.dotted(call.func) == dotted:
            where = _is_repeated(training.script, call)
            if where:
                yield rule.finding(f"{words} {where}", training.script.place(call))


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
    """Finds the settings of torch's GPU allocator behind the first use of the GPU.

    Why: The allocator reads them once, when it starts. They are about the GPU's memory and change nothing on the host.
    Fix: Set it in the shell, or before torch is imported.

    Bad:
        import os
        import torch
        torch.cuda.empty_cache()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"

    Good:
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"
        import torch
        torch.cuda.empty_cache()
    """

    id, name, severity = "P03", "allocator-set-too-late", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield if the GPU was used before, in the same block of code."""
        script = training.script
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
    """Finds the number of OpenMP threads set behind the import that reads it.

    Why: OpenMP and the BLAS libraries read these variables once, when they are loaded.
    Fix: Set it in the shell, or before the first import; `torch.set_num_threads(n)` works at any time.

    Bad:
        import os
        import torch
        os.environ["OMP_NUM_THREADS"] = "1"

    Good:
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
    """

    id, name, severity = "P11", "threads-set-too-late", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield if a library was imported before, and no process is started that would read it again."""
        script = training.script
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


class SumOfResident(ScriptRule):
    """Finds resident memory that is added up over processes.

    Why: Pages that processes share (libraries, what was there before a fork) are in the RSS of each of them. The sum
    counts them once for every process.
    Fix: Add up `psutil.Process(...).memory_full_info().pss` (Linux), in which a shared page counts once in all.

    Bad:
        import psutil
        total = sum(p.memory_info().rss for p in psutil.Process().children(recursive=True))

    Good:
        import psutil
        total = sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True))
    """

    id, name, severity = "P12", "resident-memory-added-up", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where rss is added in a loop or a sum."""
        script = training.script
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
    """Finds code that asks for the host's memory while a container allows less.

    Why: `psutil.virtual_memory()` and /proc/meminfo know nothing of control groups; the kernel does.
    Fix: `holdall plan` takes the smallest of all limits; or read `memory.max` of the control group.

    Bad (limit_bytes=4GiB, limit_name=control group /):
        import psutil
        buffer_size = psutil.virtual_memory().available // 42_628

    Good:
        import psutil
        buffer_size = psutil.virtual_memory().available // 42_628
    """

    id, name, severity = "P13", "host-memory-in-container", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where the figure is too large on this machine."""
        for call in training.script.calls:
            if machine.is_contained and training.script.dotted(call.func) == "psutil.virtual_memory":
                yield self.finding(
                    f"it says {sized(machine.ram_bytes)} in all, but {machine.limit_name} allows "
                    f"{sized(machine.limit_bytes)}",
                    training.script.place(call),
                    ram_bytes=machine.ram_bytes,
                    limit_bytes=machine.limit_bytes,
                )


class WrongUnit(ScriptRule):
    """Finds bytes that are divided by 1024 and called GB, or by 1000 and called GiB.

    Why: A GiB is 7.4 % more than a GB. A buffer worked out in one and compared with memory stated in the other is off
    by that, and Stable-Baselines3's own warning counts GB of 10^9 bytes.
    Fix: `/ 1e9` for GB, `/ 2**30` for GiB.

    Bad:
        print(f"buffer: {nbytes / 1024**3:.1f} GB")

    Good:
        print(f"buffer: {nbytes / 1e9:.1f} GB")
    """

    id, name, severity = "P14", "wrong-unit-of-bytes", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where a figure's divisor and its unit do not agree."""
        script = training.script
        for node in script.nodes:
            if not isinstance(node, ast.JoinedStr):
                continue
            for figure, label in zip(node.values, node.values[1:], strict=False):
                if isinstance(figure, ast.FormattedValue) and isinstance(label, ast.Constant):
                    yield from self._compare(training, figure, str(label.value).lstrip()[:4])

    def _compare(self, training: TrainingReader, figure: ast.FormattedValue, label: str) -> Iterator[Finding]:
        base = _unit_base(training, figure.value)
        if base == 1024 and _DECIMAL_UNIT.match(label):
            unit, right = _DECIMAL_UNIT.findall(label)[0], "iB"
        elif base == 1000 and _BINARY_UNIT.match(label):
            unit, right = _BINARY_UNIT.findall(label)[0], "B"
        else:
            return
        yield self.finding(
            f"divided by a power of {base}, this is {unit[0]}{right}, not {unit}", training.script.place(figure.value)
        )


def _unit_base(training: TrainingReader, node: ast.expr) -> int | None:
    """Return 1024 or 1000, whose power the whole divisor of an expression is."""
    divisor = 1.0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        value = training.evaluator.value(node.right)
        if not isinstance(value, int | float) or value <= 0:
            return None
        divisor *= value
        node = node.left
    powers = {float(base**power): base for base in (1000, 1024) for power in (2, 3, 4)}
    return powers.get(divisor)
