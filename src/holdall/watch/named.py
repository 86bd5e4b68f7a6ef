"""Arrays by name: what of a training process's memory can be called something.

In:  holdall's memories, Stable-Baselines3's buffers and models, arrays that a user named.  Out: regions of memory.
Invariant: looking keeps nothing alive, imports nothing, and changes nothing. NumPy's arrays are unknown to the garbage
collector, so they are found through the objects that hold them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdall.report import Tracked
from holdall.watch.sidecar import Region

Fill = Callable[[], float]


def memory_regions(memories: Iterable[Tracked]) -> Iterator[Region]:
    """Yield what holdall's own memories lie in."""
    taken: dict[str, int] = {}
    for memory in memories:
        kind = "rollout" if "Rollout" in type(memory).__name__ else "replay"
        taken[kind] = taken.get(kind, 0) + 1
        prefix = kind if taken[kind] == 1 else f"{kind} {taken[kind]}"
        fill = float(memory.fill)
        for name, array in memory.arrays():
            yield from _regions("buffers", f"{prefix}.{name}", array, fill)


def buffer_regions(name: str, buffer: Any) -> Iterator[Region]:
    """Yield the arrays of a buffer that lies in plain attributes, as those of Stable-Baselines3 do."""
    attributes = getattr(buffer, "__dict__", {})
    size, position = attributes.get("buffer_size"), attributes.get("pos")
    fill = None
    if isinstance(size, int) and isinstance(position, int) and size > 0:
        fill = 1.0 if attributes.get("full") else position / size
    for key, value in list(attributes.items()):
        for field, array in _arrays(key, value):
            yield from _regions("buffers", f"{name}.{field}", array, fill)


def network_regions(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[Region]:
    """Yield parameters, gradients and the optimizers' state, on the host."""
    for module in modules:
        for parameter in [*module.parameters(), *module.buffers()]:
            yield from _tensor_regions("parameters", parameter)
            if parameter.grad is not None:
                yield from _tensor_regions("gradients", parameter.grad)
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            for value in list(state.values()):
                if hasattr(value, "data_ptr"):
                    yield from _tensor_regions("optimizer state", value)


def array_regions(name: str, array: Any, fill: float | None) -> Iterator[Region]:
    """Yield what one array or tensor of a user lies in."""
    yield from _regions("buffers", name, array, fill)


def _arrays(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, array in list(value.items()):
            if _is_array(array):
                yield f"{key}.{inner}", array
    elif _is_array(value):
        yield key, value


def _is_array(value: Any) -> bool:
    return _is_ndarray(value) or (hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"))


def _is_ndarray(value: Any) -> bool:
    # NumPy is not imported for it: a script may still be about to say how many threads NumPy shall have.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _regions(group: str, name: str, array: Any, fill: float | None) -> Iterator[Region]:
    if not _is_ndarray(array):
        yield from _tensor_regions(name, array, group, fill)
        return
    owner: Any = array
    while _is_ndarray(owner.base):
        owner = owner.base  # a view may be of a part, and two views of the same
    if owner.nbytes:
        yield Region(group, name, _address(owner), owner.nbytes, fill, not _is_mapped(owner))


def _tensor_regions(name: str, tensor: Any, group: str = "torch", fill: float | None = None) -> Iterator[Region]:
    if tensor.device.type != "cpu":
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        yield Region(group, name, int(storage.data_ptr()), int(storage.nbytes()), fill)


def _address(array: Any) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # a third of the cost of array.ctypes
    except (TypeError, ValueError):  # read-only, or not contiguous
        return int(array.__array_interface__["data"][0])


def _is_mapped(owner: Any) -> bool:
    base = owner.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def torch_if_imported() -> Any:
    """Return torch if the process uses it; it is never imported to find out."""
    return sys.modules.get("torch")
