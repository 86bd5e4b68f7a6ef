"""The search for a command's live objects, and for the variables and attributes that refer to them."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from .arrays import count_bytes, describe_array, find_address, find_root, walk_arrays
from .objects import NOT_OWNERS, classify, get_attributes
from .snapshot import FoundArray

MIN_ARRAY_BYTES = 16 * 2**20
"""Arrays with at least this size are reported, even if they belong to no buffer."""


class _ClassKinds(dict[type, str]):
    """Kinds by class. Each class is classified once."""

    def __missing__(self, cls: type) -> str:
        kind = classify(cls)
        self[cls] = kind
        return kind


class LiveHeap:
    """The live objects of this process, sorted by kind, with the names under which they were found."""

    def __init__(
        self, context: Mapping[str, Any], *, has_heap: bool = True, hidden: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        """Sort the objects of `context`, and with `has_heap` all objects of the process except those in `hidden`."""
        self.models: list[Any] = []
        self.buffers: list[Any] = []
        self.memories: list[Any] = []
        self.environments: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []
        self.sequences: list[tuple[Any, Any]] = []
        """Deques and long lists, with the object that refers to them."""
        self._names: dict[int, str] = {}
        """Names of variables and attributes, by the `id` of the object that they refer to."""
        self._arrays: dict[int, tuple[Any, list[Any]]] = {}
        """Large arrays by the address of their data, with the objects that refer to them."""
        self._claimed: set[int] = set()
        """Addresses of the arrays that a buffer or a network has claimed."""
        self._hidden = {id(part) for value in hidden for part in (value, *value)} | {id(hidden)}
        self._frames = list(_walk_frames(context.get("error")))
        for value in context.values():
            self._sort(value)
        if has_heap:
            self._sort_heap()
        self._name_variables()

    # ---------------------------------------------------------------- finding

    def _sort_heap(self) -> None:
        """Sort every object that the garbage collector tracks, and collect large arrays with their owners."""
        own = {id(vars(self)), id(self._names), id(self._arrays), id(self._frames), *self._hidden}
        kinds = _ClassKinds()
        seen: set[int] = set()
        for value in gc.get_objects():
            if id(value) in own:
                continue
            kind = kinds[type(value)]
            if kind and id(value) not in seen:
                seen.add(id(value))
                self._add(kind, value)
            if issubclass(type(value), NOT_OWNERS):  # `isinstance` would run code of proxy objects.
                continue
            for part in gc.get_referents(value):
                part_kind = kinds[type(part)]
                if part_kind == "array":
                    self._add_array(part, value)
                elif part_kind == "sequence" and len(part) >= 1 and id(part) not in own:
                    self.sequences.append((part, value))
        for frame in self._frames:
            for part in frame.f_locals.values():
                if classify(type(part)) == "array":
                    self._add_array(part, frame)
                elif isinstance(part, (list, deque)) and len(part) >= 1:
                    self.sequences.append((part, frame))

    def _sort(self, value: Any) -> None:
        kind = classify(type(value))
        if kind:
            self._add(kind, value)

    def _add(self, kind: str, value: Any) -> None:
        target = {
            "model": self.models,
            "buffer": self.buffers,
            "memory": self.memories,
            "environment": self.environments,
            "callback": self.callbacks,
            "optimizer": self.optimizers,
        }.get(kind)
        if target is not None and not any(one is value for one in target):
            target.append(value)

    def _add_array(self, array: Any, owner: Any) -> None:
        root = find_root(array)
        if count_bytes(root) < MIN_ARRAY_BYTES:
            return
        _, owners = self._arrays.setdefault(find_address(root), (root, []))
        owners.append(owner)

    def _name_variables(self) -> None:
        """Name objects after the variables and attributes that refer to them: locals, globals, then attributes."""
        for module_name, module in list(sys.modules.items()):
            if not _is_users(module_name, getattr(module, "__file__", None)):
                continue
            prefix = "" if module_name == "__main__" else f"{module_name}."
            for name, value in list(vars(module).items()):
                self._names.setdefault(id(value), f"{prefix}{name}")
        for frame in reversed(self._frames):
            if _is_users(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
                self._name_locals(frame)
        for owner in [*self.models, *self.environments, *self.buffers]:
            for name, value in list(get_attributes(owner).items()):
                if classify(type(value)) in {"buffer", "memory", "environment"}:
                    self._names.setdefault(id(value), f"{self.find_name(owner)}.{name}")
        for frame in reversed(self._frames):
            self._name_locals(frame)

    def _name_locals(self, frame: FrameType) -> None:
        for name, value in list(frame.f_locals.items()):
            if name != "self":
                self._names.setdefault(id(value), name)

    def find_name(self, value: Any) -> str:
        """Return the variable or attribute that refers to `value`, or the name of its class."""
        return self._names.get(id(value)) or type(value).__name__

    def name_attribute(self, holder: Any, wanted: Any) -> str:
        """Return the name of a value that `holder` refers to: a variable of a frame or a module, or an attribute."""
        prefix = ""
        if isinstance(holder, FrameType):
            values: Mapping[str, Any] = holder.f_locals
        elif isinstance(holder, ModuleType):
            values = vars(holder)
        elif isinstance(holder, dict):
            values = holder
        else:
            values = get_attributes(holder)
            prefix = f"{self.find_name(holder)}."
        names = [str(name) for name, value in list(values.items()) if value is wanted]
        return f"{prefix}{names[0] if names else type(wanted).__name__}"

    def claim(self, array: Any) -> None:
        """Record that `array` belongs to a buffer or a network, so that it is not reported a second time."""
        self._claimed.add(find_address(find_root(array)))

    def find_unclaimed_arrays(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the unclaimed large arrays, each with the objects that refer to it."""
        for address, (array, owners) in self._arrays.items():
            if address not in self._claimed:
                yield array, owners

    def describe_unclaimed_arrays(self) -> Iterator[FoundArray]:
        """Describe the large arrays that no buffer and no network has claimed."""
        for array, owners in self.find_unclaimed_arrays():
            yield describe_array(self.name_array(array, owners)[1], array)

    def name_array(self, array: Any, owners: list[Any]) -> tuple[Any, str]:
        """Return the object that owns an array, and the name of the attribute or variable that refers to the array."""
        address = find_address(array)
        for owner in owners:
            if isinstance(owner, FrameType):
                return owner, _find_key(owner.f_locals, address)
            if not isinstance(owner, (dict, list, tuple, set)):
                return owner, _find_key(get_attributes(owner), address)
        for owner in owners:
            if isinstance(owner, dict):
                holder, name = self._find_holder(owner)
                key = _find_key(owner, address)
                return holder, f"{name}.{key}" if name else key
        return None, "array"

    def _find_holder(self, container: Any) -> tuple[Any, str]:
        """Return the object whose attributes are `container`, or that has `container` as an attribute."""
        for referrer in gc.get_referrers(container):
            if isinstance(referrer, ModuleType):
                return referrer, ""
            attributes = get_attributes(referrer)
            if attributes is container:
                return referrer, ""
            if isinstance(referrer, dict):
                names = [str(name) for name, value in list(referrer.items()) if value is container]
                if names:
                    return self.find_holder_of_attributes(referrer), names[0]
            names = [name for name, value in list(attributes.items()) if value is container]
            if names:
                return referrer, names[0]
        return None, ""

    def find_holder_of_attributes(self, attributes: dict[str, Any]) -> Any:
        """Return the object whose attributes are the dict `attributes`, or None."""
        for referrer in gc.get_referrers(attributes):
            if not isinstance(referrer, dict) and get_attributes(referrer) is attributes:
                return referrer
        return None


def _walk_frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames of an error's traceback, and the frames of all threads except those of the probe."""
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    for innermost in list(sys._current_frames().values()):
        frame: FrameType | None = innermost
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(("holdall_probe", "holdall.tools.probe")):
                yield frame
            frame = frame.f_back


def _is_users(module_name: str, file: str | None) -> bool:
    """Return whether a module is the user's own, not an installed or standard one."""
    if module_name == "__main__":
        return True
    if not file or "site-packages" in file or file.startswith(("<", sys.base_prefix, sys.prefix)):
        return False
    return module_name.partition(".")[0] not in {"holdall", "holdall_probe"}


def _find_key(values: Mapping[str, Any], address: int) -> str:
    """Return the name under which a mapping keeps the array at `address`, directly or inside a dict or a tuple."""
    for name, value in list(values.items()):
        for path, array in walk_arrays(value, str(name), 0):
            if find_address(find_root(array)) == address:
                return path
    return "array"
