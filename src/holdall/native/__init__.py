"""The compiled loops, their one loader, and the NumPy twins, which do the same work where nothing was compiled."""

from holdall.native.batch_reader import draw_slots, number_function
from holdall.native.kernels import NativeKernels, chosen_kernels, fallback, native_kernels
from holdall.native.library import (
    MOST_DEVICE_FIELDS,
    BatchRequestStruct,
    RowPlaceStruct,
    chosen_library,
    compiled_library,
    open_library,
    system_libraries,
)
from holdall.native.numpy_codec import PortableCoder
from holdall.native.numpy_kernels import PortableKernels
from holdall.native.reading import CopyPlan, Cut, Names, Refusal, SliceNamer, ThreadPool
from holdall.native.rollout import SlotSender, copy_in_order, estimate_advantages
from holdall.native.writing import NativeCoder

__all__ = [
    "MOST_DEVICE_FIELDS",
    "BatchRequestStruct",
    "CopyPlan",
    "Cut",
    "Names",
    "NativeCoder",
    "NativeKernels",
    "PortableCoder",
    "PortableKernels",
    "Refusal",
    "RowPlaceStruct",
    "SliceNamer",
    "SlotSender",
    "ThreadPool",
    "chosen_kernels",
    "chosen_library",
    "compiled_library",
    "copy_in_order",
    "draw_slots",
    "estimate_advantages",
    "fallback",
    "native_kernels",
    "number_function",
    "open_library",
    "system_libraries",
]
