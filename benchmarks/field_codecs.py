"""What every codec makes of a recorded field: ratio and time to decode, as the choice of a codec measures them.

    python benchmarks/field_codecs.py TRACE.npz [--key image] [--frames 2377] [--channels-first] [--stack 4]

TRACE.npz holds frames of consecutive observations under `f_<key>`; streams/trace.py describes the format.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from holdall.native import chosen_kernels
from holdall.schema import Leaf
from holdall.storage.codec import measure, measure_together
from holdall.storage.layout import Window


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
    together = measure_together(kernels.coder, alone, window, slices, lanes=1)
    table = Table(
        "codec", "ratio", "decode us", "reference us", title=f"{wanted.trace.name} {leaf.shape}, {kernels.name} loops"
    )
    for found in sorted(alone + together, key=lambda m: -m.ratio):
        table.add_row(found.codec.describe(), f"{found.ratio:.2f}", f"{found.timed_us:.2f}", f"{found.decode_us:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
