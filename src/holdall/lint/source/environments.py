"""Environments as a script makes them: how many, in which processes, and what they observe.

In:  the expression that was passed as `env`.  Out: an Environments record, UNKNOWN or None where it cannot be told.
Invariant: a wrapper that is not known here makes the observation unknown; it is never taken to change nothing.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from holdall.lint.run import Environments, Space
from holdall.lint.source.evaluate import Evaluator
from holdall.lint.source.script import Function
from holdall.lint.source.spaces import atari, read_space
from holdall.lint.values import UNKNOWN, OneOf, Reference, Sized, whole

_VECTORS = {"DummyVecEnv": "dummy", "SubprocVecEnv": "subproc", "SyncVectorEnv": "sync", "AsyncVectorEnv": "async"}
# Wrappers that leave observations, actions and the number of environments as they are.
_TRANSPARENT = frozenset(
    {"Monitor", "VecMonitor", "VecCheckNan", "VecTransposeImage", "RecordEpisodeStatistics", "RecordVideo"}
    | {"VecVideoRecorder", "OrderEnforcing", "PassiveEnvChecker", "NormalizeReward", "ClipReward", "ClipRewardEnv"}
)
_DEEPEST = 12


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
            return Environments(count=1, vector="single", episode_steps=self._argument(node, 99, "max_episode_steps"))
        return self._wrapped(node, kind) if node.args else Environments()

    # ------------------------------------------------------------ one environment

    def _instance(self, made: ast.ClassDef) -> Environments:
        spaces = {name: self._space_of(made, name) for name in ("observation_space", "action_space")}
        return Environments(
            count=1, vector="single", observation=spaces["observation_space"], action=spaces["action_space"]
        )

    def _space_of(self, made: ast.ClassDef, name: str) -> Space | None:
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
        one = self._callable(_first(functions))
        return replace(
            one,
            count=_length(self._evaluator.value(functions)),
            vector=vector,
            start_method=self._argument(node, 1, "start_method", None),
        )

    def _made(self, node: ast.Call, is_atari: bool) -> Environments:
        first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "env_id"), None)
        one = self.read(first) if isinstance(first, ast.Constant) else self._callable(first)
        wrapper = self._argument(node, 5, "wrapper_class", None) if not is_atari else None
        if is_atari or (isinstance(wrapper, Reference) and wrapper.last == "AtariWrapper"):
            one = replace(one, observation=self._atari(node))
        elif wrapper is not None:
            one = replace(one, observation=None)
        kind = self._argument(node, 7, "vec_env_cls", None)
        vector = _VECTORS.get(kind.last, "") if isinstance(kind, Reference) else "dummy" if kind is None else ""
        kwargs = self._argument(node, 99, "vec_env_kwargs", None)
        start = kwargs.get("start_method") if isinstance(kwargs, dict) else UNKNOWN if kwargs is UNKNOWN else None
        return replace(one, count=self._argument(node, 1, "n_envs", 1), vector=vector, start_method=start)

    def _atari(self, node: ast.Call) -> Space | None:
        kwargs = self._argument(node, 99, "wrapper_kwargs", None)
        is_standard = kwargs is None or (isinstance(kwargs, dict) and "screen_size" not in kwargs)
        return atari(self._script.place(node)) if is_standard else None

    # ------------------------------------------------------------ wrappers

    def _wrapped(self, node: ast.Call, kind: str) -> Environments:
        inner = self.read(node.args[0])
        if kind in _TRANSPARENT:
            return inner
        if kind == "TimeLimit":
            return replace(inner, episode_steps=self._argument(node, 1, "max_episode_steps"))
        if kind == "AtariWrapper" and len(node.args) == 1 and not node.keywords:
            return replace(inner, observation=atari(self._script.place(node)))
        if kind == "VecFrameStack":
            return self._stacked(inner, self._argument(node, 1, "n_stack"))
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

    def _argument(self, node: ast.Call, index: int, name: str, default: object = UNKNOWN) -> object:
        for keyword in node.keywords:
            if keyword.arg == name:
                return self._evaluator.value(keyword.value)
            if keyword.arg is None:
                return UNKNOWN
        return self._evaluator.value(node.args[index]) if index < len(node.args) else default


def _length(value: object) -> object:
    match value:
        case Sized(length=length):
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
    returns = [
        node
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Return) and node.value is not None and _owner(statement, node) is None
    ]
    return returns[0].value if len(returns) == 1 else None


def _owner(statement: ast.stmt, wanted: ast.Return) -> ast.AST | None:
    """Return the inner function of a statement that a return belongs to, if any."""
    inner = [node for node in ast.walk(statement) if isinstance(node, Function | ast.Lambda)]
    return next((node for node in inner if any(part is wanted for part in ast.walk(node))), None)
