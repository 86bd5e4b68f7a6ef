"""holdall's own memories among the live objects: by themselves, in a buffer that contains one, or rollout buffers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from .heap import LiveHeap
from .objects import classify, get_attributes, get_package, name_class
from .snapshot import FoundMemory


def find_memories(objects: LiveHeap) -> Iterator[FoundMemory]:
    """Describe holdall's memories, each with the buffer that contains it, and holdall's rollout buffers."""
    owners: dict[int, Any] = {}
    for value in gc.get_objects():
        is_buffer = classify(type(value)) != "memory" and type(value).__name__ != "Recorder"
        if get_package(type(value)) == "holdall" and is_buffer:
            name = "_memory" if type(value).__name__ == "HoldallStorage" else "memory"
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
        owner=objects.name_of(owner),
        class_name=name_class(owner),
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
