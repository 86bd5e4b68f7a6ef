"""Rules about callbacks: whether they are passed, how often they act, and on which environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from holdall.tools.lint.arguments import EVAL_ENV, EVAL_FREQ, SAVE_FREQ
from holdall.tools.lint.finding import Place, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import locate_model
from holdall.tools.lint.source import Source
from holdall.tools.lint.source_sb3 import count_environments, find_models
from holdall.tools.probe.snapshot import Snapshot

_FREQUENCIES = {"CheckpointCallback": SAVE_FREQ, "EvalCallback": EVAL_FREQ, "MaskableEvalCallback": EVAL_FREQ}
"""The argument of each callback class that counts calls of `env.step` between two actions."""
_VERBS = {"save_freq": "saves", "eval_freq": "evaluates"}
_DYNAMIC_LOOKUPS = {"eval", "exec", "globals", "locals", "vars"}
"""Functions that can read a variable without its name in the syntax tree."""
_MIN_COMPUTED_DIGITS = 3
"""Digits, without zeros at the end, from which a frequency looks like the result of a division."""


class CallbackNeverPassed(Rule):
    """Finds callbacks that are created and never passed to `learn`.

    Why: It looks as if the run were evaluated, saved or stopped early, but it is not.
    Fix: Add the callback to the list that `learn` gets, or delete it.

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

    code = "L01"
    severity = Severity.ERROR

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for names of callbacks that nothing reads."""
        has_dynamic_lookup = any(
            isinstance(call.func, ast.Name) and call.func.id in _DYNAMIC_LOOKUPS for call in source.calls
        )
        if has_dynamic_lookup or not any(source.find_method_calls("learn")):
            return
        unread = _find_unread_names(source)
        for name, call in _find_created_callbacks(source).items():
            if name in unread:
                kind = source.get_full_name(call.func).rpartition(".")[2]
                text = f"{kind} is created as {name!r} and never passed to learn"
                yield Match(text, source.get_place(call), {"callback": kind})


def _find_created_callbacks(source: Source) -> dict[str, ast.Call]:
    """Return the callbacks that are assigned to a name."""
    found = {}
    for node in source.nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as call)
            ) if _is_callback(source, call):
                found[name] = call
    return found


def _is_callback(source: Source, call: ast.Call) -> bool:
    full = source.get_full_name(call.func)
    if full.startswith("holdall.sb3."):
        return full.endswith("Callback")
    if full.startswith(("stable_baselines3.", "sb3_contrib.")):
        return ".callbacks." in full and not full.endswith(".CallbackList")
    own = source.classes.get(full)
    return own is not None and any(source.get_full_name(base).endswith("BaseCallback") for base in own.bases)


def _find_unread_names(source: Source) -> set[str]:
    """Return the names that nothing reads, or that are read only to fill lists that nothing reads."""
    names = source.find_nodes(ast.Name)
    readers: dict[str, list[str | None]] = {node.id: [] for node in names if isinstance(node.ctx, ast.Store)}
    for node in names:
        if isinstance(node.ctx, ast.Load) and node.id in readers:
            readers[node.id].append(_find_collecting_name(source, node))
    unread: set[str] = set()
    while True:
        more = {name for name, targets in readers.items() if unread.issuperset(targets)} - source.strings - unread
        if not more:
            return unread
        unread |= more


def _find_collecting_name(source: Source, node: ast.Name) -> str | None:
    """Return the name of the list or CallbackList that a use of a name is put into, or None for any other use."""
    for parent in source.ancestors(node):
        if isinstance(parent, ast.Assign):
            return parent.targets[0].id if isinstance(parent.targets[0], ast.Name) else None
        is_list = isinstance(parent, ast.List | ast.Tuple)
        is_callback_list = isinstance(parent, ast.Call) and source.get_full_name(parent.func).endswith(".CallbackList")
        if not is_list and not is_callback_list:
            return None
    return None


class FrequencyIgnoresEnvironments(Rule):
    """Finds `save_freq` and `eval_freq` that are not divided by the number of environments.

    Why: Callbacks count calls of `env.step`, and each call is a step of every environment. With n environments a
    callback acts n times less often than the number says.
    Fix: `save_freq=max(SAVE_FREQ // n_envs, 1)`. If calls are meant, accept the finding: `# holdall: ignore[L02]`.

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

    code = "L02"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Compare the frequencies of a file with the number of environments, if all models have the same number."""
        counts = {count_environments(source, model.env) for model in find_models(source) if model.env is not None}
        n_envs = counts.pop() if len(counts) == 1 else None
        if n_envs is None or n_envs < 2:
            return
        for call in source.calls:
            frequency = _FREQUENCIES.get(source.get_full_name(call.func).rpartition(".")[2])
            given = None if frequency is None else frequency.find(call)
            every = source.evaluate_whole_number(given)
            if frequency is None or given is None or every is None or every < 1:
                continue
            if _has_division(source, given) or _is_divided_by_hand(every, n_envs):
                continue
            verb = _VERBS[frequency.name]
            text = f"{frequency.name}={every:,} with {n_envs} environments {verb} every {every * n_envs:,} steps"
            numbers = {"every": every, "every_steps": every * n_envs, "n_envs": n_envs}
            yield Match(text, source.get_place(given), numbers)


def _has_division(source: Source, node: ast.expr) -> bool:
    """Return whether an expression contains a division, or a name to which a division was assigned."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div | ast.FloorDiv):
            return True
        assigned = source.find_last_assignment(part)
        if assigned is not None and assigned is not node and _has_division(source, assigned):
            return True
    return False


def _is_divided_by_hand(every: int, n_envs: int) -> bool:
    """Return whether `every` looks divided already: 31,250 calls of 16 environments are a round 500,000 steps."""
    own_digits = len(str(every).rstrip("0"))
    step_digits = len(str(every * n_envs).rstrip("0"))
    return own_digits >= _MIN_COMPUTED_DIGITS and step_digits == 1


class FrequencyBeyondRun(Rule):
    """Finds callbacks that act for the first time after the end of the run.

    Why: Nothing is ever saved or evaluated. With several environments a run makes fewer calls than steps.
    Fix: Use a smaller number. Callbacks count calls: divide steps by the number of environments.

    Bad:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), n_steps=512)
        checkpoint = CheckpointCallback(save_freq=81_920, save_path="models")
        model.learn(100_000, callback=checkpoint)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CheckpointCallback
        from stable_baselines3.common.env_util import make_vec_env

        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), n_steps=512)
        checkpoint = CheckpointCallback(save_freq=8_192, save_path="models")
        model.learn(100_000, callback=checkpoint)
    """

    code = "L17"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the frequencies of callbacks with the calls of `env.step` that the run makes."""
        for model in run.learning_models:
            steps = model.run_steps
            if steps is None:
                continue
            per_round = model.rollout_transitions or model.n_envs
            calls = -(-steps // per_round) * per_round // model.n_envs
            for callback in run.passed_callbacks:
                frequency = _FREQUENCIES.get(callback.kind)
                if frequency is None:
                    continue
                every = callback.count(frequency.name)
                if every is not None and every > calls:
                    text = (
                        f"{callback.kind} has {frequency.name}={every:,}, but {steps:,} steps of {model.n_envs} "
                        f"environments are {calls:,} calls, so it never acts"
                    )
                    yield Match(text, locate_model(model), {"every": every, "calls": calls})


class EvaluatedOnTrainingEnvironment(Rule):
    """Finds an EvalCallback that gets the environment that the model is trained on.

    Why: Evaluation resets and steps the environment. Training continues with the observation from before, so the next
    transition joins two episodes, and the statistics of VecNormalize and Monitor are mixed.
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

    code = "L18"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for callbacks and models whose environments are names with the same last assignment."""
        trained = [source.find_last_assignment(model.env) for model in find_models(source)]
        for call in source.calls:
            kind = source.get_full_name(call.func).rpartition(".")[2]
            if _FREQUENCIES.get(kind) is not EVAL_FREQ:
                continue
            evaluated = source.find_last_assignment(EVAL_ENV.find(call))
            if evaluated is not None and any(evaluated is env for env in trained):
                yield _match_evaluation(kind, source.get_place(call))

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the environments themselves."""
        for model in run.learning_models:
            for callback in run.passed_callbacks:
                if callback.shares_env:
                    yield _match_evaluation(callback.kind, locate_model(model))


def _match_evaluation(kind: str, place: Place) -> Match:
    return Match(f"{kind} evaluates on the environment that the model is trained on", place)
