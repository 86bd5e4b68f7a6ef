"""Write a golden checkpoint: `python tests/format/write_golden.py v1_changes`.

The folders are the checkpoints that every later version has to read. `v1` has the codecs that holdall chooses by
itself. In `v1_colours` the pixels of images are numbers of their colours. In `v1_changes` frames are changes of each
other, and the blocks have the place of every slice. In `v1_narrow` some extras need fewer than four bytes per
value. Until the first release, a change of the format may write them again: delete the folder first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall._native import Block, Dictionary, encode
from holdall.codec.codec import Codec, Method, Transform
from holdall.store.tuning import Tuning

HERE = Path(__file__).parent
COLOURED = "v1_colours"
CHANGED = "v1_changes"
NARROW = "v1_narrow"
TICKS = 150
LANES = 2
CAPACITY_TICKS = 120
SPACE = spaces.Dict(
    {
        "history": spaces.Box(-np.inf, np.inf, (70, 2), np.float32),
        "image": spaces.Box(0, 255, (2, 12, 36), np.uint8),
        "state": spaces.Box(-np.inf, np.inf, (40,), np.float32),
    }
)
ACTION = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float64)))
ATTACHED = b"weights of an agent"
REWRITTEN = np.arange(71, 91, 2)
"""Transitions whose extras were rewritten to 1."""


def make_observation(tick: int, name: str) -> dict[str, Any]:
    """Return the observations of both lanes at a tick: a frame stack, a sliding window, and numbers."""
    lanes = np.arange(LANES).reshape(-1, 1, 1)
    pixels = np.arange(12 * 36).reshape(12, 36)
    frames = [(pixels * (1 + (tick - back) % 7) // 5 + 11 * (tick - back) + 3 * lanes) % 251 for back in (1, 0)]
    if name == COLOURED:
        frames = [frame // 64 * 64 for frame in frames]
    if name == CHANGED:
        frames = [np.where(pixels // 9 == (tick - back) % 48, 200, 5 * (pixels % 3)) + lanes for back in (1, 0)]
    days = np.arange(tick, tick + 70).reshape(1, -1, 1)
    history = np.concatenate([(days * 37 + lanes) % 101 / 8, (days * days + lanes) % 89 / 16], axis=2)
    state = np.full((LANES, 40), tick // 20, np.float32) / np.array([[3], [7]], np.float32)
    state[:, 0] += tick
    return {
        "history": history.astype(np.float32),
        "image": np.stack(frames, axis=1).astype(np.uint8),
        "state": state,
    }


def make_extra_spaces(name: str) -> dict[str, spaces.Space[Any]]:
    """Return the extras of a golden checkpoint."""
    extras: dict[str, spaces.Space[Any]] = {"log_prob": spaces.Box(-np.inf, np.inf, (1,), np.float16)}
    if name == NARROW:
        extras |= {"bits": spaces.Box(0, 1, (9,), np.float32), "halves": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    return extras


def make_extras(tick: int, name: str) -> dict[str, Any]:
    """Return the extras of both lanes at a tick."""
    log_prob = np.full((LANES, 1), -tick, np.float16)
    if name != NARROW:
        return {"log_prob": log_prob}
    places = np.arange(LANES * 9).reshape(LANES, 9)
    bits = ((tick + places) % 3 == 0).astype(np.float32)
    halves = (places[:, :3] - tick / 4).astype(np.float32)
    if tick == 60:
        halves[1, 2] = 1 / 3
    return {"bits": bits, "halves": halves, "log_prob": log_prob}


def make_tick(tick: int, name: str) -> dict[str, Any]:
    """Return the arguments of `add` for a tick."""
    ended = np.array([tick % 29 == 28, tick % 41 == 40])
    return {
        "obs": make_observation(tick, name),
        "action": (np.array([tick % 4, 1]), np.full((LANES, 2), 1 / (1 + tick))),
        "reward": np.array([tick, -tick], np.float32),
        "next_obs": make_observation(1000 + tick if ended.any() else tick + 1, name),
        "terminated": ended,
        "truncated": ended[::-1] & ~ended,
        "extras": make_extras(tick, name),
        "valid": np.array([tick % 13 != 0, True]),
    }


def compress_colours(block: Block) -> None:
    """Compress frames by their colours, column by column and with a dictionary. A frame counts as 3 x 4 x 36 values."""
    size = block.slice_bytes
    codec = Codec(size, Method.ZSTANDARD, 9)
    if size == 12 * 36:
        palette = (np.arange(256) * 0x030201).astype("<u4").tobytes()
        dictionary = Dictionary(bytes(range(64)), palette)
        codec = Codec(
            size, Method.LZ4, 7, transform=Transform.COLOUR_COLUMNS, planes=3, rows=4, columns=36, dictionary=dictionary
        )
    coded = encode(block, codec)
    assert coded is not None
    block.form = coded


def compress_changes(block: Block) -> None:
    """Encode slices as changes of each other, with a dictionary. Slices of even numbers come first."""
    numbers = np.arange(block.slice_count, dtype=np.uint32)
    order = np.concatenate([numbers[::2], numbers[1::2]])
    codec = Codec(
        block.slice_bytes,
        Method.LZ4,
        7,
        group=32,
        transform=Transform.CHANGES,
        dictionary=Dictionary(bytes([0, 5, 10]) * 30),
    )
    coded = encode(block, codec, order)
    assert coded is not None
    block.form = coded


COMPRESS = {COLOURED: compress_colours, CHANGED: compress_changes}


def main(name: str) -> None:
    """Write the checkpoint. Its extras were rewritten between two saves."""
    folder = HERE / name
    if folder.exists():
        sys.exit(f"{folder} exists. Delete it to write it in the present format.")
    extras = make_extra_spaces(name)
    # The memory must not compress blocks that `COMPRESS` compresses.
    budget = "auto" if name in COMPRESS else None
    tuning = Tuning(block_bytes=2**14, max_segment_ticks=40, min_packed_rows=8)
    with ReplayMemory(
        SPACE, ACTION, CAPACITY_TICKS * LANES, LANES, budget=budget, seed=7, extras=extras, _tuning=tuning
    ) as memory:
        for tick in range(TICKS):
            memory.add(**make_tick(tick, name))
        memory.store.wait_idle()
        blocks = {part.block for segment in memory.host_store.catalog.segments for part in segment.parts if part.block}
        for block in blocks:
            if name in COMPRESS and not block.is_open:
                COMPRESS[name](block)
        memory.save(folder, attach={"agents/agent_0.pth": ATTACHED}).result()
        memory.update(REWRITTEN, log_prob=np.ones((len(REWRITTEN), 1), np.float16))
        memory.save(folder, attach={"agents/agent_0.pth": ATTACHED}, keep=1).result()
    (folder / "LOCK").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
