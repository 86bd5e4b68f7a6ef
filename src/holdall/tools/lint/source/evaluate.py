"""Constants out of expressions, without running them.

In:  an expression of a script.  Out: a constant, a Reference, a KnownLength or OneOf, or UNKNOWN.
Invariant: what is returned is what the expression is at run time; anything else is UNKNOWN. Work is bounded: no
number grows beyond 2^64 and no sequence beyond 10,000 items, whatever the file says.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from holdall.tools.lint.run import UNKNOWN, KnownLength, OneOf, Reference, whole
from holdall.tools.lint.source.script import Binding, Script

_LARGEST = 2**64
_LONGEST = 10_000
_DEEPEST = 40

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
_CONVERSIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (int, float, bool, max, min, round, abs, tuple, list)
}
# Packages whose functions leave their arguments as they are.
_TRUSTED = ("stable_baselines3.", "sb3_contrib.", "gymnasium.")
# What may be done with a dict without changing it.
_READS = frozenset({"get", "items", "keys", "values", "copy"})


class Evaluator:
    """Constants of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._depth = 0

    def value(self, node: ast.expr | None) -> object:
        """Return what an expression is, as far as it is certain."""
        if node is None or self._depth > _DEEPEST:
            return UNKNOWN
        self._depth += 1
        try:
            return self._value(node)
        finally:
            self._depth -= 1

    def argument(self, call: ast.Call, index: int, name: str, default: object = UNKNOWN) -> object:
        """Return what a call passes for one of its arguments; `default` if it passes nothing."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return self.value(keyword.value)
            if keyword.arg is None:
                return UNKNOWN
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return UNKNOWN
        return self.value(call.args[index]) if index < len(call.args) else default

    def length(self, node: ast.expr) -> int | None:
        """Return how many items a sequence has, known or not."""
        value = self.value(node)
        if isinstance(value, KnownLength):
            return value.length
        return len(value) if isinstance(value, list | tuple) else None

    def _value(self, node: ast.expr) -> object:  # noqa: C901, PLR0911  one line for each kind of expression
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return self._sequence(items, tuple if isinstance(node, ast.Tuple) else list)
            case ast.Dict():
                return self._dict(node)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                number = self.value(operand)
                return _bounded(_UNARY[type(op)], number) if isinstance(number, int | float) else UNKNOWN
            case ast.BinOp():
                return self._binary(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition = self.value(test)
                return self.value(body if condition else orelse) if isinstance(condition, bool) else UNKNOWN
            case ast.Subscript(value=base, slice=index):
                return _item(self.value(base), self.value(index))
            case ast.ListComp():
                return self._comprehension(node)
            case ast.Call():
                return self._call(node)
        return UNKNOWN

    # ------------------------------------------------------------ names

    def _name(self, node: ast.Name) -> object:
        found = self.script.definition(node)
        if found is None:
            return UNKNOWN
        if found.loop is not None:
            return self._loop_value(found.loop)
        if found.value is None:
            dotted = self.script.dotted(node)
            return Reference(dotted) if dotted else UNKNOWN
        value = self.value(found.value)
        if isinstance(value, dict | list) and not self._is_left_alone(node, found):
            return UNKNOWN
        return value

    def _loop_value(self, loop: ast.For) -> object:
        values = self.value(loop.iter)
        return OneOf(tuple(values)) if isinstance(values, list | tuple) and values else UNKNOWN

    def _is_left_alone(self, node: ast.Name, found: Binding) -> bool:
        """Whether nothing in the file can have changed the dict or list that a name holds."""
        return all(
            self._only_reads(other)
            for other in self.script.nodes
            if isinstance(other, ast.Name) and other.id == node.id and isinstance(other.ctx, ast.Load)
        ) and not isinstance(found.node, ast.AugAssign)

    def _only_reads(self, name: ast.Name) -> bool:
        parent = self.script.parent(name)
        match parent:
            case (
                ast.keyword(arg=None) | ast.Starred() | ast.For() | ast.comprehension() | ast.Subscript(ctx=ast.Load())
            ):
                return True
            case ast.keyword(arg=str()):
                call = self.script.parent(parent)
                called = self.script.dotted(call.func) if isinstance(call, ast.Call) else ""
                return called.startswith(_TRUSTED)
            case ast.Attribute(attr=attr):
                return attr in _READS
            case ast.Call(func=ast.Name(id=called)):
                return called in {"print", "len", "str", "repr", "dict", "list", "tuple", *_CONVERSIONS}
        return False

    def _attribute(self, node: ast.Attribute) -> object:
        dotted = self.script.dotted(node)
        if dotted and dotted.partition(".")[0] not in self.script.classes:
            return Reference(dotted)
        value = self.attribute_node(node)
        return UNKNOWN if value is None else self.value(value)

    def attribute_node(self, node: ast.Attribute) -> ast.expr | None:
        """Return the expression that `self.x`, `Class.x` or `instance.x` was given, if there is only one."""
        if not isinstance(node.value, ast.Name):
            return None
        owner = self.script.enclosing_class(node) if node.value.id == "self" else self._class_of(node.value)
        if owner is None:
            return None
        same = [one for one in self.script.nodes if isinstance(one, ast.Attribute) and one.attr == node.attr]
        stored = [one for one in same if isinstance(one.ctx, ast.Store | ast.Del)]
        in_class = self.script.bindings(owner, node.attr)
        if len(stored) == 1 and not in_class and self.script.enclosing_class(stored[0]) is owner:
            parent = self.script.parent(stored[0])
            value = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            return None if value is None or self.script.loop(stored[0]) else value
        return in_class[0].value if len(in_class) == 1 and not stored else None

    def _class_of(self, name: ast.Name) -> ast.ClassDef | None:
        """Return the class that a name is, or is a bare instance of."""
        if name.id in self.script.classes:
            return self.script.classes[name.id]
        match self.script.assigned(name):
            case ast.Call(func=ast.Name(id=called), args=[], keywords=[]):
                return self.script.classes.get(called)
        return None

    # ------------------------------------------------------------ compound expressions

    def _sequence(self, items: list[ast.expr], kind: type[Any]) -> object:
        if len(items) > _LONGEST or any(isinstance(item, ast.Starred) for item in items):
            return UNKNOWN
        values = [self.value(item) for item in items]
        return KnownLength(len(items)) if UNKNOWN in values else kind(values)

    def _dict(self, node: ast.Dict) -> object:
        result: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = self.value(key) if key is not None else UNKNOWN
            if not isinstance(name, str | int):
                return UNKNOWN
            result[name] = self.value(value)
        return result

    def _binary(self, node: ast.BinOp) -> object:
        if isinstance(node.op, ast.Mult) and (repeated := self._repeated(node)) is not None:
            return repeated
        left, right = self.value(node.left), self.value(node.right)
        both_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not both_numbers or type(node.op) not in _BINARY:
            return UNKNOWN
        if isinstance(node.op, ast.Pow | ast.LShift) and isinstance(right, int | float) and abs(right) > 64:
            return UNKNOWN
        return _bounded(_BINARY[type(node.op)], left, right)

    def _repeated(self, node: ast.BinOp) -> object | None:
        for items, times in ((node.left, node.right), (node.right, node.left)):
            if isinstance(items, ast.List | ast.Tuple) and (count := whole(self.value(times))) is not None:
                return KnownLength(len(items.elts) * count)
        return None

    def _comprehension(self, node: ast.ListComp) -> object:
        if len(node.generators) != 1 or node.generators[0].ifs:
            return UNKNOWN
        over = node.generators[0].iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
            return _spread(_range, [self.value(bound) for bound in over.args])
        items = self.length(over)
        return UNKNOWN if items is None else KnownLength(items)

    def _call(self, node: ast.Call) -> object:
        match node.func:
            case ast.Name(id="dict") if not node.args:
                given = {k.arg: self.value(k.value) for k in node.keywords}
                return UNKNOWN if None in given else given
            case ast.Name(id="len") if len(node.args) == 1:
                length = self.length(node.args[0])
                return UNKNOWN if length is None else length
            case ast.Name(id=name) if name in _CONVERSIONS and not node.keywords:
                values = [self.value(argument) for argument in node.args]
                numbers = all(isinstance(value, int | float | list | tuple) for value in values)
                return _bounded(_CONVERSIONS[name], *values) if numbers and values else UNKNOWN
            case ast.Attribute(attr="suggest_categorical") if len(node.args) == 2:
                choices = self.value(node.args[1])
                return OneOf(tuple(choices)) if isinstance(choices, list | tuple) and choices else UNKNOWN
            case ast.Attribute(attr="suggest_int") if len(node.args) == 3:
                ends = [whole(self.value(end)) for end in node.args[1:]]
                return UNKNOWN if None in ends else OneOf(tuple(ends))
        return UNKNOWN


def _bounded(function: Callable[..., Any], *values: object) -> object:
    """Call a function of numbers; what fails or grows too large is not known."""
    try:
        result = function(*values)
    except (ArithmeticError, ValueError, TypeError):
        return UNKNOWN
    return UNKNOWN if isinstance(result, int | float) and abs(result) > _LARGEST else result


def _range(*numbers: object) -> object:
    length = _bounded(lambda *bounds: len(range(*bounds)), *map(whole, numbers))
    return KnownLength(length) if isinstance(length, int) else UNKNOWN


def _spread(function: Callable[..., object], values: list[object]) -> object:
    """Call a function; once for each candidate where its only argument is one of several values."""
    if len(values) == 1 and isinstance(values[0], OneOf):
        return OneOf(tuple(function(value) for value in values[0].values))
    return function(*values)


def _item(base: object, index: object) -> object:
    if isinstance(base, dict) and isinstance(index, str | int):
        return base.get(index, UNKNOWN)
    if isinstance(base, list | tuple) and isinstance(index, int) and -len(base) <= index < len(base):
        return base[index]
    return UNKNOWN
