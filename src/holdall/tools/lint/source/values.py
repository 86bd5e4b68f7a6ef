"""What an expression of a program can be, as far as it is known without running it.

Constants and tuples stand for themselves. Lists, dicts, functions, classes, instances and arrays have a class here.
`Reference` (a thing of a library), `OneOf` (several candidates, each under its condition) and `UNKNOWN` are in run.py.
Invariant: lists, dicts and instances are shared as Python shares them; a change where the program may not come along
keeps the old value as a candidate.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, NotKnownError, OneOf, Reference, known, whole

MOST_CANDIDATES = 6
MOST_SETTINGS = 32  # tables of settings that a loop tries
_MOST_COMBINATIONS = 32
_MOST_GROUPS = 4  # of settings that a loop tries
_LONGEST_DEQUE = 16  # whose items are written out: a stack of frames
Path = tuple[str, ...]
"""The conditions under which a line is reached, from the outside in."""


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array or tensor, by its shape and dtype."""

    shape: tuple[object, ...] | None = None  # UNKNOWN for an axis that is not known; None: not even their number
    dtype: np.dtype[Any] | None = None
    origins: frozenset[object] = frozenset()  # what made its memory: two arrays with a common one share it
    device: str = ""
    shared_frames: int = 1  # of a stack whose frames are objects of their own, shared with the stacks around it
    is_tensor: bool = False  # of torch
    held: int = 0  # bytes that a part of another array keeps alive: all of that one

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements, if known."""
        if self.shape is None or self.dtype is None:
            return None
        axes = [whole(axis) for axis in self.shape]
        known = [axis for axis in axes if axis is not None and axis >= 0]
        return prod(known) * self.dtype.itemsize if len(known) == len(axes) else None

    @property
    def kept(self) -> int:
        """Bytes that are in memory as long as the array is; 0 if they are not known."""
        return max(self.nbytes or 0, self.held) if self.nbytes else 0

    @classmethod
    def new(cls, node: object, shape: Any = None, dtype: Any = None, **more: Any) -> ArrayValue:
        """Return an array in memory of its own; a dtype may be given by its name."""
        return cls(shape, np.dtype(dtype) if isinstance(dtype, str) else dtype, frozenset({node}), **more)

    def made_by(self, node: object, **changes: Any) -> ArrayValue:
        """Return an array in memory of its own, which a copy or a calculation made."""
        return replace(self, origins=frozenset({node}), shared_frames=1, held=0, **changes)


@dataclass(eq=False, slots=True)
class ListValue:
    """A list, set or deque: its items as far as they are known, and how many there are."""

    items: list[Any] = field(default_factory=list)
    length: int | None = 0  # None: not known
    maxlen: object = None  # of a deque
    is_deque: bool = False
    node: ast.AST | None = None  # where it was made
    path: Path = ()
    added: list[Any] = field(default_factory=list)  # samples of what was appended
    name: str = ""  # the first that it was given
    is_fixed: bool = False  # it has its length from the start, and its items are replaced
    rounds: int = 0  # how many loops were running when it was made
    is_popped: bool = False  # an item was taken from it, and nothing appended since
    is_passed: bool = False  # items are taken from it, as from a deque

    @property
    def is_known(self) -> bool:
        """Whether every item is known."""
        return self.length == len(self.items)


class TableValue(dict[object, Any]):
    """A dict; also a configuration whose keys are read as attributes."""

    __slots__ = ("has_attributes", "is_complete", "path")

    def __init__(
        self,
        entries: Iterable[tuple[object, Any]] = (), *, path: Path = (), attributes: bool = False, complete: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(entries)
        self.path, self.has_attributes, self.is_complete = path, attributes, complete

    def copied(self, path: Path) -> TableValue:
        """Return another dict of the same entries, made where these conditions hold."""
        return TableValue(self.items(), path=path, attributes=self.has_attributes, complete=self.is_complete)

    def forget(self) -> None:
        """Something that cannot be followed may have changed the entries."""
        self.clear()
        self.is_complete = False


@dataclass(eq=False, slots=True)
class FunctionValue:
    """A function or lambda of the program."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Any  # the scope that it was defined in
    owner: ClassValue | None = None
    defaults: tuple[Any, ...] = ()
    keyword_defaults: tuple[Any, ...] = ()
    wrapped: Any = None  # what a decorator made of it
    decorators: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its name; lambdas have none."""
        return getattr(self.node, "name", "<lambda>")


@dataclass(eq=False, slots=True)
class ClassValue:
    """A class of the program."""

    node: ast.ClassDef
    scope: Any
    bases: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    decorators: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()  # annotated names, in their order

    def lineage(self) -> Iterator[ClassValue]:
        """Yield the class and those of the program that it extends."""
        yield self
        for base in self.bases:
            if isinstance(base, ClassValue) and base is not self:
                yield from base.lineage()

    def libraries(self) -> Iterator[str]:
        """Yield the full names of the library classes that it extends."""
        for one in self.lineage():
            yield from (base.dotted for base in one.bases if isinstance(base, Reference))

    def find(self, name: str) -> Any:
        """Return an attribute of the class or of one that it extends; UNKNOWN if there is none."""
        return next((one.attributes[name] for one in self.lineage() if name in one.attributes), UNKNOWN)

    def extends(self, *names: str) -> bool:
        """Whether one of the classes that it extends has one of these names."""
        own = [base.node.name for base in self.lineage()]
        return any(name in names for name in (*own, *(dotted.rpartition(".")[2] for dotted in self.libraries())))


@dataclass(eq=False, slots=True)
class InstanceValue:
    """An object: of a class of the program, or of a library's class that is worth following."""

    made_of: ClassValue | Reference
    attributes: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of a library's class, by name or position
    node: ast.AST | None = None
    path: Path = ()
    is_default: bool = False  # its attributes are defaults that a user can override

    @property
    def kind(self) -> str:
        """The full name of its class; a class of the program has only its own."""
        return self.made_of.dotted if isinstance(self.made_of, Reference) else self.made_of.node.name

    def method(self, name: str) -> FunctionValue | None:
        """Return a method of its class, if that is one of the program."""
        found = self.made_of.find(name) if isinstance(self.made_of, ClassValue) else None
        return found if isinstance(found, FunctionValue) else None


class AttributeTable(TableValue):
    """`vars(instance)`, or `instance.__dict__`: what is put into it becomes an attribute."""

    __slots__ = ("instance",)

    def __init__(self, instance: InstanceValue) -> None:
        super().__init__(instance.attributes.items(), path=instance.path)
        self.instance = instance

    def __setitem__(self, key: object, value: Any) -> None:
        super().__setitem__(key, value)
        self.instance.attributes[str(key)] = value


@dataclass(frozen=True, slots=True, eq=False)
class BoundMethod:
    """A method with the object that it belongs to; `function` is None for one of a library."""

    owner: Any
    name: str
    function: FunctionValue | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SuperValue:
    """`super()` in a method of a class."""

    owner: InstanceValue
    above: ClassValue


@dataclass(frozen=True, slots=True, eq=False)
class ModuleValue:
    """A module of the same repository."""

    module: Any


@dataclass(eq=False, slots=True)
class CallArguments:
    """What a call passes, with the expressions that pass it."""

    values: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True  # False: there are further ones that cannot be read
    nodes: dict[int | str, ast.AST] = field(default_factory=dict)
    node: ast.AST | None = None

    @classmethod
    def of(cls, table: Any, *values: Any) -> CallArguments:
        """Return what a dict passes by name, behind some values; None passes nothing."""
        is_table = isinstance(table, TableValue)
        named = {str(name): value for name, value in table.items()} if is_table else {}
        return cls(list(values), named, is_table or table is None)

    def get(self, index: int | None, names: str, default: Any = UNKNOWN) -> Any:
        """Return one argument by one of its names or its position; `default` if it is not passed."""
        for name in names.split() if self.named else ():
            if name in self.named:
                return self.named[name]
        if index is not None and index < len(self.values):
            return self.values[index]
        return default if self.is_complete else UNKNOWN

    def likely(self, index: int | None, names: str, default: Any = UNKNOWN) -> Any:
        """Return one argument; of several candidates, the first that is known."""
        return likely(self.get(index, names, default))

    def number(self, index: int | None, names: str, default: Any = UNKNOWN) -> int:
        """Return an argument that is a whole number; NotKnownError if it is none, or not known."""
        return known(self.likely(index, names, default))

    def count(self, index: int | None, names: str, default: Any = UNKNOWN) -> int:
        """Return an argument that is a number of things; NotKnownError if it is not, or not known."""
        number = self.number(index, names, default)
        if number < 1:
            raise NotKnownError
        return number

    def behind(self, count: int) -> CallArguments:
        """Return all arguments but the first ones."""
        return CallArguments(self.values[count:], self.named, self.is_complete)

    def all_named(self) -> dict[str, Any]:
        """Return all arguments by name, those that have none by their position."""
        return {str(at): value for at, value in enumerate(self.values)} | self.named

    def by_name(self, positional: tuple[str, ...]) -> dict[str, tuple[Any, ast.AST | None]]:
        """Return all arguments by name, each with its expression."""
        pairs = enumerate(zip(positional, self.values, strict=False))
        given = {name: (value, self.nodes.get(i)) for i, (name, value) in pairs}
        return given | {name: (value, self.nodes.get(name)) for name, value in self.named.items()}


def is_key(value: Any) -> bool:
    """Whether a value is one that a dict can be asked for: a constant, a name of a library, or a tuple of them."""
    if isinstance(value, tuple):
        return all(map(is_key, value))
    return isinstance(value, str | int | float | bytes | None | Reference)


def as_key(value: Any) -> Any:
    """Return what stands for a value in a dict: a member of an enumeration by its class and value."""
    if not isinstance(value, InstanceValue) or not isinstance(value.made_of, ClassValue):
        return value
    held = value.attributes.get("value", UNKNOWN)
    return (value.kind, held) if value.made_of.extends("Enum", "IntEnum", "StrEnum") and is_key(held) else value


def candidates_of(value: Any) -> tuple[tuple[Any, str], ...]:
    """Return what a value can be, each with its condition."""
    if isinstance(value, OneOf):
        conditions = value.conditions or ("",) * len(value.values)
        return tuple(zip(value.values, conditions, strict=True))
    return ((value, ""),)


def likely(value: Any) -> Any:
    """Return the first candidate that is known: the default, where there is one."""
    if not isinstance(value, OneOf):
        return value
    return next((one for one in value.values if one is not UNKNOWN and one is not None), value.values[0])


class ReturnedValues(tuple[Any, ...]):
    """What `reset` or `step` returned: an observation first; older environments return fewer values."""

    __slots__ = ()

    @property
    def observation(self) -> Any:
        """The first of the values."""
        return self[0]


def unwrapped(value: Any) -> Any:
    """Return the observation of what `env.reset()` returned; any other value as it is."""
    return value.observation if isinstance(value, ReturnedValues) else value


def best_array(value: Any) -> Any:
    """Return an observation, or of several candidates the largest array, or a likely one where none is an array."""
    several = list(map(unwrapped, value.values)) if isinstance(value, OneOf) else [unwrapped(value)]
    arrays = [one for one in several if isinstance(one, ArrayValue)]
    return max(arrays, key=lambda one: one.nbytes or 0) if arrays else unwrapped(likely(value))


def one_of(pairs: Iterable[tuple[Any, str]], most: int = MOST_CANDIDATES) -> Any:
    """Join candidates: one value if they are all the same."""
    if type(pairs) is list and len(pairs) == 1 and type(pairs[0][0]) is not OneOf:
        return pairs[0][0]
    kept: list[tuple[Any, str]] = []
    can_join = False
    for value, condition in _each(pairs):
        for at, (other, text) in enumerate(kept):
            if other is value or _is_same(value, other):
                if can_join and isinstance(value, ArrayValue):
                    kept[at] = (replace(other, origins=other.origins | value.origins), text)
                break
        else:
            if len(kept) < most:
                kept.append((value, condition))
                can_join = can_join or isinstance(value, ArrayValue)
            elif type(value) is int and type(kept[-1][0]) is int:  # of many sizes, the largest is one
                kept[-1] = max(kept[-1], (value, condition), key=lambda one: one[0])
            elif not can_join:
                break
    if not kept:
        return UNKNOWN
    if len(kept) == 1:
        return kept[0][0]
    return OneOf(tuple(value for value, _ in kept), tuple(condition for _, condition in kept))


def _each(pairs: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    for value, condition in pairs:
        if isinstance(value, OneOf):
            yield from ((one, inner or condition) for one, inner in candidates_of(value))
        else:
            yield value, condition


def _is_same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, ArrayValue):
        return (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
    return bool(left == right) if not isinstance(left, TableValue) else False


def spread(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function once for each combination of candidates."""
    for value in values:
        if isinstance(value, OneOf):
            break
    else:
        return function(*values)
    combinations: list[tuple[tuple[Any, ...], str]] = [((), "")]
    for value in values:
        combinations = [
            ((*chosen, one), condition or inner)
            for chosen, condition in combinations
            for one, inner in candidates_of(value)
        ][:_MOST_COMBINATIONS]
    made = [(function(*chosen), condition) for chosen, condition in combinations]
    return one_of(made, MOST_SETTINGS if isinstance(made[0][0], BoundMethod | TableValue) else MOST_CANDIDATES)


def each_part(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, or several candidates, with each part changed; any other value as it is."""
    if isinstance(value, OneOf):
        return OneOf(tuple(map(change, value.values)), value.conditions)
    return type(value)(map(change, value)) if isinstance(value, tuple) else value


def known_items(value: Any) -> list[Any] | None:
    """Return the items of a list or tuple, if all of them are known."""
    if isinstance(value, tuple | list):
        return list(value)
    return value.items if isinstance(value, ListValue) and value.is_known else None


def filled_deque(owner: Any) -> Any:
    """Return what a deque holds once it is full: as many items as it is limited to; any other value as it is."""
    if not isinstance(owner, ListValue) or not owner.is_deque:
        return owner
    limit, sample = whole(likely(owner.maxlen)), (owner.items or owner.added)[-1:]
    if limit is None or not sample or not 0 < limit <= _LONGEST_DEQUE:
        return owner
    return ListValue(sample * limit, limit)


def length_of(value: Any) -> int | None:
    """Return how many items a value has."""
    if isinstance(value, ListValue):
        return value.length
    if isinstance(value, TableValue):
        return len(value) if value.is_complete else None
    if isinstance(value, ArrayValue):
        return whole(value.shape[0]) if value.shape else None
    return len(value) if isinstance(value, tuple | str | list) else None


def grouped_settings(over: Any) -> list[Any]:
    """Split tables of settings that a loop goes through by the words and flags in them, which a program branches on."""
    items = known_items(over) or []
    tables = [one[-1] if isinstance(one, tuple) and one else one for one in items]
    if len(tables) < 2 or not all(isinstance(one, TableValue) for one in tables):
        return [over]
    keys = {key for one in tables for key, value in one.items() if isinstance(value, str | bool)}
    rows = {key: [str(one.get(key)) for one in tables] for key in sorted(map(str, keys))}
    chosen = [row for row in rows.values() if len(set(row)) < min(len(row), _MOST_GROUPS + 1)]
    groups: dict[tuple[str, ...], list[Any]] = {}
    for index, item in enumerate(items):
        groups.setdefault(tuple(row[index] for row in chosen), []).append(item)
    return [over] if not 1 < len(groups) <= _MOST_GROUPS else [ListValue(one, len(one)) for one in groups.values()]


def put(table: dict[Any, Any], key: object, value: Any, made: Path, here: Path) -> None:
    """Change an entry; where the change happens only under further conditions, the old value stays a candidate."""
    further = here[len(made) :] if here[: len(made)] == made else ()
    if further and key not in table and (value is None or value is UNKNOWN):
        return  # an option that was not given is not passed on
    if further and key in table and table[key] is not value:
        value = one_of([(table[key], ""), (value, " and ".join(further))])
    table[key] = value


def carried(first: Any, second: Any) -> Any:
    """Return what a name is in the later rounds of a loop: of arrays that are alike, the one that a round leaves."""
    is_array = type(first) is ArrayValue and type(second) is ArrayValue
    return second if is_array and _is_same(first, second) else one_of([(first, ""), (second, "")])


def either(first: Any, second: Any) -> Any:
    """Return what a name is after a `try` that gave it one value and a handler that gave it another."""
    if isinstance(second, InstanceValue):
        return one_of([(first, ""), (second, "")])
    return second if first is UNKNOWN or isinstance(first, Reference) else first  # what can be read


def joined_names(ends: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Join the names that alternatives leave behind."""
    if len(ends) == 1:
        return ends[0][1]
    names = dict(ends[0][1])
    for _, other in ends[1:]:
        for name, value in other.items():
            if name not in names:
                names[name] = value
            elif names[name] is not value:
                names[name] = one_of([(one[name], text) for text, one in ends if name in one])
    return names
