"""Values of expressions, and names: what an interpreter does between two statements.

In:  an expression and the scope that it stands in.  Out: its value, as values.py has them.
Invariant: what is returned is what the expression is whenever it is reached this way; anything else is UNKNOWN. No
number grows beyond 2^64 and no sequence beyond 10,000 items, whatever the file says.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, OneOf, Reference, whole
from holdall.tools.lint.source import arrays, containers, environments, frameworks, library, shapes
from holdall.tools.lint.source.scopes import Names, Scope
from holdall.tools.lint.source.values import (
    ArrayValue,
    BoundMethod,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    SuperValue,
    TableValue,
    as_key,
    candidates_of,
    is_key,
    known_items,
    length_of,
    likely,
    one_of,
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


class Expressions(Names):
    """Evaluates what is made of other expressions, and calls."""

    # ------------------------------------------------------------ compound expressions

    def _on_tuple(self, node: ast.Tuple) -> Any:
        items, is_known = self._items(node.elts)
        return tuple(items) if is_known else ListValue(items, None)

    def _on_list(self, node: ast.List) -> Any:
        items, is_known = self._items(node.elts)
        length = len(items) if is_known else None
        return ListValue(items, length, node=node, path=self.path, rounds=len(self.rounds))

    _on_set = _on_list

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

    def _on_dict(self, node: ast.Dict) -> Any:
        table = TableValue(path=self.path)
        for key, value in zip(node.keys, node.values, strict=True):
            made = self.value(value)
            if key is None:
                containers.update(self, table, made)
                continue
            name = as_key(self.value(key))
            if is_key(name):
                table[name] = made
            else:
                table.is_complete = False
        return table

    def _on_unaryop(self, node: ast.UnaryOp) -> Any:
        def apply(operand: Any) -> Any:
            if isinstance(node.op, ast.Not):
                truth = self.truth(operand)
                return UNKNOWN if truth is None else not truth
            if isinstance(operand, ArrayValue):
                return operand.made_by(node)
            is_number = isinstance(operand, int | float) and type(node.op) in _UNARY
            return bounded(_UNARY[type(node.op)], operand) if is_number else UNKNOWN

        return spread(apply, self.value(node.operand))

    def _on_binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        return spread(lambda a, b: self.binary(node.op, a, b, node), left, right)

    def binary(self, op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
        """Return the result of an operator."""
        if isinstance(left, ArrayValue) or isinstance(right, ArrayValue):
            return shapes.calculated(op, left, right, node)
        if isinstance(op, ast.Add) and isinstance(left, InstanceValue):
            return self.special(left, "__add__", right)
        if isinstance(op, ast.Mult) and (repeated := _repeated(left, right)) is not None:
            return repeated
        if isinstance(op, ast.Add) and isinstance(left, tuple | ListValue) and isinstance(right, tuple | ListValue):
            return containers.joined_sequences(left, right)
        if isinstance(op, ast.BitOr) and isinstance(left, TableValue):
            table = TableValue(left.items(), path=self.path, complete=left.is_complete)
            containers.update(self, table, right)
            return table
        if isinstance(op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return str(PurePath(left, right))
        both = isinstance(left, int | float) and isinstance(right, int | float)
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add)
        if not (both or texts) or type(op) not in _BINARY:
            return UNKNOWN
        if isinstance(op, ast.Pow | ast.LShift) and isinstance(right, int | float) and abs(right) > _MOST_POWER:
            return UNKNOWN
        return bounded(_BINARY[type(op)], left, right)

    def _on_boolop(self, node: ast.BoolOp) -> Any:
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

    def _on_compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        rights = [self.value(one) for one in node.comparators]
        is_one = len(rights) == 1
        return spread(lambda a, b: _compared(node.ops[0], a, b, node), left, rights[0]) if is_one else UNKNOWN

    def tested(self, test: ast.expr) -> tuple[bool | None, bool]:
        """Return whether a condition holds, if that is known, and whether that is certain: no user can change it."""
        outer, self.is_soft = self.is_soft, False
        value = self.value(test)
        truth, is_soft = self.truth(value), self.is_soft or isinstance(value, OneOf)
        self.is_soft = outer or self.is_soft
        return truth, truth is not None and not is_soft

    def _on_ifexp(self, node: ast.IfExp) -> Any:
        truth, is_certain = self.tested(node.test)
        if is_certain:
            return self.value(node.body if truth else node.orelse)
        text, path, pairs = self.text_of(node.test), self.path, []
        conditions = ("" if truth else text, "" if truth is False else f"not ({text})")
        for branch, condition in zip((node.body, node.orelse), conditions, strict=True):
            self.path = (*path, condition) if condition else path
            pairs.append((self.value(branch), condition))
        self.path = path
        return one_of(sorted(pairs, key=lambda one: one[1] != "") if truth is not None else pairs)

    def _on_subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            part = self._on_slice(node.slice)
            return spread(lambda one: containers.sliced(one, [part.start, part.stop, part.step]), base)
        return spread(lambda one, key: containers.item(self, one, key), base, self.value(node.slice))

    def _on_slice(self, node: ast.Slice) -> slice:
        return slice(*(None if one is None else likely(self.value(one)) for one in (node.lower, node.upper, node.step)))

    def _on_joinedstr(self, node: ast.JoinedStr) -> Any:
        parts: list[Any] = []
        for part in node.values:
            value = self.value(part.value) if isinstance(part, ast.FormattedValue) else getattr(part, "value", UNKNOWN)
            is_plain = isinstance(part, ast.Constant) or part.format_spec is None  # type: ignore[attr-defined]
            parts.append(value if is_plain else UNKNOWN)
        return spread(_joined_text, *parts)

    def _on_namedexpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _on_lambda(self, node: ast.Lambda) -> Any:
        keyword = tuple(UNKNOWN if one is None else self.value(one) for one in node.args.kw_defaults)
        return FunctionValue(node, self.scope, None, tuple(self.value(one) for one in node.args.defaults), keyword)

    def _on_await(self, node: ast.Await) -> Any:
        return self.value(node.value)

    def _on_yield(self, node: ast.Yield) -> Any:
        self.scope.yielded.append(self.value(node.value) if node.value else None)
        return UNKNOWN

    def _on_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Any:
        lengths, items = self._comprehended(node)
        made = [ListValue(list(items), length, node=node, path=self.path, is_fixed=True) for length in lengths]
        for one in made:
            one.rounds = len(self.rounds)
            if (one.length or 0) >= containers.MANY and isinstance(one.items[0], TableValue):
                self.record("appended", one, None, node, item=one.items[0])  # a dict for every transition
        return made[0] if len(made) == 1 else OneOf(tuple(made), tuple(lengths.values()))

    _on_setcomp = _on_generatorexp = _on_listcomp

    def _comprehended(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp
    ) -> tuple[dict[int | None, str], list[Any]]:
        lengths, over = self._enter_comprehension(node.generators)
        items: list[Any] = []
        try:
            known = known_items(over) if len(node.generators) == 1 and not node.generators[0].ifs else None
            if known is not None and len(known) <= 16:
                for index, item in enumerate(known):
                    self.assign(node.generators[0].target, item)
                    items.append(self._made_in_turn(node.elt, (node, index)))
            else:
                items = [self.value(node.elt)]
        finally:
            self.scope = self.scope.parent or self.scope
        return lengths, items

    def _made_in_turn(self, node: ast.expr, turn: tuple[ast.AST, int]) -> Any:
        """Return one item of a comprehension: large arrays that it allocates are others than those of the next one."""
        self.scope.call = turn
        made = self.value(node)
        if isinstance(made, ArrayValue) and (made.nbytes or 0) >= arrays.WORTH_RECORDING:
            return replace(made, origins=frozenset((one, turn) for one in made.origins))
        return made

    def _on_dictcomp(self, node: ast.DictComp) -> Any:
        _, over = self._enter_comprehension(node.generators)
        table = TableValue(path=self.path)
        try:
            known = known_items(over) if len(node.generators) == 1 else None
            table.is_complete = known is not None
            for index, item in enumerate(known or [UNKNOWN]):
                if known is not None:
                    self.assign(node.generators[0].target, item)
                truths = {self.truth(self.value(test)) for test in node.generators[0].ifs}
                table.is_complete = table.is_complete and None not in truths
                key, value = self.value(node.key), self._made_in_turn(node.value, (node, index))
                if is_key(key) and truths <= {True}:
                    table[key] = value
        finally:
            self.scope = self.scope.parent or self.scope
        return table

    def _enter_comprehension(self, generators: list[ast.comprehension]) -> tuple[dict[int | None, str], Any]:
        """Open the scope of a comprehension, which the caller closes; return its lengths, each with its condition."""
        over = self.value(generators[0].iter)
        is_plain = len(generators) == 1 and not generators[0].ifs
        lengths = {length_of(one) if is_plain else None: text for one, text in candidates_of(over)}
        scope = self.scope
        self.scope = Scope(scope.module, {}, scope, instance=scope.instance, owner=scope.owner, path=scope.path)
        for index, one in enumerate(generators):
            self.assign(one.target, self.item_of_loop(over if index == 0 else self.value(one.iter)))
            for test in one.ifs:
                self.value(test)
        return lengths, over

    item_of_loop: Callable[..., Any]
    instantiate: Callable[..., Any]

    # ------------------------------------------------------------ calls

    def _on_call(self, node: ast.Call) -> Any:
        called = self.value(node.func)
        if called is library.SUPER:
            return self._super()
        arguments = self._arguments(node)
        outer, self.anchor = self.anchor, node if self.scope.module is self.main else self.anchor
        try:
            if isinstance(called, OneOf):
                result = spread(lambda one: self.call(one, arguments, node), called)
            else:
                result = self.call(called, arguments, node)
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
            case BoundMethod(owner=owner, name=name, function=FunctionValue() as function):
                result = self.call_function(function, arguments, owner)
                is_env = name in {"reset", "step"} and isinstance(owner, InstanceValue)
                return environments.as_declared(self, owner, name, result, node) if is_env else result
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
        return self._call_unknown(called, arguments, node)

    def _call_unknown(self, called: Any, arguments: CallArguments, node: ast.AST) -> Any:
        """Return what the name of a function says of its result, where nothing else is known of it."""
        function = getattr(node, "func", None)
        name = getattr(function, "id", getattr(function, "attr", ""))
        first = arguments.get(0, "env")
        if name[:1].isupper() and environments.is_environment(first):  # a wrapper from elsewhere
            return replace(environments.environment_of(self, first), observation=None, action=None, autoreset=None)  # type: ignore[type-var]
        if called is UNKNOWN and name in {"reshape", "astype", "mean"}:  # nothing but arrays has these methods
            shape = arrays.fixed_shape(arguments.values) if name == "reshape" else None
            dtype = arrays.dtype_of(arguments.get(0, "dtype")) if name == "astype" else None
            dtype = np.dtype(np.float64) if name == "mean" and "axis" in arguments.named else dtype
            if shape is not None or dtype is not None:
                return ArrayValue.new(node, shape, dtype)
        if name == "run":
            return frameworks.session_result(arguments, node)
        if name.startswith("suggest_"):
            return library.suggested(name, arguments)
        if name in frameworks.LISTENING:
            self.follow_callbacks(arguments, node)
        for value in (*arguments.values, *arguments.named.values()):
            if isinstance(value, TableValue):
                value.forget()
            elif isinstance(value, ListValue):
                value.length = None
        return UNKNOWN

    def called(self, value: Any) -> Any:
        """Return what calling a value without arguments returns: a class, a function, a partial."""
        value, node = likely(value), self.anchor or self.main.tree
        if isinstance(value, InstanceValue) and value.kind == "functools.partial":
            return self.call(value.arguments["call"], value.arguments["arguments"].behind(1), node)
        is_called = isinstance(value, FunctionValue | ClassValue | BoundMethod | Reference)
        return self.call(value, CallArguments(), node) if is_called else value

    def follow_callbacks(self, arguments: CallArguments, node: ast.AST) -> None:
        """Follow functions of the program that something else calls: with what a sensor saw, nobody knows when."""
        for value in (*arguments.values, *arguments.named.values()):
            if isinstance(getattr(value, "function", value), FunctionValue):
                self.call(value, CallArguments(is_complete=False), node)

    def fresh_default(self, value: Any) -> Any:
        """Return the default of a field of a data class; what a factory makes is new every time."""
        if isinstance(value, InstanceValue) and value.kind == "dataclasses.field":
            if "default_factory" in value.arguments:
                return self.call(value.arguments["default_factory"], CallArguments(), value.node or self.anchor)  # type: ignore[arg-type]
            return value.arguments.get("default", UNKNOWN)
        return value

    def converted_to_array(self, value: InstanceValue) -> Any:
        """Return what numpy makes of an object: what its `__array__` returns, or the pixels of a picture."""
        if "array" in value.attributes and isinstance(value.made_of, Reference):
            return value.attributes["array"]
        return self.special(value, "__array__") if value.method("__array__") else value


def bounded(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function of numbers; what fails or grows too large is not known."""
    try:
        result = function(*values)
    except (ArithmeticError, ValueError, TypeError):
        return UNKNOWN
    return UNKNOWN if isinstance(result, int | float) and not abs(result) <= _LARGEST else result


def _joined_text(*parts: Any) -> Any:
    return "".join(map(str, parts)) if all(isinstance(one, str | int | float) for one in parts) else UNKNOWN


def _repeated(left: Any, right: Any) -> Any:
    for items, times in ((left, right), (right, left)):
        count = whole(times)
        if not isinstance(items, tuple | ListValue) or (count is None and not isinstance(items, ListValue)):
            continue
        if isinstance(items, tuple):
            return items * max(count or 0, 0) if len(items) * (count or 0) <= _LONGEST else UNKNOWN
        length = None if items.length is None or count is None else items.length * max(count, 0)
        is_short = length is not None and length <= 16 and items.is_known
        repeated = items.items * (count or 0) if is_short else list(items.items)
        return ListValue(repeated, length, node=items.node, is_fixed=True)
    return None


def _compared(op: ast.cmpop, left: Any, right: Any, node: ast.AST) -> Any:
    if isinstance(left, ArrayValue) and isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE | ast.Eq | ast.NotEq):
        return left.made_by(node, dtype=np.dtype(np.bool_))
    if isinstance(op, ast.Is | ast.IsNot) and right is None:
        is_unknown = left is UNKNOWN or isinstance(left, Reference)
        return UNKNOWN if is_unknown else (left is None) is isinstance(op, ast.Is)
    if isinstance(op, ast.In | ast.NotIn):
        is_table = isinstance(right, TableValue) and right.is_complete
        held = right if is_table or isinstance(right, str) else known_items(right)
        is_known = held is not None and (is_table or all(isinstance(one, _PLAIN) for one in held))
        return bounded(_COMPARED[type(op)], left, held) if is_known and isinstance(left, _PLAIN) else UNKNOWN
    if isinstance(left, ListValue) and isinstance(right, ListValue):
        left, right = (tuple(known_items(one) or [one]) for one in (left, right))
        if not all(isinstance(one, _PLAIN) for one in (*left, *right)):
            return UNKNOWN
    left, right = as_key(left), as_key(right)
    if not isinstance(left, _PLAIN | tuple) or not isinstance(right, _PLAIN | tuple):
        return UNKNOWN
    return bounded(_COMPARED[type(op)], left, right)
