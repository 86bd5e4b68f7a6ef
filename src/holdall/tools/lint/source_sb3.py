"""What a file says about Stable-Baselines3: its models, their environments, and how many environments there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from holdall.tools.lint.source import Source, argument_of

ON_POLICY = frozenset({"A2C", "PPO", "TRPO", "MaskablePPO", "RecurrentPPO"})
OFF_POLICY = frozenset({"DDPG", "DQN", "SAC", "TD3", "CrossQ", "QRDQN", "TQC"})
_PACKAGES = ("stable_baselines3.", "sb3_contrib.")
_VEC_WRAPPERS = ("VecNormalize", "VecFrameStack", "VecMonitor", "VecTransposeImage", "VecCheckNan", "VecVideoRecorder")
_MAX_WRAPPERS = 20


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model that a file constructs or loads."""

    algorithm: str
    call: ast.Call
    env: ast.expr | None
    is_loaded: bool


def model_of(source: Source, node: ast.expr | None) -> SourceModel | None:
    """Return the model that an expression stands for, or None."""
    call = source.resolve(node)
    if not isinstance(call, ast.Call):
        return None
    algorithm = _algorithm(source, call.func)
    if algorithm:
        return SourceModel(algorithm, call, argument_of(call, "env", 1), is_loaded=False)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "load":
        algorithm = _algorithm(source, call.func.value)
        if algorithm:
            return SourceModel(algorithm, call, argument_of(call, "env", 1), is_loaded=True)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "learn":  # `learn` returns the model.
        return model_of(source, call.func.value)
    return None


def models(source: Source) -> Iterator[SourceModel]:
    """Yield all models of a file."""
    for call in source.calls:
        is_learn = isinstance(call.func, ast.Attribute) and call.func.attr == "learn"
        model = None if is_learn else model_of(source, call)
        if model is not None:
            yield model


def _algorithm(source: Source, node: ast.expr) -> str:
    """Return the name of the algorithm's class, or an empty text if the expression is something else."""
    full = source.dotted(node)
    name = full.rpartition(".")[2]
    return name if full.startswith(_PACKAGES) and name in ON_POLICY | OFF_POLICY else ""


def innermost_environment(source: Source, node: ast.expr | None) -> ast.Call | None:
    """Return the call that makes the environments, behind names and wrappers of vector environments."""
    for _ in range(_MAX_WRAPPERS):
        call = source.resolve(node)
        if not isinstance(call, ast.Call):
            return None
        if source.dotted(call.func).rpartition(".")[2] not in _VEC_WRAPPERS:
            return call
        node = argument_of(call, "venv", 0)
    return None


def environment_count(source: Source, node: ast.expr | None) -> int | None:
    """Return the number of environments that an expression makes, or None if it is unknown."""
    call = innermost_environment(source, node)
    if call is None:
        return None
    name = source.dotted(call.func).rpartition(".")[2]
    if name in {"make_vec_env", "make_atari_env"}:
        count = argument_of(call, "n_envs", 1)
        return 1 if count is None else source.whole_number(count)
    if name in {"DummyVecEnv", "SubprocVecEnv"}:
        return _length(source, argument_of(call, "env_fns", 0))
    return None


def _length(source: Source, node: ast.expr | None) -> int | None:
    """Return the number of items of a list display, of a list times a number, or of a list over a range."""
    match source.resolve(node):
        case ast.List(elts=items) if not any(isinstance(item, ast.Starred) for item in items):
            return len(items)
        case ast.BinOp(left=ast.List(elts=[_]), op=ast.Mult(), right=count):
            return source.whole_number(count)
        case ast.ListComp(
            generators=[ast.comprehension(iter=ast.Call(func=ast.Name(id="range"), args=[count]), ifs=[])]
        ):
            return source.whole_number(count)
    return None
