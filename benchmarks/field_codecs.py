"""What every codec makes of a recorded field: ratio and time to decode, as the choice of a codec measures them.

    python benchmarks/field_codecs.py TRACE.npz [--key image] [--frames 2377] [--channels-first] [--stack 4]

TRACE.npz holds frames of consecutive observations under `f_<key>`; streams/trace.py describes the format.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from holdall.native import chosen_kernels
from holdall.schema import Bytes, Leaf
from holdall.storage.block_sample import BlockSample
from holdall.storage.blocks import Codec
from holdall.storage.codec import describe
from holdall.storage.codec_choice import measure, measure_together
from holdall.storage.slices import Window
from holdall.storage.ticks import Coder


def main() -> None:
    """Measure every candidate on 256 frames, spread over the first block of a memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--key", default="obs")
    parser.add_argument("--frames", type=int, default=2_377, help="frames of the first block")
    parser.add_argument("--channels-first", action="store_true", help="put the last axis before the others")
    parser.add_argument("--stack", type=int, default=1, help="frames of an observation: read as neighbours")
    wanted = parser.parse_args()
    frames = np.load(wanted.trace)[f"f_{wanted.key}"][: wanted.frames]
    if wanted.channels_first:
        frames = np.moveaxis(frames, -1, 1)
    leaf = Leaf(wanted.key, frames.shape[1:], frames.dtype)
    picked = np.linspace(0, len(frames) - 1, min(256, len(frames))).astype(np.int64)
    samples = np.ascontiguousarray(frames[picked]).reshape(len(picked), -1).view(np.uint8)
    kernels = chosen_kernels()
    window = replace(Window.whole(leaf), count=wanted.stack)
    alone = measure(kernels.coder, leaf, window, samples)
    slices = np.ascontiguousarray(frames).reshape(len(frames), -1).view(np.uint8)
    together = measure_together(kernels.coder, alone, window, BlockSample.of(slices, window))
    title = f"{wanted.trace.name} {leaf.shape}"
    table = Table("codec", "ratio", "us by the clock", "us as counted", title=title)
    for found in sorted(alone + together, key=lambda m: -m.ratio):
        clock_us = timed_us(kernels.coder, found.codec, samples)
        table.add_row(describe(found.codec), f"{found.ratio:.2f}", f"{clock_us:.2f}", f"{found.decode_us:.2f}")
    Console().print(table)


def timed_us(coder: Coder, codec: Codec, samples: Bytes) -> float:
    """Decode slices in random order; return the microseconds that one takes."""
    sealed = coder.seal(samples, codec)
    assert sealed is not None
    order = np.random.default_rng(0).permutation(len(samples)).astype(np.int64)
    out, times = np.empty_like(samples), []
    for _ in range(5):
        start = time.thread_time()
        coder.decode(sealed, order, out)
        times.append(time.thread_time() - start)
    return min(times) / len(samples) * 1e6


if __name__ == "__main__":
    main()
