"""What `holdall plan` needs to know of a run, read from a training script.

In:  the path of a script, and what the user sets otherwise.  Out: settings by the names of plan's options, and what
else the script makes that takes memory.
Invariant: the script is read and never run; what is not known is asked for by name, and nothing is guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.lint.engine import read_text
from holdall.tools.lint.run import ConfiguredRun, PlainBuffer, SpaceInfo
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.repository import Repository
from holdall.tools.lint.source.script import Script
from holdall.tools.plan.config import OPTIONS
from holdall.tools.plan.spec import ALGORITHMS

RENAMED = {
    "buffer_size": "capacity", "n_envs": "num_envs", "n_timesteps": "total_timesteps", "timesteps": "total_timesteps",
    "memory_size": "capacity", "replay_size": "capacity", "num_steps": "n_steps", "replay_buffer_capacity": "capacity",
}  # fmt: skip
"""What other libraries call plan's settings."""
_COUNTED = ("buffer_size", "n_steps", "batch_size")
_PLAIN = ("policy", "device", "optimize_memory_usage")


@dataclass(frozen=True, slots=True)
class ScriptPlan:
    """What a script trains."""

    settings: Mapping[str, Any]  # of one run; empty: it makes no model that can be planned
    others: tuple[str, ...]  # further models, in words
    buffers: tuple[PlainBuffer, ...]


def parse_changes(texts: list[str]) -> dict[str, Any]:
    """Read `buffer_size=200000` and the like."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        name = RENAMED.get(name, name)
        if not equals or name not in OPTIONS:
            known = sorted({*OPTIONS, *RENAMED})
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it knows {', '.join(known)}"
            raise ArgumentError(f"set ({text!r}) must be NAME=VALUE of a setting that plan knows; {hint}")
        changes[name] = value
    return changes


def read_script(path: Path, algo: str = "") -> ScriptPlan:
    """Read a script; `algo` chooses among several models."""
    try:
        script = Script.parse(read_text(path), str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ArgumentError(f"file ({path}) is no Python that can be read: {error}") from error
    training = TrainingReader(script, Repository.around(path))
    runs = [variant for run in training.runs for variant in run.variants]
    wanted = [run for run in runs if run.algorithm.name.lower() in {algo, ""} or not algo]
    known = [run for run in wanted if run.algorithm.name.lower() in ALGORITHMS]
    ordered = sorted(known, key=lambda run: (run.environments.observation is None, run.condition != ""))
    if not ordered:
        if not training.buffers and not runs:
            raise ArgumentError(
                f"file ({path}) makes no model and no buffer that plan can read; describe the run with --algo, --obs "
                "and --action, or see what lint reads of it: holdall lint " + str(path)
            )
        return ScriptPlan({}, tuple(_words(run) for run in runs), tuple(training.buffers))
    chosen = ordered[0]
    others = tuple(dict.fromkeys(_words(run) for run in runs if run is not chosen and _words(run) != _words(chosen)))
    return ScriptPlan(dict(_settings(chosen)), others, tuple(training.buffers))


def _words(run: ConfiguredRun) -> str:
    when = f", when {run.condition}" if run.condition else ""
    return f"{run.algorithm.name} in line {run.place.line}{when}"


def _settings(run: ConfiguredRun) -> Iterator[tuple[str, Any]]:
    """Yield what is known of a run, by the names of plan's options."""
    yield "algo", run.algorithm.name.lower()
    when = f", when {run.condition}" if run.condition else ""
    yield "name", f"{Path(run.place.path).name}, line {run.place.line}{when}"
    for name in _COUNTED:
        number = run.count(name)
        if number is not None and (name != "buffer_size" or not run.algorithm.on_policy):
            yield RENAMED.get(name, name), number
    for name in _PLAIN:
        value = run.value(name)
        if isinstance(value, bool) or (isinstance(value, str) and value not in {"auto", ""}):
            yield name, value
    yield from _environments(run)
    if run.total_timesteps is not None:
        yield "total_timesteps", run.total_timesteps
    kwargs = run.value("replay_buffer_kwargs")
    if isinstance(kwargs, dict) and isinstance(kwargs.get("handle_timeout_termination"), bool):
        yield "handle_timeout_termination", kwargs["handle_timeout_termination"]
    network = run.value("policy_kwargs")
    if isinstance(network, dict) and isinstance(network.get("net_arch"), list | dict):
        yield "policy_kwargs", {"net_arch": network["net_arch"]}
    saves = [callback for callback in run.callbacks if callback.value("save_replay_buffer") is True]
    if saves and not run.algorithm.on_policy:
        yield "saves_buffer", True


def _environments(run: ConfiguredRun) -> Iterator[tuple[str, Any]]:
    env = run.environments
    if env.number is not None:
        yield "num_envs", env.number
    if env.vector == "subproc":
        yield "vec_env", "subproc"
        if isinstance(env.start_method, str):
            yield "start_method", env.start_method
    if env.observation is not None:
        is_last = all(leaf.shape and leaf.shape[-1] % env.stack == 0 for leaf in env.observation.leaves)
        stack = env.stack if is_last else 1
        yield "obs", texts_of(env.observation, stack)
        if stack > 1:
            yield "frame_stack", stack
    if env.action is not None and (text := action_text(env.action)):
        yield "action", text


def texts_of(space: SpaceInfo, stack: int = 1) -> list[str]:
    """Write a space as plan reads it; of a stack only one frame."""
    found = []
    for leaf in space.leaves:
        if not leaf.shape:
            found.append(f"{leaf.name}=discrete({space.counts[0] if space.counts else 2})".removeprefix("="))
            continue
        axes = (*leaf.shape[:-1], leaf.shape[-1] // stack)
        found.append(f"{leaf.name}={'x'.join(map(str, axes))}:{leaf.dtype.name}".removeprefix("="))
    return found


def action_text(space: SpaceInfo) -> str:
    """Write an action space as plan reads it; empty if it is not known."""
    leaf = space.leaves[0]
    if leaf.dtype.kind == "f":
        return "x".join(map(str, leaf.shape)) + f":{leaf.dtype.name}"
    counts = ",".join(map(str, space.counts))
    if not leaf.shape:
        return f"discrete({counts or 2})"
    return f"multidiscrete({counts})" if counts and leaf.dtype.itemsize == 8 else f"multibinary({leaf.shape[0]})"


def missing(settings: Mapping[str, Any]) -> str:
    """Say what a script does not tell and plan needs; empty if nothing is missing."""
    wanted = {"obs": "--obs 84x84x3:uint8, or --env ID", "action": "--action 8, or --action 'discrete(4)'"}
    lacking = [text for name, text in wanted.items() if name not in settings and "env" not in settings]
    return "; ".join(lacking)
