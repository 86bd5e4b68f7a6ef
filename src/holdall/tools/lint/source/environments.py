"""Spaces and environments as programs make them: by constructor, by id, in vectors, through wrappers.

In:  the name of a library's function or class and its arguments, or an object of the program's own environment class.
Out: a SpaceInfo, an Environments record, or UNKNOWN.
Ids are looked up in environments.json, which benchmarks/lint_environments.py makes from the installed packages.
Invariant: a wrapper that is not known here makes the observation unknown.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.schema import Leaf
from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source.arrays import ReturnedValues, space_sample
from holdall.tools.lint.source.spaces import SPACES, by_id, make_space
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    TableValue,
    candidates_of,
    known_items,
    length_of,
    likely,
    one_of,
)
from holdall.tools.lint.source.wrappers import ATARI_WRAPPERS, suited, wrapped

_GYMS = ("gymnasium", "gym", "gymnasium_robotics")
_VECTORS = {
    "DummyVecEnv": "dummy", "SubprocVecEnv": "subproc", "SyncVectorEnv": "sync", "AsyncVectorEnv": "async",
    "DummyVectorEnv": "dummy", "SubprocVectorEnv": "subproc", "ShmemVectorEnv": "subproc", "RayVectorEnv": "subproc",
    "SharedMemoryVecEnv": "subproc", "ShmemVecEnv": "subproc",
}  # fmt: skip
_MAKERS = {"make", "make_vec", "make_gym", "make_gymnasium"}


# ------------------------------------------------------------ calls


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case a kind
    """Return a space or environments; NotImplemented for any other function."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if last in SPACES and (package in _GYMS or ".spaces" in dotted):
        return make_space(interpreter, last, arguments, node)
    if (package in _GYMS and last in _MAKERS) or dotted == "gym_super_mario_bros.make" or dotted.endswith("retro.make"):
        return _made(interpreter, arguments, node, last)
    if last == "make_atari" and isinstance(likely(arguments.get(0, "env_id")), str):
        return _made(interpreter, arguments, node, last)
    if package in {"pfrl", "chainerrl"} and last == "wrap_deepmind":
        arguments.named.setdefault("frame_stack", True)
    if last == "register" and (package in _GYMS or ".registration" in dotted):
        for name, _ in candidates_of(arguments.get(0, "id")):
            if isinstance(name, str):
                interpreter.registered[name] = arguments
        return None
    if last in _VECTORS and package not in {"builtins"}:
        return _vector(interpreter, _VECTORS[last], arguments, node)
    if last in {"make_vec_env", "make_atari_env", "make_dmc_env"} and package in {
        "stable_baselines3",
        "sb3_contrib",
        "rl_zoo3",
    }:
        return _sb3_vector(interpreter, last, arguments, node)
    if dotted == "stable_baselines3.common.monitor.load_results":
        return UNKNOWN
    first = arguments.get(0, "env", None)
    if first is None or first is UNKNOWN:
        first = arguments.get(0, "venv", None)
    inner = environment_of(interpreter, first) if isinstance(first, Environments | InstanceValue | OneOf) else None
    if inner is None or (isinstance(first, InstanceValue) and not is_environment(first)):
        return NotImplemented
    if package == "supersuit":
        return suited(inner, last, arguments)
    if not (last[:1].isupper() or last in ATARI_WRAPPERS) or (
        package in {"torchrl", "tianshou"} and "Collector" in last
    ):
        return NotImplemented
    found = wrapped(inner, dotted, arguments, interpreter.place_here(node))
    found = _with_returned(interpreter, first, inner, found, dotted, arguments, node)
    is_changed = last.startswith("TransformObs") and found.observation is None and inner.observation is not None
    return _transformed(interpreter, inner, inner.observation, arguments, node) if is_changed else found


def _with_returned(
    interpreter: Any, first: Any, inner: Environments, found: Environments, dotted: str, arguments: Any, node: ast.AST
) -> Environments:
    """Keep what environments really return where a class of the program declares another space than it returns."""
    returned = inner.returned
    if isinstance(first, InstanceValue) and isinstance(first.made_of, ClassValue):
        result = likely(interpreter.call(interpreter.member(first, "reset"), type(arguments)(), node))
        seen = likely(result[0]) if isinstance(result, tuple) and result else result
        returned = _space_like(seen, interpreter.place_here(node))
    if returned is None or (inner.observation is not None and returned.leaves == inner.observation.leaves):
        return replace(found, returned=None)
    made = wrapped(replace(inner, observation=returned), dotted, arguments, interpreter.place_here(node))
    return replace(found, returned=made.observation, is_lazy=made.is_lazy, stack=made.stack)


def _space_like(seen: Any, place: Any) -> SpaceInfo | None:
    """Return the space of an array, if its shape and dtype are known."""
    if not isinstance(seen, ArrayValue) or seen.nbytes is None or seen.dtype is None:
        return None
    return SpaceInfo((Leaf("", tuple(whole(axis) or 0 for axis in seen.shape or ()), seen.dtype),), False, place)


def _transformed(interpreter: Any, env: Environments, space: Any, arguments: Any, node: ast.AST) -> Environments:
    """Return environments whose observations a function changes: it is followed with one of them."""
    function = likely(arguments.get(1, "func" if "func" in arguments.named else "f"))
    made = interpreter.call(function, type(arguments)([space_sample(space, node)]), node)
    return replace(env, observation=_space_like(made, interpreter.place_here(node)))


def _made(interpreter: Any, arguments: Any, node: ast.AST, maker: str) -> Any:
    """Make an environment by its id."""
    name = arguments.get(0, next((one for one in ("id", "game", "env_name") if one in arguments.named), "env_id"))
    if isinstance(name, OneOf):
        return one_of((_one_made(interpreter, one, arguments, node, maker), text) for one, text in candidates_of(name))
    return _one_made(interpreter, name, arguments, node, maker)


def _one_made(interpreter: Any, name: Any, arguments: Any, node: ast.AST, maker: str) -> Any:
    place = interpreter.place_here(node)
    steps = arguments.get(None, "max_episode_steps", UNKNOWN)
    plain = name if isinstance(name, str) else ""
    if ":" in plain:
        interpreter.import_module(plain.partition(":")[0])  # which registers it
    own = interpreter.registered.get(plain.rpartition(":")[2])
    if own is not None:
        made = _registered(interpreter, own, arguments, node)
        limit = own.get(None, "max_episode_steps", UNKNOWN) if steps is UNKNOWN else steps
        if made is not None:
            return replace(made, episode_steps=limit, place=place, origin=object(), env_id=plain)
    seen, acted, limit = by_id(plain) if plain else (None, None, UNKNOWN)
    if plain.startswith(("CarRacing", "LunarLander")) and acted is not None:
        acted = _continuous(plain, arguments, acted)
    kind = arguments.get(None, "obs_type", None)
    if seen is not None and kind in {"grayscale", "ram"} and len(seen.leaves[0].shape) == 3:
        shape = seen.leaves[0].shape[:2] if kind == "grayscale" else (128,)
        seen = replace(seen, leaves=(replace(seen.leaves[0], shape=shape),))
    count: object = 1
    if maker == "make_vec":
        count = arguments.get(1, "num_envs", 1)
    return Environments(
        count=count, vector="single" if maker != "make_vec" else "sync", observation=seen, action=acted,
        episode_steps=limit if steps is UNKNOWN else steps, place=place, origin=object(), env_id=plain,
    )  # fmt: skip


def _continuous(name: str, arguments: Any, action: SpaceInfo) -> SpaceInfo:
    """Return the action space of an environment that has a continuous and a discrete form."""
    asked = arguments.get(None, "continuous", None)
    if not isinstance(asked, bool):
        return action
    choices = 5 if name.startswith("CarRacing") else 4
    if not asked:
        return SpaceInfo((Leaf("", (), np.dtype(np.int64)),), False, action.place, {}, (choices,))
    return SpaceInfo((Leaf("", (3 if choices == 5 else 2,), np.dtype(np.float32)),), False, action.place)


def _registered(interpreter: Any, own: Any, arguments: Any, node: ast.AST) -> Environments | None:
    entry = own.get(None, "entry_point", UNKNOWN)
    kwargs = own.get(None, "kwargs", None)
    if isinstance(entry, str) and ":" in entry:
        module, _, name = entry.partition(":")
        entry = interpreter.member(interpreter.import_module(module), name)
    if not isinstance(entry, ClassValue | FunctionValue):
        return None
    named = dict(kwargs) if isinstance(kwargs, TableValue) else {}
    named |= {
        name: value for name, value in arguments.named.items() if name not in {"id", "render_mode", "max_episode_steps"}
    }
    given = type(arguments)([], {str(name): value for name, value in named.items()})
    return environment_of(interpreter, interpreter.call(entry, given, node))


def _vector(interpreter: Any, vector: str, arguments: Any, node: ast.AST) -> Any:
    functions = arguments.get(0, "env_fns")
    start = arguments.get(1, "start_method", None)
    place = interpreter.place_here(node)

    def one(made: Any) -> Environments:
        items = getattr(made, "items", None) if isinstance(made, ListValue) else known_items(made)
        inner = environment_of(interpreter, interpreter.called(items[0])) if items else None
        length = length_of(made)
        count: object = UNKNOWN if length is None else length
        base = inner or Environments()
        return replace(base, count=count, vector=vector, start_method=start, place=place, origin=object())

    if isinstance(functions, OneOf):
        found = [(one(made), text) for made, text in candidates_of(functions)]
        counts = {str(made.count): (made.count, text) for made, text in found}
        values, conditions = zip(*counts.values(), strict=True)
        return replace(found[0][0], count=OneOf(values, conditions) if len(values) > 1 else values[0])
    return one(functions)


def _sb3_vector(interpreter: Any, last: str, arguments: Any, node: ast.AST) -> Any:
    place = interpreter.place_here(node)
    first = likely(arguments.get(0, "env_id"))
    kwargs = arguments.get(None, "env_kwargs", None)
    named = dict(kwargs) if isinstance(kwargs, TableValue) else {}
    given = type(arguments)(
        [], {str(name): value for name, value in named.items()}, kwargs is None or isinstance(kwargs, TableValue)
    )
    if isinstance(first, str):
        given.values.append(first)
        one = _made(interpreter, given, node, "make")
        one = likely(one)
    else:
        made = (
            interpreter.call(first, given, node)
            if isinstance(first, ClassValue | FunctionValue)
            else interpreter.called(first)
        )
        one = environment_of(interpreter, made) or Environments()
    wrapper = arguments.get(5, "wrapper_class", None) if last == "make_vec_env" else None
    more = arguments.get(None, "wrapper_kwargs", None)
    if last == "make_atari_env":
        wrapper = Reference("stable_baselines3.common.atari_wrappers.AtariWrapper")
    if wrapper is not None:
        one = _apply_wrapper(interpreter, wrapper, one, more, node)
    kind = arguments.get(7 if last == "make_vec_env" else 6, "vec_env_cls", None)
    vector = _VECTORS.get(kind.last, "") if isinstance(kind, Reference) else "dummy" if kind is None else ""
    settings = arguments.get(None, "vec_env_kwargs", None)
    start = (
        settings.get("start_method") if isinstance(settings, TableValue) else UNKNOWN if settings is UNKNOWN else None
    )
    count = arguments.get(1, "n_envs", 1)
    return replace(one, count=count, vector=vector, start_method=start, place=place, origin=object())


def _apply_wrapper(interpreter: Any, wrapper: Any, one: Environments, more: Any, node: ast.AST) -> Environments:
    named = {str(name): value for name, value in more.items()} if isinstance(more, TableValue) else {}
    given = type(interpreter.no_arguments)([one], named, more is None or isinstance(more, TableValue))
    made = interpreter.call(likely(wrapper), given, node)
    return environment_of(interpreter, made) or replace(one, observation=None)


# ------------------------------------------------------------ the program's own classes


def is_environment(value: Any) -> bool:
    """Whether an object is one of the program's environments or wrappers."""
    if not isinstance(value, InstanceValue):
        return isinstance(value, Environments)
    made_of = value.made_of
    if isinstance(made_of, Reference):
        return False
    names = [one.rpartition(".")[2] for one in made_of.libraries()]
    looks = any(name.endswith(("Env", "Wrapper", "VecEnv", "VectorEnv")) for name in names)
    return (
        looks
        or "observation_space" in value.attributes
        or made_of.find("observation_space") is not UNKNOWN
        or ("env" in value.attributes and "step" in {name for one in made_of.lineage() for name in one.attributes})
    )


def environment_of(interpreter: Any, value: Any) -> Environments | None:
    """Return what is known of an environment, or a vector of them; None if the value is none."""
    if isinstance(value, OneOf):  # the first whose observations are known
        several = [one for one in (environment_of(interpreter, one) for one in value.values) if one is not None]
        return next((one for one in several if one.observation is not None), several[0] if several else None)
    if isinstance(value, Environments):
        return value
    if not is_environment(value):
        return None
    inner = environment_of(interpreter, value.attributes.get("env", value.attributes.get("venv", UNKNOWN)))
    found = inner or Environments(count=1, vector="single", origin=value)
    seen, acted = (_own_space(interpreter, value, name) for name in ("observation_space", "action_space"))
    is_given = any(seen_ is not None for seen_ in (seen, acted))
    base = replace(found, origin=found.origin or value)
    if seen is not None:
        base = replace(base, observation=seen if isinstance(seen, SpaceInfo) else None, is_lazy=False)
        base = replace(base, stack=base.stack if inner is not None and inner.observation == seen else 1)
    elif inner is None and not is_given:
        base = replace(base, observation=None)
    if acted is not None:
        base = replace(base, action=acted if isinstance(acted, SpaceInfo) else None)
    return base


def _own_space(interpreter: Any, value: InstanceValue, name: str) -> Any:
    """Return the space that an object has of its own; None if it has none, UNKNOWN if it is not known."""
    found = value.attributes.get(name)
    if found is None and isinstance(value.made_of, ClassValue):
        found = value.made_of.find(name)
        if isinstance(found, FunctionValue):
            found = interpreter.call_function(found, interpreter.no_arguments, value)
        elif found is UNKNOWN:
            return None
    if isinstance(found, OneOf):
        known = [one for one in found.values if isinstance(one, SpaceInfo)]
        return max(known, key=lambda one: one.nbytes) if known else UNKNOWN
    return found


def start(interpreter: Any, instance: InstanceValue, arguments: Any) -> None:
    """Do what a library's constructor does to an object of the program: a wrapper keeps what it wraps."""
    made_of = instance.made_of
    if not isinstance(made_of, ClassValue):
        return
    first = arguments.get(0, "env", UNKNOWN)
    first = arguments.get(0, "venv", UNKNOWN) if first is UNKNOWN else first
    if first is UNKNOWN:
        return
    known = [
        one
        for one in made_of.libraries()
        if one.rpartition(".")[2].endswith(("Wrapper", "WarpFrame", "FrameStack")) or "wrappers" in one
    ]
    if known and (inner := environment_of(interpreter, first)) is not None:
        result = wrapped(inner, known[0], arguments, interpreter.place_here(instance.node))
        instance.attributes.setdefault("env", likely(first) if result is inner else result)
    elif known:
        instance.attributes.setdefault("env", first)


def instance_member(interpreter: Any, base: InstanceValue, name: str, node: ast.AST | None) -> Any:
    """Return an attribute that an object of the program inherits from a library's class."""
    if is_environment(base):
        found = environment_of(interpreter, base)
        if found is not None and name in {
            "observation_space",
            "action_space",
            "unwrapped",
            "num_envs",
            "single_observation_space",
            "single_action_space",
        }:
            return member(interpreter, found, name, node) if name != "unwrapped" else base
    return BoundMethod(base, name)


def instance_method(interpreter: Any, owner: InstanceValue, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method that is inherited from a library's environment returns."""
    found = environment_of(interpreter, owner) if is_environment(owner) else None
    inner = owner.attributes.get("env", owner.attributes.get("venv"))
    if name in {"reset", "step"} and isinstance(owner.made_of, ClassValue) and inner is not None:
        older = owner.made_of.find(f"_{name}")  # what the first versions of gym called
        if isinstance(older, FunctionValue):
            return interpreter.call_function(older, arguments, owner)
        return _passed_on(interpreter, owner, inner, found, name, arguments, node)
    return NotImplemented if found is None else call_method(interpreter, found, name, arguments, node)


def _passed_on(
    interpreter: Any, owner: InstanceValue, inner: Any, found: Environments | None, name: str, arguments: Any, node: Any
) -> Any:
    """Return what a wrapper passes on from what it wraps, through its own `observation` if it has one."""
    made_of = owner.made_of
    result = likely(interpreter.call(interpreter.member(likely(inner), name), arguments, node))
    items = known_items(result)
    rest = (UNKNOWN,) if name == "reset" else (UNKNOWN,) * 4
    if isinstance(result, ReturnedValues):
        rest = result[1:]
    is_several = name == "step" or isinstance(result, ReturnedValues)
    seen = items[0] if items and is_several else result
    observe = made_of.find("observation") if isinstance(made_of, ClassValue) else UNKNOWN
    if observe is UNKNOWN and isinstance(made_of, ClassValue):
        observe = made_of.find("_observation")
    if isinstance(observe, FunctionValue):
        seen = interpreter.call_function(observe, type(arguments)([seen]), owner)
    if not is_measured(seen) and found is not None:
        seen = call_method(interpreter, found, name, arguments, node)[0]
    return ReturnedValues((seen, *rest))


def is_measured(seen: Any) -> bool:
    """Whether it is known what an environment returned: for an array, its bytes."""
    value = likely(seen)
    return value is not UNKNOWN and value is not None and (type(value) is not ArrayValue or value.nbytes is not None)


def as_declared(interpreter: Any, owner: InstanceValue, name: str, result: Any, node: ast.AST) -> Any:
    """Return what a class of the program returns from `reset` or `step`; what cannot be followed is as it declares."""
    result = likely(result)
    items = known_items(result)
    is_several = isinstance(result, tuple) and bool(items)
    if is_measured(items[0] if items and is_several else result) or isinstance(result, TableValue | InstanceValue):
        return result
    own = owner.attributes.get("observation_space")
    inner = environment_of(interpreter, owner.attributes.get("env", UNKNOWN))
    if not isinstance(own, SpaceInfo) or (inner is not None and inner.observation == own):
        return result
    sample = space_sample(own, owner.node or node)
    rest = tuple(items[1:]) if items and is_several else (UNKNOWN,) * (1 if name == "reset" else 4)
    return ReturnedValues((sample, *rest))


# ------------------------------------------------------------ members and methods of environments and spaces


def member(interpreter: Any, env: Environments, name: str, node: ast.AST | None) -> Any:  # noqa: PLR0911  one line each
    """Return an attribute of environments."""
    is_gym_vector = env.vector in {"sync", "async"}
    match name:
        case "single_observation_space":
            return env.observation or UNKNOWN
        case "single_action_space":
            return env.action or UNKNOWN
        case "observation_space" | "action_space":
            space = env.observation if name == "observation_space" else env.action
            if is_gym_vector and space is not None:
                count = env.number
                return (
                    UNKNOWN
                    if count is None
                    else replace(space, leaves=tuple(replace(one, shape=(count, *one.shape)) for one in space.leaves))
                )
            return space or UNKNOWN
        case "num_envs":
            return env.count
        case "unwrapped" | "env" | "venv" | "envs":
            return env
        case "_max_episode_steps":
            return env.episode_steps
        case "spec":
            return InstanceValue(
                Reference("gymnasium.EnvSpec"), {"max_episode_steps": env.episode_steps, "id": env.env_id or UNKNOWN}
            )
    return BoundMethod(env, name)


def call_method(interpreter: Any, owner: Any, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method of environments or of a space returns."""
    if isinstance(owner, SpaceInfo):
        return space_sample(owner, node) if name == "sample" else UNKNOWN
    if name in {"reset", "step"}:
        return _returned(owner, name, node)
    if name in {"get_env", "unwrapped"}:
        return owner
    return UNKNOWN


def _returned(env: Environments, name: str, node: ast.AST) -> Any:
    rest = (UNKNOWN,) if name == "reset" else (UNKNOWN,) * 4
    space = env.returned or env.observation
    if space is None:
        return ReturnedValues((UNKNOWN, *rest))
    if env.vector not in {"", "single"}:
        axis: Any = env.number if env.number is not None else None
        if axis is None:
            return ReturnedValues((UNKNOWN, *rest))
        space = replace(space, leaves=tuple(replace(one, shape=(axis, *one.shape)) for one in space.leaves))
    frames = env.stack if env.is_lazy else 1
    # One step's next observation is the following step's observation, from the reset on.
    return ReturnedValues((space_sample(space, env.origin or node, frames), *rest))


def enum_member(value: Any, owner: ClassValue) -> Any:
    """Return a member of an enumeration as an object that knows its value."""
    if not owner.extends("Enum", "IntEnum", "StrEnum") or isinstance(value, FunctionValue):
        return value
    return InstanceValue(owner, {"value": value, "name": UNKNOWN})
