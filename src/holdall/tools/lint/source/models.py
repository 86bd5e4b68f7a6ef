"""The runs of models: those that a script constructs, with their environments and calls of `learn`; and a live model.

In:  a parsed script and the repository around it, or a model of Stable-Baselines3 and what `learn` will get.
Out: one ConfiguredRun a model, and the buffers that are no part of a model.
Stable-Baselines3 is not imported here: a live model brings it along.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from holdall.errors import ArgumentError
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import (
    UNKNOWN,
    Callback,
    ConfiguredRun,
    Environments,
    KnownLength,
    LearnCall,
    OneOf,
    PlainBuffer,
    Reference,
    Setting,
    SpaceInfo,
    algorithm_by_import,
    whole,
)
from holdall.tools.lint.source.buffers import plain_buffers
from holdall.tools.lint.source.environments import environment_of
from holdall.tools.lint.source.interpreter import Interpreter, ProgramEvent
from holdall.tools.lint.source.repository import Repository
from holdall.tools.lint.source.script import Script, subtree
from holdall.tools.lint.source.spaces import by_id, space_of
from holdall.tools.lint.source.values import (
    BoundMethod,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    ModuleValue,
    TableValue,
    candidates_of,
    known_items,
    length_of,
)
from holdall.tools.plan.spec import ALGORITHM_CLASSES, Algorithm

_DEEPEST = 4  # names that stand for names that ...
_MOST_RUNS = 24

# The leading arguments of Stable-Baselines3's callbacks.
_CALLBACK_ARGUMENTS = {
    "CheckpointCallback": ("save_freq", "save_path"),
    "EvalCallback": ("eval_env", "callback_on_new_best", "callback_after_eval", "n_eval_episodes", "eval_freq"),
    "MaskableEvalCallback": ("eval_env", "callback_on_new_best", "callback_after_eval", "n_eval_episodes", "eval_freq"),
    "EveryNTimesteps": ("n_steps", "callback"),
    "CallbackList": ("callbacks",),
}
_BUFFER_ARGUMENTS = ("buffer_size", "observation_space", "action_space", "device", "n_envs", "optimize_memory_usage")
_CALLBACK_SETTINGS = ("save_freq", "eval_freq", "save_replay_buffer")
_POLICIES = {
    "MultiInputActorCriticPolicy": "MultiInputPolicy", "ActorCriticCnnPolicy": "CnnPolicy",
    "ActorCriticPolicy": "MlpPolicy",
}  # fmt: skip
_MAKES = re.compile(
    r"stable_baselines3|sb3_contrib|[Rr]eplay|deque|torchrl|tianshou|elegantrl"
    r"|\b(?:np|numpy|torch|th)\.(?:zeros|empty|ones|full)\b|(?:memory|buffer|transitions|experience)\w*\.append"
    r"|rl\.memory|cpprb|\.append\([(\[](?:self\.)?(?:\w*state|obs|frame|s,)"
)
"""A script without any of these makes no model and no buffer."""


def plain(value: Any) -> object:
    """Return a value as rules read it: constants, references, sequences of them."""
    match value:
        case OneOf():
            several = [plain(one) for one in value.values]
            return UNKNOWN if all(one is UNKNOWN for one in several) else OneOf(tuple(several), value.conditions)
        case tuple() | ListValue():
            items = known_items(value)
            inner = [UNKNOWN] if items is None else [plain(one) for one in items]
            if UNKNOWN in inner:
                length = length_of(value)
                return UNKNOWN if length is None else KnownLength(length)
            return tuple(inner) if isinstance(value, tuple) else inner
        case TableValue():
            return {key: plain(one) for key, one in value.items()} if value.is_complete else UNKNOWN
        case ClassValue() | FunctionValue():
            return Reference(value.node.name if isinstance(value, ClassValue) else value.name)
        case InstanceValue() | ModuleValue():
            return UNKNOWN
    return value if isinstance(value, int | float | str | bytes | None | Reference) else UNKNOWN


class TrainingReader:
    """What one script trains."""

    def __init__(self, script: Script, repository: Repository | None = None) -> None:
        self.script = script
        self._repository = repository or Repository(None)

    @cached_property
    def _makes(self) -> bool:
        """Whether the script may make a model or a buffer: it says so, or it runs what modules beside it say."""
        script = self.script
        is_said = _MAKES.search(script.text) is not None
        return is_said or (script.is_run and self._repository.imports_match(_MAKES, script.text, script.path))

    @cached_property
    def interpreter(self) -> Interpreter:
        """What followed the script; most scripts are never asked about."""
        interpreter = Interpreter(self.script, self._repository)
        interpreter.run()
        return interpreter

    def value(self, node: ast.expr | None) -> object:
        """Return what an expression of the script is, as far as it is certain, whenever it is reached."""
        return plain(self.interpreter.seen(node))

    def recorded(self, *what: str) -> list[ProgramEvent]:
        """Return what the program makes or does, once for each object and line."""
        made = [one for one in (self.interpreter.made if self._makes else ()) if one.what in what]
        return list({(id(one.value), one.what, one.node): one for one in made}.values())

    @cached_property
    def buffers(self) -> list[PlainBuffer]:
        """The buffers that are no part of a model."""
        return plain_buffers(self.interpreter) if self._makes else []

    @cached_property
    def runs(self) -> tuple[ConfiguredRun, ...]:
        """Every model that the script constructs, once for each environment that it may get."""
        found: dict[str, ConfiguredRun] = {}
        for made in self.recorded("model", "loaded"):
            algorithm = algorithm_by_import(made.detail.get("dotted", made.value.kind))
            if algorithm is None:
                continue
            for run in self._runs_of(made, algorithm):
                env, taught = run.environments, [learn.place for learn in run.learns]
                found.setdefault(repr((run.place, run.condition, run.given, env.count, env.observation, taught)), run)
        return tuple(found.values())[:_MOST_RUNS]

    @cached_property
    def buffers_as_runs(self) -> tuple[ConfiguredRun, ...]:
        """The replay buffers of Stable-Baselines3 that the script makes itself, as runs that have only a buffer."""
        found = []
        for made in self.recorded("buffer"):
            kind = made.value.kind
            if made.arguments and kind.startswith("stable_baselines3") and kind.endswith("ReplayBuffer"):
                given, has_more = self.settings(made.arguments, _BUFFER_ARGUMENTS)
                handles = plain(made.arguments.get(None, "handle_timeout_termination", True))
                place = self.interpreter.place(made.node)
                given["replay_buffer_kwargs"] = Setting({"handle_timeout_termination": handles}, place)
                seen = made.arguments.get(1, "observation_space")
                env = Environments(observation=seen if isinstance(seen, SpaceInfo) else None)
                path = " and ".join(made.path)
                found.append(ConfiguredRun("buffer", ALGORITHM_CLASSES["DQN"], given, env, (), place, has_more, path))
        return tuple(found)

    @cached_property
    def learn_calls(self) -> list[tuple[ast.Call, ast.AST | None]]:
        """The calls of `learn`, each with the construction of its model if that is certain."""
        taught = {made.node: made.value.node for made in self.recorded("learn")}
        return [(call, taught.get(call)) for call, _ in self.script.method_calls("learn")]

    def called(self, call: ast.Call) -> ast.AST | None:
        """Return the function of the repository that a call calls, if it is known."""
        if isinstance(call.func, ast.Name) and call.func.id in self.script.functions:
            return self.script.functions[call.func.id]
        value = self.interpreter.seen(call.func) if self._makes else None
        function = value.function if isinstance(value, BoundMethod) else value
        return function.node if isinstance(function, FunctionValue) else None

    def constructed(self, node: ast.expr | None) -> ast.AST | None:
        """Return the call that constructed the model that an expression means."""
        value = self.interpreter.seen(node)
        models = {id(made.value): made.node for made in self.recorded("model")}
        return next((models[id(one)] for one, _ in candidates_of(value) if id(one) in models), None)

    def environments(self, node: ast.expr | None) -> Environments:
        """Describe the environments that an expression makes."""
        return self._described(self.interpreter.seen(node))

    def _described(self, value: Any) -> Environments:
        if isinstance(value, str):
            seen, acted, steps = by_id(value)
            return Environments(1, "single", None, seen, acted, episode_steps=steps, env_id=value)
        return environment_of(self.interpreter, value) or Environments()

    def settings(self, made: Any, positional: tuple[str, ...]) -> tuple[dict[str, Setting], bool]:
        """Return the arguments of a call by name, and whether there are some that cannot be read."""
        has_more = len(made.values) > len(positional) or not made.is_complete
        given = {}
        for name, (value, node) in made.by_name(positional).items():
            own = node if self.interpreter.was_reached(node) else None
            place = self.interpreter.place(own or made.node)
            divisors = tuple(self._divisors(own)) if own is not None else None
            given[name] = Setting(plain(value), place, divisors=divisors)
        return given, has_more

    def _divisors(self, node: ast.AST, depth: int = 0) -> Iterator[int]:
        """Yield what an expression, or one that it names, divides by; 0 for what is not known."""
        for part in subtree(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.FloorDiv | ast.Div):
                yield whole(self.value(part.right)) or 0
            elif isinstance(part, ast.Name | ast.Attribute) and depth < _DEEPEST:
                value = self.script.assigned(part) if isinstance(part, ast.Name) else self.script.attribute_node(part)
                if value is not None:
                    yield from self._divisors(value, depth + 1)

    def _runs_of(self, made: ProgramEvent, algorithm: Algorithm) -> Iterator[ConfiguredRun]:
        given, has_more = self.settings(made.arguments, algorithm.positional) if made.what == "model" else ({}, True)
        place = self.interpreter.place(made.node)
        given.setdefault("policy", Setting(UNKNOWN, place))
        learns = [one for one in self.recorded("learn") if one.value is made.value]
        teaches = tuple(self._learn(one, made) for one in learns)
        followed = {one.node for one in self.recorded("learn")}
        places = [self.script.place(call) for call, _ in self.script.method_calls("learn") if call not in followed]
        # A call on a model that is not certain may be this run's, so the steps are not known.
        teaches += tuple(LearnCall(Setting(UNKNOWN, at), (), at, reset_num_timesteps=UNKNOWN) for at in places)
        path = " and ".join(made.path)
        for env, condition in candidates_of(made.value.attributes.get("env", UNKNOWN)):
            if env is None:
                continue
            both = " and ".join(dict.fromkeys(filter(None, (path, condition))))
            yield ConfiguredRun(algorithm.name, algorithm, given, self._described(env), teaches, place, has_more, both)

    # ------------------------------------------------------------ learn and its callbacks

    def _learn(self, made: ProgramEvent, model: ProgramEvent) -> LearnCall:
        given, has_more = self.settings(made.arguments, ("total_timesteps", "callback"))
        place = self.interpreter.place(made.node)
        loop = self.script.loop(made.node)
        return LearnCall(
            given.get("total_timesteps", Setting(UNKNOWN, place)),
            tuple(self._callbacks(made.arguments.get(1, "callback", None) if made.arguments else None)),
            place,
            loop is not None and loop not in self.script.ancestors(model.node) and not _is_item(made.node, loop),
            given["reset_num_timesteps"].value if "reset_num_timesteps" in given else UNKNOWN if has_more else True,
        )

    def _callbacks(self, value: Any, depth: int = 0) -> Iterator[Callback]:
        """Yield the callbacks that a value holds, as far as they are known."""
        for one, _ in candidates_of(value):
            if isinstance(one, tuple | ListValue) and depth < _DEEPEST:
                for item in one if isinstance(one, tuple) else (*one.items, *one.added):
                    yield from self._callbacks(item, depth + 1)
            elif isinstance(one, InstanceValue) and "call" in one.arguments:
                yield from self._callback(one, depth)

    def _callback(self, made: InstanceValue, depth: int) -> Iterator[Callback]:
        kind, call = made.arguments.get("kind", made.kind).rpartition(".")[2], made.arguments["call"]
        given, _ = self.settings(call, _CALLBACK_ARGUMENTS.get(kind, ()))
        evaluated = call.get(0, "eval_env", None) if "Eval" in kind else None
        environments = self._described(evaluated) if evaluated is not None else None
        yield Callback(kind, given, self.interpreter.place(made.node), environments)
        if kind in {"CallbackList", "EveryNTimesteps"} and depth < _DEEPEST:
            yield from self._callbacks(call.get(0 if kind == "CallbackList" else 1, "callbacks", None), depth + 1)


def _is_item(call: ast.AST, loop: ast.AST) -> bool:
    """Whether a method is called on what a loop runs over: another model in every round."""
    owner = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    targets = subtree(loop.target) if isinstance(loop, ast.For) else []
    names = {one.id for one in targets if isinstance(one, ast.Name)}
    return owner is not None and any(isinstance(one, ast.Name) and one.id in names for one in subtree(owner))


def read_model(model: Any, total_timesteps: int | None = None, callbacks: Iterable[Any] = ()) -> ConfiguredRun:
    """Describe a model."""
    named = [kind.__name__ for kind in type(model).__mro__ if kind.__name__ in ALGORITHM_CLASSES]
    algorithm = ALGORITHM_CLASSES[named[0]] if named else None
    if algorithm is None or not hasattr(model, "observation_space"):
        raise ArgumentError(
            f"model ({type(model).__name__}) must be a model of Stable-Baselines3: one of "
            f"{', '.join(ALGORITHM_CLASSES)}"
        )
    place = SourceRange(f"live {type(model).__name__}", 0, 0, 0, 0)
    steps = UNKNOWN if total_timesteps is None else total_timesteps
    learn = LearnCall(Setting(steps, place), tuple(_callbacks(callbacks, place)), place)
    given = {name: Setting(value, place) for name, value in _arguments(model, algorithm)}
    return ConfiguredRun(type(model).__name__, algorithm, given, _environments(model, place), (learn,), place)


def _arguments(model: Any, algorithm: Algorithm) -> Iterator[tuple[str, object]]:
    for name in algorithm.defaults:
        value: Any = getattr(model, name, UNKNOWN)
        if name == "train_freq" and hasattr(value, "frequency"):
            value = (value.frequency, value.unit.value)
        elif name == "device":
            value = str(value)
        elif name.endswith("_class") and isinstance(value, type):
            value = _buffer_class(value)
        yield name, value
    policy = type(getattr(model, "policy", None)).__name__
    yield "policy", _POLICIES.get(policy, policy)


def _buffer_class(kind: type) -> object:
    """Return a buffer class as an argument would give it: None where it is the library's own choice."""
    own = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "RolloutBuffer", "DictRolloutBuffer")
    is_own = kind.__module__.startswith("stable_baselines3")
    return None if is_own and kind.__name__ in own else Reference(f"{kind.__module__}.{kind.__name__}")


def _environments(model: Any, place: SourceRange) -> Environments:
    env = getattr(model, "env", None)
    facts = read_vec_env(env)
    return Environments(
        count=model.n_envs,
        vector=facts.kind,
        observation=space_of(model.observation_space, "observation_space", place),
        action=space_of(model.action_space, "action_space", place),
        stack=facts.frame_stack,
        place=place,
        origin=None if env is None else id(env),
    )


def _callbacks(callbacks: Iterable[Any], place: SourceRange) -> Iterator[Callback]:
    for callback in callbacks:
        held = {name: vars(callback)[name] for name in _CALLBACK_SETTINGS if name in vars(callback)}
        settings = {name: Setting(value, place) for name, value in held.items()}
        evaluated = getattr(callback, "eval_env", None)
        environments = None if evaluated is None else Environments(origin=id(evaluated))
        yield Callback(type(callback).__name__, settings, place, environments)
        yield from _callbacks(getattr(callback, "callbacks", ()), place)


class VecEnvFacts(NamedTuple):
    """How the environments of a live model run."""

    kind: str  # "dummy" or "subproc"; empty: neither
    start_method: str  # of the processes; empty: not known
    frame_stack: int


def read_vec_env(env: Any) -> VecEnvFacts:
    """Look through the wrappers of a vector environment of Stable-Baselines3."""
    kind, method, frames = "", "", 1
    while env is not None:
        match type(env).__name__:
            case "DummyVecEnv":
                kind = "dummy"
            case "SubprocVecEnv":
                kind = "subproc"
                method = getattr(getattr(env, "processes", [None])[0], "_start_method", None) or ""
            case "VecFrameStack":
                frames = int(env.stacked_obs.n_stack if hasattr(env, "stacked_obs") else env.n_stack)
        env = getattr(env, "venv", None)
    return VecEnvFacts(kind, method, frames)
