"""Rules about the training loop: batches, updates, when learning starts, and repeated `learn`."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from holdall.tools.lint.arguments import RESET_NUM_TIMESTEPS
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import locate_model
from holdall.tools.lint.source import Source, has_unpacked_arguments
from holdall.tools.lint.source_sb3 import find_model
from holdall.tools.probe.snapshot import Snapshot
from holdall.units import count_noun

_MIN_EPISODES = 10
"""A rollout of at least this many episodes in one environment is reported."""
_MAX_TRIES = 100_000
"""Most numbers that the search for a divisor tries below a batch size, and above it."""


class LearningNeverStarts(Rule):
    """Compares `learning_starts` with the steps of the run.

    Why: Before `learning_starts`, actions are random and nothing is updated. The run ends with its first weights.
    Fix: A smaller `learning_starts`, or more steps.

    Bad:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=5_000, learning_starts=10_000).learn(5_000)

    Good:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=5_000, learning_starts=1_000).learn(5_000)
    """

    code = "L03"
    severity = Severity.ERROR

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare `learning_starts` with the steps, rounded up to whole rounds of collection."""
        for model in run.learning_models:
            starts = model.count("learning_starts")
            steps = model.run_steps
            frequency = model.train_freq
            if starts is None or steps is None or frequency is None or frequency[1] != "step":
                continue
            per_round = max(frequency[0] * model.n_envs, 1)
            actual_steps = -(-steps // per_round) * per_round
            if actual_steps <= starts:
                text = (
                    f"learning starts after {starts:,} steps, but the run ends after {actual_steps:,}, so nothing is "
                    "learnt"
                )
                yield Match(text, locate_model(model), {"learning_starts": starts, "total_timesteps": steps})


class BufferSmallerThanBatch(Rule):
    """Compares the replay buffer with one batch.

    Why: Batches are drawn with replacement, so nothing fails, but every batch contains transitions several times.
    Fix: A larger `buffer_size`, or a smaller `batch_size`.

    Bad:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=128, batch_size=256).learn(100_000)

    Good:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", buffer_size=10_000, batch_size=256).learn(100_000)
    """

    code = "L04"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare `buffer_size` with `batch_size`."""
        for model in run.learning_models:
            size = model.count("buffer_size")
            batch = model.count("batch_size")
            if model.is_on_policy or size is None or batch is None or size >= batch:
                continue
            text = f"batch_size={batch:,} is drawn from a buffer of {size:,} transitions"
            yield Match(text, locate_model(model), {"buffer_size": size, "batch_size": batch})


class BatchDoesNotDivideRollout(Rule):
    """Compares the batch with the samples that a rollout collects.

    Why: The last minibatch of every epoch is smaller, and its few samples have as much weight as a whole batch. A batch
    larger than the rollout is cut to the rollout, so each epoch makes only one update.
    Fix: One of the divisors that the message names.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), n_steps=100, batch_size=64).learn(100_000)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), n_steps=128, batch_size=64).learn(100_000)
    """

    code = "L05"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Divide the samples of a rollout by the batch."""
        for model in run.learning_models:
            collected = model.rollout_transitions
            batch = model.count("batch_size")
            if collected is None or batch is None or collected % batch == 0:
                continue
            remainder = collected % batch
            if batch > collected:
                text = f"batch_size={batch:,} is larger than the {collected:,} samples (n_steps x n_envs) of a rollout"
            else:
                text = (
                    f"{collected:,} samples (n_steps x n_envs) in batches of {batch:,} leave a batch of {remainder:,}"
                )
            divisors = ", ".join(f"{divisor:,}" for divisor in _find_divisors(collected, batch))
            text = f"{text}; divisors near it: {divisors or 'none found'}"
            yield Match(
                text, locate_model(model), {"collected": collected, "batch_size": batch, "remainder": remainder}
            )


def _find_divisors(number: int, near: int) -> list[int]:
    """Return up to two divisors of `number` on each side of `near`."""
    candidates = range(min(near, number), 1, -1)[:_MAX_TRIES]
    quotients = range((number - 1) // near, 0, -1)[:_MAX_TRIES]
    below = itertools.islice((divisor for divisor in candidates if number % divisor == 0), 2)
    above = itertools.islice((number // quotient for quotient in quotients if number % quotient == 0), 2)
    return [*sorted(below), *above]


class UpdatesFallBehind(Rule):
    """Finds off-policy runs whose updates per step become fewer with the number of environments.

    Why: `gradient_steps=1` is one update per call of `env.step`, for any number of environments. With eight
    environments, the same number of steps gives an eighth of the updates.
    Fix: `gradient_steps=-1` makes as many updates as transitions were collected.

    Bad:
        from stable_baselines3 import SAC
        from stable_baselines3.common.env_util import make_vec_env
        SAC("MlpPolicy", make_vec_env("Pendulum-v1", n_envs=8), buffer_size=8_000, gradient_steps=1).learn(100_000)

    Good:
        from stable_baselines3 import SAC
        from stable_baselines3.common.env_util import make_vec_env
        SAC("MlpPolicy", make_vec_env("Pendulum-v1", n_envs=8), buffer_size=8_000, gradient_steps=-1).learn(100_000)
    """

    code = "L06"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at `gradient_steps` and `train_freq` of models with several environments."""
        for model in run.learning_models:
            frequency = model.train_freq
            is_one_update = model.count("gradient_steps") == 1 and model.n_envs > 1
            if model.is_on_policy or not is_one_update or frequency is None or frequency[1] != "step":
                continue
            steps = frequency[0] * model.n_envs
            text = (
                f"one update for every {steps:,} steps ({model.n_envs} environments, train_freq {frequency[0]}); "
                f"with one environment it would be one for every {frequency[0]}"
            )
            yield Match(text, locate_model(model), {"steps_per_update": steps, "n_envs": model.n_envs})


class RolloutSpansManyEpisodes(Rule):
    """Compares `n_steps` with the time limit of the environment.

    Why: The policy stays the same during all these episodes in every environment, and all of them are kept in memory.
    Fix: A smaller `n_steps` updates more often and takes less memory.

    Bad:
        import gymnasium as gym
        from stable_baselines3 import PPO
        PPO("MlpPolicy", gym.make("CartPole-v1", max_episode_steps=100), n_steps=2048).learn(100_000)

    Good:
        import gymnasium as gym
        from stable_baselines3 import PPO
        PPO("MlpPolicy", gym.make("CartPole-v1", max_episode_steps=500), n_steps=2048).learn(100_000)
    """

    code = "L07"
    severity = Severity.INFO

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Divide `n_steps` by the time limit."""
        for model in run.learning_models:
            steps = model.count("n_steps")
            limit = None if model.environment is None else model.environment.settings.get("_max_episode_steps")
            if not model.is_on_policy or steps is None or limit is None or steps < _MIN_EPISODES * limit:
                continue
            text = f"n_steps={steps:,} spans at least {steps / limit:.1f} episodes of at most {limit:,} steps"
            yield Match(text, locate_model(model), {"n_steps": steps, "episode_steps": limit})


class TotalIsNoMultiple(Rule):
    """Reports the steps that an on-policy run really makes if the total is not a multiple of its rollout.

    Why: A rollout is always completed, so the run and its schedules are longer than `total_timesteps` says.
    Fix: Nothing, or the multiple that the message names.

    Bad:
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", n_steps=2048).learn(10_000)

    Good:
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", n_steps=2048).learn(10_240)
    """

    code = "L10"
    severity = Severity.INFO

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Divide the total by the steps of a rollout."""
        for model in run.learning_models:
            collected = model.rollout_transitions
            steps = model.run_steps
            if collected is None or steps is None or steps % collected == 0:
                continue
            rollouts = -(-steps // collected)
            actual_steps = rollouts * collected
            needed = f"{count_noun(rollouts, 'rollout')} of {collected:,} steps"
            text = f"{steps:,} steps need {needed}, which make {actual_steps:,} steps"
            yield Match(text, locate_model(model), {"rollouts": rollouts, "steps": actual_steps})


class LearnStartsOver(Rule):
    """Finds `learn` in a loop without `reset_num_timesteps=False`.

    Why: Each call counts steps from zero. Schedules of learning rate, clipping and exploration start again, logs begin
    a new run, and checkpoints overwrite those of the previous call.
    Fix: `model.learn(..., reset_num_timesteps=False)`, or one call with the whole total and a callback.

    Bad:
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", "CartPole-v1")
        for iteration in range(610):
            model.learn(total_timesteps=16_384)

    Good:
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", "CartPole-v1")
        for iteration in range(610):
            model.learn(total_timesteps=16_384, reset_num_timesteps=False)
    """

    code = "L11"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for loops around `learn` that do not contain the construction of the model."""
        for call, owner in source.find_method_calls("learn"):
            loop = source.find_loop(call)
            model = find_model(source, owner)
            if loop is None or model is None or has_unpacked_arguments(call):
                continue
            is_made_in_loop = any(parent is loop for parent in source.ancestors(model.call))
            if is_made_in_loop or RESET_NUM_TIMESTEPS.find(call) is not None:
                continue
            yield Match("learn is called in a loop, and counts its steps from zero each time", source.get_place(call))


class ResetByHand(Rule):
    """Finds `env.reset()` between calls of `learn` that continue where the previous call stopped.

    Why: The model continues with the last observation that it saw. After a reset by hand, that observation belongs to
    an episode that has ended, so one transition is wrong at every call.
    Fix: Delete the reset. `learn` resets the environment where it must.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        env = make_vec_env("CartPole-v1", n_envs=2)
        model = PPO("MlpPolicy", env)
        for iteration in range(610):
            env.reset()
            model.learn(total_timesteps=16_384, reset_num_timesteps=False)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        env = make_vec_env("CartPole-v1", n_envs=2)
        model = PPO("MlpPolicy", env)
        for iteration in range(610):
            model.learn(total_timesteps=16_384, reset_num_timesteps=False)
    """

    code = "L12"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for a reset of the model's environment in the loop that calls `learn`, or between two calls."""
        learn_calls = list(_find_learn_calls(source))
        for reset, owner in source.find_method_calls("reset"):
            region = _find_region(source, reset)
            calls = [learn for learn in learn_calls if learn.region is region]
            if source.find_loop(reset) is None:
                # Outside a loop, the first call begins the run, and a reset before that call does no harm.
                if calls and reset.lineno < calls[0].line:
                    continue
                calls = calls[1:]
            environment = source.find_last_assignment(owner)
            is_trained = any(learn.is_continuation and learn.environment is environment for learn in calls)
            if environment is not None and is_trained:
                yield Match("the environment is reset by hand between two calls of learn", source.get_place(reset))


class _LearnCall(NamedTuple):
    """A call of `learn` whose model and environment are known."""

    line: int
    region: ast.AST | None
    environment: ast.expr | None
    """Expression that makes the environment of the model."""
    is_continuation: bool
    """Whether the call continues the run of an earlier call."""


def _find_learn_calls(source: Source) -> Iterator[_LearnCall]:
    """Yield the calls of `learn` in the order of the text."""
    for call, owner in source.find_method_calls("learn"):
        model = find_model(source, owner)
        if model is not None and model.env is not None:
            environment = source.find_last_assignment(model.env)
            is_continuation = source.evaluate(RESET_NUM_TIMESTEPS.find(call)) is False
            yield _LearnCall(call.lineno, _find_region(source, call), environment, is_continuation)


def _find_region(source: Source, call: ast.Call) -> ast.AST | None:
    """Return the innermost loop around a call, or else the block of the call."""
    return source.find_loop(call) or source.find_block(call)


class TargetUpdatedEveryStep(Rule):
    """Compares DQN's `target_update_interval` with the number of environments.

    Why: The interval is counted in steps and divided by the number of environments. Below one call, the target network
    follows every step.
    Fix: A larger `target_update_interval`.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        env = make_vec_env("CartPole-v1", n_envs=4)
        DQN("MlpPolicy", env, buffer_size=1_000, target_update_interval=2).learn(100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.env_util import make_vec_env
        env = make_vec_env("CartPole-v1", n_envs=4)
        DQN("MlpPolicy", env, buffer_size=1_000, target_update_interval=1_000).learn(100_000)
    """

    code = "L15"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the interval with the steps of one call."""
        for model in run.learning_models:
            interval = model.count("target_update_interval")
            if model.algorithm not in {"DQN", "QRDQN"} or interval is None or interval >= model.n_envs:
                continue
            text = (
                f"target_update_interval={interval:,} with {model.n_envs} environments updates the target at every call"
            )
            yield Match(text, locate_model(model), {"interval": interval, "n_envs": model.n_envs})


class SmallNetworkOnGpu(Rule):
    """Finds on-policy runs with `MlpPolicy` on a GPU.

    Why: The networks are small, and actions are computed step by step. Moving every step to the GPU costs more than it
    saves.
    Fix: `device="cpu"`.

    Bad (device=cuda):
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", device="cuda").learn(100_000)

    Good:
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", device="cpu").learn(100_000)
    """

    code = "L16"
    severity = Severity.INFO

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at the device of PPO and A2C with the policy for vectors."""
        for model in run.learning_models:
            is_small = model.policy_class.endswith((".ActorCriticPolicy", ".MlpPolicy"))
            if is_small and model.algorithm in {"A2C", "PPO"} and model.device.startswith("cuda"):
                yield Match(f"{model.algorithm} with MlpPolicy is on {model.device}", locate_model(model))
