"""Rules about tensors and arrays in a script's own training code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import ScriptRule
from holdall.tools.lint.run import whole
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

_JOINS = {"torch.cat", "torch.stack", "torch.concat", "torch.concatenate"}
_NEXT = ("next_", "new_")
_BUFFER = re.compile(r"buffer|memory|replay|experience", re.IGNORECASE)
_SMALL = 1_000  # transitions; a deque for n-step returns is no replay buffer


class LossesKeepGraph(ScriptRule):
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

    id, name, severity = "P01", "tensor-kept-with-graph", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where something that `backward` was called on is kept in a loop."""
        script = training.script
        differentiated = {
            (script.scope(call), loss.id)
            for call, loss in script.method_calls("backward")
            if isinstance(loss, ast.Name)
        }
        for node in script.nodes:
            match node:
                case ast.Call(func=ast.Attribute(attr="append", value=kept), args=[ast.Name(id=name)]):
                    keeper = ast.unparse(kept)
                case ast.AugAssign(op=ast.Add(), target=target, value=ast.Name(id=name)):
                    keeper = ast.unparse(target)
                case _:
                    continue
            if (script.scope(node), name) in differentiated and script.loop(node) is not None:
                yield self.finding(f"{keeper} keeps {name} with its graph, step after step", script.place(node))


class PerStepArrays(ScriptRule):
    """Finds replay buffers that are a deque or list of tuples of arrays.

    Why: Every transition is a tuple of small objects, each observation is there twice, and sampling gathers them one by
    one in Python. A view into a larger array keeps all of it alive, and is written whole when it is pickled.
    Fix: Arrays that are allocated once, or `holdall.ReplayMemory`, which stores each observation once.

    Bad:
        from collections import deque
        buffer = deque(maxlen=50_000)
        for step in range(100):
            buffer.append((state, action, reward, next_state, done))

    Good:
        import holdall
        memory = holdall.ReplayMemory(env.observation_space, env.action_space, capacity=50_000)
        for step in range(100):
            memory.add(obs, action, reward, next_obs, terminated, truncated)
    """

    id, name, severity = "P04", "buffer-of-tuples", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where a transition is appended as one object."""
        containers = dict(_containers(training))
        for call in training.script.calls:
            match call.func:
                case ast.Attribute(attr="append", value=kept) if len(call.args) == 1:
                    name = ast.unparse(kept)
                case _:
                    continue
            parts = _tuple_names(call.args[0])
            if name in containers and len(parts) >= 4 and any(part.startswith(_NEXT) for part in parts):
                limit = containers[name]
                size = "" if limit is None else f" of {limit:,}"
                yield self.finding(
                    f"{name}{size} keeps each transition as {len(parts)} objects, both observations among them",
                    training.script.place(call),
                    capacity="unknown" if limit is None else limit,
                )


def _containers(training: TrainingReader) -> Iterator[tuple[str, int | None]]:
    """Yield what is a list named as a buffer, or a deque that is not small, with the deque's length if known."""
    for node in training.script.nodes:
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as made):
                if training.script.dotted(made.func) != "collections.deque":
                    continue
                given = [*made.args[1:2], *(k.value for k in made.keywords if k.arg == "maxlen")]
                limit = whole(training.evaluator.value(given[0])) if given else None
                if limit is None or limit >= _SMALL:
                    yield ast.unparse(target), limit
            case ast.Assign(targets=[target], value=ast.List(elts=[])) if _BUFFER.search(ast.unparse(target)):
                yield ast.unparse(target), None


def _tuple_names(node: ast.expr) -> list[str]:
    """Return the names that a tuple, or a record's constructor, is made of; empty for what is no name."""
    items = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
    return [item.id if isinstance(item, ast.Name) else getattr(item, "attr", "") for item in items]


class MovedThenJoined(ScriptRule):
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

    id, name, severity = "P05", "moved-then-joined", Severity.WARNING

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where a join gets tensors that were just moved."""
        script = training.script
        for call in script.calls:
            if script.dotted(call.func) in _JOINS and call.args and _moves(script, call.args[0]):
                yield self.finding(
                    "the pieces and the joined tensor are on the device together: twice the payload", script.place(call)
                )


def _moves(script: Script, node: ast.expr) -> bool:
    """Whether an expression, or what a name stands for, is a list of tensors that are moved to a device."""
    match script.assigned(node) if isinstance(node, ast.Name) else node:
        case ast.ListComp(elt=ast.Call(func=ast.Attribute(attr="to" | "cuda"))):
            return True
    return False


class StackedThenFlattened(ScriptRule):
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

    id, name, severity = "P07", "stacked-then-flattened", Severity.INFO

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where a stack is flattened."""
        script = training.script
        for call in script.calls:
            match call.func:
                case ast.Attribute(attr="reshape" | "view", value=base) if call.args and _is_minus_one(call.args[0]):
                    pass
                case ast.Attribute(attr="flatten", value=base):
                    pass
                case _:
                    continue
            made = script.assigned(base) or base
            if isinstance(made, ast.Call) and script.dotted(made.func) == "torch.stack":
                yield self.finding(
                    "torch.stack copies, and its result is flattened: torch.cat does both", script.place(made)
                )


def _is_minus_one(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and ast.unparse(node) == "-1"


class Preallocated(ScriptRule):
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

    id, name, severity = "P08", "buffer-attribute-never-read", Severity.INFO

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield for every attribute that nothing reads."""
        script = training.script
        read = {n.attr for n in script.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        read |= {n.value for n in script.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        seen: set[str] = set()
        for node in script.nodes:
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            owner, statement = script.enclosing_class(node), script.parent(node)
            if not isinstance(getattr(statement, "value", None), ast.Constant):
                continue  # what is worked out may be for a subclass elsewhere
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if owner is None or not is_private or node.attr in read | seen or ast.unparse(node.value) != "self":
                continue
            # Without a base class that may read it, or with none but list.
            if "buffer" in owner.name.lower() and all(ast.unparse(base) in {"list", "object"} for base in owner.bases):
                seen.add(node.attr)
                yield self.finding(f"{owner.name} sets {node.attr} and never reads it", script.place(node))


class NonBlockingUnpinned(ScriptRule):
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

    id, name, severity = "P10", "non-blocking-without-pinning", Severity.INFO

    def check(self, training: TrainingReader, machine: Machine) -> Iterator[Finding]:
        """Yield where a copy asks for what it cannot get."""
        script = training.script
        names = {n.attr for n in script.nodes if isinstance(n, ast.Attribute)}
        names |= {n.arg for n in script.nodes if isinstance(n, ast.keyword) and n.arg}
        if "pin_memory" in names or not any(name.partition(".")[0] == "torch" for name in script.imports.values()):
            return
        for call in script.calls:
            asked = any(k.arg == "non_blocking" and getattr(k.value, "value", None) is True for k in call.keywords)
            to_host = bool(call.args) and getattr(call.args[0], "value", None) == "cpu"
            if asked and not to_host:
                yield self.finding("non_blocking=True, and nothing in this file is pinned", script.place(call))
