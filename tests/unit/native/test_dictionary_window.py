"""Dictionaries of LZ4: each block is read with its own, whichever a thread read with before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from holdall.native import chosen_kernels
from holdall.schema import Bytes, Leaf
from holdall.storage.batch_source import Places
from holdall.storage.blocks import Codec, Coded, Dictionary, Method, Predictor, Transform, reserve
from holdall.storage.slices import ClosedPart, Window

KERNELS = chosen_kernels()
WIDTH, COUNT = 2400, 24
PLAIN = Codec(Method.LZ4, 7, Transform(WIDTH))
WAYS = {
    "alone": PLAIN,
    "4 together": replace(PLAIN, group=4),
    "pixels": replace(PLAIN, transform=Transform(WIDTH, 0, Predictor.PIXELS, 3, 20, 40)),
    "differences": replace(PLAIN, transform=Transform(WIDTH, 0, Predictor.LEFT, 3, 20, 40, green=True)),
}


def pieced_together(content: bytes, form: Transform, generator: np.random.Generator) -> Bytes:
    """Make slices that are pieces of a dictionary before they are compressed: read with another, they are others."""
    at = generator.integers(0, len(content) - 20, (COUNT + 1, WIDTH // 20))
    pieces = np.ascontiguousarray(np.frombuffer(content, np.uint8)[at[..., None] + np.arange(20)]).reshape(-1)
    offsets = np.arange(0, pieces.size + 1, WIDTH, dtype=np.uint32)
    coder, slices = KERNELS.coder, np.zeros((COUNT + 1, WIDTH), np.uint8)
    stored = Coded(Codec(Method.STORED, 0, form), COUNT + 1, offsets, np.zeros(0, np.uint8), pieces)
    coder.decode(coder.adopt(stored), np.arange(COUNT + 1), slices)
    return slices


def sealed_part(codec: Codec, slices: Bytes) -> tuple[ClosedPart, np.ndarray]:
    window = Window.whole(Leaf("", (WIDTH,), np.dtype("u1")))
    block = KERNELS.new_block(WIDTH, reserve((COUNT + 2) * 2 * WIDTH))
    part, cursors = KERNELS.new_part(window, 1, block, 0), np.zeros((COUNT, 1), np.uint32)
    for tick in range(COUNT):
        part.append(slices[tick : tick + 1], slices[tick + 1 : tick + 2], cursors[tick])
    closed, compressed = part.closed(), KERNELS.coder.seal(block.raw, codec)
    assert compressed is not None
    assert compressed.nbytes < COUNT * WIDTH
    block.replace_by(compressed)
    return closed, cursors.reshape(-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(4_000, 4_000), (65_536, 9_000), (90_000, 65_537)])
def test_blocks_with_different_dictionaries_are_read_in_one_batch(way: str, sizes: tuple[int, int]) -> None:
    """Row by row in turns, also where a dictionary is longer than LZ4 looks back."""
    generator = np.random.default_rng(sizes[0])
    common = [generator.bytes(size) for size in sizes]
    slices = [pieced_together(content[-40_000:], WAYS[way].transform, generator) for content in common]
    parts = [
        sealed_part(replace(WAYS[way], dictionary=Dictionary(content)), rows)
        for content, rows in zip(common, slices, strict=True)
    ]
    turns = np.tile(np.array([0, 1], np.int32), COUNT)
    places = Places(
        records=[np.array([part.record() for part, _ in parts], np.int64)],
        segment=turns,
        cursors=[np.stack([cursors for _, cursors in parts], axis=1).reshape(-1).copy()],
        lane=np.zeros(2 * COUNT, np.int32),
        lanes=1,
        held=(tuple(part.held for part, _ in parts),),
    )
    obs, next_obs = np.full((2, 2 * COUNT, WIDTH), 7, np.uint8)
    KERNELS.gather(places, 0, obs, next_obs)
    for which in (0, 1):
        np.testing.assert_array_equal(obs[turns == which], slices[which][:-1])
        np.testing.assert_array_equal(next_obs[turns == which], slices[which][1:])
