"""Finds the models, buffers, memories, arrays and environments among a command's live objects.

`inspect(context)` returns fields of a `Snapshot`. Nothing is changed. No code of the user runs, only code of libraries:
properties of arrays and spaces, `parameters` of networks, schedules, and `report` of memories.

    objects       classes, attributes and plain values
    arrays        arrays and their bytes
    heap          all live objects, sorted by kind and named
    buffers       buffers of libraries, owners of large arrays, deques, lists
    memories      holdall's own memories
    environments  environments and spaces
    models        models, callbacks, optimizers
    allocations   errors of failed allocations

These modules run in the command's process and import only the standard library.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .allocations import read_allocation
from .buffers import find_buffers
from .environments import find_environments
from .heap import LiveHeap
from .memories import find_memories
from .models import describe_model, describe_optimizer, find_callbacks, get_model_buffer

_LIBRARIES = (
    "numpy",
    "torch",
    "gymnasium",
    "gym",
    "stable_baselines3",
    "sb3_contrib",
    "torchrl",
    "tianshou",
    "jax",
    "flax",
    "holdall",
)


def inspect(context: Mapping[str, Any], hidden: Sequence[tuple[Any, ...]] = ()) -> dict[str, Any]:
    """Describe the live objects of this process. Return fields of a `Snapshot`.

    Args:
        context: Objects of the event: `model`, `total_timesteps`, `callback`, `buffer`, `error`.
        hidden: Copies of steps that the probe keeps. They do not belong to the command, so they are skipped.
    """
    return _describe(LiveHeap(context, hidden=hidden), context)


def inspect_model(model: Any, total_timesteps: int | None, callback: Any) -> dict[str, Any]:
    """Describe the objects of one model. Return fields of a `Snapshot`. No other live object is inspected."""
    buffer = get_model_buffer(model)
    context = {
        "model": model,
        "total_timesteps": total_timesteps,
        "callback": callback,
        "buffer": buffer,
        "memory": getattr(buffer, "memory", None),
    }
    return _describe(LiveHeap(context, has_heap=False), context)


def _describe(objects: LiveHeap, context: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Callable[[], Iterable[Any]]] = {
        "models": lambda: [describe_model(model, objects, context) for model in objects.models],
        "callbacks": lambda: find_callbacks(objects, context.get("callback")),
        "memories": lambda: find_memories(objects),
        "buffers": lambda: find_buffers(objects),
        "arrays": objects.describe_unclaimed_arrays,
        "environments": lambda: find_environments(objects),
        "optimizers": lambda: [describe_optimizer(optimizer) for optimizer in objects.optimizers],
    }
    found: dict[str, Any] = {
        "versions": _read_versions(),
        "allocation": read_allocation(context.get("error")),
    }
    notes = []
    for name, find in parts.items():
        try:
            found[name] = tuple(find())
        except Exception as error:
            notes.append(f"The {name} could not be read: {error!r}.")
    return found | {"notes": tuple(notes)}


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return versions
