"""Functions, classes and loops of the program: how they are defined, called, made into objects and gone through.

In:  a definition, or a function or class with the arguments of a call, or a loop.  Out: the value that a call returns.
Invariant: calls are followed to a bounded depth, and a function within itself once.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdall.tools.lint.run import UNKNOWN, OneOf, Reference, whole
from holdall.tools.lint.source import command_line, containers
from holdall.tools.lint.source.expressions import Expressions
from holdall.tools.lint.source.scopes import Scope
from holdall.tools.lint.source.script import lengthened_by, shortened_by, subtree
from holdall.tools.lint.source.values import (
    MOST_CANDIDATES,
    MOST_SETTINGS,
    ArrayValue,
    BoundMethod,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    TableValue,
    candidates_of,
    carried,
    each_part,
    grouped_settings,
    joined_names,
    known_items,
    length_of,
    likely,
    one_of,
)

_DEEPEST_CALL = 14
_SHAPED = re.compile(r"\.(?:shape|size)\b")
_MOST_BUILT = 8  # rounds of a loop that build on each other
_MOST_NAMED = 32  # rounds of a loop that are followed one by one
_NAMING = {"register", "setattr"}
_DATA_CLASSES = {"dataclass", "NamedTuple", "struct", "define", "frozen", "s", "attrs"}


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Names of a loop's body."""

    counted: frozenset[str]  # changed by += and the like
    carried: frozenset[str]  # assigned in one round and read in the next
    builds: bool = False  # a call makes a value out of the one that the round before left
    by_name: bool = False  # it registers environments, or sets attributes, by names that it goes through


def _builds(name: str, value: ast.expr) -> bool:
    """Whether a call makes the next value of a name out of its last one."""
    parts = list(subtree(value))
    is_read = any(isinstance(one, ast.Name) and one.id == name for one in parts)
    return is_read and any(isinstance(one, ast.Call) for one in parts)


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[str]:
    return [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]


def _is_callable(item: Any) -> bool:
    first = item[0] if isinstance(item, tuple) and item else item
    return isinstance(first, ClassValue | FunctionValue | Reference | BoundMethod)


def _inner(origin: object) -> object:
    return origin[0] if type(origin) is tuple else origin


def _maker(origin: object) -> object:
    return origin[1] if type(origin) is tuple else origin


class Functions(Expressions):
    """Follows definitions and calls; how statements are followed is the interpreter's."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: set[ast.AST] = set()
        self._active: Counter[ast.AST] = Counter()
        self._inside: dict[ast.AST, frozenset[int]] = {}  # the nodes of functions
        self._depth = 0
        self._loops: dict[ast.AST, LoopFacts] = {}

    block: Callable[..., bool]
    statement: Callable[..., bool]

    # ------------------------------------------------------------ functions and classes

    def define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ClassValue | None = None) -> Any:
        """Return the function that a statement defines."""
        defaults = tuple(self.value(one) for one in node.args.defaults)
        keyword = tuple(UNKNOWN if one is None else self.value(one) for one in node.args.kw_defaults)
        made = [self.value(one) for one in node.decorator_list]
        wrapped = tuple(one for one in made if isinstance(one, InstanceValue))
        return FunctionValue(node, self.scope, owner, defaults, keyword, wrapped, frozenset(_decorators(node)))

    def define_class(self, node: ast.ClassDef) -> ClassValue:
        """Return the class that a statement defines."""
        bases = tuple(one for base in node.bases for one, _ in candidates_of(self.value(base))[:1])
        names = frozenset(name.rpartition(".")[2] for name in _decorators(node))
        made = ClassValue(node, self.scope, bases, decorators=names)
        outer, self.scope = self.scope, Scope(self.scope.module, {}, self.scope, is_class=True)
        fields = []
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.scope.names[statement.name] = self.define(statement, made)
                continue
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields.append(statement.target.id)
            self.statement(statement)
        made.attributes, made.fields = self.scope.names, tuple(fields)
        self.scope = outer
        return made

    def call_function(self, function: FunctionValue, arguments: CallArguments, owner: Any = None) -> Any:
        """Follow a function of the program."""
        if self._active[function.node] > 1 or self._depth >= _DEEPEST_CALL:
            return UNKNOWN
        self.entered.add(function.node)
        scope = Scope(function.scope.module, {}, function.scope, instance=owner, owner=function.owner, path=self.path)
        scope.rounds, scope.call = len(self.rounds), arguments.node
        scope.maker = owner or self.scope.maker
        self._bind(function, arguments, owner, scope)
        for name, value in scope.names.items():
            if type(value) is ArrayValue and any(type(one) is tuple for one in value.origins):
                scope.names[name] = self._handed_back(function, value)
        outer, self.scope = self.scope, scope
        soft, self.is_soft = self.is_soft, False
        self._active[function.node] += 1
        self._depth += 1
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body)
            left = self.block(function.node.body)
            if scope.yielded:
                return ListValue(scope.yielded, None)
            ends = scope.returned if left or any(value is not None for value, _ in scope.returned) else []
            return self._made_by_call(function, one_of(ends), arguments.node) if ends else None
        finally:
            self._depth -= 1
            self._active[function.node] -= 1
            self.scope, self.is_soft = outer, soft

    def _nodes_of(self, function: FunctionValue) -> frozenset[int]:
        if function.node not in self._inside:
            self._inside[function.node] = frozenset(map(id, subtree(function.node)))
        return self._inside[function.node]

    def _handed_back(self, function: FunctionValue, array: ArrayValue) -> ArrayValue:
        """Return an array that a function gets as what it was there: an earlier call of the function made it."""
        inside = self._nodes_of(function)
        origins = {_inner(one) if id(_maker(_inner(one))) in inside else one for one in array.origins}
        return replace(array, origins=frozenset(origins))

    def _made_by_call(self, function: FunctionValue, value: Any, call: ast.AST | None) -> Any:
        """Return a value whose new arrays are those of one call: another call makes other arrays."""
        if value is None or value is UNKNOWN or call is None:
            return value
        if isinstance(value, ArrayValue):
            inside = self._nodes_of(function)
            own = {one for one in value.origins if id(_maker(one)) in inside}
            return replace(value, origins=(value.origins - own) | {(one, call) for one in own}) if own else value
        if type(value) is TableValue:
            for key, one in value.items():
                value[key] = self._made_by_call(function, one, call)
        return each_part(value, lambda one: self._made_by_call(function, one, call))

    def _bind(self, function: FunctionValue, given: CallArguments, owner: Any, scope: Scope) -> None:
        spec = function.node.args
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        is_method = owner is not None and "staticmethod" not in function.decorators
        positional = [owner, *given.values] if is_method and names else list(given.values)
        positional = positional or command_line.configured_arguments(self, function)
        with_default = dict(zip(names[len(names) - len(function.defaults) :], function.defaults, strict=True))
        only_named = [one.arg for one in spec.kwonlyargs]
        with_default |= dict(zip(only_named, function.keyword_defaults, strict=True))
        values = scope.names
        values |= {name: with_default.get(name, UNKNOWN) for name in (*names, *only_named)}
        values |= dict(zip(names, positional, strict=False))
        for name, default in command_line.click_defaults(function):
            if name in values and name not in given.named:
                values[name] = default
                scope.soft.add(name)
        if not given.is_complete:
            self._default_settings(function, values)
            scope.soft |= set(with_default) - set(names[: len(positional)]) - set(given.named)
        values |= {name: value for name, value in given.named.items() if name in values}
        if spec.vararg:
            rest = positional[len(names) :]
            values[spec.vararg.arg] = tuple(rest) if given.is_complete else ListValue(rest, None)
        if spec.kwarg:
            extra = {name: value for name, value in given.named.items() if name not in names}
            values[spec.kwarg.arg] = TableValue(extra.items(), path=self.path, complete=given.is_complete)

    def _default_settings(self, function: FunctionValue, values: dict[str, Any]) -> None:
        """Give parameters that are annotated with a data class of the program an object with its defaults."""
        outer, self.scope = self.scope, function.scope
        for one in (*function.node.args.args, *function.node.args.kwonlyargs):
            if one.annotation is not None and values.get(one.arg) is UNKNOWN:
                made_of = self.value(one.annotation)
                if isinstance(made_of, ClassValue) and made_of.decorators & _DATA_CLASSES:
                    values[one.arg] = self.instantiate(made_of, CallArguments(is_complete=False), one)
                    values[one.arg].is_default = True
        self.scope = outer

    def instantiate(self, made_of: ClassValue, arguments: CallArguments, node: ast.AST | None) -> Any:
        """Make an object of a class of the program."""
        if "builtins.dict" in made_of.libraries() and not isinstance(made_of.find("__init__"), FunctionValue):
            table = TableValue(arguments.named.items(), path=self.path, attributes=True)  # keys read as attributes
            for one in arguments.values[:1]:
                containers.update(self, table, one)
            return table
        instance = InstanceValue(made_of, node=node, path=self.path)
        self.instances.append(instance)
        if made_of.decorators & _DATA_CLASSES or made_of.extends("NamedTuple", "BaseModel", "Tap", "BaseSettings"):
            self._fill_fields(instance, arguments)
        if start := instance.method("__init__"):
            self.call_function(start, arguments, instance)
        else:
            self.library_start(instance, arguments)
        self.special(instance, "__post_init__")
        return instance

    def _fill_fields(self, instance: InstanceValue, arguments: CallArguments) -> None:
        made_of: Any = instance.made_of
        names = [name for one in reversed(list(made_of.lineage())) for name in one.fields]
        instance.attributes |= {name: self.fresh_default(made_of.find(name)) for name in names}
        instance.attributes |= dict(zip(names, arguments.values, strict=False))
        instance.attributes |= {name: value for name, value in arguments.named.items() if name in names}

    # ------------------------------------------------------------ loops

    def loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Follow a loop: one round for each item where they build on each other, otherwise one or two for all."""
        facts = self.loop_facts(node)
        if self._went_item_by_item(node, facts):
            return
        for name in facts.counted:
            if isinstance(self.scope.names.get(name), int | float):
                self.scope.names[name] = UNKNOWN
        before = dict(self.scope.names)
        times = None
        if isinstance(node, ast.While):
            self.limit_list(node)
            if self._went_through(node):
                return
        else:
            over = self.value(node.iter)
            times = length_of(over)
            *several, last = grouped_settings(over)
            for one in several:
                self.assign(node.target, self.item_of_loop(one))
                self.block(node.body)
            self.assign(node.target, self.item_of_loop(last))
        self.rounds, replaced = (*self.rounds, times), self.arrays_replaced
        self.block(node.body)
        changed = [n for n in facts.carried if n in before and before[n] is not self.scope.names.get(n, before[n])]
        if changed or replaced != self.arrays_replaced:  # what one round leaves is what the next one finds
            for name in changed:
                self.scope.names[name] = carried(before[name], self.scope.names[name])
            self.block(node.body)
        self.rounds = self.rounds[:-1]
        self.scope.names = joined_names([("", self.scope.names), ("", before)])
        self._filled_by(node)
        self.block(node.orelse)

    def _went_item_by_item(self, node: ast.AST, facts: LoopFacts) -> bool:
        """Go through a loop that names things, or whose rounds build on each other: wrappers, joined frames."""
        if not isinstance(node, ast.For) or not (facts.by_name or facts.carried):
            return False
        items = known_items(self.value(node.iter)) or []
        is_building = facts.builds and len(items) <= _MOST_BUILT
        if not items or not (facts.by_name or is_building or any(map(_is_callable, items))):
            return False
        for item in items[:_MOST_NAMED]:
            self.assign(node.target, item)
            self.block(node.body)
        return True

    def _went_through(self, node: ast.While) -> bool:
        """Go through a loop that ends when an array has its shape: frames that are put together until they suffice."""
        tested = self.value(node.test)
        if not isinstance(node.test, ast.Compare) or not _SHAPED.search(self.text_of(node.test)):
            return False
        for _ in range(_MOST_NAMED):
            if self.truth(tested) is not True:
                break
            self.block(node.body)
            tested = self.value(node.test)
        return self.truth(tested) is False or self._is_left(node.test)

    def _is_left(self, test: ast.expr) -> bool:
        """Keep, of what a name may be, that with which a loop's condition does not hold; whether there is any."""
        names = (one.id for one in subtree(test) if isinstance(one, ast.Name))
        name = next((one for one in names if isinstance(self.scope.names.get(one), OneOf)), "")
        value, kept = self.scope.names.get(name), []
        for one, text in candidates_of(value) if name else ():
            self.scope.names[name] = one
            if self.truth(self.value(test)) is False:
                kept.append((one, text))
        self.scope.names |= {name: one_of(kept) if kept else value} if name else {}
        return bool(kept)

    def _filled_by(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Learn how long a list is behind `while len(rows) < limit: rows.append(...)`."""
        match getattr(node, "test", None):
            case ast.Compare(left=ast.Call(func=ast.Name(id="len"), args=[held]), ops=[ast.Lt()], comparators=[limit]):
                container, count = self.value(held), whole(likely(self.value(limit)))
                if isinstance(container, ListValue) and count is not None and container.maxlen is None:
                    container.length = count

    def item_of_loop(self, over: Any) -> Any:
        """Return what a loop's variable is: one of the items."""
        items = known_items(over)
        if items is None and isinstance(over, TableValue):
            items = list(over)
        if items is None and isinstance(over, ListValue):
            return one_of((item, "") for item in over.items) if over.items else UNKNOWN
        if isinstance(over, ArrayValue) and over.shape and len(over.shape) > 1:
            return replace(over, shape=over.shape[1:])
        if items is None and isinstance(over, OneOf):
            return one_of(((self.item_of_loop(one), text) for one, text in candidates_of(over)), MOST_SETTINGS)
        if not items:
            return UNKNOWN
        most = MOST_SETTINGS if isinstance(items[-1], TableValue | tuple) else MOST_CANDIDATES
        return one_of(((item, "") for item in items), most)

    def loop_facts(self, node: ast.AST) -> LoopFacts:
        """Return which names a loop's body changes, and which of them its next round reads."""
        if node not in self._loops:
            counted: set[str] = set()
            first: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
            by_name = builds = False
            for part in subtree(node):
                if type(part) is ast.Call:
                    by_name = by_name or getattr(part.func, "id", getattr(part.func, "attr", "")) in _NAMING
                elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                    counted.add(part.target.id)
                elif type(part) is ast.Assign and isinstance(part.targets[0], ast.Name):  # read before it is assigned
                    _, stores = first.setdefault(part.targets[0].id, ([], []))
                    stores.append((part.end_lineno or 0, part.end_col_offset or 0))
                    builds = builds or _builds(part.targets[0].id, part.value)
                if isinstance(part, ast.Name):
                    at = (part.lineno, part.col_offset)
                    is_load = isinstance(part.ctx, ast.Load)
                    loads, stores = first.setdefault(part.id, ([], []))
                    (loads if is_load else stores).append(at)
            carried = {
                name for name, (loads, stores) in first.items() if loads and stores and min(loads) <= max(stores)
            }
            self._loops[node] = LoopFacts(frozenset(counted), frozenset(carried - counted), builds, by_name)
        return self._loops[node]

    def limit_list(self, node: ast.If | ast.While) -> None:
        """Learn how long a list gets from `if len(rows) > limit: del rows[0]` and the like."""
        match node.test:
            case ast.Compare(left=ast.Call(func=ast.Name(id="len"), args=[held]), ops=[op], comparators=[limit]):
                changed = shortened_by if isinstance(op, ast.Gt | ast.GtE | ast.Eq) else lengthened_by
                several = [one for statement in node.body for one in changed(statement)]
                if any(ast.dump(one) == ast.dump(held) for one in several):
                    for container in map(self.value, several):  # lists side by side are cut together
                        if isinstance(container, ListValue) and container.maxlen is None:
                            container.maxlen = likely(self.value(limit))
