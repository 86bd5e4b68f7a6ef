"""Environments as programs make them: by id, in vectors, through wrappers, of classes of their own.

In:  the name of a library's function or class and its arguments, or an object of the program's own environment class.
Out: an Environments record, what `reset` and `step` return, or UNKNOWN.
Invariant: a wrapper that is not known makes the observation unknown.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from holdall.schema import Leaf
from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source.arrays import space_sample
from holdall.tools.lint.source.spaces import ATARI_WRAPPERS, FLOAT32, SPACES, box, by_id, discrete, make_space, wrapped
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    ReturnedValues,
    TableValue,
    candidates_of,
    known_items,
    length_of,
    likely,
    one_of,
)

_GYMS = ("gymnasium", "gym", "gymnasium_robotics")
_VECTORS = {
    "DummyVecEnv": "dummy", "SubprocVecEnv": "subproc", "SyncVectorEnv": "sync", "AsyncVectorEnv": "async",
    "DummyVectorEnv": "dummy", "SubprocVectorEnv": "subproc", "ShmemVectorEnv": "subproc", "RayVectorEnv": "subproc",
    "SharedMemoryVecEnv": "subproc", "ShmemVecEnv": "subproc",
}  # fmt: skip
_MAKERS = {"make", "make_vec", "make_gym", "make_gymnasium"}
_SB3_MAKERS = {"make_vec_env", "make_atari_env", "make_dmc_env"}
_SB3 = {"stable_baselines3", "sb3_contrib", "rl_zoo3"}
_BOTH_FORMS = {"CarRacing": (5, 3), "LunarLander": (4, 2)}
"""Environments with a discrete and a continuous form: their choices, and their numbers."""
_REST = {"reset": (UNKNOWN,), "step": (UNKNOWN,) * 4}  # what is returned beside an observation
_INHERITED = {
    "observation_space", "action_space", "unwrapped", "num_envs", "single_observation_space", "single_action_space",
}  # fmt: skip


# ------------------------------------------------------------ calls


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return a space or environments; NotImplemented for any other function."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    is_gym = package in _GYMS
    if last in SPACES and (is_gym or ".spaces" in dotted):
        return make_space(interpreter, last, arguments, node)
    is_maker = dotted == "gym_super_mario_bros.make" or dotted.endswith("retro.make") or (is_gym and last in _MAKERS)
    if is_maker or (last == "make_atari" and isinstance(arguments.likely(0, "env_id"), str)):
        return _made(interpreter, arguments, node, last)
    if package in {"pfrl", "chainerrl"} and last == "wrap_deepmind":
        arguments.named.setdefault("frame_stack", True)
    if last == "register" and (is_gym or ".registration" in dotted):
        names = [name for name, _ in candidates_of(arguments.get(0, "id")) if isinstance(name, str)]
        interpreter.registered |= dict.fromkeys(names, arguments)
        return None
    if last in _VECTORS and package != "builtins":
        made = _vector(interpreter, _VECTORS[last], arguments, node)
        return replace(made, autoreset=_autoreset(arguments)) if package == "gymnasium" else made
    if last in _SB3_MAKERS and package in _SB3:
        return _sb3_vector(interpreter, last, arguments, node)
    if dotted == "stable_baselines3.common.monitor.load_results":
        return UNKNOWN
    first = arguments.get(0, "env venv", None)
    inner = environment_of(interpreter, first) if isinstance(first, Environments | InstanceValue | OneOf) else None
    if inner is None or (isinstance(first, InstanceValue) and not is_environment(first)):
        return NotImplemented
    place = interpreter.place_here(node)
    if package == "supersuit":
        return wrapped(inner, dotted, arguments, place)
    is_collector = package in {"torchrl", "tianshou"} and "Collector" in last
    if is_collector or not (last[:1].isupper() or last in ATARI_WRAPPERS):
        return NotImplemented
    found = wrapped(inner, dotted, arguments, place)
    found = found if dotted.startswith("gymnasium.wrappers.") else replace(found, autoreset=None)
    found = _with_returned(interpreter, first, inner, found, dotted, arguments, node)
    if not last.startswith("TransformObs") or found.observation is not None or inner.observation is None:
        return found
    function = arguments.likely(1, "func f")  # it is followed with one of the observations
    made = interpreter.call(function, CallArguments([space_sample(inner.observation, node)]), node)
    return replace(inner, observation=_space_like(made, place))


def _with_returned(
    interpreter: Any, first: Any, inner: Environments, found: Environments, dotted: str, arguments: Any, node: ast.AST
) -> Environments:
    """Keep what environments really return where a class of the program declares another space than it returns."""
    returned, place = inner.returned, interpreter.place_here(node)
    if isinstance(first, InstanceValue) and isinstance(first.made_of, ClassValue):
        result = likely(interpreter.call(interpreter.member(first, "reset"), CallArguments(), node))
        seen = likely(result[0]) if isinstance(result, tuple) and result else result
        returned = _space_like(seen, place)
    if returned is None or (inner.observation is not None and returned.leaves == inner.observation.leaves):
        return replace(found, returned=None)
    made = wrapped(replace(inner, observation=returned), dotted, arguments, place)
    return replace(found, returned=made.observation, is_lazy=made.is_lazy, stack=made.stack)


def _space_like(seen: Any, place: Any) -> SpaceInfo | None:
    """Return the space of an array, if its shape and dtype are known."""
    if not isinstance(seen, ArrayValue) or seen.nbytes is None or seen.dtype is None:
        return None
    return box(tuple(whole(axis) or 0 for axis in seen.shape or ()), seen.dtype, place)


def _made(interpreter: Any, arguments: CallArguments, node: ast.AST, maker: str) -> Any:
    """Make an environment by its id."""
    names = candidates_of(arguments.get(0, "id game env_name env_id"))
    return one_of([(_one_made(interpreter, name, arguments, node, maker), text) for name, text in names])


def _one_made(interpreter: Any, name: Any, arguments: CallArguments, node: ast.AST, maker: str) -> Environments:
    place, plain = interpreter.place_here(node), name if isinstance(name, str) else ""
    if ":" in plain:
        interpreter.import_module(plain.partition(":")[0])  # which registers it
    own = interpreter.registered.get(plain.rpartition(":")[2])
    made = None if own is None else _registered(interpreter, own, arguments, node)
    steps, is_vector = arguments.get(None, "max_episode_steps", UNKNOWN), maker == "make_vec"
    mode = _autoreset(arguments) if is_vector else None
    if made is not None:
        limit = own.get(None, "max_episode_steps", UNKNOWN) if steps is UNKNOWN else steps
        return replace(made, episode_steps=limit, place=place, origin=object(), env_id=plain, autoreset=mode)
    seen, acted, limit = by_id(plain)
    game = next((one for one in _BOTH_FORMS if plain.startswith(one)), None)
    asked, kind = arguments.get(None, "continuous", None), arguments.get(None, "obs_type", None)
    if game is not None and acted is not None and isinstance(asked, bool):
        choices, numbers = _BOTH_FORMS[game]
        acted = box((numbers,), FLOAT32, acted.place) if asked else discrete(choices, acted.place)
    if seen is not None and kind in {"grayscale", "ram"} and len(seen.leaves[0].shape) == 3:
        shape = seen.leaves[0].shape[:2] if kind == "grayscale" else (128,)
        seen = replace(seen, leaves=(replace(seen.leaves[0], shape=shape),))
    return Environments(
        count=arguments.get(1, "num_envs", 1) if is_vector else 1, vector="sync" if is_vector else "single",
        observation=seen, action=acted, episode_steps=limit if steps is UNKNOWN else steps, place=place,
        origin=object(), env_id=plain, autoreset=mode,
    )  # fmt: skip


def _autoreset(arguments: CallArguments) -> str | None:
    """Return how a vector of Gymnasium resets: as it is asked to, in the next step by default; None if not known."""
    more, given = arguments.likely(None, "vector_kwargs", None), arguments.likely(None, "autoreset_mode", None)
    if isinstance(more, TableValue) and more.is_complete:
        given = more.get("autoreset_mode", given)
    elif more is not None:
        return None
    word = "nextstep" if given is None else str(getattr(given, "last", given)).lower().replace("_", "")
    return {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}.get(word)


def _registered(interpreter: Any, own: CallArguments, arguments: CallArguments, node: ast.AST) -> Environments | None:
    entry = own.get(None, "entry_point", UNKNOWN)
    if isinstance(entry, str) and ":" in entry:
        module, _, name = entry.partition(":")
        entry = interpreter.member(interpreter.import_module(module), name)
    if not isinstance(entry, ClassValue | FunctionValue):
        return None
    named = CallArguments.of(own.get(None, "kwargs", None)).named
    more = {key: one for key, one in arguments.named.items() if key not in {"id", "render_mode", "max_episode_steps"}}
    return environment_of(interpreter, interpreter.call(entry, CallArguments([], named | more), node))


def _vector(interpreter: Any, vector: str, arguments: CallArguments, node: ast.AST) -> Environments:
    found: list[tuple[Environments, str]] = []
    for made, text in candidates_of(arguments.get(0, "env_fns")):
        items = made.items if isinstance(made, ListValue) else known_items(made)
        inner = environment_of(interpreter, interpreter.called(items[0])) if items else None
        length = length_of(made)
        found.append((replace(inner or Environments(), count=UNKNOWN if length is None else length), text))
    counts = {str(made.count): (made.count, text) for made, text in found}
    values, conditions = zip(*counts.values(), strict=True)
    return replace(
        found[0][0], count=OneOf(values, conditions) if len(values) > 1 else values[0], vector=vector,
        start_method=arguments.get(1, "start_method", None), place=interpreter.place_here(node), origin=object(),
    )  # fmt: skip


def _sb3_vector(interpreter: Any, last: str, arguments: CallArguments, node: ast.AST) -> Any:
    first, is_plain = arguments.likely(0, "env_id"), last == "make_vec_env"
    given = CallArguments.of(arguments.get(None, "env_kwargs", None))
    if isinstance(first, str):
        given.values.append(first)
        one = likely(_made(interpreter, given, node, "make"))
    else:
        is_own = isinstance(first, ClassValue | FunctionValue)
        made = interpreter.call(first, given, node) if is_own else interpreter.called(first)
        one = environment_of(interpreter, made) or Environments()
    wrapper = arguments.likely(5, "wrapper_class", None) if is_plain else None
    if last == "make_atari_env":
        wrapper = Reference("stable_baselines3.common.atari_wrappers.AtariWrapper")
    if wrapper is not None:
        passed = CallArguments.of(arguments.get(None, "wrapper_kwargs", None), one)
        one = environment_of(interpreter, interpreter.call(wrapper, passed, node)) or replace(one, observation=None)
    kind = arguments.get(7 if is_plain else 6, "vec_env_cls", None)
    vector = _VECTORS.get(kind.last, "") if isinstance(kind, Reference) else "dummy" if kind is None else ""
    settings = arguments.get(None, "vec_env_kwargs", None)
    start = settings.get("start_method") if isinstance(settings, TableValue) else None
    return replace(
        one, count=arguments.get(1, "n_envs", 1), vector=vector, place=interpreter.place_here(node), origin=object(),
        start_method=UNKNOWN if settings is UNKNOWN else start,
    )  # fmt: skip


# ------------------------------------------------------------ the program's own classes


def is_environment(value: Any) -> bool:
    """Whether an object is one of the program's environments or wrappers."""
    if not isinstance(value, InstanceValue):
        return isinstance(value, Environments)
    made_of = value.made_of
    if isinstance(made_of, Reference):
        return False
    return (
        any(name.endswith(("Env", "Wrapper", "VecEnv", "VectorEnv")) for name in made_of.libraries())
        or "observation_space" in value.attributes
        or made_of.find("observation_space") is not UNKNOWN
        or ("env" in value.attributes and any("step" in one.attributes for one in made_of.lineage()))
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
    found = replace(found, origin=found.origin or value, autoreset=None)  # the program may look at it itself
    seen, acted = (_own_space(interpreter, value, name) for name in ("observation_space", "action_space"))
    if seen is not None:
        is_same = inner is not None and inner.observation == seen
        space = seen if isinstance(seen, SpaceInfo) else None
        found = replace(found, observation=space, is_lazy=False, stack=found.stack if is_same else 1)
    if acted is not None:
        found = replace(found, action=acted if isinstance(acted, SpaceInfo) else None)
    return found


def _own_space(interpreter: Any, value: InstanceValue, name: str) -> Any:
    """Return the space that an object has of its own; None if it has none, UNKNOWN if it is not known."""
    found = value.attributes.get(name)
    if found is None and isinstance(value.made_of, ClassValue):
        found = value.made_of.find(name)
        if isinstance(found, FunctionValue):
            found = interpreter.call_function(found, CallArguments(), value)
        elif found is UNKNOWN:
            return None
    if isinstance(found, OneOf):
        known = [one for one in found.values if isinstance(one, SpaceInfo)]
        return max(known, key=lambda one: one.nbytes) if known else UNKNOWN
    return found


def start(interpreter: Any, instance: InstanceValue, arguments: CallArguments) -> None:
    """Do what a library's constructor does to an object of the program: a wrapper keeps what it wraps."""
    names = list(instance.made_of.libraries()) if isinstance(instance.made_of, ClassValue) else []
    if any(one.endswith(("VecEnvWrapper", "VecEnv")) for one in names):
        for at, name in ((1, "observation_space"), (2, "action_space")):
            if isinstance(space := arguments.likely(at, name, None), SpaceInfo):
                instance.attributes[name] = space
    first = arguments.get(0, "env venv", UNKNOWN)
    known = [one for one in names if one.endswith(("Wrapper", "WarpFrame", "FrameStack")) or "wrappers" in one]
    if first is UNKNOWN or not known:
        return
    inner = environment_of(interpreter, first)
    if inner is not None:
        result = wrapped(inner, known[0], arguments, interpreter.place_here(instance.node))
        first = likely(first) if result is inner else result
    instance.attributes.setdefault("env", first)


def instance_member(interpreter: Any, base: InstanceValue, name: str) -> Any:
    """Return an attribute that an object of the program inherits from a library's class."""
    found = environment_of(interpreter, base) if name in _INHERITED else None
    if found is None:
        return BoundMethod(base, name)
    return base if name == "unwrapped" else member(found, name)


def instance_method(interpreter: Any, owner: InstanceValue, name: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a method that is inherited from a library's environment returns."""
    found = environment_of(interpreter, owner)
    inner = owner.attributes.get("env", owner.attributes.get("venv"))
    if name in _REST and isinstance(owner.made_of, ClassValue) and inner is not None:
        older = owner.made_of.find(f"_{name}")  # what the first versions of gym called
        if isinstance(older, FunctionValue):
            return interpreter.call_function(older, arguments, owner)
        return _passed_on(interpreter, owner, inner, found, name, arguments, node)
    return NotImplemented if found is None else call_method(found, name, node)


def _passed_on(
    interpreter: Any, owner: InstanceValue, inner: Any, found: Environments | None, name: str, arguments: Any, node: Any
) -> ReturnedValues:
    """Return what a wrapper passes on from what it wraps, through its own `observation` if it has one."""
    result = likely(interpreter.call(interpreter.member(likely(inner), name), arguments, node))
    items, is_returned = known_items(result), isinstance(result, ReturnedValues)
    seen = items[0] if items and (name == "step" or is_returned) else result
    methods = (owner.made_of.find(one) for one in ("observation", "_observation"))  # type: ignore[union-attr]
    observe = next((one for one in methods if one is not UNKNOWN), UNKNOWN)
    if isinstance(observe, FunctionValue):
        seen = interpreter.call_function(observe, CallArguments([seen]), owner)
    if not is_measured(seen) and found is not None:
        seen = call_method(found, name, node)[0]
    return ReturnedValues((seen, *(result[1:] if is_returned else _REST[name])))


def is_measured(seen: Any) -> bool:
    """Whether it is known what an environment returned: for an array, its bytes."""
    value = likely(seen)
    return value is not UNKNOWN and value is not None and (type(value) is not ArrayValue or value.nbytes is not None)


def as_declared(interpreter: Any, owner: InstanceValue, name: str, result: Any, node: ast.AST) -> Any:
    """Return what a class of the program returns from `reset` or `step`; what cannot be followed is as it declares."""
    result = likely(result)
    is_several = isinstance(result, tuple) and bool(result)
    if is_measured(result[0] if is_several else result) or isinstance(result, TableValue | InstanceValue):
        return result
    own = owner.attributes.get("observation_space")
    inner = environment_of(interpreter, owner.attributes.get("env", UNKNOWN))
    if not isinstance(own, SpaceInfo) or (inner is not None and inner.observation == own):
        return result
    rest = result[1:] if is_several else _REST[name]
    return ReturnedValues((space_sample(own, owner.node or node), *rest))


# ------------------------------------------------------------ members and methods of environments and spaces


def _batched(space: SpaceInfo, count: int) -> SpaceInfo:
    """Return the space of several values, one below the other."""
    return replace(space, leaves=tuple(Leaf(one.name, (count, *one.shape), one.dtype) for one in space.leaves))


def member(env: Environments, name: str) -> Any:
    """Return an attribute of environments."""
    match name:
        case "observation_space" | "action_space" | "single_observation_space" | "single_action_space":
            space = env.observation if "observation" in name else env.action
            if space is None or name.startswith("single") or env.vector not in {"sync", "async"}:
                return space or UNKNOWN
            return UNKNOWN if env.number is None else _batched(space, env.number)
        case "num_envs":
            return env.count
        case "unwrapped" | "env" | "venv" | "envs":
            return env
        case "_max_episode_steps":
            return env.episode_steps
        case "spec":
            known = {"max_episode_steps": env.episode_steps, "id": env.env_id or UNKNOWN}
            return InstanceValue(Reference("gymnasium.EnvSpec"), known)
    return BoundMethod(env, name)


def call_method(owner: Environments | SpaceInfo, name: str, node: ast.AST) -> Any:
    """Return what a method of environments or of a space returns."""
    if isinstance(owner, SpaceInfo):
        return space_sample(owner, node) if name == "sample" else UNKNOWN
    if name not in _REST:
        return owner if name in {"get_env", "unwrapped"} else UNKNOWN
    space, is_one = owner.returned or owner.observation, owner.vector in {"", "single"}
    if space is None or (not is_one and owner.number is None):
        return ReturnedValues((UNKNOWN, *_REST[name]))
    space = space if is_one else _batched(space, owner.number or 0)
    # One step's next observation is the following step's observation, from the reset on.
    sample = space_sample(space, owner.origin or node, owner.stack if owner.is_lazy else 1)
    return ReturnedValues((sample, *_REST[name]))


def enum_member(value: Any, owner: ClassValue) -> Any:
    """Return a member of an enumeration as an object that knows its value."""
    if not owner.extends("Enum", "IntEnum", "StrEnum") or isinstance(value, FunctionValue):
        return value
    return InstanceValue(owner, {"value": value, "name": UNKNOWN})
