"""Configurations from files: holdall's own in TOML or YAML, and rl-zoo's hyperparameters.

In:  a path.  Out: settings by the names of the command's options, all of them plain values.
Invariant: a key that is not known is refused by name, in a file of holdall's; in rl-zoo's it is left to the trainer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.plan.buffers import REPLAY_CLASSES
from holdall.plan.literal import read_literal
from holdall.plan.spec import ALGORITHMS

OPTIONS = {
    "algo", "obs", "action", "capacity", "num_envs", "n_steps", "batch_size", "policy", "policy_kwargs", "vec_env",
    "start_method", "preloads", "device", "total_timesteps", "frame_stack", "buffer_class", "optimize_memory_usage",
    "handle_timeout_termination", "saves_buffer", "uses_holdall", "sb3", "env", "wrapper", "name", "budget",
    "memory", "vram",
}  # fmt: skip
_MOST_BYTES = 4 * 2**20
_ZOO_NAMES = {
    "n_envs": "num_envs",
    "n_timesteps": "total_timesteps",
    "buffer_size": "capacity",
    "batch_size": "batch_size",
    "n_steps": "n_steps",
    "policy": "policy",
    "frame_stack": "frame_stack",
    "optimize_memory_usage": "optimize_memory_usage",
}


def read_file(path: Path, algo: str = "", env: str = "") -> dict[str, Any]:
    """Read either kind of file; `algo` and `env` choose the entry of rl-zoo's."""
    data = _load(path)
    if data and all(isinstance(entry, Mapping) for entry in data.values()) and not set(data) <= OPTIONS:
        return _zoo(path, data, algo, env)
    unknown = sorted(set(data) - OPTIONS)
    if unknown:
        raise ArgumentError(f"{path} has the keys {unknown}; holdall plan knows {sorted(OPTIONS)}")
    return dict(data)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ArgumentError(f"{path} is larger than {_MOST_BYTES} bytes, which no configuration is")
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


def _zoo(path: Path, data: Mapping[str, Any], algo: str, env: str) -> dict[str, Any]:
    """Take one environment's entry of rl-zoo's hyperparameters."""
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
        found["policy_kwargs"] = _read(entry["policy_kwargs"], "policy_kwargs")
    replay = _read(entry.get("replay_buffer_kwargs") or {}, "replay_buffer_kwargs")
    if "handle_timeout_termination" in replay:
        found["handle_timeout_termination"] = bool(replay["handle_timeout_termination"])
    if str(entry.get("replay_buffer_class", "")) in REPLAY_CLASSES:
        found["buffer_class"] = str(entry["replay_buffer_class"])
    return found


def _read(value: Any, argument: str) -> Any:
    return read_literal(value, argument) if isinstance(value, str) else value
