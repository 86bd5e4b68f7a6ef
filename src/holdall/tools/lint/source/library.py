"""What calls of Python's own functions, of command line parsers and of containers return.

In:  the full name of a library's function, or a value and the name of its method, and the arguments.
Out: a value. What is not described here, in arrays.py, in environments.py or in frameworks.py is UNKNOWN.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import PurePath
from typing import Any

from holdall.tools.lint.run import UNKNOWN, Environments, NotKnownError, OneOf, Reference, SpaceInfo, known, whole
from holdall.tools.lint.source import arrays, command_line, containers, environments, frameworks, pictures
from holdall.tools.lint.source.values import (
    ArrayValue,
    AttributeTable,
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
    unwrapped,
)

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


Described = Callable[[Any, CallArguments, ast.AST], Any]


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a call of a library's function, or of its class, returns: the first description that there is."""
    if dotted.startswith("builtins."):
        return _builtin(interpreter, dotted, arguments, node)
    last = dotted.rpartition(".")[2]
    if last == "__init__" and arguments.values and isinstance(arguments.values[0], InstanceValue):
        return interpreter.library_start(arguments.values[0], arguments.behind(1))
    if last in _STARTED and "target" in arguments.named:
        return InstanceValue(Reference(dotted), {}, dict(arguments.named), node, interpreter.path)
    if dotted.endswith("multiprocessing.get_context"):
        return Reference("multiprocessing")
    if dotted in _HARDWARE:
        interpreter.is_soft = True
        return _HARDWARE[dotted]
    try:
        for follow in _FOLLOWS:
            found = follow(interpreter, dotted, arguments, node)
            if found is not NotImplemented:
                is_told = "config" in arguments.named and isinstance(found, Environments)
                return frameworks.configured(found, arguments.named["config"]) if is_told else found
    except NotKnownError:
        pass
    return UNKNOWN


def _other(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    if dotted.endswith("Manager.register"):
        interpreter.managed[str(arguments.get(0, "typeid"))] = arguments.get(1, "callable")
        return None
    is_progress = dotted.startswith("tqdm.") and dotted.endswith(".tqdm")
    described = _given_first if is_progress else _FUNCTIONS.get(dotted)
    return NotImplemented if described is None else described(interpreter, arguments, node)


def _given_first(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    return given.values[0] if given.values else NotImplemented


def _deque(interpreter: Any, given: CallArguments, node: ast.AST) -> ListValue:
    limit, items = given.get(1, "maxlen", None), known_items(given.get(0, "iterable", ()))
    length = None if limit is UNKNOWN or items is None else len(items)
    made = ListValue(items or [], length, limit, is_deque=True, node=node, path=interpreter.path)
    made.rounds = len(interpreter.rounds)
    return made


def _path(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    is_known = given.values and all(isinstance(one, str) for one in given.values)
    return str(PurePath(*given.values)) if is_known else UNKNOWN


def _folder(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    path = given.get(0, "")
    return str(PurePath(path).parent) if isinstance(path, str) else UNKNOWN


def _same_path(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    path = given.get(0, "")
    return path if isinstance(path, str) else UNKNOWN


def _variable(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    interpreter.is_soft = True
    return given.get(1, "default", None)


def _replaced(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    first = given.get(0, "")
    if not isinstance(first, InstanceValue):
        return NotImplemented
    return InstanceValue(first.made_of, first.attributes | given.named, node=node, path=interpreter.path)


def _as_dict(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    first = given.get(0, "")
    is_object = isinstance(first, InstanceValue)
    return TableValue(first.attributes.items(), path=interpreter.path) if is_object else NotImplemented


def _subscribed(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    interpreter.follow_callbacks(given, node)
    return NotImplemented


def _tracked(interpreter: Any, given: CallArguments, node: ast.AST) -> InstanceValue:
    """Return a run of Weights & Biases: the configuration that it was given is read back from it."""
    config = given.likely(None, "config", None)
    config = config.attributes if isinstance(config, InstanceValue) else config
    entries, complete = config.items() if isinstance(config, dict) else (), getattr(config, "is_complete", True)
    interpreter.tracked = TableValue(entries, path=interpreter.path, attributes=True, complete=complete)
    return InstanceValue(Reference("wandb.Run"), {"config": interpreter.tracked}, node=node)


def _product(value: Any) -> int:
    items = known_items(value)
    return prod(map(known, (None,) if items is None else items))


def _named_tuple(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    fields = given.get(1, "field_names")
    names = fields.replace(",", " ").split() if isinstance(fields, str) else known_items(fields)
    if names is None or not all(isinstance(one, str) for one in names):
        return Reference("collections.namedtuple.unknown")
    empty = ast.ClassDef(name=str(given.get(0, "typename")), bases=[], keywords=[], body=[], decorator_list=[])
    held = dict.fromkeys(names, UNKNOWN)
    return ClassValue(empty, interpreter.scope, (), held, frozenset({"NamedTuple"}), tuple(names))


def _table(interpreter: Any, given: CallArguments, node: ast.AST, attributes: bool = False) -> TableValue:
    table = TableValue(path=interpreter.path, attributes=attributes)
    for value in given.values[:1]:
        containers.update(interpreter, table, value)
    for name, value in given.named.items():
        table[name] = value
    table.is_complete = table.is_complete and given.is_complete
    return table


def _settings(interpreter: Any, given: CallArguments, node: ast.AST) -> TableValue:
    return _table(interpreter, given, node, attributes=True)


def _namespace(interpreter: Any, given: CallArguments, node: ast.AST) -> InstanceValue:
    return InstanceValue(Reference("argparse.Namespace"), dict(given.named), node=node, path=interpreter.path)


def _partial(interpreter: Any, given: CallArguments, node: ast.AST) -> InstanceValue:
    return InstanceValue(Reference("functools.partial"), {}, {"call": given.get(0, ""), "arguments": given}, node)


def _reduced(interpreter: Any, given: CallArguments, node: ast.AST) -> Any:
    """Return what functools.reduce makes: a chain of calls."""
    items = known_items(given.get(1, "iterable"))
    if not items or len(items) > _MOST_FOLLOWED:
        return UNKNOWN
    made = given.get(2, "initial", None)
    for one in items if len(given.values) > 2 else items[1:]:
        made = items[0] if made is None else made
        made = interpreter.call(given.get(0, "function"), CallArguments([made, one]), node)
    return made


_FUNCTIONS: dict[str, Described] = {
    "collections.deque": _deque, "collections.namedtuple": _named_tuple, "collections.OrderedDict": _table,
    **dict.fromkeys(("easydict.EasyDict", "ml_collections.ConfigDict", "munch.Munch"), _settings),
    **dict.fromkeys(("types.SimpleNamespace", "argparse.Namespace"), _namespace),
    "functools.partial": _partial, "functools.reduce": _reduced,
    **dict.fromkeys(
        ("tqdm.trange", "tqdm.auto.trange", "tqdm.notebook.trange"), lambda _, given, at: spread(_range, *given.values)
    ),
    **dict.fromkeys(
        ("rich.progress.track", "alive_progress.alive_it", "ray.get", "ray.put", "ray.remote"), _given_first
    ),
    **dict.fromkeys(("copy.deepcopy", "copy.copy"), lambda _, given, node: arrays.copied(given.get(0, ""), node)),
    **dict.fromkeys(("os.path.join", "pathlib.Path", "pathlib.PurePath"), _path), "os.path.dirname": _folder,
    **dict.fromkeys(("os.path.abspath", "os.path.expanduser", "os.path.realpath"), _same_path),
    **dict.fromkeys(("os.getenv", "os.environ.get"), _variable),
    "dataclasses.field": lambda _, given, node: InstanceValue(
        Reference("dataclasses.field"), {}, dict(given.named), node
    ),
    "dataclasses.asdict": _as_dict, "dataclasses.replace": _replaced, "wandb.init": _tracked,
    **dict.fromkeys(("math.prod", "numpy.prod"), lambda _, given, node: spread(_product, given.get(0, ""))),
    **dict.fromkeys(("rospy.Subscriber", "message_filters.Subscriber"), _subscribed),
}  # fmt: skip
_FOLLOWS = (
    frameworks.call, environments.call, arrays.call, pictures.call, command_line.loaded, _other, command_line.call,
)  # fmt: skip


# ------------------------------------------------------------ Python's own functions


def _builtin(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    name, values = dotted.removeprefix("builtins."), arguments.values
    first = values[0] if values else UNKNOWN
    match name:
        case "dict":
            return _table(interpreter, arguments, node)
        case "list" | "tuple" | "set" | "sorted" | "reversed":
            if not values:
                return () if name == "tuple" else ListValue([], 0)
            return spread(lambda one: _sequence(interpreter, name, one), first)
        case "len":
            if isinstance(first, InstanceValue):
                return interpreter.special(first, "__len__")
            return spread(lambda one: UNKNOWN if (length := length_of(one)) is None else length, first)
        case "range":
            return spread(_range, *values)
        case "open":
            return InstanceValue(Reference(dotted), {}, arguments.all_named(), node)
        case "vars":
            return AttributeTable(first) if isinstance(first, InstanceValue) else first
        case "getattr":
            found = interpreter.member(first, values[1]) if len(values) > 1 and isinstance(values[1], str) else UNKNOWN
            return values[2] if found is UNKNOWN and len(values) > 2 else found
        case "setattr" if len(values) == 3 and isinstance(first, InstanceValue) and isinstance(values[1], str):
            return put(first.attributes, values[1], values[2], first.path, interpreter.path)
        case "zip":
            several = [known_items(one) or [] for one in values]
            if several and all(several):
                return ListValue(pairs := [tuple(one) for one in zip(*several, strict=False)], len(pairs))
            lengths = [length_of(one) for one in values]
            sample = tuple(interpreter.item_of_loop(one) for one in values)
            return ListValue([sample], min(lengths) if lengths and None not in lengths else None)  # type: ignore[type-var]
        case "enumerate":
            items = known_items(first)
            pairs = [(arrays.INDEX, interpreter.item_of_loop(first))] if items is None else list(enumerate(items))
            return ListValue(pairs, length_of(first))
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
    if name in command_line.NUMBERS and not arguments.named and values:
        return spread(lambda *each: command_line.as_number(name, each), *values)
    return UNKNOWN


def _mapped(interpreter: Any, function: Any, over: Any, node: ast.AST) -> ListValue:
    """Return what `map` makes of one sequence: of each item if there are few, otherwise of one for all."""
    items = known_items(over)
    if items is None or len(items) > _MOST_FOLLOWED:
        items = [interpreter.item_of_loop(over)]
    return ListValue([interpreter.call(function, CallArguments([one]), node) for one in items], length_of(over))


_KINDS = {"str": str, "int": int, "float": float, "bool": bool, "tuple": tuple, "list": ListValue, "dict": TableValue}


def _is_instance(value: Any, kinds: Any) -> Any:
    """Return whether a value is of a class, where both are known: constants, containers, spaces."""
    given = known_items(kinds) or [kinds]
    names = {one.last for one in given if isinstance(one, Reference)}
    is_plain = bool(names) and names <= _KINDS.keys()
    if isinstance(value, ArrayValue) and all(isinstance(one, Reference) for one in given):
        if value.shared_frames > 1:  # frames that are put together when they are read
            return "LazyFrames" in names
        return bool(names & ({"Tensor", "FloatTensor"} if value.is_tensor else {"ndarray", "generic"}))
    if isinstance(value, InstanceValue) and isinstance(value.made_of, ClassValue):
        lineage = {one.node.name for one in value.made_of.lineage()}
        is_one = any(isinstance(one, ClassValue) and one.node.name in lineage for one in given)
        return True if is_one else False if is_plain else UNKNOWN
    if isinstance(value, SpaceInfo):
        leaf = value.leaves[0]
        own = "Dict" if value.is_dict else "Discrete" if leaf.dtype.kind == "i" and not leaf.shape else "Box"
        if own == "Box" and leaf.dtype.kind == "i" and "" not in value.bounds:
            own = "MultiDiscrete" if leaf.dtype.itemsize == 8 else "MultiBinary"
        return own in names if names else UNKNOWN
    is_known = is_plain and isinstance(value, str | int | float | tuple | ListValue | TableValue)
    return any(isinstance(value, _KINDS[name]) for name in names) if is_known else UNKNOWN


def _range(*bounds: Any) -> ListValue:
    try:
        found = range(*map(known, bounds))
    except NotKnownError:
        return ListValue([arrays.INDEX], None)
    except (ValueError, TypeError):
        return ListValue([], None)
    return ListValue(list(found), len(found)) if len(found) <= 8 else ListValue([arrays.INDEX], min(len(found), 2**62))


def _sequence(interpreter: Any, name: str, first: Any) -> Any:
    first = filled_deque(unwrapped(first))
    items = known_items(first)
    if isinstance(first, ArrayValue) and 0 < (length_of(first) or 0) <= _MOST_FOLLOWED:
        row = interpreter.item_of_loop(first)
        is_whole = name == "tuple" and isinstance(row, ArrayValue)  # all rows together, each a view
        items = [replace(row, held=first.kept) if is_whole else row] * (length_of(first) or 0)
    if items is None:
        return ListValue(list(first.items), first.length) if isinstance(first, ListValue) else UNKNOWN
    return tuple(items) if name == "tuple" else ListValue(items, len(items))


# ------------------------------------------------------------ methods


def call_method(interpreter: Any, owner: Any, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method of a library's object, or of a container, returns."""
    match owner:
        case TableValue():
            return containers.table_method(interpreter, owner, name, arguments)
        case ListValue():
            return containers.list_method(interpreter, owner, name, arguments, node)
        case str():
            return containers.text_method(owner, name, arguments)
        case ArrayValue():
            return arrays.call_method(interpreter, owner, name, arguments, node)
        case Environments() if name == "configure":
            return interpreter.exchange(owner, frameworks.configured(owner, arguments.get(0, "config")))
        case Environments() | SpaceInfo():
            return environments.call_method(owner, name, node)
        case SuperValue(owner=instance):
            if name == "__init__":
                return interpreter.library_start(instance, arguments)
            found = environments.instance_method(interpreter, instance, name, arguments, node)
            return UNKNOWN if found is NotImplemented else found
        case InstanceValue():
            with suppress(NotKnownError):
                return _object_method(interpreter, owner, name, arguments, node)
    return UNKNOWN


def _object_method(interpreter: Any, owner: InstanceValue, name: str, arguments: CallArguments, node: ast.AST) -> Any:
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
    return frameworks.call_method(interpreter, owner, name, arguments, node) if found is NotImplemented else found


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
        given = CallArguments(list(known_items(values) or ()), CallArguments.of(named).named)
        interpreter.call(owner.arguments["target"], given, node)


def suggested(name: str, arguments: Any) -> Any:
    """Return what a search over hyperparameters tries: the choices, or the ends of a range."""
    if name == "suggest_categorical":
        choices = known_items(arguments.get(1, "choices"))
        return one_of((one, "") for one in choices) if choices else UNKNOWN
    ends = [whole(arguments.get(at, word)) for at, word in ((1, "low"), (2, "high"))]
    return UNKNOWN if None in ends or name != "suggest_int" else OneOf(tuple(ends))
