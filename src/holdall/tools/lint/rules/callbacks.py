"""Rules about callbacks: whether they are passed, and how often they act."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, run_rule, script_rule
from holdall.tools.lint.run import Callback, ConfiguredRun, Machine, OneOf, whole
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

_FREQUENCIES = {"CheckpointCallback": "save_freq", "EvalCallback": "eval_freq", "MaskableEvalCallback": "eval_freq"}
_LOOKS_NAMES_UP = {"eval", "exec", "globals", "locals", "vars"}
_WORKED_OUT = 3  # digits, without the zeros behind them
_VERBS = {"save_freq": "saves", "eval_freq": "evaluates"}


@script_rule("L01", "callback-never-passed", Severity.ERROR, words=("allback",))
def callback_never_passed(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds callbacks that are created and reach no call of `learn`.

    Why: It looks as if the run were evaluated, or saved, or stopped early, and it is not.
    Fix: Add it to the list that `learn` gets, or delete it.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback

        checkpoint_callback = CheckpointCallback(save_freq=10_000, save_path="models")
        eval_callback = EvalCallback("CartPole-v1", eval_freq=10_000)
        callback_list = CallbackList([checkpoint_callback])
        PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=callback_list)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback

        checkpoint_callback = CheckpointCallback(save_freq=10_000, save_path="models")
        eval_callback = EvalCallback("CartPole-v1", eval_freq=10_000)
        callback_list = CallbackList([checkpoint_callback, eval_callback])
        PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=callback_list)
    """
    looks_names_up = any(isinstance(call.func, ast.Name) and call.func.id in _LOOKS_NAMES_UP for call in script.calls)
    if not training.learn_calls or looks_names_up:
        return
    dead = _never_read(script)
    for name, node in dict(_created(script)).items():
        if name in dead:
            kind = script.dotted(node.func).rpartition(".")[2]
            text = f"{kind} is created as {name!r} and never passed to learn"
            yield Match(text, script.place(node), {"callback": kind})


def _created(script: Script) -> Iterator[tuple[str, ast.Call]]:
    """Yield the callbacks that are assigned to a name."""
    for node in script.nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as call)
            ) if _is_callback(script, call):
                yield name, call


def _is_callback(script: Script, call: ast.Call) -> bool:
    dotted = script.dotted(call.func)
    if dotted.startswith("holdall.sb3."):
        return dotted.endswith("Callback")
    if dotted.startswith(("stable_baselines3.", "sb3_contrib.")):
        return ".callbacks." in dotted and dotted.rpartition(".")[2] != "CallbackList"
    own = script.classes.get(dotted)
    return own is not None and any(script.dotted(base).endswith("BaseCallback") for base in own.bases)


def _never_read(script: Script) -> set[str]:
    """Return the names that nothing reads, or only what goes to names of the same kind."""
    names = script.of_kind(ast.Name)
    readers: dict[str, list[str | None]] = {node.id: [] for node in names if isinstance(node.ctx, ast.Store)}
    for node in names:
        if isinstance(node.ctx, ast.Load) and node.id in readers:
            readers[node.id].append(_assigned_name(script, node))
    exported = {part.value for part in script.of_kind(ast.Constant) if isinstance(part.value, str)}
    dead: set[str] = set()
    while more := {name for name, to in readers.items() if dead.issuperset(to)} - exported - dead:
        dead |= more
    return dead


def _assigned_name(script: Script, node: ast.Name) -> str | None:
    """Return the one name that the statement around a use assigns to; None for any other use.

    A list or CallbackList around it only collects; whatever else is called may keep or run what it gets.
    """
    for parent in script.ancestors(node):
        if isinstance(parent, ast.Assign):
            return parent.targets[0].id if isinstance(parent.targets[0], ast.Name) else None
        is_collection = isinstance(parent, ast.List | ast.Tuple)
        is_list = isinstance(parent, ast.Call) and script.dotted(parent.func).endswith(".CallbackList")
        if not is_collection and not is_list:
            return None
    return None


def _frequencies(run: ConfiguredRun) -> Iterator[tuple[Callback, str, int]]:
    """Yield the callbacks of a run that act every so many steps, with the argument and its value."""
    for callback in run.callbacks:
        name = _FREQUENCIES.get(callback.kind)
        given = callback.value(name) if name else None
        every = next(filter(None, map(whole, given.values)), None) if isinstance(given, OneOf) else whole(given)
        if name and every is not None and every > 0:
            yield callback, name, every


def _is_divided(every: int, count: int) -> bool:
    """Whether a number was divided by hand: 31,250 calls with 16 environments are 500,000 steps."""
    own, steps = (len(str(number).rstrip("0")) for number in (every, every * count))
    return own >= _WORKED_OUT and steps == 1


@run_rule("L02", "frequency-ignores-environments", Severity.WARNING)
def frequency_ignores_environments(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds `save_freq` and `eval_freq` that are not divided by the number of environments.

    Why: Callbacks count calls of `env.step`, and each call is a step of every environment: with n of them they act n
    times less often than the number says.
    Fix: `save_freq=max(SAVE_FREQ // n_envs, 1)`, or keep it and know that it counts calls (`# holdall: ignore[L02]`).

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        n_envs = 2
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=n_envs), n_steps=8192)
        checkpoint = CheckpointCallback(save_freq=81_920, save_path="models")
        model.learn(10_000_000, callback=checkpoint)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        n_envs = 2
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=n_envs), n_steps=8192)
        checkpoint = CheckpointCallback(save_freq=max(81_920 // n_envs, 1), save_path="models")
        model.learn(10_000_000, callback=checkpoint)
    """
    count = run.environments.number
    for callback, name, every in _frequencies(run):
        setting = callback.settings[name]
        if count is None or count < 2 or setting.divisors is None or {count, 0} & set(setting.divisors):
            continue
        if _is_divided(every, count):
            continue
        text = f"{name}={every:,} with {count} environments {_VERBS[name]} every {every * count:,} steps"
        steps = run.count("n_steps") if run.algorithm.on_policy else None
        if steps:
            rounds = every / steps
            text += ", which is every rollout" if rounds == 1 else f", which is every {rounds:,.3g} rollouts"
        yield Match(text, setting.place, {"every": every, "every_steps": every * count, "n_envs": count})


@run_rule("L17", "frequency-beyond-run", Severity.WARNING)
def frequency_beyond_run(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds callbacks that the run ends before.

    Why: Nothing is ever saved or evaluated. With several environments a run has fewer calls than steps.
    Fix: A smaller number; remember to divide by the number of environments.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        n_envs = 2
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=n_envs), n_steps=8192)
        checkpoint = CheckpointCallback(save_freq=81_920, save_path="models")
        model.learn(100_000, callback=checkpoint)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        n_envs = 2
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=n_envs), n_steps=8192)
        checkpoint = CheckpointCallback(save_freq=8_192, save_path="models")
        model.learn(100_000, callback=checkpoint)
    """
    steps, count = run.total_timesteps, run.environments.number
    if steps is None or count is None:
        return
    per_round = count * (run.count("n_steps") or 1) if run.algorithm.on_policy else count
    calls = -(-steps // per_round) * per_round // count
    for callback, name, every in _frequencies(run):
        if every > calls:
            text = f"{name}={every:,}, but {steps:,} steps of {count} environments are {calls:,} calls: it never acts"
            yield Match(text, callback.settings[name].place, {"every": every, "calls": calls})


@run_rule("L18", "evaluated-on-training-environment", Severity.WARNING)
def evaluated_on_training_environment(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Finds an EvalCallback that is given the environment that is trained on.

    Why: Evaluation resets and steps it. The training goes on with the observation from before, so the next transition
    joins two episodes, and statistics of VecNormalize and Monitor mix.
    Fix: Make a second environment for the callback.

    Bad:
        import gymnasium as gym
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import EvalCallback

        env = gym.make("Pendulum-v1")
        SAC("MlpPolicy", env).learn(10_000, callback=EvalCallback(env, eval_freq=1000))

    Good:
        import gymnasium as gym
        from stable_baselines3 import SAC
        from stable_baselines3.common.callbacks import EvalCallback

        env = gym.make("Pendulum-v1")
        eval_env = gym.make("Pendulum-v1")
        SAC("MlpPolicy", env).learn(10_000, callback=EvalCallback(eval_env, eval_freq=1000))
    """
    origin = run.environments.origin
    for callback in run.callbacks:
        if origin is not None and callback.environments and callback.environments.origin == origin:
            yield Match(f"{callback.kind} evaluates on the environment that the model is trained on", callback.place)
