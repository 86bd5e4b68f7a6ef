"""Settings as people give them, turned into a spec.

In:  values by option, from the command line and a file, the former first.  Out: a `Spec`, and what was found out
about the environment if one was named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdall.errors import ArgumentError
from holdall.plan import spacetext
from holdall.plan.ask import ask
from holdall.plan.buffers import parse_version
from holdall.plan.spec import ALGORITHMS, Spec

_COUNTS = ("capacity", "num_envs", "n_steps", "batch_size", "total_timesteps", "frame_stack")
_SWITCHES = ("optimize_memory_usage", "handle_timeout_termination", "saves_buffer", "uses_holdall", "preloads")
_WORDS = ("policy", "vec_env", "start_method", "device", "buffer_class", "wrapper", "name")


def spec_of(settings: Mapping[str, Any]) -> tuple[Spec, dict[str, Any] | None]:
    """Read settings; an environment is made in a throwaway process."""
    given = {name: value for name, value in settings.items() if value is not None}
    algo = str(given.get("algo", "")).lower()
    if algo not in ALGORITHMS:
        raise ArgumentError(f"algo ({algo or None}) must be one of {', '.join(ALGORITHMS)}; name it with --algo")
    values: dict[str, Any] = {"algo": algo}
    values |= {name: count_of(given[name], name) for name in _COUNTS if name in given}
    values |= {name: _switch(given[name], name) for name in _SWITCHES if name in given}
    values |= {name: str(given[name]) for name in _WORDS if name in given}
    if "policy_kwargs" in given:
        values["policy_kwargs"] = _kwargs(given["policy_kwargs"])
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
    found = ask("environment", env_id=env_id, wrapper=wrapper, with_torch=False)
    if found["brought_torch"]:
        return ask("environment", env_id=env_id, wrapper=wrapper, with_torch=True)
    return found


def count_of(value: Any, argument: str) -> int:
    """Read a count: 400000, 4e5, 400_000 or 2**12 written out as a number."""
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number, as in 400000, 4e5 or 400_000")
    return int(number)


def _spaces(given: Mapping[str, Any], environment: Mapping[str, Any] | None, frames: int) -> tuple[Any, Any]:
    if "obs" in given:
        observation = _observation(given["obs"])
    elif environment is not None:
        observation = spacetext.restore(environment["observation"])
    else:
        raise ArgumentError("obs is missing; write --obs 84x84x4:uint8, or name the environment with --env")
    if "action" in given:
        action = spacetext.parse_space(str(given["action"]), "action")
    elif environment is not None:
        action = spacetext.restore(environment["action"])
    else:
        raise ArgumentError("action is missing; write --action 8 or --action 'discrete(4)', or name an --env")
    return spacetext.stacked(observation, frames), action


def _observation(given: Any) -> Any:
    if isinstance(given, Mapping):
        return spacetext.parse_observation([f"{name}={text}" for name, text in given.items()])
    texts = [str(text) for text in given] if isinstance(given, list | tuple) else [str(given)]
    return spacetext.parse_observation(texts)


def _switch(value: Any, argument: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{argument} ({value!r}) must be true or false")
    return value


def _kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"policy_kwargs ({value!r}) must be a table, such as net_arch = [256, 256]")
    return dict(value)
