"""Finding what to name in a process whose code says nothing of holdall.

In:  the import of Stable-Baselines3.  Out: its models, followed by the agent as they are made.
Invariant: a model is made exactly as it would be; it is only looked at, by a weak reference.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from holdall.watch.agent import agent

_MODELS = "stable_baselines3.common.base_class"


def begin() -> None:
    """Start the agent, and wait for the module that defines models."""
    agent()
    if _MODELS in sys.modules:
        follow_models(sys.modules[_MODELS])
    else:
        sys.meta_path.insert(0, _Waiting())


def follow_models(module: Any) -> None:
    """Have every model that is made from now on followed."""
    kind = module.BaseAlgorithm
    made: Callable[..., None] = kind.__init__

    @functools.wraps(made)
    def make(model: Any, *arguments: Any, **named: Any) -> None:
        made(model, *arguments, **named)
        agent().follow_model(model)

    kind.__init__ = make


class _Waiting(importlib.abc.MetaPathFinder):
    """Stands before the other finders until the module comes by, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader)
        return spec


class _Following(importlib.abc.Loader):
    """Loads a module as its own loader would, and then looks at it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        follow_models(module)
