"""holdall's own memories among the live objects, each with the buffer that contains it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from .heap import LiveHeap
from .objects import classify, get_attributes, get_package, name_class
from .snapshot import FoundMemory


def find_memories(objects: LiveHeap) -> Iterator[FoundMemory]:
    """Describe holdall's memories, each with the buffer that contains it."""
    owners: dict[int, Any] = {}
    for value in gc.get_objects():
        if get_package(type(value)) == "holdall" and classify(type(value)) != "memory":
            memory = get_attributes(value).get("memory")
            if memory is not None:
                owners[id(memory)] = value
    for memory in objects.memories:
        owner = owners.get(id(memory))
        settings = get_attributes(memory).get("_settings", {})
        try:
            report = memory.report()
        except Exception:  # A closed memory has no report.
            continue
        spill_dir = settings.get("spill_dir")
        yield FoundMemory(
            owner=objects.name_of(memory if owner is None else owner),
            class_name=name_class(memory if owner is None else owner),
            capacity=int(getattr(memory, "capacity", 0) or memory.num_steps * memory.num_envs),
            n_envs=int(memory.num_envs),
            budget=settings.get("budget"),
            prefer=str(settings.get("prefer", "")),
            spill_dir=None if spill_dir is None else str(spill_dir),
            store_device=settings.get("store_device"),
            transitions=int(report.transitions),
            held_bytes=int(report.total_bytes),
            disk_bytes=int(report.disk_bytes),
            plain_bytes=int(report.plain_bytes),
        )
