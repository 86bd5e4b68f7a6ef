"""What the classes and functions of reinforcement learning libraries make: models, buffers, collectors.

In:  the full name of a class or function, or an object of one and a method's name, and the arguments.
Out: an object whose arguments are kept, and a record of it with the interpreter. Stable-Baselines3 and its contrib
package, CleanRL's buffer, TorchRL, Tianshou; other programs' own buffers are followed as plain arrays and containers.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, Reference, SpaceInfo, algorithm_by_import, whole
from holdall.tools.lint.source import environments
from holdall.tools.lint.source.spaces import by_id
from holdall.tools.lint.source.values import (
    ArrayValue,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    TableValue,
    known_items,
    likely,
)

_SB3 = ("stable_baselines3", "sb3_contrib")
_SB3_BUFFERS = {
    "ReplayBuffer", "DictReplayBuffer", "RolloutBuffer", "DictRolloutBuffer", "NStepReplayBuffer", "HerReplayBuffer",
}  # fmt: skip
_TORCHRL_STORAGES = {"LazyTensorStorage", "LazyMemmapStorage", "ListStorage", "TensorStorage"}
_TORCHRL_BUFFERS = {
    "ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer", "PrioritizedReplayBuffer",
}  # fmt: skip
_TIANSHOU_BUFFERS = {
    "ReplayBuffer", "VectorReplayBuffer", "PrioritizedReplayBuffer", "PrioritizedVectorReplayBuffer",
    "CachedReplayBuffer",
}  # fmt: skip
LISTENING = {"listen", "subscribe", "create_subscription", "Subscriber"}  # functions that take callbacks of sensors
_FLOAT32 = np.dtype(np.float32)
# Buffers that keep what an environment returns: the argument with their size, by position and name, and how often each
# observation is kept.
KEEPING = {
    "pfrl": (0, "capacity", 1), "chainerrl": (0, "capacity", 1), "rl": (None, "limit", 1),
    "agilerl": (None, "max_size", 2), "skrl": (0, "memory_size", 2), "d3rlpy": (None, "limit", 1),
    "tf_agents": (2, "max_length", 1),
}  # fmt: skip


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911  one case for each library
    """Return what a library's class or function makes; NotImplemented if it is none of those here."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if is_buffer(dotted):
        return _made(interpreter, "buffer", dotted, arguments, node)
    if package in _SB3:
        return _sb3(interpreter, dotted, last, arguments, node)
    if package == "pettingzoo" and last in {"env", "parallel_env", "raw_env"}:
        return _many_agents(interpreter, dotted, arguments, node)
    if package == "envpool" and last in {"make", "make_gym", "make_gymnasium"}:
        return _envpool(interpreter, arguments, node)
    if package == "tf_agents" and last == "load":
        return _loaded(interpreter, arguments, node)
    if dotted == "dmc2gym.make":
        return _control_suite(interpreter, arguments, node)
    if package in {"torchrl", "tensordict"}:
        return _torchrl(interpreter, dotted, last, arguments, node)
    if package == "tianshou":
        return _tianshou(interpreter, dotted, last, arguments, node)
    if package in {"lightning", "pytorch_lightning"} and last == "Trainer":
        return InstanceValue(Reference(dotted), {}, {}, node, interpreter.path)
    if package in KEEPING or package in {"cpprb", "dopamine"}:
        if last.endswith(("Buffer", "Memory")) or last == "create_fifo_buffer":
            return _made(interpreter, "buffer", dotted, arguments, node)
        if last == "DQNAgent" and isinstance(memory := likely(arguments.get(None, "memory")), InstanceValue):
            memory.attributes["processor"] = arguments.get(None, "processor", None)
    return NotImplemented


def is_buffer(dotted: str) -> bool:
    """Whether a class is a buffer of Stable-Baselines3, or of CleanRL, which a program may extend."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    return (package in _SB3 and last in _SB3_BUFFERS) or (last == "ReplayBuffer" and package == "cleanrl_utils")


def _made(interpreter: Any, what: str, dotted: str, arguments: Any, node: ast.AST, **detail: Any) -> InstanceValue:
    made = InstanceValue(Reference(dotted), {}, {"call": arguments}, node, interpreter.path)
    interpreter.record(what, made, arguments, node, **detail)
    return made


def _sb3(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:
    owner = dotted.rpartition(".")[0]
    if algorithm_by_import(dotted):
        return _model(interpreter, dotted, arguments, node)
    if last == "load" and algorithm_by_import(owner):
        made = InstanceValue(Reference(owner), {"env": arguments.get(1, "env", None)}, {"call": arguments}, node)
        interpreter.record("loaded", made, arguments, node)
        return made
    if ".callbacks" in dotted and last[:1].isupper():
        return InstanceValue(Reference(dotted), {}, {"call": arguments}, node, interpreter.path)
    return NotImplemented


def _model(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> InstanceValue:
    env = arguments.get(1, "env", None)
    made = InstanceValue(Reference(dotted), {"env": env}, {"call": arguments}, node, interpreter.path)
    interpreter.record("model", made, arguments, node)
    return made


def start_model(interpreter: Any, instance: InstanceValue, dotted: str, arguments: Any) -> None:
    """Record a model of a class of the program that extends one of Stable-Baselines3's."""
    instance.arguments["call"] = arguments
    instance.attributes.setdefault("env", arguments.get(1, "env", None))
    interpreter.record("model", instance, arguments, instance.node or interpreter.anchor, dotted=dotted)


def call_method(interpreter: Any, owner: InstanceValue, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911  one case each
    """Return what a method of a library's object returns."""
    if name == "learn":
        interpreter.record("learn", owner, arguments, node)
        return owner
    if name in {"load_replay_buffer", "save_replay_buffer", "save"}:
        interpreter.record(name, owner, arguments, node)
        return None
    if name in {"add", "extend"} and "call" in owner.arguments and "buffer" in owner.kind.lower():
        owner.attributes["added"] = arguments.get(0, "data")
        owner.attributes["is_batch"] = name == "extend"
        return UNKNOWN
    if name == "fit" and owner.kind.endswith(".Trainer"):
        _fitted(interpreter, likely(arguments.get(0, "model")), node)
        return None
    if name == "save_hyperparameters":
        given = likely(arguments.get(0, "", None))
        entries = given.items() if isinstance(given, TableValue) else interpreter.scope.names.items()
        kept = ((key, value) for key, value in entries if value is not owner)
        owner.attributes["hparams"] = given if isinstance(given, InstanceValue) else TableValue(kept, attributes=True)
        return None
    if name in LISTENING:
        interpreter.follow_callbacks(arguments, node)
    if name == "run":
        return session_result(arguments, node)
    if owner.kind in _DOOM:
        return _doom(interpreter, owner, name, arguments, node)
    if name == "get_env":
        return owner.attributes.get("env", UNKNOWN)
    if name == "append_transform":
        transform = arguments.get(0, "transform")
        held = owner.attributes.get("env")
        if isinstance(held, Environments):
            owner.attributes["env"] = interpreter.torchrl_env = transformed(held, transform)
    return UNKNOWN


def session_result(arguments: Any, node: ast.AST) -> Any:
    """Return what a session of TensorFlow computes: an array like the one that stands for it in the graph."""
    wanted = likely(arguments.get(0, "fetches"))
    return wanted.made_by(node) if isinstance(wanted, ArrayValue) else UNKNOWN


_DOOM = {"vizdoom.DoomGame", "vizdoom.vizdoom.DoomGame"}
_RESOLUTION = re.compile(r"RES_(\d+)X(\d+)", re.IGNORECASE)


def _doom(interpreter: Any, game: InstanceValue, name: str, arguments: Any, node: ast.AST) -> Any:
    """Follow the settings of a game of ViZDoom, and return what its state shows."""
    given = likely(arguments.get(0, "", ""))
    if name in {"set_screen_format", "set_screen_resolution"}:
        game.attributes[name.removeprefix("set_")] = getattr(given, "last", "")
    elif name == "load_config" and isinstance(given, str):
        here = (interpreter.scope.module or interpreter.main).path
        for line in interpreter.repository.text_of(given, here).splitlines():
            key, _, value = (one.strip() for one in line.partition("="))
            game.attributes.setdefault(key, value)
        game.attributes.setdefault("screen_format", "CRCGCB")  # as in the games that come with it
    if name != "get_state":
        return UNKNOWN
    sides = _RESOLUTION.search(game.attributes.get("screen_resolution", "")) or ("", 320, 240)
    width, height = int(sides[1]), int(sides[2])
    kind = str(game.attributes.get("screen_format", ""))
    flat = (height, width) if kind.endswith("8") else (height, width, 3)
    shape = (3, height, width) if kind.startswith("C") else flat if kind else None
    picture = ArrayValue(shape, np.dtype(np.uint8), frozenset({node}))
    depth = replace(picture, shape=(height, width) if kind else None)
    shown = {"screen_buffer": picture, "depth_buffer": depth, "labels_buffer": depth, "automap_buffer": picture}
    return InstanceValue(Reference("vizdoom.GameState"), shown, node=node)


_HOOKS = (
    "setup", "on_fit_start", "on_train_start", "train_dataloader", "on_train_epoch_start", "on_train_batch_start",
    "training_step",
)  # fmt: skip


def _fitted(interpreter: Any, model: Any, node: ast.AST) -> None:
    """Follow what a trainer of PyTorch Lightning calls of a model of the program, in its order."""
    if isinstance(model, InstanceValue) and isinstance(model.made_of, ClassValue):
        for name in _HOOKS:
            if isinstance(found := model.made_of.find(name), FunctionValue):
                interpreter.call_function(found, CallArguments(is_complete=False), model)


# ------------------------------------------------------------ TorchRL


def _torchrl(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:
    if last in {"GymEnv", "GymWrapper", "ParallelEnv", "SerialEnv", "TransformedEnv"}:
        made = InstanceValue(Reference(dotted), {"env": _torchrl_env(interpreter, last, arguments, node)}, node=node)
        interpreter.torchrl_env = made.attributes["env"]
        return made
    if last in _TORCHRL_BUFFERS:
        return _made(interpreter, "buffer", dotted, arguments, node)
    named = {str(i): value for i, value in enumerate(arguments.values)} | arguments.named
    return InstanceValue(Reference(dotted), {}, named | {"call": arguments}, node, interpreter.path)


def _torchrl_env(interpreter: Any, last: str, arguments: Any, node: ast.AST) -> Any:
    first = likely(arguments.get(0, "env_name"))
    if last == "GymEnv":
        made = environments.call(interpreter, "gymnasium.make", CallArguments([first], {}), node)
        env = likely(made)
        if not isinstance(env, Environments) or env.observation is None:
            return env
        is_image = bool(env.observation.images)
        if arguments.get(None, "from_pixels", False) is True and not is_image:
            return replace(env, observation=None)
        return env
    if last == "GymWrapper":
        return environments.environment_of(interpreter, first) or UNKNOWN
    if last in {"ParallelEnv", "SerialEnv"}:
        made = interpreter.called(arguments.get(1, "create_env_fn"))
        inner = held_env(made)
        return replace(inner, count=first, vector="subproc") if inner is not None else UNKNOWN
    inner = held_env(first)
    return UNKNOWN if inner is None else transformed(inner, arguments.get(1, "transform", None))


def held_env(value: Any) -> Environments | None:
    """Return the environments that an object of TorchRL holds."""
    value = likely(value)
    held = value.attributes.get("env") if isinstance(value, InstanceValue) else value
    return held if isinstance(held, Environments) else None


def transformed(env: Environments, transform: Any) -> Environments:  # noqa: C901  one case for each transform
    """Return environments after one of TorchRL's transforms."""
    transform = likely(transform)
    seen = env.observation
    if not isinstance(transform, InstanceValue) or seen is None:
        return env
    given, kind = transform.arguments.get("call"), transform.kind.rpartition(".")[2]
    if kind == "Compose" and given is not None:
        for inner in given.values:
            env = transformed(env, inner)
        return env
    leaf = seen.leaves[0]
    shape: tuple[int, ...]
    match kind:
        case "ToTensorImage" if len(leaf.shape) == 3:
            shape, dtype = (leaf.shape[2], *leaf.shape[:2]), _FLOAT32
        case "GrayScale" if len(leaf.shape) == 3:
            shape, dtype = (1, *leaf.shape[1:]), leaf.dtype
        case "Resize" if given is not None and len(leaf.shape) == 3:
            sides = [whole(one) for one in given.values[:2]] or [None]
            if None in sides:
                return replace(env, observation=None)
            shape, dtype = (leaf.shape[0], sides[0] or 0, sides[-1] or 0), leaf.dtype
        case "CatFrames" if given is not None and leaf.shape:
            count = whole(given.get(0, "N"))
            if count is None:
                return replace(env, observation=None)
            axis = 0 if len(leaf.shape) == 3 else -1
            axes = list(leaf.shape)
            axes[axis] *= count
            shape, dtype = tuple(axes), leaf.dtype
            env = replace(env, stack=env.stack * count)
        case "DoubleToFloat":
            shape, dtype = leaf.shape, _FLOAT32
        case _:
            return env
    space = replace(seen, leaves=(Leaf(leaf.name, tuple(shape), dtype), *seen.leaves[1:]))
    return replace(env, observation=space)


# ------------------------------------------------------------ Tianshou


def _tianshou(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:
    if last == "make_atari_env":
        return _tianshou_atari(interpreter, arguments, node)
    if last in _TIANSHOU_BUFFERS:
        return _made(interpreter, "buffer", dotted, arguments, node)
    if last in {"Collector", "AsyncCollector"}:
        env = environments.environment_of(interpreter, arguments.get(1, "env"))
        buffer = likely(arguments.get(2, "buffer", None))
        if isinstance(buffer, InstanceValue) and env is not None:
            buffer.attributes["env"] = env
        return InstanceValue(Reference(dotted), {}, {"call": arguments}, node)
    return NotImplemented


def _tianshou_atari(interpreter: Any, arguments: Any, node: ast.AST) -> Any:
    """Make what Tianshou's function returns: one environment, those to train on and those to test on."""
    stack, scaled = whole(likely(arguments.get(5, "frame_stack", 4))), likely(arguments.get(4, "scale", False))
    place = interpreter.place_here(node)
    _, acted, _ = by_id(name) if isinstance(name := likely(arguments.get(0, "task")), str) else (None, None, None)
    seen = None
    if stack and isinstance(scaled, int):
        dtype = np.dtype(np.float32 if scaled else np.uint8)
        seen = SpaceInfo((Leaf("", (stack, 84, 84), dtype),), False, place, {"": (0, 1 if scaled else 255)})
    one = Environments(1, "single", None, seen, acted, stack=stack or 1, place=place, origin=object())
    counts = (arguments.get(2, "num_training_envs"), arguments.get(3, "num_test_envs"))
    return (one, *(replace(one, count=count, vector="subproc", origin=object()) for count in counts))


# ------------------------------------------------------------ environments of other libraries


_PLAYED = {
    "pistonball": ((457, 120, 3), 20), "cooperative_pong": ((280, 240, 3), 2), "prison": ((100, 300, 3), 8),
}  # fmt: skip
"""What the agents of PettingZoo's other games see, and how many there are."""


def _many_agents(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Environments:
    """Make one of PettingZoo's environments: each of its agents counts as an environment."""
    place, game = interpreter.place_here(node), dotted.split(".")[-2]
    kind = likely(arguments.get(None, "obs_type", "rgb_image"))
    shape: tuple[int, ...]
    shape, count = _PLAYED.get(game.rpartition("_v")[0], ((), 2))
    if ".atari" in dotted:
        shape = {"rgb_image": (210, 160, 3), "grayscale_image": (210, 160), "ram": (128,)}.get(kind, ())
    seen = SpaceInfo((Leaf("", shape, np.dtype(np.uint8)),), False, place, {"": (0, 255)}) if shape else None
    return Environments(count, "dummy", None, seen, None, place=place, origin=object())


def _envpool(interpreter: Any, arguments: Any, node: ast.AST) -> Environments:
    name, place = arguments.get(0, "task_id"), interpreter.place_here(node)
    seen, acted, _ = by_id(name) if isinstance(name, str) else (None, None, UNKNOWN)
    if seen is not None and seen.images and len(seen.images[0].shape) == 3 and seen.images[0].shape[0] in {210, 250}:
        stack = whole(arguments.get(None, "stack_num", 4)) or 4
        seen = replace(seen, leaves=(Leaf("", (stack, 84, 84), np.dtype(np.uint8)),))
    return Environments(arguments.get(None, "num_envs", 1), "sync", None, seen, acted, place=place, origin=object())


def _loaded(interpreter: Any, arguments: Any, node: ast.AST) -> Any:
    """Make an environment as TF-Agents does: by its id, through wrappers that are listed."""
    given = type(arguments)
    env = environments.call(interpreter, "gymnasium.make", given([arguments.get(0, "environment_name")]), node)
    wrappers = [one for name in ("gym_env_wrappers", "env_wrappers")
                for one in known_items(likely(arguments.get(None, name, ()))) or ()]  # fmt: skip
    for wrapper in wrappers:
        is_own = isinstance(wrapper, Reference) and wrapper.last == "AtariPreprocessing"  # as Stable-Baselines3's
        made_of = Reference("stable_baselines3.common.atari_wrappers.AtariWrapper") if is_own else wrapper
        env = interpreter.call(made_of, given([env]), node)
    return env


def _control_suite(interpreter: Any, arguments: Any, node: ast.AST) -> Environments:
    """Make an environment of the DeepMind Control Suite as dmc2gym does: pixels with the channels first."""
    sides = [whole(likely(arguments.get(None, name, 84))) for name in ("height", "width")]
    place, seen = interpreter.place_here(node), None
    pixels = likely(arguments.get(None, "from_pixels", False))
    if pixels is True and None not in sides:
        shape = (3, sides[0] or 0, sides[1] or 0)
        seen = SpaceInfo((Leaf("", shape, np.dtype(np.uint8)),), False, place, {"": (0, 255)})
    return Environments(1, "single", None, seen, None, place=place, origin=object())


_ROADS = ("highway", "merge", "roundabout", "intersection", "racetrack", "two-way", "exit", "lane-keeping", "u-turn")


def configured(env: Environments, settings: Any) -> Environments:
    """Return an environment of highway-env after its settings: what it observes is one of them."""
    table = likely(settings)
    wanted = likely(table.get("observation")) if isinstance(table, TableValue) else None
    if not env.env_id.startswith(_ROADS) or not isinstance(wanted, TableValue):
        return env
    sides = [whole(one) for one in known_items(likely(wanted.get("observation_shape", ()))) or ()]
    stack = whole(likely(wanted.get("stack_size", 1)))
    if wanted.get("type") != "GrayscaleObservation" or None in sides or stack is None:
        return replace(env, observation=None)
    leaf = Leaf("", (stack, *(side or 0 for side in sides)), np.dtype(np.uint8))
    place = env.place or SourceRange.whole("")
    return replace(env, observation=SpaceInfo((leaf,), False, place, {"": (0, 255)}), stack=stack)
