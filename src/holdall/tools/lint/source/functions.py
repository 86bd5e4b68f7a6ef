"""Functions and classes of the program: how they are defined, called and made into objects.

In:  a definition, or a function or class with the arguments of a call.  Out: the value that the call returns.
Invariant: calls are followed to a bounded depth, and a function within itself once.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from holdall.tools.lint.run import UNKNOWN, OneOf
from holdall.tools.lint.source import command_line, containers
from holdall.tools.lint.source.arrays import ReturnedValues
from holdall.tools.lint.source.expressions import Expressions
from holdall.tools.lint.source.scopes import CallArguments, Scope
from holdall.tools.lint.source.script import subtree
from holdall.tools.lint.source.values import (
    ArrayValue,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    TableValue,
    candidates_of,
    one_of,
)

_DEEPEST_CALL = 14
_DATA_CLASSES = {"dataclass", "NamedTuple", "struct", "define", "frozen", "s", "attrs"}


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

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Follow statements."""
        raise NotImplementedError

    def statement(self, node: ast.stmt) -> bool:
        """Follow one statement."""
        raise NotImplementedError

    # ------------------------------------------------------------ functions and classes

    def define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ClassValue | None = None) -> Any:
        """Return the function that a statement defines."""
        defaults = tuple(self.value(one) for one in node.args.defaults)
        keyword = tuple(UNKNOWN if one is None else self.value(one) for one in node.args.kw_defaults)
        made = [self.value(one) for one in node.decorator_list]
        names = frozenset(ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list)
        function = FunctionValue(node, self.scope, owner, defaults, keyword, None, names)
        function.wrapped = tuple(one for one in made if isinstance(one, InstanceValue))
        return function

    def define_class(self, node: ast.ClassDef) -> ClassValue:
        """Return the class that a statement defines."""
        bases = tuple(one for base in node.bases for one, _ in candidates_of(self.value(base))[:1])
        names = frozenset(
            ast.unparse(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2]
            for one in node.decorator_list
        )
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
        if isinstance(value, ReturnedValues):
            return ReturnedValues(self._made_by_call(function, one, call) for one in value)
        if type(value) is tuple:
            return tuple(self._made_by_call(function, one, call) for one in value)
        if isinstance(value, OneOf):
            several = tuple(self._made_by_call(function, one, call) for one in value.values)
            return OneOf(several, value.conditions)
        return value

    def _bind(self, function: FunctionValue, given: CallArguments, owner: Any, scope: Scope) -> None:
        spec = function.node.args
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        is_method = owner is not None and not {"staticmethod"} & function.decorators
        positional = [owner, *given.values] if is_method and names else list(given.values)
        if not positional and function.wrapped and (configured := self.configured_argument(function)) is not None:
            positional = [configured]
        with_default = dict(zip(names[len(names) - len(function.defaults) :], function.defaults, strict=True))
        with_default |= dict(zip((one.arg for one in spec.kwonlyargs), function.keyword_defaults, strict=True))
        values = scope.names
        missing = UNKNOWN if not given.is_complete else None
        for name in (*names, *(one.arg for one in spec.kwonlyargs)):
            values[name] = with_default.get(name, UNKNOWN) if missing is None or name in with_default else UNKNOWN
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
            table = TableValue(extra.items(), path=self.path)
            table.is_complete = given.is_complete
            values[spec.kwarg.arg] = table

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
        start = made_of.find("__init__")
        if isinstance(start, FunctionValue):
            self.call_function(start, arguments, instance)
        else:
            self.library_start(instance, arguments)
        after = made_of.find("__post_init__")
        if isinstance(after, FunctionValue):
            self.call_function(after, CallArguments(), instance)
        return instance

    def _fill_fields(self, instance: InstanceValue, arguments: CallArguments) -> None:
        made_of = instance.made_of
        if not isinstance(made_of, ClassValue):
            return
        names = [name for one in reversed(list(made_of.lineage())) for name in one.fields]
        for name in names:
            value = made_of.find(name)
            instance.attributes[name] = self.fresh_default(value)
        instance.attributes |= dict(zip(names, arguments.values, strict=False))
        instance.attributes |= {name: value for name, value in arguments.named.items() if name in names}
