"""Rules about environment variables that are set too late, and about wrong figures of memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Source

_ALLOCATOR_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
_THREAD_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_READERS_AT_IMPORT = {"torch", "numpy", "stable_baselines3", "scipy"}
_PROCESS_STARTERS = {"multiprocessing", "subprocess", "concurrent", "joblib", "ray", "SubprocVecEnv", "AsyncVectorEnv"}
_CALLS_WITHOUT_ALLOCATOR = {"torch.cuda.is_available", "torch.cuda.device_count"}
_DECIMAL_LABEL = re.compile(r"\s*([GMT])B\b")
_BINARY_LABEL = re.compile(r"\s*([GMT])iB\b")
_UNIT_BASES = {float(base**power): base for base in (1000, 1024) for power in (2, 3, 4)}
"""1000 or 1024, by the bytes of an MB, GB, TB, MiB, GiB or TiB."""


def _find_set_variables(source: Source) -> Iterator[tuple[ast.Assign | ast.Call, str]]:
    """Yield the places where a file sets an environment variable of its own process, with the variable's name."""
    for node in source.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base, slice=ast.Constant(value=str() as name))]):
                if source.get_full_name(base) == "os.environ":
                    yield node, name
            case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]):
                if source.get_full_name(function) in {"os.environ.setdefault", "os.putenv"}:
                    yield node, name


class AllocatorSetTooLate(Rule):
    """Finds settings of torch's GPU allocator after the first use of the GPU.

    Why: The allocator reads its settings once, when it starts. They concern the GPU's memory, not the host's.
    Fix: Set the variable in the shell, or before torch is imported.

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

    code = "P03"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for calls of `torch.cuda` before the assignment, in the same scope."""
        for node, name in _find_set_variables(source):
            if name not in _ALLOCATOR_VARIABLES:
                continue
            for call in source.calls:
                full = source.get_full_name(call.func)
                is_moved = isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and source.imports_torch
                is_use = is_moved or (full.startswith("torch.cuda.") and full not in _CALLS_WITHOUT_ALLOCATOR)
                if is_use and call.lineno < node.lineno and source.find_scope(call) is source.find_scope(node):
                    text = f"{name} is set after the GPU was used in line {call.lineno}"
                    yield Match(text, source.get_place(node), {"used_line": call.lineno})
                    break


class ThreadsSetTooLate(Rule):
    """Finds the number of OpenMP threads set after the import that reads it.

    Why: OpenMP and the BLAS libraries read these variables once, when they are loaded.
    Fix: Set the variable in the shell, or before the first import. `torch.set_num_threads(n)` works at any time.

    Bad:
        import os
        import torch
        os.environ["OMP_NUM_THREADS"] = "1"

    Good:
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
    """

    code = "P11"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for imports before the assignment. Files that start processes may set the variable for those."""
        if any(
            part in _PROCESS_STARTERS
            for node in source.nodes
            for name in _list_imports(node)
            for part in name.split(".")
        ):
            return
        imports = [
            statement
            for statement in source.tree.body
            if any(name.partition(".")[0] in _READERS_AT_IMPORT for name in _list_imports(statement))
        ]
        for node, name in _find_set_variables(source):
            earlier = [statement for statement in imports if statement.lineno < node.lineno]
            if name in _THREAD_VARIABLES and earlier:
                text = f"{name} is set after the import in line {earlier[0].lineno} has read it"
                yield Match(text, source.get_place(node), {"import_line": earlier[0].lineno})


def _list_imports(node: ast.AST) -> list[str]:
    """Return the full names of everything that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


class ResidentMemoryAddedUp(Rule):
    """Finds resident memory (RSS) that is added up over processes.

    Why: Pages that processes share, such as libraries and memory from before a fork, are in the RSS of each process.
    The sum counts them once for every process.
    Fix: Add up `psutil.Process(...).memory_full_info().pss` (Linux), which counts each shared page once in total.

    Bad:
        import psutil
        total = sum(p.memory_info().rss for p in psutil.Process().children(recursive=True))

    Good:
        import psutil
        total = sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True))
    """

    code = "P12"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `rss` in sums of several items, and in `+=` in loops."""
        for node in source.find_nodes(ast.Attribute):
            if node.attr != "rss":
                continue
            parents = list(source.ancestors(node))
            is_in_sum = any(isinstance(parent, ast.Call) and ast.unparse(parent.func) == "sum" for parent in parents)
            has_items = any(isinstance(parent, ast.GeneratorExp | ast.ListComp) for parent in parents)
            is_in_addition = any(isinstance(parent, ast.AugAssign) for parent in parents)
            if (is_in_sum and has_items) or (is_in_addition and source.find_loop(node) is not None):
                text = "RSS is added up over processes, so shared pages are counted several times"
                yield Match(text, source.get_place(node))


class WrongUnitOfBytes(Rule):
    """Finds bytes that are divided by 1024 and labelled GB, or divided by 1000 and labelled GiB.

    Why: A GiB is 7.4 % more than a GB. If a buffer is computed in one unit and memory is stated in the other, the
    comparison is off by that much. Stable-Baselines3's own warning uses GB of 10^9 bytes.
    Fix: `/ 1e9` for GB, `/ 2**30` for GiB.

    Bad:
        print(f"buffer: {nbytes / 1024**3:.1f} GB")

    Good:
        print(f"buffer: {nbytes / 1e9:.1f} GB")
    """

    code = "P14"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Compare each number in an f-string with the unit after it."""
        for node in source.find_nodes(ast.JoinedStr):
            for figure, label in zip(node.values, node.values[1:], strict=False):
                if not isinstance(figure, ast.FormattedValue) or not isinstance(label, ast.Constant):
                    continue
                base = _find_unit_base(source, figure.value)
                decimal = _DECIMAL_LABEL.match(str(label.value))
                binary = _BINARY_LABEL.match(str(label.value))
                if base == 1024 and decimal:
                    text = f"divided by a power of 1024, this is {decimal[1]}iB, not {decimal[1]}B"
                    yield Match(text, source.get_place(figure.value))
                elif base == 1000 and binary:
                    text = f"divided by a power of 1000, this is {binary[1]}B, not {binary[1]}iB"
                    yield Match(text, source.get_place(figure.value))


def _find_unit_base(source: Source, node: ast.expr) -> int | None:
    """Return 1000 or 1024 if an expression is divided by a power of it."""
    divisor = 1.0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        value = source.evaluate(node.right)
        if not isinstance(value, int | float):
            return None
        divisor *= value
        node = node.left
    return _UNIT_BASES.get(divisor)
