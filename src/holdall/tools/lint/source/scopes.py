"""Scopes, names and attributes: where the values of a program are kept while it is followed.

In:  a name, an attribute or an item, and the value that the program gives it.  Out: the value where it is read.
Invariant: a change that happens only under a condition keeps the value from before as a candidate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, algorithm_by_import, whole
from holdall.tools.lint.source import arrays, containers, environments, frameworks, library, spaces
from holdall.tools.lint.source.repository import Module
from holdall.tools.lint.source.values import (
    ArrayValue,
    AttributeTable,
    BoundMethod,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    ModuleValue,
    Path,
    ReturnedValues,
    SuperValue,
    TableValue,
    candidates_of,
    is_key,
    known_items,
    one_of,
    put,
    spread,
)

_PLAIN = int | float | str | bool | bytes | None
_NAMELESS = {int, float, str, bool, type(None), tuple, Reference, type(UNKNOWN), FunctionValue, ClassValue, BoundMethod}
_CALLBACK = re.compile(r"\.callbacks")
_PROPERTIES = {"property", "cached_property"}
_MOST_PARENTS = 8
_MOST_ENTRIES = 8  # of a dict, one of which may be changed
_MOST_STEPS = 60_000
_CONSTANT: list[Any] = []  # what was seen of a constant
_METHODS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {}  # that evaluate an expression, by its kind


class OutOfStepsError(Exception):
    """The program is too large to be followed to its end."""


@dataclass(eq=False, slots=True)
class Scope:
    """The names of a module, class or function while it is followed."""

    module: Module | None
    names: dict[str, Any] = field(default_factory=dict)
    parent: Scope | None = None
    is_class: bool = False
    instance: Any = None  # self
    owner: ClassValue | None = None  # the class whose method this is
    path: Path = ()
    outer: set[str] = field(default_factory=set)  # global and nonlocal names
    soft: set[str] = field(default_factory=set)  # parameters that have only their default
    returned: list[tuple[Any, str]] = field(default_factory=list)
    yielded: list[Any] = field(default_factory=list)
    rounds: int = 0  # how many loops were running when it was called
    maker: Any = None  # the object whose method is running, also through functions that it calls
    call: object = None


class Names:
    """The names of the scopes, and what they hold; how calls are followed is the interpreter's."""

    def __init__(self) -> None:
        self.scope = Scope(None)
        self.path: Path = ()
        self._seen: dict[ast.AST, list[Any]] = {}  # by expression of the script, each time that it was reached
        self.instances: list[InstanceValue] = []
        self.is_soft = False  # whether a default that a user can override was read
        self.rounds: tuple[int | None, ...] = ()  # of the loops that are running, from the outside in
        self.anchor: ast.AST | None = None  # the call of the script that led here
        self.seen_function: Any = UNKNOWN  # what the last call called
        self.names: dict[object, str] = {}  # of arrays by what made them
        self.environments: dict[int, Any] = {}  # those that have names
        self._given_here: dict[tuple[InstanceValue, str], tuple[Path, Any]] = {}  # arrays, and under which conditions
        self._texts: dict[ast.AST, str] = {}
        self.tracked: TableValue | None = None  # the configuration of a run of Weights & Biases
        self.arrays_replaced = 0  # attributes that held one array and got another
        self.steps = 0

    def times_since(self, rounds: int) -> int | None:
        """Return how often the loops run this line that began after so many others."""
        count: int | None = 1
        for times in self.rounds[rounds:]:
            count = None if times is None or count is None else count * times
        return count

    # What follows statements and calls, which classes below this one define.
    main: Module
    call_function: Callable[..., Any]
    binary: Callable[..., Any]
    record: Callable[..., None]

    # ------------------------------------------------------------ values

    def value(self, node: ast.expr) -> Any:
        """Return what an expression is."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise OutOfStepsError
        kind = type(node)
        if kind is ast.Constant:
            if self.scope.module is self.main:
                self._seen[node] = _CONSTANT
            return node.value  # type: ignore[attr-defined]
        if kind is ast.Name:
            value = self.lookup(node.id)  # type: ignore[attr-defined]
        else:
            method = _METHODS.get(kind) or self._method(kind)
            value = method(self, node)
        if self.scope.module is self.main:
            before = self._seen.get(node)
            if before is None or before[-1] is not value:
                kept = containers.snapshot(value) if type(value) in containers.CHANGEABLE else value
                if before is None:
                    self._seen[node] = [kept]
                else:
                    before.append(kept)
        return value

    @classmethod
    def _method(cls, kind: type[ast.AST]) -> Callable[[Any, Any], Any]:
        return _METHODS.setdefault(kind, getattr(cls, f"_on_{kind.__name__.lower()}", cls._other))

    def was_reached(self, node: ast.AST | None) -> bool:
        """Whether an expression of the script was followed."""
        return node in self._seen

    def seen(self, node: ast.AST | None) -> Any:
        """Return what an expression of the script is, over all the times that it was reached."""
        found = self._seen.get(node, ()) if node is not None else ()
        if found is _CONSTANT:
            return node.value  # type: ignore[union-attr]
        return found[0] if len(found) == 1 else one_of((one, "") for one in found)

    def text_of(self, node: ast.AST) -> str:
        """Return the source of a condition."""
        if node not in self._texts:
            self._texts[node] = ast.unparse(node)
        return self._texts[node]

    def _other(self, node: ast.expr) -> Any:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return UNKNOWN

    def lookup(self, name: str) -> Any:
        """Return what a name is here."""
        scope: Scope | None = self.scope
        is_own = True
        while scope is not None:
            if name in scope.names and (is_own or not scope.is_class):
                self.is_soft = self.is_soft or name in scope.soft
                return scope.names[name]
            names = None if scope.module is None or scope.parent is not None else scope.module.names
            if names is not None and name in names:
                return names[name]
            scope, is_own = scope.parent, False
        stars = self.scope.module.stars if self.scope.module is not None and name not in library.BUILTINS else ()
        usual = library.USUAL.get(name)
        return usual or (Reference(f"{stars[-1]}.{name}") if stars else library.BUILTINS.get(name, UNKNOWN))

    def bind(self, name: str, value: Any) -> None:
        """Give a name a value."""
        if name in self.scope.outer and self.scope.module is not None:
            put(self.scope.module.names, name, value, (), (*self.path, f"{name} is changed"))
            return
        self.scope.soft.discard(name)
        self.scope.names[name] = value
        self._remember(name, value)

    def _remember(self, name: str, value: Any) -> None:
        if type(value) in _NAMELESS:  # most values
            return
        if isinstance(value, ArrayValue):
            for origin in value.origins:
                self.names.setdefault(origin, name)
        elif isinstance(value, OneOf):
            for one in value.values:
                self._remember(name, one)
        elif isinstance(value, ListValue):
            value.name = value.name or name
        elif isinstance(value, Environments | InstanceValue) and "env" in name and "eval" not in name:
            self.environments[id(value)] = value

    def exchange(self, old: Any, new: Any) -> None:
        """Put a value in the place of another one, wherever names and attributes hold it."""
        for names in (self.scope.names, *(one.attributes for one in self.instances)):
            names |= {name: new for name, value in names.items() if value is old}

    def assign(self, target: ast.expr, value: Any) -> None:
        """Assign to a name, an attribute, an item, or several of them."""
        match target:
            case ast.Name(id=name):
                self.bind(name, value)
            case ast.Attribute(value=base, attr=name):
                for one, _ in candidates_of(self.value(base)):
                    self._set_attribute(one, name, value)
            case ast.Subscript(value=base, slice=index):
                key = self.value(index)
                for one, _ in candidates_of(self.value(base)):
                    self._set_item(one, key, value, target)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self._unpack(targets, value)
            case ast.Starred(value=inner):
                self.assign(inner, UNKNOWN)

    def _unpack(self, targets: list[ast.expr], value: Any) -> None:
        items = known_items(value)
        match value:
            case InstanceValue(made_of=ClassValue(fields=(_, *_))):
                items = list(value.attributes.values())  # a named tuple
            case ReturnedValues() if len(value) == 5 and len(targets) == 4:
                items = list(value[:4])  # older environments return one flag for both ends
            case OneOf():
                several = [known_items(one) or () for one in value.values]
                if all(len(one) == len(targets) for one in several):
                    items = [one_of((one[i], "") for one in several) for i in range(len(targets))]
            case ArrayValue(shape=(_, _, *_) as shape):
                items = [ArrayValue(shape[1:], value.dtype, value.origins)] * len(targets)
        if any(isinstance(one, ast.Starred) for one in targets) or items is None or len(items) != len(targets):
            items = [UNKNOWN] * len(targets)
        for target, item in zip(targets, items, strict=True):
            self.assign(target, item)

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        self._remember(name, value)
        if isinstance(owner, InstanceValue):
            self._given_here.pop((owner, name), None)
            if type(value) is ArrayValue:
                self._given_here[owner, name] = (self.path, value)
                self.arrays_replaced += type(owner.attributes.get(name)) is ArrayValue
            put(owner.attributes, name, value, owner.path, self.path)
        elif isinstance(owner, ClassValue):
            put(owner.attributes, name, value, (), self.path)
        elif isinstance(owner, TableValue) and owner.has_attributes:
            put(owner, name, value, owner.path, self.path)

    def _set_item(self, owner: Any, key: Any, value: Any, node: ast.AST) -> None:
        if isinstance(owner, TableValue):
            self._set_entry(owner, key, value)
        elif isinstance(owner, ListValue):
            number = whole(key)
            if number is not None and owner.is_known and -len(owner.items) <= number < len(owner.items):
                owner.items[number] = value
            elif len(owner.added) < containers.MOST_SAMPLES:
                owner.added.append(value)
            is_row = owner.is_fixed and isinstance(value, ArrayValue)
            if is_row or isinstance(value, tuple | TableValue | InstanceValue | ListValue):
                self.record("appended", owner, None, node, item=value)
        elif self.special(owner, "__setitem__", key, value) is UNKNOWN and isinstance(key, str):
            self._set_attribute(owner, key, value)  # of a class that extends dict

    def _set_entry(self, table: TableValue, key: Any, value: Any) -> None:
        self.arrays_replaced += type(value) is ArrayValue and len(table) > 0
        if is_key(key):
            put(table, key, value, table.path, self.path)
        elif 0 < len(table) <= _MOST_ENTRIES:  # one of them
            for each in table:
                table[each] = one_of([(value, ""), (table[each], "")])
        else:
            table.is_complete = False

    def special(self, owner: Any, name: str, *values: Any) -> Any:
        """Return what an operator means for an object whose class defines it; UNKNOWN if it does not."""
        method = owner.method(name) if isinstance(owner, InstanceValue) else None
        return UNKNOWN if method is None else self.call_function(method, CallArguments(list(values)), owner)

    def augmented(self, target: ast.expr, op: ast.operator, value: Any) -> Any:
        """Return what `target op= value` leaves in the target."""
        old = self.value(target)
        if isinstance(old, ListValue) and isinstance(op, ast.Add):
            containers.extend(self, old, value)
            return old
        if isinstance(old, TableValue) and isinstance(op, ast.BitOr):
            containers.update(self, old, value)
            return old
        if isinstance(op, ast.Add) and (found := self.special(old, "__iadd__", value)) is not UNKNOWN:
            return found
        return spread(lambda left, right: self.binary(op, left, right, target), old, value)

    # ------------------------------------------------------------ attributes

    def _on_attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        if isinstance(base, OneOf):
            return spread(lambda one: self.member(one, node.attr, node), base)
        return self.member(base, node.attr, node)

    def member(self, base: Any, name: str, node: ast.AST | None = None) -> Any:
        """Return an attribute of a value: one case for each kind of value."""
        match base:
            case InstanceValue():
                return self._instance_member(base, name, node)
            case ModuleValue(module=module):
                return module.names.get(name, UNKNOWN)
            case Reference(dotted=dotted):
                if dotted.endswith("flags.FLAGS"):
                    self.is_soft = True
                    return getattr(self, "flags", {}).get(name, UNKNOWN)
                is_tracked = name == "config" and dotted == "wandb" and self.tracked is not None
                return self.tracked if is_tracked else Reference(f"{dotted}.{name}")
            case ClassValue():
                if (found := base.find(name)) is UNKNOWN:
                    if name == "remote":
                        return base  # an actor of Ray
                    return next((Reference(f"{one}.{name}") for one in base.libraries()), UNKNOWN)
                if isinstance(found, FunctionValue) and "classmethod" in found.decorators:
                    return BoundMethod(base, name, found)
                return environments.enum_member(found, base) if name in base.attributes else found
            case SuperValue(owner=owner, above=above):
                return self._super_member(owner, above, name)
            case TableValue() if base.has_attributes and not hasattr(dict, name):
                self.is_soft = True
                return base.get(name, UNKNOWN)
            case Environments():
                return environments.member(base, name)
            case SpaceInfo():
                return spaces.space_member(base, name)
            case ArrayValue():
                return arrays.array_member(base, name)
            case ReturnedValues():  # older environments return the observation alone
                return self.member(base.observation, name, node)
            case str() if name in {"parent", "parents"}:
                folders = tuple(map(str, PurePath(base).parents))[:_MOST_PARENTS]
                return folders if name == "parents" else str(PurePath(base).parent)
            case ListValue() | TableValue() | str() | tuple():
                return BoundMethod(base, name)
            case FunctionValue() | BoundMethod() if name == "remote":
                return base
        return UNKNOWN

    def _instance_member(self, base: InstanceValue, name: str, node: ast.AST | None) -> Any:
        if name in base.attributes:
            self.is_soft = self.is_soft or base.is_default
            if self.path and (given := self._given_here.get((base, name))) is not None:
                path, value = given
                return value if self.path[: len(path)] == path else base.attributes[name]
            return base.attributes[name]
        if isinstance(base.made_of, ClassValue):
            found = base.made_of.find(name)
            if isinstance(found, FunctionValue):
                is_read = not _PROPERTIES.isdisjoint(one.rpartition(".")[2] for one in found.decorators)
                return self.call_function(found, CallArguments(), base) if is_read else BoundMethod(base, name, found)
            found = self._delegated(base, name) if found is UNKNOWN else found
            if found is not UNKNOWN:
                return found
        return environments.instance_member(self, base, name)

    def _delegated(self, base: InstanceValue, name: str) -> Any:
        """Return an attribute that an object takes from another one, by `__getattr__`; `__dict__` too."""
        if name == "__dict__":
            return AttributeTable(base)
        is_special = name.startswith("__") or environments.is_environment(base)
        return UNKNOWN if is_special else self.special(base, "__getattr__", name)

    def _super_member(self, owner: InstanceValue, above: ClassValue, name: str) -> Any:
        for base in above.bases:
            found = base.find(name) if isinstance(base, ClassValue) else UNKNOWN
            if isinstance(found, FunctionValue):
                return BoundMethod(owner, name, found)
        return BoundMethod(SuperValue(owner, above), name)

    def library_start(self, instance: InstanceValue, arguments: CallArguments) -> None:
        """Do what the constructor of the library class does that an instance's class extends."""
        known = list(instance.made_of.libraries()) if isinstance(instance.made_of, ClassValue) else []
        tests = (algorithm_by_import, frameworks.is_buffer, library.CONTAINERS.__contains__, _CALLBACK.search)
        model, buffer, rows, callback = (next(filter(test, known), None) for test in tests)
        node = instance.node or self.main.tree
        if rows is not None:
            instance.attributes["__rows__"] = library.call(self, rows, arguments, node)
            self._remember(instance.kind, instance.attributes["__rows__"])
        if model is None and buffer is None and callback is None:
            environments.start(self, instance, arguments)
            return
        instance.arguments["call"] = arguments
        if model is not None:
            instance.attributes.setdefault("env", arguments.get(1, "env", None))
            self.record("model", instance, arguments, instance.node or self.anchor, dotted=model)
        elif buffer is not None:
            self.record("buffer", instance, arguments, node, dotted=buffer)
        else:
            instance.arguments["kind"] = callback

    # ------------------------------------------------------------ conditions and loops

    @staticmethod
    def truth(value: Any) -> bool | None:
        """Return whether a condition holds, if that is known."""
        if isinstance(value, _PLAIN | tuple):
            return bool(value)
        if isinstance(value, ListValue) and value.length is not None and not value.is_deque:
            return value.length > 0
        if isinstance(value, FunctionValue | ClassValue | InstanceValue | Environments | ModuleValue):
            return True
        if isinstance(value, OneOf):
            truths = {Names.truth(one) for one in value.values if one is not UNKNOWN}
            return truths.pop() if len(truths) == 1 else None
        return None
