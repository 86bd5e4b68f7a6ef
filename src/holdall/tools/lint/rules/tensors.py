"""Rules about tensors and arrays in a script's own training code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, script_rule
from holdall.tools.lint.run import Machine
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

_JOINS = {"torch.cat", "torch.stack", "torch.concat", "torch.concatenate"}


@script_rule("P01", "tensor-kept-with-graph", Severity.WARNING, words=("backward",))
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
    for node in script.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="append", value=kept), args=[ast.Name(id=name)]):
                keeper = ast.unparse(kept)
            case ast.AugAssign(op=ast.Add(), target=target, value=ast.Name(id=name)):
                keeper = ast.unparse(target)
            case _:
                continue
        if (script.scope(node), name) in differentiated and script.loop(node) is not None:
            yield Match(f"{keeper} keeps {name} with its graph, step after step", script.place(node))


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
        match call.func:
            case ast.Attribute(attr="flatten", value=base):
                made = script.assigned(base) or base
            case ast.Attribute(attr="reshape" | "view", value=base) if call.args and ast.unparse(call.args[0]) == "-1":
                made = script.assigned(base) or base
            case _:
                continue
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
    if "pin_memory" in script.attributes | script.keywords or not any(
        name.partition(".")[0] == "torch" for name in script.imports.values()
    ):
        return
    for call in script.calls:
        asked = any(k.arg == "non_blocking" and getattr(k.value, "value", None) is True for k in call.keywords)
        to_host = bool(call.args) and getattr(call.args[0], "value", None) == "cpu"
        if asked and not to_host:
            yield Match("non_blocking=True, and nothing in this file is pinned", script.place(call))
