"""The live objects of the command's process, sorted by kind, with the names under which they were found."""

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
        self._arrays: dict[int, tuple[Any, list[Any]]] = {}
        """Large arrays by the address of their data, with the objects that refer to them."""
        self._taken: set[int] = set()
        self._hidden = {id(part) for value in hidden for part in (value, *value)} | {id(hidden)}
        self._frames = list(_walk_frames(context.get("error")))
        for value in context.values():
            self._sort(value)
        if has_heap:
            self._walk()
        self._name_variables()

    # ---------------------------------------------------------------- finding

    def _walk(self) -> None:
        """Sort every object that the garbage collector tracks, and collect large arrays with their owners."""
        own = {id(vars(self)), id(self._names), id(self._arrays), id(self._frames), *self._hidden}
        kinds: dict[type, str] = {}
        seen: set[int] = set()
        for value in gc.get_objects():
            if id(value) in own:
                continue
            cls = type(value)
            kind = kinds.get(cls)
            if kind is None:
                kind = classify(cls)
                kinds[cls] = kind
            if kind and id(value) not in seen:
                seen.add(id(value))
                self._keep(kind, value)
            if issubclass(cls, NOT_OWNERS):
                continue
            for part in gc.get_referents(value):
                part_class = type(part)
                part_kind = kinds.get(part_class)
                if part_kind is None:
                    part_kind = classify(part_class)
                    kinds[part_class] = part_kind
                if part_kind == "array":
                    self._keep_array(part, value)
                elif part_kind == "sequence" and len(part) >= 1 and id(part) not in own:
                    self.sequences.append((part, value))
        for frame in self._frames:
            for part in frame.f_locals.values():
                if classify(type(part)) == "array":
                    self._keep_array(part, frame)
                elif isinstance(part, (list, deque)) and len(part) >= 1:
                    self.sequences.append((part, frame))

    def _sort(self, value: Any) -> None:
        kind = classify(type(value))
        if kind:
            self._keep(kind, value)

    def _keep(self, kind: str, value: Any) -> None:
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

    def _keep_array(self, array: Any, owner: Any) -> None:
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
                    self._names.setdefault(id(value), f"{self.name_of(owner)}.{name}")
        for frame in reversed(self._frames):
            self._name_locals(frame)

    def _name_locals(self, frame: FrameType) -> None:
        for name, value in list(frame.f_locals.items()):
            if name != "self":
                self._names.setdefault(id(value), name)

    def name_of(self, value: Any) -> str:
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
            prefix = f"{self.name_of(holder)}."
        names = [str(name) for name, value in list(values.items()) if value is wanted]
        return f"{prefix}{names[0] if names else type(wanted).__name__}"

    def claim(self, array: Any) -> None:
        """Record that `array` belongs to a buffer or a network, so that it is not reported a second time."""
        self._taken.add(find_address(find_root(array)))

    def large_arrays(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the large arrays that no buffer and no network has claimed, each with the objects that refer to it."""
        for address, (array, owners) in self._arrays.items():
            if address not in self._taken:
                yield array, owners

    def take_rest(self) -> Iterator[FoundArray]:
        """Describe the large arrays that no buffer and no network has claimed."""
        for array, owners in self.large_arrays():
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
