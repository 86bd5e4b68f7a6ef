"""What calls of Python's own functions, of command line parsers and of containers return.

In:  the full name of a library's function, or a value and the name of its method, and the arguments.
Out: a value. What is not described here, in arrays.py, in environments.py or in frameworks.py is UNKNOWN.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, NotKnownError, OneOf, Reference, SpaceInfo, whole
from holdall.tools.lint.source import arrays, command_line, containers, environments, frameworks, pictures, shapes
from holdall.tools.lint.source.values import (
    ArrayValue,
    AttributeTable,
    BoundMethod,
    CallArguments,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ListValue,
    SuperValue,
    TableValue,
    filled_deque,
    known_items,
    length_of,
    likely,
    one_of,
    put,
    spread,
)

array_member, calculated = arrays.array_member, shapes.calculated
_NAMES = (
    "dict list tuple set len range open vars zip enumerate super getattr setattr isinstance print sorted reversed map "
    "filter type object exit quit any all hasattr globals locals "
    "input iter next repr eval callable property staticmethod classmethod"
)
BUILTINS = {name: Reference(f"builtins.{name}") for name in (*command_line.NUMBERS, *_NAMES.split())}
BUILTINS["xrange"] = BUILTINS["range"]
SUPER = BUILTINS["super"]
CONTAINERS = {"collections.deque", "builtins.list"}  # that a class of the program may extend
USUAL = {
    name: Reference(dotted) for name, dotted in (
        ("np", "numpy"), ("torch", "torch"), ("cv2", "cv2"), ("gym", "gymnasium"), ("tf", "tensorflow"),
    )
}  # fmt: skip
"""What a name means that a file never imports, or that comes from a module which is not there."""
_STARTED = ("Process", "Thread")  # what runs a function, or its own `run`, beside the program
_HARDWARE = {"torch.cuda.is_available": True, "torch.backends.mps.is_available": False}  # where most people train
_MOST_FOLLOWED = 16  # items of a sequence that a function is called with one by one
_DATA_PACKAGES = {"yaml", "json", "toml", "tomllib", "tomli", "ruamel", "omegaconf"}


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a call of a library's function, or of its class, returns."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package == "builtins":
        return _builtin(interpreter, last, arguments, node)
    if last == "__init__" and arguments.values and isinstance(arguments.values[0], InstanceValue):
        rest = CallArguments(arguments.values[1:], arguments.named, arguments.is_complete)
        interpreter.library_start(arguments.values[0], rest)
        return None
    if last in _STARTED and "target" in arguments.named:
        return InstanceValue(Reference(dotted), {}, dict(arguments.named), node, interpreter.path)
    if dotted in _HARDWARE:
        interpreter.is_soft = True
        return _HARDWARE[dotted]
    if dotted.endswith("multiprocessing.get_context"):
        return Reference("multiprocessing")
    try:
        for follow in (frameworks.call, environments.call, arrays.call, pictures.call):
            found = follow(interpreter, dotted, arguments, node)
            if found is not NotImplemented:
                is_told = "config" in arguments.named and isinstance(found, Environments)
                return frameworks.configured(found, arguments.named["config"]) if is_told else found
    except NotKnownError:
        return UNKNOWN
    if package in _DATA_PACKAGES:
        return command_line.loaded(interpreter, last, arguments, package)
    return _other(interpreter, dotted, last, arguments, node)


def _other(interpreter: Any, dotted: str, last: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each function
    first = arguments.get(0, "", UNKNOWN)
    match dotted:
        case "collections.deque":
            limit, items = arguments.get(1, "maxlen", None), known_items(arguments.get(0, "iterable", ()))
            length = None if limit is UNKNOWN or items is None else len(items)
            made = ListValue(items or [], length, limit, is_deque=True, node=node, path=interpreter.path)
            made.rounds = len(interpreter.rounds)
            return made
        case "collections.namedtuple":
            return _named_tuple(interpreter, arguments, node)
        case "collections.OrderedDict" | "easydict.EasyDict" | "ml_collections.ConfigDict" | "munch.Munch":
            return _table(interpreter, arguments, attributes="Ordered" not in dotted)
        case "types.SimpleNamespace" | "argparse.Namespace":
            return InstanceValue(Reference(dotted), dict(arguments.named), node=node, path=interpreter.path)
        case "functools.partial":
            return InstanceValue(Reference(dotted), {}, {"call": first, "arguments": arguments}, node)
        case "tqdm.trange" | "tqdm.auto.trange" | "tqdm.notebook.trange":
            return spread(_range, *arguments.values)
        case "rich.progress.track" | "alive_progress.alive_it":
            return first
        case _ if dotted.startswith("tqdm.") and last == "tqdm" and arguments.values:
            return first
        case "functools.reduce":
            return _reduced(interpreter, arguments, node)
        case "copy.deepcopy" | "copy.copy":
            return arrays.copied(first, node)
        case "os.path.join":
            parts = arguments.values
            return str(PurePath(*parts)) if parts and all(isinstance(one, str) for one in parts) else UNKNOWN
        case "os.path.dirname" | "os.path.abspath" | "os.path.expanduser" | "os.path.realpath":
            if not isinstance(first, str):
                return UNKNOWN
            return str(PurePath(first).parent) if last == "dirname" else first
        case "pathlib.Path" | "pathlib.PurePath":
            parts = arguments.values
            return str(PurePath(*parts)) if parts and all(isinstance(one, str) for one in parts) else UNKNOWN
        case "os.getenv" | "os.environ.get":
            interpreter.is_soft = True
            return arguments.get(1, "default", None)
        case "dataclasses.field":
            return InstanceValue(Reference(dotted), {}, dict(arguments.named), node)
        case "dataclasses.asdict" if isinstance(first, InstanceValue):
            return TableValue(first.attributes.items(), path=interpreter.path)
        case "dataclasses.replace" if isinstance(first, InstanceValue):
            changed = first.attributes | arguments.named
            return InstanceValue(first.made_of, changed, node=node, path=interpreter.path)
        case "math.prod" | "numpy.prod":
            return spread(_product, first)
        case "ray.get" | "ray.put" | "ray.remote" if arguments.values:
            return first
        case "wandb.init":
            return _tracked(interpreter, arguments, node)
        case "rospy.Subscriber" | "message_filters.Subscriber":
            interpreter.follow_callbacks(arguments, node)
        case "itertools.count":
            return UNKNOWN
        case _ if dotted.endswith("Manager.register"):
            interpreter.managed[str(arguments.get(0, "typeid"))] = arguments.get(1, "callable")
            return None
    return command_line.command_line(interpreter, dotted, last, arguments, node)


def _tracked(interpreter: Any, arguments: Any, node: ast.AST) -> InstanceValue:
    """Return a run of Weights & Biases: the configuration that it was given is read back from it."""
    given = likely(arguments.get(None, "config", None))
    given = given.attributes if isinstance(given, InstanceValue) else given
    table = TableValue(given.items() if isinstance(given, dict) else (), path=interpreter.path, attributes=True)
    table.is_complete = getattr(given, "is_complete", True)
    interpreter.tracked = table
    return InstanceValue(Reference("wandb.Run"), {"config": table}, node=node)


def _product(value: Any) -> Any:
    items = known_items(value)
    if items is None:
        return UNKNOWN
    result = 1
    for one in items:
        number = whole(one)
        if number is None:
            return UNKNOWN
        result *= number
    return result


def _named_tuple(interpreter: Any, arguments: Any, node: ast.AST) -> Any:
    fields = arguments.get(1, "field_names")
    names = fields.replace(",", " ").split() if isinstance(fields, str) else known_items(fields)
    if names is None or not all(isinstance(one, str) for one in names):
        return Reference("collections.namedtuple.unknown")
    empty = ast.ClassDef(name=str(arguments.get(0, "typename")), bases=[], keywords=[], body=[], decorator_list=[])
    return ClassValue(
        empty, interpreter.scope, (), dict.fromkeys(names, UNKNOWN), frozenset({"NamedTuple"}), tuple(names)
    )


def _table(interpreter: Any, arguments: Any, attributes: bool = False) -> TableValue:
    table = TableValue(path=interpreter.path, attributes=attributes)
    for value in arguments.values[:1]:
        containers.update(interpreter, table, value)
    for name, value in arguments.named.items():
        table[name] = value
    table.is_complete = table.is_complete and arguments.is_complete
    return table


def _builtin(interpreter: Any, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each function
    values = arguments.values
    first = values[0] if values else UNKNOWN
    match name:
        case "dict":
            return _table(interpreter, arguments)
        case "list" | "tuple" | "set" | "sorted" | "reversed":
            return _sequence(interpreter, name, first, bool(values))
        case "len":
            if isinstance(first, InstanceValue):
                return interpreter.special(first, "__len__")
            return spread(lambda one: UNKNOWN if length_of(one) is None else length_of(one), first)
        case "range":
            return spread(_range, *values)
        case "open":
            named = {str(i): value for i, value in enumerate(values)} | arguments.named
            return InstanceValue(Reference("builtins.open"), {}, named, node)
        case "vars":
            return AttributeTable(first) if isinstance(first, InstanceValue) else first
        case "getattr":
            found = interpreter.member(first, values[1]) if len(values) > 1 and isinstance(values[1], str) else UNKNOWN
            return values[2] if found is UNKNOWN and len(values) > 2 else found
        case "setattr" if len(values) == 3 and isinstance(first, InstanceValue) and isinstance(values[1], str):
            put(first.attributes, values[1], values[2], first.path, interpreter.path)
            return None
        case "zip":
            several = [known_items(one) or [] for one in values]
            if several and all(several):
                return ListValue(pairs := [tuple(one) for one in zip(*several, strict=False)], len(pairs))
            lengths = [length_of(one) for one in values]
            sample = tuple(interpreter.item_of_loop(one) for one in values)
            return ListValue([sample], min(lengths) if lengths and None not in lengths else None)  # type: ignore[type-var]
        case "enumerate":
            items = known_items(first)
            if items is not None:
                return ListValue([(i, one) for i, one in enumerate(items)], len(items))
            sample = interpreter.item_of_loop(first)
            return ListValue([(arrays.INDEX, sample)], length_of(first))
        case "map" if len(values) == 2:
            return _mapped(interpreter, first, values[1], node)
        case "map" | "filter" | "iter":
            return ListValue([], length_of(values[-1]) if values and name == "map" else None)
        case "next":
            return interpreter.item_of_loop(first)
        case "globals" if interpreter.scope.module is not None:
            return TableValue(interpreter.scope.module.names.items())
        case "locals":
            return TableValue(interpreter.scope.names.items(), path=interpreter.path)
        case "eval" if isinstance(likely(first), str) and likely(first).isidentifier():
            return interpreter.lookup(likely(first))
        case "isinstance" if len(values) == 2:
            return _is_instance(first, values[1])
        case "exit" | "quit":
            interpreter.seen_function = Reference("sys.exit")
            return UNKNOWN
    if name in command_line.NUMBERS and not arguments.named and values:
        return spread(lambda *each: command_line.as_number(name, each), *values)
    return UNKNOWN


def _mapped(interpreter: Any, function: Any, over: Any, node: ast.AST) -> ListValue:
    """Return what `map` makes of one sequence: of each item if there are few, otherwise of one for all."""
    items, length = known_items(over), length_of(over)
    if items is None or len(items) > _MOST_FOLLOWED:
        items = [interpreter.item_of_loop(over)]
    made = [interpreter.call(function, CallArguments([one]), node) for one in items]
    return ListValue(made, length)


def _reduced(interpreter: Any, arguments: Any, node: ast.AST) -> Any:
    """Return what functools.reduce makes: a chain of calls."""
    items = known_items(arguments.get(1, "iterable"))
    if not items or len(items) > _MOST_FOLLOWED:
        return UNKNOWN
    made = arguments.get(2, "initial", None)
    for one in items if len(arguments.values) > 2 else items[1:]:
        made = items[0] if made is None else made
        made = interpreter.call(arguments.get(0, "function"), CallArguments([made, one]), node)
    return made


_KINDS = {"str": str, "int": int, "float": float, "bool": bool, "tuple": tuple, "list": ListValue, "dict": TableValue}


def _is_instance(value: Any, kinds: Any) -> Any:
    """Return whether a value is of a class, where both are known: constants, containers, spaces."""
    given = known_items(kinds) or [kinds]
    names = [one.last for one in given if isinstance(one, Reference)]
    if isinstance(value, ArrayValue) and len(names) == len(given):
        if value.shared_frames > 1:  # frames that are put together when they are read
            return "LazyFrames" in names
        return bool({"ndarray", "generic"} & set(names) and not value.is_tensor) or bool(
            {"Tensor", "FloatTensor"} & set(names) and value.is_tensor
        )
    if isinstance(value, InstanceValue) and isinstance(value.made_of, ClassValue):
        lineage = [one.node.name for one in value.made_of.lineage()]
        if any(isinstance(one, ClassValue) and one.node.name in lineage for one in given):
            return True
        return False if names and all(name in _KINDS for name in names) else UNKNOWN
    if isinstance(value, SpaceInfo):
        leaf = value.leaves[0]
        own = "Dict" if value.is_dict else "Discrete" if leaf.dtype.kind == "i" and not leaf.shape else "Box"
        if own == "Box" and leaf.dtype.kind == "i" and "" not in value.bounds:
            own = "MultiDiscrete" if leaf.dtype.itemsize == 8 else "MultiBinary"
        return own in names if names else UNKNOWN
    if (
        isinstance(value, str | int | float | tuple | ListValue | TableValue)
        and names
        and all(n in _KINDS for n in names)
    ):
        return any(isinstance(value, _KINDS[name]) for name in names)
    return UNKNOWN


def _range(*bounds: Any) -> Any:
    numbers = [whole(one) for one in bounds]
    if None in numbers:
        return ListValue([arrays.INDEX], None)
    try:
        found = range(*numbers)  # type: ignore[arg-type]  # whole numbers, checked above
    except (ValueError, TypeError):
        return ListValue([], None)
    return ListValue(list(found), len(found)) if len(found) <= 8 else ListValue([arrays.INDEX], min(len(found), 2**62))


def _sequence(interpreter: Any, name: str, first: Any, is_given: bool) -> Any:
    if not is_given:
        return () if name == "tuple" else ListValue([], 0)
    if isinstance(first, OneOf):
        return spread(lambda one: _sequence(interpreter, name, one, True), first)
    first = filled_deque(arrays.unwrapped(first))
    items = known_items(first)
    if isinstance(first, ArrayValue) and 0 < (length_of(first) or 0) <= _MOST_FOLLOWED:
        row = interpreter.item_of_loop(first)
        is_whole = name == "tuple" and isinstance(row, ArrayValue)  # all rows together, each a view
        items = [replace(row, held=first.kept) if is_whole else row] * (length_of(first) or 0)
    if items is None:
        return ListValue(list(first.items), first.length) if isinstance(first, ListValue) else UNKNOWN
    return tuple(items) if name == "tuple" else ListValue(items, len(items))


# ------------------------------------------------------------ methods


def call_method(interpreter: Any, owner: Any, name: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911, PLR0912  one line for each kind of value
    """Return what a method of a library's object, or of a container, returns."""
    match owner:
        case TableValue():
            return containers.table_method(interpreter, owner, name, arguments)
        case ListValue():
            return containers.list_method(interpreter, owner, name, arguments, node)
        case str():
            return containers.text_method(owner, name, arguments)
        case tuple():
            return UNKNOWN
        case ArrayValue():
            return arrays.call_method(interpreter, owner, name, arguments, node)
        case Environments() if name == "configure":
            interpreter.exchange(owner, frameworks.configured(owner, arguments.get(0, "config")))
            return None
        case Environments() | SpaceInfo():
            return environments.call_method(owner, name, node)
        case SuperValue(owner=instance):
            if name == "__init__":
                interpreter.library_start(instance, arguments)
                return None
            found = environments.instance_method(interpreter, instance, name, arguments, node)
            return UNKNOWN if found is NotImplemented else found
        case InstanceValue():
            if owner.kind == "argparse.ArgumentParser":
                return command_line.parser_method(interpreter, owner, name, arguments)
            if owner.kind.startswith("configparser."):
                return command_line.ini_method(interpreter, owner, name, arguments)
            if name == "start":
                _started(interpreter, owner, node)
            rows = owner.attributes.get("__rows__")
            if isinstance(rows, ListValue) and isinstance(owner.made_of, ClassValue) and name != "__init__":
                return containers.list_method(interpreter, rows, name, arguments, node)
            if name in interpreter.managed:
                return spread(lambda one: interpreter.call(one, arguments, node), interpreter.managed[name])
            if name == "read" and owner.kind == "builtins.open":
                return owner  # its text, which is parsed next
            if owner.kind == pictures.PICTURE.dotted:
                return pictures.picture_method(owner, name, arguments, node)
            if name == "__call__" and owner.kind.startswith("torchvision."):
                return pictures.transformed(interpreter, owner, arguments.get(0, "img"), node)
            found = environments.instance_method(interpreter, owner, name, arguments, node)
            return (
                frameworks.call_method(interpreter, owner, name, arguments, node) if found is NotImplemented else found
            )
    return UNKNOWN


def _started(interpreter: Any, owner: InstanceValue, node: ast.AST) -> None:
    """Follow what a process or thread runs."""
    if isinstance(owner.made_of, ClassValue):
        run = owner.made_of.find("run")
        again = (owner.made_of, interpreter.anchor)  # workers beside each other are alike
        is_new = again not in interpreter.started and owner.made_of.extends(*_STARTED)
        interpreter.started.add(again)
        if is_new and isinstance(run, FunctionValue):
            interpreter.call_function(run, CallArguments(), owner)
    elif "target" in owner.arguments:
        values, named = (likely(owner.arguments.get(name)) for name in ("args", "kwargs"))
        table = {str(key): value for key, value in named.items()} if isinstance(named, TableValue) else {}
        given = CallArguments(list(known_items(values) or ()), table)
        interpreter.call(owner.arguments["target"], given, node)


def suggested(name: str, arguments: Any) -> Any:
    """Return what a search over hyperparameters tries: the choices, or the ends of a range."""
    if name == "suggest_categorical":
        choices = known_items(arguments.get(1, "choices"))
        return one_of((one, "") for one in choices) if choices else UNKNOWN
    ends = [whole(arguments.get(at, word)) for at, word in ((1, "low"), (2, "high"))]
    return UNKNOWN if None in ends or name != "suggest_int" else OneOf(tuple(ends))


def called_value(interpreter: Any, value: Any) -> Any:
    """Return what calling a value without arguments returns: a class, a function, a partial."""
    value = likely(value)
    node = interpreter.anchor or interpreter.main.tree
    if isinstance(value, InstanceValue) and value.kind == "functools.partial":
        given = value.arguments["arguments"]
        rest = type(given)(given.values[1:], given.named, given.is_complete)
        return interpreter.call(value.arguments["call"], rest, node)
    if isinstance(value, FunctionValue | ClassValue | BoundMethod | Reference):
        return interpreter.call(value, CallArguments(), node)
    return value
