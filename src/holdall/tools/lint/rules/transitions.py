"""Rules about transitions: what a loop of one's own adds to a buffer, and how vector environments reset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Match, script_rule
from holdall.tools.lint.run import Machine
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script, argument_of, subtree

_MAKERS = frozenset(
    {"gymnasium.make_vec", "gymnasium.vector.SyncVectorEnv", "gymnasium.vector.AsyncVectorEnv"}
    | {"gymnasium.vector.sync_vector_env.SyncVectorEnv", "gymnasium.vector.async_vector_env.AsyncVectorEnv"}
)
_ADDERS = ("add", "add_transition", "append", "extend", "push", "put", "store")
_FINAL = frozenset({"final_obs", "_final_obs", "final_observation", "_final_observation"})
_DEEPEST = 8  # wrappers around wrappers around ...
_ADDS_VALID_AT = 7  # the index of `valid` in ReplayMemory.add


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
        mode = _mode(training, env)
        if mode is None or loop is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != 5:
            continue
        obs, reward, *flags = [name.id if isinstance(name, ast.Name) else "" for name in target.elts[:4]]
        if obs and reward and all(flags):
            yield _Step(call, loop, mode, obs, reward, frozenset(flags))


def _mode(training: TrainingReader, env: ast.expr | None, depth: int = 0) -> str | None:
    """Return the autoreset mode of the vector environment that an expression means; None if it is not known."""
    script = training.script
    if isinstance(env, ast.Name):
        env = script.assigned(env)
    elif isinstance(env, ast.Attribute):
        env = script.attribute_node(env)
    if not isinstance(env, ast.Call) or depth > _DEEPEST:
        return None
    name = script.dotted(env.func)
    if name in _MAKERS:
        return _mode_given(env)
    is_wrapper = name.startswith("gymnasium.wrappers.") and env.args
    return _mode(training, env.args[0], depth + 1) if is_wrapper else None


def _mode_given(maker: ast.Call) -> str | None:
    """Return the mode that is passed to what makes a vector environment; None if it cannot be read."""
    if any(keyword.arg is None for keyword in maker.keywords):
        return None
    given, more = argument_of(maker, "autoreset_mode"), argument_of(maker, "vector_kwargs")
    if isinstance(more, ast.Dict):
        named = {key.value: value for key, value in zip(more.keys, more.values, strict=True)
                 if isinstance(key, ast.Constant)}  # fmt: skip
        if len(named) != len(more.keys):
            return None
        given = named.get("autoreset_mode", given)
    elif more is not None:
        return None
    if given is None:
        return "next_step"
    word = given.attr if isinstance(given, ast.Attribute) else str(getattr(given, "value", ""))
    known = {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}
    return known.get(word.lower().replace("_", ""))


def _mentions_final(script: Script) -> bool:
    """Whether a script asks for true final observations anywhere."""
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _FINAL for node in script.nodes
    )


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
            if step.loop not in around or any(isinstance(node, ast.If | ast.IfExp) for node in _within(around, step)):
                continue
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            names = {name for argument in given for name in _names(argument)}
            is_valid_given = argument_of(call, "valid", _ADDS_VALID_AT) is not None
            if {step.obs, step.reward} <= names and not is_valid_given:
                yield call


def _within(around: list[ast.AST], step: _Step) -> list[ast.AST]:
    """Return what stands between a node and the loop of a step."""
    return around[: around.index(step.loop)]
