"""SharedRows: a batch that a DataLoader worker sends to the main process with little copying.

    BlockPool.lease -> a block of shared memory, into which the worker reads the large arrays of a batch
    SharedRows      -> the batch; multiprocessing sends file descriptors of its blocks, and small arrays by value
    main process    -> a plain dict of arrays, which are copied from the blocks; then the worker uses the blocks again

torch maps new shared memory for every tensor of every batch, which takes more time than decoding images does. These
blocks are mapped once.

Guarantee: the main process gets the same bits. A block is used again only after the worker has deleted the arrays of
the earlier batch, and, if they were sent, the main process has received them.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.store.view import ALIGNMENT_BYTES

Rows = dict[str, Any]
Allocate = Callable[[int], NDArray[np.uint8] | None]
"""Function that gets a number of bytes, and returns memory for the arrays of a batch. None: the reader allocates it."""

MIN_SHARED_BYTES = 32 * 1024
"""Arrays below this size are sent by value, which takes less time than a file descriptor."""
_SENT = b"\1"
_RECEIVED = b"\0"


def allocate_nothing(_nbytes: int) -> None:
    """Return None, so that the reader allocates the memory."""


class LentBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of a block for one batch. It exists as long as an array that uses it."""

    block: _Block
    is_sent: bool


class _Block:
    """Shared memory. It has a flag, which is set while sent arrays were not received yet, and the bytes of arrays."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("holdall-rows", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, ALIGNMENT_BYTES + nbytes)
        self._map = mmap.mmap(self.descriptor, ALIGNMENT_BYTES + nbytes)
        self._lease: weakref.ref[LentBytes] | None = None

    def is_free(self) -> bool:
        """Return whether neither this process nor the receiving one uses the memory."""
        return (self._lease is None or self._lease() is None) and self._map[:1] == _RECEIVED

    def lease(self) -> LentBytes:
        """Return the memory. Requires a free block."""
        # The lease is made from the map and not from an array. A view of a lease would keep that array alive, and not
        # the lease.
        lease = LentBytes((self.nbytes,), np.uint8, self._map, ALIGNMENT_BYTES)
        lease.block = self
        lease.is_sent = False
        self._lease = weakref.ref(lease)
        return lease

    def send(self) -> Any:
        """Mark the memory as sent, and return a handle for the receiving process."""
        self._map[:1] = _SENT
        return reduction.DupFd(self.descriptor)


class BlockPool:
    """The blocks of one worker. Not thread-safe: `lease` is called by the thread that reads batches."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._blocks: list[_Block] = []

    def lease(self, nbytes: int) -> LentBytes | None:
        """Return memory for `nbytes` of arrays. None if `nbytes` is small, or if this system cannot share memory."""
        if nbytes < MIN_SHARED_BYTES or not hasattr(os, "memfd_create"):
            return None
        free = [block for block in self._blocks if block.is_free()]
        for block in free:
            if block.nbytes >= nbytes:
                return block.lease()
        self._blocks = [block for block in self._blocks if block not in free]  # The free blocks are too small.
        try:
            self._blocks.append(_Block(nbytes))
        except OSError:  # Too many open files, or a sandbox without anonymous files.
            return None
        return self._blocks[-1].lease()


class SharedRows(dict[str, Any]):
    """A batch by key. Multiprocessing sends the arrays and tensors in `leases` through shared memory."""

    def __init__(self, rows: Rows, leases: list[LentBytes]) -> None:
        super().__init__(rows)
        self.leases = leases

    def __copy__(self) -> SharedRows:
        """Return a shallow copy, which torch's `default_convert` fills with tensors."""
        return SharedRows(self, self.leases)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain dict, except where multiprocessing sends the rows."""
        return dict, (dict(self),)


class _Place:
    """Place of a large array: the number of a block, and the offset of the array in it."""

    def __init__(self, number: int, offset: int, array: NDArray[Any]) -> None:
        self.number = number
        self.offset = offset
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self, descriptors: dict[int, int]) -> NDArray[Any]:
        """Return a copy of the array."""
        array = np.empty(self.shape, self.dtype)
        rest = array.reshape(-1).view(np.uint8).data
        offset = ALIGNMENT_BYTES + self.offset
        while rest:
            count = os.preadv(descriptors[self.number], [rest], offset)
            if count == 0:
                raise OSError("A block of shared rows is shorter than its arrays.")
            rest = rest[count:]
            offset += count
        return array


class _SentArray:
    """An array or a tensor as it is sent: its value, or its place in a block."""

    def __init__(self, value: NDArray[Any] | _Place, is_tensor: bool) -> None:
        self.value = value
        self.is_tensor = is_tensor

    def receive(self, descriptors: dict[int, int]) -> Any:
        """Return the array, or the tensor."""
        array = self.value.read(descriptors) if isinstance(self.value, _Place) else self.value
        if not self.is_tensor:
            return array
        import torch  # noqa: PLC0415  The worker had tensors, so this process uses torch as well.

        return torch.from_numpy(array)


def _reduce_rows(rows: SharedRows) -> tuple[Any, ...]:
    """Return a function and its arguments, which multiprocessing calls in the receiving process to get the rows."""
    # Arrays in a lease that was sent before are pickled, because one flag cannot say whether two receivers are done.
    leases = [lease for lease in rows.leases if not lease.is_sent]
    values = {key: _pack(value, leases) for key, value in rows.items()}
    numbers = sorted({sent.value.number for sent in values.values() if _has_place(sent)})
    handles = {}
    for number in numbers:
        leases[number].is_sent = True
        handles[number] = leases[number].block.send()
    return _receive, (handles, values)


reduction.register(SharedRows, _reduce_rows)


def _has_place(value: Any) -> bool:
    return isinstance(value, _SentArray) and isinstance(value.value, _Place)


def _pack(value: Any, leases: list[LentBytes]) -> Any:
    """Return the `_SentArray` of an array or tensor. Return other values unchanged."""
    array, is_tensor = _find_array(value)
    if array is None:
        return value  # Multiprocessing pickles it.
    if array.nbytes < MIN_SHARED_BYTES:
        return _SentArray(array, is_tensor)
    if array.flags.c_contiguous:
        address = _find_address(array)
        for number, lease in enumerate(leases):
            offset = address - _find_address(lease)
            if 0 <= offset <= lease.nbytes - array.nbytes:
                return _SentArray(_Place(number, offset, array), is_tensor)
    return value


def _find_array(value: Any) -> tuple[NDArray[Any] | None, bool]:
    """Return a value as an array of plain bytes, and whether the value is a tensor. None: it has to be pickled."""
    if type(value) is np.ndarray:
        return (None if value.dtype.hasobject else value), False
    torch: Any = sys.modules["torch"]
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return None, False
    try:
        return value.numpy(), True
    except (TypeError, RuntimeError):  # bfloat16, sparse, or with gradients.
        return None, False


def _find_address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _receive(handles: dict[int, Any], values: Rows) -> Rows:
    """Return the rows, and give the blocks back to the worker. Called in the receiving process."""
    descriptors = {number: handle.detach() for number, handle in handles.items()}
    try:
        rows: Rows = {}
        for key, value in values.items():
            rows[key] = value.receive(descriptors) if isinstance(value, _SentArray) else value
        for descriptor in descriptors.values():
            os.pwrite(descriptor, _RECEIVED, 0)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return rows
