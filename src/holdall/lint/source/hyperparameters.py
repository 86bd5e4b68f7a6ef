"""The runs of a YAML file of hyperparameters, as rl-baselines3-zoo writes them.

In:  YAML text: entries by environment, each with the arguments of one algorithm; or one flat entry with `algo`.
Out: one Run for each entry whose algorithm is known. Nothing in the file is executed: strings such as
"dict(net_arch=[64])" are read as syntax.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from holdall.errors import MissingPackageError
from holdall.lint.algorithms import Algorithm, nicknamed
from holdall.lint.finding import Place
from holdall.lint.run import Environments, Learn, Run, Setting, Space
from holdall.lint.source.evaluate import Evaluator
from holdall.lint.source.script import Script
from holdall.lint.source.spaces import atari
from holdall.lint.values import UNKNOWN, Reference, whole

_ALGORITHM_KEYS = ("algo", "algorithm", "model_class")
_MARKS = frozenset({"policy", "n_timesteps", "buffer_size", "n_steps", "batch_size", "learning_rate"})
# Keys of the zoo that are not arguments of an algorithm.
_NOT_ARGUMENTS = frozenset(
    {"n_timesteps", "n_envs", "frame_stack", "env_wrapper", "vec_env_wrapper", "normalize", "callback"}
)
_HER = "stable_baselines3.her.her_replay_buffer.HerReplayBuffer"

Entry = Mapping[str, Setting]


class YamlError(ValueError):
    """The text is no YAML; `place` says where."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


def read_runs(text: str, path: str) -> tuple[Run, ...]:
    """Return the runs of a file; none if it holds no hyperparameters."""
    return tuple(_runs(text, path))


def _runs(text: str, path: str) -> Iterator[Run]:
    document = _document(text, path)
    if document is None:
        return
    stem = PurePath(path).stem
    if _is_entry(document) and (algorithm := _algorithm(document, stem)):
        yield _run(stem, algorithm, document)
        return
    for title, setting in document.items():
        entry = setting.value
        if isinstance(entry, dict) and _is_entry(entry) and (algorithm := _algorithm(entry, stem)):
            yield _run(title, algorithm, entry)


def _is_entry(entry: Entry) -> bool:
    return bool(_MARKS & entry.keys()) and not all(isinstance(value.value, dict) for value in entry.values())


def _algorithm(entry: Entry, stem: str) -> Algorithm | None:
    for key in _ALGORITHM_KEYS:
        if key in entry:
            return nicknamed(str(entry[key].value))
    return nicknamed(stem)


def _run(title: str, algorithm: Algorithm, entry: Entry) -> Run:
    place = min(setting.place for setting in entry.values())
    given = {name: _converted(name, setting) for name, setting in entry.items() if name not in _NOT_ARGUMENTS}
    steps = entry.get("n_timesteps", entry.get("total_timesteps"))
    learns = (Learn(steps, (), steps.place),) if steps else ()
    return Run(title, algorithm, given, _environments(entry, place), learns, place)


def _environments(entry: Entry, place: Place) -> Environments:
    count = entry["n_envs"].value if "n_envs" in entry else 1
    stack = whole(entry["frame_stack"].value) if "frame_stack" in entry else 1
    observation = _observation(entry, place)
    if stack is None or stack < 1:
        return Environments(count=count, place=place)
    return Environments(
        count=count,
        vector="single" if count == 1 else "dummy",
        observation=observation.stacked(stack) if observation else None,
        stack=stack,
        place=place,
    )


def _observation(entry: Entry, place: Place) -> Space | None:
    """Return the observations that wrappers settle, whatever the environment: Atari's."""
    wrappers = entry["env_wrapper"].value if "env_wrapper" in entry else None
    names = wrappers if isinstance(wrappers, list) else [wrappers]
    is_atari = names == ["stable_baselines3.common.atari_wrappers.AtariWrapper"]
    normalises = "normalize" in entry and entry["normalize"].value is not False
    return atari(place) if is_atari and not normalises else None


def _converted(name: str, setting: Setting) -> Setting:
    """Return a value as the zoo hands it to the algorithm."""
    value = setting.value
    if isinstance(value, dict):
        value = {key: inner.value if isinstance(inner, Setting) else inner for key, inner in value.items()}
    if name == "replay_buffer_class" and isinstance(value, str):
        value = Reference(_HER) if value == "HerReplayBuffer" else UNKNOWN
    elif name in {"policy_kwargs", "replay_buffer_kwargs"} and isinstance(value, str):
        value = _expression(value)
    return Setting(value, setting.place)


def _expression(text: str) -> object:
    """Return what a string of Python is, if it is constant."""
    try:
        script = Script.parse(f"value = ({text})", "hyperparameters")
    except (SyntaxError, ValueError, RecursionError):
        return UNKNOWN
    statement = script.tree.body[0]
    return Evaluator(script).value(statement.value) if isinstance(statement, ast.Assign) else UNKNOWN


# ------------------------------------------------------------ YAML with places


def _document(text: str, path: str) -> dict[str, Setting] | None:
    """Return the first document as nested mappings of settings; None if it is no mapping."""
    try:
        import yaml  # noqa: PLC0415  an extra: scripts and live models are read without it
    except ImportError as error:
        raise MissingPackageError(
            f"{path} is YAML, and PyYAML is not installed; run \"pip install 'holdall[yaml]'\""
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return _mapping(loader, node, path, depth=2) if isinstance(node, yaml.MappingNode) else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = Place(path, mark.line + 1, mark.column + 1, mark.line + 1, mark.column + 2) if mark else Place.whole(path)
        raise YamlError(str(error.problem or error.context), at) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(str(error).splitlines()[0], Place.whole(path)) from error


def _mapping(loader: Any, node: Any, path: str, depth: int) -> dict[str, Setting]:
    """Return a mapping node's entries, merge keys included; the entries of entries keep their places too."""
    loader.flatten_mapping(node)
    entries = {}
    for key, value in node.value:
        is_nested = depth > 1 and value.tag.endswith(":map")
        content = _mapping(loader, value, path, depth - 1) if is_nested else loader.construct_object(value, deep=True)
        start, end = value.start_mark, value.end_mark
        place = Place(path, start.line + 1, start.column + 1, end.line + 1, end.column + 1)
        entries[str(key.value)] = Setting(content, place)
    return entries
