"""Lists, dicts and texts: their methods and items.

In:  a container, and what the program does with it.  Out: a value; the container is changed as Python changes it.
"""

from __future__ import annotations

import ast
from pathlib import PurePath
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source import command_line, shapes, spaces
from holdall.tools.lint.source.values import (
    ArrayValue,
    ClassValue,
    InstanceValue,
    ListValue,
    ReturnedValues,
    TableValue,
    as_key,
    is_key,
    known_items,
    length_of,
    likely,
    one_of,
    put,
    spread,
    unwrapped,
)

_TEXT_METHODS = {
    "lower", "upper", "strip", "replace", "startswith", "endswith", "removesuffix", "removeprefix", "split",
}  # fmt: skip
MANY = 1_000  # transitions; a deque for n-step returns is no replay buffer
_MOST_WRITTEN_OUT = 16  # items that a loop appends
MOST_SAMPLES = 8  # of what is added to a container


def table_method(interpreter: Any, table: TableValue, name: str, arguments: Any) -> Any:
    """Return what a method of a dict returns."""
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
        case "getint" | "getfloat" | "getboolean":
            return command_line.ini_value(table, name, key, arguments.get(1, "fallback", UNKNOWN))
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
            return table.copied(interpreter.path)
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
    times = interpreter.times_since(owner.rounds)
    is_known = owner.length is not None and length is not None and times is not None
    owner.length = owner.length + length * times if is_known else None


def list_method(interpreter: Any, owner: ListValue, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method of a list or deque returns; what is appended is kept."""
    value = arguments.get(0, "", UNKNOWN)
    if name in {"append", "add", "appendleft", "insert"}:
        value = arguments.get(1, "", UNKNOWN) if name == "insert" else value
        if len(owner.added) < MOST_SAMPLES:
            owner.added.append(value)
        _append(owner, value, interpreter)
        if owner.is_deque or isinstance(value, tuple | TableValue | InstanceValue | ListValue | ArrayValue):
            interpreter.record("appended", owner, arguments, node, item=value)
        return None
    if name == "extend":
        extend(interpreter, owner, value)
        sample = (value.added or value.items)[-1:] if isinstance(value, ListValue) else ()
        if sample and isinstance(sample[0], tuple | InstanceValue):  # transitions of an episode
            interpreter.record("appended", owner, arguments, node, item=sample[0])
    elif name in {"pop", "popleft"}:
        return _popped(owner, 0 if name == "popleft" or value == 0 else -1)
    elif name == "copy":
        return ListValue(list(owner.items), owner.length)
    elif name in {"clear", "remove"}:
        owner.length = None
    return UNKNOWN


def _append(owner: ListValue, value: Any, interpreter: Any) -> None:
    """Append a value as often as the loops do that run since the list was made."""
    further, count = interpreter.path[len(owner.path) :], interpreter.times_since(owner.rounds)
    is_window, owner.is_popped = owner.is_popped, False
    if is_window or (count is not None and not further and count <= _MOST_WRITTEN_OUT and owner.is_known):
        owner.items += [value] * (1 if is_window else count)
        owner.length = None if owner.length is None else owner.length + (1 if is_window else count)
    else:
        owner.items = owner.items or [value]
        owner.length = None if owner.length is None or count is None else owner.length + count


def _popped(owner: ListValue, at: int) -> Any:
    """Take an item from a list; what is appended next takes its place: a window of the latest items."""
    found = one_of((one, "") for one in owner.added) if owner.added else UNKNOWN
    owner.is_passed = True
    if owner.is_known and owner.items:
        owner.is_popped = True
        owner.length = len(owner.items) - 1
        return owner.items.pop(at)
    owner.length = None
    return found


def text_method(text: str, name: str, arguments: Any) -> Any:
    """Return what a method of a text returns."""
    plain = [one for one in arguments.values if isinstance(one, str | int)]
    if name in {"resolve", "absolute", "expanduser", "as_posix"}:
        return text  # a path
    if name in {"with_name", "with_suffix"} and len(plain) == 1 and PurePath(text).name:
        stem = "" if name == "with_name" else PurePath(text).stem
        return str(PurePath(text).with_name(f"{stem}{plain[0]}"))
    if name in {"read_text", "open"}:
        return InstanceValue(Reference("builtins.open"), {}, {"0": text})
    if name == "joinpath" and len(plain) == len(arguments.values):
        return str(PurePath(text, *map(str, plain)))
    if name not in _TEXT_METHODS or (len(plain) != len(arguments.values) and name != "split"):
        return UNKNOWN
    try:
        made = getattr(text, name)(*plain)
    except (TypeError, ValueError):
        return UNKNOWN
    return ListValue(made, len(made)) if name == "split" else made


def item(interpreter: Any, base: Any, index: Any) -> Any:
    """Return `base[index]`."""
    if isinstance(base, ReturnedValues) and whole(index) is None:
        base = base.observation  # older environments return nothing else
    if isinstance(base, TableValue):
        if is_key(index := as_key(index)):
            return base.get(index, UNKNOWN)
        return one_of((one, f"for {key!r}") for key, one in base.items()) if base and base.is_complete else UNKNOWN
    if isinstance(base, Reference | ClassValue):
        return base  # a generic class with its parameters
    number = whole(index)
    if isinstance(base, tuple | str) and number is not None and -len(base) <= number < len(base):
        return base[number]
    if isinstance(base, ListValue):
        is_kept = not (
            (base.is_deque or base.is_passed) and base.added
        )  # otherwise it is one of all that were appended
        if number is not None and is_kept and base.is_known and -len(base.items) <= number < len(base.items):
            return base.items[number]
        samples = (base.items or base.added) if is_kept else [*base.items, *base.added]
        return one_of((one, "") for one in samples) if samples else UNKNOWN
    if isinstance(base, SpaceInfo | Environments):
        return spaces.item(base, index)
    if isinstance(base, ArrayValue):
        return shapes.item(base, index)
    if isinstance(base, InstanceValue) and isinstance(index, str) and index in base.attributes:
        return base.attributes[index]
    if isinstance(base, InstanceValue) and number is not None and getattr(base.made_of, "fields", False):
        values = list(base.attributes.values())  # a named tuple
        return values[number] if -len(values) <= number < len(values) else UNKNOWN
    if base is UNKNOWN and isinstance(index, tuple) and len(index) > 2 and any(isinstance(one, slice) for one in index):
        return shapes.cut_out(index)
    return interpreter.special(base, "__getitem__", index)


def sliced(base: Any, bounds: list[Any]) -> Any:
    """Return `base[a:b:c]`."""
    numbers = [None if one is None else whole(one) for one in bounds]
    base = unwrapped(base)
    if isinstance(base, ArrayValue):
        return shapes.item(base, slice(*bounds))
    if any(number is None and bound is not None for number, bound in zip(numbers, bounds, strict=True)):
        return ListValue([], None) if isinstance(base, ListValue) else UNKNOWN
    if isinstance(base, str | tuple):
        return base[slice(*numbers)]
    if isinstance(base, ListValue) and base.is_known:
        part = base.items[slice(*numbers)]
        return ListValue(part, len(part))
    count = -(numbers[0] or 0)
    if isinstance(base, ListValue) and numbers[1:] == [None, None] and 0 < count <= _MOST_WRITTEN_OUT:
        samples = (base.added or base.items)[-1:]  # the latest of a list that grows
        return ListValue(samples * count, count if samples else None)
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
    return tuple(items) if None not in both and isinstance(left, tuple) else ListValue(items, sum(lengths))  # type: ignore[arg-type]


CHANGEABLE = {ListValue, TableValue}


def snapshot(value: Any) -> Any:
    """Return a value as it is now: lists and dicts may be changed later."""
    if isinstance(value, ListValue):
        return ListValue(list(value.items), value.length, value.maxlen, value.is_deque)
    return value.copied(value.path) if isinstance(value, TableValue) else value
