"""Names that a package imports from their modules when they are first used, so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def attach_names(
    package: str, names_by_module: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: `__name__` of the package.
        names_by_module: For every module, the names that the package imports from it.
        submodules: Modules of the package that are imported when they are first used.
    """
    module_by_name = {name: module for module, names in names_by_module.items() for name in names}

    def get_attribute(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(module_by_name[name]), name)
        setattr(sys.modules[package], name, value)  # Python finds it there next time, without this function.
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_by_name, *submodules})

    return get_attribute, list_names
