"""Rules about vector environments: their processes and threads, and how they reset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, run_rule, script_rule
from holdall.tools.lint.run import ConfiguredRun, Environments, Machine, candidates, sized
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Function, Script, argument_of, subtree
from holdall.units import counted

_OVERSUBSCRIBED = 2  # threads a core
_OTHER_THREADS = {"num_threads"}  # as an argument, those of all kinds of functions
_POOLS_BESIDES_WORKERS = 2  # the main thread's and autograd's
_ADDERS = ("add", "add_transition", "append", "extend", "push", "put", "store")
_FINAL = frozenset({"final_obs", "_final_obs", "final_observation", "_final_observation"})
_ADDS_VALID_AT = 7  # the index of `valid` in ReplayMemory.add


@script_rule("M11", "no-forkserver-preload", Severity.INFO, words=("SubprocVecEnv",))
def no_forkserver_preload(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds SubprocVecEnv with the default start method and no preloaded libraries.

    Why: Stable-Baselines3 starts its environments from a fork server. Without preloading, every process imports the
    libraries for itself, and none of that memory is shared.
    Fix: `multiprocessing.set_forkserver_preload(["torch", "stable_baselines3"])` before the environments are made: the
    server imports them once and the processes share the pages.

    Bad (processes):
        if __name__ == "__main__":
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv))

    Good (processes):
        import multiprocessing

        if __name__ == "__main__":
            multiprocessing.set_forkserver_preload(["torch", "stable_baselines3"])
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv))
    """
    if "set_forkserver_preload" in script.attributes:
        return
    for call, made in _subprocesses(script, training):
        if made.number != 1 and made.start_method in {None, "forkserver"}:
            many = "processes" if made.number is None else f"{made.number} processes"
            text = f"each of the {many} imports the libraries for itself"
            yield Match(text, script.place(call), {"processes": made.number or "unknown"})


def _subprocesses(script: Script, training: TrainingReader) -> Iterator[tuple[ast.Call, Environments]]:
    """Yield the calls that make environments in processes, and these environments."""
    for call in script.calls:
        named = (call.func, argument_of(call, "vec_env_cls"))
        if any(node is not None and script.dotted(node).endswith("SubprocVecEnv") for node in named):
            made = training.environments(call)
            if made.vector == "subproc":
                yield call, made


@script_rule("M12", "no-main-guard", Severity.ERROR, words=("SubprocVecEnv",))
def no_main_guard(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds processes that are started while the module is imported.

    Why: With spawn and forkserver (Stable-Baselines3's default) every process imports the script again, gets to the
    same line and would start processes itself. Python stops it with a RuntimeError.
    Fix: Put the code that starts them under `if __name__ == "__main__":`.

    Bad (processes):
        env = make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv)

    Good (processes):
        def main():
            return PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4, vec_env_cls=SubprocVecEnv))

        if __name__ == "__main__":
            main()
    """
    reached = _run_by_import(script)
    for call, made in _subprocesses(script, training):
        if made.start_method not in {None, "forkserver", "spawn"}:
            continue  # it may be started by fork
        owner = script.function(call)
        if (owner is None and not _is_guarded(script, call)) or (owner is not None and owner.name in reached):
            text = "processes are started outside `if __name__ == '__main__':`, so that each of them would start more"
            yield Match(text, script.place(call))


def _is_guarded(script: Script, node: ast.AST) -> bool:
    """Whether a node is under a condition, or not run by an import for another reason."""
    return any(isinstance(a, ast.If | ast.ClassDef | ast.Lambda | Function) for a in script.ancestors(node))


def _run_by_import(script: Script) -> set[str]:
    """Return the module's functions that importing it calls, directly or through others."""
    called_by: dict[str | None, set[str]] = {}
    for call in script.calls:
        if isinstance(call.func, ast.Name) and call.func.id in script.functions:
            owner = script.function(call)
            if owner is not None or not _is_guarded(script, call):
                called_by.setdefault(owner.name if owner else None, set()).add(call.func.id)
    reached = set(called_by.get(None, ()))
    while more := {name for caller in reached for name in called_by.get(caller, ())} - reached:
        reached |= more
    return reached


@script_rule("M13", "shared-memory-too-small", Severity.WARNING, words=("AsyncVectorEnv",))
def shared_memory_too_small(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Compares the observations that Gymnasium's vector environments share with /dev/shm.

    Why: `AsyncVectorEnv` passes observations through shared memory. A container has 64 MB of it by default,
    and writing beyond it kills the process with a bus error.
    Fix: `docker run --shm-size`, fewer environments, or `shared_memory=False`.

    Bad (shm_bytes=64MiB):
        import numpy as np
        import gymnasium as gym
        from gymnasium import spaces
        from gymnasium.vector import AsyncVectorEnv

        class Camera(gym.Env):
            observation_space = spaces.Box(0, 255, (720, 1280, 3), np.uint8)

        envs = AsyncVectorEnv([lambda: Camera() for _ in range(32)])

    Good (shm_bytes=64MiB):
        import numpy as np
        import gymnasium as gym
        from gymnasium import spaces
        from gymnasium.vector import AsyncVectorEnv

        class Camera(gym.Env):
            observation_space = spaces.Box(0, 255, (720, 1280, 3), np.uint8)

        envs = AsyncVectorEnv([lambda: Camera() for _ in range(32)], shared_memory=False)
    """
    for call in script.calls:
        if not script.dotted(call.func).endswith("AsyncVectorEnv") or machine.shm_bytes is None:
            continue
        shares, made = argument_of(call, "shared_memory"), training.environments(call)
        if shares is not None and training.value(shares) is not True:
            continue
        wanted = made.observation.nbytes * made.number if made.observation and made.number else 0
        if wanted > machine.shm_bytes:
            text = f"{made.number} environments share {sized(wanted)}, /dev/shm has {sized(machine.shm_bytes)}"
            yield Match(text, script.place(call), {"shared_bytes": wanted, "shm_bytes": machine.shm_bytes})


@script_rule("L09", "threads-oversubscribed", Severity.WARNING, words=("thread_num", "num_threads"))
def threads_oversubscribed(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Multiplies torch's threads with the workers that each get a pool of them.

    Why: Every Python thread that computes with torch gets an OpenMP pool of its own, and so does autograd: threads x
    (workers + 2). More of them than cores wait for each other. Their stacks cost next to no memory: what is lost is
    time.
    Fix: `torch.set_num_threads(1)`, or `OMP_NUM_THREADS=1` in the environment, in whatever runs several workers.

    Bad:
        import torch
        worker_num = 3
        thread_num = 12
        torch.set_num_threads(thread_num)

    Good:
        import torch
        worker_num = 3
        thread_num = 2
        torch.set_num_threads(thread_num)
    """
    threads = list(_counts(training, {"thread_num", "num_threads"}, "torch.set_num_threads"))
    workers = [most for _, most in _counts(training, {"worker_num", "num_workers", "n_workers"})]
    if not threads:
        return
    node, most = max(threads, key=lambda pair: pair[1])
    pools = max(workers) + _POOLS_BESIDES_WORKERS if workers else 1
    if most > machine.cores or most * pools > _OVERSUBSCRIBED * machine.cores:
        total = counted(most, "thread")
        if pools > 1:
            total += f" x ({counted(max(workers), 'worker')} + 2) = {most * pools}"
        numbers = {"threads": most * pools, "cores": machine.cores}
        yield Match(f"{total} on {counted(machine.cores, 'core')}", script.place(node), numbers)


def _counts(training: TrainingReader, names: set[str], function: str = "") -> Iterator[tuple[ast.AST, int]]:
    """Yield the largest number that an assignment or argument of one of these names, or a call, is given."""
    for node in training.script.nodes:
        value: ast.expr | None = None
        match node:
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=given) if name in names:
                value = given
            case ast.keyword(arg=str() as name, value=given) if name in names and name not in _OTHER_THREADS:
                value = given
            case ast.Call(args=[given]) if function and training.script.dotted(node.func) == function:
                value = given
        numbers = candidates(training.value(value)) if value is not None else ()
        if numbers:
            yield node, max(numbers)


@run_rule("L19", "more-processes-than-cores", Severity.WARNING)
def more_processes_than_cores(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Compares the number of environment processes with the cores.

    Why: Each environment of a SubprocVecEnv is a process. Beyond the cores they take turns, and take memory each.
    Fix: As many environments as there are cores, or several in one process with DummyVecEnv.

    Bad (processes):
        if __name__ == "__main__":
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=64, vec_env_cls=SubprocVecEnv))

    Good (processes):
        if __name__ == "__main__":
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, vec_env_cls=SubprocVecEnv))
    """
    count = run.environments.number
    if run.environments.vector == "subproc" and count is not None and count > machine.cores:
        text = f"{counted(count, 'environment process', 'environment processes')} on {counted(machine.cores, 'core')}"
        yield Match(text, run.environments.place or run.place, {"processes": count, "cores": machine.cores})


@run_rule("L08", "cores-left-idle", Severity.INFO)
def cores_left_idle(run: ConfiguredRun, machine: Machine) -> Iterator[Match]:
    """Says which `n_steps` would use more cores with the same rollout.

    Why: More environments collect faster where the environment is the slow part. With `n_steps` unchanged they also
    make the rollout larger, and twice that while it is flattened; with their product unchanged nothing grows.
    Fix: Raise `n_envs` and divide `n_steps` by the same factor.

    Bad (processes):
        if __name__ == "__main__":
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv), n_steps=8192)

    Good (processes):
        if __name__ == "__main__":
            PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, vec_env_cls=SubprocVecEnv), n_steps=2048)
    """
    count, steps = run.environments.number, run.count("n_steps")
    if not run.algorithm.on_policy or run.environments.vector != "subproc" or not count or not steps:
        return
    factor = machine.cores // count
    while factor > 1 and steps % factor:
        factor -= 1
    if factor > 1:
        text = (
            f"{counted(count, 'environment')} on {counted(machine.cores, 'core')}; n_envs={count * factor} with "
            f"n_steps={steps // factor:,} collects the same {steps * count:,} transitions in the same memory"
        )
        yield Match(text, run.environments.place or run.place, {"n_envs": count * factor, "n_steps": steps // factor})


# ------------------------------------------------------------ how they reset


class _Step(NamedTuple):
    """A call of a vector environment's `step`, and the names that its results get."""

    call: ast.Call
    loop: ast.AST
    mode: str
    obs: str
    reward: str
    flags: frozenset[str]


@script_rule("L20", "autoreset-ignored", Severity.WARNING, words=("make_vec", "VectorEnv"))
def autoreset_ignored(script: Script, training: TrainingReader, machine: Machine) -> Iterator[Match]:
    """Finds loops that add what a Gymnasium vector environment returned, and do not look at how it resets.

    Why: By default a lane whose episode ended is only reset in the next step: that step is no transition, its action
    has no effect, and it leads from the last observation of an episode to the first one of another. With
    `AutoresetMode.SAME_STEP` the observation at an end is the next episode's first, and the true one is in
    `info["final_obs"]`. Values are then learned across episodes, once an episode.
    Fix: `holdall.Recorder(envs, memory)` steps the environments and adds what happened in every mode. By hand: leave
    out the lanes that ended in the step before (`memory.add(..., valid=~ended_before)`), or take `info["final_obs"]`.

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
    for step in _steps(script, training):
        if step.mode == "disabled" or (step.mode == "same_step" and _mentions_final(script)):
            continue
        if step.mode == "next_step" and (_mentions_final(script) or _carries_flags(script, step)):
            continue
        for call in _additions(script, step):
            what = ast.unparse(call.func)
            text = (
                f"{what} gets the step after an episode's end as a transition, in which its lane was only reset"
                if step.mode == "next_step"
                else f"{what} gets the next episode's first observation at an episode's end, not info['final_obs']"
            )
            yield Match(f"{text}; holdall.Recorder(envs, memory) adds what happened", script.place(call))


def _steps(script: Script, training: TrainingReader) -> Iterator[_Step]:
    """Yield the steps of vector environments whose results are named, in loops."""
    for call, env in script.method_calls("step"):
        loop, statement = script.loop(call), script.parent(call)
        if loop is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        mode = training.environments(env).autoreset
        match statement.targets[0]:
            case ast.Tuple(elts=[ast.Name(id=obs), ast.Name(id=reward), ast.Name(id=ended), ast.Name(id=cut), _]):
                if mode is not None:
                    yield _Step(call, loop, mode, obs, reward, frozenset({ended, cut}))


def _mentions_final(script: Script) -> bool:
    """Whether a script asks for true final observations anywhere."""
    return any(isinstance(node.value, str) and node.value in _FINAL for node in script.of_kind(ast.Constant))


def _carries_flags(script: Script, step: _Step) -> bool:
    """Whether a loop reads, before it is set, something that is made of the flags: it is of the step before."""
    inside = [node for node in subtree(step.loop) if isinstance(node, ast.Name)]
    derived, known = set(step.flags), 0
    while known != len(derived):  # done = terminated | truncated; resetting = done
        known = len(derived)
        for node in subtree(step.loop):
            if isinstance(node, ast.Assign) and _names(node.value) & derived:
                derived |= {name for target in node.targets for name in _names(target)}
    for name in derived - {step.obs, step.reward}:
        uses = [node for node in inside if node.id == name]
        stored = [node for node in uses if isinstance(node.ctx, ast.Store)]
        statements = {id(statement) for node in stored for statement in script.ancestors(node)
                      if isinstance(statement, ast.Assign)}  # fmt: skip
        first = min(((node.lineno, node.col_offset) for node in stored), default=(0, 0))
        for use in uses:
            is_own = any(id(around) in statements for around in script.ancestors(use))
            if isinstance(use.ctx, ast.Load) and (use.lineno, use.col_offset) < first and not is_own:
                return True
    return False


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in subtree(node) if isinstance(part, ast.Name)}


def _additions(script: Script, step: _Step) -> Iterator[ast.Call]:
    """Yield the calls in a loop that certainly add a step's observations and rewards to something."""
    for name in _ADDERS:
        for call, _ in script.method_calls(name):
            around = list(script.ancestors(call))
            within = around[: around.index(step.loop)] if step.loop in around else None
            if within is None or any(isinstance(node, ast.If | ast.IfExp) for node in within):
                continue
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            names = {name for argument in given for name in _names(argument)}
            is_valid_given = argument_of(call, "valid", _ADDS_VALID_AT) is not None
            if {step.obs, step.reward} <= names and not is_valid_given:
                yield call
