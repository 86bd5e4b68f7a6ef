"""A Python file as a syntax tree: parents, loops, imports, and the last assignment of a name.

Nothing of a file is executed or imported. Rules ask `get_full_name` for the full name of an imported object,
`find_last_assignment` for the expression that was assigned to a name, and `evaluate` for the value of a simple
expression.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from holdall.tools.lint.finding import Place

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_USUAL_NAMES = {"torch": "torch", "np": "numpy", "gc": "gc", "os": "os"}
"""Names that `from x import *` may define, with their full names."""
_SHARED_NODES = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
"""Nodes without a parent of their own: the tree uses one object for all contexts or operators of a kind."""
_MAX_DEPTH = 50
"""Assignments that are followed from name to name, and nesting of an expression that is evaluated."""
_MAX_EXPONENT = 64
_STEP_METHODS = ("update", "step", "_on_step", "_on_rollout", "train_step", "training_step", "optimize", "optimise")
"""First words of the names of methods that a training loop calls once per step or update."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Binding:
    """A place where a name gets a value."""

    node: ast.AST
    value: ast.expr | None
    """None if the value is not one expression of the file: a parameter, a loop, `with`, `+=`, `global`."""


class Source:
    """A parsed file."""

    def __init__(self, path: str, text: str) -> None:
        """Parse `text`. Raise SyntaxError, ValueError or RecursionError where Python cannot parse it."""
        self.path = path
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd escape sequences while it parses.
            self.tree = ast.parse(text)

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        parents: dict[ast.AST, ast.AST] = {}
        nodes: list[ast.AST] = [self.tree]
        for node in nodes:  # The loop also visits the nodes that it appends.
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, _SHARED_NODES):
                    parents[child] = node
                    nodes.append(child)
        return parents

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes in breadth-first order, without contexts and operators."""
        return [self.tree, *self._parents]

    @cached_property
    def _nodes_by_class(self) -> dict[type[ast.AST], list[Any]]:
        nodes: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in self.nodes:
            nodes[type(node)].append(node)
        return nodes

    def find_nodes(self, kind: type[Node]) -> list[Node]:
        """Return all nodes of exactly this class."""
        return self._nodes_by_class.get(kind, [])

    def get_place(self, node: ast.AST) -> Place:
        """Return the place of a node. A place counts columns in characters, and the tree counts them in bytes."""
        line = getattr(node, "lineno", 1)
        end_line = getattr(node, "end_lineno", 1)
        column = self._find_column(line, getattr(node, "col_offset", 0))
        end_column = self._find_column(end_line, getattr(node, "end_col_offset", 0))
        return Place(self.path, line, column, end_line, end_column)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    def _find_column(self, line: int, offset: int) -> int:
        """Return the column of the byte `offset` of a line."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return len(text.encode()[:offset].decode(errors="replace")) + 1

    # ---------------------------------------------------------------- nodes that contain a node

    def get_parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that contains this one."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain this one, from the inside out."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def find_scope(self, node: ast.AST) -> ast.AST:
        """Return the innermost module, class, function or lambda whose body contains a node."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, _SCOPES):
                body = [parent.body] if isinstance(parent, ast.Lambda) else parent.body
                # Decorators, defaults and base classes belong to the scope around the function or class.
                if child in body or child is getattr(parent, "args", None):
                    return parent
            child = parent
        return self.tree

    def find_loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop of the same function that repeats a node, or None."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, _SCOPES):
                return None
            if isinstance(parent, _LOOPS) and child in parent.body:
                return parent
            child = parent
        return None

    def find_block(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost node with a body around a node: a module, class, function, loop, condition or `with`."""
        return next((parent for parent in self.ancestors(node) if hasattr(parent, "body")), None)

    def describe_repetition(self, node: ast.AST) -> str:
        """Say what repeats a node: a loop around the node, or around a call of its function. Empty if nothing does."""
        if self.find_loop(node) is not None:
            return "in a loop"
        owner = self.find_function(node)
        if owner is None:
            return ""
        if owner.name.startswith(_STEP_METHODS):
            return f"in {owner.name}, which runs at every update"
        for call in self.calls:
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name == owner.name and self.find_loop(call) is not None:
                return f"in {owner.name}, which a loop calls"
        return ""

    def is_bound_in(self, scope: ast.AST, node: ast.AST) -> bool:
        """Return whether a node is a name that gets a value in `scope`."""
        return isinstance(node, ast.Name) and (scope, node.id) in self._bindings

    def find_function(self, node: ast.AST) -> Function | None:
        """Return the function that contains a node, or None."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, Function)), None)

    def find_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that contains a node, or None."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    # ---------------------------------------------------------------- calls and full names

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the order of the text."""
        return sorted(self.find_nodes(ast.Call), key=_get_position)

    def find_calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions or classes by their full names."""
        return (call for call in self.calls if self.get_full_name(call.func) in names)

    def find_method_calls(self, name: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield the calls of a method of any object, each with the expression of the object."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == name:
                yield call, call.func.value

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Names of all attributes that the file reads or sets."""
        return frozenset(node.attr for node in self.find_nodes(ast.Attribute))

    @cached_property
    def keywords(self) -> frozenset[str]:
        """Names of all keyword arguments that the file passes."""
        return frozenset(node.arg for node in self.find_nodes(ast.keyword) if node.arg)

    @cached_property
    def strings(self) -> frozenset[str]:
        """All string constants."""
        return frozenset(node.value for node in self.find_nodes(ast.Constant) if isinstance(node.value, str))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes of the file by name."""
        return {node.name: node for node in self.find_nodes(ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions of the module by name, without methods and inner functions."""
        return {node.name: node for node in self.tree.body if isinstance(node, Function)}

    @cached_property
    def imports(self) -> dict[str, str]:
        """Full names by the names under which the file imports them, in any scope."""
        full: dict[str, str] = {}
        for node in self.find_nodes(ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                full[alias.asname or first] = alias.name if alias.asname else first
        for origin in self.find_nodes(ast.ImportFrom):
            if any(alias.name == "*" for alias in origin.names):
                full = _USUAL_NAMES | full
            if origin.module and not origin.level:
                for alias in origin.names:
                    full[alias.asname or alias.name] = f"{origin.module}.{alias.name}"
        return full

    @cached_property
    def imports_torch(self) -> bool:
        """Whether the file imports torch, or a part of it."""
        return any(name.partition(".")[0] == "torch" for name in self.imports.values())

    def get_full_name(self, node: ast.AST | None) -> str:
        """Return the full name of an imported object, or of a class or function of this file, else an empty text."""
        if isinstance(node, ast.Attribute):
            base = self.get_full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.imports:
            return self.imports[node.id]
        return node.id if node.id in self.classes or node.id in self.functions else ""

    def find_called_function(self, call: ast.Call) -> Function | None:
        """Return the function of this file that `call` calls, or the method if only one has the called name."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        name = getattr(call.func, "attr", "")
        methods = [node for node in self.find_nodes(ast.FunctionDef) if node.name == name]
        return methods[0] if len(methods) == 1 else None

    # ---------------------------------------------------------------- assignments

    @cached_property
    def _bindings(self) -> dict[tuple[ast.AST, str], list[Binding]]:
        found: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        for node in self.nodes:
            for name, binding in _find_bound_names(node):
                found[self.find_scope(node), name].append(binding)
        return found

    def find_last_assignment(self, node: ast.AST | None) -> ast.expr | None:
        """Return the expression of the last assignment that a use of a name, or of `self.x`, can see.

        In the scope of the use, that is the last assignment before the use. In an enclosing scope, and for attributes
        of `self`, there must be exactly one. None: there is no such assignment, or its value is not one expression.
        """
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._find_attribute_assignment(node)
        if not isinstance(node, ast.Name):
            return None
        own_scope = self.find_scope(node)
        scope = own_scope
        while (scope, node.id) not in self._bindings or (scope is not own_scope and isinstance(scope, ast.ClassDef)):
            if isinstance(scope, ast.Module):
                return None
            scope = self.find_scope(scope)
        bindings = self._bindings[scope, node.id]
        if scope is own_scope:
            # In its own right-hand side, an assignment has no effect yet.
            unfinished = {parent for parent in self.ancestors(node) if isinstance(parent, _ASSIGNMENTS)}
            bindings = [
                one for one in bindings if _get_position(one.node) < _get_position(node) and one.node not in unfinished
            ]
            bindings.sort(key=lambda one: _get_position(one.node))
        elif len(bindings) > 1:
            return None
        return bindings[-1].value if bindings else None

    def _find_attribute_assignment(self, node: ast.Attribute) -> ast.expr | None:
        owner = self.find_class(node)
        values = []
        for other in self.find_nodes(ast.Attribute):
            if other.attr == node.attr and isinstance(other.ctx, ast.Store) and self.find_class(other) is owner:
                parent = self.get_parent(other)
                values.append(parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None)
        return values[0] if len(values) == 1 else None

    def resolve(self, node: ast.expr | None) -> ast.expr | None:
        """Follow names and attributes of `self` to the expression that was assigned to them."""
        for _ in range(_MAX_DEPTH):
            value = self.find_last_assignment(node)
            if value is None:
                return node
            node = value
        return node

    def evaluate(self, node: ast.AST | None) -> Any:
        """Return the value of an expression of literals, arithmetic and assigned names, or None for any other one."""
        try:
            return self._evaluate(node, 0)
        except (ArithmeticError, TypeError, ValueError):
            return None

    def _evaluate(self, node: ast.AST | None, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return None
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand, depth + 1)
            case ast.BinOp(left=left, op=op, right=right):
                first = self._evaluate(left, depth + 1)
                second = self._evaluate(right, depth + 1)
                if not isinstance(first, int | float) or not isinstance(second, int | float):
                    return None
                if isinstance(op, ast.Pow):
                    return first**second if abs(second) <= _MAX_EXPONENT else None
                return _OPERATORS[type(op)](first, second) if type(op) in _OPERATORS else None
            case ast.Call(func=ast.Name(id="int" | "float" as kind), args=[value], keywords=[]):
                number = self._evaluate(value, depth + 1)
                if not isinstance(number, int | float):
                    return None
                return int(number) if kind == "int" else float(number)
            case ast.Name() | ast.Attribute():
                return self._evaluate(self.find_last_assignment(node), depth + 1)
        return None

    def evaluate_whole_number(self, node: ast.AST | None) -> int | None:
        """Return the value of a constant expression that is a whole number (1e6 is one), or None."""
        value = self.evaluate(node)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            return None
        return int(value)


def get_argument(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """Return the argument of a call by name or by index, or None if the call does not pass it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if index is None or index >= len(call.args) or any(isinstance(given, ast.Starred) for given in call.args):
        return None
    return call.args[index]


def has_unpacked_arguments(call: ast.Call) -> bool:
    """Return whether a call passes `*args` or `**kwargs`, so that an argument may be hidden in them."""
    is_starred = any(isinstance(given, ast.Starred) for given in call.args)
    return is_starred or any(keyword.arg is None for keyword in call.keywords)


def list_names(node: ast.AST) -> set[str]:
    """Return all names in an expression or statement."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _get_position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _find_bound_names(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    """Yield the names that a node gives a value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _find_assigned_names(target, value, node)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield from _find_assigned_names(target, value, node)
        case ast.For(target=target) | ast.AsyncFor(target=target) | ast.AugAssign(target=target):
            yield from _find_unknown_names(target, node)
        case ast.comprehension(target=target):
            yield from _find_unknown_names(target, target)
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from _find_unknown_names(target, target)
        case ast.arg(arg=name):
            yield name, Binding(node, None)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            for name in names:
                yield name, Binding(node, None)


def _find_assigned_names(target: ast.expr, value: ast.expr, node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, Binding(node, value)
        return
    is_pairwise = (
        isinstance(target, ast.Tuple | ast.List)
        and isinstance(value, ast.Tuple | ast.List)
        and len(target.elts) == len(value.elts)
        and not any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
    )
    if not is_pairwise:
        yield from _find_unknown_names(target, node)
        return
    assert isinstance(target, ast.Tuple | ast.List)
    assert isinstance(value, ast.Tuple | ast.List)
    for inner_target, inner_value in zip(target.elts, value.elts, strict=True):
        yield from _find_assigned_names(inner_target, inner_value, node)


def _find_unknown_names(target: ast.expr, node: ast.AST) -> Iterator[tuple[str, Binding]]:
    """Yield the names in `target`, which get values that the file does not show."""
    for part in ast.walk(target):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id, Binding(node, None)
