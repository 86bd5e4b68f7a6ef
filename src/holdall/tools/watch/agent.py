"""The agent: a thread in the watched process that publishes names, addresses and counters twice a second.

It knows holdall's memories, models of Stable-Baselines3, and arrays that the user named with `holdall.watch.track`. It
uses at most 0.2 % of the time, keeps nothing alive and changes nothing. If it fails, training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdall.errors import ClosedError
from holdall.machine import begin_peak, disk, peak_bytes
from holdall.memory_registry import MEMORIES
from holdall.tools.watch import exchange
from holdall.tools.watch.allocators import read_heap_use
from holdall.tools.watch.exchange import AgentReport, HeldField, PhasePeak, Region
from holdall.tools.watch.held import list_array_regions, list_buffer_regions, list_network_regions, measure_memories
from holdall.tools.watch.reading import IMPORT_PHASE

FillFunction = Callable[[], float]

_MAX_SHARE_OF_TIME = 0.002
_INTERVAL_S = 0.5
_NETWORKS_INTERVAL_S = 5.0
"""Seconds between two look-ups of all tensors of networks. Only gradients move to other addresses."""
_SILENT_INTERVALS = 4
"""Intervals without a call of `publish_if_due` after which the thread publishes for the training loop."""
_OPTIMIZERS = ("optimizer", "ent_coef_optimizer")
"""Attributes of a model and of its networks that may refer to an optimizer."""
_IMPORT_FILE = "<frozen importlib._bootstrap>"
_LOG = logging.getLogger("holdall")


class _TrackedArray(NamedTuple):
    """An array that the user named."""

    reference: Callable[[], Any]  # Returns the array, or None after it was deleted.
    fill: FillFunction | None


class Agent:
    """Publisher of the names, addresses and counters of this process. One per process; see `get_agent`."""

    def __init__(self, interval_s: float = _INTERVAL_S, networks_interval_s: float = _NETWORKS_INTERVAL_S) -> None:
        self.phase: str | None = None
        self.step: int | None = None
        self.goal: int | None = None
        self.pid = os.getpid()
        self._interval_s = interval_s
        self._networks_interval_s = networks_interval_s
        self.next_publish = 0.0  # In seconds of `time.monotonic`.
        self._next_networks = 0.0
        self._arrays: dict[str, _TrackedArray] = {}
        self._arrays_lock = threading.Lock()
        self._models: list[Any] = []
        self._networks: list[Any] = []
        self._regions: tuple[Region, ...] = ()
        self._held: tuple[HeldField, ...] = ()
        self._network_regions: tuple[Region, ...] = ()
        self._phases: dict[str, PhasePeak] = {}
        self._phase_start = time.monotonic()
        self._events: deque[tuple[float, str]] = deque(maxlen=20)
        self._is_called_by_loop = False
        self._seconds_spent = 0.0
        self._start_time = exchange.get_start_time(self.pid)
        self._publishing = threading.Lock()
        self._ended = threading.Event()
        with contextlib.suppress(Exception):
            exchange.remove_stale_files()
        self._thread = threading.Thread(target=self._run, name="holdall-watch", daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether the agent was started by this process and was not stopped."""
        return self.pid == os.getpid() and not self._ended.is_set()

    def track(self, name: str, array: Any, fill: FillFunction | None) -> None:
        """Name an array for as long as it lives."""
        with self._arrays_lock:
            self._arrays[name] = _TrackedArray(weakref.ref(array), fill)

    def _forget_array(self, name: str, tracked: _TrackedArray) -> None:
        """Drop the name of an array that was deleted, unless the name belongs to another array by now."""
        with self._arrays_lock:
            if self._arrays.get(name) is tracked:
                del self._arrays[name]

    def follow_network(self, network: Any) -> None:
        """Name what a torch module or an optimizer holds: parameters, gradients, state."""
        self._networks.append(weakref.ref(network))
        self._next_networks = 0.0

    def follow_model(self, model: Any) -> None:
        """Follow a model of Stable-Baselines3: its networks, its buffers, its steps."""
        if not any(known() is model for known in self._models):
            self._models.append(weakref.ref(model))
            self._next_networks = 0.0

    def enter(self, phase: str | None) -> None:
        """Begin a phase of training, and record the peak that the kernel counted for the phase that ends."""
        now = time.monotonic()
        if self.phase is not None:
            before = self._phases.get(self.phase, PhasePeak(0, 0, 0.0))
            peak = max(before.peak, peak_bytes())
            self._phases[self.phase] = PhasePeak(peak, before.times + 1, before.seconds + now - self._phase_start)
        self.phase = phase
        self._phase_start = now
        begin_peak()

    def add_event(self, text: str) -> None:
        """Report that something happened."""
        self._events.append((time.time(), text))

    def publish_if_due(self) -> None:
        """Publish if it is time. A training loop calls this, always at the same place in a step."""
        self._is_called_by_loop = True
        if time.monotonic() >= self.next_publish:
            self._publish()

    def publish(self) -> None:
        """Publish now, with everything looked up again."""
        self._next_networks = 0.0
        self._publish()

    def stop(self) -> None:
        """End the thread and remove the report. A process that just ends leaves its report for its watcher."""
        if self.is_active:
            self._ended.set()
            with self._publishing, contextlib.suppress(Exception):
                exchange.remove_agent_report(self.pid)

    def _run(self) -> None:
        while not self._ended.wait(max(self.next_publish - time.monotonic(), self._interval_s)):
            late_s = time.monotonic() - self.next_publish
            if not self._is_called_by_loop or late_s > _SILENT_INTERVALS * self._interval_s:
                self._publish()

    def _publish(self) -> None:
        if not self._publishing.acquire(blocking=False):
            return
        try:
            if self._ended.is_set():
                return
            begun = time.thread_time()
            try:
                exchange.write_agent_report(self._make_report())
            except Exception:
                # After a full disk, or objects that change, the watch lacks one report, and training continues.
                _LOG.debug("the agent could not report", exc_info=True)
            spent = time.thread_time() - begun
            self._seconds_spent += spent
            self.next_publish = time.monotonic() + max(self._interval_s, spent / _MAX_SHARE_OF_TIME)
        finally:
            self._publishing.release()

    def _make_report(self) -> AgentReport:
        # Training may change objects during the look-up. Then the regions of the last report are sent again.
        with contextlib.suppress(RuntimeError, ReferenceError, AttributeError, TypeError, ValueError):
            self._look_up_regions()
        models = self._list_models()
        goals = [getattr(model, "_total_timesteps", None) for model in models]
        step = _count_added() if self.step is None else self.step
        if models:
            step = int(models[0].num_timesteps)
        torch: Any = sys.modules.get("torch")  # The agent never imports torch itself.
        heap = read_heap_use()
        spilled_by_folder = _count_spilled()
        return AgentReport(
            pid=self.pid,
            started=self._start_time,
            time=time.time(),
            step=step,
            goal=next((int(goal) for goal in goals if goal), self.goal),
            phase=self.phase or _find_phase(models, step),
            regions=self._regions,
            held=self._held,
            held_in_heap=_count_heap_bytes(),
            heap_used=None if heap is None else heap.used,
            heap_mapped=0 if heap is None else heap.mapped,
            python_objects=sys.getallocatedblocks(),
            gpu=_read_torch_gpu(torch),
            torch_threads=torch.get_num_threads() if hasattr(torch, "get_num_threads") else None,
            spilled=sum(spilled_by_folder.values()),
            disk_free=_count_free_disk(spilled_by_folder),
            phases=dict(self._phases),
            events=tuple(self._events),
            seconds_spent=self._seconds_spent,
        )

    def _look_up_regions(self) -> None:
        self._held = tuple(measure_memories(self._list_memories()))
        buffers = list(self._list_buffer_regions())
        if time.monotonic() >= self._next_networks:
            self._network_regions = tuple(self._list_network_regions())
            self._next_networks = time.monotonic() + self._networks_interval_s
        by_address: dict[int, Region] = {}
        for region in [*buffers, *self._network_regions]:
            by_address.setdefault(region.address, region)  # A view of a named array is left out.
        self._regions = tuple(by_address.values())

    def _list_models(self) -> list[Any]:
        """Return the models that are still alive."""
        return [model for model in (known() for known in self._models) if model is not None]

    def _list_buffers(self) -> Iterator[tuple[str, Any]]:
        for model in self._list_models():
            for name in ("replay", "rollout"):
                buffer = getattr(model, f"{name}_buffer", None)
                if buffer is not None:
                    yield name, buffer

    def _list_memories(self) -> list[Any]:
        """Return holdall's memories, and the buffers of models that report their own bytes."""
        memories: list[Any] = list(MEMORIES)
        for _, buffer in self._list_buffers():
            memory = getattr(buffer, "memory", buffer)
            if hasattr(memory, "report") and not any(memory is known for known in memories):
                memories.append(memory)
        return memories

    def _list_buffer_regions(self) -> Iterator[Region]:
        """Yield the arrays that the user named, and the arrays of other libraries' buffers."""
        for name, tracked in list(self._arrays.items()):
            array = tracked.reference()
            if array is None:
                self._forget_array(name, tracked)
            else:
                fill = None if tracked.fill is None else float(tracked.fill())
                yield from list_array_regions("buffers", name, array, fill)
        for name, buffer in self._list_buffers():
            if not hasattr(getattr(buffer, "memory", buffer), "report"):
                yield from list_buffer_regions(name, buffer)

    def _list_network_regions(self) -> Iterator[Region]:
        found = [known() for known in self._networks]
        for model in self._list_models():
            policy = getattr(model, "policy", None)
            if policy is not None:
                owners = [model, *policy.modules()]
                found += [policy, *(vars(owner).get(name) for owner in owners for name in _OPTIMIZERS)]
        networks = {id(one): one for one in found if one is not None}.values()
        optimizers = [one for one in networks if hasattr(one, "param_groups")]
        modules = [one for one in networks if not hasattr(one, "param_groups")]
        has_gradients = threading.current_thread() is not self._thread
        yield from list_network_regions(modules, optimizers, has_gradients=has_gradients)


_agent: Agent | None = None
_agent_lock = threading.Lock()


def get_agent() -> Agent:
    """Return the agent of this process. It is started if there is none."""
    global _agent  # noqa: PLW0603  One process has one agent.
    with _agent_lock:
        if _agent is None or not _agent.is_active:
            _agent = Agent()
        return _agent


def stop_agent() -> None:
    """Stop the agent of this process, if there is one."""
    if _agent is not None:
        _agent.stop()


# ---------------------------------------------------------------- counters


def _count_heap_bytes() -> int:
    """Return the bytes of holdall's memories that the C library's allocator provided."""
    native = sys.modules.get("holdall._native")  # The agent never imports the module itself.
    return 0 if native is None else max(int(native.get_heap_bytes()), 0)


def _count_added() -> int | None:
    """Return the most transitions that were added to one memory. They count as steps if nothing else reports steps."""
    most = 0
    for memory in MEMORIES:
        with contextlib.suppress(ClosedError):
            most = max(most, int(getattr(memory, "next_id", 0)))
    return most or None


def _count_spilled() -> dict[Path, int]:
    """Return the bytes on disk by the folder that memories spill to."""
    bytes_by_folder: Counter[Path] = Counter()
    for memory in MEMORIES:
        folder = getattr(memory, "spill_dir", None)
        if folder is not None:
            bytes_by_folder[Path(folder)] += int(getattr(memory, "disk_bytes", 0))
    return bytes_by_folder


def _count_free_disk(folders: Iterable[Path]) -> int | None:
    """Return the free bytes of the fullest disk that has one of `folders`. None if there is no folder."""
    limits = [disk(folder) for folder in folders]
    return min((limit.free_bytes for limit in limits if limit is not None), default=None)


def _find_phase(models: list[Any], step: int | None) -> str | None:
    """Return the phase of an on-policy model, or None. Off-policy models change phases many times a second.

    Before the first step, return `IMPORT_PHASE` if the main thread is importing a module.
    """
    for model in models:
        buffer = getattr(model, "rollout_buffer", None)
        if buffer is not None:
            return "train" if getattr(buffer, "full", False) else "collect"
    frame = None if step else sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename != _IMPORT_FILE:
        frame = frame.f_back
    return None if frame is None else IMPORT_PHASE


def _read_torch_gpu(torch: Any) -> dict[str, int]:
    """Return the figures of torch's allocator if a GPU is in use."""
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    stats = cuda.memory_stats()
    return {
        "requested": int(stats.get("requested_bytes.all.current", 0)),
        "allocated": int(stats.get("allocated_bytes.all.current", 0)),
        "reserved": int(stats.get("reserved_bytes.all.current", 0)),
        "fragmented": int(stats.get("inactive_split_bytes.all.current", 0)),
        "limit": int(cuda.get_device_properties(cuda.current_device()).total_memory),
    }
