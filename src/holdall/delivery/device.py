"""The CUDA driver, for copies that C starts by itself: outside the GIL, in the middle of a loop.

In:  a stream of torch's.  Out: the address of the driver's function, and the stream as it knows it.
Invariant: it is only asked for what torch would ask it for too; where it is not found, torch does it all.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from holdall.delivery.host import ALIGNMENT_BYTES
from holdall.storage.blocks import address

if TYPE_CHECKING:
    import torch


_FILES = ("libcuda.so.1", "nvcuda.dll")


class Driver:
    """The driver, and the context of one stream."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self.stream = stream
        self.sender = ctypes.cast(library.cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value or 0
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._context = ctypes.c_void_p()
        self._popped = ctypes.c_void_p()
        if library.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(self._context)):
            self.sender = 0

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream's context that of the calling thread: a thread that is new to CUDA has none."""
        if self.sender == 0 or self._push(self._context):
            yield
            return
        try:
            yield
        finally:
            self._pop(ctypes.byref(self._popped))


def found_driver(stream: int) -> Driver | None:
    """Return the driver, or None where torch reaches its devices by another one."""
    for file in _FILES:
        try:
            return Driver(ctypes.CDLL(file), stream)
        except (OSError, AttributeError):
            continue
    return None


_KEPT_SIZES = 8
"""Sizes of batches whose blocks are kept."""


class DeviceStream(Protocol):
    """How bytes get to a device."""

    device: torch.device
    works_alone: bool
    """Whether the device does what it was asked for while the host goes on."""

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate memory on the host that the device can read by itself."""

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate memory on the device."""

    def anchor(self, nbytes: int) -> Any:
        """Allocate memory for batches, and return what refers to it."""

    def lend(self, anchor: Any) -> torch.Tensor:
        """Return the memory of an anchor as bytes; the anchor is referred to for as long as they can be seen."""

    def at_work(self) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread's copies and kernels take their turn on this line."""

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread use `sender`."""

    def sender(self, here: int) -> tuple[int, int]:
        """Return the function by which C starts copies to the device, 0 for none, and the stream for it.

        Args:
            here: The function for where the device is the host.
        """

    def mark(self) -> Any:
        """Return a mark of all that this line was given so far."""

    def mark_consumer(self) -> Any:
        """Return a mark of all that the calling thread gave its own stream so far."""

    def hold(self, mark: Any) -> None:
        """Let this line go on only behind a mark."""

    def hold_consumer(self, mark: Any) -> None:
        """Let the calling thread's own stream go on only behind a mark."""

    def wait(self, mark: Any) -> None:
        """Wait, on the host, until a mark was passed."""

    def passed(self, mark: Any) -> bool:
        """Whether a mark was passed."""

    def pin(self, start: int, nbytes: int) -> bool:
        """Let the device read memory of the host where it lies; False if it cannot."""

    def unpin(self, start: int) -> None:
        """Take that back."""

    def span(self, start: int, nbytes: int) -> torch.Tensor:
        """See a stretch of the host's memory as a tensor that the device may use; only what is pinned may be read."""


class HostStream:
    """The host itself: everything is done when it is asked for."""

    works_alone = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.device = torch.device("cpu")

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        return self.device_bytes(nbytes)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.from_numpy(self.anchor(nbytes))
        return tensor

    def anchor(self, nbytes: int) -> Any:
        """See `Line`."""
        block = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
        start = -address(block) % ALIGNMENT_BYTES
        # An array of its own, so that views refer to it and not to the block behind it.
        return np.frombuffer(block.data[start : start + nbytes], np.uint8)

    def lend(self, anchor: Any) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.from_numpy(anchor[:])
        return tensor

    def at_work(self) -> contextlib.AbstractContextManager[Any]:
        """See `Line`."""
        return contextlib.nullcontext()

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """See `Line`."""
        return contextlib.nullcontext()

    def sender(self, here: int) -> tuple[int, int]:
        """See `Line`."""
        return here, 0

    def mark(self) -> Any:
        """See `Line`."""
        return None

    mark_consumer = mark

    def hold(self, mark: Any) -> None:
        """See `Line`."""

    hold_consumer = hold
    wait = hold

    def passed(self, mark: Any) -> bool:
        """See `Line`."""
        return mark is None

    def pin(self, start: int, nbytes: int) -> bool:
        """See `Line`."""
        return nbytes > 0 and start > 0

    def unpin(self, start: int) -> None:
        """See `Line`."""

    def span(self, start: int, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        memory = ctypes.cast(start, ctypes.POINTER(ctypes.c_uint8))
        tensor: torch.Tensor = self._torch.from_numpy(np.ctypeslib.as_array(memory, (nbytes,)))
        return tensor


class CudaStream:
    """A CUDA device, reached over a stream of its own."""

    works_alone = True

    def __init__(self, torch: Any, device: torch.device) -> None:
        self._torch = torch
        index: int | None = device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.Stream(self.device)
        self._driver = found_driver(self._stream.cuda_stream)

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return tensor

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)
        tensor.record_stream(self._stream)
        return tensor

    def anchor(self, nbytes: int) -> Any:
        """See `Line`."""
        return _Anchor(self.device_bytes(nbytes))

    def lend(self, anchor: Any) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.as_tensor(_Lease(anchor), device=self.device)
        return tensor

    def at_work(self) -> contextlib.AbstractContextManager[Any]:
        """See `Line`."""
        on_stream: contextlib.AbstractContextManager[Any]
        cuda = self._torch.cuda
        if cuda.current_device() == self.device.index:
            on_stream = _OnStream(cuda, self._stream)
        else:
            on_stream = cuda.stream(self._stream)
        return on_stream

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """See `Line`."""
        return self._driver.current() if self._driver else contextlib.nullcontext()

    def sender(self, here: int) -> tuple[int, int]:
        """See `Line`."""
        return (self._driver.sender, self._driver.stream) if self._driver else (0, 0)

    def mark(self) -> Any:
        """See `Line`."""
        return self._stream.record_event()

    def mark_consumer(self) -> Any:
        """See `Line`."""
        return self._torch.cuda.current_stream(self.device.index).record_event()

    def hold(self, mark: Any) -> None:
        """See `Line`."""
        self._stream.wait_event(mark)

    def hold_consumer(self, mark: Any) -> None:
        """See `Line`."""
        self._torch.cuda.current_stream(self.device.index).wait_event(mark)

    def wait(self, mark: Any) -> None:
        """See `Line`."""
        mark.synchronize()

    def passed(self, mark: Any) -> bool:
        """See `Line`."""
        return bool(mark.query())

    def pin(self, start: int, nbytes: int) -> bool:
        """See `Line`."""
        return int(self._torch.cuda.cudart().cudaHostRegister(start, nbytes, 0)) == 0

    def unpin(self, start: int) -> None:
        """See `Line`."""
        self._torch.cuda.cudart().cudaHostUnregister(start)

    def span(self, start: int, nbytes: int) -> torch.Tensor:
        """See `Line`."""
        tensor: torch.Tensor = self._torch.as_tensor(_Foreign(start, nbytes), device=self.device)
        return tensor


class _OnStream:
    """What `torch.cuda.stream` does where the device is the current one already, at a third of its cost."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._stream = stream

    def __enter__(self) -> None:
        self._before = self._cuda.current_stream(self._stream.device_index)
        self._cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        self._cuda.set_stream(self._before)


class _Anchor:
    """Memory on a device that leases refer to."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class _Foreign:
    """Memory under the protocol by which torch takes over memory of others without copying it."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (start, False),
            "strides": None,
            "version": 2,
        }


class _Lease(_Foreign):
    """An anchor's memory; torch refers to the lease until the last tensor that looks into it is gone."""

    def __init__(self, anchor: _Anchor) -> None:
        super().__init__(anchor.memory.data_ptr(), anchor.memory.numel())
        self._anchor = anchor


class DeviceBlocks:
    """Memory for batches on a device: a block is lent again when no tensor looks into it any more."""

    def __init__(self, line: DeviceStream) -> None:
        self.most = 4
        self._line = line
        self._anchors_by_size: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes on the device that nobody else can see."""
        with self._lock:
            anchors = self._anchors_by_size[nbytes] = self._anchors_by_size.pop(nbytes, [])
            if len(self._anchors_by_size) > _KEPT_SIZES:
                del self._anchors_by_size[next(iter(self._anchors_by_size))]  # the size not asked for the longest
            for position in range(len(anchors)):
                # One reference by the list, one by the call: no lease is left.
                if sys.getrefcount(anchors[position]) <= 2:
                    return self._line.lend(anchors[position])
            anchor = self._line.anchor(nbytes)
            if len(anchors) < self.most:
                anchors.append(anchor)
            return self._line.lend(anchor)


class StagingBuffer:
    """Memory that grows to what is needed, on the host and on the device, for what travels between them."""

    def __init__(self, line: DeviceStream) -> None:
        self._line = line
        self.host = line.host_bytes(0)
        self.device = line.device_bytes(0)
        self.array = self.host.numpy()
        self.left: Any = None  # a mark behind all copies from here, and to here
        self._rows: dict[tuple[Any, int], torch.Tensor] = {}

    def make_room(self, nbytes: int) -> None:
        """See to it that `nbytes` fit and that what was here before has left."""
        if self.left is not None:
            self._line.wait(self.left)
            self.left = None
        if self.host.numel() < nbytes:
            self.host = self._line.host_bytes(_roomy(nbytes))
            self.array = self.host.numpy()
        self.make_room_there(nbytes)

    def make_room_there(self, nbytes: int) -> None:
        """See to it that `nbytes` fit on the device alone."""
        if self.device.numel() < nbytes:
            self.device = self._line.device_bytes(_roomy(nbytes))
            self._rows = {}

    def send(self, first: int, end: int) -> None:
        """Start the copy of some bytes to the device; called at work on the line."""
        self.device[first:end].copy_(self.host[first:end], non_blocking=True)

    def rows(self, word: torch.dtype, words: int) -> torch.Tensor:
        """See what is on the device as rows of so many words."""
        key = (word, words)
        if key not in self._rows:
            whole = self.device.numel() // (words * word.itemsize)
            self._rows[key] = self.device[: whole * words * word.itemsize].view(word).view(whole, words)
        return self._rows[key]

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return self.host.numel()


def _roomy(nbytes: int) -> int:
    """Leave a quarter to spare, and an end where any dtype may end."""
    return -(-(nbytes + nbytes // 4) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
