"""Places and titles of the objects that a run has built, and the model that each buffer belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from holdall.tools.lint.finding import Place
from holdall.tools.probe.snapshot import FoundBuffer, FoundMemory, FoundModel, Snapshot
from holdall.units import parse_bytes

Owned = TypeVar("Owned", FoundBuffer, FoundMemory)


def pair_with_models(owned: Iterable[Owned], run: Snapshot) -> Iterator[tuple[Owned, FoundModel | None]]:
    """Yield each buffer or memory with its model, or with None if it belongs to no model.

    Buffers and memories of models that do not learn are left out.
    """
    for one in owned:
        models = [model for model in run.models if model.buffer_owner == one.owner]
        learning = [model for model in models if model in run.learning_models]
        if learning or not models:
            yield one, learning[0] if learning else None


def locate_model(model: FoundModel) -> Place:
    """Return the place of a model."""
    return Place(f"live {model.class_name.rpartition('.')[2]}")


def locate(owned: FoundBuffer | FoundMemory, model: FoundModel | None) -> Place:
    """Return the place of a buffer or memory: its model, or else the variable or attribute that refers to it."""
    return Place(owned.owner) if model is None else locate_model(model)


def name_buffer(buffer: FoundBuffer, model: FoundModel | None) -> str:
    """Return words for a buffer, such as `the replay buffer` of a model."""
    if model is not None:
        return "the rollout" if model.is_on_policy else "the replay buffer"
    return f"{buffer.owner} ({buffer.class_name.rpartition('.')[2]})" if buffer.class_name else buffer.owner


def get_budget_bytes(memory: FoundMemory) -> int:
    """Return the budget of one of holdall's memories, or 0 if it has none in bytes."""
    if memory.budget is None or memory.budget == "auto":
        return 0
    return parse_bytes(memory.budget, "budget")
