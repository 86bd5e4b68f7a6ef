"""Programs for a CUDA device: compiled at first use, and launched without torch's own cost.

In:  CUDA sources that belong to the package.  Out: functions that put a kernel on the caller's stream.
Invariant: a launch returns before the device has begun; whatever its arguments point to lives until then in torch's
memory, which is handed out again in the order of the stream.

NVRTC, the compiler, comes with every CUDA build of torch; nothing else has to be installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdall.delivery.device import cuda_library
from holdall.errors import HoldallError

_COMPILERS = ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")
_INVALID_CONTEXT = 201

Launch = Callable[[tuple[int, int], tuple[int, int], int, Any], None]
"""Takes the grid, the block, the stream's handle and the one argument, which is copied."""


class CudaProgramError(HoldallError):
    """A program for a device could not be compiled, loaded or launched."""


class CudaProgram:
    """One source, compiled for one device."""

    def __init__(self, torch: Any, device: Any, source: str) -> None:
        driver = cuda_library()
        if driver is None:
            raise CudaProgramError("no CUDA driver was found")
        self._driver = driver
        torch.cuda.init()
        torch.zeros(1, device=device)  # makes the device's context
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")
            binary = _compiled(source, torch.cuda.get_device_capability(device))
            self._module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), binary), "cuModuleLoadData")

    @property
    def launcher(self) -> int:
        """The address of cuLaunchKernel, for C."""
        return ctypes.cast(self._driver.cuLaunchKernel, ctypes.c_void_p).value or 0

    def make_current(self) -> None:
        """Give the calling thread, which may be new to CUDA, the device's context."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def find(self, name: str) -> int:
        """Return a kernel as the driver names it."""
        function = ctypes.c_void_p()
        self._check(
            self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()), f"look-up of {name}"
        )
        return function.value or 0

    def kernel(self, name: str) -> Launch:
        """Return a function that launches a kernel of one argument, a struct by value."""
        function, launch, check = self.find(name), self._driver.cuLaunchKernel, self._check

        def run(grid: tuple[int, int], block: tuple[int, int], stream: int, task: Any) -> None:
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(task))
            for _ in range(2):
                code = launch(function, *grid, 1, *block, 1, 0, stream, arguments, None)
                if code != _INVALID_CONTEXT:
                    break
                self.make_current()
            if code:
                check(code, f"launch of {name}")

        return run

    def _check(self, code: int, doing: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise CudaProgramError(f"the CUDA driver refuses {doing}: {(text.value or b'error').decode()} ({code})")


@functools.cache
def _compiled(source: str, capability: tuple[int, int]) -> bytes:
    """Compile for one kind of device; once a process."""
    compiler = _compiler()
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"device.cu", 0, None, None)
    try:
        architecture = b"--gpu-architecture=sm_%d%d" % capability
        options = (ctypes.c_char_p * 2)(architecture, b"--std=c++17")
        code, size = compiler.nvrtcCompileProgram(program, len(options), options), ctypes.c_size_t()
        if code:
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise CudaProgramError(f"NVRTC does not compile for {architecture.decode()} ({code}): {log.value.decode()}")
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _compiler() -> ctypes.CDLL:
    for file in _compiler_files():
        try:
            return ctypes.CDLL(file)
        except OSError:
            continue
    raise CudaProgramError("NVRTC, CUDA's compiler, was not found; it comes with the CUDA builds of torch")


def _compiler_files() -> Iterator[str]:
    """By name, as torch loads it; then where its packages put it."""
    yield from _COMPILERS
    for package in ("nvidia", "torch"):
        found = importlib.util.find_spec(package)
        for folder in [] if found is None else found.submodule_search_locations or []:
            for pattern in ("**/libnvrtc.so.1*", "**/nvrtc64_1*.dll"):
                yield from (str(file) for file in sorted(Path(folder).glob(pattern), reverse=True))
