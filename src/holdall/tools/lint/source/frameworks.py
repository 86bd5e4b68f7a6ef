"""What the classes and functions of reinforcement learning libraries make: models, buffers, collectors.

In:  the full name of a class or function, or an object of one and a method's name, and the arguments.
Out: an object whose arguments are kept, and a record of it with the interpreter. Stable-Baselines3 and its contrib
package, CleanRL's buffer, TorchRL, Tianshou; other programs' own buffers are followed as plain arrays and containers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, NotKnownError, Reference, algorithm_by_import, known, whole
from holdall.tools.lint.source import environments
from holdall.tools.lint.source.spaces import FLOAT32, UINT8, by_id, picture, shaped, widened
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
_SB3_BUFFERS = frozenset({
    "ReplayBuffer", "DictReplayBuffer", "RolloutBuffer", "DictRolloutBuffer", "NStepReplayBuffer", "HerReplayBuffer",
})  # fmt: skip
_BUFFERS = {
    **dict.fromkeys(_SB3, _SB3_BUFFERS), "cleanrl_utils": {"ReplayBuffer"},
    "torchrl": {"ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer",
                "PrioritizedReplayBuffer"},
    "tianshou": {"ReplayBuffer", "VectorReplayBuffer", "PrioritizedReplayBuffer", "PrioritizedVectorReplayBuffer",
                 "CachedReplayBuffer"},
}  # fmt: skip
LISTENING = {"listen", "subscribe", "create_subscription", "Subscriber"}  # functions that take callbacks of sensors
# Buffers that keep what an environment returns: the argument with their size, by position and name, and how often each
# observation is kept.
KEEPING = {
    "pfrl": (0, "capacity", 1), "chainerrl": (0, "capacity", 1), "rl": (None, "limit", 1),
    "agilerl": (None, "max_size", 2), "skrl": (0, "memory_size", 2), "d3rlpy": (None, "limit", 1),
    "tf_agents": (2, "max_length", 1),
}  # fmt: skip


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a library's class or function makes; NotImplemented if it is none of those here."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    is_kept = package in KEEPING or package in {"cpprb", "dopamine"}
    if last in _BUFFERS.get(package, ()) or (
        is_kept and (last.endswith(("Buffer", "Memory")) or last == "create_fifo_buffer")
    ):
        return _made(interpreter, "buffer", dotted, arguments, node)
    if package in {"lightning", "pytorch_lightning"} and last == "Trainer":
        return InstanceValue(Reference(dotted), {}, {}, node, interpreter.path)
    if last == "DQNAgent" and is_kept and isinstance(memory := arguments.likely(None, "memory"), InstanceValue):
        memory.attributes["processor"] = arguments.get(None, "processor", None)
    described = _LIBRARIES.get(package)
    return NotImplemented if described is None else described(interpreter, dotted, last, arguments, node)


def is_buffer(dotted: str) -> bool:
    """Whether a class is a buffer of Stable-Baselines3, or of CleanRL, which a program may extend."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    return package in {*_SB3, "cleanrl_utils"} and last in _BUFFERS[package]


def _made(interpreter: Any, what: str, dotted: str, arguments: CallArguments, node: ast.AST, **held: Any) -> Any:
    made = InstanceValue(Reference(dotted), held, {"call": arguments}, node, interpreter.path)
    interpreter.record(what, made, arguments, node)
    return made


def _sb3(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    owner, env = dotted.rpartition(".")[0], arguments.get(1, "env", None)
    if algorithm_by_import(dotted):
        return _made(interpreter, "model", dotted, arguments, node, env=env)
    if last == "load" and algorithm_by_import(owner):
        return _made(interpreter, "loaded", owner, arguments, node, env=env)
    if ".callbacks" in dotted and last[:1].isupper():
        return InstanceValue(Reference(dotted), {}, {"call": arguments}, node, interpreter.path)
    return NotImplemented


def call_method(interpreter: Any, owner: InstanceValue, name: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a method of a library's object returns."""
    if name in {"learn", "load_replay_buffer", "save_replay_buffer", "save"}:
        interpreter.record(name, owner, arguments, node)
        return owner if name == "learn" else None
    if name in {"add", "extend"} and "call" in owner.arguments and "buffer" in owner.kind.lower():
        owner.attributes |= {"added": arguments.get(0, "data"), "is_batch": name == "extend"}
        return UNKNOWN
    if name == "fit" and owner.kind.endswith(".Trainer"):
        return _fitted(interpreter, arguments.likely(0, "model"))
    if name == "save_hyperparameters":
        given = arguments.likely(0, "", None)
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
    if name == "append_transform" and isinstance(held := owner.attributes.get("env"), Environments):
        owner.attributes["env"] = interpreter.torchrl_env = transformed(held, arguments.get(0, "transform"))
    return owner.attributes.get("env", UNKNOWN) if name == "get_env" else UNKNOWN


def session_result(arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a session of TensorFlow computes: an array like the one that stands for it in the graph."""
    wanted = arguments.likely(0, "fetches")
    return wanted.made_by(node) if isinstance(wanted, ArrayValue) else UNKNOWN


_DOOM = {"vizdoom.DoomGame", "vizdoom.vizdoom.DoomGame"}
_RESOLUTION = re.compile(r"RES_(\d+)X(\d+)", re.IGNORECASE)


def _doom(interpreter: Any, game: InstanceValue, name: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Follow the settings of a game of ViZDoom, and return what its state shows."""
    given = arguments.likely(0, "", "")
    if name in {"set_screen_format", "set_screen_resolution"}:
        game.attributes[name.removeprefix("set_")] = getattr(given, "last", "")
    elif name == "load_config" and isinstance(given, str):
        for line in interpreter.repository.text_of(given, interpreter.here).splitlines():
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
    shown = ArrayValue.new(node, shape, UINT8)
    depth = replace(shown, shape=(height, width) if kind else None)
    state = {"screen_buffer": shown, "depth_buffer": depth, "labels_buffer": depth, "automap_buffer": shown}
    return InstanceValue(Reference("vizdoom.GameState"), state, node=node)


_HOOKS = (
    "setup", "on_fit_start", "on_train_start", "train_dataloader", "on_train_epoch_start", "on_train_batch_start",
    "training_step",
)  # fmt: skip


def _fitted(interpreter: Any, model: Any) -> None:
    """Follow what a trainer of PyTorch Lightning calls of a model of the program, in its order."""
    if isinstance(model, InstanceValue) and isinstance(model.made_of, ClassValue):
        for name in _HOOKS:
            if isinstance(found := model.made_of.find(name), FunctionValue):
                interpreter.call_function(found, CallArguments(is_complete=False), model)


# ------------------------------------------------------------ TorchRL


def _torchrl(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> InstanceValue:
    if last in {"GymEnv", "GymWrapper", "ParallelEnv", "SerialEnv", "TransformedEnv"}:
        env = interpreter.torchrl_env = _torchrl_env(interpreter, last, arguments, node)
        return InstanceValue(Reference(dotted), {"env": env}, node=node)
    return InstanceValue(Reference(dotted), {}, arguments.all_named() | {"call": arguments}, node, interpreter.path)


def _torchrl_env(interpreter: Any, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    first = arguments.likely(0, "env_name")
    if last == "GymEnv":
        env = likely(environments.call(interpreter, "gymnasium.make", CallArguments([first]), node))
        seen = env.observation if isinstance(env, Environments) else None
        is_drawn = seen is not None and not seen.images and arguments.get(None, "from_pixels", False) is True
        return replace(env, observation=None) if is_drawn else env
    if last == "GymWrapper":
        return environments.environment_of(interpreter, first) or UNKNOWN
    if last in {"ParallelEnv", "SerialEnv"}:
        inner = held_env(interpreter.called(arguments.get(1, "create_env_fn")))
        return UNKNOWN if inner is None else replace(inner, count=first, vector="subproc")
    inner = held_env(first)
    return UNKNOWN if inner is None else transformed(inner, arguments.get(1, "transform", None))


def held_env(value: Any) -> Environments | None:
    """Return the environments that an object of TorchRL holds."""
    value = likely(value)
    held = value.attributes.get("env") if isinstance(value, InstanceValue) else value
    return held if isinstance(held, Environments) else None


def transformed(env: Environments, transform: Any) -> Environments:
    """Return environments after one of TorchRL's transforms."""
    transform, seen = likely(transform), env.observation
    given = transform.arguments.get("call") if isinstance(transform, InstanceValue) else None
    if given is None or seen is None:
        return env
    kind = transform.kind.rpartition(".")[2]
    if kind == "Compose":
        for inner in given.values:
            env = transformed(env, inner)
        return env
    try:
        leaf = _leaf_after(kind, seen.leaves[0], given)
    except NotKnownError:
        return replace(env, observation=None)
    count = given.number(0, "N") if kind == "CatFrames" and leaf is not None else 1
    space = seen if leaf is None else replace(seen, leaves=(leaf, *seen.leaves[1:]))
    return replace(env, observation=space, stack=env.stack * count)


def _leaf_after(kind: str, leaf: Leaf, given: CallArguments) -> Leaf | None:
    """Return what one of TorchRL's transforms makes of an array; None if it leaves it as it is."""
    is_picture = len(leaf.shape) == 3
    match kind:
        case "ToTensorImage" if is_picture:
            return Leaf(leaf.name, (leaf.shape[2], *leaf.shape[:2]), FLOAT32)
        case "GrayScale" if is_picture:
            return shaped(leaf, 1, *leaf.shape[1:])
        case "Resize" if is_picture:
            sides = [known(one) for one in given.values[:2] or (None,)]
            return shaped(leaf, leaf.shape[0], sides[0], sides[-1])
        case "CatFrames" if leaf.shape:
            return widened(leaf, 0 if is_picture else -1, given.number(0, "N"))
        case "DoubleToFloat":
            return replace(leaf, dtype=FLOAT32)
    return None


# ------------------------------------------------------------ Tianshou


def _tianshou(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    if last == "make_atari_env":
        return _tianshou_atari(interpreter, arguments, node)
    if last not in {"Collector", "AsyncCollector"}:
        return NotImplemented
    env = environments.environment_of(interpreter, arguments.get(1, "env"))
    buffer = arguments.likely(2, "buffer", None)
    if isinstance(buffer, InstanceValue) and env is not None:
        buffer.attributes["env"] = env
    return InstanceValue(Reference(dotted), {}, {"call": arguments}, node)


def _tianshou_atari(interpreter: Any, arguments: CallArguments, node: ast.AST) -> Any:
    """Make what Tianshou's function returns: one environment, those to train on and those to test on."""
    stack, scaled = whole(arguments.likely(5, "frame_stack", 4)), arguments.likely(4, "scale", False)
    place = interpreter.place_here(node)
    is_known = stack and isinstance(scaled, int)
    seen = picture((stack or 0, 84, 84), place, scaled=bool(scaled)) if is_known else None
    acted = by_id(arguments.likely(0, "task"))[1]
    one = Environments(1, "single", None, seen, acted, stack=stack or 1, place=place, origin=object())
    counts = (arguments.get(2, "num_training_envs"), arguments.get(3, "num_test_envs"))
    return (one, *(replace(one, count=count, vector="subproc", origin=object()) for count in counts))


# ------------------------------------------------------------ environments of other libraries


_PLAYED = {
    "pistonball": ((457, 120, 3), 20), "cooperative_pong": ((280, 240, 3), 2), "prison": ((100, 300, 3), 8),
}  # fmt: skip
"""What the agents of PettingZoo's other games see, and how many there are."""
_SCREENS = {"rgb_image": (210, 160, 3), "grayscale_image": (210, 160), "ram": (128,)}


def _many_agents(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Make one of PettingZoo's environments: each of its agents counts as an environment."""
    if last not in {"env", "parallel_env", "raw_env"}:
        return NotImplemented
    place, game = interpreter.place_here(node), dotted.split(".")[-2]
    shape: tuple[int, ...]
    shape, count = _PLAYED.get(game.rpartition("_v")[0], ((), 2))
    if ".atari" in dotted:
        shape = _SCREENS.get(arguments.likely(None, "obs_type", "rgb_image"), ())
    seen = picture(shape, place) if shape else None
    return Environments(count, "dummy", None, seen, None, place=place, origin=object())


def _envpool(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    if last not in {"make", "make_gym", "make_gymnasium"}:
        return NotImplemented
    seen, acted, _ = by_id(arguments.get(0, "task_id"))
    if seen is not None and seen.images and len(seen.images[0].shape) == 3 and seen.images[0].shape[0] in {210, 250}:
        stack = whole(arguments.get(None, "stack_num", 4)) or 4
        seen = replace(seen, leaves=(Leaf("", (stack, 84, 84), UINT8),))
    count, place = arguments.get(None, "num_envs", 1), interpreter.place_here(node)
    return Environments(count, "sync", None, seen, acted, place=place, origin=object())


def _loaded(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Make an environment as TF-Agents does: by its id, through wrappers that are listed."""
    if last != "load":
        return NotImplemented
    made = CallArguments([arguments.get(0, "environment_name")])
    env = environments.call(interpreter, "gymnasium.make", made, node)
    wrappers = [one for name in ("gym_env_wrappers", "env_wrappers")
                for one in known_items(arguments.likely(None, name, ())) or ()]  # fmt: skip
    for wrapper in wrappers:
        is_own = isinstance(wrapper, Reference) and wrapper.last == "AtariPreprocessing"  # as Stable-Baselines3's
        made_of = Reference("stable_baselines3.common.atari_wrappers.AtariWrapper") if is_own else wrapper
        env = interpreter.call(made_of, CallArguments([env]), node)
    return env


def _control_suite(interpreter: Any, dotted: str, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Make an environment of the DeepMind Control Suite as dmc2gym does: pixels with the channels first."""
    if dotted != "dmc2gym.make":
        return NotImplemented
    height, width = (whole(arguments.likely(None, name, 84)) for name in ("height", "width"))
    place, is_drawn = interpreter.place_here(node), arguments.likely(None, "from_pixels", False) is True
    is_known = is_drawn and height is not None and width is not None
    seen = picture((3, height or 0, width or 0), place) if is_known else None
    return Environments(1, "single", None, seen, None, place=place, origin=object())


_LIBRARIES: dict[str, Callable[[Any, str, str, CallArguments, ast.AST], Any]] = {
    **dict.fromkeys(_SB3, _sb3), "torchrl": _torchrl, "tensordict": _torchrl, "tianshou": _tianshou,
    "pettingzoo": _many_agents, "envpool": _envpool, "tf_agents": _loaded, "dmc2gym": _control_suite,
}  # fmt: skip
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
    shape = (stack, *(side or 0 for side in sides))
    return replace(env, observation=picture(shape, env.place or SourceRange.whole("")), stack=stack)
