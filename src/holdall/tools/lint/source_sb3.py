"""Models of Stable-Baselines3 in a file, their environments, and the number of environments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from holdall.tools.lint.arguments import ENV_FUNCTIONS, MODEL_ENV, N_ENVS, VEC_WRAPPERS, WRAPPED_VEC_ENV
from holdall.tools.lint.source import Source
from holdall.tools.plan.algorithms import ALGORITHM_CLASSES

_PACKAGES = ("stable_baselines3.", "sb3_contrib.")
_MAX_WRAPPERS = 20


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model that a file constructs or loads."""

    algorithm: str
    call: ast.Call
    env: ast.expr | None
    is_loaded: bool


def find_model(source: Source, node: ast.expr | None) -> SourceModel | None:
    """Return the model that an expression stands for, or None."""
    call = source.resolve(node)
    if not isinstance(call, ast.Call):
        return None
    algorithm = _find_algorithm(source, call.func)
    if algorithm:
        return SourceModel(algorithm, call, MODEL_ENV.find(call), is_loaded=False)
    if not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "learn":  # `learn` returns the model.
        return find_model(source, call.func.value)
    algorithm = _find_algorithm(source, call.func.value) if call.func.attr == "load" else ""
    return SourceModel(algorithm, call, MODEL_ENV.find(call), is_loaded=True) if algorithm else None


def find_models(source: Source) -> Iterator[SourceModel]:
    """Yield all models of a file."""
    for call in source.calls:
        is_learn = isinstance(call.func, ast.Attribute) and call.func.attr == "learn"
        model = None if is_learn else find_model(source, call)
        if model is not None:
            yield model


def _find_algorithm(source: Source, node: ast.expr) -> str:
    """Return the name of the algorithm's class, or an empty text if the expression is something else."""
    full = source.get_full_name(node)
    name = full.rpartition(".")[2]
    return name if full.startswith(_PACKAGES) and name in ALGORITHM_CLASSES else ""


def find_innermost_environment(source: Source, node: ast.expr | None) -> ast.Call | None:
    """Return the call that makes the environments. Names and wrappers of vector environments are followed."""
    for _ in range(_MAX_WRAPPERS):
        call = source.resolve(node)
        if not isinstance(call, ast.Call):
            return None
        if source.get_full_name(call.func).rpartition(".")[2] not in VEC_WRAPPERS:
            return call
        node = WRAPPED_VEC_ENV.find(call)
    return None


def count_environments(source: Source, node: ast.expr | None) -> int | None:
    """Return the number of environments that an expression makes, or None if it is unknown."""
    call = find_innermost_environment(source, node)
    if call is None:
        return None
    name = source.get_full_name(call.func).rpartition(".")[2]
    if name in {"make_vec_env", "make_atari_env"}:
        count = N_ENVS.find(call)
        return 1 if count is None else source.evaluate_whole_number(count)
    if name in {"DummyVecEnv", "SubprocVecEnv"}:
        return _count_items(source, ENV_FUNCTIONS.find(call))
    return None


def _count_items(source: Source, node: ast.expr | None) -> int | None:
    """Return the number of items in `[a, b]`, in `[a] * 8`, or in `[a for i in range(8)]`."""
    match source.resolve(node):
        case ast.List(elts=items) if not any(isinstance(item, ast.Starred) for item in items):
            return len(items)
        case ast.BinOp(left=ast.List(elts=[_]), op=ast.Mult(), right=count):
            return source.evaluate_whole_number(count)
        case ast.ListComp(
            generators=[ast.comprehension(iter=ast.Call(func=ast.Name(id="range"), args=[count]), ifs=[])]
        ):
            return source.evaluate_whole_number(count)
    return None
