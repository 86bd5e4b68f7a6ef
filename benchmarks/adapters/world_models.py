"""Buffers of world models over holdall and as published: bytes per step, times, and the same batches.

    python benchmarks/adapters/world_models.py --dreamerv3 DIR --tdmpc2 DIR --r2dreamer DIR [--json FILE]

Each DIR is a copy of the public repository, whose buffer is run and not copied here. DreamerV3 also needs the package
elements. Steps are Seaquest in colour, 64 x 64. DreamerV3 has the latents of its default size (8,192 numbers in
bfloat16, 32 x 64 discrete ones), R2-Dreamer those of its size 12M (2,048 numbers in float32, 32 x 16 discrete ones).
The numbers are random, which is the worst case.

Bytes: every side is filled in a process of its own. holdall's figure is `report().total_bytes` after everything was
compressed, divided by the steps. The published figure is the bytes of the tensors that TD-MPC2 and R2-Dreamer reserve
for their whole capacity, divided by the capacity. DreamerV3's is the bytes of the arrays in its chunks, divided by the
steps that they have room for. What selectors, samplers and drawn batches need is counted on neither side.

Times: both sides take turns in one process, after a warm-up. The figures are medians, and the ratio to the published
side. The batches of both sides are compared, before and after latents are rewritten. The exit status is 1 if the sides
draw different batches, or if DreamerV3's steps do not take 2.5 times fewer bytes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from holdall.dreamer import Replay
from holdall.memory import ReplayMemory

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, store
from shared.process import emit

SIDES = ("published", "holdall")
BAR_DREAMER = 2.5
SIZE_PX = 64
EPISODE_STEPS = 200
STEPS = {"dreamerv3": 4_096, "tdmpc2": 10_000, "r2dreamer": 6_000}
"""Steps after which bytes are counted. Each of holdall's sides fills several blocks."""
TIMED_STEPS = {"dreamerv3": 2_048, "tdmpc2": 1_000, "r2dreamer": 1_024}
WARM_UP_ROUNDS = 5
TIMED_ROUNDS = 12
"""Rounds of adding, sampling and updating. The first ones touch memory for the first time and are not timed."""
WORKERS = 4

TITLES = {"dreamerv3": "DreamerV3", "tdmpc2": "TD-MPC2", "r2dreamer": "R2-Dreamer"}
REWRITES = {"dreamerv3": True, "tdmpc2": False, "r2dreamer": True}

Images = Iterator[NDArray[np.uint8]]


def images() -> Images:
    """Play Seaquest for ever with random actions."""
    gym.register_envs(ale_py)
    env = gym.make("ALE/Seaquest-v5", frameskip=4)
    env.action_space.seed(0)
    screen, _ = env.reset(seed=0)
    while True:
        yield cv2.resize(screen, (SIZE_PX, SIZE_PX), interpolation=cv2.INTER_AREA)
        screen, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            screen, _ = env.reset()


class DreamerV3:
    """DreamerV3's Replay in its default size: sequences of 64 steps and one of context."""

    length = 65
    batch = 16

    def __init__(self, side: str, folder: Path, capacity: int) -> None:
        kind: Any = Replay
        if side == "published":
            sys.path.insert(0, str(folder))
            package = types.ModuleType("published")  # The package's own __init__ needs more packages.
            package.__path__ = [str(folder / "embodied" / "core")]
            sys.modules["published"] = package
            kind = importlib.import_module("published.replay").Replay
        more = {"budget": None} if side == "holdall" else {}
        self.replay = kind(self.length, capacity, online=False, seed=0, **more)
        self.images = images()
        self.generator = np.random.default_rng(0)
        self.count = 0

    def add(self) -> int:
        """Add a step of every worker. Return how many."""
        draw = self.generator
        for worker in range(WORKERS):
            words = draw.standard_normal(8192, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
            step = {
                "image": next(self.images),
                "reward": np.float32(draw.integers(0, 2)),
                "is_first": self.count % EPISODE_STEPS == 0,
                "is_last": self.count % EPISODE_STEPS == EPISODE_STEPS - 1,
                "is_terminal": False,
                "action": np.int32(draw.integers(18)),
                "dyn/deter": words.view(np.float32),
                "dyn/stoch": np.eye(64, dtype=np.float32)[draw.integers(0, 64, 32)],
            }
            self.replay.add(step, worker)
        self.count += 1
        return WORKERS

    def sample(self) -> dict[str, Any]:
        """Return a batch."""
        batch: dict[str, Any] = self.replay.sample(self.batch)
        return batch

    def update(self, batch: dict[str, Any]) -> None:
        """Rewrite the latents of a batch, all but those of the context."""
        latents = {key: -batch[key][:, 1:] if "deter" in key else batch[key][:, 1:] for key in batch if "dyn/" in key}
        self.replay.update({"stepid": batch["stepid"][:, 1:], **latents})

    def array_bytes(self) -> int:
        """Return the bytes of the published side's chunks."""
        nbytes: int = sum(chunk.nbytes for chunk in self.replay.chunks.values())
        return nbytes

    @property
    def memory(self) -> ReplayMemory:
        """The memory of holdall's side."""
        memory: ReplayMemory = self.replay.memory
        return memory

    def finish(self) -> None:
        """Wait for compression."""
        self.memory.store.wait_idle()


def load_buffer(side: str, path: Path, **replaced: str) -> Any:
    """Return the class Buffer of a file. On holdall's side, the one line is changed that the guide changes."""
    source = path.read_text(encoding="utf-8")
    if side == "holdall":
        source = source.replace("LazyTensorStorage(", "HoldallStorage(budget=None, max_size=", 1)
        source = source.replace("max_size=max_size=", "max_size=")
        source = f"from holdall.torchrl import HoldallStorage\n{source}"
    for old, new in replaced.items():
        source = source.replace(*(old, new) if old not in NAMES else (NAMES[old], new))
    names: dict[str, Any] = {"__name__": "published"}
    exec(compile(source, str(path), "exec"), names)
    return names["Buffer"]


NAMES = {"device": "torch.device('cuda:0')", "free": "torch.cuda.mem_get_info()"}


class TdMpc2:
    """TD-MPC2's buffer of episodes, with stacks of three images."""

    def __init__(self, side: str, folder: Path, capacity: int) -> None:
        # The published file asks for a GPU. Two expressions are replaced so that it runs without one.
        kind = load_buffer(
            side, folder / "tdmpc2" / "common" / "buffer.py", device="torch.device('cpu')", free="(0, 0)"
        )
        config = types.SimpleNamespace(buffer_size=capacity, steps=capacity, batch_size=256, horizon=3, multitask=False)
        self.buffer = kind(config)
        self.images = images()
        self.generator = torch.Generator().manual_seed(0)

    def add(self) -> int:
        """Add an episode. Return its steps."""
        frames = [torch.from_numpy(next(self.images)).permute(2, 0, 1) for _ in range(EPISODE_STEPS + 2)]
        stacks = torch.stack([torch.cat(frames[i : i + 3]) for i in range(EPISODE_STEPS)])
        random = torch.randn(EPISODE_STEPS, 7, generator=self.generator)
        data = {
            "obs": stacks,
            "action": random[:, :6],
            "reward": random[:, 6],
            "terminated": torch.zeros(EPISODE_STEPS),
        }
        self.buffer.add(TensorDict(data, [EPISODE_STEPS]))
        return EPISODE_STEPS

    def sample(self) -> dict[str, Any]:
        """Return a batch."""
        torch.manual_seed(len(self.buffer._buffer))
        return {str(i): part for i, part in enumerate(self.buffer.sample()) if part is not None}

    def update(self, batch: dict[str, Any]) -> None:
        """Do nothing: TD-MPC2 rewrites nothing."""

    def array_bytes(self) -> int:
        """Return the bytes of the published side's tensors."""
        return reserved_bytes(self.buffer._buffer.storage)

    @property
    def memory(self) -> ReplayMemory:
        """The memory of holdall's side."""
        memory: ReplayMemory = self.buffer._buffer.storage.memory
        return memory

    def finish(self) -> None:
        """Wait for compression."""
        self.memory.store.wait_idle()


class R2Dreamer:
    """R2-Dreamer's buffer, whose latents are rewritten after every sample."""

    def __init__(self, side: str, folder: Path, capacity: int) -> None:
        kind = load_buffer(side, folder / "buffer.py")
        config = types.SimpleNamespace(
            device="cpu", storage_device="cpu", batch_size=16, batch_length=64, max_size=capacity
        )
        self.buffer = kind(config)
        self.images = images()
        self.generator = torch.Generator().manual_seed(0)
        self.count = 0
        self.index: Any = None

    def add(self) -> int:
        """Add a step of every environment. Return how many."""
        draw = self.generator
        episode = self.count // EPISODE_STEPS * WORKERS + torch.arange(WORKERS)
        discrete = torch.randint(0, 16, (WORKERS, 32), generator=draw)
        data = {
            "image": torch.stack([torch.from_numpy(next(self.images)) for _ in range(WORKERS)]),
            "reward": torch.zeros(WORKERS, 1),
            "is_first": torch.full((WORKERS, 1), self.count % EPISODE_STEPS == 0),
            "is_last": torch.full((WORKERS, 1), self.count % EPISODE_STEPS == EPISODE_STEPS - 1),
            "action": torch.randn(WORKERS, 6, generator=draw),
            "stoch": torch.nn.functional.one_hot(discrete, 16).float(),
            "deter": torch.randn(WORKERS, 2048, generator=draw),
            "episode": episode,
        }
        self.buffer.add_transition(TensorDict(data, [WORKERS]))
        self.count += 1
        return WORKERS

    def sample(self) -> dict[str, Any]:
        """Return a batch."""
        torch.manual_seed(self.count)
        data, self.index, initial = self.buffer.sample()
        return dict(data.items()) | {f"initial {i}": part for i, part in enumerate(initial)}

    def update(self, batch: dict[str, Any]) -> None:
        """Rewrite the latents of the last batch."""
        self.buffer.update(self.index, batch["stoch"].flip(-1), -batch["deter"])

    def array_bytes(self) -> int:
        """Return the bytes of the published side's tensors."""
        return reserved_bytes(self.buffer._buffer.storage)

    @property
    def memory(self) -> ReplayMemory:
        """The memory of holdall's side."""
        memory: ReplayMemory = self.buffer._buffer.storage.memory
        return memory

    def finish(self) -> None:
        """Wait for compression."""
        self.memory.store.wait_idle()


MODELS: dict[str, Callable[[str, Path, int], Any]] = {"dreamerv3": DreamerV3, "tdmpc2": TdMpc2, "r2dreamer": R2Dreamer}


def footprint(model: str, side: str, folder: Path) -> dict[str, Any]:
    """Return the bytes of a step on one side, and how they were counted."""
    capacity = STEPS[model]
    buffer = MODELS[model](side, folder, capacity)
    count = buffer.add()
    is_reserved = side == "published" and model != "dreamerv3"
    while count < capacity and not is_reserved:
        count += buffer.add()
    if side == "published":
        return {"bytes": buffer.array_bytes() / capacity, "counted": "arrays", "steps": capacity}
    if REWRITES[model]:  # The first rewrite changes how latents are stored.
        buffer.update(buffer.sample())
    buffer.finish()
    report = buffer.memory.report()
    if report.backlog:
        raise SystemExit(f"{report.backlog} blocks of {model} were not compressed")
    return {"bytes": report.total_bytes / count, "counted": "report", "steps": count}


def reserved_bytes(storage: Any) -> int:
    """Return the bytes of a LazyTensorStorage's tensors."""
    tensors: Any = storage._storage.values(include_nested=True, leaves_only=True)
    nbytes: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return nbytes


def times(model: str, folder: Path) -> dict[str, Any]:
    """Add, sample and update on both sides in turn, and compare what they draw."""
    steps = TIMED_STEPS[model]
    buffers = {side: MODELS[model](side, folder, 4 * steps) for side in SIDES}
    seconds: dict[str, dict[str, list[float]]] = {side: {"add": [], "sample": [], "update": []} for side in SIDES}
    count = 0
    while count < steps:
        for buffer in buffers.values():
            added = buffer.add()
        count += added
    for turn in range(WARM_UP_ROUNDS + TIMED_ROUNDS):
        drawn = {}
        for side in SIDES if turn % 2 else SIDES[::-1]:
            buffer = buffers[side]
            seconds[side]["add"].append(timed(buffer.add)[1] / added)
            drawn[side], spent = timed(buffer.sample)
            seconds[side]["sample"].append(spent)
        require_same(drawn["published"], drawn["holdall"])
        for side in SIDES if turn % 2 else SIDES[::-1]:
            seconds[side]["update"].append(timed(partial(buffers[side].update, drawn[side]))[1])
        again = {side: buffer.sample() for side, buffer in buffers.items()}
        require_same(again["published"], again["holdall"])
        if model == "r2dreamer" and torch.equal(again["holdall"]["deter"], drawn["holdall"]["deter"]):
            raise SystemExit("the update changed nothing")  # The same seed draws the same steps twice.
    return {
        side: {act: statistics.median(some[WARM_UP_ROUNDS:]) for act, some in acts.items()}
        for side, acts in seconds.items()
    }


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and its seconds."""
    start = time.perf_counter()
    result = act()
    return result, time.perf_counter() - start


def require_same(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Exit unless both batches have the same bits. Step ids are names, which differ."""
    if wanted.keys() != found.keys():
        raise SystemExit(f"the keys {list(found)} were drawn instead of {list(wanted)}")
    for key, array in wanted.items():
        if key != "stepid" and not np.array_equal(np.asarray(array), np.asarray(found[key]), equal_nan=True):
            raise SystemExit(f"another {key} was drawn")


def in_a_process(*arguments: str) -> Any:
    """Run this script, and return its result."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["result"]


def commit_of(folder: Path) -> str | None:
    """Return the commit of a copy of a repository. None if it is no clone."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def measure(model: str, folder: Path) -> dict[str, Any]:
    """Measure both sides of a model."""
    place = (f"--{model}", str(folder), "--model", model)
    found: dict[str, Any] = in_a_process(*place, "--times")
    for side in SIDES:
        found[side] |= in_a_process(*place, "--footprint", side)
    found["repository_commit"] = commit_of(folder)
    ratios = {act: found["holdall"][act] / found["published"][act] for act in ("add", "sample", "update")}
    found["ratios"] = ratios
    found["times_smaller"] = found["published"]["bytes"] / found["holdall"]["bytes"]
    held = f"{found['published']['bytes']:,.0f} B -> {found['holdall']['bytes']:,.0f} B a step "
    held += f"({found['times_smaller']:.1f} x less)"
    print(f"{model:10} {held:50} " + "   ".join(f"{act} {ratio:.2f}" for act, ratio in ratios.items()))
    return found


def figures_of(model: str, found: dict[str, Any]) -> list[Figure]:
    """Return the figures of a model."""
    name = TITLES[model]
    ours = found["holdall"]
    bar = f"at least {BAR_DREAMER} x" if model == "dreamerv3" else None
    figures = [
        Figure(name, "arrays of a step", "B", found["published"]["bytes"]),
        Figure(name, "with holdall, `report()`", "B", ours["bytes"]),
        Figure(name, "less by", "times", found["times_smaller"], bar),
    ]
    acts = ("add", "sample", "update") if REWRITES[model] else ("add", "sample")
    unit = "of the published buffer's time"
    return figures + [Figure(name, f"`{act}`", unit, found["ratios"][act]) for act in acts]


def main() -> int:
    """Read the command line, measure, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for model in MODELS:
        parser.add_argument(f"--{model}", type=Path, metavar="DIR", help="a copy of its public repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--footprint", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    if arguments["model"]:
        model = arguments["model"]
        folder = arguments[model]
        result = times(model, folder) if arguments["times"] else footprint(model, arguments["footprint"], folder)
        emit({"result": result})
        return 0
    found = {model: measure(model, arguments[model]) for model in MODELS if arguments[model]}
    for model, figures in found.items():
        if arguments["json"]:
            run = describe_run({"repository_commit": figures["repository_commit"]}, ("torchrl", "tensordict"))
            store(arguments["json"], figures_of(model, figures), run)
    dreamer = found.get("dreamerv3")
    return 0 if dreamer is None or dreamer["times_smaller"] >= BAR_DREAMER else 1


if __name__ == "__main__":
    sys.exit(main())
