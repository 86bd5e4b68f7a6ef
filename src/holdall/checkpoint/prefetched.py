"""Prefetched batches: drawn when a memory was saved, and not handed out yet; a loaded memory hands them out first.

In:  the recipes of loaders' batches.  Out: the same recipes, as plain trees and back.
Invariant: a loader of a loaded memory hands out what that of the saved one would have, unless it is asked for another
number of rows, or what it drew was evicted meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdall.batch import Draw, Goals
from holdall.errors import DamageError, TransitionIdError
from holdall.experience.delivery.loader import Loader
from holdall.sampling.draw import Held

_ARRAYS = {"ids": "i8", "weights": "f4", "last_ids": "i8", "reward": None, "discount": "f4", "mask": "b1"}


class Prefetched:
    """What the loaders of one memory have under way."""

    def __init__(self) -> None:
        self._loaders: list[tuple[weakref.ref[Loader], deque[Draw]]] = []
        self._saved: deque[deque[Draw]] = deque()  # by loader of the memory that was saved

    def watch(self, loader: Loader, drawn: deque[Draw]) -> None:
        """Remember a loader, and the recipes that it is given."""
        self._loaders = [(ref, draws) for ref, draws in self._loaders if ref() is not None]
        self._loaders.append((weakref.ref(loader), drawn))

    def saved(self, batch_size: int) -> deque[Draw]:
        """Return what the next loader begins with."""
        draws = self._saved.popleft() if self._saved else deque()
        return draws if all(len(draw.ids) == batch_size for draw in draws) else deque()

    @staticmethod
    def next_of(draws: deque[Draw], held: Held) -> Draw | None:
        """Take the next of some recipes, if all that it names is held still."""
        try:
            draw = draws.popleft()
            held.require_drawn(draw)
        except (IndexError, TransitionIdError):
            return None
        return draw

    def state(self) -> list[Any]:
        """Describe what is under way, loader by loader."""
        found = []
        for ref, draws in self._loaders:
            loader = ref()
            if loader is not None and loader.under_way:
                found.append([_words(draw) for draw in list(draws)[-loader.under_way :]])
        return found

    def restore(self, state: Any, reward_fn: Any) -> None:
        """Take over what `state` returned elsewhere."""
        self._saved = deque(deque(_draw(words, reward_fn) for words in loader) for loader in state)


def _words(draw: Draw) -> dict[str, Any]:
    words: dict[str, Any] = {name: getattr(draw, name) for name in _ARRAYS}
    goals = draw.goals
    if goals is not None:
        words["goals"] = {"rows": goals.rows, "ids": goals.ids, "keys": [goals.achieved_key, goals.desired_key]}
    return words


def _draw(words: Mapping[str, Any], reward_fn: Any) -> Draw:
    arrays = {name: words[name] for name in _ARRAYS}
    for name, dtype in _ARRAYS.items():
        array = arrays[name]
        if array is None and name not in {"ids", "weights"}:
            continue
        if not isinstance(array, np.ndarray) or (dtype is not None and array.dtype != np.dtype(dtype)):
            raise DamageError(f"the {name} of a prefetched batch are no array of {dtype}")
        if array.ndim < 1 or len(array) != len(arrays["ids"]):
            raise DamageError(f"the {name} of a prefetched batch have shape {array.shape}, not a row an id")
    goals = words.get("goals")
    if goals is None:
        return Draw(**arrays)
    rows, ids = np.asarray(goals["rows"], np.int64), np.asarray(goals["ids"], np.int64)
    if (
        rows.shape != ids.shape
        or rows.ndim != 1
        or (rows.size and not 0 <= rows.min() <= rows.max() < len(arrays["ids"]))
    ):
        raise DamageError("the goals of a prefetched batch are not of its rows")
    achieved, desired = (str(key) for key in goals["keys"])
    return Draw(**arrays, goals=Goals(rows, ids, achieved, desired, reward_fn))
