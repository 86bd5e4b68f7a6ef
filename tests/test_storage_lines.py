"""The changed lines of docs/guides/world_models.md: both sides give the same batches from one seed.

The published buffers are not part of this project. Each test makes a buffer with the sampler and the writes of the
published class, and with the storage of the line before and of the line after.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from tensordict import TensorDict  # noqa: E402
from torchrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers.samplers import SliceSampler  # noqa: E402

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "world_models.md"
LATENTS = ("stoch", "deter")
LANES = 3


def find_lines(title: str, side: str) -> list[str]:
    """Return the lines of one side of the difference under a heading, without the other side's."""
    text = GUIDE.read_text(encoding="utf-8")
    match = re.search(rf"^## {title}$.*?^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert match is not None
    return [line[1:].strip() for line in match[1].splitlines() if line.startswith((" ", side))]


def make_storage(title: str, side: str, **names: Any) -> Any:
    """Run the import of a side, and return the storage that its line makes."""
    lines = find_lines(title, side)
    known: dict[str, Any] = {"LazyTensorStorage": LazyTensorStorage, **names}
    for line in lines:
        if "import" in line:
            exec(line, known)
    (line,) = [line for line in lines if "Storage(" in line]
    return eval(f"dict({line})" if line.startswith("storage=") else f"dict(storage={line})", known)["storage"]


def require_same(found: Any, expected: Any) -> None:
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():  # noqa: SIM118  A TensorDict iterates over its rows.
        assert torch.equal(found[key], expected[key]), key


def test_both_sides_of_td_mpc2_draw_the_same_batches() -> None:
    owner = SimpleNamespace(_capacity=120, _storage_device=torch.device("cpu"))
    buffers = {}
    for side in "-+":
        sampler = SliceSampler(num_slices=8, end_key=None, traj_key="episode", truncated_key=None, strict_length=True)
        storage = make_storage("TD-MPC2", side, self=owner)
        buffers[side] = ReplayBuffer(storage=storage, sampler=sampler, pin_memory=False, prefetch=0, batch_size=32)
    assert {type(buffer.storage).__name__ for buffer in buffers.values()} == {"LazyTensorStorage", "HoldallStorage"}
    generator = torch.Generator().manual_seed(0)
    for episode in range(12):  # 300 steps, so the 120 places are written more than twice.
        frames = torch.randint(0, 255, (27, 3, 16, 16), generator=generator, dtype=torch.uint8)
        data = TensorDict(
            {
                "obs": torch.stack([torch.cat(list(frames[i : i + 3])) for i in range(25)]),
                "action": torch.randn(25, 2, generator=generator),
                "reward": torch.randn(25, generator=generator),
                "episode": torch.full((25,), episode),
            },
            [25],
        )
        drawn = {}
        for side, buffer in buffers.items():
            buffer.extend(data.clone())
            torch.manual_seed(episode)
            drawn[side] = [buffer.sample() for _ in range(3)]
        for found, expected in zip(drawn["+"], drawn["-"], strict=True):
            require_same(found, expected)


def test_both_sides_of_r2_dreamer_draw_the_same_batches_and_rewrite_the_same_latents() -> None:
    owner = SimpleNamespace(storage_device=torch.device("cpu"))
    buffers = {}
    for side in "-+":
        sampler = SliceSampler(num_slices=4, end_key=None, traj_key="episode", truncated_key=None, strict_length=True)
        storage = make_storage("R2-Dreamer", side, self=owner, config=SimpleNamespace(max_size=40 * LANES))
        buffers[side] = ReplayBuffer(storage=storage, sampler=sampler, prefetch=0, batch_size=4 * 5)
    assert {type(buffer.storage).__name__ for buffer in buffers.values()} == {"LazyTensorStorage", "HoldallStorage"}
    generator = torch.Generator().manual_seed(0)
    for step in range(100):  # 40 places per environment.
        discrete = torch.randint(0, 8, (LANES, 6), generator=generator)
        data = TensorDict(
            {
                "image": torch.randint(0, 255, (LANES, 16, 16, 3), generator=generator, dtype=torch.uint8),
                "stoch": torch.nn.functional.one_hot(discrete, 8).float(),
                "deter": torch.randn(LANES, 80, generator=generator),
                "episode": step // 20 * LANES + torch.arange(LANES),
            },
            [LANES],
        )
        for buffer in buffers.values():
            buffer.extend(data.clone().unsqueeze(1))
        if step % 20 > 6:
            check_a_training_step(buffers, step)


def check_a_training_step(buffers: dict[str, Any], step: int) -> None:
    """Draw from both sides, rewrite the latents, and draw the same steps again."""
    drawn = {}
    for side, buffer in buffers.items():
        torch.manual_seed(step)
        batch, info = buffer.sample(return_info=True)
        drawn[side] = batch
        # As in R2-Dreamer: it samples (time, environment) and writes (environment, time).
        index = [part.reshape(-1) for part in info["index"]]
        new = TensorDict({key: batch[key].flip(-1) + step for key in LATENTS}, [len(index[0])])
        buffer[index[1], index[0]] = new
    require_same(drawn["+"], drawn["-"])
    again = {}
    for side, buffer in buffers.items():
        torch.manual_seed(step)
        again[side] = buffer.sample()
    require_same(again["+"], again["-"])
    assert not torch.equal(again["+"]["deter"], drawn["+"]["deter"])
    assert torch.equal(again["+"]["image"], drawn["+"]["image"])


def test_the_changed_line_of_dreamerv3_makes_a_replay() -> None:
    """The line before needs DreamerV3's own package. `test_dreamer.py` compares the draws with that class."""
    (statement,) = [line for line in find_lines("DreamerV3", "+") if line.startswith("return")]
    names: dict[str, Any] = {}
    imports = [line for line in find_lines("DreamerV3", "+") if line.startswith("import")]
    kwargs = {"length": 9, "capacity": 40, "online": True, "chunksize": 1024, "save_wait": False, "name": "train"}
    exec("\n".join([*imports, "def make_replay(kwargs):", f"    {statement}"]), names)
    replay = names["make_replay"](kwargs)
    for step in range(100):
        replay.add({"image": np.full((48, 48, 3), step, np.uint8), "dyn/deter": np.full(8, step, np.float32)})
    batch = replay.sample(4)
    assert (batch["image"][:, :, 0, 0, 0] == batch["dyn/deter"][:, :, 0]).all()
    replay.update({"stepid": batch["stepid"], "dyn/deter": -batch["dyn/deter"]})
    assert len(replay) == 40
