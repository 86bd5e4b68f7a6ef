"""The runs of a YAML file of hyperparameters, in the words of rl-baselines3-zoo or of `holdall plan`.

In:  YAML text: entries by environment, each with the arguments of one algorithm; or one flat entry with `algo`.
Out: one ConfiguredRun for each entry whose algorithm is known.
Nothing in the file is executed: strings such as "dict(net_arch=[64])" are read as syntax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from holdall.errors import HoldallError, MissingPackageError
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import (
    UNKNOWN,
    ConfiguredRun,
    Environments,
    LearnCall,
    Reference,
    Setting,
    SpaceInfo,
    algorithm_by_zoo_name,
    whole,
)
from holdall.tools.lint.source.spaces import atari_space, space_of
from holdall.tools.plan.config import read_literal
from holdall.tools.plan.environments import parse_observation
from holdall.tools.plan.spec import Algorithm

_ALGORITHM_KEYS = ("algo", "algorithm", "model_class")
_MARKS = {"capacity", "obs", "policy", "n_timesteps", "buffer_size", "n_steps", "batch_size", "learning_rate"}
_MARKED = re.compile(rf"(?:^|[{{,])[\s\"']*(?:{'|'.join(sorted(_MARKS))})[\"']?\s*:", re.MULTILINE)
# Keys of the zoo that are not arguments of an algorithm.
_NOT_ARGUMENTS = {"n_timesteps", "n_envs", "frame_stack", "env_wrapper", "vec_env_wrapper", "normalize", "callback"}
# The words of `holdall plan` for what the zoo, or an algorithm, calls otherwise.
_RENAMED = {
    "buffer_class": "replay_buffer_class",
    "capacity": "buffer_size",
    "num_envs": "n_envs",
    "total_timesteps": "n_timesteps",
}
_HER = "stable_baselines3.her.her_replay_buffer.HerReplayBuffer"

Entry = Mapping[str, Setting]


class YamlError(ValueError):
    """The text is no YAML; `place` says where."""

    def __init__(self, message: str, place: SourceRange) -> None:
        super().__init__(message)
        self.place = place


def may_hold_runs(text: str) -> bool:
    """Whether a YAML file has a key that an entry of hyperparameters has; a site's or a container's has none."""
    return _MARKED.search(text) is not None


def read_runs(text: str, path: str) -> tuple[ConfiguredRun, ...]:
    """Return the runs of a file; none if it holds no hyperparameters."""
    document, stem = _document(text, path) or {}, PurePath(path).stem
    if _is_entry(document) and (algorithm := _algorithm(document, stem)):
        entry = {_RENAMED.get(name, name): value for name, value in document.items()}
        return (_run(stem, algorithm, entry),)
    entries = [(title, one.value) for title, one in document.items() if isinstance(one.value, dict)]
    known = [(title, _algorithm(entry, stem), entry) for title, entry in entries if _is_entry(entry)]
    return tuple(_run(title, algorithm, entry) for title, algorithm, entry in known if algorithm)


def _is_entry(entry: Entry) -> bool:
    return bool(_MARKS & entry.keys()) and not all(isinstance(value.value, dict) for value in entry.values())


def _algorithm(entry: Entry, stem: str) -> Algorithm | None:
    return algorithm_by_zoo_name(next((str(entry[key].value) for key in _ALGORITHM_KEYS if key in entry), stem))


def _run(title: str, algorithm: Algorithm, entry: Entry) -> ConfiguredRun:
    place = min(setting.place for setting in entry.values())
    given = {name: _converted(name, setting) for name, setting in entry.items() if name not in _NOT_ARGUMENTS}
    if "handle_timeout_termination" in entry:
        handles = entry["handle_timeout_termination"]
        given["replay_buffer_kwargs"] = replace(handles, value={"handle_timeout_termination": handles.value})
    steps = entry.get("n_timesteps")
    learns = (LearnCall(steps, (), steps.place),) if steps else ()
    return ConfiguredRun(title, algorithm, given, _environments(entry, place), learns, place)


def _environments(entry: Entry, place: SourceRange) -> Environments:
    count, stack = _value(entry, "n_envs", 1), whole(_value(entry, "frame_stack", 1))
    observation = _observation(entry, place)
    if stack is None or stack < 1:
        return Environments(count=count, place=place)
    return Environments(
        count, str(_value(entry, "vec_env", "single" if count == 1 else "dummy")), _value(entry, "start_method", None),
        observation.stacked(stack) if observation else None, _space(entry, "action"), stack, place=place,
    )  # fmt: skip


def _value(entry: Entry, name: str, default: object) -> object:
    return entry[name].value if name in entry else default


def _space(entry: Entry, name: str) -> SpaceInfo | None:
    """Return a space that is written as `holdall plan` takes it: `84x84x3:uint8`, or several of them by key."""
    if name not in entry:
        return None
    given = _plain(entry[name].value)
    if isinstance(given, dict):
        texts = [f"{key}={text}" for key, text in given.items()]
    else:
        texts = [str(text) for text in (given if isinstance(given, list) else [given])]
    try:
        return space_of(parse_observation(texts, name), name, entry[name].place)
    except HoldallError:
        return None


def _observation(entry: Entry, place: SourceRange) -> SpaceInfo | None:
    """Return the observations that are written out, or that wrappers settle whatever the environment: Atari's."""
    if "obs" in entry:
        return _space(entry, "obs")
    wrapper = "stable_baselines3.common.atari_wrappers.AtariWrapper"
    is_atari = _value(entry, "env_wrapper", None) in (wrapper, [wrapper])
    return atari_space(place) if is_atari and _value(entry, "normalize", False) is False else None


def _converted(name: str, setting: Setting) -> Setting:
    """Return a value as the zoo hands it to the algorithm."""
    value = _plain(setting.value)
    if name == "replay_buffer_class" and isinstance(value, str):
        value = Reference(_HER) if value == "HerReplayBuffer" else UNKNOWN
    elif name in {"policy_kwargs", "replay_buffer_kwargs"} and isinstance(value, str):
        value = _expression(value)
    return Setting(value, setting.place)


def _plain(value: object) -> object:
    """Return a mapping of settings as a mapping of their values."""
    if not isinstance(value, dict):
        return value
    return {key: inner.value if isinstance(inner, Setting) else inner for key, inner in value.items()}


def _expression(text: str) -> object:
    """Return what a string of Python is, if it is constant."""
    try:
        return read_literal(text, "value")
    except HoldallError:
        return UNKNOWN


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
        at, mark = SourceRange.whole(path), error.problem_mark
        if mark:
            at = SourceRange(path, mark.line + 1, mark.column + 1, mark.line + 1, mark.column + 2)
        raise YamlError(str(error.problem or error.context), at) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(str(error).splitlines()[0], SourceRange.whole(path)) from error


def _mapping(loader: Any, node: Any, path: str, depth: int) -> dict[str, Setting]:
    """Return a mapping node's entries, merge keys included; the entries of entries keep their places too."""
    loader.flatten_mapping(node)
    entries = {}
    for key, value in node.value:
        is_nested = depth > 1 and value.tag.endswith(":map")
        content = _mapping(loader, value, path, depth - 1) if is_nested else loader.construct_object(value, deep=True)
        start, end = value.start_mark, value.end_mark
        place = SourceRange(path, start.line + 1, start.column + 1, end.line + 1, end.column + 1)
        entries[str(key.value)] = Setting(content, place)
    return entries
