"""Rules about tensors: graphs that are kept alive, copies to a device, and `cat` or `stack`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Function, Source

_JOINS = ("torch.cat", "torch.stack", "torch.concat", "torch.concatenate")


class TensorKeptWithGraph(Rule):
    """Finds losses that are kept in a list or a sum, with the graph that computed them.

    Why: A loss refers to its graph, and the graph refers to the tensors of that step. A list or a sum of losses keeps
    all of them, step after step, so memory grows as with a leak.
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

    code = "P01"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `append` and `+=` of tensors that `backward` was called on, in code that is repeated."""
        losses = [(call, _get_reduced_tensor(tensor)) for call, tensor in source.find_method_calls("backward")]
        differentiated = {(source.find_scope(call), loss.id) for call, loss in losses if isinstance(loss, ast.Name)}
        for node, container, value in _find_accumulations(source):
            # Outside of a loop, only a container that outlives the call grows: a local list is freed with its function.
            is_local = source.is_bound_in(source.find_scope(node), container)
            is_repeated_call = not is_local and bool(source.describe_repetition(node))
            if source.find_loop(node) is None and not is_repeated_call:
                continue
            if isinstance(value, ast.Name) and (source.find_scope(node), value.id) in differentiated:
                kept = value.id
            else:
                call = source.find_last_assignment(value) if isinstance(value, ast.Name) else value
                if not isinstance(call, ast.Call) or not _returns_loss(source.find_called_function(call)):
                    continue
                kept = value.id if isinstance(value, ast.Name) else f"the result of {ast.unparse(call.func)}"
            yield Match(
                f"{ast.unparse(container)} keeps {kept} with its graph, step after step", source.get_place(node)
            )


def _find_accumulations(source: Source) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    """Yield each `container.append(value)` and `container += value` as a node, its container and its value."""
    for node in (*source.find_nodes(ast.Call), *source.find_nodes(ast.AugAssign)):
        match node:
            case ast.Call(func=ast.Attribute(attr="append", value=container), args=[value]):
                yield node, container, value
            case ast.AugAssign(op=ast.Add(), target=container, value=value):
                yield node, container, value


def _get_reduced_tensor(node: ast.expr) -> ast.expr:
    """Return `loss` for `loss.mean()`, and any other expression as it is."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="mean" | "sum")):
            return value
    return node


def _returns_loss(function: Function | None) -> bool:
    """Return whether a function returns the tensor that it called `backward` on."""
    if function is None:
        return False
    differentiated = set()
    returned = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="backward")):
                differentiated.add(name)
            case ast.Return(value=ast.Name(id=name)):
                returned.add(name)
    return not differentiated.isdisjoint(returned)


class MovedThenJoined(Rule):
    """Finds tensors that are moved to the device one by one and joined there.

    Why: The pieces and the joined tensor are on the device at the same time, which takes twice the memory there. If the
    pieces are joined first, the device holds the data once, and the copy on the host is freed after the move.
    Fix: `torch.cat(pieces).to(device)`, or copy the pieces into one tensor on the device.

    Bad:
        import torch
        obs = torch.cat([piece.to(device) for piece in pieces], dim=0)

    Good:
        import torch
        obs = torch.cat(pieces, dim=0).to(device)
    """

    code = "P05"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for joins of lists whose items are moved."""
        text = "the pieces and the joined tensor are on the device at the same time: twice the memory"
        for call in source.find_calls(*_JOINS):
            match source.resolve(call.args[0] if call.args else None):
                case ast.ListComp(elt=ast.Call(func=ast.Attribute(attr="to" | "cuda"))):
                    yield Match(text, source.get_place(call))


class StackedThenFlattened(Rule):
    """Finds `torch.stack` whose result is then flattened.

    Why: `torch.stack` needs pieces of equal length, which trajectories seldom have.
    Fix: `torch.cat(pieces, dim=0)` makes the same flat tensor, from pieces of any length.

    Bad:
        import torch
        items = torch.stack(pieces)
        flat = items.reshape(-1, *items.shape[2:])

    Good:
        import torch
        flat = torch.cat(pieces, dim=0)
    """

    code = "P07"
    severity = Severity.INFO

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `flatten`, `reshape(-1, ...)` and `view(-1, ...)` of stacked tensors."""
        for call in source.calls:
            match call:
                case ast.Call(func=ast.Attribute(attr="flatten", value=base)):
                    pass
                case ast.Call(func=ast.Attribute(attr="reshape" | "view", value=base), args=[first, *_]):
                    is_column = ast.unparse(call.args[-1]) == "1"  # Often a column of scalars, which torch.cat refuses.
                    if ast.unparse(first) != "-1" or is_column:
                        continue
                case _:
                    continue
            stacked = source.resolve(base)
            if isinstance(stacked, ast.Call) and source.get_full_name(stacked.func) == "torch.stack":
                text = "the result of torch.stack is flattened; torch.cat does that for pieces of any length"
                yield Match(text, source.get_place(stacked))


class BufferAttributeNeverRead(Rule):
    """Finds private attributes of a buffer class that are set to a constant and never read.

    Why: A name such as `_preallocated` promises that memory is used again. If nothing reads the attribute, the promise
    is not kept.
    Fix: Use the attribute, or delete it.

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

    code = "P08"
    severity = Severity.INFO

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look at classes with `buffer` in their name and without a base class that may read the attribute."""
        read = {node.attr for node in source.find_nodes(ast.Attribute) if isinstance(node.ctx, ast.Load)}
        reported: set[str] = set()
        for node in source.find_nodes(ast.Attribute):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            is_read = node.attr in read or node.attr in source.strings
            is_candidate = isinstance(node.ctx, ast.Store) and is_private and not is_read
            if not is_candidate or node.attr in reported:
                continue
            value = getattr(source.get_parent(node), "value", None)
            owner = source.find_class(node)
            # A subclass in another file may read an attribute with a computed value.
            if not isinstance(value, ast.Constant) or owner is None or ast.unparse(node.value) != "self":
                continue
            has_known_bases = all(ast.unparse(base) in {"list", "object"} for base in owner.bases)
            if "buffer" in owner.name.lower() and has_known_bases:
                reported.add(node.attr)
                yield Match(f"{owner.name} sets {node.attr} and never reads it", source.get_place(node))


class NonBlockingWithoutPinning(Rule):
    """Finds `non_blocking=True` in a file that pins no memory.

    Why: A copy to the GPU is asynchronous only from pinned memory. From other memory, the option changes nothing.
    Fix: Allocate the source with `pin_memory=True`, or call `.pin_memory()` once on memory that is reused.

    Bad:
        import torch
        combined.copy_(item, non_blocking=True)
        item.to("cuda", non_blocking=True)

    Good:
        import torch
        item = torch.empty(8, pin_memory=True)
        item.to("cuda", non_blocking=True)
    """

    code = "P10"
    severity = Severity.INFO

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for the option in files that use torch and mention no pinning."""
        if not source.imports_torch or "pin_memory" in source.attributes | source.keywords:
            return
        for call in source.calls:
            is_non_blocking = any(
                keyword.arg == "non_blocking" and getattr(keyword.value, "value", None) is True
                for keyword in call.keywords
            )
            is_to_host = bool(call.args) and getattr(call.args[0], "value", None) == "cpu"
            if is_non_blocking and not is_to_host:
                yield Match("non_blocking=True, and nothing in this file is pinned", source.get_place(call))
