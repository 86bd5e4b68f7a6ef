"""What a process holds on a GPU.

In:  what torch's allocator said in the watched process, and what the driver says here.  Out: one record, or None.
NVIDIA's driver is asked through NVML (the package nvidia-ml-py), AMD's through sysfs. Where neither answers,
torch's own figures stand alone. AMD's part is written from the driver's documentation and was not tested on such a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from holdall.watch.reading import Gpu
from holdall.watch.sidecar import Told


def gpu_of(pid: int, told: Told | None, sysfs: Path = Path("/sys/class/drm")) -> Gpu | None:
    """Return what a process holds on its GPU; None if it holds nothing there, or nobody says."""
    said = {} if told is None else told.gpu
    driver = _nvidia(pid) or (_amd(sysfs) if said else None)
    if not said and driver is None:
        return None
    used, total = driver or (None, said.get("limit"))
    reserved = said.get("reserved")
    other = None if used is None else max(used - (reserved or 0), 0)
    return Gpu(said.get("requested"), said.get("allocated"), reserved, said.get("fragmented"), other, total)


def _nvidia(pid: int) -> tuple[int | None, int] | None:
    """Return what NVML counts for the process, and the size of its GPU."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            total = int(nvml.nvmlDeviceGetMemoryInfo(device).total)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid == pid:
                    return None if process.usedGpuMemory is None else int(process.usedGpuMemory), total
    except nvml.NVMLError:
        return None
    return None


@cache
def _nvml() -> Any:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not fit the other
        return None
    return nvml


def _amd(sysfs: Path) -> tuple[int, int] | None:
    """Return what the first AMD GPU holds, of all processes, and its size."""
    for used in sorted(sysfs.glob("card*/device/mem_info_vram_used")):
        try:
            total = int((used.parent / "mem_info_vram_total").read_text(encoding="ascii"))
            return int(used.read_text(encoding="ascii")), total
        except (OSError, ValueError):
            continue
    return None
