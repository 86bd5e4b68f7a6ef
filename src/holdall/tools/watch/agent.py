"""The agent: addresses and counters that a watched process publishes twice a second.

In:  holdall's memories, Stable-Baselines3's models, arrays that the user named.  Out: the agent report that a watcher
reads in another process.
Invariant: it uses at most 0.2 % of the time, but for the seconds in which a leak is traced; it keeps nothing alive and
changes nothing. If anything fails here, training goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

from holdall import report as tracked
from holdall.errors import ClosedError, WatchError
from holdall.machine import begin_peak, peak_bytes
from holdall.tools.watch import agent_files
from holdall.tools.watch.agent_files import AgentReport, HeldField, PhasePeak, Region
from holdall.tools.watch.reading import IMPORT_PHASE, GrowingLine, PythonObjects, heap, python_objects, trace_growth

FillFunction = Callable[[], float]

_SHARE_OF_TIME = 0.002
_INTERVAL_S = 0.5
_NETWORKS_EVERY_S = 5.0
"""Networks have hundreds of tensors, and only gradients move; buffers are looked up every time."""
_SILENT_INTERVALS = 4
"""Intervals after which the thread publishes for a training loop that has stopped calling."""

_TRACE_PHASE = "trace"
_OPTIMIZERS = ("optimizer", "ent_coef_optimizer")  # attributes of a model and of its networks
_IMPORT_FILE = "<frozen importlib._bootstrap>"

_LOG = logging.getLogger("holdall")


class Agent:
    """Publishes what a process knows about itself; there is one in a process, see `agent()`."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.due = 0.0
        self.phase: str | None = None
        self.step: int | None = None
        self.goal: int | None = None
        self._arrays: dict[str, tuple[Any, FillFunction | None]] = {}
        self._models: list[Any] = []
        self._networks: list[Any] = []
        self._regions: tuple[Region, ...] = ()
        self._held: tuple[HeldField, ...] = ()
        self._in_networks: tuple[Region, ...] = ()
        self._networks_due = 0.0
        self._phases: dict[str, PhasePeak] = {}
        self._entered = time.monotonic()
        self._events: deque[tuple[float, str]] = deque(maxlen=20)
        self._python: PythonObjects | None = None
        self._growing: tuple[GrowingLine, ...] = ()
        self._is_tracing = False
        self._is_called_by_loop = False
        self._spent = 0.0
        self._ended = threading.Event()
        self._publishing = threading.Lock()
        self._pid, self._started = os.getpid(), agent_files.process_start(os.getpid())
        self._thread = threading.Thread(target=self._run, name="holdall-watch", daemon=True)
        with contextlib.suppress(OSError):
            agent_files.remove_stale_files()
        self._thread.start()

    def track(self, name: str, array: Any, fill: FillFunction | None) -> None:
        """Name an array, for as long as it lives."""
        self._arrays[name] = (weakref.ref(array), fill)

    def follow_network(self, network: Any) -> None:
        """Name what a torch module or an optimizer holds: parameters, gradients, state."""
        self._networks.append(weakref.ref(network))
        self._networks_due = 0.0

    def follow_model(self, model: Any) -> None:
        """Follow a model of Stable-Baselines3: its networks, its buffers, its steps."""
        if not any(known() is model for known in self._models):
            self._models.append(weakref.ref(model))
            self._networks_due = 0.0

    def enter(self, phase: str | None) -> None:
        """Begin a phase of training; the peak of the one before is what the kernel counted in it.

        Some tens of microseconds: for phases of seconds, not for every step.
        """
        now = time.monotonic()
        if self.phase is not None:
            before = self._phases.get(self.phase, PhasePeak(0, 0, 0.0))
            peak = before.peak
            with contextlib.suppress(OSError):
                peak = max(peak, peak_bytes())
            self._phases[self.phase] = PhasePeak(peak, before.count + 1, before.seconds + now - self._entered)
        self.phase, self._entered = phase, now
        begin_peak()

    def add_event(self, text: str) -> None:
        """Report to the watcher that something happened."""
        self._events.append((time.time(), text[:200]))

    def publish_if_due(self) -> None:
        """Publish if it is time; called by a training loop, always at the same place in a step."""
        self._is_called_by_loop = True
        if time.monotonic() >= self.due:
            self._publish()

    def publish(self) -> None:
        """Write the agent report now, with everything looked up again."""
        self._networks_due = 0.0
        self._publish()

    def _publish(self) -> None:
        if not self._publishing.acquire(blocking=False):
            return
        try:
            if self._ended.is_set():
                return
            begun = time.thread_time()
            try:
                agent_files.write_agent_report(self._report())
            except Exception:  # a full disk, or what changes meanwhile: the watch goes without, and training goes on
                _LOG.debug("the agent could not report", exc_info=True)
            spent = time.thread_time() - begun
            self._spent += spent
            self.due = time.monotonic() + max(self.interval_s, spent / _SHARE_OF_TIME)
        finally:
            self._publishing.release()

    def stop(self) -> None:
        """End the thread and remove the agent report; a process that just ends leaves it for its watcher."""
        if os.getpid() != self._pid:  # a fork of the process; the agent is not its own
            return
        self._ended.set()
        with self._publishing, contextlib.suppress(OSError):  # what is being written now is removed, too
            agent_files.remove_agent_report(self._pid)

    def _run(self) -> None:
        while not self._ended.wait(max(self.due - time.monotonic(), self.interval_s)):
            with contextlib.suppress(OSError, WatchError):
                agent_files.answer_trim_request()
                if agent_files.take_request("trace") and not self._is_tracing:
                    self._is_tracing = True
                    threading.Thread(target=self._trace, name="holdall-trace", daemon=True).start()
            silent = time.monotonic() - self.due > _SILENT_INTERVALS * self.interval_s
            if time.monotonic() >= self.due and (silent or not self._is_called_by_loop):
                self._publish()

    def _trace(self) -> None:
        """Find the lines that allocate what stays; in a thread of its own, since reports go on meanwhile."""
        try:
            self._growing = trace_growth(self._ended)
        finally:
            self._is_tracing = False

    def _report(self) -> AgentReport:
        # Training may change them during the look-up; then the regions of the last report are sent again.
        with contextlib.suppress(RuntimeError, ReferenceError, AttributeError, TypeError, ValueError):
            self._held = tuple(measure_memories(self._own_memories()))
            buffers = [*self._buffers()]
            if time.monotonic() >= self._networks_due:
                self._in_networks = tuple(self._network_regions())
                self._networks_due = time.monotonic() + _NETWORKS_EVERY_S
            found: dict[int, Region] = {}
            for region in [*buffers, *self._in_networks]:
                found.setdefault(region.address, region)  # a view of an array that has a name already is left out
            self._regions = tuple(found.values())
        models = self._living_models()
        step = next((int(model.num_timesteps) for model in models), _added() if self.step is None else self.step)
        torch: Any = sys.modules.get("torch")  # never imported to find out
        self._python = python_objects() or self._python  # unknown while allocations are traced
        return AgentReport(
            pid=self._pid,
            started=self._started,
            time=time.time(),
            step=step,
            goal=next((int(goal) for one in models if (goal := getattr(one, "_total_timesteps", None))), self.goal),
            phase=_TRACE_PHASE if self._is_tracing else self.phase or _found_phase(models, step),
            regions=self._regions,
            held=self._held,
            held_in_heap=_read_heap_bytes(),
            heap=heap(),
            python=self._python,
            gpu=_torch_gpu_bytes(torch),
            torch_threads=torch.get_num_threads() if hasattr(torch, "get_num_threads") else None,  # None: half imported
            spilled=_spilled_bytes(),
            phases=dict(self._phases),
            events=tuple(self._events),
            growing=self._growing,
            seconds_spent=self._spent,
        )

    def _living_models(self) -> list[Any]:
        return [model for known in self._models if (model := known()) is not None]

    def _own_memories(self) -> list[Any]:
        """Return holdall's memories, and the buffers of models that are holdall's."""
        memories: list[Any] = list(tracked.LIVING)
        for model, name in product(self._living_models(), ("replay", "rollout")):
            buffer = getattr(model, f"{name}_buffer", None)
            is_known = any(getattr(buffer, "memory", buffer) is memory for memory in memories)
            if _is_own_buffer(buffer) and not is_known:
                memories.append(buffer)
        return memories

    def _buffers(self) -> Iterator[Region]:
        """Yield the arrays of buffers of other libraries, and those that the user named."""
        for name, (known, fill) in list(self._arrays.items()):
            array = known()
            if array is None:
                del self._arrays[name]
            else:
                yield from array_regions(name, array, None if fill is None else float(fill()))
        for model, name in product(self._living_models(), ("replay", "rollout")):
            buffer = getattr(model, f"{name}_buffer", None)
            if buffer is not None and not _is_own_buffer(buffer):
                yield from buffer_regions(name, buffer)

    def _network_regions(self) -> Iterator[Region]:
        found = [network for known in self._networks if (network := known()) is not None]
        for model in self._living_models():
            if (policy := getattr(model, "policy", None)) is not None:
                holders = [model, *policy.modules()]
                found += [policy, *(vars(one).get(name) for one in holders for name in _OPTIMIZERS)]
        networks = {id(one): one for one in found if one is not None}.values()
        optimizers = [one for one in networks if hasattr(one, "param_groups")]
        yield from network_regions([one for one in networks if not hasattr(one, "param_groups")], optimizers)


def _added() -> int | None:
    """Return the most transitions that were added to a memory: the steps of a loop that reports none."""
    most = 0
    for memory in list(tracked.LIVING):
        with contextlib.suppress(ClosedError):
            most = max(most, int(getattr(memory, "next_id", 0)))
    return most or None


def _found_phase(models: list[Any], step: int | None) -> str | None:
    """Return what an on-policy model is doing, by its buffer; off-policy ones switch many times a second.

    Before there are steps, return whether the main thread is importing something.
    """
    for model in models:
        if (buffer := getattr(model, "rollout_buffer", None)) is not None:
            return "train" if getattr(buffer, "full", False) else "collect"
    frame = None if step else sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename != _IMPORT_FILE:
        frame = frame.f_back
    return None if frame is None else IMPORT_PHASE


def _torch_gpu_bytes(torch: Any) -> dict[str, int]:
    """Return the figures of torch's caching allocator, if a GPU is in use; NVIDIA and AMD have the same names."""
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    stats, device = cuda.memory_stats(), int(cuda.current_device())
    names = {"requested": "requested", "allocated": "allocated", "reserved": "reserved", "fragmented": "inactive_split"}
    found = {name: int(stats.get(f"{torch_name}_bytes.all.current", 0)) for name, torch_name in names.items()}
    return {"device": device, **found, "limit": int(cuda.get_device_properties(device).total_memory)}


def _spilled_bytes() -> dict[str, int]:
    found: Counter[str] = Counter()
    for memory in list(tracked.LIVING):
        if (folder := getattr(memory, "spill_dir", None)) is not None:
            found[str(folder)[:200]] += int(getattr(memory, "disk_bytes", 0))
    return found


_one: Agent | None = None
_agent_lock = threading.Lock()


def agent() -> Agent:
    """Return this process's agent, started if there is none."""
    global _one  # noqa: PLW0603  there is one process, so there is one agent
    with _agent_lock:
        if _one is None or _one._pid != os.getpid() or _one._ended.is_set():
            _one = Agent(_INTERVAL_S)
        return _one


def measure_memories(memories: Iterable[Any]) -> Iterator[HeldField]:
    """Yield the fields of holdall's own memories on the host, with the bytes that the memories count."""
    count_by_kind: Counter[str] = Counter()
    for memory in memories:
        kind = "rollout" if "Rollout" in type(memory).__name__ else "replay"
        count_by_kind[kind] += 1
        prefix = kind if count_by_kind[kind] == 1 else f"{kind} {count_by_kind[kind]}"
        with contextlib.suppress(ClosedError):
            fill = float(memory.fill)
            report = memory.report()
            if _is_on_host(memory):
                yield from (HeldField(f"{prefix}.{one.name}", one.total_bytes, fill) for one in report.fields)
            yield HeldField(f"{prefix}.staging", report.staging_bytes, fill)


def _read_heap_bytes() -> int:
    """Return the bytes of holdall's memories that the C library's allocator was asked for."""
    native = sys.modules.get("holdall._native")  # It is never imported for this.
    return 0 if native is None else max(int(native.get_heap_bytes()), 0)


def _is_on_host(memory: Any) -> bool:
    """Return whether the transitions of a memory are in the RAM of this process."""
    device = getattr(getattr(memory, "store", None), "device", None)
    return device is None or getattr(device, "type", "cpu") == "cpu"


def _is_own_buffer(buffer: Any) -> bool:
    """Return whether a buffer of a model is one of holdall's, which reports its bytes itself."""
    return type(buffer).__module__.startswith("holdall.") or hasattr(buffer, "report")


def buffer_regions(name: str, buffer: Any) -> Iterator[Region]:
    """Yield the arrays of a buffer whose attributes they are, as in Stable-Baselines3."""
    attributes = getattr(buffer, "__dict__", {})
    size, position = attributes.get("buffer_size"), attributes.get("pos")
    fill = None
    if isinstance(size, int) and isinstance(position, int) and size > 0:
        fill = 1.0 if attributes.get("full") else position / size
    for key, value in list(attributes.items()):
        parts = (
            {f"{key}.{inner}": one for inner, one in list(value.items())} if isinstance(value, dict) else {key: value}
        )
        for field, array in parts.items():
            if _is_ndarray(array) or (hasattr(array, "data_ptr") and hasattr(array, "untyped_storage")):
                yield from array_regions(f"{name}.{field}", array, fill)


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


def _is_ndarray(value: Any) -> bool:
    # NumPy is not imported here: a script may still set how many threads NumPy gets.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_regions(name: str, array: Any, fill: float | None) -> Iterator[Region]:
    """Yield what one array or tensor of a buffer, or of a user, lies in."""
    if not _is_ndarray(array):
        yield from _tensor_regions(name, array, "buffers", fill)
        return
    owner: Any = array
    while _is_ndarray(owner.base):
        owner = owner.base  # a view may be of a part, and two views of the same
    if owner.nbytes:
        yield Region("buffers", name, _address(owner), owner.nbytes, fill, not _is_mapped(owner))


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
