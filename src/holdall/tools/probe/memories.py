"""holdall's own memories among the live objects: memories, buffers that contain a memory, and rollout buffers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from .heap import LiveHeap
from .objects import classify, get_attributes, get_package, name_class_of
from .snapshot import FoundMemory


def find_memories(objects: LiveHeap) -> Iterator[FoundMemory]:
    """Describe holdall's memories, each with the buffer that contains it, and holdall's rollout buffers."""
    owners: dict[int, Any] = {}
    for value in gc.get_objects():
        cls = type(value)
        if get_package(cls) != "holdall" or cls.__name__ == "Recorder" or classify(cls) == "memory":
            continue
        name = "_memory" if cls.__name__ == "HoldallStorage" else "memory"
        memory = get_attributes(value).get(name)
        if memory is not None:
            owners[id(memory)] = value
    for memory in objects.memories:
        capacity = getattr(memory, "capacity", 0) or memory.num_steps * memory.num_envs
        yield from _describe(memory, owners.get(id(memory), memory), capacity, memory.num_envs, objects)
    for buffer in objects.buffers:
        attributes = get_attributes(buffer)
        if get_package(type(buffer)) == "holdall" and "memory" not in attributes:
            lanes = attributes.get("n_envs", 1)
            yield from _describe(buffer, buffer, attributes.get("buffer_size", 0) * lanes, lanes, objects)


def _describe(memory: Any, owner: Any, capacity: Any, n_envs: Any, objects: LiveHeap) -> Iterator[FoundMemory]:
    """Describe a memory by the buffer that contains it, or by itself."""
    settings = get_attributes(memory).get("_settings", {})
    try:
        report = memory.report()
    except Exception:  # A closed memory has no report.
        return
    spill_dir = settings.get("spill_dir")
    yield FoundMemory(
        owner=objects.find_name(owner),
        class_name=name_class_of(owner),
        capacity=int(capacity),
        n_envs=int(n_envs),
        budget=settings.get("budget"),
        prefer=str(settings.get("prefer", "")),
        spill_dir=None if spill_dir is None else str(spill_dir),
        store_device=settings.get("store_device"),
        transitions=int(report.transitions),
        held_bytes=int(report.total_bytes),
        disk_bytes=int(report.disk_bytes),
        plain_bytes=int(report.plain_bytes),
    )
