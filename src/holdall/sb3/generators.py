"""All generators that a training draws from: NumPy's, torch's, Python's, the action space's, the environments'.

In:  a model.  Out: their states as words and arrays; and back.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm

from holdall.errors import CheckpointError
from holdall.json_state import decode_state, encode_state, generator_state, restored_generator


def all_generators(model: BaseAlgorithm, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the states of all generators as words; arrays are put into `numbers`."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  Stable-Baselines3's
    version, state, next_gauss = random.getstate()
    numbers["generators/numpy"] = np.asarray(keys)
    numbers["generators/python"] = np.asarray(state, np.uint32)
    numbers["generators/torch"] = th.get_rng_state().numpy()
    if th.cuda.is_available():
        for device, cuda in enumerate(th.cuda.get_rng_state_all()):
            numbers[f"generators/cuda/{device}"] = cuda.numpy()
    return {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss).hex()],
        "python": [version, None if next_gauss is None else float(next_gauss).hex()],
        "action_space": _words(model.action_space.np_random),
        "environments": _environments(model),
    }


def restore_generators(model: BaseAlgorithm, words: Any, numbers: Any) -> None:
    """Let all generators go on where they were saved."""
    kind, position, has_gauss, gauss = words["numpy"]
    keys = numbers["generators/numpy"]
    np.random.set_state((kind, keys, position, has_gauss, float.fromhex(gauss)))  # noqa: NPY002  Stable-Baselines3's
    version, next_gauss = words["python"]
    state = tuple(numbers["generators/python"].tolist())
    random.setstate((version, state, None if next_gauss is None else float.fromhex(next_gauss)))
    th.set_rng_state(th.from_numpy(numbers["generators/torch"]))
    for device in range(th.cuda.device_count()):
        if f"generators/cuda/{device}" in numbers:
            th.cuda.set_rng_state(th.from_numpy(numbers[f"generators/cuda/{device}"]), device)
    if words["action_space"] is not None:
        model.action_space._np_random = _generator(words["action_space"])
    env = model.get_env()
    for number, state in enumerate(words["environments"] or ()):
        if env is not None and state is not None:
            env.set_attr("np_random", _generator(state), indices=number)


def _environments(model: BaseAlgorithm) -> list[Any] | None:
    """Return the generators of environments that show them."""
    env = model.get_env()
    try:
        shown = [] if env is None else env.get_attr("np_random")
    except (AttributeError, NotImplementedError):
        return None
    return [_words(one) if isinstance(one, np.random.Generator) else None for one in shown]


def _words(generator: np.random.Generator) -> Any:
    arrays: list[Any] = []
    try:
        state = generator_state(generator)
    except CheckpointError:
        return None
    words = encode_state(state, arrays, "a generator")
    return {"state": words, "arrays": [array.tobytes().hex() for array in arrays]}


def _generator(words: Any) -> np.random.Generator:
    arrays = {number: bytes.fromhex(text) for number, text in enumerate(words["arrays"])}
    return restored_generator(decode_state(words["state"], arrays))
