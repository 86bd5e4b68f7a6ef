"""Rules about tensors, allocators and garbage collection, settings that come too late, and misleading figures."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, script_rule
from holdall.tools.lint.run import Machine, sized
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, subtree

# Methods that a training calls once a step or once an update.
_RARE = 10_000  # rounds of a loop between two calls
_REPEATED = ("update", "step", "_on_step", "_on_rollout", "train_step", "training_step", "optimize", "optimise")
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
_POOLS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_READ_AT_IMPORT = {"torch", "numpy", "stable_baselines3", "scipy"}
_STARTS_PROCESSES = {"multiprocessing", "subprocess", "concurrent", "joblib", "ray", "SubprocVecEnv", "AsyncVectorEnv"}
_HARMLESS = {"torch.cuda.is_available", "torch.cuda.device_count"}
_JOINS = {"torch.cat", "torch.stack", "torch.concat", "torch.concatenate"}
_WRONG_UNITS = {1024: (re.compile(r"[GMT]B\b"), "iB"), 1000: (re.compile(r"[GMT]iB\b"), "B")}


@script_rule("P01", "tensor-kept-with-graph", Severity.WARNING, words=("backward", "loss"))
def tensor_kept_with_graph(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds losses that are collected together with the graph that made them.

    Why: A loss refers to the graph that computed it, and the graph to tensors of that step. A list or a sum of losses
    keeps them all, step after step: memory grows as from a leak.
    Fix: `losses.append(loss.item())`, or `loss.detach()`.

    Bad:
        losses = []
        for batch in loader:
            loss = criterion(model(batch))
            loss.backward()
            losses.append(loss)

    Good:
        losses = []
        for batch in loader:
            loss = criterion(model(batch))
            loss.backward()
            losses.append(loss.item())
    """
    differentiated = {
        (script.scope(call), loss.id) for call, loss in script.method_calls("backward") if isinstance(loss, ast.Name)
    }
    for node in (*script.of_kind(ast.Call), *script.of_kind(ast.AugAssign)):
        match node:
            case ast.Call(func=ast.Attribute(attr="append", value=kept), args=[value]):
                keeper = ast.unparse(kept)
            case ast.AugAssign(op=ast.Add(), target=target, value=value):
                keeper = ast.unparse(target)
            case _:
                continue
        if script.loop(node) is None or not isinstance(value, ast.Name | ast.Call):
            continue
        made = script.assigned(value) if isinstance(value, ast.Name) else value
        is_own = isinstance(value, ast.Name) and (script.scope(node), value.id) in differentiated
        if is_own or (isinstance(made, ast.Call) and _returns_loss(training.called(made))):
            name = value.id if isinstance(value, ast.Name) else f"what {ast.unparse(value.func)} returns"
            yield Match(f"{keeper} keeps {name} with its graph, step after step", script.place(node))


def _returns_loss(function: ast.AST | None) -> bool:
    """Whether a function returns what it called `backward` on."""
    losses, returned = set(), set()
    for one in subtree(function) if isinstance(function, ast.FunctionDef) else ():
        match one:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="backward")):
                losses.add(name)
            case ast.Return(value=ast.Name(id=name)):
                returned.add(name)
    return bool(losses & returned)


@script_rule("P05", "moved-then-joined", Severity.WARNING, words=("torch",))
def moved_then_joined(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds tensors that are moved to the device one by one and joined there.

    Why: The pieces and the joined tensor are on the device together: twice the payload there. Joined first, the device
    holds it once, and the host's copy is freed as soon as it is moved.
    Fix: `torch.cat(pieces).to(device)`, or one tensor on the device that pieces are copied into.

    Bad:
        import torch
        obs = torch.cat([piece.to(device) for piece in pieces], dim=0)

    Good:
        import torch
        obs = torch.cat(pieces, dim=0).to(device)
    """
    text = "the pieces and the joined tensor are on the device together: twice the payload"
    for call in script.calls_of(*_JOINS):
        pieces = call.args[0] if call.args else None
        match script.assigned(pieces) if isinstance(pieces, ast.Name) else pieces:
            case ast.ListComp(elt=ast.Call(func=ast.Attribute(attr="to" | "cuda"))):
                yield Match(text, script.place(call))


@script_rule("P07", "stacked-then-flattened", Severity.INFO, words=("stack",))
def stacked_then_flattened(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds `torch.stack` whose result is flattened at once.

    Why: `torch.stack` always copies, contiguous or not; it never gives a view. It also needs pieces of one length, and
    trajectories seldom are.
    Fix: `torch.cat(pieces, dim=0)`: the same values in one copy, of any lengths.

    Bad:
        import torch
        items = torch.stack(pieces)
        flat = items.reshape(-1, *items.shape[2:])

    Good:
        import torch
        flat = torch.cat(pieces, dim=0)
    """
    for call in script.calls:
        match call:
            case ast.Call(func=ast.Attribute(attr="flatten", value=base)):
                pass
            case ast.Call(func=ast.Attribute(attr="reshape" | "view", value=base), args=[first, *_]):
                if ast.unparse(first) != "-1" or ast.unparse(call.args[-1]) == "1":
                    continue  # into a column of numbers, which torch.cat refuses
            case _:
                continue
        made = script.assigned(base) or base
        if isinstance(made, ast.Call) and script.dotted(made.func) == "torch.stack":
            yield Match("torch.stack copies, and its result is flattened: torch.cat does both", script.place(made))


@script_rule("P08", "buffer-attribute-never-read", Severity.INFO, words=("buffer", "Buffer"))
def buffer_attribute_never_read(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds private attributes of a buffer class that are set to a constant and never read.

    Why: A buffer that says it reuses memory, and never looks at what it keeps, allocates new memory at every update.
    Fix: Use it, or delete it.

    Bad:
        class RolloutBuffer(list):
            def __init__(self):
                super().__init__()
                self._preallocated = None

    Good:
        class RolloutBuffer(list):
            def __init__(self):
                super().__init__()
                self._preallocated = None

            def rows(self):
                return self._preallocated
    """
    read = {n.attr for n in script.of_kind(ast.Attribute) if isinstance(n.ctx, ast.Load)}
    read |= {n.value for n in script.of_kind(ast.Constant) if isinstance(n.value, str)}
    seen: set[str] = set()
    for node in script.of_kind(ast.Attribute):
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        if not isinstance(node.ctx, ast.Store) or not is_private or node.attr in read or node.attr in seen:
            continue
        owner, statement = script.enclosing_class(node), script.parent(node)
        if not isinstance(getattr(statement, "value", None), ast.Constant):
            continue  # what is worked out may be for a subclass elsewhere
        if owner is None or ast.unparse(node.value) != "self":
            continue
        # Without a base class that may read it, or with none but list.
        if "buffer" in owner.name.lower() and all(ast.unparse(base) in {"list", "object"} for base in owner.bases):
            seen.add(node.attr)
            yield Match(f"{owner.name} sets {node.attr} and never reads it", script.place(node))


@script_rule("P10", "non-blocking-without-pinning", Severity.INFO, words=("non_blocking",))
def non_blocking_without_pinning(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds `non_blocking=True` in a file that pins no memory.

    Why: A copy to the GPU is asynchronous only from pinned memory; from other memory the option changes nothing.
    Fix: Allocate the source with `pin_memory=True`, or call `.pin_memory()` once on what is reused.

    Bad:
        import torch
        combined.copy_(item, non_blocking=True)
        item.to("cuda", non_blocking=True)

    Good:
        import torch
        item = torch.empty(8, pin_memory=True)
        item.to("cuda", non_blocking=True)
    """
    uses_torch = any(name.partition(".")[0] == "torch" for name in script.imports.values())
    if "pin_memory" in script.attributes | script.keywords or not uses_torch:
        return
    for call in script.calls:
        asked = any(k.arg == "non_blocking" and getattr(k.value, "value", None) is True for k in call.keywords)
        to_host = bool(call.args) and getattr(call.args[0], "value", None) == "cpu"
        if asked and not to_host:
            yield Match("non_blocking=True, and nothing in this file is pinned", script.place(call))


def _is_rare(script: Script, node: ast.AST) -> bool:
    """Whether a condition such as `step % 50_000 == 0` lets a node be reached only once in thousands of rounds."""
    tests = [parent.test for parent in script.ancestors(node) if isinstance(parent, ast.If)]
    parts = [one for test in tests for one in ast.walk(test) if isinstance(one, ast.BinOp)]
    periods = [one for part in parts if isinstance(part.op, ast.Mod) for one in ast.walk(part.right)]
    return any(isinstance(one, ast.Constant) and isinstance(one.value, int) and one.value >= _RARE for one in periods)


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


@script_rule("P02", "empty-cache-in-loop", Severity.WARNING, words=("empty_cache",))
def empty_cache_in_loop(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    yield from _repeated_calls(script, "torch.cuda.empty_cache")


@script_rule("P06", "collect-in-loop", Severity.INFO, words=("gc",))
def collect_in_loop(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    yield from _repeated_calls(script, "gc.collect")


@script_rule("P09", "synchronize-in-loop", Severity.INFO, words=("synchronize",))
def synchronize_in_loop(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    timers = {"time.perf_counter", "time.time", "time.monotonic", "torch.cuda.Event"}
    if not any(script.calls_of(*timers)):
        yield from _repeated_calls(script, "torch.cuda.synchronize")


def _repeated_calls(script: Script, dotted: str) -> Iterator[Match]:
    for call in script.calls_of(dotted):
        if (where := _is_repeated(script, call)) and not _is_rare(script, call):
            yield Match(f"{dotted}() {where}", script.place(call))


def _variables(script: Script) -> Iterator[tuple[ast.Assign | ast.Call, str]]:
    """Yield where a file sets an environment variable of its own process, and which."""
    for node in script.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base, slice=ast.Constant(value=str() as name))]):
                if script.dotted(base) == "os.environ":
                    yield node, name
            case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]):
                if script.dotted(function) in {"os.environ.setdefault", "os.putenv"}:
                    yield node, name


@script_rule("P03", "allocator-set-too-late", Severity.WARNING, words=("ALLOC_CONF",))
def allocator_set_too_late(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    for node, name in _variables(script):
        before = [one for one in script.calls if one.lineno < node.lineno and script.scope(one) is script.scope(node)]
        names = [(one, script.dotted(one.func)) for one in before]
        used = [one for one, full in names if full.startswith("torch.cuda.") and full not in _HARMLESS]
        if name in _ALLOCATOR and used:
            text = f"{name} is set after the GPU was used in line {used[0].lineno}"
            yield Match(text, script.place(node), {"used_line": used[0].lineno})


@script_rule("P11", "threads-set-too-late", Severity.WARNING, words=("_NUM_THREADS",))
def threads_set_too_late(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    if any(part in _STARTS_PROCESSES for node in script.nodes for full in _imported(node) for part in full.split(".")):
        return
    reading = [one for one in script.tree.body if any(n.partition(".")[0] in _READ_AT_IMPORT for n in _imported(one))]
    for node, name in _variables(script):
        before = [statement for statement in reading if statement.lineno < node.lineno]
        if name in _POOLS and before:
            text = f"{name} is set after the import in line {before[0].lineno} has read it"
            yield Match(text, script.place(node), {"import_line": before[0].lineno})


def _imported(node: ast.AST) -> list[str]:
    """Return the full names of what a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@script_rule("P12", "resident-memory-added-up", Severity.WARNING, words=("rss",))
def resident_memory_added_up(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    for node in (one for one in script.of_kind(ast.Attribute) if one.attr == "rss"):
        above = list(script.ancestors(node))
        summed = any(isinstance(a, ast.Call) and ast.unparse(a.func) == "sum" for a in above)
        repeated = any(isinstance(a, ast.GeneratorExp | ast.ListComp) for a in above)
        added = any(isinstance(a, ast.AugAssign) for a in above) and script.loop(node) is not None
        if (summed and repeated) or added:
            yield Match("RSS is added up over processes: shared pages are counted several times", script.place(node))


@script_rule("P13", "host-memory-in-container", Severity.WARNING, words=("virtual_memory",))
def host_memory_in_container(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
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
    for call in script.calls_of("psutil.virtual_memory"):
        if machine.is_contained:
            allowed = f"{machine.limit_name} allows {sized(machine.limit_bytes)}"
            numbers = {"ram_bytes": machine.ram_bytes, "limit_bytes": machine.limit_bytes}
            yield Match(f"it says {sized(machine.ram_bytes)} in all, but {allowed}", script.place(call), numbers)


@script_rule("P14", "wrong-unit-of-bytes", Severity.WARNING, words=("GB", "MB", "TB", "GiB", "MiB", "TiB"))
def wrong_unit_of_bytes(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds bytes that are divided by 1024 and called GB, or by 1000 and called GiB.

    Why: A GiB is 7.4 % more than a GB. A buffer worked out in one and compared with memory stated in the other is off
    by that, and Stable-Baselines3's own warning counts GB of 10^9 bytes.
    Fix: `/ 1e9` for GB, `/ 2**30` for GiB.

    Bad:
        print(f"buffer: {nbytes / 1024**3:.1f} GB")

    Good:
        print(f"buffer: {nbytes / 1e9:.1f} GB")
    """
    for node in script.of_kind(ast.JoinedStr):
        for figure, label in zip(node.values, node.values[1:], strict=False):
            if isinstance(figure, ast.FormattedValue) and isinstance(label, ast.Constant):
                yield from _compare(training, figure, str(label.value).lstrip()[:4])


def _compare(training: TrainingReader, figure: ast.FormattedValue, label: str) -> Iterator[Match]:
    base = _unit_base(training, figure.value)
    wrong, right = _WRONG_UNITS.get(base or 0, (None, ""))
    if wrong and (found := wrong.match(label)):
        text = f"divided by a power of {base}, this is {label[0]}{right}, not {found[0]}"
        yield Match(text, training.script.place(figure.value))


def _unit_base(training: TrainingReader, node: ast.expr) -> int | None:
    """Return 1024 or 1000, whose power the whole divisor of an expression is."""
    divisor = 1.0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        value = training.value(node.right)
        if not isinstance(value, int | float) or value <= 0:
            return None
        divisor *= value
        node = node.left
    powers = {float(base**power): base for base in (1000, 1024) for power in (2, 3, 4)}
    return powers.get(divisor)
