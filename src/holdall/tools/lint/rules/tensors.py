"""Rules about tensors and arrays in a script's own training code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import CheckedScript, RuleExample, ScriptRule
from holdall.tools.lint.run import whole
from holdall.tools.lint.source.script import Script

_JOINS = {"torch.cat", "torch.stack", "torch.concat", "torch.concatenate"}
_NEXT = ("next_", "new_")
_BUFFER = re.compile(r"buffer|memory|replay|experience", re.IGNORECASE)
_SMALL = 1_000  # transitions; a deque for n-step returns is no replay buffer

_LOSSES_SCRIPT = """
losses = []
for batch in loader:
    loss = criterion(model(batch))
    loss.backward()
    losses.append({loss})
"""


class LossesKeepGraph(ScriptRule):
    """Finds losses that are collected together with the graph that made them."""

    id = "P01"
    name = "tensor-kept-with-graph"
    severity = Severity.WARNING
    why = """
    A loss refers to the graph that computed it, and the graph to tensors of that step. A list or a sum of losses keeps
    them all, step after step: memory grows as from a leak.
    """
    fix = "`losses.append(loss.item())`, or `loss.detach()`."
    BAD: ClassVar = (
        RuleExample(_LOSSES_SCRIPT.replace("{loss}", "loss")),
        RuleExample(
            """
            total = 0
            for batch in loader:
                loss = criterion(model(batch))
                loss.backward()
                total += loss
            """
        ),
    )
    GOOD: ClassVar = (
        RuleExample(_LOSSES_SCRIPT.replace("{loss}", "loss.item()")),
        RuleExample(_LOSSES_SCRIPT.replace("{loss}", "loss.detach()")),
        RuleExample(
            """
            losses = []
            for batch in loader:
                loss = criterion(model(batch))
                losses.append(loss)
            sum(losses).backward()
            """
        ),
    )

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield where something that `backward` was called on is kept in a loop."""
        script = subject.script
        differentiated = {
            (script.scope(call), call.func.value.id)
            for call in script.calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "backward"
            and isinstance(call.func.value, ast.Name)
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
    """Finds replay buffers that are a deque or list of tuples of arrays."""

    id = "P04"
    name = "buffer-of-tuples"
    severity = Severity.WARNING
    why = """
    Every transition is a tuple of small objects, each observation is there twice, and sampling gathers them one by
    one in Python. A view into a larger array keeps all of it alive, and is written whole when it is pickled.
    """
    fix = "Arrays that are allocated once, or `holdall.ReplayMemory`, which stores each observation once."
    BAD: ClassVar = (
        RuleExample(
            """
            from collections import deque
            buffer = deque(maxlen=50_000)
            for step in range(100):
                buffer.append((state, action, reward, next_state, done))
            """
        ),
    )
    GOOD: ClassVar = (
        RuleExample(
            """
            import holdall
            memory = holdall.ReplayMemory(env.observation_space, env.action_space, capacity=50_000)
            for step in range(100):
                memory.add(obs, action, reward, next_obs, terminated, truncated)
            """
        ),
        RuleExample("from collections import deque\nrewards = deque(maxlen=100)\nrewards.append(reward)"),
        RuleExample(
            "from collections import deque\nwindow = deque(maxlen=3)\nwindow.append((obs, action, reward, next_obs))"
        ),
        RuleExample("episode = []\nepisode.append((obs, action, reward, next_obs))"),
    )

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield where a transition is appended as one object."""
        containers = dict(_containers(subject))
        for call in subject.script.calls:
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
                    subject.script.place(call),
                    capacity="unknown" if limit is None else limit,
                )


def _containers(subject: CheckedScript) -> Iterator[tuple[str, int | None]]:
    """Yield what is a list named as a buffer, or a deque that is not small, with the deque's length if known."""
    for node in subject.script.nodes:
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as made):
                if subject.script.dotted(made.func) != "collections.deque":
                    continue
                given = [*made.args[1:2], *(k.value for k in made.keywords if k.arg == "maxlen")]
                limit = whole(subject.training.evaluator.value(given[0])) if given else None
                if limit is None or limit >= _SMALL:
                    yield ast.unparse(target), limit
            case ast.Assign(targets=[target], value=ast.List(elts=[])) if _BUFFER.search(ast.unparse(target)):
                yield ast.unparse(target), None


def _tuple_names(node: ast.expr) -> list[str]:
    """Return the names that a tuple, or a record's constructor, is made of; empty for what is no name."""
    items = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
    return [item.id if isinstance(item, ast.Name) else getattr(item, "attr", "") for item in items]


class MovedThenJoined(ScriptRule):
    """Finds tensors that are moved to the device one by one and joined there."""

    id = "P05"
    name = "moved-then-joined"
    severity = Severity.WARNING
    why = """
    The pieces and the joined tensor are on the device together: twice the payload there. Joined first, the device holds
    it once, and the host's copy is freed as soon as it is moved.
    """
    fix = "`torch.cat(pieces).to(device)`, or one tensor on the device that pieces are copied into."
    BAD: ClassVar = (
        RuleExample("import torch\nobs = torch.cat([piece.to(device) for piece in pieces], dim=0)"),
        RuleExample(
            "import torch\non_gpu = [t.to(device, non_blocking=True) for t in pieces]\nobs = torch.cat(on_gpu, dim=0)"
        ),
    )
    GOOD: ClassVar = (RuleExample("import torch\nobs = torch.cat(pieces, dim=0).to(device)"),)

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield where a join gets tensors that were just moved."""
        script = subject.script
        for call in script.calls:
            if script.dotted(call.func) in _JOINS and call.args and _moves(script, call.args[0]):
                yield self.finding(
                    "the pieces and the joined tensor are on the device together: twice the payload", script.place(call)
                )


def _moves(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        found = script.definition(node)
        return bool(
            found and found.value is not None and not isinstance(found.value, ast.Name) and _moves(script, found.value)
        )
    match node:
        case ast.ListComp(elt=ast.Call(func=ast.Attribute(attr="to" | "cuda"))):
            return True
    return False


class StackedThenFlattened(ScriptRule):
    """Finds `torch.stack` whose result is flattened at once."""

    id = "P07"
    name = "stacked-then-flattened"
    severity = Severity.INFO
    why = """
    `torch.stack` always copies, contiguous or not; it never gives a view. It also needs pieces of one length, and
    trajectories seldom are.
    """
    fix = "`torch.cat(pieces, dim=0)`: the same values in one copy, of any lengths."
    BAD: ClassVar = (
        RuleExample("import torch\nitems = torch.stack(pieces)\nflat = items.reshape(-1, *items.shape[2:])"),
        RuleExample("import torch\nflat = torch.stack(pieces).flatten(0, 1)"),
    )
    GOOD: ClassVar = (
        RuleExample("import torch\nflat = torch.cat(pieces, dim=0)"),
        RuleExample("import torch\nsquare = torch.stack(pieces).reshape(8, 8)"),
    )

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield where a stack is flattened."""
        script = subject.script
        for call in script.calls:
            match call.func:
                case ast.Attribute(attr="reshape" | "view", value=base) if call.args and _is_minus_one(call.args[0]):
                    pass
                case ast.Attribute(attr="flatten", value=base):
                    pass
                case _:
                    continue
            found = script.definition(base) if isinstance(base, ast.Name) else None
            made = found.value if found else base
            if isinstance(made, ast.Call) and script.dotted(made.func) == "torch.stack":
                yield self.finding(
                    "torch.stack copies, and its result is flattened: torch.cat does both", script.place(made)
                )


def _is_minus_one(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and ast.unparse(node) == "-1"


class Preallocated(ScriptRule):
    """Finds private attributes of a buffer class that are set to a constant and never read."""

    id = "P08"
    name = "buffer-attribute-never-read"
    severity = Severity.INFO
    why = "A buffer that says it reuses memory, and never looks at what it keeps, allocates anew at every update."
    fix = "Use it, or delete it."
    BAD: ClassVar = (
        RuleExample(
            """
            class RolloutBuffer(list):
                def __init__(self):
                    super().__init__()
                    self._preallocated = None
            """
        ),
    )
    GOOD: ClassVar = (
        RuleExample(
            """
            class RolloutBuffer(list):
                def __init__(self):
                    super().__init__()
                    self._preallocated = None

                def rows(self):
                    return self._preallocated
            """
        ),
        RuleExample("class Buffer:\n    def __init__(self):\n        self.size = 0"),
        RuleExample("class BaseBuffer:\n    def __init__(self, codec):\n        self._compress = codec.compress"),
    )

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield for every attribute that nothing reads."""
        script = subject.script
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
    """Finds `non_blocking=True` in a file that pins no memory."""

    id = "P10"
    name = "non-blocking-without-pinning"
    severity = Severity.INFO
    why = "A copy to the GPU is asynchronous only from pinned memory; from other memory the option changes nothing."
    fix = "Allocate the source with `pin_memory=True`, or call `.pin_memory()` once on what is reused."
    BAD: ClassVar = (
        RuleExample('import torch\ncombined.copy_(item, non_blocking=True)\nitem.to("cuda", non_blocking=True)'),
    )
    GOOD: ClassVar = (
        RuleExample('import torch\nitem = torch.empty(8, pin_memory=True)\nitem.to("cuda", non_blocking=True)'),
        RuleExample('import torch\nitem.to("cpu", non_blocking=True)'),
        RuleExample('import torch\nitem.to("cuda", copy=True)'),
    )

    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield where a copy asks for what it cannot get."""
        script = subject.script
        names = {n.attr for n in script.nodes if isinstance(n, ast.Attribute)}
        names |= {n.arg for n in script.nodes if isinstance(n, ast.keyword) and n.arg}
        if "pin_memory" in names or not any(name.partition(".")[0] == "torch" for name in script.imports.values()):
            return
        for call in script.calls:
            asked = any(k.arg == "non_blocking" and getattr(k.value, "value", None) is True for k in call.keywords)
            to_host = bool(call.args) and getattr(call.args[0], "value", None) == "cpu"
            if asked and not to_host:
                yield self.finding("non_blocking=True, and nothing in this file is pinned", script.place(call))
