"""Rules about buffers of every library: whether they fit, whether they fill, and which copies they store."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from holdall.tools.lint.arguments import MAX_LENGTH
from holdall.tools.lint.finding import Place, Severity
from holdall.tools.lint.machine import Machine, format_share
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import get_budget_bytes, locate, locate_model, name_buffer, pair_with_models
from holdall.tools.lint.source import Source
from holdall.tools.probe.snapshot import (
    FoundArray,
    FoundBuffer,
    FoundEnvironment,
    FoundModel,
    Snapshot,
)
from holdall.units import format_bytes

_SAFE_SHARE = 0.8
"""Share of the memory that a buffer may take. The rest is for the interpreter, the libraries and the networks."""
_MIN_LARGE_BYTES = 2**30
"""Smallest size of a large buffer, and of copies that are reported on any machine."""
_MIN_SAVED_BYTES = 2**27
"""Smallest saving by uint8 images that is reported."""
_MIN_REPEATED_SHARE = 0.1
"""Share of the machine's memory from which on copies are reported."""
_MIN_REPLAY_ITEMS = 1_000
"""Smallest capacity of a deque that is taken for a replay buffer. Deques for n-step returns are shorter."""
_MIN_PARTS = 4
"""Fewest parts of a transition: observation, action, reward, next observation."""
_NEXT_NAME = re.compile(r"^(next|new|nxt)_|_(next|new|nx|nxt|prime|tp1|t1)$|_$|2$|^ns$", re.IGNORECASE)
"""Names of next observations, such as `next_obs`, `obs_t1`, `state_`, `state2` and `ns`."""
_BUFFER_NAME = re.compile(r"buffer|memory|replay|experience|transitions|storage", re.IGNORECASE)
_SHORT_NAME = re.compile(r"n_?steps?\b|nstep|multi_?step|stack|frames|window|history|lookback|horizon", re.IGNORECASE)
"""Names of containers for a few steps."""
_STACK_SETTINGS = ("n_stack", "stack_size", "num_stack")
_MIN_SQUARE_SIDE = 64
"""Smallest side of a square array that is taken for a picture although its name does not say so."""
_MIN_SIDE = 32
"""Smallest longer side of a picture. For an array of two axes, smallest shorter side."""
_MIN_SHORT_SIDE = 24
_MAX_CHANNELS = 16
_PICTURE_NAME = re.compile(r"frame|image|img|screen|pixel", re.IGNORECASE)


# ---------------------------------------------------------------- sizes and limits


@dataclass(frozen=True, slots=True)
class _Need:
    """Memory that a buffer, a memory of holdall or a failed allocation takes at most."""

    place: Place
    nbytes: int
    text: str
    """A sentence about the size."""
    advice: str
    is_certain: bool = True
    """Whether the run takes all of `nbytes`. If not, it may be too short to fill the buffer."""
    is_refused: bool = False
    """Whether the allocation failed."""


def _find_needs(run: Snapshot, machine: Machine) -> Iterator[_Need]:
    """Yield the needs for host memory: buffers, budgets of holdall's memories, and a failed allocation."""
    for buffer, model in pair_with_models(run.buffers, run):
        if _find_device(buffer) == "cpu":
            yield _make_buffer_need(buffer, model, machine)
    for memory, model in pair_with_models(run.memories, run):
        nbytes = get_budget_bytes(memory)
        if memory.store_device in {None, "cpu"}:
            text = f"the memory {memory.owner} may take its budget of {format_bytes(nbytes)}"
            advice = f"budget={int(machine.limit_bytes * _SAFE_SHARE):,} would be {format_share(_SAFE_SHARE, 1)} of it"
            yield _Need(locate(memory, model), nbytes, text, advice)
    failed = run.allocation
    if failed is not None and failed.is_exact:
        shape = f" of shape {failed.shape} and dtype {failed.dtype}" if failed.shape else ""
        text = f"an array{shape} of {format_bytes(failed.nbytes)} could not be allocated"
        yield _Need(Place("failed allocation"), failed.nbytes, text, "holdall plan says what fits", is_refused=True)


def _make_buffer_need(buffer: FoundBuffer, model: FoundModel | None, machine: Machine) -> _Need:
    resident_bytes = _count_resident(buffer, model)
    copied_bytes = buffer.flattened_bytes
    is_certain = buffer.kind == "rollout" or (model is not None and model.run_steps is not None)
    takes = "takes" if buffer.is_exact else "takes about"
    capacity = "" if buffer.transitions is None else f" of {buffer.transitions:,} transitions"
    text = f"{name_buffer(buffer, model)}{capacity} {takes} {format_bytes(resident_bytes)}"
    if not is_certain:
        text += " when it is full"
    if copied_bytes:
        text += f", and {format_bytes(resident_bytes + copied_bytes)} while it is flattened"
    return _Need(
        locate(buffer, model),
        resident_bytes + copied_bytes,
        text,
        _advise_capacity(buffer, machine),
        is_certain=is_certain,
    )


def _count_resident(buffer: FoundBuffer, model: FoundModel | None) -> int:
    """Return the bytes in RAM at the end of the run. Pages that are never written cost nothing."""
    steps = None if model is None else model.run_steps
    capacity = buffer.transitions
    if buffer.kind == "rollout" or steps is None or not capacity:
        return buffer.nbytes
    return buffer.nbytes * min(steps, capacity) // capacity


def _advise_capacity(buffer: FoundBuffer, machine: Machine) -> str:
    """Name the capacity that takes a safe share of the memory."""
    if not buffer.rows:
        return "holdall plan says what fits"
    bytes_per_row = (buffer.nbytes + buffer.flattened_bytes) / buffer.rows
    rows = int(machine.limit_bytes * _SAFE_SHARE // bytes_per_row)
    name = f"n_steps={rows:,}" if buffer.kind == "rollout" else f"a capacity of {rows * buffer.n_envs:,}"
    return f"{name} would take {format_share(_SAFE_SHARE, 1)} of it"


def _find_device(buffer: FoundBuffer) -> str:
    """Return the device, or `disk`, that has most of a buffer's bytes."""
    devices = buffer.bytes_on
    return max(devices, key=lambda device: devices[device])


def _match_limit(need: _Need, machine: Machine, limit: str) -> Match:
    """Return a match about a limit. It is at most a warning if the run may be too short to fill the buffer."""
    return Match(
        f"{need.text}; {limit}; {need.advice}",
        need.place,
        {"needed_bytes": need.nbytes, "limit_bytes": machine.limit_bytes},
        severity=None if need.is_certain else Severity.WARNING,
    )


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare each need with the limit, or with all RAM if a container has less: M03 reports the container."""
        limit_bytes = machine.ram_bytes if machine.is_contained else machine.limit_bytes
        for need in _find_needs(run, machine):
            if need.nbytes > limit_bytes or need.is_refused:
                yield _match_limit(need, machine, f"{machine.limit_name} is {format_bytes(machine.limit_bytes)}")


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare each need with the limit."""
        for need in _find_needs(run, machine):
            is_near = machine.limit_bytes * _SAFE_SHARE < need.nbytes <= machine.limit_bytes
            if is_near and not need.is_refused:
                share = format_share(need.nbytes, machine.limit_bytes)
                limit = f"that is {share} of {machine.limit_name} ({format_bytes(machine.limit_bytes)})"
                yield _match_limit(need, machine, limit)


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare each need with the container's limit."""
        if not machine.is_contained:
            return
        limit = (
            f"the host has {format_bytes(machine.ram_bytes)}, but {machine.limit_name} allows "
            f"{format_bytes(machine.limit_bytes)}"
        )
        for need in _find_needs(run, machine):
            if machine.limit_bytes < need.nbytes <= machine.ram_bytes and not need.is_refused:
                yield _match_limit(need, machine, limit)


# ---------------------------------------------------------------- copies in a buffer


@dataclass(frozen=True, slots=True)
class _Copies:
    """How often a full buffer stores each frame, or each observation if frames are not stacked."""

    times: int
    nbytes: int
    """Bytes of all copies but one, in the full buffer."""
    thing: str
    """`frame` or `observation`."""


def _count_copies(buffer: FoundBuffer, model: FoundModel | None, run: Snapshot) -> _Copies | None:
    """Return the copies of frames and of next observations in a replay buffer, or None if there are none."""
    arrays = [array for array in buffer.arrays if _get_item_shape(buffer, array) is not None]
    if buffer.kind not in {"replay", "arrays"} or not arrays:
        return None
    if buffer.is_sb3:
        observations = [array for array in arrays if array.name.partition(".")[0] == "observations"]
        successors = [array for array in arrays if array.name.partition(".")[0] == "next_observations"]
    else:
        largest = max(arrays, key=lambda array: array.nbytes)
        alike = [array for array in arrays if (array.shape, array.dtype) == (largest.shape, largest.dtype)]
        observations = alike[:1]
        successors = alike[1:2]
    stack = _find_stack(run.environments if model is None else [model.environment], buffer)
    stored_bytes = sum(array.nbytes for array in (*observations, *successors))
    copied_bytes = stored_bytes - sum(array.nbytes for array in observations) // stack
    times = stack * (2 if successors else 1)
    return _Copies(times, copied_bytes, "observation" if stack == 1 else "frame") if copied_bytes > 0 else None


def _find_stack(environments: Iterable[FoundEnvironment | None], buffer: FoundBuffer) -> int:
    """Return the frames that each stored observation consists of, if an axis of a stored array can contain them."""
    settings = [environment.settings for environment in environments if environment is not None]
    counts = {one.get(name) for one in settings for name in _STACK_SETTINGS} - {None}
    count = counts.pop() if len(counts) == 1 else None
    if not isinstance(count, int) or count < 2:
        return 1
    largest = max(buffer.arrays, key=lambda array: array.nbytes)
    return count if any(side % count == 0 for side in largest.shape[1:]) else 1


def _get_item_shape(buffer: FoundBuffer, array: FoundArray) -> tuple[int, ...] | None:
    """Return the shape of one transition in an array, or None if the array has no entry for each row."""
    if buffer.rows is None or array.shape[:1] != (buffer.rows,):
        return None
    has_lanes = buffer.kind != "arrays" and array.shape[1:2] == (buffer.n_envs,)
    return array.shape[2 if has_lanes else 1 :]


def _name_replacement(buffer: FoundBuffer) -> str:
    """Return the code that replaces `buffer` by holdall."""
    if buffer.is_sb3:
        kind = "rollout" if buffer.kind == "rollout" else "replay"
        return f"{kind}_buffer_class=holdall.sb3.{kind.title()}Buffer"
    if buffer.package == "cleanrl_utils":
        return "from holdall.cleanrl import ReplayBuffer"
    capacity = "..." if buffer.transitions is None else f"{buffer.transitions:_}"
    if buffer.package == "torchrl":
        return f"storage=holdall.torchrl.HoldallStorage({capacity})"
    return f"holdall.ReplayMemory(env.observation_space, env.action_space, capacity={capacity})"


class ObservationsStoredTwice(Rule):
    """Finds replay buffers in which repeated observations take at least 1 GiB, or at least a tenth of the memory.

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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the repeated bytes at the end of the run with the memory."""
        for buffer, model in pair_with_models(run.buffers, run):
            copies = _count_copies(buffer, model, run)
            if copies is None:
                continue
            resident = _count_resident(buffer, model)
            repeated = copies.nbytes * resident // buffer.nbytes
            if repeated < min(_MIN_REPEATED_SHARE * machine.limit_bytes, _MIN_LARGE_BYTES):
                continue
            times = "twice" if copies.times == 2 else f"{copies.times} times"
            text = (
                f"each {copies.thing} is stored {times}: {format_bytes(repeated)} of {format_bytes(resident)} "
                f"({format_share(repeated, resident)}) of {name_buffer(buffer, model)} are copies; "
                f"{_name_replacement(buffer)}"
            )
            numbers = {"repeated_bytes": repeated, "needed_bytes": resident, "times": copies.times}
            yield Match(text, locate(buffer, model), numbers)


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare `buffer_size` with the steps."""
        for model in run.learning_models:
            size = model.count("buffer_size")
            steps = model.run_steps
            if model.is_on_policy or size is None or steps is None or size <= steps:
                continue
            text = f"buffer_size={size:,} never fills in {steps:,} steps: {format_share(steps, size)} of it is used"
            yield Match(text, locate_model(model), {"buffer_size": size, "total_timesteps": steps})


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Divide `buffer_size` by the number of environments."""
        for model in run.learning_models:
            size = model.count("buffer_size")
            if model.is_on_policy or size is None or size % model.n_envs == 0:
                continue
            capacity = max(size // model.n_envs, 1) * model.n_envs
            text = f"buffer_size={size:,} over {model.n_envs} environments holds {capacity:,} transitions"
            yield Match(text, locate_model(model), {"buffer_size": size, "capacity": capacity})


class LargeBuffer(Rule):
    """Reports the size of a buffer above 1 GiB, how much of it is stored more than once, and the code that avoids it.

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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at the full size of every buffer."""
        for buffer, model in pair_with_models(run.buffers, run):
            if buffer.nbytes < _MIN_LARGE_BYTES:
                continue
            copies = _count_copies(buffer, model, run)
            about = "" if buffer.is_exact else "about "
            capacity = "" if buffer.transitions is None else f" of {buffer.transitions:,}"
            device = _find_device(buffer)
            where = "" if device == "cpu" else f" on {device}"
            size = f"{about}{format_bytes(buffer.nbytes)}{where}"
            text = f"{name_buffer(buffer, model)}{capacity} takes {size} when it is full"
            if copies is not None:
                text += f"; {format_bytes(copies.nbytes)} of it are copies"
            numbers = {"needed_bytes": buffer.nbytes, "repeated_bytes": 0 if copies is None else copies.nbytes}
            yield Match(f"{text}; {_name_replacement(buffer)}", locate(buffer, model), numbers)


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

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at the arrays of buffers that belong to no model. M06 is about spaces."""
        for buffer, model in pair_with_models(run.buffers, run):
            if buffer.is_sb3 or buffer.package == "holdall":
                continue
            wide = [array for array in buffer.arrays if _is_wide_image(buffer, array)]
            wide_bytes = sum(array.nbytes for array in wide)
            narrow_bytes = sum(prod(array.shape) for array in wide)
            if wide_bytes - narrow_bytes < _MIN_SAVED_BYTES:
                continue
            names = ", ".join(dict.fromkeys(array.name for array in wide if array.name)) or "observations"
            text = (
                f"{name_buffer(buffer, model)} stores {names} of shape {_get_item_shape(buffer, wide[0])} as "
                f"{wide[0].dtype}: {format_bytes(wide_bytes)}, {format_bytes(narrow_bytes)} as uint8"
            )
            numbers = {"wide_bytes": wide_bytes, "saved_bytes": wide_bytes - narrow_bytes}
            yield Match(text, locate(buffer, model), numbers)


def _is_wide_image(buffer: FoundBuffer, array: FoundArray) -> bool:
    """Return whether an array stores floats in the shape of pictures, or of stacks of pictures."""
    sides = sorted(_get_item_shape(buffer, array) or ())
    if "float" not in array.dtype:
        return False
    if len(sides) == 2:
        is_square = sides[0] == sides[1] >= _MIN_SQUARE_SIDE
        return sides[0] >= _MIN_SIDE and (is_square or _PICTURE_NAME.search(array.name) is not None)
    has_sides = len(sides) >= 3 and sides[-1] >= _MIN_SIDE and sides[-2] >= _MIN_SHORT_SIDE
    return has_sides and sides[0] <= _MAX_CHANNELS


# ---------------------------------------------------------------- deques and lists in a file


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
        for call, container in source.find_method_calls("append"):
            parts = _get_transition_parts(source, call.args[0]) if len(call.args) == 1 else []
            if len(parts) < _MIN_PARTS or not any(_NEXT_NAME.search(part) for part in parts):
                continue
            made = source.find_last_assignment(container)
            if made is None or not _is_replay(source, container, made):
                continue
            limit = None
            if isinstance(made, ast.Call):
                limit = source.evaluate_whole_number(MAX_LENGTH.find(made))
            size = "" if limit is None else f" of {limit:,}"
            text = (
                f"{ast.unparse(container)}{size} keeps each transition as {len(parts)} objects, both observations "
                "among them"
            )
            yield Match(text, source.get_place(call), {} if limit is None else {"capacity": limit})


def _get_transition_parts(source: Source, node: ast.expr) -> list[str]:
    """Return the names of the parts of an appended tuple, list, record or dict; empty names for other expressions."""
    match source.resolve(node):
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_get_last_name(item) for item in items]
        case ast.Dict(keys=keys):
            return [str(source.evaluate(key)) for key in keys]
        case ast.Call(args=args, keywords=keywords):
            return [*map(_get_last_name, args), *(keyword.arg or "" for keyword in keywords)]
    return []


def _get_last_name(node: ast.expr) -> str:
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
    """Return whether a container is a replay buffer: a deque that is not short, or a list with a buffer's name."""
    match made:
        case ast.Call(func=function) if source.get_full_name(function) == "collections.deque":
            given = MAX_LENGTH.find(made)
            limit = source.evaluate_whole_number(given)
            if limit is not None:
                return limit >= _MIN_REPLAY_ITEMS
            return given is None or not _SHORT_NAME.search(ast.unparse(given))
        case ast.List(elts=[]):
            name = ast.unparse(container)
            return bool(_BUFFER_NAME.search(name)) and not _SHORT_NAME.search(name)
    return False
