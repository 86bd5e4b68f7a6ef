"""Calls functions right after the command has imported a module. This file imports only the standard library."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

AfterImport = Callable[[ModuleType], None]


def call_after_import(actions: Mapping[str, Sequence[AfterImport]]) -> None:
    """Call each function with its module, now if the module is imported already, or else right after its import.

    An import fails if a function raises, so functions must not raise.

    Args:
        actions: Functions to call, by the full name of their module.
    """
    later = {}
    for name, functions in actions.items():
        module = sys.modules.get(name)
        if module is None:
            later[name] = functions
            continue
        for function in functions:
            function(module)
    if later:
        sys.meta_path.insert(0, _AfterImportFinder(later))


class _AfterImportFinder(importlib.abc.MetaPathFinder):
    """Finds the named modules with the other finders, and wraps their loaders."""

    def __init__(self, actions: Mapping[str, Sequence[AfterImport]]) -> None:
        self._actions = actions
        self._local = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        functions = self._actions.get(name)
        if functions is None or getattr(self._local, "is_searching", False):
            return None
        self._local.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._local.is_searching = False
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def run_module_and_call(module: ModuleType) -> None:
            run_module(module)
            for function in functions:
                function(module)

        spec.loader.exec_module = run_module_and_call  # type: ignore[method-assign]  # Changes this one loader.
        return spec
