"""Rules about saving and loading replay buffers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.algorithms import named
from holdall.lint.amounts import both
from holdall.lint.finding import Edit, Finding, Place, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, RunRule, ScriptRule, Subject
from holdall.lint.rules.memory import camera
from holdall.lint.run import Run
from holdall.lint.sizes import need
from holdall.lint.values import whole


def _saves_buffer(run: Run) -> Iterator[tuple[Place, int | None]]:
    """Yield where checkpoints include the buffer, and every how many calls."""
    for callback in run.callbacks:
        if callback.kind == "CheckpointCallback" and callback.value("save_replay_buffer") is True:
            yield callback.settings["save_replay_buffer"].place, whole(callback.value("save_freq"))


class CheckpointsBeyondDisk(RunRule):
    """Adds up the replay buffers that a CheckpointCallback writes."""

    id = "S01"
    name = "checkpoints-beyond-disk"
    severity = Severity.WARNING
    why = """
    Every checkpoint writes the whole buffer, full or not, into a file of its own, and none is ever deleted.
    """
    fix = """
    Save less often, delete old files, or `holdall.sb3.CheckpointCallback`, which writes only what is new since the last
    checkpoint.
    """
    BAD: ClassVar = (
        camera(
            "from stable_baselines3.common.callbacks import CheckpointCallback\n"
            'SAC("MultiInputPolicy", Dog(), buffer_size=200_000).learn(\n'
            '    1_000_000, callback=CheckpointCallback(10_000, "models", save_replay_buffer=True)\n)'
        ),
    )
    GOOD: ClassVar = (
        camera(
            "from stable_baselines3.common.callbacks import CheckpointCallback\n"
            'SAC("MultiInputPolicy", Dog(), buffer_size=200_000).learn(\n'
            '    1_000_000, callback=CheckpointCallback(500_000, "models", save_replay_buffer=True)\n)'
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if all files together are more than the disk has free."""
        needed, steps, count = need(run, machine), run.total_timesteps, run.environments.number
        if needed is None or steps is None or not count or machine.disk_bytes is None or run.algorithm.on_policy:
            return
        for place, every in _saves_buffer(run):
            if not every:
                continue
            saves = steps // count // every
            written = saves * needed.layout.nbytes
            if written > machine.disk_bytes:
                yield self.finding(
                    f"{saves} checkpoints of {both(needed.layout.nbytes)} are {both(written)}, the disk has "
                    f"{both(machine.disk_bytes)} free",
                    place,
                    checkpoints=saves,
                    checkpoint_bytes=needed.layout.nbytes,
                    disk_bytes=machine.disk_bytes,
                )


_ON_POLICY = """
from stable_baselines3 import {algo}
from stable_baselines3.common.callbacks import CheckpointCallback
callback = CheckpointCallback(10_000, "models", save_replay_buffer=True)
{algo}("MlpPolicy", "Pendulum-v1").learn(100_000, callback=callback)
"""


class NothingToSave(RunRule):
    """Finds `save_replay_buffer=True` where there is no replay buffer."""

    id = "S02"
    name = "no-replay-buffer-to-save"
    severity = Severity.INFO
    why = """
    On-policy algorithms have a rollout that is used once and dropped. The option does nothing: it neither takes memory
    nor saves anything.
    """
    fix = "Leave it out."
    BAD: ClassVar = (Case(_ON_POLICY.replace("{algo}", "PPO")),)
    GOOD: ClassVar = (Case(_ON_POLICY.replace("{algo}", "SAC")),)

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if an on-policy run saves a replay buffer."""
        for place, _ in _saves_buffer(run) if run.algorithm.on_policy else ():
            yield self.finding(
                f"{run.algorithm.name} has no replay buffer: save_replay_buffer=True does nothing",
                place,
                Edit(place, "True", "False"),
            )


class LoadsBesideOld(ScriptRule):
    """Finds a replay buffer that is loaded while a filled one is still there."""

    id = "S04"
    name = "loads-beside-old-buffer"
    severity = Severity.WARNING
    why = "The new buffer is read completely before it takes the old one's place: for that time both are in memory."
    fix = "`model.replay_buffer = None` before `model.load_replay_buffer(...)`."
    BAD: ClassVar = (
        camera(
            'model = SAC("MultiInputPolicy", Dog(), buffer_size=500_000)\n'
            "model.learn(1_000_000)\n"
            'model.load_replay_buffer("buffer.pkl")'
        ),
    )
    GOOD: ClassVar = (
        camera(
            'model = SAC("MultiInputPolicy", Dog(), buffer_size=500_000)\n'
            'model.load_replay_buffer("buffer.pkl")\n'
            "model.learn(1_000_000)"
        ),
        camera(
            'model = SAC("MultiInputPolicy", Dog(), buffer_size=500_000)\n'
            "model.learn(1_000_000)\n"
            "model.replay_buffer = None\n"
            'model.load_replay_buffer("buffer.pkl")'
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield if both together do not fit."""
        script = subject.script
        if any(
            isinstance(n, ast.Attribute) and n.attr == "replay_buffer" and isinstance(n.ctx, ast.Store)
            for n in script.nodes
        ):
            return
        runs = dict(zip((call for call, _ in subject.training.constructions), subject.training.runs, strict=True))
        for call in script.calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "load_replay_buffer":
                continue
            made = subject.training.constructed(call.func.value)
            learnt = [
                learn for learn, model in subject.training.learn_calls if model is made and learn.lineno < call.lineno
            ]
            needed = need(runs[made], machine) if made in runs and learnt else None
            if needed and needed.resident_bytes + needed.layout.nbytes > machine.limit_bytes:
                yield self.finding(
                    f"the old buffer of {both(needed.resident_bytes)} and the loaded one of "
                    f"{both(needed.layout.nbytes)} are in memory together; {machine.limit_name} is "
                    f"{both(machine.limit_bytes)}",
                    script.place(call),
                    needed_bytes=needed.resident_bytes + needed.layout.nbytes,
                    limit_bytes=machine.limit_bytes,
                )


class ResumesEmpty(ScriptRule):
    """Finds an off-policy model that is loaded and trained on without its replay buffer."""

    id = "S06"
    name = "resumes-with-empty-buffer"
    severity = Severity.WARNING
    why = """
    `model.save` leaves the replay buffer out. A resumed run learns from the first few new transitions alone, at full
    rate, and can unlearn what it knew before the buffer has filled again.
    """
    fix = """
    `model.save_replay_buffer` and `model.load_replay_buffer`, or `holdall.sb3.CheckpointCallback`, which saves both
    together and in little memory. If that is too large, train again only after `learning_starts` new steps.
    """
    BAD: ClassVar = (
        Case(
            """
            from stable_baselines3 import SAC
            model = SAC.load("agent", env="Pendulum-v1")
            model.learn(100_000, reset_num_timesteps=False)
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            from stable_baselines3 import SAC
            model = SAC.load("agent", env="Pendulum-v1")
            model.load_replay_buffer("buffer")
            model.learn(100_000, reset_num_timesteps=False)
            """
        ),
        Case(
            """
            from stable_baselines3 import PPO
            model = PPO.load("agent", env="CartPole-v1")
            model.learn(100_000, reset_num_timesteps=False)
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield if nothing gives the loaded model a buffer."""
        script = subject.script
        if any(
            isinstance(n, ast.Attribute) and n.attr in {"load_replay_buffer", "replay_buffer"} for n in script.nodes
        ):
            return
        for call in script.calls:
            match call.func:
                case ast.Attribute(attr="learn", value=ast.Name() as model):
                    found = script.definition(model)
                    loaded = found.value if found else None
                case _:
                    continue
            if isinstance(loaded, ast.Call) and isinstance(loaded.func, ast.Attribute) and loaded.func.attr == "load":
                algorithm = named(script.dotted(loaded.func.value))
                if algorithm and not algorithm.on_policy:
                    yield self.finding(
                        f"{algorithm.name} is loaded and goes on learning with an empty replay buffer",
                        script.place(call),
                    )


class StatisticsNotSaved(ScriptRule):
    """Finds a model that is saved without the statistics of its VecNormalize."""

    id = "S08"
    name = "normalisation-not-saved"
    severity = Severity.WARNING
    why = "A loaded model gets observations on another scale than it was trained on, and acts as if untrained."
    fix = """
    `env.save("vecnormalize.pkl")`, `CheckpointCallback(..., save_vecnormalize=True)`, or
    `holdall.sb3.CheckpointCallback`, which saves them with the model.
    """
    BAD: ClassVar = (
        Case(
            """
            from stable_baselines3 import PPO
            from stable_baselines3.common.env_util import make_vec_env
            from stable_baselines3.common.vec_env import VecNormalize
            env = VecNormalize(make_vec_env("Pendulum-v1"))
            model = PPO("MlpPolicy", env)
            model.learn(100_000)
            model.save("agent")
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            from stable_baselines3 import PPO
            from stable_baselines3.common.env_util import make_vec_env
            from stable_baselines3.common.vec_env import VecNormalize
            env = VecNormalize(make_vec_env("Pendulum-v1"))
            model = PPO("MlpPolicy", env)
            model.learn(100_000)
            model.save("agent")
            env.save("vecnormalize.pkl")
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield if a model is saved and nothing else is."""
        script = subject.script
        normalised = [call for call in script.calls if script.dotted(call.func).endswith(".VecNormalize")]
        saves = [call for call in script.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "save"]
        models = [c for c in saves if isinstance(c.func, ast.Attribute) and subject.training.constructed(c.func.value)]
        told = any(isinstance(node, ast.keyword) and node.arg == "save_vecnormalize" for node in script.nodes)
        told = told or any(script.dotted(call.func) == "holdall.sb3.CheckpointCallback" for call in script.calls)
        if normalised and models and len(models) == len(saves) and not told:
            yield self.finding(
                "the model is saved, and the statistics of VecNormalize are not", script.place(models[0])
            )
