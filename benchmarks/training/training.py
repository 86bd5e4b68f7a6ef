"""Whole trainings with holdall's drop-ins and with Stable-Baselines3's own buffers.

    python benchmarks/training/training.py [--part speed|weights|ppo] [--short] [--json FILE]

Every side of every round is a fresh process, and the sides take turns.

`speed`   Steps per second of CPU time, and `add` and `sample` inside the training. DQN on Seaquest and on made-up
          stacks of four frames (batches of 32), SAC on a Dict of image and vector, and TD3 on Pendulum (256). The
          buffer is full and compressed at the start, as after hours of training.
          Environments and networks are small, so that buffers count for much. torch runs on one thread.
`weights` DQN on Seaquest before and after the lines that the guides for Stable-Baselines3 and rl-zoo change: peak
          resident memory of the process, its CPU time, and every byte of the weights.
`ppo`     PPO on Breakout with and without `holdall.sb3.RolloutBuffer`: all values that Stable-Baselines3 logs, the
          weights, the memory after a rollout (USS) and the peak.

In `speed`, the C library keeps the memory that torch returns. By itself it returns memory to the system whenever much
of it is free at the end of the heap, which is a matter of chance: the same training took 100,000 or 680,000 page
faults, a fifth of its time, with either buffer. `--plain-malloc` measures without this setting, and stores nothing.

The exit status is 1 if a bar is missed by a median, or if weights differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdall.machine import held_bytes, peak_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.process import emit

MIB = 2**20
PARTS = ("speed", "weights", "ppo")
SIDES: dict[str, dict[str, Any]] = {"sb3": {}, "raw": {"budget": "auto"}, "compressed": {"budget": None}}
SAMPLE_BARS = {case: {"raw": 0.8, "compressed": 1.1} for case in ("atari", "dqn")}
GAME = "SeaquestNoFrameskip-v4"
FRAMES = 1_500
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
DQN_SETTINGS = {"buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 16, "batch_size": 32}
DQN_SIDES = {
    "DQN": ("sb3", "plain"),
    "DQN with `holdall.sb3.ReplayBuffer`": ("sb3", "holdall"),
    "DQN with `holdall.sb3.ReplayBuffer`, `budget=None`": ("sb3", "compressed"),
    "`PrioritizedDQN`": ("sb3", "prioritized"),
    "rl-zoo DQN": ("zoo", "plain"),
    "rl-zoo DQN with `--gym-packages holdall.zoo`": ("zoo", "holdall"),
}
PPO_GAME = "BreakoutNoFrameskip-v4"
PPO_LANES = 4
PPO_EPOCHS = 2
ROLLOUT_STEPS = 1_024
BATCH = 256
SEED = 0
THREADS = 2

# ---------------------------------------------------------------- speed


def made_up_frames(count: int) -> Any:
    """Frames of 84 x 84 on which squares move."""
    random = np.random.default_rng(0)
    frames = np.full((count, 84, 84), 30, np.uint8)
    places = random.integers(0, 76, (6, 2))
    steps = random.choice([-1, 1, 2], (6, 2))
    for frame in frames:
        for number, (x, y) in enumerate(places):
            frame[x : x + 8, y : y + 8] = 60 + 30 * number
        steps = np.where((places + steps < 0) | (places + steps > 76), -steps, steps)
        places = places + steps
    return frames


class Film(gym.Env[Any, Any]):
    """Made-up frames one after another, as stacks, or as images beside a vector. An episode has 300 steps."""

    def __init__(self, *, stacks: bool) -> None:
        self._frames = made_up_frames(FRAMES)
        self._stacks = stacks
        self._at = 0
        if stacks:
            self.observation_space: Any = spaces.Box(0, 255, (4, 84, 84), np.uint8)
            self.action_space: Any = spaces.Discrete(4)
        else:
            image = spaces.Box(0, 255, (3, 84, 84), np.uint8)
            vector = spaces.Box(-9, 9, (31,), np.float32)
            self.observation_space = spaces.Dict({"image": image, "vector": vector})
            self.action_space = spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin somewhere."""
        super().reset(seed=seed, options=options)
        self._at = int(self.np_random.integers(0, FRAMES - 400))
        self._left = 300
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self._at += 1
        self._left -= 1
        return self._seen(), float(np.sum(action)) % 1.0, self._left == 0, False, {}

    def _seen(self) -> Any:
        first = self._at
        if self._stacks:
            return self._frames[first : first + 4]
        vector = np.full(31, first / FRAMES, np.float32)
        return {"image": self._frames[first : first + 3], "vector": vector}


def vectorise(make_env: Callable[[], gym.Env[Any, Any]]) -> Callable[[], Any]:
    """Return a function that makes a vector environment of one environment."""

    def make() -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: PLC0415  children alone need it

        return DummyVecEnv([make_env])

    return make


def make_atari() -> Any:
    """Make a game as Stable-Baselines3's users do."""
    import ale_py  # noqa: PLC0415  this case alone needs it
    from stable_baselines3.common.env_util import make_atari_env  # noqa: PLC0415  children alone need it
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage  # noqa: PLC0415  likewise

    gym.register_envs(ale_py)
    return VecTransposeImage(VecFrameStack(make_atari_env(GAME, seed=0), n_stack=4))


class Case(NamedTuple):
    """What is trained: how many steps fill the buffer before, and how many are timed."""

    algorithm: str
    policy: str
    make_env: Callable[[], Any]
    settings: dict[str, Any]
    filled: int
    steps: int


CASES = {
    "atari": Case("DQN", "CnnPolicy", make_atari, {"batch_size": 32, "train_freq": 4}, 8_000, 1_600),
    "dqn": Case(
        "DQN", "CnnPolicy", vectorise(lambda: Film(stacks=True)), {"batch_size": 32, "train_freq": 8}, 8_000, 1_600
    ),
    "camera": Case(
        "SAC",
        "MultiInputPolicy",
        vectorise(lambda: Film(stacks=False)),
        {"batch_size": 256, "train_freq": 8},
        4_000,
        200,
    ),
    "vectors": Case("TD3", "MlpPolicy", vectorise(lambda: gym.make("Pendulum-v1")), {"batch_size": 256}, 4_000, 1_500),
}


class Times:
    """Seconds of calls, by the wall clock and of this thread's CPU time."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {act: [] for act in ("add", "sample")}
        self.cpu: dict[str, list[float]] = {act: [] for act in ("add", "sample")}

    def of(self, act: str, call: Callable[[], Any], calls: int = 1) -> Any:
        """Time what makes some calls."""
        wall = time.perf_counter()
        cpu = time.thread_time()
        result = call()
        self.cpu[act].append((time.thread_time() - cpu) / calls)
        self.wall[act].append((time.perf_counter() - wall) / calls)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Return microseconds a call."""
        return {
            act: {
                "wall_us": 1e6 * float(np.median(self.wall[act])),
                "wall_min_us": 1e6 * min(self.wall[act]),
                "cpu_us": 1e6 * float(np.median(self.cpu[act])),
                "cpu_min_us": 1e6 * min(self.cpu[act]),
            }
            for act in ("add", "sample")
        }


def buffer_class(side: str, space: spaces.Space[Any]) -> type[Any]:
    """Return the class that a side uses for a space."""
    from stable_baselines3.common import buffers  # noqa: PLC0415  children alone need it

    import holdall.sb3  # noqa: PLC0415  likewise

    if side == "holdall":
        return holdall.sb3.ReplayBuffer
    return buffers.DictReplayBuffer if isinstance(space, spaces.Dict) else buffers.ReplayBuffer


def train_timed(name: str, side: str) -> dict[str, Any]:
    """Fill and train one side, with its calls timed from outside while it trains."""
    import stable_baselines3  # noqa: PLC0415  children alone need it

    case = CASES[name]
    times = Times()
    env = case.make_env()
    parent: Any = buffer_class("sb3" if side == "sb3" else "holdall", env.observation_space)

    class Timed(parent):  # type: ignore[misc]  # chosen at run time
        def add(self, *arguments: Any) -> None:
            times.of("add", lambda: parent.add(self, *arguments))

        def sample(self, *arguments: Any, **options: Any) -> Any:
            return times.of("sample", lambda: parent.sample(self, *arguments, **options))

    small: dict[str, Any] = {"features_extractor_kwargs": {"features_dim": 64}} if case.policy == "CnnPolicy" else {}
    model = getattr(stable_baselines3, case.algorithm)(
        case.policy,
        env,
        replay_buffer_class=Timed,
        replay_buffer_kwargs=SIDES[side],
        buffer_size=20_000,
        seed=0,
        device="cpu",
        policy_kwargs=small,
        learning_starts=case.filled,
        **case.settings,
    )
    model.learn(case.filled)
    if side != "sb3":
        model.replay_buffer.memory.store.wait_idle()
    times.wall.update(add=[], sample=[])
    times.cpu.update(add=[], sample=[])
    began = time.perf_counter()
    cpu = time.process_time()
    model.learn(case.steps, reset_num_timesteps=False)
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - began
    return {"steps_per_cpu_s": case.steps / cpu, "steps_per_s": case.steps / wall, **times.summary()}


TITLES = {
    "atari": "DQN on Seaquest, batches of 32",
    "dqn": "DQN on made-up stacks, batches of 32",
    "camera": "SAC on image and vector, batches of 256",
    "vectors": "TD3 on Pendulum, batches of 256",
}


def measure_speed(case: str, rounds: int, *, plain_malloc: bool) -> tuple[list[Figure], bool]:
    """Train all sides of a case in turns. Return the figures, and whether the medians meet their bars."""
    found: dict[str, list[Any]] = {side: [] for side in SIDES}
    surroundings = ONE_THREAD | ({} if plain_malloc else KEPT_MEMORY)
    for turn in range(rounds):
        for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
            found[side].append(run_child("--case", case, "--side", side, surroundings=surroundings))
    figures = []
    is_met = True
    for side in ("raw", "compressed"):
        name = TITLES[case] + (", compressed" if side == "compressed" else "")
        steps = _ratios(found, side, lambda row: row["steps_per_cpu_s"])
        sample = _ratios(found, side, lambda row: row["sample"]["cpu_us"])
        add = _ratios(found, side, lambda row: row["add"]["cpu_us"])
        bar = SAMPLE_BARS.get(case, {}).get(side)
        median = statistics.median(steps)
        is_met &= median >= 1.0
        is_met &= bar is None or statistics.median(sample) <= bar
        figures += [
            Figure(name, "steps per CPU second", "of SB3's", median, "at least 1.0"),
            Figure(name, "rounds", "", f"{min(steps):.2f} to {max(steps):.2f}"),
            Figure(
                name, "`sample`", "of SB3's time", statistics.median(sample), None if bar is None else f"at most {bar}"
            ),
            Figure(name, "`add`", "of SB3's time", statistics.median(add)),
        ]
    return figures, is_met


def _ratios(found: dict[str, list[Any]], side: str, value: Callable[[Any], float]) -> list[float]:
    """Return a value of a side over that of Stable-Baselines3, for each round."""
    return [value(one) / value(plain) for one, plain in zip(found[side], found["sb3"], strict=True)]


# ---------------------------------------------------------------- weights


def train_dqn(kind: str, steps: int, folder: Path) -> None:
    """Train one side with Stable-Baselines3 alone."""
    import ale_py  # noqa: PLC0415  each side imports what it needs, and no more
    import gymnasium as gym  # noqa: PLC0415
    from stable_baselines3 import DQN  # noqa: PLC0415
    from stable_baselines3.common.env_util import make_atari_env  # noqa: PLC0415
    from stable_baselines3.common.vec_env import VecFrameStack  # noqa: PLC0415

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env(GAME, seed=1), n_stack=4)
    chosen: dict[str, Any] = DQN_SETTINGS | {"seed": 1, "device": "cpu"}
    algorithm: Any = DQN
    if kind != "plain":
        from holdall.sb3 import PrioritizedDQN, ReplayBuffer  # noqa: PLC0415

        algorithm = PrioritizedDQN if kind == "prioritized" else DQN
        chosen |= {} if kind == "prioritized" else {"replay_buffer_class": ReplayBuffer}
        chosen |= {"replay_buffer_kwargs": {"budget": None}} if kind == "compressed" else {}
    model = algorithm("CnnPolicy", env, **chosen)
    model.learn(steps)
    model.save(folder / "model.zip")


def command_of(side: tuple[str, str], steps: int, folder: Path) -> list[str]:
    """Return the command that trains one side."""
    family, kind = side
    if family == "sb3":
        return [sys.executable, __file__, "--train", kind, "--steps", str(steps), "--folder", str(folder)]
    settings = [f"{name}:{value}" for name, value in DQN_SETTINGS.items()]
    given = [] if kind == "plain" else ["--gym-packages", "holdall.zoo"]
    run = [sys.executable, "-m", "rl_zoo3.train", "--algo", "dqn", "--env", GAME, "--seed", "1", "--device", "cpu"]
    return [*run, "-n", str(steps), "-f", str(folder), "--eval-freq", "-1", *given, "-params", *settings]


def train_once(side: tuple[str, str], steps: int) -> dict[str, Any]:
    """Train one side, and read what its process took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = command_of(side, steps, folder)
        devnull = subprocess.DEVNULL
        started = subprocess.Popen(command, env=os.environ | ONE_THREAD, stdout=devnull, stderr=devnull)
        _, status, used = os.wait4(started.pid, 0)
        if status:
            raise SystemExit(f"{side} ended with status {status}; run {' '.join(command)}")
        with zipfile.ZipFile(next(folder.rglob("*.zip"))) as model:
            weights = hashlib.sha256(model.read("policy.pth")).hexdigest()
    return {"peak_bytes": used.ru_maxrss * 1024, "cpu_s": used.ru_utime + used.ru_stime, "weights": weights}


def measure_weights(steps: int, rounds: int) -> tuple[list[Figure], bool]:
    """Train all sides in turns. Return the figures, and whether the weights are the same."""
    idle = train_once(DQN_SIDES["DQN"], 1)["peak_bytes"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in DQN_SIDES}
    for number in range(rounds):
        for name in list(DQN_SIDES)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(train_once(DQN_SIDES[name], steps))
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    figures = [Figure("the process before it trains", "peak memory", "MiB", idle / MIB)]
    is_met = True
    for name, measured in found.items():
        family, kind = DQN_SIDES[name]
        plain = found[next(other for other, side in DQN_SIDES.items() if side == (family, "plain"))]
        cpu = [one["cpu_s"] / other["cpu_s"] for one, other in zip(measured, plain, strict=True)]
        is_same = {one["weights"] for one in measured} == {one["weights"] for one in plain}
        peak = statistics.median(one["peak_bytes"] for one in measured)
        figures += [
            Figure(name, "steps", "", steps),
            Figure(name, "peak memory", "MiB", peak / MIB),
            Figure(name, "CPU time", "of the plain side's", statistics.median(cpu)),
        ]
        if kind != "plain":
            bar = None if kind == "prioritized" else "the same"
            figures.append(Figure(name, "weights", "", "the same" if is_same else "its own", bar))
            is_met &= is_same or kind == "prioritized"
    return figures, is_met


# ---------------------------------------------------------------- PPO


def train_ppo(side: str, steps: int) -> dict[str, Any]:
    """Train one side and return its curve, a digest of its weights and its memory."""
    import ale_py  # noqa: PLC0415  each side imports what it needs, and no more
    import torch  # noqa: PLC0415
    from stable_baselines3 import PPO  # noqa: PLC0415
    from stable_baselines3.common.callbacks import BaseCallback  # noqa: PLC0415
    from stable_baselines3.common.env_util import make_atari_env  # noqa: PLC0415
    from stable_baselines3.common.vec_env import VecFrameStack  # noqa: PLC0415

    class Curve(BaseCallback):
        """Records what was logged and held, rollout by rollout."""

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, str]] = []
            self.held: list[int] = []

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            logged = self.model.logger.name_to_value  # of the update before
            row = {name: repr(value) for name, value in logged.items() if not name.startswith("time/")}
            episodes = [(info["r"], info["l"]) for info in self.model.ep_info_buffer or ()]
            self.rows.append({**row, "episodes": repr(episodes), "step": repr(self.num_timesteps)})
            self.held.append(held_bytes().unique)

    torch.set_num_threads(THREADS)
    gym.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(PPO_GAME, n_envs=PPO_LANES, seed=SEED), n_stack=4)
    buffer_class = None
    if side == "holdall":
        from holdall.sb3 import RolloutBuffer  # noqa: PLC0415

        buffer_class = RolloutBuffer
    model = PPO(
        "CnnPolicy",
        envs,
        n_steps=ROLLOUT_STEPS,
        batch_size=BATCH,
        n_epochs=PPO_EPOCHS,
        learning_rate=2.5e-4,
        clip_range=0.1,
        ent_coef=0.01,
        seed=SEED,
        device="cpu",
        rollout_buffer_class=buffer_class,
    )
    curve = Curve()
    model.learn(steps, callback=curve)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.policy.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return {
        "curve": curve.rows,
        "weights": digest.hexdigest(),
        "held_mib": max(curve.held) / MIB,
        "peak_mib": peak_bytes() / MIB,
    }


def measure_ppo(steps: int) -> tuple[list[Figure], bool]:
    """Train both sides. Return the figures, and whether all is the same and less memory is taken."""
    plain = run_child("--train-ppo", "sb3", "--steps", str(steps))
    ours = run_child("--train-ppo", "holdall", "--steps", str(steps))
    is_same = plain["curve"] == ours["curve"] and plain["weights"] == ours["weights"]
    name = f"PPO on Breakout, {steps:,} steps"
    figures = [
        Figure(name, "memory after a rollout", "MiB", plain["held_mib"]),
        Figure(name, "peak memory", "MiB", plain["peak_mib"]),
        Figure(f"{name}, with holdall", "memory after a rollout", "MiB", ours["held_mib"], "less"),
        Figure(f"{name}, with holdall", "peak memory", "MiB", ours["peak_mib"], "less"),
        Figure(f"{name}, with holdall", "weights", "", "the same" if is_same else "others", "the same"),
    ]
    is_less = ours["held_mib"] < plain["held_mib"] and ours["peak_mib"] < plain["peak_mib"]
    return figures, is_same and is_less


# ---------------------------------------------------------------- all of it


def run_child(*arguments: str, surroundings: dict[str, str] | None = None) -> Any:
    """Run this script in a fresh process, and return its result."""
    command = [sys.executable, __file__, *arguments]
    environment = os.environ | (surroundings or {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])["result"]


def main() -> int:
    """Read the command line. Train one side here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case of `speed`")
    parser.add_argument("--short", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--plain-malloc", action="store_true", help="leave the C library's settings as they are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # these are a child's
    parser.add_argument("--train", choices=["plain", "holdall", "compressed", "prioritized"], help=argparse.SUPPRESS)
    parser.add_argument("--train-ppo", choices=["sb3", "holdall"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.side:
        emit({"result": train_timed(wanted.case[0], wanted.side)})
        return 0
    if wanted.train:
        train_dqn(wanted.train, wanted.steps, wanted.folder)
        return 0
    if wanted.train_ppo:
        emit({"result": train_ppo(wanted.train_ppo, wanted.steps)})
        return 0
    rounds = 1 if wanted.short else 5
    measures: list[Callable[[], tuple[list[Figure], bool]]] = []
    parts = wanted.part or PARTS
    if "speed" in parts:
        cases = wanted.case or CASES
        measures += [partial(measure_speed, case, rounds, plain_malloc=wanted.plain_malloc) for case in cases]
    if "weights" in parts:
        measures.append(partial(measure_weights, 4_000 if wanted.short else 8_000, 1 if wanted.short else 3))
    if "ppo" in parts:
        measures.append(partial(measure_ppo, 20_000 if wanted.short else 100_000))
    described = describe_run({"short": wanted.short, "rounds": rounds}, ("rl_zoo3",))
    is_met = True
    for measure in measures:
        figures, is_part_met = measure()
        show(figures)
        is_met &= is_part_met
        if wanted.json is not None and not wanted.plain_malloc:
            store(wanted.json, figures, described)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
