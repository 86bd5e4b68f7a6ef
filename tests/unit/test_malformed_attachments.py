"""Files that adapters attach to a checkpoint: a malformed one is reported as damage, and nothing of it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.dreamer import Replay
from holdall.errors import DamageError
from holdall.lerobot import ReplayBuffer
from holdall.torchrl import HoldallStorage

LAYOUT = (
    b'{"format": 1, "fields": {"tensors": [], "nested": []}, "shape": [4], "ndim": 1, "len": 4,'
    b' "is_tensor": false, "last_cursor": null}'
)
STATE = (
    b'{"format": 1, "length": 8, "next_number": 2, "first_number": 0, "generator": null, "steps": 0, "queued": 0,'
    b' "keys": {}, "token": "00"}'
)
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, bytes]]] = {
    "lerobot: no JSON": (lambda path: ReplayBuffer.load(path, "cpu"), {"lerobot/layout.json": b"{"}),
    "lerobot: no layout": (lambda path: ReplayBuffer.load(path, "cpu"), {"lerobot/layout.json": b'{"format": 1}'}),
    "torchrl: no JSON": (lambda path: HoldallStorage(4).load_from(path), {"torchrl/layout.json": b"\xff"}),
    "torchrl: no object": (lambda path: HoldallStorage(4).load_from(path), {"torchrl/layout.json": b"[]"}),
    "torchrl: no positions": (lambda path: HoldallStorage(4).load_from(path), {"torchrl/layout.json": LAYOUT}),
    "torchrl: positions that do not decompress": (
        lambda path: HoldallStorage(4).load_from(path),
        {"torchrl/layout.json": LAYOUT, "torchrl/positions": b"abc"},
    ),
    "dreamer: no JSON": (lambda path: Replay(8, 10, path).load(), {"dreamer/state.json": b"nothing"}),
    "dreamer: no numbers": (
        lambda path: Replay(8, 10, path).load(),
        {"dreamer/state.json": b'{"format": 1, "length": 8}'},
    ),
    "dreamer: starts that do not decompress": (
        lambda path: Replay(8, 10, path).load(),
        {"dreamer/state.json": STATE, "dreamer/starts": b"abc"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_attachment_is_reported_as_damage(tmp_path: Path, case: str) -> None:
    load, attached = CASES[case]
    obs = np.zeros(3, np.float32)
    with holdall.ReplayMemory(spaces.Box(0, 1, (3,)), spaces.Discrete(2), 10) as memory:
        memory.add(obs, 0, 0.0, obs, terminated=False, truncated=False)
        memory.save(tmp_path, attach=attached).result()
    with pytest.raises(DamageError, match="makes no sense"):
        load(tmp_path)
