"""Rules about every buffer, whichever library it is from: what it costs, and what storing it well saves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, buffer_rule, script_rule
from holdall.tools.lint.run import Machine, PlainBuffer, sized, whole
from holdall.tools.lint.source.arrays import leaf_arrays
from holdall.tools.lint.source.containers import MANY
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, argument_of
from holdall.tools.lint.source.values import ArrayValue, InstanceValue, ListValue, TableValue, known_items, likely

_GIB = 2**30
_WORTH_SAVING = 2**28
_MANY_PARTS = 4  # of a transition: observation, action, reward, and what follows
_NEXT = re.compile(r"^(next|new|nxt)_|_(next|new|nx|nxt|prime|tp1|t1)$|_$|2$|^ns$", re.IGNORECASE)
_BUFFER = re.compile(r"buffer|memory|replay|experience|transitions|storage", re.IGNORECASE)
_SHORT = re.compile(r"n_?steps?\b|nstep|multi_?step|stack|frames|window|history|lookback|horizon", re.IGNORECASE)
_LINES = {
    "model": "replay_buffer_class=holdall.sb3.ReplayBuffer",
    "rollout": "rollout_buffer_class=holdall.sb3.RolloutBuffer",
    "sb3": "from holdall.sb3 import ReplayBuffer",
    "cleanrl": "from holdall.cleanrl import ReplayBuffer",
    "torchrl": "storage=holdall.torchrl.HoldallStorage({rows})",
}


def _line(buffer: PlainBuffer) -> str:
    """Return what to paste."""
    own = "holdall.ReplayMemory(env.observation_space, env.action_space, capacity={rows})"
    return _LINES.get(buffer.library, own).format(rows=f"{buffer.rows:_}" if buffer.rows else "...")


@buffer_rule("M19", "large-buffer", Severity.INFO)
def large_buffer(buffer: PlainBuffer, machine: Machine) -> Iterator[Match]:
    """Says what a buffer above 1 GiB takes, how much of that is there already, and the line that stores it once.

    Why: Its pages are touched one by one as it fills, so that a run starts well and is killed hours later. Next
    observations, and the frames of a stack, are there several times.
    Fix: The line that the message names stores each frame once, and compresses what lies beyond a budget.

    Bad:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.obs = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)
                self.next_obs = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)

        memory = ReplayBuffer(100_000)

    Good:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.obs = np.zeros((capacity, 4), dtype=np.float32)
                self.next_obs = np.zeros((capacity, 4), dtype=np.float32)

        memory = ReplayBuffer(100_000)
    """
    if buffer.nbytes < _GIB:
        return
    at_least = "" if buffer.is_exact else "at least "
    held = "is on the GPU and " if buffer.is_on_gpu else ""
    rows = f" of {buffer.rows:,}" if buffer.rows else ""
    where = " on disk" if buffer.is_on_disk else ""
    text = f"{buffer.title}{rows} {held}takes {at_least}{sized(buffer.nbytes)}{where} once it is full"
    numbers = {"needed_bytes": buffer.nbytes, "repeated_bytes": buffer.repeated_bytes}
    if not buffer.is_buffer:
        yield Match(text, buffer.place, numbers)
        return
    if buffer.repeated_bytes:
        text += f"; {sized(buffer.repeated_bytes)} of it hold what is there already"
    yield Match(f"{text}; {_line(buffer)}", buffer.place, numbers)


@buffer_rule("P15", "images-stored-as-float", Severity.WARNING)
def images_stored_as_float(buffer: PlainBuffer, machine: Machine) -> Iterator[Match]:
    """Finds buffers that keep images as floats.

    Why: A pixel is a byte. As float32 it takes four, as float64 eight, in memory, in checkpoints and on the way to the
    GPU; the network gets float32 in any case.
    Fix: Keep images as `np.uint8`, and divide by 255 when a batch is used.

    Bad:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.states = np.zeros((capacity, 4, 84, 84), dtype=np.float32)

        memory = ReplayBuffer(100_000)

    Good:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.states = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)

        memory = ReplayBuffer(20_000)
    """
    if buffer.library in {"model", "rollout"} or buffer.rows is None:
        return  # M06 is about spaces
    wide = [one for one in buffer.fields if one.is_image and one.dtype.kind == "f"]
    cost = sum(buffer.rows * one.nbytes for one in wide)
    saved = sum(buffer.rows * one.nbytes * (one.dtype.itemsize - 1) // one.dtype.itemsize for one in wide)
    if saved < _WORTH_SAVING:
        return
    names = ", ".join(dict.fromkeys(one.name for one in wide if one.name)) or "observations"
    shape, dtype = wide[0].shape, wide[0].dtype
    text = f"{buffer.title} keeps {names} of shape {shape} as {dtype}: {sized(cost)}, {sized(cost - saved)} as uint8"
    yield Match(text, buffer.place, {"wide_bytes": cost, "saved_bytes": saved})


@script_rule("P04", "buffer-of-tuples", Severity.WARNING)
def buffer_of_tuples(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds replay buffers that are a deque or list of tuples, records or dicts of arrays.

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
    sizes = {buffer.place: buffer.nbytes for buffer in training.buffers if buffer.is_container}
    seen = set()
    for made in training.recorded("appended"):
        container, call = made.value, made.node
        limit = whole(likely(container.maxlen))
        parts = _parts(script, call, made.detail["item"])
        is_next = len(parts) >= _MANY_PARTS and (
            any(_NEXT.search(part) for part in parts) or _is_pair(made.detail["item"])
        )
        if not is_next or call in seen or not _is_replay(container, limit):
            continue
        seen.add(call)
        name = _written(call) or container.name
        size = "" if limit is None else f" of {limit:,}"
        place = script.place(call)
        cost = f": {sized(sizes[place])} once it is full" if place in sizes else ""
        text = f"{name}{size} keeps each transition as {len(parts)} objects, both observations among them{cost}"
        yield Match(text, place, {"capacity": "unknown" if limit is None else limit})


def _is_pair(item: object) -> bool:
    """Whether a transition has two arrays alike: an observation and the next one."""
    kinds = [(one.shape, one.dtype) for one in leaf_arrays(item) if one.shape]
    return len(set(kinds)) < len(kinds)


def _is_replay(container: ListValue, limit: int | None) -> bool:
    """Whether a container is no short window: a deque that is not small, or a list that is named as a buffer."""
    node = container.node
    if container.is_fixed:
        return (container.length or 0) >= MANY
    if not container.is_deque:
        return bool(_BUFFER.search(container.name))
    if limit is not None:
        return limit >= MANY
    given = argument_of(node, "maxlen", 1) if isinstance(node, ast.Call) else None
    return given is None or not _SHORT.search(ast.unparse(given))


def _parts(script: Script, call: ast.AST, item: object) -> list[str]:
    """Return the names that an appended tuple, record or dict is made of; empty for what is no name."""
    item = likely(item)
    if isinstance(item, ArrayValue):
        return []
    if isinstance(item, TableValue):
        return [str(key) for key in item]
    if isinstance(item, InstanceValue) and item.attributes:
        return list(item.attributes)
    if isinstance(call, ast.Call) and len(call.args) >= _MANY_PARTS:
        return [_name(one) for one in call.args]  # what the script passes to a function that appends it
    node = call.args[0] if isinstance(call, ast.Call) and len(call.args) == 1 else None
    if isinstance(call, ast.Subscript):  # memory[position] = state, action, ...
        node = getattr(script.parent(call), "value", None)
    node = (script.assigned(node) or node) if isinstance(node, ast.Name) else node
    items = node.elts if isinstance(node, ast.Tuple | ast.List) else node.args if isinstance(node, ast.Call) else []
    held = known_items(item) or []
    return [_name(one) for one in items] if len(items) >= len(held) else [""] * len(held)


def _name(node: ast.expr) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        inner = node.value if isinstance(node, ast.Subscript) else node.args[0] if node.args else node.func
        node = (
            inner
            if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Attribute)
            else node.func.value
        )
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _written(call: ast.AST) -> str:
    """Return the container as the call writes it."""
    if isinstance(call, ast.Subscript):
        return ast.unparse(call.value)
    func = getattr(call, "func", None)
    return ast.unparse(func.value) if isinstance(func, ast.Attribute) and func.attr in {"append", "appendleft"} else ""
