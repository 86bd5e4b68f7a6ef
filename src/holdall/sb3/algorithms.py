"""Algorithms by name: those of Stable-Baselines3 and sb3-contrib, and no others.

Invariant: a name from a file is looked up in these two packages' lists; nothing else is ever imported for it.
"""

from __future__ import annotations

import importlib
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

from holdall.errors import ArgumentError

_PACKAGES = ("stable_baselines3", "sb3_contrib")


def algorithm_words(kind: type[BaseAlgorithm]) -> str:
    """Name an algorithm; one of a user's own by its class alone."""
    package = kind.__module__.partition(".")[0]
    return f"{package}.{kind.__name__}" if package in _PACKAGES else kind.__name__


def algorithm_named(words: Any) -> type[BaseAlgorithm]:
    """Return the algorithm of a name, if it is one that everybody has."""
    package, _, name = str(words).partition(".")
    found = None
    if package in _PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ArgumentError(f"algorithm: the checkpoint is of a {words}; run 'pip install {package}'") from error
        found = getattr(module, name, None) if name in getattr(module, "__all__", ()) else None
    if not (isinstance(found, type) and issubclass(found, BaseAlgorithm)):
        raise ArgumentError(f"algorithm was not given, and the checkpoint is of a {words}; pass algorithm={words}")
    return found
