"""Memory and streams of a device, and pinned memory of the host on the way to it.

In:  a torch device.  Out: a `DeviceStream`, which copies and computes in order beside the consumer's own stream; a
`StagingRing` of host memory that the device reads by itself.
Invariant: host memory is written again only after the copies from it are done. Only these are waited for, never the
device as a whole. A `DeviceStream` of the host's own runs the same code without a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from holdall.storage import ALIGNMENT_BYTES, fresh_bytes

if TYPE_CHECKING:
    import torch


class DeviceStream:
    """How bytes get to a device, in order. This one is the host's own, without a device: everything is done at once."""

    is_asynchronous = False
    """Whether the device works while the host continues."""
    launches_here = False
    """Whether the host does what a device's kernels do; for tests of what they are given."""
    number = 0
    """The stream, as the driver names it."""
    record_function = 0
    """The function by which C records events, 0 where there are none."""
    query_function = 0
    """The function by which C asks whether events have passed."""
    count_uses: Callable[[int], int] | None
    """Returns how many tensors, and others, refer to a storage; None if torch does not say."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.device = torch.device("cpu")
        self.count_uses = _use_count(torch)

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate memory on the host that the device can read by itself."""
        return self.device_bytes(nbytes)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate memory on the device."""
        tensor: torch.Tensor = self._torch.from_numpy(fresh_bytes(nbytes))
        return tensor

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread's copies and kernels run on this stream."""
        return contextlib.nullcontext()

    def driver_context(self) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread use the `copy_function`."""
        return contextlib.nullcontext()

    def copy_function(self, here: int) -> tuple[int, int]:
        """Return the function by which C starts copies to the device, 0 for none, and the stream for it.

        Args:
            here: The function for where the device is the host.
        """
        return here, 0

    def current(self) -> int:
        """Return the calling thread's own stream, as the driver names it."""
        return 0

    def consumer(self) -> int:
        """Return the same, which waits for the one of the call before."""
        return 0

    def new_event(self) -> tuple[Any, int]:
        """Return an event that has passed, and how the driver names it: it is recorded again and again."""
        return None, 0

    def send(self, there: torch.Tensor, host: torch.Tensor, nbytes: int) -> None:
        """Copy the first bytes of pinned memory to the device, on the calling thread's own stream."""
        there[:nbytes].copy_(host[:nbytes], non_blocking=True)

    def record_again(self, event: Any, number: int) -> None:
        """Put an event behind everything that the calling thread gave its own stream."""

    def record(self) -> Any:
        """Return an event behind everything that this stream has been given."""
        return None

    def record_consumer(self) -> Any:
        """Return an event behind everything that the calling thread gave its own stream."""
        return None

    def wait_for(self, event: Any) -> None:
        """Let this stream continue only after an event."""

    def wait_for_consumer(self) -> None:
        """Let this stream continue only after everything that the calling thread gave its own stream."""

    def let_consumer_wait(self, event: Any) -> None:
        """Let the calling thread's own stream continue only after an event."""

    def synchronize(self, event: Any) -> None:
        """Wait on the host for an event."""

    def has_passed(self, event: Any) -> bool:
        """Whether an event has happened."""
        return event is None

    def pin(self, start: int, nbytes: int) -> bool:
        """Let the device read host memory in place; False if it cannot."""
        return nbytes > 0 and start > 0

    def unpin(self, start: int) -> None:
        """Undo `pin`."""


class CudaStream(DeviceStream):
    """A CUDA device, reached over a stream of its own."""

    is_asynchronous = True

    def __init__(self, torch: Any, device: torch.device) -> None:
        self._torch = torch
        index: int | None = device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.count_uses = _use_count(torch)
        self._stream = torch.cuda.Stream(self.device)
        self._consumer: Any = None
        self._consumer_number = -1
        # Torch's own way without the object, where it has it: this is asked for with every batch.
        self._current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", self._current_stream)
        self.number = self._stream.cuda_stream
        library = cuda_library()
        self._driver = None if library is None else CudaDriver(library, self.number)
        self.record_function = self._driver.record_function if self._driver else 0
        self.query_function = self._driver.query_function if self._driver else 0
        self._behind_consumer = self.new_event()[0]

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """See `DeviceStream`."""
        tensor: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return tensor

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """See `DeviceStream`."""
        tensor: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)
        tensor.record_stream(self._stream)
        return tensor

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """See `DeviceStream`."""
        on_stream: contextlib.AbstractContextManager[Any]
        cuda = self._torch.cuda
        if cuda.current_device() == self.device.index:
            on_stream = _OnStream(cuda, self._stream)
        else:
            on_stream = cuda.stream(self._stream)
        return on_stream

    def driver_context(self) -> contextlib.AbstractContextManager[Any]:
        """See `DeviceStream`."""
        return self._driver.current() if self._driver else contextlib.nullcontext()

    def copy_function(self, here: int) -> tuple[int, int]:
        """See `DeviceStream`."""
        return (self._driver.copy_function, self._driver.stream) if self._driver else (0, 0)

    def current(self) -> int:
        """See `DeviceStream`."""
        return self._current(self.device.index)

    def consumer(self) -> int:
        """See `DeviceStream`."""
        number = self._current(self.device.index)
        if number != self._consumer_number:
            stream = self._torch.cuda.current_stream(self.device.index)
            if self._consumer is not None:
                stream.wait_stream(self._consumer)
            self._consumer, self._consumer_number = stream, number
        return number

    def _current_stream(self, index: int) -> int:
        number: int = self._torch.cuda.current_stream(index).cuda_stream
        return number

    def new_event(self) -> tuple[Any, int]:
        """See `DeviceStream`."""
        event = self._stream.record_event()
        event.synchronize()
        return event, event.cuda_event

    def send(self, there: torch.Tensor, host: torch.Tensor, nbytes: int) -> None:
        """See `DeviceStream`; the driver is asked for that in a third of torch's time."""
        driver, stream = self._driver, self._current(self.device.index)
        if driver is None or driver.copy(there.data_ptr(), host.data_ptr(), nbytes, stream):
            super().send(there, host, nbytes)

    def record_again(self, event: Any, number: int) -> None:
        """See `DeviceStream`."""
        driver = self._driver
        if driver is None or driver.record(number, self._current(self.device.index)):
            event.record(self._torch.cuda.current_stream(self.device.index))

    def record(self) -> Any:
        """See `DeviceStream`."""
        return self._stream.record_event()

    def record_consumer(self) -> Any:
        """See `DeviceStream`."""
        return self._torch.cuda.current_stream(self.device.index).record_event()

    def wait_for(self, event: Any) -> None:
        """See `DeviceStream`."""
        self._stream.wait_event(event)

    def wait_for_consumer(self) -> None:
        """See `DeviceStream`."""
        driver, event = self._driver, self._behind_consumer
        if driver is None or not driver.order(event.cuda_event, self._current(self.device.index), self.number):
            self.wait_for(self.record_consumer())

    def let_consumer_wait(self, event: Any) -> None:
        """See `DeviceStream`."""
        driver = self._driver
        if driver is None or driver.wait(self._current(self.device.index), event.cuda_event, 0):
            self._torch.cuda.current_stream(self.device.index).wait_event(event)

    def synchronize(self, event: Any) -> None:
        """See `DeviceStream`."""
        event.synchronize()

    def has_passed(self, event: Any) -> bool:
        """See `DeviceStream`."""
        return bool(event.query())

    def pin(self, start: int, nbytes: int) -> bool:
        """See `DeviceStream`; torch refuses what the device does not see under the host's addresses."""
        if int(self._torch.cuda.cudart().cudaHostRegister(start, nbytes, 0)):
            return False
        try:
            self._torch.as_tensor(_HostMemory(start, nbytes), device=self.device)
        except RuntimeError:
            self.unpin(start)
            return False
        return True

    def unpin(self, start: int) -> None:
        """See `DeviceStream`."""
        self._torch.cuda.cudart().cudaHostUnregister(start)


def stream_to(torch: Any, device: torch.device) -> DeviceStream:
    """Return a stream to a device."""
    return CudaStream(torch, device) if device.type == "cuda" else DeviceStream(torch)


def _use_count(torch: Any) -> Callable[[int], int] | None:
    """Return what counts the users of a storage, if it counts a tensor that shares it and forgets it again."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    memory = torch.empty(1)
    storage = memory.untyped_storage()._cdata
    before = count(storage)
    shared = memory.data
    during = count(storage)
    del shared
    return count if (during, count(storage)) == (before + 1, before) else None


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


class _HostMemory:
    """Memory of the host, as torch takes it over without copying it."""

    def __init__(self, start: int, nbytes: int) -> None:
        described = {"shape": (nbytes,), "typestr": "|u1", "data": (start, False), "strides": None, "version": 2}
        self.__cuda_array_interface__ = described


def torch_dtype(torch: Any, dtype: np.dtype[Any]) -> Any:
    """Return torch's name of a dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def cuda_library() -> ctypes.CDLL | None:
    """Return the CUDA driver; None where torch reaches its devices by another one."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    for file in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(file)
            library.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, pointer, ctypes.c_size_t, pointer]
            library.cuEventRecord.argtypes = [pointer] * 2
            library.cuStreamWaitEvent.argtypes = [pointer, pointer, number]  # stream, event
            library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        except (OSError, AttributeError):
            continue
        return library
    return None


class CudaDriver:
    """The CUDA driver, for copies that C starts by itself, outside the GIL in the middle of a loop.

    It is only asked for what torch asks it for too; where it is not found, torch does everything.
    """

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self.stream = stream
        # All of them return 0, or why they refuse.
        self.copy, self.record, self.wait = (
            library.cuMemcpyHtoDAsync_v2,
            library.cuEventRecord,
            library.cuStreamWaitEvent,
        )
        self.copy_function, self.record_function, self.query_function = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (self.copy, self.record, library.cuEventQuery)
        )
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._context = ctypes.c_void_p()
        self._popped = ctypes.c_void_p()
        if library.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(self._context)):
            self.copy_function = 0

    def order(self, event: int, first: int, then: int) -> bool:
        """Let a stream go on behind what another one was given; False if the driver refuses."""
        return not (self.record(event, first) or self.wait(then, event, 0))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Give the calling thread the stream's context: a thread that is new to CUDA has none."""
        if self.copy_function == 0 or self._push(self._context):
            yield
            return
        try:
            yield
        finally:
            self._pop(ctypes.byref(self._popped))


class StagingSlot:
    """Pinned memory of the host.

    Attributes:
        read: An event behind the last copy from here; None if there was none.
    """

    def __init__(self, stream: DeviceStream, number: int, nbytes: int) -> None:
        self.number = number
        self.read: Any = None
        self._stream = stream
        self._allocate(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Wait until the device has read what is here, and make `nbytes` fit."""
        if self.read is not None:
            self._stream.synchronize(self.read)
            self.read = None
        if self.host.numel() < nbytes:
            self._allocate(_with_spare(nbytes))

    def _allocate(self, nbytes: int) -> None:
        self.host = self._stream.host_bytes(nbytes)
        self.array, self.start = self.host.numpy(), self.host.data_ptr()


class RecordedSlot(StagingSlot):
    """Pinned memory with one event for all that reads it, which the driver, not torch, may record again."""

    def __init__(self, stream: DeviceStream, number: int, nbytes: int) -> None:
        self.event, self.event_number = stream.new_event()
        super().__init__(stream, number, nbytes)

    def was_given(self) -> None:
        """Note that the device will read what is here, behind what stands in the calling thread's own stream."""
        self._stream.record_again(self.event, self.event_number)
        self.read = self.event


Slot = TypeVar("Slot", bound=StagingSlot)


class StagingRing(Generic[Slot]):
    """A few slots of pinned memory, filled in turn while the device still reads the ones before.

    Slots are allocated when their turn first comes, and grow to what is asked for. Pinned memory must not be used for
    something else while a device may read it: when a ring is forgotten, the host waits.

    Args:
        slot: The kind of slot.
        is_sparing: Whether a slot is allocated only if the device still reads all others.
    """

    def __init__(
        self, stream: DeviceStream, slot: type[Slot], slots: int = 2, slot_bytes: int = 0, *, is_sparing: bool = False
    ) -> None:
        self._is_sparing = is_sparing
        self._stream = stream
        self._count = slots
        self._slot_bytes = slot_bytes
        self._kind = slot
        self._slots: deque[Slot] = deque()  # the one that was used last comes last
        self._process = os.getpid()
        weakref.finalize(self, _wait_for_slots, self._slots, self._process)

    def next_slot(self, nbytes: int = 0) -> Slot:
        """Return the next slot, with room for `nbytes`; set its `read` when the copies from it are started."""
        slots = self._slots
        if slots and slots[0].read is not None and self._stream.has_passed(slots[0].read):
            slots[0].read = None
        is_read = bool(slots) and slots[0].read is None
        if len(slots) < self._count and not (is_read and self._is_sparing):
            slots.appendleft(self._kind(self._stream, len(slots), self._slot_bytes))
        slots.rotate(-1)
        slots[-1].make_room(nbytes)
        return slots[-1]

    def wait(self) -> None:
        """Wait until the device has read all of them."""
        _wait_for_slots(self._slots, self._process)

    @property
    def events(self) -> list[Any]:
        """Events behind all that may be read from here."""
        return [slot.read for slot in self._slots if slot.read is not None]

    @property
    def nbytes(self) -> int:
        """Pinned bytes held."""
        return sum(slot.host.numel() for slot in list(self._slots))


def _wait_for_slots(slots: deque[Any], process: int) -> None:
    """Wait until everything was read; a forked child has no part in the device."""
    for slot in slots if process == os.getpid() else ():
        slot.make_room(0)


class DeviceScratch:
    """Memory of the device that grows to what is needed, seen as rows."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self.memory = stream.device_bytes(0)
        self._rows: dict[tuple[Any, int], torch.Tensor] = {}

    def make_room(self, nbytes: int) -> None:
        """Make `nbytes` fit."""
        if self.memory.numel() < nbytes:
            self.memory = self._stream.device_bytes(_with_spare(nbytes))
            self._rows = {}

    def rows(self, word: torch.dtype, words: int) -> torch.Tensor:
        """View the memory as rows of so many words."""
        key = (word, words)
        if key not in self._rows:
            whole = self.memory.numel() // (words * word.itemsize)
            self._rows[key] = self.memory[: whole * words * word.itemsize].view(word).view(whole, words)
        return self._rows[key]


def _with_spare(nbytes: int) -> int:
    """Add a quarter, and end where any dtype may end."""
    return -(-(nbytes + nbytes // 4) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
