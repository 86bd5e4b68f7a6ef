"""A program that reads a pickled replay buffer and leaves its arrays behind: `python -m holdall.sb3.unpickle FILE DIR`.

A pickle runs whatever code it holds; so this runs in a process of its own, and only arrays leave it.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(file: Path, folder: Path) -> None:
    """Unpickle a buffer and save its arrays, oldest transition first."""
    with file.open("rb") as stream:
        buffer: Any = pickle.load(stream)
    order = np.arange(buffer.pos)
    if buffer.full:
        order = np.roll(np.arange(buffer.buffer_size), -buffer.pos)
    is_dict = isinstance(buffer.observations, dict)
    for name in ("observations", "next_observations"):
        found = getattr(buffer, name)
        if not is_dict and name == "next_observations" and buffer.optimize_memory_usage:
            rows = np.asarray(buffer.observations)[(order + 1) % buffer.buffer_size]
            np.save(folder / f"{name}.npy", rows, allow_pickle=False)
            continue
        for number, part in enumerate(found.values() if is_dict else [found]):
            label = f"{name}.{number}.npy" if is_dict else f"{name}.npy"
            np.save(folder / label, np.asarray(part)[order], allow_pickle=False)
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.save(folder / f"{name}.npy", np.asarray(getattr(buffer, name))[order], allow_pickle=False)
    words = {
        "keys": list(buffer.observations) if is_dict else None,
        "capacity": int(buffer.buffer_size * buffer.n_envs),
        "num_envs": int(buffer.n_envs),
    }
    (folder / "words.json").write_text(json.dumps(words), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
