"""Read the run to plan: from options, from a file (TOML, YAML, rl-zoo's hyperparameters), or from a live model.

In:  values by option, a path, or a model of Stable-Baselines3.  Out: a `Spec`, and what was measured of
the environment if one was named.
Invariant: text is never evaluated; an unknown key in one of holdall's own files is refused by name; a live model is
neither changed nor stepped.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.plan import environments
from holdall.tools.plan.spec import (
    ALGORITHM_CLASSES,
    ALGORITHMS,
    REPLAY_CLASSES,
    Spec,
    installed_version,
    parse_version,
)

_COUNTS = ("capacity", "num_envs", "n_steps", "batch_size", "total_timesteps", "frame_stack")
_SWITCHES = ("optimize_memory_usage", "handle_timeout_termination", "saves_buffer", "uses_holdall", "preloads")
_TEXTS = ("policy", "vec_env", "start_method", "device", "buffer_class", "wrapper", "name")
OPTIONS = {
    *_COUNTS, *_SWITCHES, *_TEXTS, "algo", "obs", "action", "policy_kwargs", "sb3", "env", "budget", "memory", "vram",
}  # fmt: skip
_ZOO_NAMES = {"n_envs": "num_envs", "n_timesteps": "total_timesteps", "buffer_size": "capacity"}
_ZOO_NAMES |= {name: name for name in ("batch_size", "n_steps", "policy", "frame_stack", "optimize_memory_usage")}
_MOST_BYTES = 4 * 2**20  # of a configuration file


def spec_from_settings(settings: Mapping[str, Any]) -> tuple[Spec, dict[str, Any] | None]:
    """Read settings; an environment is made in a throwaway process."""
    given = {name: value for name, value in settings.items() if value is not None}
    algo = str(given.get("algo", "")).lower()
    if algo not in ALGORITHMS:
        own = {name.lower() for name, one in ALGORITHM_CLASSES.items() if not one.has_plain_buffer}
        why = "has a buffer of its own class, which plan does not know; it knows" if algo in own else "must be one of"
        raise ArgumentError(f"algo ({algo or None}) {why} {', '.join(ALGORITHMS)}; name it with --algo")
    if ALGORITHMS[algo].on_policy and "capacity" in given:
        raise ArgumentError(
            f"capacity ({given['capacity']}) is that of a replay buffer, and {algo} has none: it collects rollouts of "
            "--n-steps for each environment"
        )
    values: dict[str, Any] = {"algo": algo}
    values |= {name: parse_count(given[name], name) for name in _COUNTS if name in given}
    values |= {name: given[name] for name in (*_SWITCHES, "policy_kwargs") if name in given}
    values |= {name: str(given[name]) for name in _TEXTS if name in given}
    for name in _SWITCHES:
        if not isinstance(values.get(name, False), bool):
            raise ArgumentError(f"{name} ({values[name]!r}) must be true or false")
    if not isinstance(values.get("policy_kwargs", {}), Mapping):
        raise ArgumentError(
            f"policy_kwargs ({given['policy_kwargs']!r}) must be a table, such as net_arch = [256, 256]"
        )
    if "sb3" in given:
        values["sb3"] = parse_version(str(given["sb3"]))
    environment = None
    if env_id := str(given.get("env", "")):
        values["env_id"] = env_id
        environment = _environment(env_id, values.get("wrapper", ""))
    values["observation"], values["action"] = _spaces(given, environment, values.get("frame_stack", 1))
    return Spec(**values), environment


def _environment(env_id: str, wrapper: str) -> dict[str, Any]:
    """Make the environment; once more if it brought torch along, which is counted among the libraries."""
    found = environments.run_probe("environment", env_id=env_id, wrapper=wrapper, with_torch=False)
    if found["brought_torch"]:
        return environments.run_probe("environment", env_id=env_id, wrapper=wrapper, with_torch=True)
    return found


def parse_count(value: Any, argument: str) -> int:
    """Read a count: 400000, 4e5, 400_000 or 2**12 written out as a number."""
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number, as in 400000, 4e5 or 400_000")
    return int(number)


def _spaces(given: Mapping[str, Any], environment: Mapping[str, Any] | None, frames: int) -> tuple[Any, Any]:
    if environment is None and "obs" not in given:
        raise ArgumentError("obs is missing; write --obs 84x84x4:uint8, or name the environment with --env")
    if environment is None and "action" not in given:
        raise ArgumentError("action is missing; write --action 8 or --action 'discrete(4)', or name an --env")
    made = environment or {}
    read, parse = environments.space_from_dict, environments.parse_space
    observation = _observation(given["obs"]) if "obs" in given else read(made["observation"])
    action = parse(str(given["action"]), "action") if "action" in given else read(made["action"])
    return environments.stacked_space(observation, frames), action


def _observation(given: Any) -> Any:
    texts = [f"{name}={text}" for name, text in given.items()] if isinstance(given, Mapping) else given
    return environments.parse_observation(list(map(str, texts)) if isinstance(texts, list | tuple) else [str(texts)])


def read_config_file(path: Path, algo: str = "", env: str = "") -> dict[str, Any]:
    """Read either kind of file; `algo` and `env` choose the entry of rl-zoo's."""
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
            raise ArgumentError(f"file ({path}) is no regular file; name a script, or a TOML or YAML file")
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


def _zoo_entry(path: Path, data: Mapping[str, Any], algo: str, env: str) -> dict[str, Any]:
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
        found["policy_kwargs"] = read_literal(entry["policy_kwargs"], "policy_kwargs")
    replay = read_literal(entry.get("replay_buffer_kwargs") or {}, "replay_buffer_kwargs")
    if "handle_timeout_termination" in replay:
        found["handle_timeout_termination"] = bool(replay["handle_timeout_termination"])
    if str(entry.get("replay_buffer_class", "")) in REPLAY_CLASSES:
        found["buffer_class"] = str(entry["replay_buffer_class"])
    return found


def read_literal(text: Any, argument: str) -> Any:
    """Read a value that is written as Python: numbers, lists, dicts, names; nothing is evaluated."""
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


def spec_from_model(model: Any) -> Spec:
    """Read a model's configuration."""
    algo = type(model).__name__.lower()
    if algo not in ALGORITHMS or not hasattr(model, "observation_space"):
        names = ", ".join(algorithm.name for algorithm in ALGORITHMS.values())
        raise ArgumentError(f"model ({type(model).__name__}) is none that holdall plan knows: {names}")
    env = environments.read_vec_env(model.get_env())
    values: dict[str, Any] = {
        "observation": model.observation_space,
        "action": model.action_space,
        "num_envs": int(model.n_envs),
        "policy": {kind: name for name, kind in type(model).policy_aliases.items()}.get(model.policy_class, ""),
        "policy_kwargs": _plain_policy_kwargs(model.policy_kwargs),
        "device": model.device.type,
        "sb3": installed_version(),
        "vec_env": env.kind or "dummy",
        "start_method": env.start_method,
        "frame_stack": env.frame_stack,
    }
    if ALGORITHMS[algo].on_policy:
        values |= {"n_steps": int(model.n_steps), "batch_size": int(getattr(model, "batch_size", 0) or 0)}
    else:
        values |= _replay_settings(model)
    return Spec(algo=algo, **values)


def _replay_settings(model: Any) -> dict[str, Any]:
    buffer = type(model.replay_buffer)
    ours = buffer.__module__.partition(".")[0] == "holdall"
    # A subclass has the arrays of the class that it extends, as far as can be known from here.
    known = next((base.__name__ for base in buffer.__mro__ if base.__name__ in REPLAY_CLASSES), "")
    return {
        "capacity": int(model.buffer_size),
        "batch_size": int(model.batch_size),
        "buffer_class": "" if ours else known,
        "uses_holdall": ours,
        "optimize_memory_usage": bool(model.optimize_memory_usage) and not ours,
        "handle_timeout_termination": bool(getattr(model.replay_buffer, "handle_timeout_termination", True)),
    }


def _plain_policy_kwargs(policy_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keep what is data, and the names of torch's classes; the rest cannot travel to another process."""
    known = {
        name: value.__name__ if isinstance(value, type) and value.__module__.startswith("torch.") else value
        for name, value in policy_kwargs.items()
    }
    return {name: value for name, value in known.items() if name != "use_sde" and _is_data(value)}


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_data(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_data(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
