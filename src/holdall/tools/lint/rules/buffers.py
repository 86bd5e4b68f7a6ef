"""Rules about every buffer, whichever library it is from: its cost, the memory there is, what storing it well saves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, buffer_rule, run_rule, script_rule, search_rule
from holdall.tools.lint.run import (
    BufferNeed,
    ConfiguredRun,
    Machine,
    OneOf,
    PlainBuffer,
    buffer_need,
    candidates,
    percent,
    sized,
    whole,
)
from holdall.tools.lint.source.arrays import leaf_arrays
from holdall.tools.lint.source.containers import MANY
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, argument_of
from holdall.tools.lint.source.values import ArrayValue, InstanceValue, ListValue, TableValue, known_items, likely

_GIB = 2**30
_SAFE_SHARE = 0.8  # of the limit; the rest is for the interpreter, the libraries and the networks
_WORTH_SAVING = 2**27
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
    sizes = {buffer.place: buffer.nbytes for buffer in training.buffers if buffer.is_container and buffer.is_exact}
    seen = set()
    for made in training.recorded("appended"):
        container, call = made.value, made.node
        limit = whole(likely(container.maxlen))
        parts = _parts(script, call, made.detail["item"])
        is_next = len(parts) >= _MANY_PARTS and (
            any(_NEXT.search(part) for part in parts) or _is_pair(made.detail["item"])
        )
        if not is_next or call in seen or not _is_replay(container, limit) or _is_batch(training, container):
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
        if limit is None and 0 < (container.length or 0) < MANY:
            return False  # it is made again each time, and never gets longer
        return bool(_BUFFER.search(container.name)) and not _SHORT.search(container.name)
    if limit is not None:
        return limit >= MANY
    given = argument_of(node, "maxlen", 1) if isinstance(node, ast.Call) else None
    return given is None or not _SHORT.search(ast.unparse(given))


def _is_batch(training: TrainingReader, container: ListValue) -> bool:
    """Whether another module makes a new list in every round of a loop, and no object keeps it."""
    is_made_anew = not container.is_deque and container.rounds > 0
    interpreter = training.interpreter
    return is_made_anew and not interpreter.was_reached(container.node) and interpreter.owner_of(container) is None


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
    while True:
        match node:
            case ast.Subscript(value=inner) | ast.Call(args=[inner, *_]):
                node = inner
            case ast.Call(func=ast.Attribute(value=inner)) | ast.Call(func=inner):
                node = inner
            case _:
                return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _written(call: ast.AST) -> str:
    """Return the container as the call writes it."""
    if isinstance(call, ast.Subscript):
        return ast.unparse(call.value)
    func = getattr(call, "func", None)
    return ast.unparse(func.value) if isinstance(func, ast.Attribute) and func.attr in {"append", "appendleft"} else ""


def _largest_that_fits(run: ConfiguredRun, needed: BufferNeed, machine: Machine) -> str:
    """Say what would fit into a comfortable share of the limit."""
    layout = needed.layout
    per_row = (layout.nbytes + layout.flatten_bytes) / layout.rows
    fitting = int(int(machine.limit_bytes * _SAFE_SHARE) // per_row)
    size = f"n_steps={fitting:,}" if run.algorithm.on_policy else f"buffer_size={fitting * layout.n_envs:,}"
    return f"{size} would take {percent(_SAFE_SHARE, 1)} of it"


def _buffer_words(run: ConfiguredRun, needed: BufferNeed) -> str:
    size = "rollout" if run.algorithm.on_policy else "replay buffer"
    text = f"the {size} of {needed.layout.transitions:,} transitions {needed.words} {sized(needed.resident_bytes)}"
    if not needed.is_certain:
        text += " once it is full"
    if needed.layout.flatten_bytes:
        text += f", and {sized(needed.peak_bytes)} while it is flattened"
    return text


def _buffer_match(run: ConfiguredRun, needed: BufferNeed, machine: Machine, limit: str, **numbers: int) -> Match:
    """Return what is found about a buffer and its limit: a warning at most if the run may be too short to fill it."""
    return Match(
        f"{_buffer_words(run, needed)}{limit}; {_largest_that_fits(run, needed, machine)}",
        run.place_of("buffer_size", "n_steps"),
        {"needed_bytes": needed.peak_bytes, "limit_bytes": machine.limit_bytes} | numbers,
        severity=None if needed.is_certain else Severity.WARNING,
    )


@run_rule("M01", "buffer-beyond-memory", Severity.ERROR)
def buffer_beyond_memory(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the buffer, as full as the run makes it, with this machine's memory.

    A warning where the number of steps is not known.

    Why: The buffer's pages are touched one by one as it fills, so the run starts well and is killed hours later. The
    figure is the buffer alone; the interpreter, the libraries and the networks come on top.
    Fix: Take the capacity that the message names, or `replay_buffer_class=holdall.sb3.ReplayBuffer`, which stores every
    observation once. `holdall plan` says what fits.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=1_000_000).learn(2_000_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=400_000)
    """
    needed = buffer_need(run, machine)
    if needed and needed.peak_bytes > (machine.ram_bytes if machine.is_contained else machine.limit_bytes):
        yield _buffer_match(run, needed, machine, f"; {machine.limit_name} is {sized(machine.limit_bytes)}")


@run_rule("M02", "buffer-near-limit", Severity.WARNING)
def buffer_near_limit(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Warns if the buffer alone takes more than 80 % of the memory there is.

    Why: What is left has to hold the interpreter, the libraries, the networks with their gradients and optimizer, and
    every environment. On the way to the limit the system starts to swap or to kill.
    Fix: Take the capacity that the message names, or a buffer that stores every observation once.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=700_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=600_000)
    """
    needed = buffer_need(run, machine)
    if needed and machine.limit_bytes * _SAFE_SHARE < needed.peak_bytes <= machine.limit_bytes:
        share = percent(needed.peak_bytes, machine.limit_bytes)
        limit = f": {share} of {machine.limit_name} ({sized(machine.limit_bytes)})"
        yield _buffer_match(run, needed, machine, limit)


@run_rule("M03", "buffer-beyond-container", Severity.ERROR)
def buffer_beyond_container(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds a buffer that fits into the machine, but not into its container.

    A warning where the number of steps is not known.

    Why: `free`, `psutil.virtual_memory()` and Stable-Baselines3's own warning see the host's memory. The kernel kills
    at the container's limit.
    Fix: Raise the container's limit (`docker run --memory`), or take the capacity that the message names.

    Bad (camera, limit_bytes=16GiB, limit_name=control group /):
        SAC("MultiInputPolicy", Dog(), buffer_size=500_000).learn(2_000_000)

    Good (camera, limit_bytes=16GiB, limit_name=control group /):
        SAC("MultiInputPolicy", Dog(), buffer_size=300_000)
    """
    needed = buffer_need(run, machine)
    if needed and machine.is_contained and machine.limit_bytes < needed.peak_bytes <= machine.ram_bytes:
        allowed = f"{machine.limit_name} allows {sized(machine.limit_bytes)}"
        limit = f"; the host has {sized(machine.ram_bytes)}, but {allowed}"
        yield _buffer_match(run, needed, machine, limit, ram_bytes=machine.ram_bytes)


@run_rule("M09", "buffer-never-fills", Severity.INFO)
def buffer_never_fills(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the buffer's capacity with the steps of the run.

    Why: What is never written is never resident, so a smaller buffer saves no memory here; but `save_replay_buffer`
    writes the whole capacity to disk, and a measured peak says nothing about a longer run.
    Fix: Set `buffer_size` to the steps of the run.

    Bad:
        from stable_baselines3 import SAC
        model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=200_000)
        model.learn(total_timesteps=50_000)

    Good:
        from stable_baselines3 import SAC
        model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000)
        model.learn(total_timesteps=50_000)
    """
    size, steps = run.count("buffer_size"), run.total_timesteps
    if size is not None and steps is not None and size > steps:
        text = f"buffer_size={size:,} never fills in {steps:,} steps: {percent(steps, size)} of it is used"
        yield Match(text, run.place_of("buffer_size"), {"buffer_size": size, "total_timesteps": steps})


@run_rule("M10", "capacity-rounded-down", Severity.INFO)
def capacity_rounded_down(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Says how many transitions a replay buffer really holds when the number of environments does not divide it.

    Why: Stable-Baselines3 divides `buffer_size` by the number of environments and drops the rest.
    Fix: Make `buffer_size` a multiple of the number of environments.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=6), buffer_size=100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8), buffer_size=100_000)
    """
    size, count = run.count("buffer_size"), run.environments.number
    if size is None or count is None or size % count == 0:
        return
    held = max(size // count, 1) * count
    text = f"buffer_size={size:,} over {count} environments holds {held:,} transitions"
    yield Match(text, run.place_of("buffer_size"), {"buffer_size": size, "capacity": held})


@search_rule("M18", "comparison-never-fills", Severity.WARNING)
def comparison_never_fills(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Looks for a comparison of buffer sizes none of which the run fills.

    Why: A buffer's pages cost memory when they are written. Profiles of 200,000 and of 500,000 transitions take the
    same memory, and learn the same, in a run of 50,000 steps: the comparison measures nothing of what it compares.
    Fix: Train for more steps than the largest buffer holds, or pre-fill the buffers before measuring.

    Bad:
        from stable_baselines3 import SAC
        for buffer_size in (200_000, 300_000, 400_000, 500_000):
            model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=buffer_size)
            model.learn(total_timesteps=50_000)

    Good:
        from stable_baselines3 import SAC
        for buffer_size in (20_000, 50_000):
            model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=buffer_size)
            model.learn(total_timesteps=100_000)
    """
    searched = run.value("buffer_size")
    sizes = candidates(searched) if isinstance(searched, OneOf) else ()
    steps = [candidates(learn.total_timesteps.value) for learn in run.learns]
    if len(sizes) < 2 or len(steps) != 1 or not steps[0]:
        return
    longest = max(steps[0])
    if longest < min(sizes):
        yield Match(
            f"the sizes {min(sizes):,} to {max(sizes):,} are compared over {longest:,} steps, which fill none: "
            f"at most {percent(longest, min(sizes))} of the smallest is ever used",
            run.place_of("buffer_size"),
            {"smallest": min(sizes), "largest": max(sizes), "total_timesteps": longest},
        )
