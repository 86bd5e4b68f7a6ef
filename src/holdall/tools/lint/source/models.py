"""The runs of models: those that a script constructs, with their environments and calls of `learn`; and a live model.

In:  a parsed script, or a model of Stable-Baselines3 and what `learn` will get.  Out: one ConfiguredRun a model.
Stable-Baselines3 is not imported here: a live model brings it along.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import (
    UNKNOWN,
    Callback,
    ConfiguredRun,
    Environments,
    LearnCall,
    Reference,
    Setting,
    algorithm_by_import,
    whole,
)
from holdall.tools.lint.source.environments import EnvironmentReader, space_of
from holdall.tools.lint.source.evaluate import Evaluator
from holdall.tools.lint.source.script import Script, argument_of
from holdall.tools.plan.environments import read_vec_env
from holdall.tools.plan.spec import ALGORITHM_CLASSES, Algorithm

_DEEPEST = 4  # names that stand for names that ...

# The leading arguments of Stable-Baselines3's callbacks.
_CALLBACK_ARGUMENTS = {
    "CheckpointCallback": ("save_freq", "save_path"),
    "EvalCallback": ("eval_env", "callback_on_new_best", "callback_after_eval", "n_eval_episodes", "eval_freq"),
    "MaskableEvalCallback": ("eval_env", "callback_on_new_best", "callback_after_eval", "n_eval_episodes", "eval_freq"),
    "EveryNTimesteps": ("n_steps", "callback"),
    "CallbackList": ("callbacks",),
}
_CALLBACK_SETTINGS = ("save_freq", "eval_freq", "save_replay_buffer")
_POLICIES = {
    "MultiInputActorCriticPolicy": "MultiInputPolicy",
    "ActorCriticCnnPolicy": "CnnPolicy",
    "ActorCriticPolicy": "MlpPolicy",
}


class TrainingReader:
    """What one script trains."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.evaluator = Evaluator(script)
        self._environments = EnvironmentReader(self.evaluator)

    @cached_property
    def runs(self) -> tuple[ConfiguredRun, ...]:
        """Every model that the script constructs."""
        return tuple(self._run(call, made) for call, made in self.constructions)

    @cached_property
    def constructions(self) -> list[tuple[ast.Call, Algorithm]]:
        """The calls that construct a model."""
        found = [(call, algorithm_by_import(self.script.dotted(call.func))) for call in self.script.calls]
        return [(call, algorithm) for call, algorithm in found if algorithm is not None]

    @cached_property
    def learn_calls(self) -> list[tuple[ast.Call, ast.Call | None]]:
        """The calls of `learn`, each with the construction of its model if that is certain."""
        return [(call, self.constructed(model)) for call, model in self.script.method_calls("learn")]

    def constructed(self, node: ast.expr | None) -> ast.Call | None:
        """Return the call that constructed the model that an expression means."""
        match node:
            case ast.Call() if algorithm_by_import(self.script.dotted(node.func)):
                return node
            case ast.Call(func=ast.Attribute(attr="learn", value=model)):
                return self.constructed(model)
            case ast.Name():
                return self.constructed(self.script.assigned(node))
            case ast.Attribute():
                return self.constructed(self.evaluator.attribute_node(node))
        return None

    def environments(self, node: ast.expr | None) -> Environments:
        """Describe the environments that an expression makes."""
        return self._environments.read(node)

    def settings(self, call: ast.Call, positional: tuple[str, ...]) -> tuple[dict[str, Setting], bool]:
        """Return the arguments of a call by name, and whether there are some that cannot be read."""
        has_more = len(call.args) > len(positional) or any(isinstance(a, ast.Starred) for a in call.args)
        given: dict[str, Setting] = {}
        for name, argument in zip(positional, call.args, strict=False):
            if isinstance(argument, ast.Starred):
                break
            given[name] = self._setting(argument)
        for keyword in call.keywords:
            unpacked = None if keyword.arg else self.evaluator.value(keyword.value)
            if keyword.arg:
                given[keyword.arg] = self._setting(keyword.value)
            elif isinstance(unpacked, dict):
                place = self.script.place(keyword.value)
                given |= {str(name): Setting(value, place) for name, value in unpacked.items()}
            else:
                has_more = True
        return given, has_more

    def _setting(self, node: ast.expr) -> Setting:
        divisors = tuple(number for number in self._divisors(node) if number is not None)
        return Setting(self.evaluator.value(node), self.script.place(node), divisors=divisors)

    def _divisors(self, node: ast.expr, depth: int = 0) -> Iterator[int | None]:
        """Yield what an expression, or one that it names, divides by."""
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.FloorDiv | ast.Div):
                yield whole(self.evaluator.value(part.right))
            elif isinstance(part, ast.Name) and depth < _DEEPEST:
                value = self.script.assigned(part)
                if value is not None:
                    yield from self._divisors(value, depth + 1)

    def _run(self, call: ast.Call, algorithm: Algorithm) -> ConfiguredRun:
        given, has_more = self.settings(call, algorithm.positional)
        given.setdefault("policy", Setting(UNKNOWN, self.script.place(call)))
        learns = tuple(self._learn(learn, call) for learn, made in self.learn_calls if made is call)
        # A call on a model that is not certain may be this run's, so the steps are not known.
        places = [self.script.place(learn) for learn, made in self.learn_calls if made is None]
        learns += tuple(LearnCall(Setting(UNKNOWN, at), (), at, reset_num_timesteps=UNKNOWN) for at in places)
        environments, place = self.environments(argument_of(call, "env", 1)), self.script.place(call)
        return ConfiguredRun(algorithm.name, algorithm, given, environments, learns, place, has_more)

    # ------------------------------------------------------------ learn and its callbacks

    def _learn(self, call: ast.Call, model: ast.Call) -> LearnCall:
        given, has_more = self.settings(call, ("total_timesteps", "callback"))
        place = self.script.place(call)
        loop = self.script.loop(call)
        return LearnCall(
            given.get("total_timesteps", Setting(UNKNOWN, place)),
            tuple(self._callbacks(argument_of(call, "callback", 1))),
            place,
            loop is not None and loop not in self.script.ancestors(model),
            given["reset_num_timesteps"].value if "reset_num_timesteps" in given else UNKNOWN if has_more else True,
        )

    def _callbacks(self, node: ast.expr | None) -> Iterator[Callback]:
        """Yield the callbacks that an expression holds, as far as they are known."""
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items):
                for item in items:
                    yield from self._callbacks(item)
            case ast.Name():
                yield from self._callbacks(self.script.assigned(node))
            case ast.Attribute():
                yield from self._callbacks(self.evaluator.attribute_node(node))
            case ast.Call():
                yield from self._callback(node)

    def _callback(self, call: ast.Call) -> Iterator[Callback]:
        kind = self.script.dotted(call.func).rpartition(".")[2]
        if not kind:
            return
        given, _ = self.settings(call, _CALLBACK_ARGUMENTS.get(kind, ()))
        evaluated = argument_of(call, "eval_env", 0) if "Eval" in kind else None
        yield Callback(kind, given, self.script.place(call), self.environments(evaluated) if evaluated else None)
        if kind == "CallbackList":
            yield from self._callbacks(argument_of(call, "callbacks", 0))


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
