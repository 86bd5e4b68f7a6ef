"""Rules about the memory of rollouts and batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.amounts import both, percent
from holdall.lint.finding import Finding, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, RunRule
from holdall.lint.run import Run
from holdall.lint.sizes import need
from holdall.lint.values import OneOf, candidates
from holdall.plan.buffers import ROLLOUTS_KEEP_DTYPES

_FLATTEN_SHARE = 0.25  # of the limit
_VRAM_SHARE = 0.85
_LARGE_BATCH = 2**30

SCREEN = """
import numpy as np
import gymnasium as gym
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

class Screen(gym.Env):
    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (144, 160, 3), np.uint8)
        self.action_space = spaces.Discrete(8)

"""


def screen(lines: str, **machine: object) -> Case:
    """Return a script that trains on screens with these last lines."""
    return Case(SCREEN.lstrip() + lines, machine=machine)


def _screens(count: int, arguments: str) -> str:
    return f"""env = VecFrameStack(DummyVecEnv([Screen for _ in range({count})]), n_stack=4)
PPO("CnnPolicy", env, {arguments})
"""


class RolloutStoresFloats(RunRule):
    """Looks for images in the rollouts of a Stable-Baselines3 that stores them as float32."""

    id = "M04"
    name = "rollout-stores-images-as-float"
    severity = Severity.WARNING
    why = "Up to version 2.7.0 a rollout holds every observation as float32: four bytes for each byte of an image."
    fix = "Upgrade: `pip install 'stable-baselines3>=2.7.1'` stores images as they are."
    BAD: ClassVar = (screen(_screens(2, "n_steps=2048"), sb3=(2, 7, 0)),)
    GOOD: ClassVar = (
        screen(_screens(2, "n_steps=2048"), sb3=(2, 7, 1)),
        Case('from stable_baselines3 import PPO\nPPO("MlpPolicy", "CartPole-v1")', machine={"sb3": (2, 7, 0)}),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if images become floats in the rollout."""
        observation = run.environments.observation
        if machine.sb3 is None or machine.sb3 >= ROLLOUTS_KEEP_DTYPES or not run.algorithm.on_policy:
            return
        if observation is None or not observation.images:
            return
        needed = need(run, machine)
        if needed is None:
            return
        images = sum(leaf.nbytes for leaf in observation.images)
        saved = 3 * images * needed.layout.transitions
        yield self.finding(
            f"Stable-Baselines3 {'.'.join(map(str, machine.sb3))} stores this rollout's images as float32: "
            f"{both(needed.resident_bytes)}, of which {both(saved)} are not needed from 2.7.1 on",
            run.place_of("n_steps"),
            rollout_bytes=needed.resident_bytes,
            saved_bytes=saved,
        )


class FlattenDoubles(RunRule):
    """Finds rollouts that are large enough for the copy that flattening makes to matter."""

    id = "M05"
    name = "flatten-doubles-rollout"
    severity = Severity.WARNING
    why = """
    Before the first minibatch Stable-Baselines3 joins the axes of steps and environments. With more than one
    environment that copies the observations, so for a moment they are there twice, at every update.
    """
    fix = """
    Lower `n_steps`, or use one environment (then nothing is copied), or `holdall.sb3.RolloutBuffer`.
    """
    BAD: ClassVar = (screen(_screens(2, "n_steps=20_000")),)
    GOOD: ClassVar = (screen(_screens(2, "n_steps=2048")), screen(_screens(1, "n_steps=20_000")))

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the copy takes more than a quarter of the memory."""
        needed = need(run, machine)
        if needed is None or needed.layout.flatten_bytes <= _FLATTEN_SHARE * machine.limit_bytes:
            return
        yield self.finding(
            f"n_steps x n_envs = {needed.layout.transitions:,}: the rollout takes {both(needed.resident_bytes)}, and "
            f"{both(needed.layout.flatten_bytes)} more while it is flattened, "
            f"{percent(needed.peak_bytes, machine.limit_bytes)} of {machine.limit_name} together",
            run.place_of("n_steps"),
            rollout_bytes=needed.resident_bytes,
            flatten_bytes=needed.layout.flatten_bytes,
            limit_bytes=machine.limit_bytes,
        )


class MoreEnvironmentsSameSteps(RunRule):
    """Looks for a search over the number of environments that leaves `n_steps` as it is."""

    id = "M14"
    name = "environments-raised-steps-fixed"
    severity = Severity.WARNING
    sees_searches = True
    why = "The rollout grows with `n_steps` times `n_envs`, and so does the copy that flattening makes."
    fix = "Hold the product constant: `n_steps=TRANSITIONS // n_envs`."
    BAD: ClassVar = (
        screen(
            """for count in (2, 4, 6):
    env = VecFrameStack(DummyVecEnv([Screen for _ in range(count)]), n_stack=4)
    PPO("CnnPolicy", env, n_steps=8192)
"""
        ),
    )
    GOOD: ClassVar = (
        screen(
            """for count in (2, 4, 6):
    env = VecFrameStack(DummyVecEnv([Screen for _ in range(count)]), n_stack=4)
    PPO("CnnPolicy", env, n_steps=8192 // count)
"""
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the largest number of environments takes over a quarter of the memory."""
        searched = run.environments.count
        if not isinstance(searched, OneOf) or not run.algorithm.on_policy or not candidates(searched):
            return
        needs = [need(run.with_environments(count=count), machine) for count in sorted(candidates(searched))]
        smallest, largest = needs[0], needs[-1]
        if smallest is None or largest is None or largest.peak_bytes <= _FLATTEN_SHARE * machine.limit_bytes:
            return
        yield self.finding(
            f"n_steps stays while n_envs goes from {smallest.layout.n_envs} to {largest.layout.n_envs}: the peak grows "
            f"from {both(smallest.peak_bytes)} to {both(largest.peak_bytes)}; {machine.limit_name} is "
            f"{both(machine.limit_bytes)}",
            run.place_of("n_steps"),
            smallest_bytes=smallest.peak_bytes,
            largest_bytes=largest.peak_bytes,
            limit_bytes=machine.limit_bytes,
        )


def _batch_bytes(run: Run) -> tuple[int, int] | None:
    """Return the bytes of a batch's observations as stored, and as the network gets them."""
    observation, batch = run.environments.observation, run.count("batch_size")
    if observation is None or batch is None:
        return None
    if run.algorithm.on_policy and (steps := run.count("n_steps")) and (count := run.environments.number):
        batch = min(batch, steps * count)
    times = batch * (1 if run.algorithm.on_policy else 2)
    return observation.nbytes * times, observation.elements * 4 * times


class BatchBeyondVram(RunRule):
    """Compares one batch, as the network gets it, with the GPU's memory."""

    id = "M15"
    name = "batch-beyond-vram"
    severity = Severity.WARNING
    why = """
    Images are stored as bytes and reach the network as float32, four times as large; an off-policy batch holds the next
    observations too. Activations, gradients, the optimizer and CUDA's own context come on top.
    """
    fix = "Lower `batch_size`."
    BAD: ClassVar = (screen(_screens(8, "n_steps=2048, batch_size=16_384")),)
    GOOD: ClassVar = (
        screen(_screens(8, "n_steps=2048, batch_size=2048")),
        screen(_screens(8, "n_steps=2048, batch_size=16_384"), vram_bytes=None),
        screen(_screens(8, 'n_steps=2048, batch_size=16_384, device="cpu"')),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the batch alone takes nearly all of the GPU's memory."""
        sizes = _batch_bytes(run)
        if sizes is None or machine.vram_bytes is None or run.value("device") == "cpu":
            return
        if sizes[1] > _VRAM_SHARE * machine.vram_bytes:
            yield self.finding(
                f"a batch's observations take {both(sizes[1])} as float32, the GPU has {both(machine.vram_bytes)}",
                run.place_of("batch_size"),
                batch_bytes=sizes[1],
                vram_bytes=machine.vram_bytes,
            )


class BatchBecomesFloat(RunRule):
    """Says how large a batch of images is once the network gets it."""

    id = "M17"
    name = "image-batch-becomes-float"
    severity = Severity.INFO
    why = """
    A batch worked out from the bytes that are stored is four times too small: the network gets float32. What the
    layers keep for the backward pass comes on top.
    """
    fix = "Reckon with the larger figure, or lower `batch_size`."
    BAD: ClassVar = (screen(_screens(2, "n_steps=8192, batch_size=2048")),)
    GOOD: ClassVar = (screen(_screens(2, "n_steps=8192, batch_size=256")),)

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the larger figure reaches a GiB."""
        sizes, observation = _batch_bytes(run), run.environments.observation
        if sizes is None or observation is None or not observation.images or sizes[1] < _LARGE_BATCH:
            return
        yield self.finding(
            f"a batch's observations are stored in {both(sizes[0])} and reach the network as float32, {both(sizes[1])}",
            run.place_of("batch_size"),
            stored_bytes=sizes[0],
            batch_bytes=sizes[1],
        )
