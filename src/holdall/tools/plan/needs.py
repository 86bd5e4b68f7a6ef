"""The memory that a run needs, part by part, and whether it fits.

In:  the measurements of a probe, the run's buffer, and the limits of a machine.  Out: parts, their sum, and a verdict.

A part is exact, or measured, or an estimate. The bound of a run is the sum of its exact parts, of the other parts
enlarged by `MARGIN`, and of `ROOM_BYTES`. A run fits only if its bound is not above the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from holdall.machine import Limit
from holdall.store.budget import Budget
from holdall.store.tuning import Tuning
from holdall.tools.probe.snapshot import StoredSteps
from holdall.units import count_noun

MARGIN = 0.15
"""Share by which a part that is not exact may be larger than measured or estimated."""
ROOM_BYTES = 32 * 2**20
"""Bytes that the bound of a run adds to all parts."""
PLAIN_LAYOUT = "a plain layout"
"""`library` of an `Experience` in holdall's memory if there is no model, so that no library's buffer is replaced."""
NOISE_BOUND = "upper bound (noise)"
"""Source of holdall's part if the observations are noise, which cannot be compressed like real observations."""
_OPTIMIZER_COPIES = 3
"""Gradients and the two moments of Adam, as multiples of the weights."""
_MAX_COUNT = 1 << 40


class FitVerdict(IntEnum):
    """Whether a run fits. The value is the exit code of `holdall plan`."""

    FITS = 0
    TIGHT = 1
    DOES_NOT_FIT = 2

    def __str__(self) -> str:
        return {0: "fits", 1: "tight", 2: "does not fit"}[self.value]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of the memory at the peak."""

    name: str
    nbytes: int
    source: str
    """`exact`, `measured`, `estimate` or `NOISE_BOUND`."""

    @property
    def most_bytes(self) -> int:
        """Return the upper bound."""
        return self.nbytes if self.source == "exact" else int(self.nbytes * (1 + MARGIN))


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """One need of a run, compared with one limit."""

    what: str
    need_bytes: int
    most_bytes: int
    limit: Limit

    @property
    def verdict(self) -> FitVerdict:
        """Return whether the need fits into the free bytes of the limit."""
        if self.need_bytes > self.limit.free_bytes:
            return FitVerdict.DOES_NOT_FIT
        return FitVerdict.FITS if self.most_bytes <= self.limit.free_bytes else FitVerdict.TIGHT

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "what": self.what,
            "need_bytes": self.need_bytes,
            "most_bytes": self.most_bytes,
            "limit": self.limit.name,
            "free_bytes": self.limit.free_bytes,
            "verdict": str(self.verdict),
        }


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Limits of the machine that a run must fit into."""

    memory: tuple[Limit, ...]
    """Bounds on host memory, the smallest first."""
    gpu: Limit | None = None
    disk: Limit | None = None
    mapping_bytes: int | None = None
    """Largest allocation that the kernel grants to one array; None if the kernel does not check it."""

    @property
    def free_bytes(self) -> int:
        """Return the host memory that the run may take."""
        return self.memory[0].free_bytes

    def as_list(self) -> list[dict[str, Any]]:
        """Return plain data, ready for JSON."""
        return [asdict(limit) for limit in self.memory]


@dataclass(frozen=True, slots=True)
class Experience:
    """The buffer of a run, in the layout of its library."""

    name: str
    """Variable or attribute, such as `model.replay_buffer`."""
    library: str
    """Library or class whose layout this is: `SB3`, `NumPy`, `deque`, `PLAIN_LAYOUT`."""
    rows: int
    """Vectorised steps that fit."""
    n_envs: int
    row_bytes: float
    """Bytes of one vectorised step of all environments."""
    fixed_bytes: int = 0
    """Bytes that do not depend on the number of rows."""
    largest_array_share: float = 1.0
    """Share of the largest array in the buffer's bytes."""
    copied_row_bytes: float = 0.0
    """Bytes per row of the largest array, which is copied while a rollout is flattened; 0 if nothing is copied."""
    is_rollout: bool = False
    is_exact: bool = True
    max_rows: int | None = None
    """Vectorised steps that the run makes before it ends; None: enough to fill all rows."""

    @property
    def layout(self) -> str:
        """Return words for the buffer: `SB3's buffer`, `this deque`, `these arrays`."""
        words = {"SB3": "SB3's buffer", "NumPy": "these arrays", PLAIN_LAYOUT: PLAIN_LAYOUT}
        return words.get(self.library, f"this {self.library}")

    @property
    def transitions(self) -> int:
        """Return the transitions that fit."""
        return self.rows * self.n_envs

    @property
    def filled_rows(self) -> int:
        """Return the rows that are filled when the run ends."""
        return self.rows if self.max_rows is None or self.is_rollout else min(self.rows, self.max_rows)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of the whole buffer."""
        return round(self.rows * self.row_bytes) + self.fixed_bytes

    @property
    def largest_array_bytes(self) -> int:
        """Return the bytes of the largest array, which the system must grant at once."""
        return round(self.largest_array_share * self.allocated_bytes)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes in RAM when the run ends. Pages that were never written cost nothing."""
        return round(self.filled_rows * self.row_bytes) + self.fixed_bytes

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of the copy that flattening a rollout makes."""
        return round(self.rows * self.copied_row_bytes)

    def resized(self, size: int) -> Experience:
        """Return the buffer with another capacity in transitions, or other steps of a rollout."""
        rows = size if self.is_rollout else max(size // self.n_envs, 1)
        return replace(self, rows=rows)

    @property
    def size(self) -> int:
        """Return what users set: transitions of a replay buffer, or steps of a rollout."""
        return self.rows if self.is_rollout else self.transitions


@dataclass(frozen=True, slots=True)
class HoldallUse:
    """Settings of holdall's memory in a run."""

    budget_bytes: int | None = None
    """A hard limit; None: no limit in bytes."""
    is_auto: bool = False
    """Whether the budget is "auto": a quarter of the free memory is used for raw data."""
    prefer: str = "balanced"
    spill_dir: str | None = None


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """All figures that the memory of a run depends on.

    The methods compute every answer of a plan, and `checks` is the only place that compares needs with limits. So the
    verdict, the table, the largest sizes and the suggested changes agree.

    A run has either its library's buffer or holdall's. `with_library_buffer` and `with_holdall_buffer` return the same
    run with one of them.
    """

    experience: Experience
    base_bytes: int
    """Interpreter, libraries, environments and weights, measured."""
    process_bytes: int = 0
    """Unique bytes of worker processes, measured."""
    processes: int = 0
    environment_bytes: int = 0
    """Python objects and arrays of one environment in the process itself; 0 if environments have processes."""
    measured_envs: int = 0
    """Environments that existed when `base_bytes` was measured; 0 if that is unknown."""
    update_bytes: int = 0
    """Growth of the process at the peak of an update, without `settled_bytes`."""
    settled_bytes: int = 0
    """Growth that stays between updates: gradients, optimizer state, heap."""
    update_source: str = "estimate"
    batch_size: int = 0
    """Transitions in one update; 0 if that is unknown."""
    measured_batch_size: int = 0
    stored: StoredSteps | None = None
    """Measured size of the steps in holdall's memory; None if it was not measured."""
    is_noise: bool = False
    """Whether the stored steps were made up."""
    holdall: HoldallUse | None = None
    """Settings of holdall's memory; None: the run has its library's buffer."""
    others: tuple[MemoryPart, ...] = ()
    """Further buffers and large arrays."""
    free_bytes: int = 0
    """Free memory of the machine, which an "auto" budget depends on."""
    gpu_bytes: int = 0
    """Peak of the bytes in tensors on the GPU during an update; 0 if the update used no GPU."""
    gpu_reserved_bytes: int = 0
    """Peak of the bytes that torch's allocator reserved on the GPU."""

    # ---------------------------------------------------------------- the two kinds of buffers

    def with_library_buffer(self) -> RunNeeds:
        """Return the run with the buffer of its library."""
        return replace(self, holdall=None)

    def with_holdall_buffer(self, use: HoldallUse | None = None) -> RunNeeds:
        """Return the run with holdall's memory. Its settings are `use`, or those of the run, or the defaults."""
        return replace(self, holdall=use or self.holdall or HoldallUse())

    # ---------------------------------------------------------------- parts

    def parts(self) -> list[MemoryPart]:
        """Return the parts of the memory at the peak."""
        further_envs = self._count_further_envs()
        base = self.base_bytes + min(further_envs, 0) * self.environment_bytes
        parts = [MemoryPart("interpreter, libraries, environments, weights", max(base, 0), "measured")]
        if further_envs > 0 and self.environment_bytes:
            name = count_noun(further_envs, "further environment")
            parts.append(MemoryPart(name, further_envs * self.environment_bytes, "estimate"))
        if self.processes:
            name = count_noun(self.processes, "worker process", "worker processes")
            parts.append(MemoryPart(name, self.process_bytes, "measured"))
        parts += self.others
        parts.append(self._make_buffer_part())
        update = self._scale_to_batch(self.update_bytes)
        copied = self.experience.copied_bytes if self.holdall is None else 0
        if copied > update:
            parts.append(MemoryPart("copy of the rollout's largest array", copied, "exact"))
        elif update:
            parts.append(MemoryPart("batch and activations of an update", update, self._update_source))
        if self.settled_bytes:
            parts.append(MemoryPart("gradients, optimizer, heap", self.settled_bytes, self.update_source))
        return parts

    def _count_further_envs(self) -> int:
        """Return the environments that were not measured. Negative: fewer environments than were measured."""
        return self.experience.n_envs - self.measured_envs if self.measured_envs else 0

    @property
    def _update_source(self) -> str:
        return self.update_source if self.batch_size == self.measured_batch_size else "estimate"

    def _scale_to_batch(self, nbytes: int) -> int:
        """Return the bytes of an update with the run's batch size."""
        if not self.batch_size or not self.measured_batch_size:
            return nbytes
        return nbytes * self.batch_size // self.measured_batch_size

    def _make_buffer_part(self) -> MemoryPart:
        experience = self.experience
        kind = "rollout buffer" if experience.is_rollout else "replay buffer"
        if self.holdall is not None:
            return MemoryPart(f"{kind} (holdall)", self.buffer_bytes(), self._stored_source)
        source = "exact" if experience.is_exact else "estimate"
        return MemoryPart(f"{kind} ({experience.library})", self.buffer_bytes(), source)

    @property
    def _stored_source(self) -> str:
        if self.is_noise:
            return NOISE_BOUND
        return "measured" if self.stored is not None and self.stored.steps else "estimate"

    def buffer_bytes(self) -> int:
        """Return the RAM that the buffer takes for the filled transitions."""
        stored = self.stored
        use = self.holdall
        if use is None or stored is None:
            return self.experience.resident_bytes
        transitions = self.experience.filled_rows * self.experience.n_envs
        raw = round(stored.raw_bytes * transitions)
        if self.experience.is_rollout:
            return raw + stored.working_bytes
        if use.budget_bytes is not None:
            # Transitions stay raw while they fit into the budget, and the budget also covers the working memory.
            return min(raw + stored.working_bytes, use.budget_bytes)
        compressed = min(self._compressed_bytes(stored, transitions), raw)
        if use.is_auto:
            kept_raw = min(raw, self.free_bytes // Tuning().auto_raw_divisor)
            share = 1 - kept_raw / raw if raw else 0.0
            compressed = kept_raw + round(compressed * share)
        return compressed + stored.working_bytes

    def _compressed_bytes(self, stored: StoredSteps, transitions: int) -> int:
        """Return the bytes of compressed transitions, plus the raw segments that are being filled or compressed."""
        if stored.compressed_bytes is None:
            return round(stored.raw_bytes * transitions)
        tuning = Tuning()
        each = stored.worst_bytes or stored.compressed_bytes
        segment = min(tuning.block_bytes, round(stored.raw_bytes * transitions) // tuning.segments_per_capacity)
        return round(each * transitions) + (1 + tuning.min_queued_segments) * segment

    def disk_bytes(self) -> int:
        """Return the bytes that holdall's memory writes to `spill_dir`. The library's buffer writes none."""
        use = self.holdall
        if use is None or use.budget_bytes is None or use.spill_dir is None or self.stored is None:
            return 0
        transitions = self.experience.filled_rows * self.experience.n_envs
        return max(self._compressed_bytes(self.stored, transitions) - _count_room(use.budget_bytes), 0)

    def held_transitions(self) -> int:
        """Return the transitions that the buffer can hold: fewer than its capacity if holdall's budget is too small."""
        asked = self.experience.transitions
        use = self.holdall
        if use is None or use.budget_bytes is None or use.spill_dir is not None or self.stored is None:
            return asked
        each = self.stored.compressed_bytes or self.stored.raw_bytes
        return min(asked, int(_count_room(use.budget_bytes) / max(each, 1e-9)))

    # ---------------------------------------------------------------- sums and changes

    def need_bytes(self) -> int:
        """Return the bytes at the peak."""
        return sum(part.nbytes for part in self.parts())

    def most_bytes(self) -> int:
        """Return the upper bound of the bytes at the peak."""
        return sum(part.most_bytes for part in self.parts()) + ROOM_BYTES

    def checks(self, limits: MachineLimits) -> list[LimitCheck]:
        """Compare every need of the run with its limit."""
        checks = [LimitCheck("memory", self.need_bytes(), self.most_bytes(), limits.memory[0])]
        largest = self.experience.largest_array_bytes
        if self.holdall is None and largest and limits.mapping_bytes is not None:
            whole = Limit("memory and swap, for one array", limits.mapping_bytes, limits.mapping_bytes)
            checks.append(LimitCheck("largest array", largest, largest, whole))
        nbytes = self.disk_bytes()
        if self.holdall is not None and nbytes and limits.disk is not None:
            checks.append(LimitCheck(f"disk tier in {self.holdall.spill_dir}", nbytes, nbytes, limits.disk))
        if self.gpu_reserved_bytes and limits.gpu is not None:
            checks.append(LimitCheck("GPU memory", self.gpu_bytes, self.gpu_reserved_bytes, limits.gpu))
        return checks

    def verdict(self, limits: MachineLimits) -> FitVerdict:
        """Return the worst verdict of all checks."""
        return max(check.verdict for check in self.checks(limits))

    def resized(self, size: int) -> RunNeeds:
        """Return the run with another capacity, or other steps of a rollout."""
        return replace(self, experience=self.experience.resized(size))

    def with_batch(self, batch_size: int) -> RunNeeds:
        """Return the run with another batch size."""
        return replace(self, batch_size=batch_size)

    def with_envs(self, n_envs: int) -> RunNeeds:
        """Return the run with another number of environments. A replay buffer keeps its capacity."""
        before = self.experience
        factor = n_envs / before.n_envs
        rows = before.rows if before.is_rollout else max(before.transitions // n_envs, 1)
        max_rows = before.max_rows
        if max_rows is not None:
            max_rows = round(max_rows / factor)
        experience = replace(
            before,
            rows=rows,
            n_envs=n_envs,
            row_bytes=before.row_bytes * factor,
            copied_row_bytes=before.copied_row_bytes * factor,
            max_rows=max_rows,
        )
        return replace(
            self,
            experience=experience,
            processes=round(self.processes * factor),
            process_bytes=round(self.process_bytes * factor),
        )

    def largest_size(self, limits: MachineLimits) -> int:
        """Return the largest capacity, or rollout, that fits; 0 if none does."""
        return largest_count(lambda size: self.resized(size).verdict(limits) is FitVerdict.FITS)


def _count_room(budget_bytes: int) -> int:
    """Return the bytes of a budget that are not reserved for blocks in transit and batches."""
    budget = Budget.limited(budget_bytes, can_spill=True, tick_bytes=0, tuning=Tuning())
    return max(budget_bytes - budget.reserved_bytes, 0)


def largest_count(fits: Callable[[int], bool], top: int = _MAX_COUNT) -> int:
    """Return the largest number up to `top` for which `fits` is true, or 0. It must be true for all smaller numbers."""
    if not fits(1):
        return 0
    fitting = 1
    while fitting < top and fits(min(2 * fitting, top)):
        fitting = min(2 * fitting, top)
    too_large = min(2 * fitting, top + 1)
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting


def is_unlimited(count: int) -> bool:
    """Return whether a result of `largest_count` means that nothing limits the number."""
    return count >= _MAX_COUNT


def estimate_settled(parameter_bytes: int) -> int:
    """Return the bytes of gradients and of an Adam optimizer for weights of `parameter_bytes`."""
    return _OPTIMIZER_COPIES * parameter_bytes
