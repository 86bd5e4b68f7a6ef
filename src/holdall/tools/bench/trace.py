"""Traces, which are files of recorded experience. `python -m holdall.tools.bench.trace` records one.

The file is an .npz with these arrays:

    f_<key>    frames of all episodes, one after another, each episode with its final observation. `f_obs` if the space
               is not a Dict
    ep         rows of [first frame, number of transitions], one per episode
    action, reward, terminated, truncated
               one row per transition
    meta       JSON. `stack` is the number of frames in an observation; the first frame is repeat_steps after a reset

Observations are returned with channels first, as in Stable-Baselines3. Reading a file runs no code from it, and an
inconsistent file is refused before the first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.space_leaves import stored_space
from holdall.tools.bench.child import ChildProgress, emit
from holdall.tools.plan.environments import make_env

_PER_TRANSITION = ("action", "reward", "terminated", "truncated")
_EMIT_EVERY = 200
"""Transitions between two reports of progress."""


class TraceStep(NamedTuple):
    """One transition with a lane axis of length one. At the end of an episode, `next_obs` is its final observation."""

    obs: Any
    action: NDArray[Any]
    reward: NDArray[np.float32]
    next_obs: Any
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Trace:
    """A trace in memory."""

    def __init__(self, arrays: dict[str, NDArray[Any]], name: str) -> None:
        self.name = name
        self._frames = {key[2:]: array for key, array in arrays.items() if key.startswith("f_")}
        self._arrays = arrays
        try:
            self._stack = int(json.loads(str(arrays["meta"]))["stack"])
            self._check()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"trace ({name}) is not a valid trace ({error}). docs/bench.md describes the format. --env records one."
            ) from error

    @classmethod
    def load(cls, file: Path) -> Trace:
        """Read a file."""
        try:
            with np.load(file, allow_pickle=False) as loaded:
                return cls({name: loaded[name] for name in loaded.files}, file.name)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"trace ({file}) cannot be read ({error}). Name an .npz file.") from error

    def __len__(self) -> int:
        """Count the transitions."""
        return len(self._arrays["reward"])

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Space of the observations. Its bounds are those of the dtypes."""
        return _infer_space(self._observe(0, 0))

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Space of the actions."""
        actions = self._arrays["action"]
        if actions.dtype.kind in "iu" and actions.ndim == 1:
            return spaces.Discrete(int(actions.max()) + 1)
        return spaces.Box(-1, 1, actions.shape[1:], actions.dtype.type)

    def steps(self) -> Iterator[TraceStep]:
        """Play the trace once. The arrays belong to the caller."""
        row = 0
        for begin, length in self._arrays["ep"].tolist():
            obs = self._observe(begin, begin)
            for frame in range(begin + 1, begin + length + 1):
                next_obs = self._observe(begin, frame)
                action, reward, terminated, truncated = (self._arrays[name][None, row] for name in _PER_TRANSITION)
                is_terminated = terminated.astype(np.bool_)
                is_truncated = truncated.astype(np.bool_) & ~is_terminated
                yield TraceStep(obs, action.copy(), reward.astype(np.float32), next_obs, is_terminated, is_truncated)
                obs = next_obs
                row += 1

    def repeat_steps(self) -> Iterator[TraceStep]:
        """Play the trace again and again, without end."""
        return itertools.chain.from_iterable(self.steps() for _ in itertools.count())

    def _observe(self, begin: int, frame: int) -> Any:
        """Return the observation at `frame` of the episode that begins at `begin`, with a lane axis."""
        if self._stack > 1:
            numbers = np.arange(frame - self._stack + 1, frame + 1)
            return self._frames["obs"][np.maximum(numbers, begin)][None]
        parts = {key: _move_channels_first(frames[frame : frame + 1].copy()) for key, frames in self._frames.items()}
        return parts["obs"] if set(parts) == {"obs"} else parts

    def _check(self) -> None:
        episodes = self._arrays["ep"]
        counts = {name: len(self._arrays[name]) for name in _PER_TRANSITION}
        if episodes.ndim != 2 or episodes.shape[1] != 2 or len(episodes) == 0 or (episodes < 0).any():
            raise ValueError("`ep` must have rows of first frame and number of transitions")
        total = int(episodes[:, 1].sum())
        if total == 0 or set(counts.values()) != {total}:
            raise ValueError(f"`ep` has {total} transitions, but the other arrays have {counts}")
        if not self._frames or (self._stack > 1 and set(self._frames) != {"obs"}) or self._stack < 1:
            raise ValueError(f"`stack` is {self._stack}, and the frames are {sorted(self._frames)}")
        last = int(episodes.sum(axis=1).max())
        if any(frames.dtype.kind not in "biuf" or len(frames) <= last for frames in self._frames.values()):
            raise ValueError(f"frames must be numbers, and each key must have more than {last} frames")


class TraceRecorder:
    """Collects the frames and steps of an environment, and writes them as a trace.

    Args:
        stack: Number of frames in an observation of the agent. The environment returns single frames.
    """

    def __init__(self, stack: int = 1) -> None:
        self._stack = stack
        self._frames: dict[str, list[NDArray[Any]]] = {}
        self._episodes: list[list[int]] = []
        self._values: dict[str, list[Any]] = {name: [] for name in _PER_TRANSITION}
        self._frame_count = 0

    def begin(self, frame: Any) -> None:
        """Record the first observation of an episode."""
        self._episodes.append([self._frame_count, 0])
        self._add_frame(frame)

    def step(self, action: Any, reward: float, frame: Any, terminated: bool, truncated: bool) -> None:
        """Record one transition."""
        for name, value in zip(_PER_TRANSITION, (action, reward, terminated, truncated), strict=True):
            self._values[name].append(value)
        self._episodes[-1][1] += 1
        self._add_frame(frame)

    def save(self, file: Path) -> None:
        """Write the trace."""
        frames: dict[str, Any] = {f"f_{key}": np.stack(rows) for key, rows in self._frames.items()}
        per_transition: dict[str, Any] = {name: np.array(values) for name, values in self._values.items()}
        episodes = np.array([episode for episode in self._episodes if episode[1]], np.int64)
        meta = np.array(json.dumps({"stack": self._stack}))
        np.savez(file, meta=meta, ep=episodes, **frames, **per_transition)

    def _add_frame(self, frame: Any) -> None:
        named = frame if isinstance(frame, dict) else {"obs": frame}
        for key, value in named.items():
            array = np.array(value)
            is_screen = self._stack > 1 and array.ndim == 3 and array.shape[-1] == 1
            self._frames.setdefault(key, []).append(array[..., 0] if is_screen else array)
        self._frame_count += 1


def _move_channels_first(batch: NDArray[Any]) -> NDArray[Any]:
    is_image = batch.ndim == 4 and batch.dtype == np.uint8 and batch.shape[-1] <= 4
    return np.moveaxis(batch, -1, -3) if is_image else batch


def _infer_space(observation: Any) -> spaces.Space[Any]:
    if isinstance(observation, dict):
        return spaces.Dict({key: _infer_space(part) for key, part in observation.items()})
    return stored_space(observation.shape[1:], observation.dtype)


def play_randomly(env: Any, seed: int) -> Iterator[tuple[Any, Any, float, Any, bool, bool]]:
    """Play random actions without end. Yield obs, action, reward, next_obs, terminated and truncated of every step."""
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    while True:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, float(np.asarray(reward).item()), next_obs, bool(terminated), bool(truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs


def record_trace(env: Any, transitions: int, stack: int, seed: int, file: Path) -> None:
    """Record random steps of an environment as a trace."""
    space = env.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    if not all(isinstance(part, spaces.Box) for part in parts):
        raise ArgumentError(f"env has observations of {space}. A trace can have a Box, or a Dict of Boxes.")
    recorder = TraceRecorder(stack)
    is_first = True
    for count, step in enumerate(itertools.islice(play_randomly(env, seed), transitions)):
        obs, action, reward, next_obs, terminated, truncated = step
        if is_first:
            recorder.begin(obs)
        recorder.step(action, reward, next_obs, terminated, truncated)
        is_first = terminated or truncated
        if count % _EMIT_EVERY == 0:
            emit(ChildProgress(count, transitions))
    recorder.save(file)


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(prog="python -m holdall.tools.bench.trace")
    parser.add_argument("--env", required=True)
    parser.add_argument("--wrapper", default="")
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--transitions", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    wanted = parser.parse_args()
    emit(ChildProgress(0, wanted.transitions))
    record_trace(make_env(wanted.env, wanted.wrapper), wanted.transitions, wanted.stack, wanted.seed, wanted.out)


if __name__ == "__main__":
    main()
