"""Recorded frames by themselves, for trace_codecs.py: what a slice takes, and lossless video beside it.

Video is FFV1 and x264 in groups of 16.

x264 (-qp 0) takes RGB as it is (libx264rgb) and gray as gray; FFV1 likewise. Video has random access by group only,
holdall by frame. Frames are those of the first blocks of a memory, each different one once, on both sides.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.native import chosen_kernels
from holdall.schema import Leaf
from holdall.storage import COST_CAPS, Window, choose
from holdall.storage.codec import describe

GROUP = 16
BLOCK_BYTES = 16 * 2**20
MOST_FRAMES, FEWEST = 3_000, 200
STACKS = {"pong": 4, "seaquest": 4, "game_boy": 4}


def beside_video(folder: Path, traces: dict[str, str]) -> dict[str, Any]:
    """Compare all traces; return bytes a frame by each way."""
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


def slice_costs(folder: Path, traces: dict[str, str], preferences: list[str]) -> dict[str, Any]:
    """Choose a codec on the first block of each trace, seal the second with it, and decode what batches read."""
    results = {}
    for (name, file), prefer in itertools.product(traces.items(), preferences):
        frames = unique_frames(folder / file, 2 * BLOCK_BYTES)
        stack = STACKS.get(name, 1)
        planar = np.moveaxis(frames, -1, 1) if frames.ndim == 4 and stack == 1 else frames
        leaf = Leaf("", planar.shape[1:] if stack == 1 else (stack, *planar.shape[1:]), planar.dtype)
        slices = np.ascontiguousarray(planar).reshape(len(frames), -1)
        window, coder = Window.whole(leaf) if stack == 1 else Window.along(leaf, 0, 1), chosen_kernels().coder
        nbytes = window.slice_bytes
        first = BLOCK_BYTES // nbytes
        codec = choose(coder, leaf, window, slices[:first], COST_CAPS[prefer], 2)
        rest = slices[first:] if len(slices) > first + FEWEST else slices[:first]
        start = time.thread_time()
        sealed = coder.seal(rest, codec)
        seal_us = (time.thread_time() - start) / len(rest) * 1e6
        if sealed is None:
            continue
        reach = window.count + window.shift
        begins = np.random.default_rng(1).integers(0, len(rest) - reach, max(40, min(256, 2**22 // nbytes)))
        order = (begins[:, None] + np.arange(reach)).reshape(-1).astype(np.int64)
        out, times = np.empty((len(order), nbytes), np.uint8), []
        for _ in range(9):
            start = time.thread_time()
            coder.decode(sealed, order, out)
            times.append((time.thread_time() - start) / len(order) * 1e6)
        row = {"bytes": sealed.nbytes / len(rest), "decode_us": min(times), "seal_us": seal_us}
        row["plain_bytes"] = 2 * stack * nbytes  # that a plain buffer takes for a transition's observations
        results[f"{name} {prefer}"] = row | {"codec": describe(codec), "reason": codec.reason}
        print(name, prefer, json.dumps(results[f"{name} {prefer}"]), flush=True)
    return results


def unique_frames(file: Path, most_bytes: int = 1 << 40) -> NDArray[np.uint8]:
    """Return the images of a trace, each different one once: a memory holds it once, too."""
    with np.load(file, allow_pickle=False) as loaded:
        name = max((key for key in loaded.files if key.startswith("f_")), key=lambda key: loaded[key][0].nbytes)
        frames = loaded[name]
    frames = frames[: min(max(MOST_FRAMES, len(frames) if most_bytes < 1 << 40 else 0), most_bytes // frames[0].nbytes)]
    _, first = np.unique(frames.reshape(len(frames), -1), axis=0, return_index=True)
    return np.ascontiguousarray(frames[np.sort(first)])


def holdall_bytes(frames: NDArray[np.uint8]) -> dict[str, Any]:
    """Seal the frames in blocks, with the codec that is chosen on the first."""
    planar = np.moveaxis(frames, -1, 1) if frames.ndim == 4 else frames
    leaf = Leaf("", planar.shape[1:], planar.dtype)
    slices = np.ascontiguousarray(planar).reshape(len(frames), -1)
    window, coder = Window.whole(leaf), chosen_kernels().coder
    found: dict[str, Any] = {}
    in_a_block = max(1, BLOCK_BYTES // leaf.nbytes)
    for prefer in ("balanced", "memory"):
        codec = choose(coder, leaf, window, slices[:in_a_block], COST_CAPS[prefer], 2)
        sealed = [coder.seal(slices[at : at + in_a_block], codec) for at in range(0, len(slices), in_a_block)]
        common = 0 if codec.dictionary is None else len(codec.dictionary.content)
        nbytes = common + sum(block.nbytes for block in sealed if block is not None)
        found |= {prefer: nbytes / len(slices), f"{prefer}_codec": describe(codec)}
    return found


def video_bytes(frames: NDArray[np.uint8], codec: str) -> float:
    """Encode the frames as a video in groups of 16; return the bytes of its packets, without the container's."""
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
