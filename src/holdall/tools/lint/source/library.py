"""What calls of Python's own functions, of command line parsers and of containers return.

In:  the full name of a library's function, or a value and the name of its method, and the arguments.
Out: a value. What is not described here, in arrays.py, in environments.py or in frameworks.py is UNKNOWN.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Callable, Iterator
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source import arrays, environments, frameworks
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    SuperValue,
    TableValue,
    known_items,
    length_of,
    likely,
    one_of,
    put,
    spread,
)

array_member, calculated = arrays.array_member, arrays.calculated
_NUMBERS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (int, float, bool, max, min, round, abs, sum, str)}
BUILTINS = frozenset(
    {*_NUMBERS, "dict", "list", "tuple", "set", "len", "range", "open", "vars", "zip", "enumerate", "super", "getattr"}
    | {"setattr", "isinstance", "print", "sorted", "reversed", "map", "filter", "type", "object", "exit", "quit", "any"}
    | {"all", "hasattr", "input", "iter", "next", "repr", "eval", "callable", "property", "staticmethod", "classmethod"}
)
MOST_SAMPLES = 8  # of what is added to a container
_LOADERS = {"safe_load", "load", "full_load", "unsafe_load", "loads", "FullLoader"}
_DATA_PACKAGES = {"yaml", "json", "toml", "tomllib", "tomli", "ruamel", "omegaconf"}
_PARSERS = {"ArgumentParser", "ArgParser", "HfArgumentParser"}
_FOLLOWED = {"argparse", "configargparse", "absl", "click", "typer", "hydra", "dataclasses", "ml_collections", "easydict"}


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a call of a library's function, or of its class, returns."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package == "builtins":
        return _builtin(interpreter, last, arguments, node)
    if last == "__init__" and arguments.values and isinstance(arguments.values[0], InstanceValue):
        rest = type(arguments)(arguments.values[1:], arguments.named, arguments.is_complete)
        interpreter.library_start(arguments.values[0], rest)
        return None
    for follow in (frameworks.call, environments.call, arrays.call):
        found = follow(interpreter, dotted, arguments, node)
        if found is not NotImplemented:
            return found
    if package in _DATA_PACKAGES:
        return _loaded(interpreter, last, arguments, package)
    return _other(interpreter, dotted, last, arguments, node)


def _other(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each function
    first = arguments.get(0, "", UNKNOWN)
    match dotted:
        case "collections.deque":
            limit = arguments.get(1, "maxlen", None)
            return ListValue([], None if limit is UNKNOWN else 0, limit, is_deque=True, node=node, path=interpreter.path)
        case "collections.namedtuple":
            return _named_tuple(interpreter, arguments, node)
        case "collections.OrderedDict" | "easydict.EasyDict" | "ml_collections.ConfigDict" | "munch.Munch":
            return _table(interpreter, arguments, attributes="Ordered" not in dotted)
        case "types.SimpleNamespace" | "argparse.Namespace":
            return InstanceValue(Reference(dotted), dict(arguments.named), node=node, path=interpreter.path)
        case "functools.partial":
            return InstanceValue(Reference(dotted), {}, {"call": first, "arguments": arguments}, node)
        case "copy.deepcopy" | "copy.copy":
            return first
        case "os.path.join":
            parts = arguments.values
            return os.path.join(*parts) if parts and all(isinstance(one, str) for one in parts) else UNKNOWN
        case "os.path.dirname" | "os.path.abspath" | "os.path.expanduser" | "os.path.realpath":
            if not isinstance(first, str):
                return UNKNOWN
            return os.path.dirname(first) if last == "dirname" else first
        case "pathlib.Path" | "pathlib.PurePath":
            return first if isinstance(first, str) else UNKNOWN
        case "multiprocessing.cpu_count" | "os.cpu_count":
            return UNKNOWN
        case "dataclasses.field":
            return InstanceValue(Reference(dotted), {}, dict(arguments.named), node)
        case "dataclasses.asdict" | "dataclasses.replace":
            return _vars(interpreter, first)
        case "math.prod" | "numpy.prod":
            return spread(_product, first)
        case "itertools.count":
            return UNKNOWN
    return _command_line(interpreter, dotted, last, arguments, node)


def _command_line(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:
    """Return what parsers of command lines make: their options, with the defaults."""
    first = arguments.get(0, "", UNKNOWN)
    if last in _PARSERS:
        made = InstanceValue(Reference("argparse.ArgumentParser"), node=node)
        made.attributes["options"] = TableValue()
        return made
    if dotted in {"tyro.cli", "pyrallis.parse", "draccus.parse", "jsonargparse.CLI", "fire.Fire", "tyro.extras.overridable_config_cli"}:
        return _from_defaults(interpreter, arguments.get(0, "config_class"), node)
    if dotted.startswith("absl.flags.DEFINE") or dotted.startswith("flags.DEFINE"):
        if isinstance(first, str):
            interpreter.flags[first] = arguments.get(1, "default", None)
        return UNKNOWN
    if dotted in {"typer.Option", "typer.Argument", "pydantic.Field", "tyro.conf.arg"}:
        return arguments.get(0, "default", UNKNOWN)
    if dotted.partition(".")[0] in _FOLLOWED or last[:1].isupper():
        named = {str(i): value for i, value in enumerate(arguments.values)} | arguments.named
        return InstanceValue(Reference(dotted), {}, named, node, interpreter.path)
    return UNKNOWN


def _from_defaults(interpreter: Any, made_of: Any, node: ast.AST) -> Any:
    """Make a data class, or call a function, with nothing but its defaults."""
    empty = type(interpreter.no_arguments)(is_complete=False)
    if isinstance(made_of, ClassValue):
        made = interpreter.instantiate(made_of, empty, node)
        if isinstance(made, InstanceValue):
            made.is_default = True
        return made
    return interpreter.call_function(made_of, empty) if isinstance(made_of, FunctionValue) else UNKNOWN


def configured_argument(interpreter: Any, function: FunctionValue) -> Any:
    """Return the configuration that hydra hands to a function; None if it hands none."""
    made = next((one for one in function.wrapped or () if one.kind == "hydra.main"), None)
    if made is None:
        return None
    folder = made.arguments.get("config_path", made.arguments.get("0", ""))
    name = made.arguments.get("config_name", made.arguments.get("1", "config"))
    if not isinstance(name, str):
        return None
    folder = folder if isinstance(folder, str) else ""
    return _hydra(interpreter, folder, name.removesuffix(".yaml"))


def click_defaults(function: FunctionValue) -> Iterator[tuple[str, Any]]:
    """Yield the options that click's decorators give a function, with their defaults."""
    for one in function.wrapped or ():
        if one.kind in {"click.option", "click.argument"}:
            names = [value for key, value in one.arguments.items() if key.isdigit() and isinstance(value, str)]
            long = next((name for name in names if not name.startswith("-")), None)
            long = long or next((name for name in names if name.startswith("--")), "").partition("/")[0]
            flag = False if one.arguments.get("is_flag") is True else None
            yield long.lstrip("-").replace("-", "_"), one.arguments.get("default", flag)


def _hydra(interpreter: Any, folder: str, name: str) -> Any:
    """Read a configuration of hydra, with the files that its list of defaults names."""
    here = interpreter.scope.module.path if interpreter.scope.module else interpreter.main.path
    if folder.endswith((".yaml", ".yml")):
        folder, name = os.path.split(folder)  # as older versions take it
        name = name.rpartition(".")[0]
    data = interpreter.repository.data(os.path.join(folder, f"{name}.yaml"), here)
    if not isinstance(data, dict):
        data = interpreter.repository.data(name if name.endswith((".yaml", ".yml")) else f"{name}.yml", here)
    if not isinstance(data, dict):
        return None
    merged: dict[Any, Any] = {}
    for entry in data.get("defaults", None) or ():
        for group, chosen in entry.items() if isinstance(entry, dict) else [("", entry)]:
            group = str(group).removeprefix("override ").lstrip("/").partition("@")[0]
            inner = interpreter.repository.data(os.path.join(folder, group, f"{chosen}.yaml"), here)
            if isinstance(inner, dict):
                merged |= {group: inner} if group and "package _global_" not in str(inner) else inner
    merged |= {key: value for key, value in data.items() if key not in {"defaults", "hydra"}}
    return from_data(merged, merged, attributes=True)


def from_data(data: Any, root: Any = None, attributes: bool = False, depth: int = 0) -> Any:
    """Return a value for what a data file holds."""
    if depth > 8:
        return UNKNOWN
    if isinstance(data, dict):
        return TableValue(((k, from_data(v, root, attributes, depth + 1)) for k, v in data.items()), attributes=attributes)
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


def _loaded(interpreter: Any, last: str, arguments: Any, package: str) -> Any:
    if last not in _LOADERS:
        return arguments.get(0, "") if last in {"to_container", "create", "structured"} else UNKNOWN
    source = likely(arguments.get(0, "stream"))
    if isinstance(source, InstanceValue) and source.kind == "builtins.open":
        source = source.arguments.get("0", source.arguments.get("file", UNKNOWN))
        source = likely(source)
    if not isinstance(source, str):
        return UNKNOWN
    here = interpreter.scope.module.path if interpreter.scope.module else interpreter.main.path
    data = interpreter.repository.data(source, here)
    return UNKNOWN if data is None else from_data(data, data, attributes=package == "omegaconf")


def _product(value: Any) -> Any:
    items = known_items(value)
    if items is None:
        return UNKNOWN
    result = 1
    for one in items:
        number = whole(one)
        if number is None:
            return UNKNOWN
        result *= number
    return result


def _named_tuple(interpreter: Any, arguments: Any, node: ast.AST) -> Any:
    fields = arguments.get(1, "field_names")
    names = fields.replace(",", " ").split() if isinstance(fields, str) else known_items(fields)
    if names is None or not all(isinstance(one, str) for one in names):
        return Reference("collections.namedtuple.unknown")
    empty = ast.ClassDef(name=str(arguments.get(0, "typename")), bases=[], keywords=[], body=[], decorator_list=[])
    return ClassValue(empty, interpreter.scope, (), dict.fromkeys(names, UNKNOWN), frozenset({"NamedTuple"}), tuple(names))


def _table(interpreter: Any, arguments: Any, attributes: bool = False) -> TableValue:
    table = TableValue(path=interpreter.path, attributes=attributes)
    for value in arguments.values[:1]:
        update(interpreter, table, value)
    for name, value in arguments.named.items():
        table[name] = value
    table.is_complete = table.is_complete and arguments.is_complete
    return table


def _builtin(interpreter: Any, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each function
    values = arguments.values
    first = values[0] if values else UNKNOWN
    match name:
        case "dict":
            return _table(interpreter, arguments)
        case "list" | "tuple" | "set" | "sorted" | "reversed":
            return _sequence(name, first, bool(values))
        case "len":
            return spread(lambda one: UNKNOWN if length_of(one) is None else length_of(one), first)
        case "range":
            return spread(_range, *values)
        case "open":
            named = {str(i): value for i, value in enumerate(values)} | arguments.named
            return InstanceValue(Reference("builtins.open"), {}, named, node)
        case "vars":
            return _vars(interpreter, first)
        case "getattr":
            found = interpreter.member(first, values[1]) if len(values) > 1 and isinstance(values[1], str) else UNKNOWN
            return values[2] if found is UNKNOWN and len(values) > 2 else found
        case "setattr" if len(values) == 3 and isinstance(first, InstanceValue) and isinstance(values[1], str):
            put(first.attributes, values[1], values[2], first.path, interpreter.path)
            return None
        case "zip":
            items = [known_items(one) for one in values]
            if items and all(one is not None for one in items):
                return ListValue(pairs := [tuple(one) for one in zip(*items, strict=False)], len(pairs))
            lengths = [length_of(one) for one in values]
            return ListValue([], min(lengths) if lengths and None not in lengths else None)  # type: ignore[type-var]
        case "enumerate":
            items = known_items(first)
            if items is not None:
                return ListValue([(i, one) for i, one in enumerate(items)], len(items))
            sample = interpreter.item_of_loop(first)
            return ListValue([(UNKNOWN, sample)], length_of(first))
        case "map" | "filter" | "iter":
            return ListValue([], length_of(values[-1]) if values and name == "map" else None)
        case "next":
            return interpreter.item_of_loop(first)
        case "isinstance" if len(values) == 2:
            return _is_instance(first, values[1])
        case "exit" | "quit":
            interpreter.seen_function = Reference("sys.exit")
            return UNKNOWN
    if name in _NUMBERS and not arguments.named and values:
        return spread(lambda *each: _number(name, each), *values)
    return UNKNOWN


_KINDS = {"str": str, "int": int, "float": float, "bool": bool, "tuple": tuple, "list": ListValue, "dict": TableValue}


def _is_instance(value: Any, kinds: Any) -> Any:
    """Return whether a value is of a class, where both are known: constants, containers, spaces."""
    names = [one.last for one in known_items(kinds) or [kinds] if isinstance(one, Reference)]
    if isinstance(value, SpaceInfo):
        leaf = value.leaves[0]
        own = "Dict" if value.is_dict else "Discrete" if leaf.dtype.kind == "i" and not leaf.shape else "Box"
        if own == "Box" and leaf.dtype.kind == "i" and "" not in value.bounds:
            own = "MultiDiscrete" if leaf.dtype.itemsize == 8 else "MultiBinary"
        return own in names if names else UNKNOWN
    if isinstance(value, str | int | float | tuple | ListValue | TableValue) and names and all(n in _KINDS for n in names):
        return any(isinstance(value, _KINDS[name]) for name in names)
    return UNKNOWN


def _number(name: str, values: tuple[Any, ...]) -> Any:
    plain = [known_items(one) if isinstance(one, ListValue) else one for one in values]
    if name == "str":
        return str(values[0]) if isinstance(values[0], str | int | float) else UNKNOWN
    if name in {"int", "float"} and isinstance(values[0], str):
        try:
            return _NUMBERS[name](values[0])
        except ValueError:
            return UNKNOWN
    for one in plain:
        items = one if isinstance(one, list | tuple) else [one]
        if not all(isinstance(item, int | float) for item in items):
            return UNKNOWN
    try:
        return _NUMBERS[name](*plain)
    except (ArithmeticError, ValueError, TypeError):
        return UNKNOWN


def _range(*bounds: Any) -> Any:
    numbers = [whole(one) for one in bounds]
    if None in numbers:
        return ListValue([], None)
    try:
        found = range(*numbers)  # type: ignore[arg-type]  # whole numbers, checked above
    except (ValueError, TypeError):
        return ListValue([], None)
    return ListValue(list(found), len(found)) if len(found) <= 8 else ListValue([], min(len(found), 2**62))


def _sequence(name: str, first: Any, is_given: bool) -> Any:
    if not is_given:
        return () if name == "tuple" else ListValue([], 0)
    if isinstance(first, OneOf):
        return spread(lambda one: _sequence(name, one, True), first)
    items = known_items(first)
    if items is None:
        return ListValue(list(first.items), first.length) if isinstance(first, ListValue) else UNKNOWN
    return tuple(items) if name == "tuple" else ListValue(items, len(items))


def _vars(interpreter: Any, value: Any) -> Any:
    if isinstance(value, InstanceValue):
        return TableValue(value.attributes.items(), path=interpreter.path)
    return value if isinstance(value, TableValue) else UNKNOWN


# ------------------------------------------------------------ methods


def call_method(interpreter: Any, owner: Any, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: PLR0911  one line for each kind of value
    """Return what a method of a library's object, or of a container, returns."""
    match owner:
        case TableValue():
            return _table_method(interpreter, owner, name, arguments)
        case ListValue():
            return _list_method(interpreter, owner, name, arguments, node)
        case str():
            return _text_method(owner, name, arguments)
        case tuple():
            return UNKNOWN
        case ArrayValue():
            return arrays.call_method(owner, name, arguments, node)
        case Environments() | SpaceInfo():
            return environments.call_method(interpreter, owner, name, arguments, node)
        case SuperValue(owner=instance):
            if name == "__init__":
                interpreter.library_start(instance, arguments)
            return None if name == "__init__" else UNKNOWN
        case InstanceValue():
            if owner.kind == "argparse.ArgumentParser":
                return _parser_method(interpreter, owner, name, arguments)
            found = environments.instance_method(interpreter, owner, name, arguments, node)
            return frameworks.call_method(interpreter, owner, name, arguments, node) if found is NotImplemented else found
    return UNKNOWN


def _table_method(interpreter: Any, table: TableValue, name: str, arguments: Any) -> Any:
    key, other = arguments.get(0, "", UNKNOWN), arguments.get(1, "default", None)
    match name:
        case "get" | "pop" | "setdefault":
            if isinstance(key, OneOf):
                return spread(lambda one: table.get(one, UNKNOWN) if isinstance(one, str | int) else UNKNOWN, key)
            if not isinstance(key, str | int | float | bool | None):
                return UNKNOWN
            if name == "setdefault" and key not in table:
                table[key] = other
            default = other if table.is_complete else UNKNOWN
            return table.pop(key, default) if name == "pop" and not interpreter.path else table.get(key, default)
        case "update":
            for value in arguments.values:
                update(interpreter, table, value)
            for one, value in arguments.named.items():
                put(table, one, value, table.path, interpreter.path)
            return None
        case "items" | "values" | "keys":
            made = {"items": list(table.items()), "values": list(table.values()), "keys": list(table)}[name]
            return ListValue(made, len(made) if table.is_complete else None)
        case "copy":
            copied = TableValue(table.items(), path=interpreter.path, attributes=table.has_attributes)
            copied.is_complete = table.is_complete
            return copied
    return UNKNOWN


def update(interpreter: Any, table: TableValue, other: Any) -> None:
    """Add the entries of another dict."""
    other = likely(other)
    if isinstance(other, TableValue):
        for key, value in other.items():
            put(table, key, value, table.path, interpreter.path)
        table.is_complete = table.is_complete and other.is_complete
    elif (items := known_items(other)) is not None and all(isinstance(one, tuple) and len(one) == 2 for one in items):
        for key, value in items:
            if isinstance(key, str | int):
                put(table, key, value, table.path, interpreter.path)
    elif other is not None:
        table.forget()


def extend(interpreter: Any, owner: ListValue, more: Any) -> None:
    """Add the items of a sequence to a list."""
    items, length = known_items(more), length_of(more)
    owner.items += items or []
    repeats = interpreter.repeats
    is_known = owner.length is not None and length is not None and repeats is not None
    owner.length = owner.length + length * repeats if is_known else None  # type: ignore[operator]


def _list_method(interpreter: Any, owner: ListValue, name: str, arguments: Any, node: ast.AST) -> Any:
    value = arguments.get(0, "", UNKNOWN)
    if name in {"append", "add", "appendleft", "insert"}:
        value = arguments.get(1, "", UNKNOWN) if name == "insert" else value
        if len(owner.added) < MOST_SAMPLES:
            owner.added.append(value)
        if interpreter.repeats == 1 and not interpreter.path[len(owner.path) :]:
            owner.items.append(value)
            owner.length = None if owner.length is None else owner.length + 1
        else:
            owner.items = owner.items or [value]
            is_known = owner.length is not None and interpreter.repeats is not None
            owner.length = owner.length + interpreter.repeats if is_known else None  # type: ignore[operator]
        if owner.is_deque or isinstance(value, tuple | TableValue | InstanceValue | ListValue):
            interpreter.record("appended", owner, arguments, node, item=value)
        return None
    if name == "extend":
        extend(interpreter, owner, value)
    elif name in {"pop", "popleft"}:
        owner.length = None
        return one_of((one, "") for one in owner.added) if owner.added else UNKNOWN
    elif name == "copy":
        return ListValue(list(owner.items), owner.length)
    elif name in {"clear", "remove"}:
        owner.length = None
    return UNKNOWN


def _text_method(text: str, name: str, arguments: Any) -> Any:
    plain = [one for one in arguments.values if isinstance(one, str | int)]
    if name not in {"lower", "upper", "strip", "replace", "startswith", "endswith", "removesuffix", "removeprefix"}:
        return _split(text, plain) if name == "split" else UNKNOWN
    if len(plain) != len(arguments.values):
        return UNKNOWN
    try:
        return getattr(text, name)(*plain)
    except (TypeError, ValueError):
        return UNKNOWN


def _split(text: str, plain: list[Any]) -> Any:
    try:
        parts: list[Any] = text.split(*plain)
    except (TypeError, ValueError):
        return UNKNOWN
    return ListValue(parts, len(parts))


# ------------------------------------------------------------ argparse


def _parser_method(interpreter: Any, parser: InstanceValue, name: str, arguments: Any) -> Any:
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
        default = _number(kind.last, (default,))
    if isinstance(name, str) and name:
        options[name] = default


# ------------------------------------------------------------ items


def item(interpreter: Any, base: Any, index: Any) -> Any:  # noqa: PLR0911  one line for each kind of value
    """Return `base[index]`."""
    if isinstance(base, TableValue):
        if isinstance(index, str | int | float | bool | None | Reference):
            return base.get(index, UNKNOWN)
        return one_of((one, f"for {key!r}") for key, one in base.items()) if base and base.is_complete else UNKNOWN
    if isinstance(base, Reference | ClassValue):
        return base  # a generic class with its parameters
    number = whole(index)
    if isinstance(base, tuple) and number is not None and -len(base) <= number < len(base):
        return base[number]
    if isinstance(base, ListValue):
        if number is not None and base.is_known and -len(base.items) <= number < len(base.items):
            return base.items[number]
        samples = base.items or base.added
        return one_of((one, "") for one in samples) if samples else UNKNOWN
    if isinstance(base, SpaceInfo | Environments):
        return environments.item(base, index)
    if isinstance(base, ArrayValue):
        return arrays.item(base, index)
    if isinstance(base, str) and number is not None and -len(base) <= number < len(base):
        return base[number]
    if isinstance(base, InstanceValue) and isinstance(index, str) and index in base.attributes:
        return base.attributes[index]
    return UNKNOWN


def sliced(base: Any, bounds: list[Any]) -> Any:
    """Return `base[a:b:c]`."""
    numbers = [None if one is None else whole(one) for one in bounds]
    if isinstance(base, ArrayValue):
        return arrays.sliced(base, bounds)
    if any(number is None and bound is not None for number, bound in zip(numbers, bounds, strict=True)):
        return ListValue([], None) if isinstance(base, ListValue) else UNKNOWN
    if isinstance(base, str | tuple):
        return base[slice(*numbers)]
    if isinstance(base, ListValue) and base.is_known:
        part = base.items[slice(*numbers)]
        return ListValue(part, len(part))
    return UNKNOWN


def joined_sequences(left: Any, right: Any) -> Any:
    """Return `left + right` of two sequences."""
    both = [known_items(left), known_items(right)]
    if None not in both and isinstance(left, tuple) and isinstance(right, tuple):
        return left + right
    lengths = [length_of(left), length_of(right)]
    items = [one for part in both for one in part or ()]
    if None in lengths:
        return ListValue(items, None)
    if None not in both and isinstance(left, tuple):
        return tuple(items)
    return ListValue(items, sum(lengths))  # type: ignore[arg-type]


def snapshot(value: Any) -> Any:
    """Return a value as it is now: lists and dicts may be changed later."""
    if isinstance(value, TableValue):
        copied = TableValue(value.items(), path=value.path, attributes=value.has_attributes)
        copied.is_complete = value.is_complete
        return copied
    return ListValue(list(value.items), value.length, value.maxlen, value.is_deque) if isinstance(value, ListValue) else value


def suggested(name: str, arguments: Any) -> Any:
    """Return what a search over hyperparameters tries: the choices, or the ends of a range."""
    if name == "suggest_categorical":
        choices = known_items(arguments.get(1, "choices"))
        return one_of((one, "") for one in choices) if choices else UNKNOWN
    ends = [whole(arguments.get(at, word)) for at, word in ((1, "low"), (2, "high"))]
    return UNKNOWN if None in ends or name != "suggest_int" else OneOf(tuple(ends))


def called_value(interpreter: Any, value: Any) -> Any:
    """Return what calling a value without arguments returns: a class, a function, a partial."""
    value = likely(value)
    node = interpreter.anchor or interpreter.main.tree
    if isinstance(value, InstanceValue) and value.kind == "functools.partial":
        given = value.arguments["arguments"]
        rest = type(given)(given.values[1:], given.named, given.is_complete)
        return interpreter.call(value.arguments["call"], rest, node)
    if isinstance(value, FunctionValue | ClassValue | BoundMethod | Reference):
        return interpreter.call(value, interpreter.no_arguments, node)
    return value
