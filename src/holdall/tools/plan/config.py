"""Read the settings of a run to plan: options, and files (TOML, YAML, hyperparameters of rl-zoo).

In:  values by option, or a path.  Out: settings by name, which `stand_in.describe_run` checks.
Text is never evaluated. An unknown key in one of holdall's own files is refused by name.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gymnasium import spaces

from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.plan.environments import parse_observation
from holdall.tools.plan.spec import ALGORITHMS, REPLAY_CLASSES

OPTIONS = {
    "action",
    "algo",
    "batch_size",
    "budget",
    "buffer_class",
    "capacity",
    "device",
    "env",
    "frame_stack",
    "handle_timeout_termination",
    "memory",
    "n_steps",
    "name",
    "num_envs",
    "obs",
    "optimize_memory_usage",
    "policy",
    "policy_kwargs",
    "start_method",
    "total_timesteps",
    "uses_holdall",
    "vec_env",
    "vram",
    "wrapper",
}
_ZOO_NAMES = {"n_envs": "num_envs", "n_timesteps": "total_timesteps", "buffer_size": "capacity"}
_ZOO_NAMES |= {name: name for name in ("batch_size", "n_steps", "policy", "frame_stack", "optimize_memory_usage")}
_MOST_BYTES = 4 * 2**20  # Of a configuration file.


def parse_count(value: Any, argument: str) -> int:
    """Read a count: 400000, 4e5, 400_000 or 2**12 written out as a number."""
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number, as in 400000, 4e5 or 400_000")
    return int(number)


def parse_changes(texts: Sequence[str]) -> dict[str, int]:
    """Read `buffer_size=200000` and the like."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--set ({text}) must be written NAME=VALUE, as in buffer_size=200000.")
        changes[name.strip()] = parse_count(value, f"--set {name.strip()}")
    return changes


def read_observation(given: Any) -> spaces.Space[Any]:
    """Read observations: one space as text, a list of named ones, or a table of them."""
    if isinstance(given, Mapping):
        return parse_observation([f"{name}={text}" for name, text in given.items()])
    if isinstance(given, list | tuple):
        return parse_observation([str(text) for text in given])
    return parse_observation([str(given)])


def read_config_file(path: Path, algo: str = "", env: str = "") -> dict[str, Any]:
    """Read a file of holdall, or the entry of an rl-zoo file that `algo` and `env` select."""
    data = _load(path)
    if data and all(isinstance(entry, Mapping) for entry in data.values()) and not set(data) <= OPTIONS:
        return _zoo_entry(path, data, algo, env)
    renamed = {_ZOO_NAMES.get(name, name): value for name, value in data.items()}
    unknown = sorted(set(renamed) - OPTIONS)
    if unknown:
        close = [match for name in unknown for match in get_close_matches(name, sorted(OPTIONS), n=1)]
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise ArgumentError(f"{path} has the keys {unknown}; {hint}holdall plan knows {sorted(OPTIONS)}")
    return renamed


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise ArgumentError(f"file ({path}) is not a regular file. Name a TOML or YAML file.")
        if path.stat().st_size > _MOST_BYTES:
            raise ArgumentError(f"{path} is larger than {_MOST_BYTES} bytes. Name a configuration file.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"file ({path}) cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file ({path}) is not UTF-8 text; save it as such") from error
    data = _parsed(path, text)
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ArgumentError(f"file ({path}) must be a table of names and values")
    return data


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ArgumentError(f"file ({path}) is not TOML: {error}") from error
    try:
        import yaml  # noqa: PLC0415 an extra
    except ImportError as error:
        raise MissingPackageError(f"{path} is YAML; pip install 'holdall[yaml]', or write it as TOML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentError(f"file ({path}) is not YAML: {' '.join(str(error).split())}") from error


def _zoo_entry(path: Path, data: Mapping[str, Any], algo: str, env: str) -> dict[str, Any]:
    """Return the settings in one environment's entry of rl-zoo's hyperparameters."""
    algo = algo or path.stem.lower()
    if algo not in ALGORITHMS:
        raise ArgumentError(f"algo ({algo!r}) is none of {', '.join(ALGORITHMS)}; name it with --algo")
    plain = env.rpartition(":")[2]
    key = env if env in data else plain if plain in data else "atari" if "NoFrameskip" in plain else ""
    if key not in data:
        raise ArgumentError(
            f"env ({env!r}) is not in {path}; name one of its {len(data)} entries with --env: "
            f"{', '.join(list(data)[:8])} ..."
        )
    entry = data[key]
    found: dict[str, Any] = {"algo": algo, "name": f"rl-zoo {algo} {key}"}
    found |= {ours: entry[theirs] for theirs, ours in _ZOO_NAMES.items() if theirs in entry}
    if key != "atari":
        found["env"] = env
    if "atari" in str(entry.get("env_wrapper", "")).lower():
        found |= {"wrapper": "atari"} | ({"obs": "84x84x1:uint8"} if key == "atari" else {})
    if entry.get("policy_kwargs"):
        found["policy_kwargs"] = read_literal(entry["policy_kwargs"], "policy_kwargs")
    replay = read_literal(entry.get("replay_buffer_kwargs") or {}, "replay_buffer_kwargs")
    if "handle_timeout_termination" in replay:
        found["handle_timeout_termination"] = bool(replay["handle_timeout_termination"])
    if str(entry.get("replay_buffer_class", "")) in REPLAY_CLASSES:
        found["buffer_class"] = str(entry["replay_buffer_class"])
    return found


def read_literal(text: Any, argument: str) -> Any:
    """Read a value that is written as Python: numbers, lists, dicts and names. Nothing is evaluated."""
    if not isinstance(text, str):
        return text
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArgumentError(
            f"{argument} ({text!r}) is no plain value ({error}); write numbers, lists and dicts"
        ) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return _called(node)
    if isinstance(node, ast.Attribute | ast.Name):
        return node.attr if isinstance(node, ast.Attribute) else node.id
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("'**' is not data")
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _number(node.left) * _number(node.right)
    return ast.literal_eval(node)


def _called(node: ast.Call) -> dict[str, Any]:
    if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
        raise ValueError(f"{ast.unparse(node)} is a call")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("'**' is not data")
    return {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _number(node: ast.expr) -> float:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{ast.unparse(node)} is no number")  # noqa: TRY004 as every other refusal here
    return value
