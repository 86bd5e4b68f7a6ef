"""Rules about how observations are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from holdall.lint.amounts import both, percent
from holdall.lint.finding import Edit, Finding, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, RunRule
from holdall.lint.rules.memory import camera
from holdall.lint.run import Run
from holdall.lint.sizes import need
from holdall.lint.values import Reference
from holdall.schema import Leaf

_MATTERS = 0.1  # of the limit

_FLOATS = """
import numpy as np
import gymnasium as gym
from gymnasium import spaces
from stable_baselines3 import DQN

class Screen(gym.Env):
    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.{dtype})
        self.action_space = spaces.Discrete(4)

DQN("CnnPolicy", Screen(), buffer_size=10_000)
"""


class WideObservations(RunRule):
    """Finds images of 0 to 255 that are declared as floats, and float64 observations."""

    id = "M06"
    name = "observations-wider-than-needed"
    severity = Severity.WARNING
    why = """
    Buffers store the space's dtype. An image of whole numbers from 0 to 255 takes four (float32) or eight (float64)
    times the bytes that it has; the network computes in float32 in any case.
    """
    fix = "Declare images as `np.uint8` and vectors as `np.float32`, and return them so."
    BAD: ClassVar = (
        Case(_FLOATS.replace("{dtype}", "float32")),
        Case(_FLOATS.replace("{dtype}", "float64")),
    )
    GOOD: ClassVar = (Case(_FLOATS.replace("{dtype}", "uint8")),)

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
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
    """Finds replay buffers in which storing every observation twice takes a tenth of the memory or more."""

    id = "M07"
    name = "observations-stored-twice"
    severity = Severity.WARNING
    why = """
    Stable-Baselines3 keeps `obs` and `next_obs` in two arrays, though one step's next observation is the following
    step's observation. In a stack of 4 frames, each frame is there eight times.
    """
    fix = "`replay_buffer_class=holdall.sb3.ReplayBuffer` stores each frame once and gives the same samples."
    BAD: ClassVar = (camera('SAC("MultiInputPolicy", Dog(), buffer_size=400_000)'),)
    GOOD: ClassVar = (
        camera('SAC("MultiInputPolicy", Dog(), buffer_size=10_000)'),
        camera(
            "from holdall.sb3 import ReplayBuffer\n"
            'SAC("MultiInputPolicy", Dog(), buffer_size=400_000, replay_buffer_class=ReplayBuffer)'
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if much memory holds what is there already."""
        needed = need(run, machine)
        if needed is None or run.algorithm.on_policy or run.environments.observation is None:
            return
        if run.value("optimize_memory_usage") is not False:
            return
        held = min(needed.layout.transitions, run.total_timesteps or needed.layout.transitions)
        stack = run.environments.stack
        repeated = int(run.environments.observation.nbytes * held * (2 - 1 / stack))
        if repeated < _MATTERS * machine.limit_bytes:
            return
        what = "each observation is stored twice" if stack == 1 else f"each frame is stored {2 * stack} times"
        yield self.finding(
            f"{what}: {both(repeated)} of {both(needed.resident_bytes)} "
            f"({percent(repeated, needed.resident_bytes)}) hold what is there already",
            run.place_of("buffer_size"),
            repeated_bytes=repeated,
            needed_bytes=needed.resident_bytes,
            times=2 * stack,
        )


def _is_dict(run: Run) -> bool:
    observation = run.environments.observation
    return run.value("policy") == "MultiInputPolicy" or bool(observation and observation.is_dict)


def _is_sb3_class(run: Run) -> bool:
    given = run.value("replay_buffer_class")
    return given is None or (isinstance(given, Reference) and given.dotted.startswith("stable_baselines3"))


def _switch_off(run: Run) -> Edit:
    """Return the edit that makes `optimize_memory_usage` False; the run would not have started otherwise."""
    return Edit(run.place_of("optimize_memory_usage"), "True", "False")


class OptimiseWithDict(RunRule):
    """Finds `optimize_memory_usage=True` with Dict observations."""

    id = "M08"
    name = "optimise-with-dict"
    severity = Severity.ERROR
    why = "Stable-Baselines3's `DictReplayBuffer` refuses it with an AssertionError."
    fix = "Leave it out; `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each observation once, Dict or not."
    BAD: ClassVar = (
        camera('SAC("MultiInputPolicy", Dog(), buffer_size=10_000, optimize_memory_usage=True)'),
        Case("Dog-v0:\n  n_timesteps: 1e6\n  policy: MultiInputPolicy\n  optimize_memory_usage: True", file="sac.yml"),
    )
    GOOD: ClassVar = (camera('SAC("MultiInputPolicy", Dog(), buffer_size=10_000)'),)

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the two meet."""
        if run.value("optimize_memory_usage") is True and _is_dict(run) and _is_sb3_class(run):
            yield self.finding(
                "optimize_memory_usage=True is refused for Dict observations: the model is not even constructed",
                run.place_of("optimize_memory_usage"),
                _switch_off(run),
            )


class OptimiseWithTimeouts(RunRule):
    """Finds `optimize_memory_usage=True` while timeouts are handled, which is the default."""

    id = "M16"
    name = "optimise-with-timeouts"
    severity = Severity.ERROR
    why = """
    Stable-Baselines3 refuses it with a ValueError: with one array for both, the true last observation of a truncated
    episode is lost.
    """
    fix = """
    `replay_buffer_class=holdall.sb3.ReplayBuffer` stores each observation once and keeps truncation right. Or give up
    the handling of timeouts: `replay_buffer_kwargs={"handle_timeout_termination": False}`.
    """
    BAD: ClassVar = (
        Case(
            """
            from stable_baselines3 import DQN
            DQN("CnnPolicy", "PongNoFrameskip-v4", buffer_size=100_000, optimize_memory_usage=True)
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            from stable_baselines3 import DQN
            DQN(
                "CnnPolicy",
                "PongNoFrameskip-v4",
                buffer_size=100_000,
                optimize_memory_usage=True,
                replay_buffer_kwargs=dict(handle_timeout_termination=False),
            )
            """
        ),
        Case('from stable_baselines3 import DQN\nDQN("CnnPolicy", "PongNoFrameskip-v4", buffer_size=100_000)'),
        Case(
            """
            from holdall.sb3 import ReplayBuffer
            from stable_baselines3 import DQN
            DQN("CnnPolicy", "P", buffer_size=9, optimize_memory_usage=True, replay_buffer_class=ReplayBuffer)
            """
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
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
