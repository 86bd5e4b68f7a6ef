"""Places and names of the buffers, memories and models of a run, and the model of each buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from holdall.tools.lint.finding import Place
from holdall.tools.probe.snapshot import FoundBuffer, FoundMemory, FoundModel, Snapshot
from holdall.units import parse_bytes

Owned = TypeVar("Owned", FoundBuffer, FoundMemory)


def pair_with_models(buffers: Iterable[Owned], run: Snapshot) -> Iterator[tuple[Owned, FoundModel | None]]:
    """Yield each buffer or memory with its model, or with None if it belongs to no model.

    Buffers and memories of models that do not learn are left out.
    """
    for one in buffers:
        models = [model for model in run.models if model.buffer_owner == one.owner]
        learning = [model for model in models if model in run.learning_models]
        if learning or not models:
            yield one, learning[0] if learning else None


def locate_model(model: FoundModel) -> Place:
    """Return the place of a model."""
    return Place(f"live {model.class_name.rpartition('.')[2]}")


def locate(buffer: FoundBuffer | FoundMemory, model: FoundModel | None) -> Place:
    """Return the place of a buffer or memory: its model, or else the variable or attribute that refers to it."""
    return Place(buffer.owner) if model is None else locate_model(model)


def name_buffer(buffer: FoundBuffer, model: FoundModel | None) -> str:
    """Return a name for messages: `the replay buffer` for the buffer of a model, else its variable and class."""
    if model is not None:
        return "the rollout" if model.is_on_policy else "the replay buffer"
    return f"{buffer.owner} ({buffer.class_name.rpartition('.')[2]})" if buffer.class_name else buffer.owner


def get_budget_bytes(memory: FoundMemory) -> int:
    """Return the budget of one of holdall's memories, or 0 if it has none in bytes."""
    if memory.budget is None or memory.budget == "auto":
        return 0
    return parse_bytes(memory.budget, "budget")
