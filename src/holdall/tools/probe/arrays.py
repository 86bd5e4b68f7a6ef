"""Arrays of NumPy, torch and JAX: their data, their bytes, and the bytes of items that contain arrays."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from .objects import NOT_OWNERS, classify, get_attributes, get_package
from .snapshot import FoundArray

MAX_DEPTH = 6
"""Most attributes and items that are followed from an object to an array."""
MAX_SAMPLED_ITEMS = 64
"""Most items of a sequence whose bytes are counted."""
_MAX_COUNTED_OBJECTS = 200_000
"""Most objects that are visited to count the bytes of sampled items. So many take less than a second."""


def find_root(array: Any) -> Any:
    """Return the array that owns the data of `array`: `array` itself, or the array that it is a view of."""
    base = getattr(array, "base", None)
    while isinstance(base, type(array)) or type(base).__name__ in {"ndarray", "memmap"}:
        array = base
        base = getattr(array, "base", None)
    return array


def find_address(array: Any) -> int:
    """Return the address of an array's data, or the `id` of the array if its data has no address."""
    with contextlib.suppress(Exception):
        if hasattr(array, "untyped_storage"):
            return int(array.untyped_storage().data_ptr()) or id(array)
        if hasattr(array, "__array_interface__"):
            return int(array.__array_interface__["data"][0])
    return id(array)


def count_bytes(array: Any) -> int:
    """Return the bytes of an array, or of the storage that a tensor is a view of."""
    with contextlib.suppress(Exception):
        if hasattr(array, "untyped_storage"):
            return int(array.untyped_storage().nbytes())
        return int(array.nbytes)
    return 0


def describe_array(name: str, array: Any) -> FoundArray:
    """Describe an array of NumPy, torch or JAX."""
    device = "cpu"
    with contextlib.suppress(Exception):
        device = str(getattr(array.device, "type", None) or getattr(array.device, "platform", None) or array.device)
    is_on_disk = type(array).__name__ in {"memmap", "MemoryMappedTensor"}
    shape = tuple(int(side) for side in array.shape)
    dtype = str(array.dtype).removeprefix("torch.")
    nbytes = count_bytes(array)
    resident = _count_resident(find_address(array), nbytes) if device == "cpu" else 0
    return FoundArray(name, shape, dtype, nbytes, device, is_on_disk, resident)


def _count_resident(address: int, nbytes: int) -> int:
    """Return the bytes of an address range that are in RAM, or `nbytes` if the system does not report them."""
    page = mmap.PAGESIZE
    first = address // page
    count = (address + nbytes + page - 1) // page - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:  # noqa: PTH123  A Path cannot be unbuffered.
            file.seek(first * 8)
            entries = file.read(count * 8)
    except OSError:
        return nbytes
    # The highest bit of the last byte of an entry says that the page is present.
    present = sum(byte >> 7 for byte in entries[7::8])
    return min(present * page, nbytes)


def walk_arrays(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the names and the arrays in a value: an array, a mapping, a tuple, or a container of a library."""
    kind = classify(type(value))
    if kind == "array":
        yield name, value
        return
    if depth >= MAX_DEPTH or kind:
        return
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple):
        items = list(enumerate(value))
    elif get_package(type(value)) in {"tensordict", "torchrl", "tianshou"}:
        items = list(get_attributes(value).items())
    else:
        return
    for key, item in items:
        yield from walk_arrays(item, f"{name}.{key}" if name else str(key), depth + 1)


def count_new_bytes(items: list[Any]) -> float:
    """Return the mean bytes that an item adds. Objects that it shares with earlier items are not counted again."""
    seen: set[int] = set()
    count_deep(items[0], seen)
    if len(items) == 1:
        return float(count_deep(items[0], set()))
    return sum(count_deep(item, seen) for item in items[1:]) / (len(items) - 1)


def count_deep(value: Any, seen: set[int], depth: int = 0) -> int:
    """Return the bytes of a value and its content, except objects in `seen`."""
    if classify(type(value)) == "array":
        root = find_root(value)
        is_new = find_address(root) not in seen
        seen.add(find_address(root))
        is_known = id(value) in seen
        seen.add(id(value))
        header = 0 if is_known else sys.getsizeof(value) - (value.nbytes if value is root else 0)
        return (count_bytes(root) if is_new else 0) + max(header, 0)
    if value is None or isinstance(value, (bool, *NOT_OWNERS)) or id(value) in seen:
        return 0
    if depth > MAX_DEPTH or len(seen) > _MAX_COUNTED_OBJECTS:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, Mapping):
        parts: list[Any] = list(value.values())
    elif isinstance(value, (tuple, list, deque)):
        parts = list(value)
    else:
        attributes = get_attributes(value)
        parts = list(attributes.values())
        size += sys.getsizeof(attributes) if attributes else 0
    return size + sum(count_deep(part, seen, depth + 1) for part in parts)


def has_arrays(item: Any, depth: int = 0) -> bool:
    """Return whether an item of a sequence contains an array."""
    kind = classify(type(item))
    if kind == "array":
        return True
    if kind not in {"", "sequence"} or depth > 3 or isinstance(item, (str, bytes, int, float, *NOT_OWNERS)):
        return False
    if isinstance(item, Mapping):
        parts: list[Any] = list(item.values())[:8]
    elif isinstance(item, (tuple, list, deque)):
        parts = list(item)[:8]
    else:
        parts = list(get_attributes(item).values())[:8]
    return any(has_arrays(part, depth + 1) for part in parts)
