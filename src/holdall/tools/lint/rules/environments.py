"""Rules about vector environments: their processes, and how they reset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from holdall.tools.lint.arguments import START_METHOD, VALID, WRAPPED_ENV
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import locate_model
from holdall.tools.lint.source import Function, Source, get_argument, has_unpacked_arguments, list_names
from holdall.tools.probe.snapshot import Snapshot
from holdall.units import count_noun

_ADDING_METHODS = ("add", "add_transition", "append", "extend", "push", "put", "store")
_FINAL_KEYS = frozenset({"final_obs", "_final_obs", "final_observation", "_final_observation"})
_VECTOR_CLASSES = ("SyncVectorEnv", "AsyncVectorEnv")
_MAX_WRAPPERS = 20


class NoMainGuard(Rule):
    """Finds environment processes that are started while the module is imported.

    Why: With spawn and with forkserver (Stable-Baselines3's default), every new process imports the script again and
    reaches the same call. Python then raises a RuntimeError.
    Fix: Put the code that starts processes under `if __name__ == "__main__":`.

    Bad:
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv
        env = make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv)

    Good:
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv

        def main():
            return make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv)

        if __name__ == "__main__":
            main()
    """

    code = "M12"
    severity = Severity.ERROR

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for SubprocVecEnv at the module's level, and in functions that the module's level calls."""
        imported = _find_functions_run_by_import(source)
        for call in _find_subprocess_calls(source):
            owner = source.find_function(call)
            is_run = not _is_conditional(source, call) if owner is None else owner.name in imported
            if is_run:
                text = "processes are started outside `if __name__ == '__main__':`, so each of them would start more"
                yield Match(text, source.get_place(call))


def _find_subprocess_calls(source: Source) -> Iterator[ast.Call]:
    """Yield the calls that start environment processes by spawn or forkserver."""
    for call in source.calls:
        is_constructor = source.get_full_name(call.func).endswith("SubprocVecEnv")
        has_class = source.get_full_name(get_argument(call, "vec_env_cls")).endswith("SubprocVecEnv")
        if not is_constructor and not has_class:
            continue
        method = START_METHOD.find(call) if is_constructor else get_argument(call, "start_method")
        # A start method that is not a literal may be fork, so the call is not reported.
        is_plain = method is None and get_argument(call, "vec_env_kwargs") is None and not has_unpacked_arguments(call)
        if is_plain or source.evaluate(method) in {"spawn", "forkserver"}:
            yield call


def _is_conditional(source: Source, node: ast.AST) -> bool:
    """Return whether a node is inside an `if`, a class or a function."""
    guards = ast.If | ast.ClassDef | ast.Lambda | Function
    return any(isinstance(parent, guards) for parent in source.ancestors(node))


def _find_functions_run_by_import(source: Source) -> set[str]:
    """Return the functions that an import of the module calls, directly or through other functions."""
    callees: dict[str | None, set[str]] = {}
    for call in source.calls:
        if not isinstance(call.func, ast.Name) or call.func.id not in source.functions:
            continue
        owner = source.find_function(call)
        if owner is not None:
            callees.setdefault(owner.name, set()).add(call.func.id)
        elif not _is_conditional(source, call):
            callees.setdefault(None, set()).add(call.func.id)
    reached = set(callees.get(None, ()))
    while True:
        more = {name for caller in reached for name in callees.get(caller, ())} - reached
        if not more:
            return reached
        reached |= more


class MoreProcessesThanCores(Rule):
    """Compares the number of environment processes with the cores.

    Why: Each environment of a SubprocVecEnv is a process. Beyond the number of cores, processes take turns, and each of
    them takes memory.
    Fix: As many environments as there are cores, or several in one process with DummyVecEnv.

    Bad (cores=1):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv

        if __name__ == "__main__":
            env = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv)
            PPO("MlpPolicy", env).learn(10_000)

    Good (cores=1):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env

        if __name__ == "__main__":
            env = make_vec_env("CartPole-v1", n_envs=2)
            PPO("MlpPolicy", env).learn(10_000)
    """

    code = "L19"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the number of processes with the usable cores."""
        for model in run.learning_models:
            has_processes = model.environment is not None and bool(model.environment.start_method)
            if has_processes and model.n_envs > machine.cores:
                processes = count_noun(model.n_envs, "environment process", "environment processes")
                text = f"{processes} on {count_noun(machine.cores, 'core')}"
                yield Match(text, locate_model(model), {"processes": model.n_envs, "cores": machine.cores})


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of a vector environment's `step` in a loop, and the names of its results."""

    loop: ast.AST
    mode: str
    """When the environment resets after an episode: `next_step` or `same_step`."""
    obs: str
    """Name of the next observations."""
    reward: str
    flags: frozenset[str]
    """Names of `terminated` and `truncated`."""


class AutoresetIgnored(Rule):
    """Finds loops that add the steps of a Gymnasium vector environment and ignore how it resets.

    Why: By default, an environment whose episode ended is only reset in the next step. That step is not a transition:
    its action has no effect, and it joins the last observation of one episode to the first one of another. With
    `AutoresetMode.SAME_STEP`, the observation at an end is the next episode's first one, and the true one is in
    `info["final_obs"]`. In both cases the agent learns values across the ends of episodes.
    Fix: `holdall.Recorder(envs, memory)` steps the environments and adds the right transitions in every mode. By hand:
    mark the environments that ended in the step before (`memory.add(..., valid=~ended_before)`), or use
    `info["final_obs"]`.

    Bad:
        import gymnasium as gym
        import holdall

        envs = gym.make_vec("CartPole-v1", num_envs=4)
        memory = holdall.ReplayMemory(envs.single_observation_space, envs.single_action_space, 50_000, 4)
        obs, _ = envs.reset()
        for step in range(10_000):
            action = envs.action_space.sample()
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            memory.add(obs, action, reward, next_obs, terminated, truncated)
            obs = next_obs

    Good:
        import gymnasium as gym
        import holdall

        envs = gym.make_vec("CartPole-v1", num_envs=4)
        memory = holdall.ReplayMemory(envs.single_observation_space, envs.single_action_space, 50_000, 4)
        recorder = holdall.Recorder(envs, memory)
        for step in range(10_000):
            recorder.step(envs.action_space.sample())
    """

    code = "L20"
    severity = Severity.WARNING

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Look for loops that step a vector environment and add its results without a look at ended episodes."""
        if not source.strings.isdisjoint(_FINAL_KEYS):
            return
        for step in _find_vector_steps(source):
            if step.mode == "next_step" and _carries_flags(source, step):
                continue
            for call in _find_additions(source, step):
                method = ast.unparse(call.func)
                if step.mode == "next_step":
                    text = f"{method} gets the step after an episode's end as a transition, but that step only resets"
                else:
                    text = (
                        f"at an episode's end, {method} gets the first observation of the next episode, not "
                        "info['final_obs']"
                    )
                yield Match(
                    f"{text}; holdall.Recorder(envs, memory) adds the right transitions", source.get_place(call)
                )


def _find_vector_steps(source: Source) -> Iterator[_Step]:
    """Yield the calls of `step` in loops whose results are unpacked into five, of which the first four are names."""
    for call, env in source.find_method_calls("step"):
        loop = source.find_loop(call)
        statement = source.get_parent(call)
        if loop is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        match statement.targets[0]:
            case ast.Tuple(elts=[ast.Name(id=obs), ast.Name(id=reward), ast.Name(id=ended), ast.Name(id=cut), _]):
                mode = _find_autoreset_mode(source, env)
                if mode in {"next_step", "same_step"}:
                    yield _Step(loop, mode, obs, reward, frozenset({ended, cut}))


def _find_autoreset_mode(source: Source, node: ast.expr | None) -> str:
    """Return `next_step` or `same_step` for a Gymnasium vector environment. Empty for other modes and if unknown."""
    for _ in range(_MAX_WRAPPERS):
        call = source.resolve(node)
        if not isinstance(call, ast.Call):
            return ""
        name = source.get_full_name(call.func)
        is_vector = name.startswith("gymnasium.") and name.rpartition(".")[2] in _VECTOR_CLASSES
        if is_vector or name == "gymnasium.make_vec":
            return _read_mode(source, call)
        if not name.startswith("gymnasium.wrappers."):
            return ""
        node = WRAPPED_ENV.find(call)
    return ""


def _read_mode(source: Source, call: ast.Call) -> str:
    """Return the mode that a constructor gets, or an empty text for other modes and if unknown."""
    if has_unpacked_arguments(call):
        return ""
    mode = get_argument(call, "autoreset_mode")
    kwargs = source.resolve(get_argument(call, "vector_kwargs"))
    if mode is None and kwargs is not None:
        if not isinstance(kwargs, ast.Dict):
            return ""
        modes = [
            value
            for key, value in zip(kwargs.keys, kwargs.values, strict=True)
            if source.evaluate(key) == "autoreset_mode"
        ]
        mode = modes[0] if modes else None
    if mode is None:
        return "next_step"
    word = source.get_full_name(mode).rpartition(".")[2] or str(source.evaluate(mode))
    return {"nextstep": "next_step", "samestep": "same_step"}.get(word.lower().replace("_", ""), "")


def _carries_flags(source: Source, step: _Step) -> bool:
    """Return whether the loop reads the flags of the previous step, or something computed from them."""
    names = [node for node in ast.walk(step.loop) if isinstance(node, ast.Name)]
    for name in _find_names_from_flags(step) - {step.obs, step.reward}:
        uses = [node for node in names if node.id == name]
        stores = [node for node in uses if isinstance(node.ctx, ast.Store)]
        assignments = {parent for node in stores for parent in source.ancestors(node) if isinstance(parent, ast.Assign)}
        first_store = min(((node.lineno, node.col_offset) for node in stores), default=(0, 0))
        for use in uses:
            # A use before the first assignment reads the value of the previous step.
            is_early = (use.lineno, use.col_offset) < first_store
            is_own = any(parent in assignments for parent in source.ancestors(use))
            if isinstance(use.ctx, ast.Load) and is_early and not is_own:
                return True
    return False


def _find_names_from_flags(step: _Step) -> set[str]:
    """Return the names of the flags and of values that the loop computes from them: `done = terminated | truncated`."""
    derived = set(step.flags)
    count = 0
    while count != len(derived):
        count = len(derived)
        for node in ast.walk(step.loop):
            if isinstance(node, ast.Assign) and list_names(node.value) & derived:
                derived |= {name for target in node.targets for name in list_names(target)}
    return derived


def _find_copies(step: _Step, call: ast.Call) -> set[str]:
    """Return the names to which the loop assigns the next observations, or a copy of them, before `call`."""
    assignments = [node for node in ast.walk(step.loop) if isinstance(node, ast.Assign) and node.lineno < call.lineno]
    return {
        name
        for node in assignments
        if ast.unparse(node.value) in {step.obs, f"{step.obs}.copy()"}
        for target in node.targets
        for name in list_names(target)
    }


def _find_additions(source: Source, step: _Step) -> Iterator[ast.Call]:
    """Yield the calls in a loop that add the next observations and the rewards of every step."""
    for name in _ADDING_METHODS:
        for call, _ in source.find_method_calls(name):
            ancestors = list(source.ancestors(call))
            if step.loop not in ancestors:
                continue
            in_loop = ancestors[: ancestors.index(step.loop)]
            if any(isinstance(node, ast.If | ast.IfExp) for node in in_loop):
                continue
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            used = {used for argument in arguments for used in list_names(argument)}
            if not used.isdisjoint(_find_copies(step, call)):
                used.add(step.obs)
            if {step.obs, step.reward} <= used and VALID.find(call) is None:
                yield call
