"""LeRobot's replay buffer compared with holdall's: bytes per transition, and times of `add` and `sample`.

    python benchmarks/adapters/lerobot_buffer.py [--lerobot FOLDER] [--case words] [--short] [--json FILE]

LeRobot's actor sends images of 3 x 128 x 128 of two cameras: a static one over a scene in which a cube moves, and one
on a moving hand. `words` are 8-bit images divided by 255. `resized` are images of 256 x 256 that are resized after the
division, as `torchvision.transforms.functional.resize` does it: bilinear, with antialiasing. `noisy` adds the noise of
a sensor.

Bytes: LeRobot's buffer allocates tensors for its capacity. Its bytes per transition are those of the tensors: with its
default, and with the `optimize_memory` of its learner. holdall's are the slope of a line through the process's unique
set size, with everything compressed. Times: all sides take turns in one process, on the CPU and without augmentation.
The figures are ratios of medians to LeRobot's default. All sides must draw the same rows.

FOLDER is a checkout of LeRobot. Its buffer is loaded alone if LeRobot cannot be imported whole. Without a FOLDER, the
installed LeRobot is used. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdall.lerobot import ReplayBuffer
from holdall.machine import held_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from lerobot_source import load_module
from results import Figure, describe_run, store
from shared.line import fit_line
from shared.process import emit

KEYS = ("observation.images.front", "observation.images.wrist")
STATE_KEYS = [*KEYS, "observation.state"]
SIDE_PX = 128
CASES = ("words", "words, noisy", "resized", "resized, noisy")
NOISE = 0.7
"""Standard deviation of a sensor's noise, in 8-bit levels, before images are resized."""
BARS = {"words": 6.0, "words, noisy": 6.0, "resized": 3.0}
SAMPLE_BAR = 1.0
BATCH = 256
TIMED_ROWS = 400
FOOTPRINT_ROWS = (400, 1_600)
DRAWS = 7
QUICK = 4
"""`--short` divides the numbers of rows and draws by this."""
CAPTIONS = {
    "words": "images of the form `k / 255`",
    "words, noisy": "images of the form `k / 255`, with the noise of a sensor",
    "resized": "resized images",
    "resized, noisy": "resized images, with the noise of a sensor",
}


def load_original(folder: Path | None) -> tuple[Any, str]:
    """Return LeRobot's class, and one line that says which LeRobot it is."""
    if folder is None:
        return importlib.import_module("lerobot.rl.buffer").ReplayBuffer, f"LeRobot {version('lerobot')}"
    loaded = load_module(folder, "rl.buffer")
    return loaded.module.ReplayBuffer, loaded.describe()


class Cameras:
    """A static camera over a scene and a camera on a moving hand, both of 256 x 256 pixels.

    Args:
        noise: Standard deviation of the sensors' noise, in 8-bit levels.
    """

    def __init__(self, noise: float) -> None:
        self._generator = np.random.default_rng(0)
        coarse = self._generator.integers(40, 200, (1, 3, 20, 20)).astype(np.float32)
        fine = self._generator.integers(-9, 10, (1, 1, 512, 512)).astype(np.float32)
        self._scene = torch.nn.functional.interpolate(torch.from_numpy(coarse), size=(512, 512), mode="bicubic")
        self._scene += torch.from_numpy(fine)
        self._noise = noise
        self._time = 0

    def move(self) -> dict[str, torch.Tensor]:
        """Return the next 8-bit images, as float32 in [0, 255], with a batch axis."""
        self._time += 1
        row = int(128 + 90 * np.sin(self._time / 31))
        column = int(128 + 90 * np.cos(self._time / 43))
        front = self._scene[..., 128:384, 128:384].clone()
        front[..., row - 20 : row + 20, column - 20 : column + 20] = torch.tensor([40.0, 90.0, 250.0]).view(1, 3, 1, 1)
        wrist = self._scene[..., row : row + 256, column : column + 256].clone()
        wrist[..., 200:, 96:160] = 60.0
        return {KEYS[0]: self._sense(front), KEYS[1]: self._sense(wrist)}

    def _sense(self, image: torch.Tensor) -> torch.Tensor:
        if self._noise:
            image = image + self._noise * torch.from_numpy(self._generator.standard_normal(image.shape, np.float32))
        return image.round().clamp(0, 255)


def observe(case: str, cameras: Cameras) -> dict[str, torch.Tensor]:
    """Return a state as LeRobot's actor sends it."""
    images = {key: image / 255 for key, image in cameras.move().items()}
    if case.startswith("words"):
        images = {key: image[..., ::2, ::2].contiguous() for key, image in images.items()}
    else:
        size = (SIDE_PX, SIDE_PX)
        images = {
            key: torch.nn.functional.interpolate(image, size=size, mode="bilinear", antialias=True).clamp(0.0, 1.0)
            for key, image in images.items()
        }
    return {
        **images,
        STATE_KEYS[-1]: torch.from_numpy(np.random.default_rng(0).normal(size=(1, 18)).astype(np.float32)),
    }


def play(case: str) -> Iterator[dict[str, Any]]:
    """Yield transitions without end. Every 200th ends an episode, in turn by success and by a time limit."""
    cameras = Cameras(NOISE if case.endswith("noisy") else 0.0)
    state = observe(case, cameras)
    for i in itertools.count():
        following = observe(case, cameras)
        is_end = i % 200 == 199
        yield {
            "state": state,
            "action": torch.full((1, 4), 0.01 * (i % 100)),
            "reward": float(i),
            "next_state": following,
            "done": is_end and i % 400 < 200,
            "truncated": is_end and i % 400 >= 200,
            "complementary_info": {"discrete_penalty": torch.zeros(1)},
        }
        state = observe(case, cameras) if is_end else following


def make_sides(original: Any, rows: int) -> dict[str, Any]:
    """Return the buffers that are compared."""
    common: dict[str, Any] = {"device": "cpu", "state_keys": STATE_KEYS, "use_drq": False}
    return {
        "LeRobot": original(rows, **common),
        "LeRobot, optimize_memory": original(rows, optimize_memory=True, **common),
        "holdall": ReplayBuffer(rows, budget="64GiB", **common),
        "holdall, compressed": ReplayBuffer(rows, budget=None, **common),
    }


def measure_bytes(case: str, rows: tuple[int, int]) -> dict[str, float]:
    """Fill a compressed buffer, and fit a line through what the process holds."""
    first, last = rows
    common: dict[str, Any] = {"device": "cpu", "state_keys": STATE_KEYS, "use_drq": False}
    buffer = ReplayBuffer(last, budget=None, **common)
    readings = []
    for i, transition in enumerate(itertools.islice(play(case), last), 1):
        buffer.add(**transition)
        if i >= first and i % 100 == 0:
            buffer.memory.store.wait_idle()
            readings.append((i, held_bytes().unique))
    # Two cameras, the state and the action as float32, the reward, two flags and the penalty.
    state = 4 * (2 * 3 * SIDE_PX**2 + 18)
    others = 4 * 4 + 4 + 2 + 4
    return {
        "holdall, compressed": fit_line(readings)[0],
        "reported": buffer.report().total_bytes / last,
        "LeRobot": 2 * state + others,
        "LeRobot, optimize_memory": state + others,
    }


def measure_times(case: str, original: Any, rows: int, draws: int) -> dict[str, dict[str, float]]:
    """Add and sample on all sides in turn, and compare what they draw."""
    sides = make_sides(original, rows)
    seconds: dict[str, dict[str, list[float]]] = {side: {"add": [], "sample": []} for side in sides}
    for turn, transition in enumerate(itertools.islice(play(case), rows)):
        order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        for side in order:
            begun = time.perf_counter()
            sides[side].add(**transition)
            seconds[side]["add"].append(time.perf_counter() - begun)
    for side in ("holdall", "holdall, compressed"):
        sides[side].memory.store.wait_idle()
    for turn in range(draws):
        order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        drawn = {}
        for side in order:
            torch.manual_seed(turn)
            begun = time.perf_counter()
            drawn[side] = sides[side].sample(BATCH)
            seconds[side]["sample"].append(time.perf_counter() - begun)
        for side in ("holdall", "holdall, compressed"):
            _require_same(drawn[side], drawn["LeRobot"], side)
    return {side: {act: statistics.median(some) for act, some in acts.items()} for side, acts in seconds.items()}


def _require_same(drawn: Any, wanted: Any, side: str) -> None:
    for part in ("state", "next_state"):
        for key in wanted[part]:
            if not torch.equal(drawn[part][key], wanted[part][key]):
                raise SystemExit(f"{side} drew another {part} of {key} than LeRobot")
    for part in ("action", "reward", "done", "truncated"):
        if not torch.equal(drawn[part], wanted[part]):
            raise SystemExit(f"{side} drew another {part} than LeRobot")


def _in_a_process(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["result"]


def measure(case: str, passed: list[str]) -> dict[str, Any]:
    """Measure a case, and print its ratios."""
    taken = _in_a_process("--part", "bytes", "--case", case, *passed)
    timed = _in_a_process("--part", "times", "--case", case, *passed)
    seconds = timed["seconds"]
    smaller = taken["LeRobot"] / taken["holdall, compressed"]
    ratio = {
        side: {act: value / seconds["LeRobot"][act] for act, value in acts.items()} for side, acts in seconds.items()
    }
    print(
        f"{case}: {taken['holdall, compressed']:,.0f} bytes, {smaller:.1f} x less than LeRobot's "
        f"{taken['LeRobot']:,}; sample takes "
        + ", ".join(f"{ratio[side]['sample']:.2f} ({side})" for side in ratio)
        + "; add takes "
        + ", ".join(f"{ratio[side]['add']:.2f} ({side})" for side in ratio),
        file=sys.stderr,
    )
    return {
        "lerobot": timed["lerobot"],
        "bytes": taken,
        "seconds": seconds,
        "smaller": smaller,
        "ratio": ratio,
    }


def is_met(case: str, found: dict[str, Any]) -> bool:
    """Return whether a case meets its bars."""
    is_fast = bool(found["ratio"]["holdall, compressed"]["sample"] <= SAMPLE_BAR)
    return is_fast and bool(found["smaller"] >= BARS.get(case, 0))


def figures_of(case: str, found: dict[str, Any]) -> list[Figure]:
    """Return the figures of a case."""
    name = CAPTIONS[case]
    ratio = found["ratio"]["holdall, compressed"]
    taken = found["bytes"]
    bar = f"at least {BARS[case]} x" if case in BARS else None
    return [
        Figure(name, "LeRobot", "B", taken["LeRobot"]),
        Figure(name, "`optimize_memory=True`", "B", taken["LeRobot, optimize_memory"]),
        Figure(name, "holdall, `budget=None`", "B", taken["holdall, compressed"]),
        Figure(name, "less by", "times", found["smaller"], bar),
        Figure(name, "`sample(256)`", "of LeRobot's time", ratio["sample"], f"at most {SAMPLE_BAR}"),
        Figure(name, "`add`", "of LeRobot's time", ratio["add"]),
    ]


def main() -> int:
    """Measure the cases. Return 1 if a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot", type=Path, metavar="FOLDER", help="a checkout of LeRobot")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--short", action="store_true", help="fewer transitions and turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--part", choices=("bytes", "times"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    divisor = QUICK if arguments.short else 1
    if arguments.part == "bytes":
        first, last = FOOTPRINT_ROWS
        emit({"result": measure_bytes(arguments.case[0], (first // divisor, last // divisor))})
        return 0
    if arguments.part == "times":
        original, name = load_original(arguments.lerobot)
        seconds = measure_times(arguments.case[0], original, TIMED_ROWS // divisor, DRAWS // divisor)
        emit({"result": {"lerobot": name, "seconds": seconds}})
        return 0
    passed = ["--short"] if arguments.short else []
    if arguments.lerobot is not None:
        passed += ["--lerobot", str(arguments.lerobot)]
    measured = {case: measure(case, passed) for case in arguments.case or CASES}
    for case, found in measured.items():
        if arguments.json is not None:
            settings = {"short": arguments.short, "lerobot": found["lerobot"]}
            store(arguments.json, figures_of(case, found), describe_run(settings))
    return 0 if all(is_met(case, found) for case, found in measured.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
