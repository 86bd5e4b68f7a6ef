"""Spaces and environments as a script writes them: shapes, dtypes, how many, in which processes.

In:  `spaces.Box(0, 255, (84, 84, 3), np.uint8)`, a gymnasium space, or the expression that was passed as `env`.
Out: a SpaceInfo or an Environments record; None or UNKNOWN where a part is not known.
Invariant: a wrapper that is not known here makes the observation unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, KnownLength, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source.evaluate import Evaluator
from holdall.tools.lint.source.script import Function, argument_of
from holdall.tools.plan.buffer_layout import leaves_of

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_PACKAGES = ("gymnasium", "gym")

# AtariWrapper's own output; WarpFrame resizes to this by default.
ATARI_SHAPE = (84, 84, 1)
_VECTORS = {"DummyVecEnv": "dummy", "SubprocVecEnv": "subproc", "SyncVectorEnv": "sync", "AsyncVectorEnv": "async"}
# Wrappers that leave observations, actions and the number of environments as they are.
_TRANSPARENT = frozenset(
    {"Monitor", "VecMonitor", "VecCheckNan", "VecTransposeImage", "RecordEpisodeStatistics", "RecordVideo"}
    | {"VecVideoRecorder", "OrderEnforcing", "PassiveEnvChecker", "NormalizeReward", "ClipReward", "ClipRewardEnv"}
)
_DEEPEST = 12


def atari_space(place: SourceRange) -> SpaceInfo:
    """Return what AtariWrapper gives: one grey frame of 84 x 84."""
    return SpaceInfo((Leaf("", ATARI_SHAPE, np.dtype(np.uint8)),), is_dict=False, place=place, bounds={"": (0, 255)})


def space_of(space: Any, argument: str, place: SourceRange) -> SpaceInfo | None:
    """Return a gymnasium space as leaves and bounds; None if Stable-Baselines3 cannot store it."""
    try:
        leaves = leaves_of(space, argument)
    except HoldallError:
        return None
    children: Mapping[str, Any] = space.spaces if hasattr(space, "spaces") else {"": space}
    bounds = {
        name: (float(child.low.min()), float(child.high.max()))
        for name, child in children.items()
        if hasattr(child, "low") and hasattr(child, "high") and child.low.size
    }
    return SpaceInfo(leaves, hasattr(space, "spaces"), place, bounds)


def read_space(evaluator: Evaluator, node: ast.expr | None) -> SpaceInfo | None:
    """Read an expression that makes a space."""
    node = evaluator.script.assigned(node) if isinstance(node, ast.Name) else node
    if not isinstance(node, ast.Call):
        return None
    dotted = evaluator.script.dotted(node.func)
    if dotted.partition(".")[0] not in _PACKAGES:
        return None
    kind = dotted.rpartition(".")[2]
    place = evaluator.script.place(node)
    if kind == "Dict":
        return _dict(evaluator, node, place)
    leaf = _leaf(evaluator, node, kind)
    if leaf is None:
        return None
    bounds = {"": (evaluator.argument(node, 0, "low"), evaluator.argument(node, 1, "high"))} if kind == "Box" else {}
    return SpaceInfo((leaf,), is_dict=False, place=place, bounds=bounds)


def _dict(evaluator: Evaluator, node: ast.Call, place: SourceRange) -> SpaceInfo | None:
    leaves: list[Leaf] = []
    bounds: dict[str, tuple[object, object]] = {}
    for name, value in _children(evaluator, node):
        child = read_space(evaluator, value)
        if name is None or child is None or child.is_dict:
            return None
        leaves.append(Leaf(name, child.leaves[0].shape, child.leaves[0].dtype))
        bounds |= {name: child.bounds[""]} if child.bounds else {}
    return SpaceInfo(tuple(leaves), is_dict=True, place=place, bounds=bounds) if leaves else None


def _children(evaluator: Evaluator, node: ast.Call) -> Iterator[tuple[str | None, ast.expr | None]]:
    """Yield the entries of a Dict space; one without a name stands for entries that are not known."""
    given = [*node.args, *(k.value for k in node.keywords if k.arg in {"spaces", None})]
    for argument in given:
        entries = evaluator.script.assigned(argument) or argument
        if not isinstance(entries, ast.Dict):
            yield None, None
            return
        for key, value in zip(entries.keys, entries.values, strict=True):
            name = evaluator.value(key) if key is not None else UNKNOWN
            yield (name if isinstance(name, str) else None), value
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in {"spaces", "seed"}:
            yield keyword.arg, keyword.value


def _leaf(evaluator: Evaluator, node: ast.Call, kind: str) -> Leaf | None:
    match kind:
        case "Box":
            return _box(evaluator, node)
        case "Discrete":
            return Leaf("", (), np.dtype(np.int64))
        case "MultiBinary":
            count = whole(evaluator.argument(node, 0, "n"))
            return None if count is None else Leaf("", (count,), np.dtype(np.int8))
        case "MultiDiscrete":
            counts = evaluator.argument(node, 0, "nvec")
            return Leaf("", (len(counts),), np.dtype(np.int64)) if isinstance(counts, list | tuple) else None
    return None


def _box(evaluator: Evaluator, node: ast.Call) -> Leaf | None:
    dtype = evaluator.argument(node, 3, "dtype", Reference("numpy.float32"))
    name = dtype.last if isinstance(dtype, Reference) else dtype
    shape = evaluator.argument(node, 2, "shape")
    if not isinstance(name, str) or name not in _DTYPES or not isinstance(shape, list | tuple):
        return None
    axes = [whole(axis) for axis in shape]
    known = tuple(axis for axis in axes if axis is not None and axis >= 0)
    return Leaf("", known, np.dtype(name)) if len(known) == len(axes) else None


class EnvironmentReader:
    """Reads the environments of one script."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._script = evaluator.script
        self._depth = 0

    def read(self, node: ast.expr | None) -> Environments:
        """Describe what an expression makes, as far as it is certain."""
        if node is None or self._depth > _DEEPEST:
            return Environments()
        self._depth += 1
        try:
            return self._read(node)
        finally:
            self._depth -= 1

    def _read(self, node: ast.expr) -> Environments:
        match node:
            case ast.Constant(value=str()):
                return Environments(count=1, vector="single", place=self._script.place(node))
            case ast.Name():
                found = self._script.definition(node)
                made = self.read(found.value) if found and found.value else Environments()
                return replace(made, origin=found)
            case ast.Attribute():
                return self.read(self._evaluator.attribute_node(node))
            case ast.Call():
                return replace(self._called(node), place=self._script.place(node))
        return Environments()

    def _called(self, node: ast.Call) -> Environments:
        dotted = self._script.dotted(node.func)
        kind = dotted.rpartition(".")[2]
        if dotted in self._script.classes:
            return self._instance(self._script.classes[dotted])
        if dotted in self._script.functions:
            return self._returned(self._script.functions[dotted])
        if kind in _VECTORS:
            return self._vector(node, _VECTORS[kind])
        if kind in {"make_vec_env", "make_atari_env"}:
            return self._made(node, is_atari=kind == "make_atari_env")
        if kind == "make" and dotted.partition(".")[0] in {"gymnasium", "gym"}:
            steps = self._evaluator.argument(node, 99, "max_episode_steps")
            return Environments(count=1, vector="single", episode_steps=steps)
        return self._wrapped(node, kind) if node.args else Environments()

    # ------------------------------------------------------------ one environment

    def _instance(self, made: ast.ClassDef) -> Environments:
        observation, action = self._space_of(made, "observation_space"), self._space_of(made, "action_space")
        return Environments(count=1, vector="single", observation=observation, action=action)

    def _space_of(self, made: ast.ClassDef, name: str) -> SpaceInfo | None:
        in_class = self._script.bindings(made, name)
        stored = [
            self._script.parent(node)
            for node in ast.walk(made)
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        ]
        if len(stored) + len(in_class) != 1:
            return None
        statement = in_class[0].node if in_class else stored[0]
        return read_space(self._evaluator, getattr(statement, "value", None))

    def _callable(self, node: ast.expr | None) -> Environments:
        """Describe what calling a value makes: a class, a function, a lambda, or a call that returns one of them."""
        match node:
            case ast.Lambda(body=body):
                return self.read(body)
            case ast.Call():
                name = self._script.dotted(node.func)
                outer = self._script.functions.get(name)
                return self._callable(_only_return(outer)) if outer else Environments()
            case ast.Name(id=name):
                if name in self._script.classes:
                    return self._instance(self._script.classes[name])
                found = self._script.definition(node)
                if found and isinstance(found.node, Function):
                    return self._returned(found.node)
        return Environments()

    def _returned(self, function: Function) -> Environments:
        return self.read(_only_return(function))

    # ------------------------------------------------------------ several

    def _vector(self, node: ast.Call, vector: str) -> Environments:
        functions = node.args[0] if node.args else None
        count, start = (
            _length(self._evaluator.value(functions)),
            self._evaluator.argument(node, 1, "start_method", None),
        )
        return replace(self._callable(_first(functions)), count=count, vector=vector, start_method=start)

    def _made(self, node: ast.Call, is_atari: bool) -> Environments:
        first = argument_of(node, "env_id", 0)
        one = self.read(first) if isinstance(first, ast.Constant) else self._callable(first)
        wrapper = self._evaluator.argument(node, 5, "wrapper_class", None) if not is_atari else None
        if is_atari or (isinstance(wrapper, Reference) and wrapper.last == "AtariWrapper"):
            one = replace(one, observation=self._atari(node))
        elif wrapper is not None:
            one = replace(one, observation=None)
        kind = self._evaluator.argument(node, 7, "vec_env_cls", None)
        vector = _VECTORS.get(kind.last, "") if isinstance(kind, Reference) else "dummy" if kind is None else ""
        kwargs = self._evaluator.argument(node, 99, "vec_env_kwargs", None)
        start = kwargs.get("start_method") if isinstance(kwargs, dict) else UNKNOWN if kwargs is UNKNOWN else None
        return replace(one, count=self._evaluator.argument(node, 1, "n_envs", 1), vector=vector, start_method=start)

    def _atari(self, node: ast.Call) -> SpaceInfo | None:
        kwargs = self._evaluator.argument(node, 99, "wrapper_kwargs", None)
        is_standard = kwargs is None or (isinstance(kwargs, dict) and "screen_size" not in kwargs)
        return atari_space(self._script.place(node)) if is_standard else None

    # ------------------------------------------------------------ wrappers

    def _wrapped(self, node: ast.Call, kind: str) -> Environments:
        inner = self.read(node.args[0])
        if kind in _TRANSPARENT:
            return inner
        if kind == "TimeLimit":
            return replace(inner, episode_steps=self._evaluator.argument(node, 1, "max_episode_steps"))
        if kind == "AtariWrapper" and len(node.args) == 1 and not node.keywords:
            return replace(inner, observation=atari_space(self._script.place(node)))
        if kind == "VecFrameStack":
            return self._stacked(inner, self._evaluator.argument(node, 1, "n_stack"))
        if kind == "VecNormalize" and inner.observation and not inner.observation.images:
            return inner
        return replace(inner, observation=None, action=None)

    @staticmethod
    def _stacked(inner: Environments, stack: object) -> Environments:
        count = whole(stack)
        if count is None or count < 1:
            return replace(inner, observation=None)
        observation = inner.observation.stacked(count) if inner.observation else None
        return replace(inner, observation=observation, stack=inner.stack * count)


def _length(value: object) -> object:
    match value:
        case KnownLength(length=length):
            return length
        case OneOf(values=values):
            return OneOf(tuple(_length(one) for one in values))
        case list() | tuple():
            return len(value)
    return UNKNOWN


def _first(node: ast.expr | None) -> ast.expr | None:
    """Return the expression of a list's first item."""
    match node:
        case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):
            return first
        case ast.ListComp(elt=item):
            return item
        case ast.BinOp(op=ast.Mult(), left=ast.List(elts=[first, *_])):
            return first
    return None


def _only_return(function: Function) -> ast.expr | None:
    """Return what a function returns, if there is exactly one place where it does."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    of_others = {part for inner in nodes if isinstance(inner, Function | ast.Lambda) for part in ast.walk(inner)}
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value and node not in of_others]
    return returned[0] if len(returned) == 1 else None
