"""Rules about what observations cost: in rollouts, batches and replay buffers; dtypes, and storing them twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdall.schema import Leaf
from holdall.tools.lint.finding import Edit, Finding, Severity
from holdall.tools.lint.machine import Machine, buffer_need, percent, sized
from holdall.tools.lint.rule import RunRule
from holdall.tools.lint.run import ConfiguredRun, OneOf, Reference, candidates
from holdall.tools.plan import ROLLOUTS_KEEP_DTYPES

_FLATTEN_SHARE = 0.25  # of the limit
_VRAM_SHARE = 0.85
_LARGE_BATCH = 2**30
_SHARE_WORTH_REPORTING = 0.1  # of the limit


class RolloutStoresFloats(RunRule):
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

    id, name, severity = "M04", "rollout-stores-images-as-float", Severity.WARNING

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if images become floats in the rollout."""
        observation = run.environments.observation
        if machine.sb3 is None or machine.sb3 >= ROLLOUTS_KEEP_DTYPES or not run.algorithm.on_policy:
            return
        if observation is None or not observation.images:
            return
        needed = buffer_need(run, machine)
        if needed is None:
            return
        images = sum(leaf.nbytes for leaf in observation.images)
        saved = 3 * images * needed.layout.transitions
        yield self.finding(
            f"Stable-Baselines3 {'.'.join(map(str, machine.sb3))} stores this rollout's images as float32: "
            f"{sized(needed.resident_bytes)}, of which {sized(saved)} are not needed from 2.7.1 on",
            run.place_of("n_steps"),
            rollout_bytes=needed.resident_bytes,
            saved_bytes=saved,
        )


class FlattenDoubles(RunRule):
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

    id, name, severity = "M05", "flatten-doubles-rollout", Severity.WARNING

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the copy takes more than a quarter of the memory."""
        needed = buffer_need(run, machine)
        if needed is None or needed.layout.flatten_bytes <= _FLATTEN_SHARE * machine.limit_bytes:
            return
        yield self.finding(
            f"n_steps x n_envs = {needed.layout.transitions:,}: the rollout takes {sized(needed.resident_bytes)}, and "
            f"{sized(needed.layout.flatten_bytes)} more while it is flattened, "
            f"{percent(needed.peak_bytes, machine.limit_bytes)} of {machine.limit_name} together",
            run.place_of("n_steps"),
            rollout_bytes=needed.resident_bytes,
            flatten_bytes=needed.layout.flatten_bytes,
            limit_bytes=machine.limit_bytes,
        )


class MoreEnvironmentsSameSteps(RunRule):
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

    id, name, severity = "M14", "environments-raised-steps-fixed", Severity.WARNING
    sees_searches = True

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the largest number of environments takes over a quarter of the memory."""
        searched = run.environments.count
        if not isinstance(searched, OneOf) or not run.algorithm.on_policy or not candidates(searched):
            return
        needs = [buffer_need(run.with_environments(count=count), machine) for count in sorted(candidates(searched))]
        smallest, largest = needs[0], needs[-1]
        if smallest is None or largest is None or largest.peak_bytes <= _FLATTEN_SHARE * machine.limit_bytes:
            return
        yield self.finding(
            f"n_steps stays while n_envs goes from {smallest.layout.n_envs} to {largest.layout.n_envs}: the peak grows "
            f"from {sized(smallest.peak_bytes)} to {sized(largest.peak_bytes)}; {machine.limit_name} is "
            f"{sized(machine.limit_bytes)}",
            run.place_of("n_steps"),
            smallest_bytes=smallest.peak_bytes,
            largest_bytes=largest.peak_bytes,
            limit_bytes=machine.limit_bytes,
        )


def _batch_bytes(run: ConfiguredRun) -> tuple[int, int] | None:
    """Return the bytes of a batch's observations as stored, and as the network gets them."""
    observation, batch = run.environments.observation, run.count("batch_size")
    if observation is None or batch is None:
        return None
    if run.algorithm.on_policy and (steps := run.count("n_steps")) and (count := run.environments.number):
        batch = min(batch, steps * count)
    times = batch * (1 if run.algorithm.on_policy else 2)
    return observation.nbytes * times, observation.elements * 4 * times


class BatchBeyondVram(RunRule):
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

    id, name, severity = "M15", "batch-beyond-vram", Severity.WARNING

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the batch alone takes nearly all of the GPU's memory."""
        sizes = _batch_bytes(run)
        if sizes is None or machine.vram_bytes is None or run.value("device") == "cpu":
            return
        if sizes[1] > _VRAM_SHARE * machine.vram_bytes:
            yield self.finding(
                f"a batch's observations take {sized(sizes[1])} as float32, the GPU has {sized(machine.vram_bytes)}",
                run.place_of("batch_size"),
                batch_bytes=sizes[1],
                vram_bytes=machine.vram_bytes,
            )


class BatchBecomesFloat(RunRule):
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

    id, name, severity = "M17", "image-batch-becomes-float", Severity.INFO

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the larger figure reaches a GiB."""
        sizes, observation = _batch_bytes(run), run.environments.observation
        if sizes is None or observation is None or not observation.images or sizes[1] < _LARGE_BATCH:
            return
        yield self.finding(
            f"a batch's observations are stored in {sized(sizes[0])} and reach the network as float32, "
            f"{sized(sizes[1])}",
            run.place_of("batch_size"),
            stored_bytes=sizes[0],
            batch_bytes=sizes[1],
        )


class WideObservations(RunRule):
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

    id, name, severity = "M06", "observations-wider-than-needed", Severity.WARNING

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield for every leaf that is wider than needed."""
        observation = run.environments.observation
        for leaf in observation.leaves if observation else ():
            is_image = (
                len(leaf.shape) == 3 and observation is not None and observation.bounds.get(leaf.name) == (0, 255)
            )
            wanted = np.uint8 if is_image else np.float32
            if leaf.dtype.kind != "f" or leaf.dtype.itemsize <= np.dtype(wanted).itemsize or observation is None:
                continue
            narrow = Leaf(leaf.name, leaf.shape, np.dtype(wanted))
            called = f"observation {leaf.name!r}" if leaf.name else "the observation"
            yield self.finding(
                f"{called} of shape {leaf.shape} is {leaf.dtype}: {leaf.nbytes:,} B a step, {narrow.nbytes:,} B as "
                f"{narrow.dtype}",
                observation.place,
                bytes_per_step=leaf.nbytes,
                narrow_bytes_per_step=narrow.nbytes,
            )


class StoredTwice(RunRule):
    """Finds replay buffers in which storing every observation twice takes a tenth of the memory or more.

    Why: Stable-Baselines3 keeps `obs` and `next_obs` in two arrays, though one step's next observation is the following
    step's observation. In a stack of 4 frames, each frame is there eight times.
    Fix: `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each frame once and gives the same samples.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=400_000)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000)
    """

    id, name, severity = "M07", "observations-stored-twice", Severity.WARNING

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if much memory holds what is there already."""
        needed = buffer_need(run, machine)
        if needed is None or run.algorithm.on_policy or run.environments.observation is None:
            return
        if run.value("optimize_memory_usage") is not False:
            return
        held = min(needed.layout.transitions, run.total_timesteps or needed.layout.transitions)
        stack = run.environments.stack
        repeated = int(run.environments.observation.nbytes * held * (2 - 1 / stack))
        if repeated < _SHARE_WORTH_REPORTING * machine.limit_bytes:
            return
        what = "each observation is stored twice" if stack == 1 else f"each frame is stored {2 * stack} times"
        yield self.finding(
            f"{what}: {sized(repeated)} of {sized(needed.resident_bytes)} "
            f"({percent(repeated, needed.resident_bytes)}) hold what is there already",
            run.place_of("buffer_size"),
            repeated_bytes=repeated,
            needed_bytes=needed.resident_bytes,
            times=2 * stack,
        )


def _is_dict(run: ConfiguredRun) -> bool:
    observation = run.environments.observation
    return run.value("policy") == "MultiInputPolicy" or bool(observation and observation.is_dict)


def _is_sb3_class(run: ConfiguredRun) -> bool:
    given = run.value("replay_buffer_class")
    return given is None or (isinstance(given, Reference) and given.dotted.startswith("stable_baselines3"))


def _switch_off(run: ConfiguredRun) -> Edit:
    """Return the edit that makes `optimize_memory_usage` False; the run would not have started otherwise."""
    return Edit(run.place_of("optimize_memory_usage"), "True", "False")


class OptimiseWithDict(RunRule):
    """Finds `optimize_memory_usage=True` with Dict observations.

    Why: Stable-Baselines3's `DictReplayBuffer` refuses it with an AssertionError.
    Fix: Leave it out; `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each observation once, Dict or not.

    Bad (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000, optimize_memory_usage=True)

    Good (camera):
        SAC("MultiInputPolicy", Dog(), buffer_size=10_000)
    """

    id, name, severity = "M08", "optimise-with-dict", Severity.ERROR

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the two meet."""
        if run.value("optimize_memory_usage") is True and _is_dict(run) and _is_sb3_class(run):
            yield self.finding(
                "optimize_memory_usage=True is refused for Dict observations: the model is not even constructed",
                run.place_of("optimize_memory_usage"),
                _switch_off(run),
            )


class OptimiseWithTimeouts(RunRule):
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

    id, name, severity = "M16", "optimise-with-timeouts", Severity.ERROR

    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield if the two meet."""
        kwargs = run.value("replay_buffer_kwargs")
        handles = kwargs is None or (
            isinstance(kwargs, dict) and kwargs.get("handle_timeout_termination", True) is True
        )
        if run.value("optimize_memory_usage") is not True or _is_dict(run) or not _is_sb3_class(run):
            return
        if handles:
            yield self.finding(
                "optimize_memory_usage=True is refused together with handle_timeout_termination, which is on by "
                "default: the model is not even constructed",
                run.place_of("optimize_memory_usage"),
                _switch_off(run),
            )
