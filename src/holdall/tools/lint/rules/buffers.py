"""Rules about buffers of every library: whether they fit, whether they fill, and what they store more than once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine, format_share, format_size
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.source import Source, argument_of
from holdall.tools.lint.subjects import TrainedBuffer, TrainedModel

_SAFE_SHARE = 0.8
"""Share of the memory that a buffer may take. The rest is for the interpreter, the libraries and the networks."""
_MIN_LARGE_BYTES = 2**30
_MIN_SAVED_BYTES = 2**27
_MIN_REPEATED_SHARE = 0.1
_MIN_REPLAY_ITEMS = 1_000
"""Capacity from which a deque is taken for a replay buffer. Deques for n-step returns are shorter."""
_MIN_PARTS = 4
"""Parts of a transition: observation, action, reward, next observation."""
_NEXT_NAME = re.compile(r"^(next|new|nxt)_|_(next|new|nx|nxt|prime|tp1|t1)$|_$|2$|^ns$", re.IGNORECASE)
_BUFFER_NAME = re.compile(r"buffer|memory|replay|experience|transitions|storage", re.IGNORECASE)
_SHORT_NAME = re.compile(r"n_?steps?\b|nstep|multi_?step|stack|frames|window|history|lookback|horizon", re.IGNORECASE)
_REPLACEMENTS = {
    "cleanrl": "from holdall.cleanrl import ReplayBuffer",
    "torchrl": "storage=holdall.torchrl.HoldallStorage({capacity})",
}


def _replacement(buffer: TrainedBuffer) -> str:
    """Return the code that uses holdall instead of `buffer`."""
    if buffer.library == "sb3" and buffer.kind == "rollout":
        return "rollout_buffer_class=holdall.sb3.RolloutBuffer"
    if buffer.library == "sb3":
        return "replay_buffer_class=holdall.sb3.ReplayBuffer"
    own = "holdall.ReplayMemory(env.observation_space, env.action_space, capacity={capacity})"
    capacity = "..." if buffer.capacity is None else f"{buffer.capacity:_}"
    return _REPLACEMENTS.get(buffer.library, own).format(capacity=capacity)


def _describe_size(buffer: TrainedBuffer) -> str:
    """Say how large a buffer is, and when."""
    if buffer.kind == "memory":
        return f"{buffer.title} may take its budget of {format_size(buffer.nbytes)}"
    if buffer.kind == "refused":
        return f"{buffer.title} of {format_size(buffer.nbytes)} could not be allocated"
    takes = "takes" if buffer.is_exact else "takes about"
    capacity = "" if buffer.capacity is None else f" of {buffer.capacity:,} transitions"
    text = f"{buffer.title}{capacity} {takes} {format_size(buffer.resident_bytes)}"
    if not buffer.is_certain:
        text += " when it is full"
    if buffer.flatten_bytes:
        text += f", and {format_size(buffer.peak_bytes)} while it is flattened"
    return text


def _describe_fit(buffer: TrainedBuffer, machine: Machine) -> str:
    """Name the capacity that takes a safe share of the memory."""
    if buffer.kind == "memory":
        return f"budget={int(machine.limit_bytes * _SAFE_SHARE):,} would be {format_share(_SAFE_SHARE, 1)} of it"
    if buffer.capacity is None:
        return "holdall plan says what fits"
    bytes_per_row = (buffer.nbytes + buffer.flatten_bytes) * buffer.n_envs / buffer.capacity
    rows = int(machine.limit_bytes * _SAFE_SHARE // bytes_per_row)
    name = f"n_steps={rows:,}" if buffer.kind == "rollout" else f"a capacity of {rows * buffer.n_envs:,}"
    return f"{name} would take {format_share(_SAFE_SHARE, 1)} of it"


def _match_limit(buffer: TrainedBuffer, machine: Machine, limit: str) -> Match:
    """Return a match about a buffer and a limit. It is at most a warning if the run may be too short to fill it."""
    return Match(
        f"{_describe_size(buffer)}; {limit}; {_describe_fit(buffer, machine)}",
        buffer.place,
        {"needed_bytes": buffer.peak_bytes, "limit_bytes": machine.limit_bytes},
        severity=None if buffer.is_certain else Severity.WARNING,
    )


def _is_in_ram(buffer: TrainedBuffer) -> bool:
    return buffer.device == "cpu"


class BufferBeyondMemory(Rule):
    """Compares a buffer, as full as the run makes it, with the memory of the machine.

    The finding is a warning where the number of steps is unknown.

    Why: The pages of a buffer are touched one by one as it fills, so the run starts well and is killed hours later. The
    figure is the buffer alone; the interpreter, the libraries and the networks need memory in addition.
    Fix: The capacity that the message names, or `replay_buffer_class=holdall.sb3.ReplayBuffer`, which stores every
    observation once. `holdall plan` says what fits.

    Bad (limit_bytes=1MB, ram_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000).learn(100_000)

    Good (limit_bytes=1MB, ram_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000)
    """

    code = "M01"
    severity = Severity.ERROR

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Compare the peak with the memory that no container limits."""
        limit_bytes = machine.ram_bytes if machine.is_contained else machine.limit_bytes
        is_too_large = _is_in_ram(buffer) and buffer.peak_bytes > limit_bytes
        if is_too_large or buffer.kind == "refused":
            yield _match_limit(buffer, machine, f"{machine.limit_name} is {format_size(machine.limit_bytes)}")


class BufferNearLimit(Rule):
    """Warns if a buffer alone takes more than 80 % of the memory.

    Why: The rest must hold the interpreter, the libraries, the networks with their gradients and optimizer, and every
    environment. Close to the limit, the system starts to swap or to kill processes.
    Fix: The capacity that the message names, or a buffer that stores every observation once.

    Bad (limit_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=22_000).learn(100_000)

    Good (limit_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000)
    """

    code = "M02"
    severity = Severity.WARNING

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Compare the peak with the limit."""
        is_near = machine.limit_bytes * _SAFE_SHARE < buffer.peak_bytes <= machine.limit_bytes
        if is_near and _is_in_ram(buffer) and buffer.kind != "refused":
            share = format_share(buffer.peak_bytes, machine.limit_bytes)
            limit = f"that is {share} of {machine.limit_name} ({format_size(machine.limit_bytes)})"
            yield _match_limit(buffer, machine, limit)


class BufferBeyondContainer(Rule):
    """Finds a buffer that fits into the machine, but not into its container.

    The finding is a warning where the number of steps is unknown.

    Why: `free`, `psutil.virtual_memory()` and Stable-Baselines3's own warning show the host's memory. The kernel kills
    at the container's limit.
    Fix: A larger limit of the container (`docker run --memory`), or the capacity that the message names.

    Bad (limit_bytes=1MB, limit_name=control group /):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=50_000).learn(100_000)

    Good (limit_bytes=1MB, limit_name=control group /):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000)
    """

    code = "M03"
    severity = Severity.ERROR

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Compare the peak with the container's limit."""
        is_between = machine.limit_bytes < buffer.peak_bytes <= machine.ram_bytes
        if machine.is_contained and is_between and _is_in_ram(buffer) and buffer.kind != "refused":
            limit = (
                f"the host has {format_size(machine.ram_bytes)}, but {machine.limit_name} allows "
                f"{format_size(machine.limit_bytes)}"
            )
            yield _match_limit(buffer, machine, limit)


class ObservationsStoredTwice(Rule):
    """Finds replay buffers in which repeated observations take a tenth of the memory, or 1 GiB, or more.

    Why: `obs` and `next_obs` are two arrays, though the next observation of one step is the observation of the
    following one. In a stack of 4 frames, each frame is stored eight times.
    Fix: `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each frame once and gives the same samples.

    Bad (limit_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000).learn(100_000)

    Good (limit_bytes=1MB):
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=1_000).learn(100_000)
    """

    code = "M07"
    severity = Severity.WARNING

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Compare the repeated bytes, as full as the run makes the buffer, with the memory."""
        if not buffer.repeated_bytes:
            return
        repeated = buffer.repeated_bytes * buffer.resident_bytes // buffer.nbytes
        if repeated < min(_MIN_REPEATED_SHARE * machine.limit_bytes, _MIN_LARGE_BYTES):
            return
        times = buffer.copies_of_frame
        thing = "observation" if buffer.frame_stack == 1 else "frame"
        what = f"each {thing} is stored {'twice' if times == 2 else f'{times} times'}"
        share = format_share(repeated, buffer.resident_bytes)
        text = (
            f"{what}: {format_size(repeated)} of {format_size(buffer.resident_bytes)} ({share}) of {buffer.title} "
            f"are copies; {_replacement(buffer)}"
        )
        numbers = {"repeated_bytes": repeated, "needed_bytes": buffer.resident_bytes, "times": times}
        yield Match(text, buffer.place, numbers)


class BufferNeverFills(Rule):
    """Compares the capacity of the replay buffer with the steps of the run.

    Why: Pages that are never written take no memory, so a smaller buffer saves none here. But `save_replay_buffer`
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

    code = "M09"
    severity = Severity.INFO

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Compare `buffer_size` with the steps."""
        size = model.count("buffer_size")
        steps = model.total_timesteps
        if model.is_on_policy or size is None or steps is None or size <= steps:
            return
        text = f"buffer_size={size:,} never fills in {steps:,} steps: {format_share(steps, size)} of it is used"
        yield Match(text, model.place, {"buffer_size": size, "total_timesteps": steps})


class CapacityRoundedDown(Rule):
    """Reports the real capacity of a replay buffer that the number of environments does not divide.

    Why: Stable-Baselines3 divides `buffer_size` by the number of environments and drops the remainder.
    Fix: Make `buffer_size` a multiple of the number of environments.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=6), buffer_size=1_000).learn(100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8), buffer_size=1_000).learn(100_000)
    """

    code = "M10"
    severity = Severity.INFO

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Divide `buffer_size` by the number of environments."""
        size = model.count("buffer_size")
        if model.is_on_policy or size is None or size % model.n_envs == 0:
            return
        capacity = max(size // model.n_envs, 1) * model.n_envs
        text = f"buffer_size={size:,} over {model.n_envs} environments holds {capacity:,} transitions"
        yield Match(text, model.place, {"buffer_size": size, "capacity": capacity})


class LargeBuffer(Rule):
    """Reports what a buffer above 1 GiB takes, how much of it is stored more than once, and the code that avoids it.

    Why: The pages of a buffer are touched one by one as it fills, so a run starts well and is killed hours later. Next
    observations, and the frames of a stack, are stored several times.
    Fix: The code that the message names stores each frame once, and compresses within a budget.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(screen_height=84, screen_width=84), buffer_size=80_000).learn(100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(screen_height=84, screen_width=84), buffer_size=8_000).learn(100_000)
    """

    code = "M19"
    severity = Severity.INFO

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Look at the full size of buffers of other libraries and of the program's own."""
        if buffer.nbytes < _MIN_LARGE_BYTES or buffer.kind in {"memory", "refused"}:
            return
        about = "" if buffer.is_exact else "about "
        capacity = "" if buffer.capacity is None else f" of {buffer.capacity:,}"
        where = "" if buffer.device == "cpu" else f" on {buffer.device}"
        text = f"{buffer.title}{capacity} takes {about}{format_size(buffer.nbytes)}{where} when it is full"
        if buffer.repeated_bytes:
            text += f"; {format_size(buffer.repeated_bytes)} of it are copies"
        numbers = {"needed_bytes": buffer.nbytes, "repeated_bytes": buffer.repeated_bytes}
        yield Match(f"{text}; {_replacement(buffer)}", buffer.place, numbers)


class ImagesStoredAsFloat(Rule):
    """Finds buffers that store images as floats.

    Why: A pixel is a byte. As float32 it takes four bytes, as float64 eight, in memory, in checkpoints and on the way
    to the GPU. The network gets float32 in any case.
    Fix: Store images as `np.uint8`, and divide by 255 when a batch is used.

    Bad:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.states = np.zeros((capacity, 4, 84, 84), dtype=np.float32)

        memory = ReplayBuffer(2_000)

    Good:
        import numpy as np

        class ReplayBuffer:
            def __init__(self, capacity):
                self.states = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)

        memory = ReplayBuffer(2_000)
    """

    code = "P15"
    severity = Severity.WARNING

    def check_buffer(self, buffer: TrainedBuffer, machine: Machine) -> Iterator[Match]:
        """Look at the arrays of buffers that belong to no model. M06 is about spaces."""
        if buffer.library in {"sb3", "holdall"} or buffer.capacity is None:
            return
        wide = [part for part in buffer.fields if part.looks_like_image and part.dtype.kind == "f"]
        wide_bytes = sum(buffer.capacity * part.nbytes for part in wide)
        narrow_bytes = sum(buffer.capacity * part.elements for part in wide)
        if wide_bytes - narrow_bytes < _MIN_SAVED_BYTES:
            return
        names = ", ".join(dict.fromkeys(part.name for part in wide if part.name)) or "observations"
        text = (
            f"{buffer.title} stores {names} of shape {wide[0].shape} as {wide[0].dtype}: {format_size(wide_bytes)}, "
            f"{format_size(narrow_bytes)} as uint8"
        )
        yield Match(text, buffer.place, {"wide_bytes": wide_bytes, "saved_bytes": wide_bytes - narrow_bytes})


class BufferOfTuples(Rule):
    """Finds replay buffers that are a deque or list of tuples, records or dicts.

    Why: Every transition is a tuple of small objects, each observation is stored twice, and sampling collects them one
    by one in Python. A view into a larger array keeps all of that array alive, and pickling writes all of it.
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

    code = "P04"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for `append` of several named parts, a next observation among them, to a long deque or a buffer."""
        for call, container in source.method_calls("append"):
            parts = _transition_parts(source, call.args[0]) if len(call.args) == 1 else []
            if len(parts) < _MIN_PARTS or not any(_NEXT_NAME.search(part) for part in parts):
                continue
            made = source.last_assignment(container)
            if made is None or not _is_replay(source, container, made):
                continue
            limit = source.whole_number(argument_of(made, "maxlen", 1)) if isinstance(made, ast.Call) else None
            size = "" if limit is None else f" of {limit:,}"
            text = (
                f"{ast.unparse(container)}{size} keeps each transition as {len(parts)} objects, both observations "
                "among them"
            )
            yield Match(text, source.place(call), {} if limit is None else {"capacity": limit})


def _transition_parts(source: Source, node: ast.expr) -> list[str]:
    """Return the names of the parts of an appended tuple, list, record or dict; empty names for other expressions."""
    match source.resolve(node):
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_last_name(item) for item in items]
        case ast.Dict(keys=keys):
            return [str(source.constant(key)) for key in keys]
        case ast.Call(args=args, keywords=keywords):
            return [*map(_last_name, args), *(keyword.arg or "" for keyword in keywords)]
    return []


def _last_name(node: ast.expr) -> str:
    """Return the name in an expression such as `next_state`, `self.next_state`, `np.array(next_state)` or `a[i]`."""
    while True:
        match node:
            case ast.Subscript(value=inner) | ast.Call(args=[inner, *_]) | ast.Starred(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute(value=inner)):
                node = inner
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name
            case _:
                return ""


def _is_replay(source: Source, container: ast.expr, made: ast.expr) -> bool:
    """Return whether a container is a replay buffer: a deque that is not short, or a list with such a name."""
    match made:
        case ast.Call(func=function) if source.dotted(function) == "collections.deque":
            given = argument_of(made, "maxlen", 1)
            limit = source.whole_number(given)
            if limit is not None:
                return limit >= _MIN_REPLAY_ITEMS
            return given is None or not _SHORT_NAME.search(ast.unparse(given))
        case ast.List(elts=[]):
            name = ast.unparse(container)
            return bool(_BUFFER_NAME.search(name)) and not _SHORT_NAME.search(name)
    return False
