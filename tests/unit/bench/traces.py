"""Small traces, made up: a counting environment whose every value says where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from holdall.tools.bench.trace import TraceRecorder

LENGTHS = (5, 3, 4)


def frame(number: int, *, is_dict: bool) -> Any:
    image = np.full((6, 6, 3), number % 256, np.uint8)
    image[0, 0] = (1, 2, 3)
    return {"image": image, "speed": np.array([number, -float(number)], np.float32)} if is_dict else image[..., 0]


def write(file: Path, *, is_dict: bool = True, stack: int = 1, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Episodes of given lengths, every second one truncated."""
    recorder = TraceRecorder(stack)
    number = 0
    for episode, length in enumerate(lengths):
        recorder.begin(frame(number, is_dict=is_dict))
        for step in range(length):
            number += 1
            ends = step == length - 1
            cut = ends and episode % 2 == 1
            recorder.step(number % 4, float(number), frame(number, is_dict=is_dict), ends and not cut, cut)
        number += 1
    recorder.save(file)
