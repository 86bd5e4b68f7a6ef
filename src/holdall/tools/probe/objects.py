"""Classes, attributes and plain values of the objects in a user's command, read without calling the user's code.

Classes of libraries are recognised by the names in their method resolution order, so no library is imported.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

from .snapshot import Plain

NOT_OWNERS = (FunctionType, ModuleType, type, FrameType)
"""Types whose instances are never reported as the owner of an array."""


def classify(cls: type) -> str:
    """Return the kind of a class's instances, such as `buffer`, or an empty text for an unknown class."""
    if issubclass(cls, (deque, list)):
        return "sequence"
    for base in cls.__mro__:
        kind = _KINDS.get((get_package(base), base.__name__))
        if kind:
            return kind
    return ""


def get_package(cls: type) -> str:
    """Return the top-level package of a class."""
    module = getattr(cls, "__module__", "")
    return module.partition(".")[0] if isinstance(module, str) else ""


_KINDS = {
    ("numpy", "ndarray"): "array",
    ("torch", "Tensor"): "array",
    ("jaxlib", "ArrayImpl"): "array",
    ("stable_baselines3", "BaseAlgorithm"): "model",
    ("stable_baselines3", "BaseBuffer"): "buffer",
    ("stable_baselines3", "BaseCallback"): "callback",
    ("stable_baselines3", "VecEnv"): "environment",
    ("cleanrl_utils", "BaseBuffer"): "buffer",
    ("cleanrl_utils", "ReplayBuffer"): "buffer",
    ("tianshou", "ReplayBuffer"): "buffer",
    ("torchrl", "ReplayBuffer"): "buffer",
    ("holdall", "ReplayMemory"): "memory",
    ("holdall", "RolloutMemory"): "memory",
    ("gymnasium", "Env"): "environment",
    ("gymnasium", "VectorEnv"): "environment",
    ("gym", "Env"): "environment",
    ("torch", "Optimizer"): "optimizer",
}
"""Kinds by the package and the name of a base class."""


def get_attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an instance, without calling code of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        attributes = {}
    names = [name for base in type(value).__mro__ for name in _get_slots(base)]
    if not names:
        return attributes if isinstance(attributes, dict) else dict(attributes)
    slots = {}
    for name in names:
        with contextlib.suppress(AttributeError):
            slots[name] = object.__getattribute__(value, name)
    return {**attributes, **slots}


def _get_slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def read_settings(attributes: Mapping[str, Any]) -> Plain:
    """Return the attributes that are plain values. A schedule of Stable-Baselines3 is replaced by its first value."""
    settings: Plain = {}
    for name, value in list(attributes.items()):
        if str(name).startswith("_") and name not in _PRIVATE_SETTINGS:
            continue
        plain = _make_plain(value)
        if plain is not _NOT_PLAIN:
            settings[str(name)] = plain
    return settings


_NOT_PLAIN = object()
_PRIVATE_SETTINGS = ("_max_episode_steps", "_batch_size")
"""Settings of gymnasium's TimeLimit and TorchRL's buffers that have no public attribute."""


def _make_plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as plain data, or `_NOT_PLAIN`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > 3:
        return _NOT_PLAIN
    if get_package(type(value)) == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item() if value.dtype.kind in "iufb" else _NOT_PLAIN
    if isinstance(value, type):
        return name_class(value)
    if type(value).__name__ in {"FloatSchedule", "ConstantSchedule", "LinearSchedule"}:
        with contextlib.suppress(Exception):
            return float(value(1.0))
    if type(value).__name__ == "TrainFreq":
        return [int(value.frequency), str(value.unit.value)]
    if isinstance(value, dict) and len(value) <= 64:
        parts = {str(name): _make_plain(part, depth + 1) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)) and len(value) <= 64:
        items = [_make_plain(part, depth + 1) for part in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    return _NOT_PLAIN


def get_count(attributes: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the first attribute of `names` that is a positive whole number. A leading underscore is ignored."""
    for name in names:
        value = attributes.get(name, attributes.get(f"_{name}"))
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and value == int(value):
            return int(value)
    return None


def name_class_of(value: Any) -> str:
    """Return the name of the class of `value`, with its module."""
    return name_class(type(value))


def name_class(cls: Any) -> str:
    """Return the name of the class `cls` with its module, or an empty text for None."""
    if not isinstance(cls, type):
        return "" if cls is None else str(cls)
    return f"{cls.__module__}.{cls.__qualname__}"
