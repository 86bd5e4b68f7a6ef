"""Values of expressions, and names: what an interpreter does between two statements.

In:  an expression and the scope that it stands in.  Out: its value, as values.py has them.
Invariant: what is returned is what the expression is whenever it is reached this way; anything else is UNKNOWN. No
number grows beyond 2^64 and no sequence beyond 10,000 items, whatever the file says.
"""

from __future__ import annotations

import ast
import operator
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, SpaceInfo, algorithm_by_import, whole
from holdall.tools.lint.source import environments, frameworks, library
from holdall.tools.lint.source.arrays import ReturnedValues
from holdall.tools.lint.source.repository import Module
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    ModuleValue,
    Path,
    SuperValue,
    TableValue,
    candidates_of,
    known_items,
    length_of,
    likely,
    one_of,
    put,
    spread,
)

_LARGEST = 2**64
_LONGEST = 10_000
_MOST_POWER = 64

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
_PLAIN = int | float | str | bool | bytes | None


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


@dataclass(eq=False, slots=True)
class CallArguments:
    """What a call passes, with the expressions that pass it."""

    values: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True  # False: there are further ones that cannot be read
    nodes: dict[int | str, ast.AST] = field(default_factory=dict)
    node: ast.AST | None = None

    def get(self, index: int | None, name: str, default: Any = UNKNOWN) -> Any:
        """Return one argument by name or position; `default` if it is not passed."""
        if name in self.named:
            return self.named[name]
        if index is not None and index < len(self.values):
            return self.values[index]
        return default if self.is_complete else UNKNOWN

    def by_name(self, positional: tuple[str, ...]) -> dict[str, tuple[Any, ast.AST | None]]:
        """Return all arguments by name, each with its expression."""
        given = {name: (value, self.nodes.get(i)) for i, (name, value) in enumerate(zip(positional, self.values))}
        return given | {name: (value, self.nodes.get(name)) for name, value in self.named.items()}


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Names of a loop's body."""

    counted: frozenset[str]  # changed by += and the like
    carried: frozenset[str]  # assigned in one round and read in the next


class Expressions:
    """Evaluates; how calls are followed is the interpreter's."""

    def __init__(self) -> None:
        self.scope = Scope(None)
        self.path: Path = ()
        self.seen: dict[ast.AST, Any] = {}  # by expression of the script
        self.instances: list[InstanceValue] = []
        self.is_soft = False  # whether a default that a user can override was read
        self.repeats: int | None = 1  # how often the loops around this line run it
        self.anchor: ast.AST | None = None  # the call of the script that led here
        self.seen_function: Any = UNKNOWN  # what the last call called
        self.names: dict[object, str] = {}  # of arrays by what made them
        self._loops: dict[ast.AST, LoopFacts] = {}

    # ------------------------------------------------------------ to be followed by the interpreter

    main: Module

    def step(self) -> None: ...
    def call_function(self, function: FunctionValue, arguments: CallArguments, owner: Any = None) -> Any: ...
    def instantiate(self, made_of: ClassValue, arguments: CallArguments, node: ast.AST | None) -> Any: ...
    def record(self, what: str, value: Any, arguments: CallArguments | None, node: ast.AST, **detail: Any) -> None: ...
    def import_module(self, dotted: str, level: int = 0) -> Any: ...

    # ------------------------------------------------------------ values

    def value(self, node: ast.expr) -> Any:
        """Return what an expression is."""
        self.step()
        kind = type(node).__name__
        found = getattr(self, f"_on_{kind}", None)
        value = found(node) if found else self._other(node)
        if self.scope.module is self.main:
            kept = library.snapshot(value)
            self.seen[node] = one_of([(self.seen[node], ""), (kept, "")]) if node in self.seen else kept
        return value

    def _other(self, node: ast.expr) -> Any:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return UNKNOWN

    def _on_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _on_Name(self, node: ast.Name) -> Any:
        return self.lookup(node.id)

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
        return Reference(f"builtins.{name}") if name in library.BUILTINS else UNKNOWN

    def bind(self, name: str, value: Any) -> None:
        """Give a name a value."""
        if name in self.scope.outer and self.scope.module is not None:
            put(self.scope.module.names, name, value, (), (*self.path, f"{name} is changed"))
            return
        self.scope.soft.discard(name)
        self.scope.names[name] = value
        self._remember(name, value)

    def _remember(self, name: str, value: Any) -> None:
        if isinstance(value, ArrayValue):
            for origin in value.origins:
                self.names.setdefault(origin, name)
        elif isinstance(value, ListValue):
            value.name = value.name or name

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
        if isinstance(value, ReturnedValues) and len(value) == 5 and len(targets) == 4:
            items = list(value[:4])  # older environments return one flag for both ends
        if isinstance(value, OneOf):
            several = [known_items(one) for one in value.values]
            if all(one is not None and len(one) == len(targets) for one in several):
                items = [one_of((one[i], "") for one in several if one) for i in range(len(targets))]
        if isinstance(value, ArrayValue) and value.shape and len(value.shape) > 1:
            items = [ArrayValue(value.shape[1:], value.dtype, value.origins)] * len(targets)
        if any(isinstance(one, ast.Starred) for one in targets) or items is None or len(items) != len(targets):
            items = [UNKNOWN] * len(targets)
        for target, item in zip(targets, items, strict=True):
            self.assign(target, item)

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        self._remember(name, value)
        if isinstance(owner, InstanceValue):
            put(owner.attributes, name, value, owner.path, self.path)
        elif isinstance(owner, ClassValue):
            put(owner.attributes, name, value, (), self.path)
        elif isinstance(owner, TableValue) and owner.has_attributes:
            put(owner, name, value, owner.path, self.path)

    def _set_item(self, owner: Any, key: Any, value: Any, node: ast.AST) -> None:
        if isinstance(owner, TableValue):
            if isinstance(key, _PLAIN):
                put(owner, key, value, owner.path, self.path)
            else:
                owner.is_complete = False
        elif isinstance(owner, ListValue):
            number = whole(key)
            if number is not None and owner.is_known and -len(owner.items) <= number < len(owner.items):
                owner.items[number] = value
            elif len(owner.added) < library.MOST_SAMPLES:
                owner.added.append(value)
            if isinstance(value, tuple | TableValue | InstanceValue):
                self.record("appended", owner, None, node, item=value)

    def augmented(self, target: ast.expr, op: ast.operator, value: Any) -> Any:
        """Return what `target op= value` leaves in the target."""
        old = self.value(target)
        if isinstance(old, ListValue) and isinstance(op, ast.Add):
            library.extend(self, old, value)
            return old
        if isinstance(old, TableValue) and isinstance(op, ast.BitOr):
            library.update(self, old, value)
            return old
        return spread(lambda left, right: self.binary(op, left, right, target), old, value)

    # ------------------------------------------------------------ compound expressions

    def _on_Tuple(self, node: ast.Tuple) -> Any:
        items, is_known = self._items(node.elts)
        return tuple(items) if is_known else ListValue(items, None)

    def _on_List(self, node: ast.List) -> Any:
        items, is_known = self._items(node.elts)
        return ListValue(items, len(items) if is_known else None, node=node, path=self.path)

    _on_Set = _on_List

    def _items(self, nodes: list[ast.expr]) -> tuple[list[Any], bool]:
        items: list[Any] = []
        is_known = len(nodes) <= _LONGEST
        for node in nodes[:_LONGEST]:
            if not isinstance(node, ast.Starred):
                items.append(self.value(node))
                continue
            inner = self.value(node.value)
            inner = next((one for one, _ in candidates_of(inner) if known_items(one) is not None), inner)
            more = known_items(inner)
            is_known = is_known and more is not None
            items += more or []
        return items, is_known

    def _on_Dict(self, node: ast.Dict) -> Any:
        table = TableValue(path=self.path)
        for key, value in zip(node.keys, node.values, strict=True):
            made = self.value(value)
            if key is None:
                library.update(self, table, made)
                continue
            name = self.value(key)
            if isinstance(name, _PLAIN | Reference):
                table[name] = made
            else:
                table.is_complete = False
        return table

    def _on_UnaryOp(self, node: ast.UnaryOp) -> Any:
        def apply(operand: Any) -> Any:
            if isinstance(node.op, ast.Not):
                truth = self.truth(operand)
                return UNKNOWN if truth is None else not truth
            if isinstance(operand, ArrayValue):
                return operand.made_by(node)
            is_number = isinstance(operand, int | float) and type(node.op) in _UNARY
            return bounded(_UNARY[type(node.op)], operand) if is_number else UNKNOWN

        return spread(apply, self.value(node.operand))

    def _on_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        return spread(lambda a, b: self.binary(node.op, a, b, node), left, right)

    def binary(self, op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
        """Return the result of an operator."""
        if isinstance(left, ArrayValue) or isinstance(right, ArrayValue):
            return library.calculated(op, left, right, node)
        if isinstance(op, ast.Mult) and (repeated := _repeated(left, right)) is not None:
            return repeated
        if isinstance(op, ast.Add) and isinstance(left, tuple | ListValue) and isinstance(right, tuple | ListValue):
            return library.joined_sequences(left, right)
        if isinstance(op, ast.BitOr) and isinstance(left, TableValue):
            table = TableValue(left.items(), path=self.path)
            table.is_complete = left.is_complete
            library.update(self, table, right)
            return table
        if isinstance(op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return os.path.join(left, right)  # of pathlib
        both = isinstance(left, int | float) and isinstance(right, int | float)
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add)
        if not (both or texts) or type(op) not in _BINARY:
            return UNKNOWN
        if isinstance(op, ast.Pow | ast.LShift) and isinstance(right, int | float) and abs(right) > _MOST_POWER:
            return UNKNOWN
        return bounded(_BINARY[type(op)], left, right)

    def _on_BoolOp(self, node: ast.BoolOp) -> Any:
        is_and = isinstance(node.op, ast.And)
        values = [self.value(one) for one in node.values]
        for value in values[:-1]:
            truth = self.truth(value)
            if truth is None:
                rest = [one for one in values if one is not None and one is not UNKNOWN]
                return one_of((one, "") for one in rest) if not is_and and len(rest) == len(values) else UNKNOWN
            if truth is not is_and:
                return value
        return values[-1]

    def _on_Compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        rights = [self.value(one) for one in node.comparators]
        if len(rights) != 1:
            return UNKNOWN
        return spread(lambda a, b: _compared(node.ops[0], a, b), left, rights[0])

    def _on_IfExp(self, node: ast.IfExp) -> Any:
        outer, self.is_soft = self.is_soft, False
        tested = self.value(node.test)
        truth = self.truth(tested)
        is_soft, self.is_soft = self.is_soft or isinstance(tested, OneOf), outer or self.is_soft
        body, other = self.value(node.body), self.value(node.orelse)
        if truth is not None and not is_soft:
            return body if truth else other
        text = ast.unparse(node.test)
        pairs = [(body, "" if truth else text), (other, "" if truth is False else f"not ({text})")]
        return one_of(sorted(pairs, key=lambda one: one[1] != "") if truth is not None else pairs)

    def _on_Subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            bounds = [None if one is None else self.value(one) for one in (node.slice.lower, node.slice.upper, node.slice.step)]
            return spread(lambda one: library.sliced(one, bounds), base)
        return spread(lambda one, key: library.item(self, one, key), base, self.value(node.slice))

    def _on_JoinedStr(self, node: ast.JoinedStr) -> Any:
        parts = []
        for part in node.values:
            value = self.value(part.value) if isinstance(part, ast.FormattedValue) else getattr(part, "value", UNKNOWN)
            is_plain = isinstance(part, ast.Constant) or part.format_spec is None  # type: ignore[attr-defined]
            parts.append(value if is_plain and isinstance(value, str | int | float) else UNKNOWN)
        return UNKNOWN if UNKNOWN in parts else "".join(map(str, parts))

    def _on_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _on_Lambda(self, node: ast.Lambda) -> Any:
        return FunctionValue(node, self.scope, None, tuple(self.value(one) for one in node.args.defaults))

    def _on_Await(self, node: ast.Await) -> Any:
        return self.value(node.value)

    def _on_Yield(self, node: ast.Yield) -> Any:
        self.scope.yielded.append(self.value(node.value) if node.value else None)
        return UNKNOWN

    def _on_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Any:
        lengths, items = self._comprehended(node)
        made = [ListValue(list(items), length, node=node, path=self.path) for length in dict.fromkeys(lengths)]
        return made[0] if len(made) == 1 else OneOf(tuple(made))

    _on_SetComp = _on_GeneratorExp = _on_ListComp

    def _comprehended(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> tuple[list[int | None], list[Any]]:
        lengths, over = self._enter_comprehension(node.generators)
        items: list[Any] = []
        try:
            known = known_items(over) if len(node.generators) == 1 and not node.generators[0].ifs else None
            if known is not None and len(known) <= 16:
                for item in known:
                    self.assign(node.generators[0].target, item)
                    items.append(self.value(node.elt))
            else:
                items = [self.value(node.elt)]
        finally:
            self.scope = self.scope.parent or self.scope
        return lengths, items

    def _on_DictComp(self, node: ast.DictComp) -> Any:
        _, over = self._enter_comprehension(node.generators)
        table = TableValue(path=self.path)
        try:
            known = known_items(over) if len(node.generators) == 1 and not node.generators[0].ifs else None
            for item in known or [UNKNOWN]:
                if known is not None:
                    self.assign(node.generators[0].target, item)
                key, value = self.value(node.key), self.value(node.value)
                if isinstance(key, _PLAIN):
                    table[key] = value
            table.is_complete = known is not None
        finally:
            self.scope = self.scope.parent or self.scope
        return table

    def _enter_comprehension(self, generators: list[ast.comprehension]) -> tuple[list[int | None], Any]:
        """Open the scope of a comprehension, which the caller closes; return the lengths that it may have."""
        over = self.value(generators[0].iter)
        is_plain = len(generators) == 1 and not generators[0].ifs
        lengths = [length_of(one) if is_plain else None for one, _ in candidates_of(over)]
        scope = self.scope
        self.scope = Scope(scope.module, {}, scope, instance=scope.instance, owner=scope.owner, path=scope.path)
        for index, one in enumerate(generators):
            self.assign(one.target, self.item_of_loop(over if index == 0 else self.value(one.iter)))
            for test in one.ifs:
                self.value(test)
        return lengths, over

    def item_of_loop(self, over: Any) -> Any: ...

    # ------------------------------------------------------------ attributes

    def _on_Attribute(self, node: ast.Attribute) -> Any:
        return spread(lambda base: self.member(base, node.attr, node), self.value(node.value))

    def member(self, base: Any, name: str, node: ast.AST | None = None) -> Any:
        """Return an attribute of a value."""
        match base:
            case InstanceValue():
                return self._instance_member(base, name, node)
            case ModuleValue(module=module):
                return module.names.get(name, UNKNOWN)
            case Reference(dotted="absl.flags.FLAGS"):
                self.is_soft = True
                return getattr(self, "flags", {}).get(name, UNKNOWN)
            case Reference(dotted=dotted):
                return Reference(f"{dotted}.{name}")
            case ClassValue():
                found = base.find(name)
                return environments.enum_member(found, base) if name in base.attributes else found
            case SuperValue(owner=owner, above=above):
                return self._super_member(owner, above, name)
            case TableValue() if base.has_attributes and name in base:
                self.is_soft = True
                return base[name]
            case Environments():
                return environments.member(self, base, name, node)
            case SpaceInfo():
                return environments.space_member(base, name)
            case ArrayValue():
                return library.array_member(base, name)
            case str() if name == "parent":
                return os.path.dirname(base)
            case ListValue() | TableValue() | str() | tuple():
                return BoundMethod(base, name)
        return UNKNOWN

    def _instance_member(self, base: InstanceValue, name: str, node: ast.AST | None) -> Any:
        if name in base.attributes:
            self.is_soft = self.is_soft or base.is_default
            return base.attributes[name]
        if isinstance(base.made_of, ClassValue):
            found = base.made_of.find(name)
            if isinstance(found, FunctionValue):
                if any(one.rpartition(".")[2] in {"property", "cached_property"} for one in found.decorators):
                    return self.call_function(found, CallArguments(), base)
                return BoundMethod(base, name, found)
            if found is not UNKNOWN:
                return found
        return environments.instance_member(self, base, name, node)

    def _super_member(self, owner: InstanceValue, above: ClassValue, name: str) -> Any:
        for base in above.bases:
            found = base.find(name) if isinstance(base, ClassValue) else UNKNOWN
            if isinstance(found, FunctionValue):
                return BoundMethod(owner, name, found)
        return BoundMethod(SuperValue(owner, above), name)

    def library_start(self, instance: InstanceValue, arguments: CallArguments) -> None:
        """Do what the constructor of the library class does that an instance's class extends."""
        known = [one for one in instance.made_of.libraries()] if isinstance(instance.made_of, ClassValue) else []
        model = next((one for one in known if algorithm_by_import(one)), None)
        if model is not None:
            frameworks.start_model(self, instance, model, arguments)
        else:
            environments.start(self, instance, arguments)

    # ------------------------------------------------------------ calls

    def _on_Call(self, node: ast.Call) -> Any:
        called = self.value(node.func)
        if called == Reference("builtins.super"):
            return self._super()
        arguments = self._arguments(node)
        is_own = self.scope.module is self.main
        outer, self.anchor = self.anchor, node if is_own else self.anchor
        try:
            result = spread(lambda one: self.call(one, arguments, node), called)
        finally:
            self.anchor = outer
        self.seen_function = called
        return result

    def _super(self) -> Any:
        scope: Scope | None = self.scope
        while scope is not None and scope.owner is None:
            scope = scope.parent
        if scope is None or scope.owner is None or not isinstance(scope.instance, InstanceValue):
            return UNKNOWN
        return SuperValue(scope.instance, scope.owner)

    def _arguments(self, node: ast.Call) -> CallArguments:
        given = CallArguments(node=node)
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                items = known_items(self.value(argument.value))
                given.is_complete = given.is_complete and items is not None
                given.values += items or []
            else:
                given.nodes[len(given.values)] = argument
                given.values.append(self.value(argument))
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                given.named[keyword.arg] = value
                given.nodes[keyword.arg] = keyword.value
                continue
            value = likely(value)
            if isinstance(value, TableValue):
                given.named |= {str(name): one for name, one in value.items()}
                given.nodes |= {str(name): keyword.value for name in value}
            given.is_complete = given.is_complete and isinstance(value, TableValue) and value.is_complete
        return given

    def call(self, called: Any, arguments: CallArguments, node: ast.AST) -> Any:
        """Return what a call returns."""
        match called:
            case FunctionValue():
                return self.call_function(called, arguments)
            case ClassValue():
                return self.instantiate(called, arguments, node)
            case BoundMethod(owner=owner, function=FunctionValue() as function):
                return self.call_function(function, arguments, owner)
            case BoundMethod(owner=owner, name=name):
                return spread(lambda one: library.call_method(self, one, name, arguments, node), owner)
            case Reference(dotted=dotted):
                return library.call(self, dotted, arguments, node)
            case InstanceValue(arguments={"call": inner, "arguments": first}):
                values, named = [*first.values[1:], *arguments.values], first.named | arguments.named
                complete = first.is_complete and arguments.is_complete
                return self.call(inner, CallArguments(values, named, complete, arguments.nodes, node), node)
            case InstanceValue():
                found = self._instance_member(called, "__call__", node)
                return self.call(found, arguments, node) if isinstance(found, BoundMethod) else UNKNOWN
        name = getattr(getattr(node, "func", None), "id", getattr(getattr(node, "func", None), "attr", ""))
        first = arguments.get(0, "env", UNKNOWN)
        if name[:1].isupper() and environments.is_environment(first):
            inner = environments.environment_of(self, first)
            return UNKNOWN if inner is None else replace(inner, observation=None, action=None)  # a wrapper from elsewhere
        if name.startswith("suggest_"):
            return library.suggested(name, arguments)
        for value in (*arguments.values, *arguments.named.values()):
            if isinstance(value, TableValue):
                value.forget()
            elif isinstance(value, ListValue):
                value.length = None
        return UNKNOWN

    def fresh_default(self, value: Any) -> Any:
        """Return the default of a field of a data class; what a factory makes is made anew."""
        if isinstance(value, InstanceValue) and value.kind == "dataclasses.field":
            if "default_factory" in value.arguments:
                return self.call(value.arguments["default_factory"], CallArguments(), value.node or self.anchor)  # type: ignore[arg-type]
            return value.arguments.get("default", UNKNOWN)
        return value

    def configured_argument(self, function: FunctionValue) -> Any:
        """Return the configuration that a decorator hands to a function: hydra's, from its file."""
        return library.configured_argument(self, function)

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
            truths = {Expressions.truth(one) for one in value.values if one is not UNKNOWN}
            return truths.pop() if len(truths) == 1 else None
        return None

    def loop_facts(self, node: ast.AST) -> LoopFacts:
        """Return which names a loop's body changes, and which of them its next round reads."""
        if node not in self._loops:
            counted, first = set(), {}
            for part in ast.walk(node):
                if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                    counted.add(part.target.id)
                if isinstance(part, ast.Name):
                    at = (part.lineno, part.col_offset)
                    is_load = isinstance(part.ctx, ast.Load)
                    loads, stores = first.setdefault(part.id, ([], []))
                    (loads if is_load else stores).append(at)
            carried = {name for name, (loads, stores) in first.items() if loads and stores and min(loads) <= max(stores)}
            self._loops[node] = LoopFacts(frozenset(counted), frozenset(carried - counted))
        return self._loops[node]


def bounded(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function of numbers; what fails or grows too large is not known."""
    try:
        result = function(*values)
    except (ArithmeticError, ValueError, TypeError):
        return UNKNOWN
    return UNKNOWN if isinstance(result, int | float) and not abs(result) <= _LARGEST else result


def _repeated(left: Any, right: Any) -> Any:
    for items, times in ((left, right), (right, left)):
        count = whole(times)
        if not isinstance(items, tuple | ListValue) or (count is None and not isinstance(items, ListValue)):
            continue
        if isinstance(items, tuple):
            return items * max(count or 0, 0) if len(items) * (count or 0) <= _LONGEST else UNKNOWN
        length = None if items.length is None or count is None else items.length * max(count, 0)
        is_short = length is not None and length <= 16 and items.is_known
        return ListValue(items.items * (count or 0) if is_short else list(items.items), length, node=items.node)
    return None


def _compared(op: ast.cmpop, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Is | ast.IsNot) and right is None:
        if left is UNKNOWN or isinstance(left, Reference):
            return UNKNOWN
        return (left is None) is isinstance(op, ast.Is)
    items = known_items(right)
    if isinstance(op, ast.In | ast.NotIn):
        if isinstance(right, TableValue) and right.is_complete and isinstance(left, _PLAIN):
            return (left in right) is isinstance(op, ast.In)
        if isinstance(left, str) and isinstance(right, str):
            return bounded(_COMPARED[type(op)], left, right)
        if items is None or not isinstance(left, _PLAIN) or not all(isinstance(one, _PLAIN) for one in items):
            return UNKNOWN
        return (left in items) is isinstance(op, ast.In)
    if not isinstance(left, _PLAIN | tuple) or not isinstance(right, _PLAIN | tuple):
        return UNKNOWN
    return bounded(_COMPARED[type(op)], left, right)
