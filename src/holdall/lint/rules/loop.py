"""Rules about the steps of a run: when learning starts, how long it goes on, what repeats it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.finding import Finding, Severity
from holdall.lint.machine import Machine
from holdall.lint.rule import Case, RunRule, ScriptRule, Subject
from holdall.lint.rules.updates import samples_per_rollout, train_freq, zoo
from holdall.lint.run import Run
from holdall.lint.values import whole

_MANY_EPISODES = 10


class LearningNeverStarts(RunRule):
    """Compares `learning_starts` with the steps of the run."""

    id = "L03"
    name = "learning-never-starts"
    severity = Severity.ERROR
    why = "Until then actions are random and nothing is updated: the run ends with the weights that it began with."
    fix = "A smaller `learning_starts`, or more steps."
    BAD: ClassVar = (
        Case('from stable_baselines3 import SAC\nSAC("MlpPolicy", "Pendulum-v1", learning_starts=10_000).learn(5_000)'),
        zoo("dqn", n_timesteps=50_000, learning_starts=100_000),
    )
    GOOD: ClassVar = (
        Case('from stable_baselines3 import SAC\nSAC("MlpPolicy", "Pendulum-v1", learning_starts=1_000).learn(5_000)'),
        zoo("dqn", n_timesteps=200_000, learning_starts=100_000),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if no update is made."""
        starts, steps = run.whole("learning_starts"), run.total_timesteps
        count, freq = run.environments.number, train_freq(run)
        if starts is None or steps is None or not count or freq is None or freq[1] != "step":
            return
        if any(learn.reset_num_timesteps is not True for learn in run.learns):
            return
        per_round = max(freq[0] * count, 1)
        made = -(-steps // per_round) * per_round
        if made <= starts:
            yield self.finding(
                f"learning starts after {starts:,} steps, the run ends after {made:,}: nothing is ever learnt",
                run.place_of("learning_starts"),
                learning_starts=starts,
                total_timesteps=steps,
            )


class ManyEpisodesPerRollout(RunRule):
    """Compares `n_steps` with the time limit of the environment."""

    id = "L07"
    name = "rollout-spans-many-episodes"
    severity = Severity.INFO
    why = "The policy stays the same for that many episodes in every environment, and all of them are kept in memory."
    fix = "A smaller `n_steps` updates more often and takes less memory."
    BAD: ClassVar = (
        Case(
            """
            import gymnasium as gym
            from stable_baselines3 import PPO
            PPO("MlpPolicy", gym.make("Fight-v0", max_episode_steps=500), n_steps=8192)
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            import gymnasium as gym
            from stable_baselines3 import PPO
            PPO("MlpPolicy", gym.make("Fight-v0", max_episode_steps=500), n_steps=2048)
            """
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if a rollout holds ten episodes or more of each environment."""
        steps, limit = run.count("n_steps"), whole(run.environments.episode_steps)
        if run.algorithm.on_policy and steps and limit and steps >= _MANY_EPISODES * limit:
            yield self.finding(
                f"n_steps={steps:,} spans at least {steps / limit:.1f} episodes of at most {limit:,} steps",
                run.place_of("n_steps"),
                n_steps=steps,
                episode_steps=limit,
            )


class Overshoot(RunRule):
    """Says how many steps an on-policy run makes if the total is no multiple of its rollout."""

    id = "L10"
    name = "total-is-no-multiple"
    severity = Severity.INFO
    why = "A rollout is always completed, so the run is longer than `total_timesteps` says, and so are its schedules."
    fix = "Nothing, or the multiple that the message names."
    BAD: ClassVar = (zoo("ppo", n_envs=2, n_steps=8192, batch_size=2048, n_timesteps=10_000_000),)
    GOOD: ClassVar = (zoo("ppo", n_envs=2, n_steps=8192, batch_size=2048, n_timesteps=16_384_000),)

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield if the last rollout goes beyond the total."""
        collected, steps = samples_per_rollout(run), run.total_timesteps
        if collected is None or steps is None or steps % collected == 0:
            return
        rounds = -(-steps // collected)
        yield self.finding(
            f"{steps:,} steps in rollouts of {collected:,} are {rounds:,} rollouts, {rounds * collected:,} steps",
            run.learns[0].total_timesteps.place,
            rollouts=rounds,
            steps=rounds * collected,
        )


_LOOP = """
from stable_baselines3 import PPO

model = PPO("MlpPolicy", "CartPole-v1")
for iteration in range(610):
    model.learn(total_timesteps=16_384{more})
"""


class LearnStartsOver(RunRule):
    """Finds `learn` in a loop without `reset_num_timesteps=False`."""

    id = "L11"
    name = "learn-starts-over"
    severity = Severity.WARNING
    why = """
    Each call counts steps from zero: schedules of learning rate, clipping and exploration start again, logs begin a new
    run, and checkpoints overwrite those of the call before.
    """
    fix = "`model.learn(..., reset_num_timesteps=False)`, or one call with the whole total and a callback."
    BAD: ClassVar = (Case(_LOOP.replace("{more}", "")),)
    GOOD: ClassVar = (
        Case(_LOOP.replace("{more}", ", reset_num_timesteps=False")),
        Case(
            """
            from stable_baselines3 import PPO
            for seed in range(5):
                model = PPO("MlpPolicy", "CartPole-v1", seed=seed)
                model.learn(total_timesteps=16_384)
            """
        ),
    )

    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield for calls that are repeated on one model."""
        for learn in run.learns:
            if learn.repeats_model and learn.reset_num_timesteps is True:
                yield self.finding("learn is called in a loop, and counts its steps from zero each time", learn.place)


class ResetByHand(ScriptRule):
    """Finds `env.reset()` between calls of `learn` that go on where the last one stopped."""

    id = "L12"
    name = "reset-by-hand"
    severity = Severity.WARNING
    why = """
    The model goes on with the last observation that it saw. After a reset by hand that belongs to an episode that is no
    more: one transition is wrong at every call.
    """
    fix = "Leave the reset out: `learn` resets the environment where it has to."
    BAD: ClassVar = (
        Case(
            """
            from stable_baselines3 import PPO
            from stable_baselines3.common.env_util import make_vec_env
            env = make_vec_env("CartPole-v1", n_envs=2)
            model = PPO("MlpPolicy", env)
            for iteration in range(610):
                env.reset()
                model.learn(total_timesteps=16_384, reset_num_timesteps=False)
            """
        ),
    )
    GOOD: ClassVar = (
        Case(
            """
            from stable_baselines3 import PPO
            from stable_baselines3.common.env_util import make_vec_env
            env = make_vec_env("CartPole-v1", n_envs=2)
            model = PPO("MlpPolicy", env)
            for iteration in range(610):
                model.learn(total_timesteps=16_384, reset_num_timesteps=False)
            """
        ),
    )

    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield for every reset in the loop of a `learn` that continues."""
        script, training = subject.script, subject.training
        origins = [run.environments.origin for run in training.runs if run.environments.origin is not None]
        loops = {
            id(script.loop(call))
            for call, made in training.learn_calls
            if made is not None and script.loop(call) is not None and _continues(subject, call)
        }
        for call in script.calls:
            match call.func:
                case ast.Attribute(attr="reset", value=ast.Name() as env) if id(script.loop(call)) in loops:
                    if script.definition(env) in origins:
                        yield self.finding(
                            "the environment is reset by hand between two calls of learn", script.place(call)
                        )


def _continues(subject: Subject, call: ast.Call) -> bool:
    value = [k.value for k in call.keywords if k.arg == "reset_num_timesteps"]
    return bool(value) and subject.training.evaluator.value(value[0]) is False
