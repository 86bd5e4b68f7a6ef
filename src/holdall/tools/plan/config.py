"""Settings of a run to plan, from options and from TOML files.

Input: the values of command-line options, or the path of a file. Output: settings by name, which
`stand_in.describe_run` checks. An unknown key in a file raises an error that names the key.
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

OPTIONS = {
    "action",
    "algo",
    "batch_size",
    "budget",
    "capacity",
    "device",
    "env",
    "frame_stack",
    "memory",
    "n_steps",
    "name",
    "num_envs",
    "obs",
    "policy",
    "policy_kwargs",
    "start_method",
    "total_timesteps",
    "uses_holdall",
    "vec_env",
    "vram",
    "wrapper",
}
"""Names of all settings."""
_OTHER_NAMES = {"n_envs": "num_envs", "n_timesteps": "total_timesteps", "buffer_size": "capacity"}
"""Names of Stable-Baselines3 and rl-zoo for these settings."""
_MAX_FILE_BYTES = 4 * 2**20


def parse_count(value: Any, argument: str) -> int:
    """Return a whole number that is written as 400000, 4e5, 400_000 or 400,000."""
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number, as in 400000, 4e5 or 400_000.")
    return int(number)


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
    """Read a TOML file for `holdall plan`."""
    data = _load(path)
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in data.items()}
    unknown = sorted(set(renamed) - OPTIONS)
    if unknown:
        close = [match for name in unknown for match in get_close_matches(name, sorted(OPTIONS), n=1)]
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ArgumentError(f"{path} has unknown keys: {', '.join(unknown)}.{hint} Use {', '.join(sorted(OPTIONS))}.")
    return renamed


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
