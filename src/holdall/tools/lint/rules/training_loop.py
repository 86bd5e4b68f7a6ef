"""Rules about updates and the training loop: batches, update frequencies, when learning starts, repeated `learn`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, run_rule, script_rule
from holdall.tools.lint.run import ConfiguredRun, Machine, whole
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, argument_of

_MANY_EPISODES = 10  # in one rollout of one environment


def train_freq(run: ConfiguredRun) -> tuple[int, str] | None:
    """Return `train_freq` as a number and its unit, if both are known."""
    value = run.value("train_freq")
    unit: object = "step"
    if isinstance(value, list | tuple) and len(value) == 2:
        value, unit = value
    number = whole(value)
    return (number, unit) if number is not None and unit in {"step", "episode"} and isinstance(unit, str) else None


@run_rule("L04", "buffer-smaller-than-batch", Severity.WARNING)
def buffer_smaller_than_batch(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the replay buffer with one batch.

    Why: Batches are drawn with replacement, so nothing fails; but every batch holds each transition several times.
    Fix: A larger `buffer_size`, or a smaller `batch_size`.

    Bad (sac.yml):
        Env-v0:
          policy: MlpPolicy
          buffer_size: 128
          batch_size: 256

    Good (sac.yml):
        Env-v0:
          policy: MlpPolicy
          buffer_size: 100000
          batch_size: 256
    """
    size, batch = run.count("buffer_size"), run.count("batch_size")
    if size is not None and batch is not None and size < batch and not run.algorithm.on_policy:
        text = f"batch_size={batch:,} is drawn from a buffer of {size:,} transitions"
        yield Match(text, run.place_of("buffer_size", "batch_size"), {"buffer_size": size, "batch_size": batch})


def samples_per_rollout(run: ConfiguredRun) -> int | None:
    """Return the transitions of one rollout of an on-policy run."""
    steps, count = run.count("n_steps"), run.environments.number
    return steps * count if run.algorithm.on_policy and steps and count else None


_MOST_TRIES = 100_000
"""Numbers that are tried on either side: n_steps may say anything."""


def _divisors_near(number: int, near: int) -> list[int]:
    """Return the divisors of a number that lie next to another number, as far as they are found quickly."""
    tried, quotients = range(min(near, number), 1, -1), range((number - 1) // near, 0, -1)
    below = (d for d in tried[:_MOST_TRIES] if number % d == 0)
    above = (number // q for q in quotients[:_MOST_TRIES] if number % q == 0)
    return [*sorted(itertools.islice(below, 2)), *itertools.islice(above, 2)]


@run_rule("L05", "batch-does-not-divide-rollout", Severity.WARNING)
def batch_does_not_divide_rollout(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the batch with the samples that a rollout collects.

    Why: The last minibatch of every epoch is smaller, and its few samples weigh as much as a whole batch. A batch that
    is larger than the rollout is cut to it: one update an epoch.
    Fix: One of the divisors that the message names.

    Bad (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 2
          n_steps: 100
          batch_size: 64

    Good (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 2
          n_steps: 8192
          batch_size: 2048
    """
    collected, batch = samples_per_rollout(run), run.count("batch_size")
    if collected is None or not batch or collected % batch == 0 or {"n_steps", "batch_size"} <= run.picked:
        return
    better = ", ".join(f"{divisor:,}" for divisor in _divisors_near(collected, batch)) or "none found"
    text = (
        f"batch_size={batch:,} is larger than the {collected:,} samples (n_steps x n_envs) of a rollout"
        if batch > collected
        else f"{collected:,} samples (n_steps x n_envs) in batches of {batch:,} leave one of {collected % batch:,}"
    )
    yield Match(
        f"{text}; divisors near it: {better}",
        run.place_of("batch_size", "n_steps"),
        {"collected": collected, "batch_size": batch, "remainder": collected % batch},
    )


@run_rule("L06", "updates-fall-behind", Severity.WARNING)
def updates_fall_behind(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds off-policy runs whose updates a step fall with the number of environments.

    Why: `gradient_steps=1` is one update for each call of `env.step`, whatever the number of environments. With eight
    of them the same number of steps brings an eighth of the updates.
    Fix: `gradient_steps=-1`: as many updates as transitions were collected.

    Bad (sac.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 8
          gradient_steps: 1

    Good (sac.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 8
          gradient_steps: -1
    """
    count, updates, freq = run.environments.number, run.whole("gradient_steps"), train_freq(run)
    if run.algorithm.on_policy or not count or count < 2 or updates != 1 or freq is None or freq[1] != "step":
        return
    steps = freq[0] * count
    text = (
        f"one update for every {steps:,} steps ({count} environments, train_freq {freq[0]}); "
        f"with one environment it would be one for every {freq[0]}"
    )
    yield Match(text, run.place_of("gradient_steps", "train_freq"), {"steps_per_update": steps, "n_envs": count})


@run_rule("L13", "one-sample-to-normalise", Severity.ERROR)
def one_sample_to_normalise(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds on-policy runs whose advantages cannot be normalised.

    Why: The standard deviation of one sample is not a number. Stable-Baselines3 refuses it with an AssertionError.
    Fix: `batch_size` and `n_steps x n_envs` of 2 or more, or `normalize_advantage=False`.

    Bad (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          batch_size: 1
          n_steps: 2048

    Good (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          batch_size: 64
          n_steps: 2048
    """
    if run.algorithm.name not in {"PPO", "MaskablePPO", "RecurrentPPO"} or run.value("normalize_advantage") is not True:
        return
    if run.count("batch_size") == 1 or samples_per_rollout(run) == 1:
        which = "batch_size" if run.count("batch_size") == 1 else "n_steps x n_envs"
        yield Match(f"{which} is 1, and normalize_advantage is on", run.place_of("batch_size", "n_steps"))


@run_rule("L14", "episodic-training-of-many", Severity.ERROR)
def episodic_training_of_many(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `train_freq` in episodes with several environments.

    Why: Episodes of several environments end at different steps. Stable-Baselines3 refuses it with an AssertionError.
    Fix: `train_freq=(n, "step")`, or one environment.

    Bad (td3.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 4
          train_freq: [1, "episode"]

    Good (td3.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 1
          train_freq: [1, "episode"]
    """
    freq, count = train_freq(run), run.environments.number
    if freq is not None and freq[1] == "episode" and count is not None and count > 1:
        text = f"train_freq counts episodes, and there are {count} environments"
        yield Match(text, run.place_of("train_freq"), {"n_envs": count})


@run_rule("L15", "target-updated-every-step", Severity.WARNING)
def target_updated_every_step(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares DQN's `target_update_interval` with the number of environments.

    Why: The interval is counted in steps and divided by the number of environments: the target then follows each step.
    Fix: A larger `target_update_interval`.

    Bad (dqn.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 16
          target_update_interval: 10

    Good (dqn.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 8
          target_update_interval: 1000
    """
    interval, count = run.count("target_update_interval"), run.environments.number or 0
    if "target_update_interval" in run.algorithm.defaults and interval and 1 < count > interval:
        text = f"target_update_interval={interval:,} with {count} environments updates the target at every call"
        yield Match(text, run.place_of("target_update_interval"), {"interval": interval, "n_envs": count})


@run_rule("L16", "small-network-on-gpu", Severity.INFO)
def small_network_on_gpu(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds on-policy runs of `MlpPolicy` that are put on a GPU.

    Why: The networks are small and acting is step by step: moving each step to the GPU costs more than it saves.
    Fix: `device="cpu"`.

    Bad:
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", device="cuda")

    Good:
        from stable_baselines3 import PPO
        PPO("CnnPolicy", "Pong-v0", device="cuda")
    """
    device, is_small = run.value("device"), run.algorithm.name in {"A2C", "PPO"} and run.value("policy") == "MlpPolicy"
    if is_small and isinstance(device, str) and device.startswith("cuda"):
        yield Match(f"{run.algorithm.name} with MlpPolicy is put on {device}", run.place_of("device"))


@run_rule("L03", "learning-never-starts", Severity.ERROR)
def learning_never_starts(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares `learning_starts` with the steps of the run.

    Why: Until then actions are random and nothing is updated: the run ends with the weights that it began with.
    Fix: A smaller `learning_starts`, or more steps.

    Bad:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", learning_starts=10_000).learn(5_000)

    Good:
        from stable_baselines3 import SAC
        SAC("MlpPolicy", "Pendulum-v1", learning_starts=1_000).learn(5_000)
    """
    starts, steps = run.whole("learning_starts"), run.total_timesteps
    count, freq = run.environments.number, train_freq(run)
    if starts is None or steps is None or not count or freq is None or freq[1] != "step":
        return
    if any(learn.reset_num_timesteps is not True for learn in run.learns):
        return
    per_round = max(freq[0] * count, 1)
    made = -(-steps // per_round) * per_round
    if made <= starts:
        text = f"learning starts after {starts:,} steps, the run ends after {made:,}: nothing is ever learnt"
        yield Match(text, run.place_of("learning_starts"), {"learning_starts": starts, "total_timesteps": steps})


@run_rule("L07", "rollout-spans-many-episodes", Severity.INFO)
def rollout_spans_many_episodes(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares `n_steps` with the time limit of the environment.

    Why: The policy stays the same for that many episodes in every environment, and all of them are kept in memory.
    Fix: A smaller `n_steps` updates more often and takes less memory.

    Bad:
        import gymnasium as gym
        from stable_baselines3 import PPO
        PPO("MlpPolicy", gym.make("Fight-v0", max_episode_steps=500), n_steps=8192)

    Good:
        import gymnasium as gym
        from stable_baselines3 import PPO
        PPO("MlpPolicy", gym.make("Fight-v0", max_episode_steps=500), n_steps=2048)
    """
    steps, limit = run.count("n_steps"), whole(run.environments.episode_steps)
    if run.algorithm.on_policy and steps and limit and steps >= _MANY_EPISODES * limit:
        text = f"n_steps={steps:,} spans at least {steps / limit:.1f} episodes of at most {limit:,} steps"
        yield Match(text, run.place_of("n_steps"), {"n_steps": steps, "episode_steps": limit})


@run_rule("L10", "total-is-no-multiple", Severity.INFO)
def total_is_no_multiple(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Says how many steps an on-policy run makes if the total is no multiple of its rollout.

    Why: A rollout is always completed, so the run is longer than `total_timesteps` says, and so are its schedules.
    Fix: Nothing, or the multiple that the message names.

    Bad (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 2
          n_steps: 8192
          batch_size: 2048
          n_timesteps: 10000000

    Good (ppo.yml):
        Env-v0:
          policy: MlpPolicy
          n_envs: 2
          n_steps: 8192
          batch_size: 2048
          n_timesteps: 16384000
    """
    collected, steps = samples_per_rollout(run), run.total_timesteps
    if collected is None or steps is None or steps % collected == 0:
        return
    rounds = -(-steps // collected)
    text = f"{steps:,} steps in rollouts of {collected:,} are {rounds:,} rollouts, {rounds * collected:,} steps"
    yield Match(text, run.learns[0].total_timesteps.place, {"rollouts": rounds, "steps": rounds * collected})


@run_rule("L11", "learn-starts-over", Severity.WARNING)
def learn_starts_over(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `learn` in a loop without `reset_num_timesteps=False`.

    Why: Each call counts steps from zero: schedules of learning rate, clipping and exploration start again, logs begin
    a new run, and checkpoints overwrite those of the call before.
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
    for learn in run.learns:
        if learn.repeats_model and learn.reset_num_timesteps is True:
            yield Match("learn is called in a loop, and counts its steps from zero each time", learn.place)


@script_rule("L12", "reset-by-hand", Severity.WARNING, words=("learn",))
def reset_by_hand(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds `env.reset()` between calls of `learn` that go on where the last one stopped.

    Why: The model goes on with the last observation that it saw. After a reset by hand that belongs to an episode that
    is no more: one transition is wrong at every call.
    Fix: Leave the reset out: `learn` resets the environment where it has to.

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
    origins = [run.environments.origin for run in training.runs if run.environments.origin is not None]
    loops = {
        id(script.loop(call))
        for call, made in training.learn_calls
        if made is not None
        and script.loop(call) is not None
        and training.value(argument_of(call, "reset_num_timesteps")) is False
    }
    for call, env in script.method_calls("reset"):
        if id(script.loop(call)) in loops and training.environments(env).origin in origins:
            yield Match("the environment is reset by hand between two calls of learn", script.place(call))
