"""Does decoding LZ4 on the GPU pay? `python benchmarks/gpu_lz4.py [--json FILE]`; docs/decisions/016 has the answer.

Needs torch with CUDA; without a device it says so and ends. An experiment: nothing of it is part of holdall.
In:  frames of 84 x 84 x 3, two kinds: like a camera's, and like an Atari screen.  Out: bits compared, a table, JSON.

Ways to get 4,096 frames that lie anywhere in the host's memory to the GPU, in turns; medians until the stream has them:
raw over the bus; compressed over the bus and decoded there, a warp a frame; and what holdall does, which decodes on the
host and sends what is ready meanwhile. LZ4's blocks are those of LZ4_compress_HC, of differences to the left pixel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall.delivery.cuda_program import CudaProgram

SHAPE = (84, 84, 3)
FRAME_BYTES = 84 * 84 * 3
BATCH, TURNS, WARM_UP = 4_096, 30, 5
NOISY = 0.002

SOURCE = r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
struct Task {
    const u8 *coded;
    const i64 *starts;
    const int *sizes, *frames;
    u8 *scratch;
    i64 slot;
    u8 *out;
    i64 count, frame_bytes;
    int *failed;
};

/* A block a frame: its compressed bytes cross the bus. */
extern "C" __global__ void bring(const struct Task t)
{
    for (i64 i = blockIdx.x; i < t.count; i += gridDim.x) {
        const uint4 *from = (const uint4 *)(t.coded + t.starts[t.frames[i]]);
        uint4 *to = (uint4 *)(t.scratch + i * t.slot);
        for (i64 k = threadIdx.x; k < (t.sizes[t.frames[i]] + 15) / 16; k += blockDim.x) to[k] = from[k];
    }
}

/* Add what follows a length of 15; 0 if the block ends before. */
__device__ static const u8 *extend(const u8 *in, const u8 *end, u32 *length)
{
    u32 more = 255;
    for (; more == 255; *length += more) {
        if (in >= end) return 0;
        more = *in++;
    }
    return in;
}

/* A warp a frame: all lanes read the same token, and copy literals and matches together. */
extern "C" __global__ void decode(const struct Task t)
{
    i64 frame = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (frame >= t.count) return;
    const u8 *in = t.scratch + frame * t.slot, *end = in + t.sizes[t.frames[frame]];
    u8 *out = t.out + frame * t.frame_bytes, *to = out, *last = out + t.frame_bytes;
    u32 lane = threadIdx.x;
    while (in < end) {
        u32 token = *in++, length = token >> 4;
        if (length == 15 && !(in = extend(in, end, &length))) { *t.failed = 1; return; }
        if (length > end - in || length > last - to) { *t.failed = 1; return; }
        for (u32 k = lane; k < length; k += 32) to[k] = in[k];
        in += length, to += length;
        if (in >= end) break;
        if (end - in < 2) { *t.failed = 1; return; }
        u32 offset = in[0] | in[1] << 8;
        in += 2, length = token & 15;
        if (length == 15 && !(in = extend(in, end, &length))) { *t.failed = 1; return; }
        length += 4;
        if (offset == 0 || offset > to - out || length > last - to) { *t.failed = 1; return; }
        __syncwarp();
        const u8 *from = to - offset;
        if (offset >= length) for (u32 k = lane; k < length; k += 32) to[k] = from[k];
        else for (u32 k = lane; k < length; k += 32) to[k] = from[k % offset];
        to += length;
        __syncwarp();
    }
    if (to != last) *t.failed = 1;
}
"""


class Task(ctypes.Structure):
    """As SOURCE declares it."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "coded", "starts", "sizes", "frames", "scratch", "slot", "out", "count", "frame_bytes", "failed",
        )
    ]  # fmt: skip


def camera_frames(count: int) -> NDArray[np.uint8]:
    """Make smooth backgrounds that move, with a little noise: LZ4 makes a fifth of them, as of a robot's camera."""
    draw = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(84), np.arange(84))
    made = np.empty((count, *SHAPE), np.uint8)
    for i in range(count):
        for c in range(3):
            made[i, ..., c] = 128 + 60 * np.sin((x + i) / (9 + c)) + 40 * np.cos((y - i / 2) / (11 + c))
        made[i] = made[i] // 8 * 8 + (draw.random(SHAPE) < NOISY)
    return made


def screen_frames(count: int) -> NDArray[np.uint8]:
    """Make plain screens with a few moving rectangles."""
    draw = np.random.default_rng(1)
    made = np.full((count, *SHAPE), 17, np.uint8)
    for i in range(count):
        for _ in range(12):
            row, column = draw.integers(0, 76, 2)
            made[i, row : row + 7, column : column + 5] = draw.integers(0, 256, 3, np.uint8)
    return made


class OnDevice:
    """Frames in pinned memory, raw and compressed, and the kernels that bring them."""

    def __init__(self, frames: NDArray[np.uint8]) -> None:
        self.rows = frames.reshape(len(frames), -1)
        coded_rows = np.diff(frames, axis=2, prepend=np.uint8(0)).reshape(len(frames), -1)
        blocks = [lz4.block.compress(row.tobytes(), mode="high_compression", store_size=False) for row in coded_rows]
        self.expected = coded_rows
        self.ratio = FRAME_BYTES * len(blocks) / sum(map(len, blocks))
        sizes = np.array([len(block) for block in blocks], np.int32)
        starts = np.concatenate([[0], np.cumsum((sizes + 15) // 16 * 16)]).astype(np.int64)
        self.coded = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
        for start, block in zip(starts, blocks, strict=False):
            self.coded.numpy()[start : start + len(block)] = np.frombuffer(block, np.uint8)
        self.starts, self.sizes = torch.from_numpy(starts).cuda(), torch.from_numpy(sizes).cuda()
        self.frames = torch.empty(BATCH, dtype=torch.int32, pin_memory=True)
        slot = int(sizes.max() + 15) // 16 * 16
        self.scratch = torch.empty(BATCH * slot, dtype=torch.uint8, device="cuda")
        self.out = torch.empty((BATCH, FRAME_BYTES), dtype=torch.uint8, device="cuda")
        self.failed = torch.zeros(1, dtype=torch.int32, device="cuda")
        program = CudaProgram(torch, torch.device("cuda", 0), SOURCE)
        self._bring, self._decode = program.kernel("bring"), program.kernel("decode")
        self._task = Task(
            *(t.data_ptr() for t in (self.coded, self.starts, self.sizes, self.frames, self.scratch)), slot,
            self.out.data_ptr(), BATCH, FRAME_BYTES, self.failed.data_ptr(),
        )  # fmt: skip
        self.raw = torch.empty(BATCH * FRAME_BYTES, dtype=torch.uint8, pin_memory=True)
        self._draw = np.random.default_rng(2)

    def draw(self) -> None:
        """Choose the frames of the next batch."""
        self.frames.numpy()[:] = self._draw.integers(0, len(self.rows), BATCH)

    def over_the_bus(self) -> None:
        """Send as many raw bytes from one place: nothing can be faster."""
        self.out.view(-1).copy_(self.raw, non_blocking=True)

    def bring(self) -> None:
        """Fetch compressed bytes."""
        self._bring((2_048, 1), (128, 1), torch.cuda.current_stream().cuda_stream, self._task)

    def decode(self) -> None:
        """Decode what was fetched."""
        self._decode((BATCH // 4, 1), (32, 4), torch.cuda.current_stream().cuda_stream, self._task)

    def bring_and_decode(self) -> None:
        """Do both."""
        self.draw()
        self.bring()
        self.decode()

    def check(self) -> None:
        """Refuse to time what returns other bytes."""
        self.bring_and_decode()
        found = self.out.cpu().numpy()
        if int(self.failed) or not np.array_equal(found, self.expected[self.frames.numpy()]):
            sys.exit("error: decoded bytes differ")


def sealed_memory(frames: NDArray[np.uint8]) -> holdall.ReplayMemory:
    """Hold the frames compressed, as holdall does without room for raw ones."""
    memory = holdall.ReplayMemory(
        spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(2), len(frames), device="cuda", budget=None, seed=0
    )
    for begin in range(0, len(frames) - 1, 500):
        obs, after = frames[begin : begin + 500], frames[begin + 1 : begin + 501]
        steps = len(after)
        flags = np.zeros((steps, 1), bool)
        actions, rewards = np.zeros((steps, 1), np.int64), np.zeros((steps, 1), np.float32)
        memory.extend(obs[:steps, None], actions, rewards, after[:, None], flags, flags)
    memory.drain()
    return memory


def timed(way: Any) -> float:
    """Return the milliseconds of one batch."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def measure(frames: NDArray[np.uint8]) -> tuple[dict[str, float], str]:
    """Time all ways for one kind of frames; and say how holdall compressed them."""
    there = OnDevice(frames)
    there.check()
    with sealed_memory(frames) as memory:
        ways = {
            "raw over the bus": there.over_the_bus,
            "compressed over the bus, decoded there": there.bring_and_decode,
            "of that, the bus": there.bring,
            "of that, decoding": there.decode,
            "holdall, compressed, no prefetch": lambda: memory.sample(BATCH // 2),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS + WARM_UP):
            for name, way in ways.items():
                seconds = timed(way)
                if turn >= WARM_UP:
                    found[name].append(seconds)
        with memory.loader(BATCH // 2, prefetch=2) as loader:
            flow = [timed(lambda: next(loader)) for _ in range(TURNS + WARM_UP)][WARM_UP:]
        held = memory.report().fields[0]
    result = {name: statistics.median(times) for name, times in found.items()}
    result["holdall, compressed, prefetch"] = statistics.fmean(flow)
    result["ratio of LZ4"] = there.ratio
    result["ratio of holdall"] = held.plain_bytes / held.slice_bytes / 2 if held.slice_bytes else 0.0
    return result, held.finding


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return
    measured = {"camera": measure(camera_frames(4_000)), "screen": measure(screen_frames(4_000))}
    found = {name: times for name, (times, _) in measured.items()}
    codecs = {name: codec for name, (_, codec) in measured.items()}
    print(codecs)
    print("| 4,096 frames | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for name in found["camera"]:
        print(f"| {name} | " + " | ".join(f"{kind[name]:.3f}" for kind in found.values()) + " |")
    if args.json:
        args.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), **found, "codecs": codecs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
