"""Writes a golden checkpoint: `python tests/format/write_golden.py v1_keys`.

Each is written once, by the version that first writes such blocks, and never again: later versions have to read it. The
blocks of v1 are coded as the first version coded them, those of v1_keys against keys, and lane by lane; in
v1_colours the pixels of images are numbers of their colours, in v1_changes frames are changes of each other, in
v1_pairs differences are coded as pairs, and v1_lanes says of slices which lane brought them, not where they stand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.storage import (
    Codec,
    Coder,
    Dictionary,
    Method,
    Predictor,
    Transform,
    Window,
    choosing,
    segment,
    train_pairs,
)

HERE = Path(__file__).parent
COLOURED, CHANGED, LANED = "v1_colours", "v1_changes", "v1_lanes"
TICKS, LANES, CAPACITY_TICKS = 150, 2, 120
SPACE = spaces.Dict(
    {
        "history": spaces.Box(-np.inf, np.inf, (70, 2), np.float32),
        "image": spaces.Box(0, 255, (2, 12, 36), np.uint8),
        "state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)
ACTION = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float64)))
ATTACHED = b"weights of an agent"


def observation(tick: int, name: str) -> dict[str, Any]:
    """Return both lanes' observation at a tick; a frame stack, a sliding window, and numbers."""
    lanes = np.arange(LANES).reshape(-1, 1, 1)
    pixels = np.arange(12 * 36).reshape(12, 36)
    frames = [(pixels * (1 + (tick - back) % 7) // 5 + 11 * (tick - back) + 3 * lanes) % 251 for back in (1, 0)]
    if name == COLOURED:
        frames = [frame // 64 * 64 for frame in frames]
    if name in {CHANGED, LANED}:
        frames = [np.where(pixels // 9 == (tick - back) % 48, 200, 5 * (pixels % 3)) + lanes for back in (1, 0)]
    days = np.arange(tick, tick + 70).reshape(1, -1, 1)
    history = np.concatenate([(days * 37 + lanes) % 101 / 8, (days * days + lanes) % 89 / 16], axis=2)
    state = np.full((LANES, 3), tick, np.float32) / np.array([[3], [7]], np.float32)
    return {
        "history": history.astype(np.float32),
        "image": np.stack(frames, axis=1).astype(np.uint8),
        "state": state,
    }


def tick_arguments(tick: int, name: str) -> dict[str, Any]:
    """Return what is added at a tick."""
    ended = np.array([tick % 29 == 28, tick % 41 == 40])
    return {
        "obs": observation(tick, name),
        "action": (np.array([tick % 4, 1]), np.full((LANES, 2), 1 / (1 + tick))),
        "reward": np.array([tick, -tick], np.float32),
        "next_obs": observation(1000 + tick if ended.any() else tick + 1, name),
        "terminated": ended,
        "truncated": ended[::-1] & ~ended,
        "extras": {"log_prob": np.full((LANES, 1), -tick, np.float16)},
        "valid": np.array([tick % 13 != 0, True]),
    }


def keyed(_coder: object, _leaf: object, window: Window, *_: Any) -> Codec:
    """Code images against keys, two together."""
    return Codec(Method.ZSTD, 9, Transform(window.slice_bytes), group=2, key=4)


def coloured(_coder: object, _leaf: object, window: Window, *_: Any) -> Codec:
    """Number the colours of frames, which are taken for 3 x 4 x 36 pixels, column by column and behind a dictionary."""
    size = window.slice_bytes
    if size != 12 * 36:
        return Codec(Method.ZSTD, 9, Transform(size))
    palette = (np.arange(256) * 0x030201).astype("<u4").tobytes()
    form = Transform(size, 0, Predictor.COLUMNS, 3, 4, 36)
    return Codec(Method.LZ4, 7, form, Dictionary(palette + bytes(range(64))), group=1)


def changed(_coder: object, _leaf: object, window: Window, *_: Any) -> Codec:
    """Code frames as changes of each other, behind a dictionary."""
    form = Transform(window.slice_bytes, predictor=Predictor.CHANGES)
    return Codec(Method.LZ4, 7, form, Dictionary(bytes([0, 5, 10]) * 30), group=32)


def paired(coder: Coder, _leaf: object, window: Window, sample: Any, *_: Any) -> Codec:
    """Code the differences of frames as pairs, by tables that are trained on some of them."""
    size = window.slice_bytes
    if size != 12 * 36:
        return Codec(Method.ZSTD, 9, Transform(size))
    form = Transform(size, 0, Predictor.LEFT, 1, 12, 36)
    known = coder.seal(sample.spread, Codec(Method.STORED, 0, form))
    if known is None:
        raise ValueError("frames have no palette that could be too small")
    tables = train_pairs(np.asarray(known.coded.data).reshape(-1, size), form)
    return Codec(Method.PAIRS, 0, form, Dictionary(tables))


def main(name: str) -> None:
    """Write the checkpoint."""
    folder = HERE / name
    if folder.exists():
        sys.exit(f"{folder} was written by the version that first wrote such blocks, and stays as it is")
    segment.SEGMENT_BYTES = 2**14
    choices = {"v1_keys": keyed, COLOURED: coloured, CHANGED: changed, LANED: changed, "v1_pairs": paired}
    if name in choices:
        vars(choosing)["choose"] = choices[name]
    extras = {"log_prob": spaces.Box(-np.inf, np.inf, (1,), np.float16)}
    with ReplayMemory(SPACE, ACTION, CAPACITY_TICKS * LANES, LANES, budget=None, seed=7, extras=extras) as memory:
        for tick in range(TICKS):
            memory.add(**tick_arguments(tick, name))
        memory.drain()
        memory.save(folder, attach={"agents/agent_0.pth": ATTACHED}).result()
    (folder / "LOCK").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
