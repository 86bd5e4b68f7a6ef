"""Lossless video of recorded frames, for `trace_codecs.py --video`: FFV1 and x264 in groups of 16 frames.

x264 (-qp 0) encodes RGB without conversion (libx264rgb), and gray as gray; FFV1 does the same. Video has random access
by group only, holdall by frame. Both sides compress the first frames of a trace, each different frame once.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall._native import Block
from holdall.codec.choice import FieldCodec
from holdall.codec.presets import describe_codec
from holdall.schema import Leaf
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

GROUP = 16
BLOCK_BYTES = 16 * 2**20
MAX_FRAMES = 3_000


def compare_with_video(folder: Path, traces: dict[str, str]) -> dict[str, Any]:
    """Return the bytes per frame of holdall and of two video codecs, for every trace."""
    results = {}
    for name, file in traces.items():
        frames = unique_frames(folder / file)
        row = holdall_bytes(frames)
        row |= {"ffv1": video_bytes(frames, "ffv1"), "x264": video_bytes(frames, "x264")}
        row["smaller_than_both"] = row["memory"] < min(row["ffv1"], row["x264"])
        results[name] = row | {"frames": len(frames), "raw": frames[0].nbytes}
        print(name, json.dumps(results[name]), flush=True)
    print(f"fewer bytes than both on {sum(row['smaller_than_both'] for row in results.values())} of {len(results)}")
    return results


def unique_frames(file: Path) -> NDArray[np.uint8]:
    """Return the first images of a trace, each different image once, as a memory stores them."""
    with np.load(file, allow_pickle=False) as loaded:
        name = max((key for key in loaded.files if key.startswith("f_")), key=lambda key: loaded[key][0].nbytes)
        frames = loaded[name][:MAX_FRAMES]
    _, first = np.unique(frames.reshape(len(frames), -1), axis=0, return_index=True)
    return np.ascontiguousarray(frames[np.sort(first)])


def holdall_bytes(frames: NDArray[np.uint8]) -> dict[str, Any]:
    """Compress the frames in blocks, as a memory does."""
    planar = np.moveaxis(frames, -1, 1) if frames.ndim == 4 else frames
    leaf = Leaf("", planar.shape[1:], planar.dtype)
    slices = np.ascontiguousarray(planar).reshape(len(frames), -1)
    block_slices = max(1, BLOCK_BYTES // leaf.nbytes)
    found: dict[str, Any] = {}
    for prefer in ("balanced", "memory"):
        codec = FieldCodec(leaf, Window.whole(leaf), prefer, Tuning())
        nbytes = 0
        for first in range(0, len(slices), block_slices):
            piece = slices[first : first + block_slices]
            coded = codec.encode(Block(leaf.nbytes, len(piece), piece), is_behind=False)
            nbytes += coded.nbytes
        dictionary = coded.codec.dictionary
        nbytes += 0 if dictionary is None else len(dictionary.content)
        found[prefer] = nbytes / len(slices)
        found[f"{prefer}_codec"] = describe_codec(coded.codec)
    return found


def video_bytes(frames: NDArray[np.uint8], codec: str) -> float:
    """Return the bytes per frame of a video in groups of 16, without those of its container."""
    ffmpeg = os.environ.get("FFMPEG") or importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    is_rgb = frames.ndim == 4
    height, width = frames.shape[1:3]
    pixels = "rgb24" if is_rgb else "gray"
    given = ["-f", "rawvideo", "-pix_fmt", pixels, "-s", f"{width}x{height}", "-r", "25", "-i", "-"]
    if codec == "ffv1":
        way = [
            "-c:v",
            "ffv1",
            "-level",
            "3",
            "-g",
            str(GROUP),
            "-context",
            "1",
            "-pix_fmt",
            "gbrp" if is_rgb else "gray",
        ]
    else:
        library, kept = ("libx264rgb", "rgb24") if is_rgb else ("libx264", "gray")
        way = ["-c:v", library, "-qp", "0", "-preset", "slow", "-g", str(GROUP), "-pix_fmt", kept]
    command = [ffmpeg, "-v", "error", *given, *way, "-f", "data" if codec == "ffv1" else "h264", "-"]
    if codec == "ffv1":
        command[-3:] = ["-map", "0:v", "-f", "data", "-"]
    done = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=True)
    return len(done.stdout) / len(frames)
