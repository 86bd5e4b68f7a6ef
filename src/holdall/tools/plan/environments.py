"""Spaces as text and as plain data; environments by their name; measurements in a throwaway process.

In:  `84x84x3:uint8` or `discrete(4)` as people write them; an id that gymnasium knows, or `module:Class`.
Out: gymnasium spaces, and dicts of plain numbers that travel to another process as JSON; an environment, random
steps of it, and the bytes that one more of it takes.
Invariant: `space_from_dict(space_to_dict(space))` keeps the shapes, dtypes and bounds that memory depends on.
Text is never evaluated. Environments run the user's code, so they are made in a throwaway process only: what it
imports, allocates and breaks is gone with it. `run_probe` starts `python -m holdall.tools.plan.environments`, sends one
JSON object on stdin, {"task": ..., ...}, and reads one from stdout, {"answer": ...} or {"error": ...}. What libraries
print goes to stderr. Importing this module imports neither torch nor Stable-Baselines3; what these take is measured.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError, HoldallError
from holdall.machine import held_bytes

_BOX = re.compile(r"(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>[a-z]+\d*))?")
_COUNTED_SPACE = re.compile(r"(?P<kind>discrete|multibinary|multidiscrete)\((?P<counts>\d+(?:\s*,\s*\d+)*)\)")
_FORMS = "84x84x3:uint8, 31 (float32), discrete(4), multibinary(6) or multidiscrete(3,4)"
_MOST_ELEMENTS = 2**26
"""Larger shapes are a typing error, and gymnasium allocates four arrays of a box's shape for its bounds."""
_FEW_STEPS = 50  # steps after which an environment has loaded what it needs


def parse_space(text: str, argument: str) -> spaces.Space[Any]:
    """Read one space."""
    if found := _COUNTED_SPACE.fullmatch(text.strip().lower()):
        counts = [int(count) for count in found["counts"].split(",")]
        return _counted_space(found["kind"], counts, f"{argument} ({text!r})")
    found = _BOX.fullmatch(text.strip().lower())
    if not found:
        raise ArgumentError(f"{argument} ({text!r}) is no space; write it like {_FORMS}")
    shape = tuple(int(side) for side in found["shape"].split("x"))
    return _box(shape, found["dtype"] or "float32", f"{argument} ({text!r})")


def parse_observation(texts: Sequence[str], argument: str = "obs") -> spaces.Space[Any]:
    """Read one unnamed space, or the named spaces of a Dict: `image=84x84x3:uint8`."""
    named = [text.partition("=") for text in texts]
    if not named:
        raise ArgumentError(f"{argument} is missing; write it like {_FORMS}, or name an environment")
    if len(named) == 1 and not named[0][1]:
        return parse_space(texts[0], argument)
    children: dict[str, spaces.Space[Any]] = {}
    for name, equals, rest in named:
        if not equals or not name or name in children:
            raise ArgumentError(
                f"{argument} ({name + equals + rest!r}) needs a name of its own beside other spaces; write NAME=SHAPE"
            )
        children[name] = parse_space(rest, f"{argument} {name}")
    return spaces.Dict(children)


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain data."""
    if isinstance(space, spaces.Box):
        low, high = (float(np.min(space.low)), float(np.max(space.high))) if space.low.size else (0.0, 0.0)
        bounds = {"low": low if np.isfinite(low) else None, "high": high if np.isfinite(high) else None}
        return {"kind": "box", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name} | bounds
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "counts": [int(space.n)], "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "multidiscrete", "counts": space.nvec.ravel().tolist(), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multibinary", "counts": [int(side) for side in space.shape]}
    if isinstance(space, spaces.Dict):
        return {"kind": "dict", "spaces": {str(key): space_to_dict(child) for key, child in space.spaces.items()}}
    raise ArgumentError(
        f"space ({space}) is none that Stable-Baselines3 stores; use Box, Discrete, MultiBinary, MultiDiscrete "
        "or one Dict of these"
    )


def space_from_dict(data: Mapping[str, Any]) -> spaces.Space[Any]:
    """Make a space of what `space_to_dict` returned."""
    kind = data["kind"]
    if kind == "dict":
        return spaces.Dict({key: space_from_dict(child) for key, child in data["spaces"].items()})
    if kind == "box":
        low = -np.inf if data["low"] is None else data["low"]
        high = np.inf if data["high"] is None else data["high"]
        return _box(tuple(data["shape"]), data["dtype"], "space", low, high)
    return _counted_space(kind, list(data["counts"]), "space", data.get("dtype"))


def stacked_space(space: spaces.Space[Any], frames: int) -> spaces.Space[Any]:
    """Return the space after a stack of frames: along the channels of an image, along the last axis of others."""
    if frames == 1:
        return space
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stacked_space(child, frames) for key, child in space.spaces.items()})
    if not isinstance(space, spaces.Box) or not space.shape:
        raise ArgumentError(f"frame_stack ({frames}) stacks Box spaces, not {space}; leave it out")
    if frames * space.low.size > _MOST_ELEMENTS:
        raise ArgumentError(
            f"frame_stack ({frames}) makes observations of more than {_MOST_ELEMENTS:,} elements; pass fewer frames"
        )
    axis = 0 if _is_image(space) and space.shape[0] < space.shape[-1] else -1
    low, high = np.repeat(space.low, frames, axis), np.repeat(space.high, frames, axis)
    return spaces.Box(low, high, dtype=np.dtype(space.dtype).type)


def has_images(space: spaces.Space[Any]) -> bool:
    """Whether Stable-Baselines3 would give a convolutional network to some part of it."""
    if isinstance(space, spaces.Dict):
        return any(has_images(child) for child in space.spaces.values())
    return isinstance(space, spaces.Box) and _is_image(space)


def _is_image(space: spaces.Box) -> bool:
    bounds = len(space.shape) == 3 and space.dtype == np.uint8
    return bounds and bool((space.low == 0).all()) and bool((space.high == 255).all())


def _box(
    shape: tuple[int, ...], dtype: str, called: str, low: float | None = None, high: float | None = None
) -> spaces.Box:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"{called} has no NumPy dtype {dtype!r}; write uint8, float32 or another") from error
    if kind.kind not in "biuf" or 0 in shape or np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
        raise ArgumentError(
            f"{called} must have a plain number dtype, sides of at least 1 and at most {_MOST_ELEMENTS:,} elements; "
            f"write it like {_FORMS}"
        )
    if low is None or high is None:
        low, high = (-np.inf, np.inf) if kind.kind == "f" else (0, 1)
        if kind.kind in "iu":
            low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return spaces.Box(low, high, shape, kind.type)


def _counted_space(kind: str, counts: list[int], called: str, dtype: str | None = None) -> spaces.Space[Any]:
    if not counts or min(counts) < 1:
        raise ArgumentError(f"{called} must count from 1 up; write it like {_FORMS}")
    if kind == "discrete" and len(counts) == 1:
        return spaces.Discrete(counts[0], dtype=np.dtype(dtype or "int64").type)
    if kind == "multidiscrete":
        return spaces.MultiDiscrete(counts, dtype=np.dtype(dtype or "int64").type)
    if kind == "multibinary":
        return spaces.MultiBinary(counts[0] if len(counts) == 1 else counts)
    raise ArgumentError(f"{called} takes one count; write it like {_FORMS}")


def make_single_env(env_id: str, wrapper: str = "") -> Any:
    """Make one environment.

    Only this finds modules of the working directory, and those of the libraries go before them. Other files that lie
    there, such as a `random.py`, never run: processes for measurements start with Python's option -P.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, _, name = env_id.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
        env: Any = found() if isinstance(found, type) else gym.make(env_id)
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(
            f"env ({env_id!r}) cannot be made here ({error}); install what it needs, write module:Class for your own "
            "class, or give --obs and --action instead"
        ) from error
    if wrapper != "atari":
        return env
    # It brings torch along.
    return importlib.import_module("stable_baselines3.common.atari_wrappers").AtariWrapper(env)


def measure_environment(env_id: str, wrapper: str, with_torch: bool = False) -> dict[str, Any]:
    """Make an environment twice and step both: spaces, and bytes of the first and of one more.

    Args:
        with_torch: Whether torch is there before the environment: a trainer has it in any case.
    """
    if with_torch or wrapper:
        importlib.import_module("stable_baselines3")
    had_torch = "torch" in sys.modules
    held, envs = [held_bytes()], []
    for _ in range(2):
        envs.append(make_single_env(env_id, wrapper))
        deque(islice(random_steps(envs[-1], seed=0), _FEW_STEPS), maxlen=0)
        held.append(held_bytes())
    before, between, after = held
    found = {
        "observation": space_to_dict(envs[0].observation_space),
        "action": space_to_dict(envs[0].action_space),
        "first_bytes": max(between.resident - before.resident, 0),
        "first_anonymous_bytes": max(between.anonymous - before.anonymous, 0),
        "each_bytes": max(after.anonymous - between.anonymous, 0),
        "brought_torch": "torch" in sys.modules and not had_torch,
    }
    for env in envs:
        env.close()
    return found


def random_steps(env: Any, seed: int) -> Iterator[tuple[Any, Any, float, Any, bool, bool]]:
    """Play random actions for ever: obs, action, reward, next_obs, terminated, truncated."""
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    while True:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, float(np.asarray(reward).item()), next_obs, bool(terminated), bool(truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs


class VecEnvFacts(NamedTuple):
    """How the environments of a live model run."""

    kind: str  # "dummy" or "subproc"; empty: neither
    start_method: str  # of the processes; empty: not known
    frame_stack: int


def read_vec_env(env: Any) -> VecEnvFacts:
    """Look through the wrappers of a vector environment of Stable-Baselines3."""
    kind, method, frames = "", "", 1
    while env is not None:
        match type(env).__name__:
            case "DummyVecEnv":
                kind = "dummy"
            case "SubprocVecEnv":
                kind = "subproc"
                method = getattr(getattr(env, "processes", [None])[0], "_start_method", None) or ""
            case "VecFrameStack":
                frames = int(env.stacked_obs.n_stack if hasattr(env, "stacked_obs") else env.n_stack)
        env = getattr(env, "venv", None)
    return VecEnvFacts(kind, method, frames)


class ProbeError(HoldallError, RuntimeError):
    """A measurement in a process of its own failed."""


def run_probe(task: str, *, timeout_s: float = 600, **arguments: Any) -> dict[str, Any]:
    """Run one task in a throwaway process and return its answer."""
    plain = {name: value.as_dict() if hasattr(value, "as_dict") else value for name, value in arguments.items()}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "holdall.tools.plan.environments"],  # -P: see make_single_env
            input=json.dumps({"task": task} | plain),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # Threads that spin while they wait take the cores from who waits for the answer.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(
            f"the measurement ({task}) took more than {timeout_s:.0f} s; ask for fewer --probe steps"
        ) from error
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        killed = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise ProbeError(f"the measurement ({task}) {killed}: {last}") from None
    if "error" in reply:
        raise ArgumentError(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer


def run_task(question: dict[str, Any]) -> dict[str, Any]:
    """Do one task; each imports only what it needs, because imports are part of what is measured."""
    task = question["task"]
    if task == "environment":
        return measure_environment(question["env_id"], question["wrapper"], question["with_torch"])
    from holdall.tools.plan.spec import Spec  # noqa: PLC0415 it knows this module

    spec = Spec.from_dict(question["spec"])
    if task == "experience":
        from holdall.tools.plan.measure_memory import measure_need  # noqa: PLC0415

        return measure_need(spec, question["steps"], question["prefer"])
    from holdall.tools.plan import sb3_model  # noqa: PLC0415 what this import takes is a figure

    if task == "baseline":
        return sb3_model.measure_baseline(spec, question["networks"], question.get("traces", True))
    return asdict(sb3_model.measure_updates(spec, question["steps"]))


def main() -> None:
    """Answer one question."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # an environment's warnings are its user's affair, at training
    try:
        reply: dict[str, Any] = {"answer": run_task(json.load(sys.stdin))}
    except HoldallError as error:
        reply = {"error": str(error)}
    except ModuleNotFoundError as error:
        reply = {"error": f"{error}; install it, and Stable-Baselines3 with pip install 'holdall[sb3]'"}
    results.write(json.dumps(reply))
    results.close()


if __name__ == "__main__":
    main()
