"""Modules of LeRobot from a checkout: whole if all that they import is installed, else alone.

A module alone is executed with stand-ins for everything that it imports, except for LeRobot's constants and types.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

_REAL = {
    "lerobot.rl.buffer",
    "lerobot.rl.data_sources.data_mixer",
    "lerobot.rl.learner",
    "lerobot.utils.constants",
    "lerobot.utils.transition",
}
"""Modules that are executed also where LeRobot is not whole. They import little."""
_PACKAGES = {"lerobot", "lerobot.rl", "lerobot.utils"}
"""Packages of those modules. Their own code imports everything else, so it is not executed."""


class LoadedModule(NamedTuple):
    """A module of LeRobot."""

    module: Any
    is_whole: bool  # Whether its imports are LeRobot's own.
    version: str | None

    def describe(self) -> str:
        """Return one line for results."""
        name = self.module.__name__
        return f"LeRobot {self.version}" + ("" if self.is_whole else f", {name} loaded alone")


class _AnyAttribute(type):
    """The type of stand-ins that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (_StandIn,), {})


class _StandIn(metaclass=_AnyAttribute):
    """An object that can be called, used as a decorator, inherited and asked for any attribute."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_keywords: Any) -> Any:
        return arguments[0] if arguments else self


class _StandInModule(types.ModuleType):
    """A module in which every name is a class."""

    HF_HOME = "."  # Of huggingface_hub. LeRobot's constants make paths of it.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (_StandIn,), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds LeRobot's modules, and packages that are not installed, among them what LeRobot needs only elsewhere."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "lerobot":
            parts = fullname.split(".")[1:]
            if fullname in _REAL:
                return importlib.util.spec_from_file_location(
                    fullname, self._package.joinpath(*parts).with_suffix(".py")
                )
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        top, _, rest = fullname.partition(".")
        if top in _NEEDED and (rest or importlib.machinery.PathFinder.find_spec(top) is None):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in _PACKAGES else _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


_NEEDED = {"datasets", "draccus", "grpc", "huggingface_hub", "safetensors", "termcolor", "tqdm"}
"""Packages that the modules import."""


def find_package(folder: Path) -> Path:
    """Return the package in a checkout, in an unpacked wheel, or in site-packages."""
    for place in (folder / "src" / "lerobot", folder / "lerobot"):
        if (place / "rl" / "buffer.py").is_file():
            return place
    raise SystemExit(f"{folder} has no src/lerobot/rl/buffer.py. Pass a checkout of LeRobot 0.4 or newer.")


def load_module(folder: Path, name: str) -> LoadedModule:
    """Import `name`, such as "rl.buffer", of the LeRobot in a folder."""
    package = find_package(folder)
    version = _read_version(folder)
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return LoadedModule(importlib.import_module(f"lerobot.{name}"), False, version)
    sys.path.insert(0, str(package.parent))
    try:
        return LoadedModule(importlib.import_module(f"lerobot.{name}"), True, version)
    except Exception as error:  # Packages that are installed in part raise errors of all kinds.
        print(f"LeRobot is not whole here ({error}); lerobot.{name} is loaded alone", file=sys.stderr)
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "lerobot"]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, _StandInFinder(package))
    return LoadedModule(importlib.import_module(f"lerobot.{name}"), False, version)


def _read_version(folder: Path) -> str | None:
    """Return the version that the project file or the metadata of a package names."""
    files = [folder / "pyproject.toml", *folder.glob("lerobot-*.dist-info/METADATA")]
    for file in files:
        found = re.search(
            r'^(?:version = "|Version: )([\d.]+)', file.read_text("utf-8") if file.is_file() else "", re.M
        )
        if found is not None:
            return found[1]
    return None
