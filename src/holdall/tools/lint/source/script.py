"""A Python file as syntax: parents, imports, scopes, and which assignment a name means.

In:  source text.  Out: answers about its tree; nothing of it is ever executed or imported.
Invariant: `definition` returns an assignment only if the use of a name certainly sees it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeVar

from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.source.repository import parse_quietly

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
# Fields without a node of their own: texts, and contexts and operators, of which one object stands for all of a kind.
_NO_NODES = {
    "arg", "asname", "attr", "conversion", "ctx", "id", "kind", "level", "module", "name", "op", "ops", "simple",
    "type_comment", "type_ignores",
}  # fmt: skip

LONGEST_CONDITION = 70
_USUAL_NAMES = {"torch": "torch", "np": "numpy", "gc": "gc", "os": "os"}  # that `from x import *` may bring


class _ChildFields(dict[type[ast.AST], tuple[str, ...]]):
    """Which fields of a kind of node can hold nodes."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        names = () if kind is ast.Constant else tuple(name for name in kind._fields if name not in _NO_NODES)
        return self.setdefault(kind, names)


_CHILD_FIELDS = _ChildFields()


def parents_below(root: ast.AST) -> dict[ast.AST, ast.AST]:
    """Return the parents of all nodes below one but contexts and operators, those above before those below."""
    parents: dict[ast.AST, ast.AST] = {}
    nodes = [root]
    for node in nodes:  # grows as children are found
        for name in _CHILD_FIELDS[type(node)]:
            value = getattr(node, name, None)
            if type(value) is list:
                for child in value:
                    if isinstance(child, ast.AST):
                        parents[child] = node
                        nodes.append(child)
            elif isinstance(value, ast.AST):
                parents[value] = node
                nodes.append(value)
    return parents


def subtree(root: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, those above before those below."""
    return [root, *parents_below(root)]


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a name gets a value."""

    node: ast.AST
    value: ast.expr | None = None  # None: not from one expression (a parameter, an import, a += ...)
    loop: ast.For | None = None  # the value is one item of what this loop runs over


@dataclass(frozen=True)
class Script:
    """A parsed file."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, text: str, path: str) -> Script:
        """Parse source text; a SyntaxError is the caller's to report."""
        return cls(path, text, parse_quietly(text))

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return parents_below(self.tree)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node but contexts and operators, those above before those below."""
        return [self.tree, *self._parents]

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[Any]]:
        found: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in self.nodes:
            found[type(node)].append(node)
        return found

    def of_kind(self, kind: type[Node]) -> list[Node]:
        """Every node of exactly this class, those above before those below."""
        return self._by_kind.get(kind, [])

    @property
    def is_run(self) -> bool:
        """Whether the file does something of its own, and does not only define things for others."""
        if "__main__" in self.text or any(isinstance(one, (*LOOPS, ast.With)) for one in self.tree.body):
            return True
        values = [one.value for one in self.tree.body if isinstance(one, ast.Expr | ast.Assign)]
        return any(isinstance(one, ast.Call | ast.ListComp | ast.Await) for one in values)

    @cached_property
    def lines(self) -> list[str]:
        """The lines, as the tree counts them."""
        return self.text.split("\n")

    def place(self, node: ast.AST) -> SourceRange:
        """Where a node stands, with columns in characters (the tree counts bytes)."""
        line, end_line = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        column, end_column = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
        return SourceRange(self.path, line, self._column(line, column), end_line, self._column(end_line, end_column))

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return offset + 1 if text.isascii() else len(text.encode()[:offset].decode(errors="replace")) + 1

    # ------------------------------------------------------------ around a node

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that holds this one."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what holds a node, from the inside out."""
        at = self._parents.get(node)
        while at is not None:
            yield at
            at = self._parents.get(at)

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost module, class, function or lambda whose body a node is in."""
        for child, parent in self._around(node):
            if isinstance(parent, _SCOPES):
                body = [parent.body] if isinstance(parent, ast.Lambda) else parent.body
                # Decorators, defaults and bases are evaluated outside the scope that they belong to.
                if child in body or child is getattr(parent, "args", None):
                    return parent
        return self.tree

    def _around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield what holds a node, from the inside out, each behind what it holds."""
        return pairwise(chain((node,), self.ancestors(node)))

    def loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop of the same function that repeats a node, or None."""
        for child, parent in self._around(node):
            if isinstance(parent, _SCOPES):
                return None
            if isinstance(parent, LOOPS) and child in parent.body:
                return parent
        return None

    def function(self, node: ast.AST) -> Function | None:
        """Return the function that a node is in, or None."""
        return next((a for a in self.ancestors(node) if isinstance(a, Function)), None)

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that a node is in, or None."""
        return next((a for a in self.ancestors(node) if isinstance(a, ast.ClassDef)), None)

    # ------------------------------------------------------------ names

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        return sorted(self.of_kind(ast.Call), key=lambda call: (call.lineno, call.col_offset))

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions by their full names."""
        return (call for call in self.calls if self.dotted(call.func) in names)

    def method_calls(self, name: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield the calls of a method of whatever object, each with the expression of the object."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == name:
                yield call, call.func.value

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The names of all attributes that the file reads or sets."""
        return frozenset(node.attr for node in self.of_kind(ast.Attribute))

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The names of all arguments that the file passes by name."""
        return frozenset(node.arg for node in self.of_kind(ast.keyword) if node.arg)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name."""
        return {node.name: node for node in self.of_kind(ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions of the module's own level by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, Function)}

    @cached_property
    def imports(self) -> dict[str, str]:
        """Full names by the names that imports give them, wherever in the file they stand."""
        full: dict[str, str] = {}
        for node in self.of_kind(ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                full[alias.asname or first] = alias.name if alias.asname else first
        for origin in self.of_kind(ast.ImportFrom):
            if any(alias.name == "*" for alias in origin.names):
                full = _USUAL_NAMES | full
            if origin.module and not origin.level:
                for alias in origin.names:
                    full[alias.asname or alias.name] = f"{origin.module}.{alias.name}"
        return full

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of an imported thing, or of a class or function of this file; empty if neither."""
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.imports:
            return self.imports[node.id]
        return node.id if node.id in self.classes or node.id in self.functions else ""

    @cached_property
    def _bindings(self) -> dict[tuple[Scope, str], list[Binding]]:
        found: dict[tuple[Scope, str], list[Binding]] = {}
        for node in self.nodes:
            for name, binding in _bound(node):
                scope = self.tree if isinstance(node, ast.Global | ast.Nonlocal) else self.scope(node)
                found.setdefault((scope, name), []).append(binding)
        return found

    def bindings(self, scope: Scope, name: str) -> list[Binding]:
        """Return every place in a scope that gives a name a value."""
        return self._bindings.get((scope, name), [])

    def definition(self, name: ast.Name) -> Binding | None:
        """Return the one place whose value this use of a name certainly sees, or None."""
        if any(isinstance(a, _COMPREHENSIONS) and _targets(a, name.id) for a in self.ancestors(name)):
            return None
        scope = own = self.scope(name)
        while not (found := self.bindings(scope, name.id)) or (scope is not own and isinstance(scope, ast.ClassDef)):
            if isinstance(scope, ast.Module):
                return None
            scope = self.scope(scope)
        if len(found) == 1:
            return found[0]
        return self._reaching(found, name) if scope is own else None

    def assigned(self, node: ast.AST | None) -> ast.expr | None:
        """Return the expression that a use of a name certainly stands for, or None."""
        found = self.definition(node) if isinstance(node, ast.Name) else None
        return found.value if found else None

    def attribute_node(self, node: ast.Attribute) -> ast.expr | None:
        """Return the expression that `self.x`, `Class.x` or `instance.x` was given, if there is only one."""
        if not isinstance(node.value, ast.Name):
            return None
        owner = self.enclosing_class(node) if node.value.id == "self" else self._class_of(node.value)
        if owner is None:
            return None
        same = [one for one in self.of_kind(ast.Attribute) if one.attr == node.attr]
        stored = [one for one in same if isinstance(one.ctx, ast.Store | ast.Del)]
        in_class = self.bindings(owner, node.attr)
        if len(stored) == 1 and not in_class and self.enclosing_class(stored[0]) is owner:
            parent = self.parent(stored[0])
            value = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            return None if value is None or self.loop(stored[0]) else value
        return in_class[0].value if len(in_class) == 1 and not stored else None

    def _class_of(self, name: ast.Name) -> ast.ClassDef | None:
        """Return the class that a name is, or is a bare instance of."""
        if name.id in self.classes:
            return self.classes[name.id]
        match self.assigned(name):
            case ast.Call(func=ast.Name(id=called), args=[], keywords=[]):
                return self.classes.get(called)
        return None

    def _reaching(self, found: list[Binding], use: ast.Name) -> Binding | None:
        """Of several assignments in one scope, return the one that certainly holds at `use`."""
        path: dict[ast.AST | None, ast.AST] = {parent: child for child, parent in self._around(use)}
        # An assignment does not hold yet in its own right-hand side; a loop's variable holds in its body.
        before = [b for b in found if _position(b.node) < _position(use) and (b.loop or b.node not in path)]
        last = max(before, key=lambda b: _position(b.node), default=None)
        if last is None or not (last.node in path or self._is_passed(last.node, path)):
            return None  # a branch or loop in between may have changed it
        loops = {loop for loop in path if isinstance(loop, LOOPS)} - set(self.ancestors(last.node))
        changed = any(not loops.isdisjoint(self.ancestors(b.node)) for b in found)
        return None if changed else last

    def _is_passed(self, node: ast.AST, path: dict[ast.AST | None, ast.AST]) -> bool:
        """Whether a node stands in a list of statements that a path leads through, and so was certainly run."""
        statement = next(a for a in (node, *self.ancestors(node)) if isinstance(a, ast.stmt))
        parent = self.parent(statement)
        # The body of a `with` runs as if its lines stood in the block around it.
        while isinstance(parent, ast.With | ast.AsyncWith) and parent not in path:
            statement, parent = parent, self.parent(parent)
        lists = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
        return any(isinstance(one, list) and statement in one and path.get(parent) in one for one in lists)


def argument_of(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """Return what a call passes for an argument, by name or at an index; None if it passes nothing."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return call.args[index] if given is None and index is not None and index < len(call.args) else given


def _position(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _targets(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(target, ast.Name) and target.id == name
        for generator in getattr(node, "generators", ())
        for target in subtree(generator.target)
    )


def _bound(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    """Yield the names that a statement, or a part of one, gives a value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _assigned(target, value, node)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _assigned(target, value, node)
        case ast.NamedExpr(target=target, value=value):
            yield target.id, Binding(node, value)
        case ast.For(target=ast.Name(id=name)):
            yield name, Binding(node, loop=node)
        case ast.For(target=target) | ast.AsyncFor(target=target) | ast.AugAssign(target=target):
            yield from _opaque([target], node)
        case ast.Delete(targets=targets):
            yield from _opaque(targets, node)
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from _opaque([target], target)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            yield name, Binding(node)
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            for alias in aliases:
                yield alias.asname or alias.name.partition(".")[0], Binding(node)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            for name in names:
                yield name, Binding(node)
                yield name, Binding(node)  # changed from elsewhere: never a single assignment
        case ast.ExceptHandler(name=str() as name):
            yield name, Binding(node)


def _assigned(target: ast.expr, value: ast.expr, node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, Binding(node, value)
    elif (
        isinstance(target, ast.Tuple | ast.List)
        and isinstance(value, ast.Tuple | ast.List)
        and len(target.elts) == len(value.elts)
        and not any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
    ):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from _assigned(one, its_value, node)
    else:
        yield from _opaque([target], node)


def _opaque(targets: list[ast.expr], node: ast.AST) -> Iterator[tuple[str, Binding]]:
    for part in chain(*map(subtree, targets)):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store | ast.Del):
            yield part.id, Binding(node)


def shortened_by(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the lists that a statement takes items from."""
    match statement:
        case ast.Delete(targets=[ast.Subscript(value=held)]):
            yield held
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=held, attr="pop" | "popleft" | "remove"))):
            yield held
        case ast.Assign(targets=[ast.Name() | ast.Attribute()], value=ast.Subscript(value=held, slice=ast.Slice())):
            yield held
        case ast.For(target=ast.Name(id=name), iter=ast.List(elts=lists) | ast.Tuple(elts=lists), body=[inner]):
            if any(isinstance(one, ast.Name) and one.id == name for one in shortened_by(inner)):
                yield from lists


def lengthened_by(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the list that a statement appends to."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=held, attr="append"))):
            yield held


def conditions_of(test: ast.expr) -> tuple[str, str]:
    """Write a condition, and its opposite, in a few words."""
    holds = " ".join(ast.unparse(test).split())
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        fails = " ".join(ast.unparse(test.operand).split())
    else:
        fails = f"not ({holds})" if " " in holds else f"not {holds}"
    return _shortened(holds), _shortened(fails)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_CONDITION else text[: LONGEST_CONDITION - 3] + "..."
