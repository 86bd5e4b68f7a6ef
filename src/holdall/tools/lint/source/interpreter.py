"""Follow a program as a reader would: what its names, calls and objects are, without running any of it.

In:  a parsed script and the repository around it.  Out: the value of every expression, and what the program makes:
models, buffers, arrays, calls of `learn`, each with the conditions under which it is made.
Both branches of an `if` are followed where its condition is not a constant; a loop's body once or twice; a function of
the program once a call. Functions that nothing calls are followed with their defaults.
Invariant: the work is bounded, whatever the program says. Nothing of the program is executed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, OneOf, Reference, whole
from holdall.tools.lint.source import environments
from holdall.tools.lint.source.functions import Functions
from holdall.tools.lint.source.repository import Module, Repository
from holdall.tools.lint.source.scopes import OutOfStepsError, Scope
from holdall.tools.lint.source.script import LONGEST_CONDITION, Script, conditions_of
from holdall.tools.lint.source.values import (
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    ModuleValue,
    Path,
    candidates_of,
    either,
    joined_names,
    likely,
    one_of,
)

_LIBRARIES = {
    "stable_baselines3", "sb3_contrib", "torchrl", "tensordict", "tianshou", "gymnasium", "gym", "torch", "numpy",
    "dmc2gym", "pfrl", "cpprb",
}  # fmt: skip
_IMPORTED_DEPTH = 10  # calls that an imported module makes while it is imported are followed a few levels only
_CAPACITY = re.compile(
    r"_*(?:max(?:imum)?_*)?(?:replay|buffer|buf|mem|memory|experiences?)?_*(?:capacity|max|size|len|length|limit|maxlen|maxsize)"
)
_ENDS = (Reference("sys.exit"), Reference("os._exit"))
_FOLLOWED = InstanceValue | ClassValue | FunctionValue | ModuleValue


@dataclass(eq=False, slots=True)
class ProgramEvent:
    """Something that the program makes or does and that rules are about."""

    what: str  # model, learn, buffer, array, collect
    value: Any
    arguments: CallArguments | None
    node: ast.AST  # in the script that is read
    path: Path
    owner: Any = None  # the instance whose method makes it, or the scope
    detail: dict[str, Any] = field(default_factory=dict)


class Interpreter(Functions):
    """Follows one script."""

    def __init__(self, script: Script, repository: Repository) -> None:
        super().__init__()
        self.script = script
        self.main = Module(script.path, script.tree, is_main=True)
        self.repository = repository
        self.flags: dict[str, Any] = {}  # of absl
        self.torchrl_env: Any = None  # the last one that was made
        self.made: list[ProgramEvent] = []
        self.registered: dict[str, Any] = {}  # environments that the program registers
        self.managed: dict[str, Any] = {}  # what managers make for other processes, by name
        self.started: set[object] = set()  # classes of processes whose `run` was followed
        self._conditions: dict[ast.If, tuple[str, str]] = {}

    def run(self) -> None:
        """Follow the script, then the functions that it does not call itself."""
        try:
            self.run_module(self.main)
            for function, scope in self._uncalled():
                if function not in self.entered:
                    self._enter_alone(function, scope)
        except (OutOfStepsError, RecursionError):
            return

    def place(self, node: ast.AST | None) -> SourceRange:
        """Return where a node of the script stands."""
        return self.script.place(node) if node is not None else SourceRange.whole(self.script.path)

    def place_here(self, node: ast.AST | None) -> SourceRange:
        """Return where something stands in the script, or the call of the script that leads to it."""
        return self.place(node if self.scope.module is self.main else self.anchor)

    @property
    def here(self) -> str:
        """The path of the module that is followed."""
        return (self.scope.module or self.main).path

    @property
    def last_environment(self) -> Environments | None:
        """The environment that the program made and named last, of those whose observations are known."""
        found = (environments.environment_of(self, one) for one in reversed(self.environments.values()))
        return next((one for one in found if one is not None and one.observation is not None), None)

    def owner_of(self, container: ListValue) -> InstanceValue | None:
        """Return the object that has a container as an attribute."""
        return self._owners.get(id(container))

    @cached_property
    def _owners(self) -> dict[int, InstanceValue]:
        """The objects by what they hold; asked for when the script was followed."""
        return {id(value): one for one in reversed(self.instances) for value in one.attributes.values()}

    def capacity_of(self, owner: InstanceValue | None) -> int | None:
        """Return the size that an object limits its lists to, by the name of its attribute."""
        held = owner.attributes.items() if owner is not None else ()
        sizes = (whole(likely(value)) for name, value in held if _CAPACITY.fullmatch(name))
        return next((number for number in sizes if number), None)

    def record(self, what: str, value: Any, arguments: CallArguments | None, node: ast.AST, **detail: Any) -> None:
        """Keep what the program makes, at the line of the script that leads to it."""
        at = node if self.scope.module is self.main else self.anchor
        if at is not None:
            owner = self.scope.instance or self.scope
            self.made.append(ProgramEvent(what, value, arguments, at, self.path, owner, detail))

    # ------------------------------------------------------------ modules

    def run_module(self, module: Module) -> None:
        """Follow a module's own level."""
        module.is_run = True
        module.names["__name__"] = "__main__" if module.is_main else "module"
        module.names["__file__"] = module.path
        outer = self.scope, self.path
        self.scope, self.path = Scope(module, module.names), ()
        try:
            self.block(module.tree.body)
        finally:
            module.names = self.scope.names
            self.scope, self.path = outer

    def import_module(self, dotted: str, level: int = 0) -> Any:
        """Return a module of the repository, or a reference to one of a library."""
        known = not level and dotted.partition(".")[0] in _LIBRARIES  # described here, also in their own repositories
        found = None if known else self.repository.find(dotted, level, self.here)
        tree = self.repository.tree(found) if found is not None else None
        if found is None or tree is None:
            return Reference(dotted) if dotted and not level else UNKNOWN
        module = self.repository.modules.get(found)
        if module is None:
            if "." in dotted and not level:
                self.import_module(dotted.rpartition(".")[0])  # a package is run before its modules
            module = self.repository.modules[found] = Module(str(found), tree)
        if not module.is_run:
            self._run_imported(module)
        return ModuleValue(module)

    def _run_imported(self, module: Module) -> None:
        """Follow a module that the script imports: within bounds of its own, and once for all scripts."""
        outer = self.steps, self._depth, self.anchor, self.rounds, self._active
        self.steps, self._depth, self.rounds, self._active = 0, _IMPORTED_DEPTH, (), Counter()
        try:
            self.run_module(module)
        except OutOfStepsError:
            pass
        finally:
            self.steps, self._depth, self.anchor, self.rounds, self._active = outer

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            value = self.import_module(alias.name)
            if not alias.asname and "." in alias.name and isinstance(value, ModuleValue):
                value = self._package_of(alias.name)
            is_whole = alias.asname or isinstance(value, ModuleValue)
            self.bind(alias.asname or first, value if is_whole else Reference(first))

    def _package_of(self, dotted: str) -> ModuleValue:
        """Return the package that `import a.b.c` gives a name to, with the modules that it then has."""
        parts = dotted.split(".")
        packages = []
        for end in range(1, len(parts) + 1):
            found = self.import_module(".".join(parts[:end]))
            if not isinstance(found, ModuleValue):  # a folder without a file of its own
                found = ModuleValue(Module(parts[end - 1], ast.Module([], []), is_run=True))
            packages.append(found)
        for package, inner, name in zip(packages, packages[1:], parts[1:], strict=False):
            package.module.names.setdefault(name, inner)
        return packages[0]

    def _import_from(self, node: ast.ImportFrom) -> None:
        package = node.module or ""
        source = self.import_module(package, node.level)
        first = package.partition(".")[0]
        for alias in node.names:
            if alias.name == "*":
                if isinstance(source, Reference) and first in _LIBRARIES and self.scope.module is not None:
                    self.scope.module.stars.append(package)
                elif isinstance(source, ModuleValue):
                    self.scope.names |= {n: v for n, v in source.module.names.items() if not n.startswith("_")}
                continue
            value = self.member(source, alias.name)
            is_folder = isinstance(source, Reference) and self.repository.has_folder(first, self.here)
            if (value is UNKNOWN and not isinstance(source, Reference)) or is_folder:  # a module of a package
                inner = self.import_module(f"{package}.{alias.name}" if package else alias.name, node.level)
                value = inner if isinstance(inner, ModuleValue) else value
            self.bind(alias.asname or alias.name, value)

    # ------------------------------------------------------------ statements

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Follow statements; True if what stands behind them is not reached."""
        for one in statements:  # noqa: SIM110  a generator would cost as much as a statement
            if self.statement(one):
                return True
        return False

    def statement(self, node: ast.stmt) -> bool:
        """Follow one statement; True if it leaves the block."""
        match node:  # the most frequent ones first
            case ast.Assign(targets=targets, value=value):
                outer, self.is_soft = self.is_soft, False
                made = self.value(value)
                is_flag = self.is_soft and isinstance(made, bool | str | None)
                self.is_soft = outer or self.is_soft
                for target in targets:
                    self.assign(target, made)
                    if is_flag and isinstance(target, ast.Name):  # train = args.train: still for the user to say
                        self.scope.soft.add(target.id)
            case ast.Expr(value=value):
                made = self.value(value)
                return made is UNKNOWN and isinstance(value, ast.Call) and self.seen_function in _ENDS
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self.assign(target, self.value(value))
                elif isinstance(target, ast.Name) and target.id not in self.scope.names:
                    return False
            case ast.AugAssign(target=target, op=op, value=value):
                self.assign(target, self.augmented(target, op, self.value(value)))
            case ast.If():
                return self._if(node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loop(node)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    opened = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, opened)
                return self.block(body)
            case ast.Try() | ast.TryStar():
                return self._try(node)
            case ast.Return(value=value):
                made = self.value(value) if value else None  # under conditions that did not hold when it was called
                self.scope.returned.append((made, " and ".join(self.path[len(self.scope.path) :])))
                return True
            case ast.Raise() | ast.Break() | ast.Continue():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.bind(node.name, self.define(node))
            case ast.ClassDef():
                self.bind(node.name, self.define_class(node))
            case ast.Import() | ast.ImportFrom():
                outer_anchor, self.anchor = self.anchor, node if self.scope.module is self.main else self.anchor
                if isinstance(node, ast.Import):
                    self._import(node)
                else:
                    self._import_from(node)
                self.anchor = outer_anchor
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.scope.outer |= set(names)
            case ast.Match(subject=subject, cases=cases):
                self._match(self.value(subject), self.text_of(subject), cases)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.scope.names.pop(target.id, None)
        return False

    def _if(self, node: ast.If) -> bool:
        self.limit_list(node)
        truth, is_certain = self.tested(node.test)
        if is_certain:
            return self.block(node.body if truth else node.orelse)
        if node not in self._conditions:
            self._conditions[node] = conditions_of(node.test)
        holds, fails = self._conditions[node]
        return self._branches([(holds, node.body), (fails, node.orelse)], truth, self._narrowed(node.test))

    def _narrowed(self, test: ast.expr) -> tuple[dict[str, Any], ...]:
        """Return what a name can be in the two branches of `if name is None`, `if name is not None` or `if name`."""
        match test:
            case ast.Name(id=name):
                is_none_first = False
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op], comparators=[right]):
                if not isinstance(right, ast.Constant) or right.value is not None:
                    return ({}, {})
                is_none_first = isinstance(op, ast.Is)
            case _:
                return ({}, {})
        value = self.scope.names.get(name)
        pairs = candidates_of(value)
        nones, others = ([one for one in pairs if (one[0] is None) is wanted] for wanted in (True, False))
        if not isinstance(value, OneOf) or not nones or not others:
            return ({}, {})
        found = ({name: one_of(others)}, {name: None if not isinstance(test, ast.Name) else value})
        return found[::-1] if is_none_first else found

    def _branches(
        self,
        branches: list[tuple[str, list[ast.stmt]]],
        truth: bool | None = None,
        narrowed: tuple[dict[str, Any], ...] = (),
    ) -> bool:
        """Follow alternatives, and join what they leave behind; the default one holds without its condition."""
        before, path, ends = self.scope.names, self.path, []
        default = None if truth is None else 0 if truth else 1
        for index, (condition, body) in enumerate(branches):
            self.scope.names = before | narrowed[index] if narrowed else dict(before)
            text = "" if index == default else condition
            self.path = (*path, text) if text else path
            left = self.block(body)
            ends.append((text, self.scope.names, left))
        self.path = path
        going_on = [(text, names) for text, names, left in ends if not left]
        if default is not None:
            going_on.sort(key=lambda one: one[0] != "")
        self.scope.names = joined_names(going_on) if going_on else before
        return not going_on

    def _match(self, subject: Any, text: str, cases: list[ast.match_case]) -> None:
        branches = []
        for case in cases:
            value = self.value(case.pattern.value) if isinstance(case.pattern, ast.MatchValue) else UNKNOWN
            if value is UNKNOWN or subject is UNKNOWN or value == subject:
                branches.append((f"{text} is {self.text_of(case.pattern)}"[:LONGEST_CONDITION], case.body))
        if branches:
            self._branches(branches)

    def _try(self, node: ast.Try | ast.TryStar) -> bool:
        before = dict(self.scope.names)
        left = self.block([*node.body, *node.orelse])
        after = self.scope.names
        for handler in node.handlers:
            self.scope.names = before | after
            self.block(handler.body)
            made = {n: v for n, v in self.scope.names.items() if v is not after.get(n) and isinstance(v, _FOLLOWED)}
            again = {name: either(after[name], value) for name, value in made.items() if name in after}
            after = self.scope.names | after | again
        self.scope.names = after
        return self.block(node.finalbody) or (left and not node.handlers)

    # ------------------------------------------------------------ what nothing calls

    def _uncalled(self) -> Iterator[tuple[Any, Scope]]:
        """Yield the functions of the script, those first whose names nothing else mentions."""
        scope = Scope(self.main, self.main.names)
        used = {one.id for one in self.script.of_kind(ast.Name)} | self.script.attributes
        outside = [one for one in self.main.tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        classes = [one for one in self.main.tree.body if isinstance(one, ast.ClassDef)]
        for nodes in (outside, classes):
            yield from ((node, scope) for node in sorted(nodes, key=lambda one: one.name in used))

    def _enter_alone(self, node: Any, scope: Scope) -> None:
        self.scope, self.path, self.rounds = scope, (), ()
        value = likely(scope.names.get(node.name, UNKNOWN))
        if isinstance(value, FunctionValue) and value.node is node:
            self._call_alone(value, None)
        elif isinstance(value, ClassValue) and value.node is node:
            methods = [one for one in value.attributes.values() if isinstance(one, FunctionValue)]
            if all(one.node in self.entered for one in methods):
                return
            existing = next((one for one in reversed(self.instances) if one.made_of is value), None)
            instance = existing or self.instantiate(value, CallArguments(is_complete=False), value.node)
            for method in methods:
                if method.node not in self.entered:
                    self._call_alone(method, instance)

    def _call_alone(self, function: FunctionValue, owner: Any) -> None:
        self.rounds = (None,)  # nobody knows how often
        self.call_function(function, CallArguments(is_complete=False), owner)
        self.rounds = ()
