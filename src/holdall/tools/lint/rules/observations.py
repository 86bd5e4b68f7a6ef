"""Rules about what observations cost: in rollouts, batches and replay buffers; dtypes, and storing them twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from holdall.schema import Leaf
from holdall.tools.lint.finding import Edit, Severity
from holdall.tools.lint.rule import Match, run_rule, search_rule
from holdall.tools.lint.run import ConfiguredRun, Machine, OneOf, Reference, buffer_need, candidates, percent, sized
from holdall.tools.plan.spec import ROLLOUTS_KEEP_DTYPES

_FLATTEN_SHARE = 0.25  # of the limit
_VRAM_SHARE = 0.85
_LARGE_BATCH = 2**30
_SHARE_WORTH_REPORTING = 0.1  # of the limit
_BYTES_WORTH_REPORTING = 2**30


@run_rule("M04", "rollout-stores-images-as-float", Severity.WARNING)
def rollout_stores_images_as_float(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Looks for images in the rollouts of a Stable-Baselines3 that stores them as float32.

    Why: Up to version 2.7.0 a rollout holds every observation as float32: four bytes for each byte of an image.
    Fix: Upgrade: `pip install 'stable-baselines3>=2.7.1'` stores images as they are.

    Bad (screens, sb3=2.7.0):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=2048)

    Good (screens, sb3=2.7.1):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=2048)
    """
    observation, needed = run.environments.observation, buffer_need(run, machine)
    if machine.sb3 is None or machine.sb3 >= ROLLOUTS_KEEP_DTYPES or not run.algorithm.on_policy:
        return
    if observation is None or not observation.images or needed is None:
        return
    saved = 3 * sum(leaf.nbytes for leaf in observation.images) * needed.layout.transitions
    text = (
        f"Stable-Baselines3 {'.'.join(map(str, machine.sb3))} stores this rollout's images as float32: "
        f"{sized(needed.resident_bytes)}, of which {sized(saved)} are not needed from 2.7.1 on"
    )
    yield Match(text, run.place_of("n_steps"), {"rollout_bytes": needed.resident_bytes, "saved_bytes": saved})


@run_rule("M05", "flatten-doubles-rollout", Severity.WARNING)
def flatten_doubles_rollout(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds rollouts that are large enough for the copy that flattening makes to matter.

    Why: Before the first minibatch Stable-Baselines3 joins the axes of steps and environments. With more than one
    environment that copies the observations, so for a moment they are there twice, at every update.
    Fix: Lower `n_steps`, or use one environment (then nothing is copied), or `holdall.sb3.RolloutBuffer`.

    Bad (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=20_000)

    Good (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=2048)
    """
    needed = buffer_need(run, machine)
    copied = needed.layout.flatten_bytes if needed else 0
    if needed is None or copied <= _FLATTEN_SHARE * machine.limit_bytes:
        return
    yield Match(
        f"n_steps x n_envs = {needed.layout.transitions:,}: the rollout takes {sized(needed.resident_bytes)}, and "
        f"{sized(copied)} more while it is flattened, {percent(needed.peak_bytes, machine.limit_bytes)} of "
        f"{machine.limit_name} together",
        run.place_of("n_steps"),
        {"rollout_bytes": needed.resident_bytes, "flatten_bytes": copied, "limit_bytes": machine.limit_bytes},
    )


@search_rule("M14", "environments-raised-steps-fixed", Severity.WARNING)
def environments_raised_steps_fixed(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Looks for a search over the number of environments that leaves `n_steps` as it is.

    Why: The rollout grows with `n_steps` times `n_envs`, and so does the copy that flattening makes.
    Fix: Hold the product constant: `n_steps=TRANSITIONS // n_envs`.

    Bad (screens):
        for count in (2, 4, 6):
            env = VecFrameStack(DummyVecEnv([Screen for _ in range(count)]), n_stack=4)
            PPO("CnnPolicy", env, n_steps=8192)

    Good (screens):
        for count in (2, 4, 6):
            env = VecFrameStack(DummyVecEnv([Screen for _ in range(count)]), n_stack=4)
            PPO("CnnPolicy", env, n_steps=8192 // count)
    """
    searched = run.environments.count
    if not isinstance(searched, OneOf) or not run.algorithm.on_policy or not candidates(searched):
        return
    few, many = min(candidates(searched)), max(candidates(searched))
    runs = [replace(run, environments=replace(run.environments, count=count)) for count in (few, many)]
    smallest, largest = (buffer_need(one, machine) for one in runs)
    if smallest is None or largest is None or largest.peak_bytes <= _FLATTEN_SHARE * machine.limit_bytes:
        return
    low, high, limit = smallest.peak_bytes, largest.peak_bytes, machine.limit_bytes
    text = (
        f"n_steps stays while n_envs goes from {few} to {many}: the peak grows "
        f"from {sized(low)} to {sized(high)}; {machine.limit_name} is {sized(limit)}"
    )
    yield Match(text, run.place_of("n_steps"), {"smallest_bytes": low, "largest_bytes": high, "limit_bytes": limit})


def _batch_bytes(run: ConfiguredRun) -> tuple[int, int] | None:
    """Return the bytes of a batch's observations as stored, and as the network gets them."""
    observation, batch = run.environments.observation, run.count("batch_size")
    if observation is None or batch is None:
        return None
    if run.algorithm.on_policy and (steps := run.count("n_steps")) and (count := run.environments.number):
        batch = min(batch, steps * count)
    times = batch * (1 if run.algorithm.on_policy else 2)
    return observation.nbytes * times, observation.elements * 4 * times


@run_rule("M15", "batch-beyond-vram", Severity.WARNING)
def batch_beyond_vram(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares one batch, as the network gets it, with the GPU's memory.

    Why: Images are stored as bytes and reach the network as float32, four times as large; an off-policy batch holds the
    next observations too. Activations, gradients, the optimizer and CUDA's own context come on top.
    Fix: Lower `batch_size`.

    Bad (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(8)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=2048, batch_size=16_384)

    Good (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(8)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=2048, batch_size=2048)
    """
    sizes = _batch_bytes(run)
    if sizes is None or machine.vram_bytes is None or run.value("device") == "cpu":
        return
    if sizes[1] > _VRAM_SHARE * machine.vram_bytes:
        text = f"a batch's observations take {sized(sizes[1])} as float32, the GPU has {sized(machine.vram_bytes)}"
        yield Match(text, run.place_of("batch_size"), {"batch_bytes": sizes[1], "vram_bytes": machine.vram_bytes})


@run_rule("M17", "image-batch-becomes-float", Severity.INFO)
def image_batch_becomes_float(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Says how large a batch of images is once the network gets it.

    Why: A batch worked out from the bytes that are stored is four times too small: the network gets float32. What the
    layers keep for the backward pass comes on top.
    Fix: Plan with the larger figure, or lower `batch_size`.

    Bad (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=8192, batch_size=2048)

    Good (screens):
        env = VecFrameStack(DummyVecEnv([Screen for _ in range(2)]), n_stack=4)
        PPO("CnnPolicy", env, n_steps=8192, batch_size=256)
    """
    sizes, observation = _batch_bytes(run), run.environments.observation
    if sizes is None or observation is None or not observation.images or sizes[1] < _LARGE_BATCH:
        return
    text = f"a batch's observations are stored in {sized(sizes[0])} and reach the network as float32, {sized(sizes[1])}"
    yield Match(text, run.place_of("batch_size"), {"stored_bytes": sizes[0], "batch_bytes": sizes[1]})


@run_rule("M06", "observations-wider-than-needed", Severity.WARNING)
def observations_wider_than_needed(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds images of 0 to 255 that are declared as floats, and float64 observations.

    Why: Buffers store the space's dtype. An image of whole numbers from 0 to 255 takes four (float32) or eight
    (float64) times the bytes that it has; the network computes in float32 in any case.
    Fix: Declare images as `np.uint8` and vectors as `np.float32`, and return them so.

    Bad:
        import numpy as np
        import gymnasium as gym
        from gymnasium import spaces
        from stable_baselines3 import DQN

        class Screen(gym.Env):
            def __init__(self):
                self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.float32)
                self.action_space = spaces.Discrete(4)

        DQN("CnnPolicy", Screen(), buffer_size=10_000)

    Good:
        import numpy as np
        import gymnasium as gym
        from gymnasium import spaces
        from stable_baselines3 import DQN

        class Screen(gym.Env):
            def __init__(self):
                self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
                self.action_space = spaces.Discrete(4)

        DQN("CnnPolicy", Screen(), buffer_size=10_000)
    """
    observation = run.environments.observation
    if observation is None:
        return
    for leaf in observation.leaves:
        is_image = len(leaf.shape) == 3 and observation.bounds.get(leaf.name) == (0, 255)
        wanted = np.uint8 if is_image else np.float32
        if leaf.dtype.kind != "f" or leaf.dtype.itemsize <= np.dtype(wanted).itemsize:
            continue
        narrow = Leaf(leaf.name, leaf.shape, np.dtype(wanted))
        called = f"observation {leaf.name!r}" if leaf.name else "the observation"
        wide, less = leaf.nbytes, narrow.nbytes
        text = f"{called} of shape {leaf.shape} is {leaf.dtype}: {wide:,} B a step, {less:,} B as {narrow.dtype}"
        yield Match(text, observation.place, {"bytes_per_step": wide, "narrow_bytes_per_step": less})


@run_rule("M07", "observations-stored-twice", Severity.WARNING)
def observations_stored_twice(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds replay buffers in which storing every observation twice takes a tenth of the memory or more.

    Why: Stable-Baselines3 keeps `obs` and `next_obs` in two arrays, though one step's next observation is the following
    step's observation. In a stack of 4 frames, each frame is there eight times.
    Fix: `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each frame once and gives the same samples.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=400_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000)
    """
    needed = buffer_need(run, machine)
    observation, stack = run.environments.observation, run.environments.stack
    if needed is None or run.algorithm.on_policy or observation is None or run.value("optimize_memory_usage"):
        return
    held = min(needed.layout.transitions, run.total_timesteps or needed.layout.transitions)
    repeated = int(observation.nbytes * held * (2 - 1 / stack))
    if repeated < min(_SHARE_WORTH_REPORTING * machine.limit_bytes, _BYTES_WORTH_REPORTING):
        return
    what = "each observation is stored twice" if stack == 1 else f"each frame is stored {2 * stack} times"
    yield Match(
        f"{what}: {sized(repeated)} of {sized(needed.resident_bytes)} "
        f"({percent(repeated, needed.resident_bytes)}) hold what is there already",
        run.place_of("buffer_size"),
        {"repeated_bytes": repeated, "needed_bytes": needed.resident_bytes, "times": 2 * stack},
    )


def _is_dict(run: ConfiguredRun) -> bool:
    observation = run.environments.observation
    return run.value("policy") == "MultiInputPolicy" or bool(observation and observation.is_dict)


def _optimises(run: ConfiguredRun) -> bool:
    """Whether `optimize_memory_usage` is on, with a buffer of Stable-Baselines3."""
    given = run.value("replay_buffer_class")
    is_sb3 = given is None or (isinstance(given, Reference) and given.dotted.startswith("stable_baselines3"))
    return is_sb3 and run.value("optimize_memory_usage") is True


def _refused(run: ConfiguredRun, why: str) -> Match:
    """Return a match whose edit makes `optimize_memory_usage` False; the run would not have started otherwise."""
    place = run.place_of("optimize_memory_usage")
    what = "buffer" if not run.learns and "policy" not in run.given else "model"
    text = f"optimize_memory_usage=True is refused {why}: the {what} is not even constructed"
    return Match(text, place, edit=Edit(place, "True", "False"))


@run_rule("M08", "optimise-with-dict", Severity.ERROR, sees_buffers=True)
def optimise_with_dict(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `optimize_memory_usage=True` with Dict observations.

    Why: Stable-Baselines3's `DictReplayBuffer` refuses it with an AssertionError.
    Fix: Leave it out; `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each observation once, Dict or not.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000, optimize_memory_usage=True)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000)
    """
    if _optimises(run) and _is_dict(run):
        yield _refused(run, "for Dict observations")


@run_rule("M16", "optimise-with-timeouts", Severity.ERROR, sees_buffers=True)
def optimise_with_timeouts(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `optimize_memory_usage=True` while timeouts are handled, which is the default.

    Why: Stable-Baselines3 refuses it with a ValueError: with one array for both, the true last observation of a
    truncated episode is lost.
    Fix: `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each observation once and keeps truncation right. Or give
    up the handling of timeouts: `replay_buffer_kwargs={"handle_timeout_termination": False}`.

    Bad:
        from stable_baselines3 import DQN
        DQN("CnnPolicy", "PongNoFrameskip-v4", buffer_size=100_000, optimize_memory_usage=True)

    Good:
        from stable_baselines3 import DQN
        DQN(
            "CnnPolicy",
            "PongNoFrameskip-v4",
            buffer_size=100_000,
            optimize_memory_usage=True,
            replay_buffer_kwargs=dict(handle_timeout_termination=False),
        )
    """
    kwargs = run.value("replay_buffer_kwargs")
    handles = kwargs is None or (isinstance(kwargs, dict) and kwargs.get("handle_timeout_termination", True) is True)
    if handles and _optimises(run) and not _is_dict(run):
        yield _refused(run, "together with handle_timeout_termination, which is on by default")
