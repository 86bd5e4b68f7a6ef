"""Settings of a run to plan, from TOML files and from texts of the command line.

Input: the path of a file, or texts. Output: values by the names of `settings.SETTINGS`, which `stand_in.describe_run`
checks. An unknown key in a file raises an error that names the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan.environments import parse_observation
from holdall.tools.plan.settings import SETTINGS, find_setting, parse_count

_MAX_FILE_BYTES = 4 * 2**20


def parse_changes(texts: Sequence[str]) -> dict[str, int]:
    """Return the numbers that texts such as `buffer_size=200000` set, by name."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--set ({text}) must be written NAME=VALUE, as in buffer_size=200000.")
        changes[name.strip()] = parse_count(value, f"--set {name.strip()}")
    return changes


def read_observation(given: Any) -> spaces.Space[Any]:
    """Return the space that is described by one text, by a list of texts NAME=SPACE, or by a table of texts by name."""
    if isinstance(given, Mapping):
        return parse_observation([f"{name}={text}" for name, text in given.items()])
    if isinstance(given, list | tuple):
        return parse_observation([str(text) for text in given])
    return parse_observation([str(given)])


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a TOML file for `holdall plan`. Return the values by the names of `SETTINGS`."""
    values = {}
    unknown = []
    for name, value in _load(path).items():
        setting = find_setting(name)
        if setting is None:
            unknown.append(name)
        else:
            values[setting.name] = value
    if unknown:
        known = sorted(SETTINGS)
        close = [match for name in unknown for match in get_close_matches(name, known, n=1)]
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ArgumentError(f"{path} has unknown keys: {', '.join(sorted(unknown))}.{hint} Use {', '.join(known)}.")
    return values


def _load(path: Path) -> Mapping[str, Any]:
    if path.suffix in {".yml", ".yaml"}:
        raise ArgumentError(
            f"file ({path}) is YAML. Write it as TOML, or plan the command that reads it: "
            "holdall plan -- python -m rl_zoo3.train --algo dqn --env CartPole-v1"
        )
    try:
        if path.exists() and not path.is_file():
            raise ArgumentError(f"file ({path}) is not a regular file. Name a TOML file.")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ArgumentError(f"{path} is larger than {_MAX_FILE_BYTES:,} bytes. Name a configuration file.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"file ({path}) cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file ({path}) is not UTF-8 text. Save it as UTF-8.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"file ({path}) is not TOML: {error}") from error
