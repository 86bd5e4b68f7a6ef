"""What command lines and configuration files give a program: the defaults of their options.

argparse, tyro, click, typer, absl, hydra; YAML, JSON and TOML files beside the script.
In:  the calls that describe options, or that open a file.  Out: objects that hold the defaults.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Reference
from holdall.tools.lint.source.values import (
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    TableValue,
    known_items,
    likely,
    one_of,
)

_DATA_PACKAGES = {"yaml", "json", "toml", "tomllib", "tomli", "ruamel", "omegaconf"}
_LOADERS = {"safe_load", "load", "full_load", "unsafe_load", "loads", "FullLoader"}


NUMBERS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (int, float, bool, max, min, round, abs, sum, str)
}
_SETTINGS_PATH = re.compile(r"conf|param|setting|cfg|^None$|^$", re.IGNORECASE)  # of a file that a run must name
_DEEPEST_DEFAULTS = 3  # files of hydra that name files that ...
_PARSERS = {"ArgumentParser", "ArgParser", "HfArgumentParser"}


_FROM_DEFAULTS = {
    "tyro.cli", "pyrallis.parse", "draccus.parse", "jsonargparse.CLI", "fire.Fire",
    "tyro.extras.overridable_config_cli",
}  # fmt: skip
_FOLLOWED = {
    "argparse", "configargparse", "absl", "click", "typer", "hydra", "dataclasses", "ml_collections", "easydict",
}  # fmt: skip


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what parsers of command lines make: their options, with the defaults."""
    last, first = dotted.rpartition(".")[2], arguments.get(0, "")
    if last in _PARSERS:
        made = InstanceValue(Reference("argparse.ArgumentParser"), node=node)
        made.attributes["options"] = TableValue()
        return made
    if dotted in _FROM_DEFAULTS:
        return _from_defaults(interpreter, arguments.get(0, "config_class"), node)
    if "flags.DEFINE" in dotted:
        if isinstance(first, str):
            interpreter.flags[first] = arguments.get(1, "default", None)
        return UNKNOWN
    if dotted in {"typer.Option", "typer.Argument", "pydantic.Field", "tyro.conf.arg"}:
        return arguments.get(0, "default", UNKNOWN)
    if dotted.partition(".")[0] in _FOLLOWED or last[:1].isupper():
        return InstanceValue(Reference(dotted), {}, arguments.all_named(), node, interpreter.path)
    return UNKNOWN


def _from_defaults(interpreter: Any, made_of: Any, node: ast.AST) -> Any:
    """Make a data class, or call a function, with nothing but its defaults."""
    empty = CallArguments(is_complete=False)
    if isinstance(made_of, ClassValue):
        made = interpreter.instantiate(made_of, empty, node)
        if isinstance(made, InstanceValue):
            made.is_default = True
        return made
    return interpreter.call_function(made_of, empty) if isinstance(made_of, FunctionValue) else UNKNOWN


def configured_arguments(interpreter: Any, function: FunctionValue) -> list[Any]:
    """Return the configuration that hydra hands to a function; nothing if it hands none."""
    given = next((one.arguments for one in function.wrapped or () if one.kind == "hydra.main"), {"1": None})
    folder, name = given.get("config_path", given.get("0", "")), given.get("config_name", given.get("1", "config"))
    if not isinstance(name, str):
        return []
    folder, name = folder if isinstance(folder, str) else "", name.removesuffix(".yaml")
    if folder.endswith((".yaml", ".yml")):  # as older versions take it
        folder, name = str(PurePath(folder).parent), PurePath(folder).stem
    tried = (_composed(interpreter.repository, interpreter.here, PurePath(one), name) for one in (folder, ""))
    return [from_data(one, one, attributes=True) for one in tried if one][:1]


def click_defaults(function: FunctionValue) -> Iterator[tuple[str, Any]]:
    """Yield the options that click's decorators give a function, with their defaults."""
    for one in function.wrapped or ():
        if one.kind in {"click.option", "click.argument"}:
            names = [value for key, value in one.arguments.items() if key.isdigit() and isinstance(value, str)]
            long = next((name for name in names if not name.startswith("-")), None)
            long = long or next((name for name in names if name.startswith("--")), "").partition("/")[0]
            flag = False if one.arguments.get("is_flag") is True else None
            yield long.lstrip("-").replace("-", "_"), one.arguments.get("default", flag)


def _composed(repository: Any, here: str, folder: PurePath, name: str, depth: int = 0) -> dict[Any, Any]:
    """Return what one file of hydra's holds, over what its list of defaults names."""
    data = next((one for end in (".yaml", ".yml", "")
                 if isinstance(one := repository.data(str(folder / f"{name}{end}"), here), dict)), None)  # fmt: skip
    if data is None or depth > _DEEPEST_DEFAULTS:
        return {}
    merged: dict[Any, Any] = {}
    for entry in data.get("defaults", None) or ():
        for named, chosen in entry.items() if isinstance(entry, dict) else [("", entry)]:
            group = str(named).removeprefix("override ").lstrip("/").partition("@")[0]
            inner = _composed(repository, here, folder / group, str(chosen), depth + 1)
            is_global = not group or "@package _global_" in repository.text_of(
                str(folder / group / f"{chosen}.yaml"), here
            )
            _merge(merged, inner if is_global else {group: inner})
    _merge(merged, {key: value for key, value in data.items() if key not in {"defaults", "hydra"}})
    return merged


def _merge(into: dict[Any, Any], more: dict[Any, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            into[key] = dict(into[key])
            _merge(into[key], value)
        else:
            into[key] = value


def from_data(data: Any, root: Any = None, attributes: bool = False, depth: int = 0) -> Any:
    """Return a value for what a data file holds."""
    if depth > 8:
        return UNKNOWN
    if isinstance(data, dict):
        return TableValue(
            ((k, from_data(v, root, attributes, depth + 1)) for k, v in data.items()), attributes=attributes
        )
    if isinstance(data, list):
        return ListValue([from_data(one, root, attributes, depth + 1) for one in data], len(data))
    if isinstance(data, str) and data.startswith("${") and data.endswith("}") and isinstance(root, dict):
        found: Any = root
        for part in data[2:-1].split("."):
            found = found.get(part, UNKNOWN) if isinstance(found, dict) else UNKNOWN
        return found if isinstance(found, int | float | str) else UNKNOWN
    if isinstance(data, str):
        try:  # YAML takes 1e6 for text
            return float(data) if "e" in data.lower() and data[:1].isdigit() else data
        except ValueError:
            return data
    return data if isinstance(data, int | float | bool | None) else UNKNOWN


def loaded(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a file of data holds that the program loads; NotImplemented for other functions."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package not in _DATA_PACKAGES:
        return NotImplemented
    if last not in _LOADERS:
        return arguments.get(0, "") if last in {"to_container", "create", "structured"} else UNKNOWN
    is_object = package == "omegaconf" or "object_hook" in arguments.named
    source = likely(arguments.get(0, "stream"))
    if isinstance(source, InstanceValue) and source.kind == "builtins.open":
        source = source.arguments.get("0", source.arguments.get("file", UNKNOWN))
        source = likely(source)
    data = interpreter.repository.data(source, interpreter.here) if isinstance(source, str) else None
    if data is not None or (isinstance(source, str) and not _SETTINGS_PATH.search(source)):
        return UNKNOWN if data is None else from_data(data, data, attributes=is_object)
    kinds = (".json",) if package == "json" else (".toml",) if package.startswith("tom") else (".yaml", ".yml")
    found = interpreter.repository.settings_files(interpreter.main.path, kinds)
    several = [(from_data(data, data, attributes=is_object), f"with {name}") for name, data in found]
    return several[0][0] if len(several) == 1 else one_of(several)


def ini_method(interpreter: Any, parser: InstanceValue, name: str, arguments: Any) -> Any:
    """Return what a method of a ConfigParser returns: `read` fills it with the sections of a file."""
    first = likely(arguments.get(0, "section"))
    if name == "read" and isinstance(first, str):
        data = interpreter.repository.data(first, interpreter.here)
        parser.attributes |= {str(key): from_data(value) for key, value in (data or {}).items()}
        return UNKNOWN
    section = parser.attributes.get(str(first))
    if not name.startswith("get") or not isinstance(section, TableValue):
        return UNKNOWN
    return ini_value(section, name, arguments.get(1, "option"), arguments.get(None, "fallback", UNKNOWN))


def ini_value(section: TableValue, name: str, option: Any, default: Any) -> Any:
    """Return an option of a section as `get`, `getint`, `getfloat` or `getboolean` reads it."""
    value = section.get(str(option).lower(), section.get(option, default))
    if name == "getboolean" and isinstance(value, str):
        return value.lower() in {"1", "yes", "true", "on"}
    return as_number(name.removeprefix("get"), (value,)) if name in {"getint", "getfloat"} else value


def as_number(name: str, values: tuple[Any, ...]) -> Any:
    """Return what int, max and the like make of known numbers."""
    plain = [known_items(one) if isinstance(one, ListValue) else one for one in values]
    if name == "str":
        return str(values[0]) if isinstance(values[0], str | int | float) else UNKNOWN
    if name in {"int", "float"} and isinstance(values[0], str):
        try:
            return NUMBERS[name](values[0])
        except ValueError:
            return UNKNOWN
    for one in plain:
        items = one if isinstance(one, list | tuple) else [one]
        if not all(isinstance(item, int | float) for item in items):
            return UNKNOWN
    try:
        return NUMBERS[name](*plain)
    except (ArithmeticError, ValueError, TypeError):
        return UNKNOWN


def parser_method(interpreter: Any, parser: InstanceValue, name: str, arguments: Any) -> Any:
    """Return what a method of an ArgumentParser returns."""
    options = parser.attributes["options"]
    match name:
        case "add_argument" | "add":
            _add_option(interpreter, options, arguments)
            return UNKNOWN
        case "set_defaults":
            options |= arguments.named
            return None
        case "parse_args" | "parse_known_args" | "parse_args_into_dataclasses":
            made = InstanceValue(Reference("argparse.Namespace"), dict(options), is_default=True, path=interpreter.path)
            return (made, ListValue([], None)) if name == "parse_known_args" else made
    return parser  # groups and subparsers add to the same options


def _add_option(interpreter: Any, options: TableValue, arguments: Any) -> None:
    names = [one for one in arguments.values if isinstance(one, str)]
    long = next((one for one in names if one.startswith("--")), names[0] if names else "")
    name = arguments.get(None, "dest", long.lstrip("-").replace("-", "_"))
    action = arguments.get(None, "action", "store")
    default = arguments.get(None, "default", None)
    is_required = not long.startswith("-") or arguments.get(None, "required", False) is True
    if action in {"store_true", "store_false"}:
        default = arguments.get(None, "default", action == "store_false")
    elif is_required and default is None:
        default = UNKNOWN
    kind = arguments.get(None, "type", None)
    if isinstance(default, str) and isinstance(kind, Reference) and kind.last in {"int", "float"}:
        default = as_number(kind.last, (default,))
    elif isinstance(default, str) and isinstance(kind, FunctionValue):
        default = interpreter.call(kind, CallArguments([default]), interpreter.anchor or interpreter.main.tree)
    if isinstance(name, str) and name:
        options[name] = default
