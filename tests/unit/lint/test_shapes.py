"""What lint takes an array to be: the same as numpy, torch and the libraries of pictures make of it."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

ROWS = 200_000
START = """
from collections import deque
import cv2
import gymnasium as gym
import numpy as np
import torch
import torchvision.transforms as T
from PIL import Image
from game import screen

frame = np.zeros((210, 160, 3), dtype=np.uint8)
unknown = screen()
state = np.zeros((4, 84, 84), dtype=np.uint8)
memory = deque(maxlen=200_000)
"""
# An expression, and the bytes that what it makes keeps in memory: a view keeps all of the array behind it.
EXPRESSIONS = {
    "np.mean(frame, axis=2)": 210 * 160 * 8,
    "frame.mean(axis=2).astype(np.uint8)": 210 * 160,
    "np.dot(frame[..., :3], [0.299, 0.587, 0.114])": 210 * 160 * 8,
    "frame[34:194:2, ::2, 0]": 210 * 160 * 3,
    "frame[34:194:2, ::2, 0].copy()": 80 * 80,
    "np.reshape(frame[34:194], (1, 160, 160, 3))": 210 * 160 * 3,
    "np.moveaxis(frame, 2, 0)[:, 1:43]": 210 * 160 * 3,
    "np.moveaxis(frame, 2, 0)[:, 1:43] / 2": 3 * 42 * 160 * 8,
    "np.tile(state[:1], (4, 1, 1))": 4 * 84 * 84,
    "np.broadcast_to(state[0], (8, 84, 84)).copy()": 8 * 84 * 84,
    "np.concatenate((state[1:], state[:1]), axis=0) / 255.0": 4 * 84 * 84 * 8,
    "np.maximum(frame, frame)": 210 * 160 * 3,
    "np.stack([state] * 2, axis=-1)": 4 * 84 * 84 * 2,
    "np.pad(state, ((0, 0), (4, 4), (4, 4)))": 4 * 92 * 92,
    "torch.tensor(state) / 255": 4 * 84 * 84 * 4,
    "torch.from_numpy(state).unsqueeze(0).repeat(2, 1, 1, 1)": 2 * 4 * 84 * 84,
    "torch.from_numpy(frame).permute(2, 0, 1)[None].float()": 3 * 210 * 160 * 4,
    "torch.cat([torch.tensor(state).view(1, -1)] * 2, dim=1)": 2 * 4 * 84 * 84,
    "cv2.resize(cv2.cvtColor(unknown, cv2.COLOR_RGB2GRAY), (84, 110))[18:102]": 110 * 84,
    "torch.cat([torch.tensor(state)[None]] * 2, 1)[:, 3:]": 8 * 84 * 84,
    "cv2.resize(frame, None, fx=0.5, fy=0.5)": 105 * 80 * 3,
    "cv2.Canny(cv2.resize(frame, (80, 80)), 100, 200)": 80 * 80,
    "np.array(Image.fromarray(frame).convert('L').crop((0, 34, 160, 194)))": 160 * 160,
    "T.Compose([T.ToPILImage(), T.Grayscale(), T.Resize((84, 84)), T.ToTensor()])(unknown)": 84 * 84 * 4,
    "T.Resize((64, 64))(torch.from_numpy(frame).permute(2, 0, 1))": 3 * 64 * 64,
    "T.Grayscale()(torch.from_numpy(frame).permute(2, 0, 1))": 210 * 160,
    "np.array([state[0] for _ in range(4)])": 4 * 84 * 84,
}


def findings(folder: Path, text: str) -> list[int]:
    (folder / "train.py").write_text(text, encoding="utf-8")
    found = FileChecker(RULES, REFERENCE_MACHINE).check(folder / "train.py")
    return [int(one.numbers["needed_bytes"]) for one in found if one.rule == "M19"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_has_the_bytes_that_it_has(expression: str, tmp_path: Path) -> None:
    text = f"{START}\nmade = {expression}\nwhile True:\n    memory.append((made, 0, 1.0))\n"
    assert findings(tmp_path, text) == [ROWS * (EXPRESSIONS[expression] + 112)]


OF_NUMPY = [
    name for name in EXPRESSIONS if not any(word in name for word in ("torch", "cv2", "T.", "Image", "unknown"))
]


@pytest.mark.parametrize("expression", OF_NUMPY)
def test_the_bytes_are_those_that_numpy_takes(expression: str) -> None:
    known = {"np": np, "frame": np.zeros((210, 160, 3), np.uint8), "state": np.zeros((4, 84, 84), np.uint8)}
    made = eval(expression, known)
    while made.base is not None:
        made = made.base
    assert made.nbytes == EXPRESSIONS[expression]


@pytest.mark.parametrize("text", [
    "np.tile(state, (1_000_000_000, 1, 1))", "np.dot(np.zeros((10**6, 4)), np.zeros((4, 10**6)))",
    "np.zeros((10**6, 1)) + np.zeros((1, 10**6))", "state.reshape(5, 5)", "state[0, 0, 0, 0]",
    "np.array_split(np.zeros(11), 200_000_000)[0]", "np.diff(np.zeros(11), 3_000_000_000)",
    "np.pad(np.zeros((4, 4)), ((0, 2_000_000_000), (0, 0)))",
])  # fmt: skip
def test_what_is_too_large_to_try_or_refused_is_not_known(text: str, tmp_path: Path) -> None:
    assert findings(tmp_path, f"{START}\nmemory.append(({text}, 0, 1.0))\n") in ([], [ROWS * 10**12 * 8 + ROWS * 112])


def test_an_axis_that_is_not_known_stays_unknown(tmp_path: Path) -> None:
    known = "\nmemory.append((cv2.resize(unknown, (84, 84))[:, :, 0], 0))\n"
    assert findings(tmp_path, START + known) == [ROWS * (84 * 84 + 112)]
    assert findings(tmp_path, START + "\nmemory.append((cv2.resize(unknown, (84, 84)), 0))\n") == []
    assert findings(tmp_path, START + "\nx = torch.zeros(1, unknown, 84, 84)\nmemory.append((x, 0))\n") == []
    assert findings(tmp_path, START + "\nx = torch.zeros(84 * 84, *unknown)\nmemory.append((x, 0))\n") == []


def test_a_part_of_a_large_array_is_tried_without_its_memory(tmp_path: Path) -> None:
    made = "\nmemory.append((np.ravel(np.zeros((10**6, 10**6))), 0, 1.0))\n"
    assert ROWS * (8 * 10**12 + 112) in findings(tmp_path, START + made)


@pytest.mark.parametrize("text", ["state[()]", "np.var(state[:0])", "np.add(state, 1, where=state > 0)"])
def test_what_numpy_warns_of_or_takes_whole_is_no_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{START}\nmemory.append(({text}, 0, 1.0))\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = FileChecker(RULES, REFERENCE_MACHINE).check(tmp_path / "train.py")
    assert not [one for one in found if one.rule == "F01"]
