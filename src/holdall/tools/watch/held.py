"""The host RAM that buffers, memories and networks of this process take.

Arrays of buffers and networks are listed with their addresses. holdall's own memories report sizes and no addresses.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from holdall.errors import ClosedError
from holdall.tools.probe.arrays import count_bytes, find_address, find_root, walk_arrays
from holdall.tools.probe.objects import get_attributes, get_count
from holdall.tools.watch.exchange import HeldField, Region


def measure_memories(memories: Iterable[Any]) -> Iterator[HeldField]:
    """Yield the fields of holdall's memories in host RAM, with the bytes that the memories count."""
    count_by_kind: Counter[str] = Counter()
    for memory in memories:
        kind = "rollout" if "Rollout" in type(memory).__name__ else "replay"
        count_by_kind[kind] += 1
        prefix = kind if count_by_kind[kind] == 1 else f"{kind} {count_by_kind[kind]}"
        with contextlib.suppress(ClosedError):
            report = memory.report()
            fill = float(memory.fill)
            if report.capacity_that_fits:  # The budget holds fewer transitions than the capacity.
                fill = min(report.transitions / report.capacity_that_fits, 1.0)
            if _is_on_host(getattr(memory, "store", None)):
                for one in report.fields:
                    yield HeldField(f"{prefix}.{one.name}", one.total_bytes, fill, report.budget_bytes)
            yield HeldField(f"{prefix}.staging", report.staging_bytes, fill, report.budget_bytes)


def list_buffer_regions(name: str, buffer: Any) -> Iterator[Region]:
    """Yield the arrays of a buffer, as in Stable-Baselines3."""
    attributes = get_attributes(buffer)
    size = get_count(attributes, ("buffer_size",))
    position = attributes.get("pos")
    fill = None
    if size is not None and isinstance(position, int):
        fill = 1.0 if attributes.get("full") else position / size
    for path, array in walk_arrays(dict(attributes), name, 0):
        yield from list_array_regions("buffers", path, array, fill)


def list_network_regions(
    modules: Iterable[Any], optimizers: Iterable[Any], *, has_gradients: bool = True
) -> Iterator[Region]:
    """Yield parameters, gradients and the state of optimizers.

    Only the thread that trains may pass `has_gradients`. torch replaces gradients without the GIL during a backward
    pass, so another thread that reads them can crash the process.
    """
    for module in modules:
        for parameter in [*module.parameters(), *module.buffers()]:
            yield from list_array_regions("torch", "parameters", parameter)
            if has_gradients and parameter.grad is not None:
                yield from list_array_regions("torch", "gradients", parameter.grad)
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            for _, value in walk_arrays(dict(state), "", 0):
                yield from list_array_regions("torch", "optimizer state", value)


def list_array_regions(group: str, name: str, array: Any, fill: float | None = None) -> Iterator[Region]:
    """Yield the addresses of an array or a tensor, or nothing if it is empty or on a device."""
    root = find_root(array)  # Two views may share one array.
    nbytes = count_bytes(root)
    has_address = hasattr(root, "__array_interface__") or hasattr(root, "untyped_storage")
    if nbytes and has_address and _is_on_host(root):
        base = getattr(root, "base", None)
        base = base.obj if isinstance(base, memoryview) else base
        yield Region(group, name, find_address(root), nbytes, fill, not isinstance(base, mmap.mmap))


def _is_on_host(owner: Any) -> bool:
    """Return whether the device of a tensor or of a store is the host. NumPy's arrays and host stores have none."""
    device = getattr(owner, "device", None)
    return device is None or getattr(device, "type", str(device)) == "cpu"
