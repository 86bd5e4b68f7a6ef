"""A recorded trace, played over and over: `f_<key>` frames, `ep` rows of first frame and length, and what was done.

The file is an .npz with `f_<key>` the frames of every episode one after another, each with its first and its final
observation (`f_obs` where the space is no Dict); `ep` rows of [first frame, number of transitions]; `action`,
`reward`, `terminated`, `truncated` per transition; `meta` JSON, of which `stack` says how many frames an observation
stacks, the first frame repeated after a reset. Images are handed over channels first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from streams import Step, Stream, channels_first

Arrays = dict[str, NDArray[Any]]


def stream(file: Path) -> Stream:
    """Play `file` for ever."""
    with np.load(file, allow_pickle=False) as loaded:
        arrays: Arrays = {name: loaded[name] for name in loaded.files}
    stack = int(json.loads(str(arrays["meta"]))["stack"])
    first = _observe(arrays, 0, 0, stack)
    described: Any = _space(first)
    return Stream(described, _action_space(arrays["action"]), 1, _replay(arrays, stack))


def _replay(arrays: Arrays, stack: int) -> Iterator[Step]:
    while True:
        done = 0
        for begin, length in arrays["ep"]:
            obs = _observe(arrays, int(begin), int(begin), stack)
            for step in range(int(length)):
                next_obs = _observe(arrays, int(begin), int(begin) + step + 1, stack)
                yield Step(
                    obs=obs,
                    action=arrays["action"][None, done].copy(),
                    reward=arrays["reward"][None, done].astype(np.float32),
                    next_obs=next_obs,
                    terminated=arrays["terminated"][None, done].copy(),
                    truncated=arrays["truncated"][None, done] & ~arrays["terminated"][None, done],
                )
                obs = next_obs
                done += 1


def _observe(arrays: Arrays, begin: int, frame: int, stack: int) -> Any:
    """Return the observation at `frame` of the episode that begins at `begin`, with a lane axis."""
    keys = [name for name in arrays if name.startswith("f_")]
    if stack > 1 or keys == ["f_obs"]:
        numbers = np.maximum(np.arange(frame - stack + 1, frame + 1), begin)
        frames = arrays["f_obs"][numbers]
        return frames[None] if stack > 1 else _image_first(frames)
    return {key[2:]: _image_first(arrays[key][frame : frame + 1].copy()) for key in keys}


def _image_first(batch: NDArray[Any]) -> NDArray[Any]:
    is_image = batch.ndim == 4 and batch.dtype == np.uint8 and batch.shape[-1] <= 4
    return channels_first(batch) if is_image else batch


def _space(observation: Any) -> spaces.Space[Any]:
    if isinstance(observation, dict):
        return spaces.Dict({key: _space(part) for key, part in observation.items()})
    array = np.asarray(observation)
    if array.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, array.shape[1:], array.dtype.type)
    limits = np.iinfo(array.dtype)
    return spaces.Box(int(limits.min), int(limits.max), array.shape[1:], array.dtype.type)


def _action_space(actions: NDArray[Any]) -> spaces.Space[Any]:
    if actions.dtype.kind in "iu" and actions.ndim == 1:
        return spaces.Discrete(int(actions.max()) + 1)
    return spaces.Box(-1, 1, actions.shape[1:], actions.dtype.type)
