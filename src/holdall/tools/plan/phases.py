"""Memory by phase (construct, collect, flatten, train, save, load), and whether it fits.

In:  a spec, what was measured, whose buffer keeps the transitions, and the limits of this machine.
Out: the parts of every phase, checks against the limits, and fits, tight or does not fit.
Invariant: a run needs its largest phase, not the sum. A part says how it is known, and has an upper bound if it is
not exact. "Fits" is said only if the upper bound of the largest phase is below the smallest limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

from holdall.machine import Limit
from holdall.tools.plan.spec import Spec, leaves_of
from holdall.units import counted

MIB = 2**20
SEGMENTS_OF_A_CAPACITY = 16  # a segment is at most this share of the capacity
MAPPED_FROM = 32 * MIB  # the C library's largest threshold: it always maps blocks from here on on their own

_MOST_RAW_SEGMENTS = 3  # while the worker keeps up: the open one, one that waits, and one that is compressed
_RATIO_SPREAD = 0.1  # how much the ratio of the first thousands of steps may be wrong
_HEAP_SPREAD = 1.6  # of a heap over what lives in it, where no real update was made: 1.1 to 2.9 in those that were
_MOST_HEAP_SPREAD = 3.0
_MOST_HOLES = 0.8  # of what stays between updates, for the same reason
_ROOM_BYTES = 16 * MIB  # beside a bound that is a share of what was measured
_GROWTH_SPREAD = 0.25  # of what real updates took: later ones take more, and larger batches another share
_LIBRARIES_SPREAD = 0.05
_PROCESSES_SPREAD = 0.15
_PROBED_SPREAD = 0.05
_UPDATE_SPREAD = 0.1  # of what updates took in a probe
_UPDATE, _KEPT = "batch and activations", "heap that updates left"
_ALIGNMENT_BYTES = 64

_FORKED_BYTES = 6 * MIB  # what a forked process changes of the pages that it shares
_PRELOADED_BYTES = 10 * MIB
_SERVER_BYTES = 6 * MIB  # an interpreter that only starts others: the fork server, the resource tracker

_CONTEXT_BYTES = 766 * MIB  # a CUDA context where none can be measured: that of an H200 with torch 2.11
_CUDA_HOST_BYTES = 1100 * MIB  # what CUDA's libraries add to the host's memory, from the same machine
_MOST_CUDA_HOST_BYTES = 1500 * MIB
_BLAS_BYTES = 65 * MIB  # workspace of the matrix products, taken from torch's pool once
_CONVOLUTION_SPREAD = 1.2  # workspace of convolutions on a GPU, beside what they read and write; measured 1.1 to 1.8
_POOL_SPREAD = 2.1  # torch's pool hands out whole blocks and keeps them; measured up to 2.0 times what is in use


@dataclass(frozen=True, slots=True)
class HoldallNeed:
    """What holdall's memory takes."""

    raw_bytes: float  # per transition
    compressed_bytes: float | None  # per transition; None: not measured
    fixed_bytes: int  # beside the transitions: batches, tables, threads
    steps: int  # real steps that this was measured on; 0: made-up ones
    findings: dict[str, str]  # by field, in the memory's own words
    sealing_bytes: int = 0  # beside the transitions if they are compressed: what codecs work in, too
    segment_bytes: int = 0  # of unique slices; a full one is raw while it is sealed
    most_compressed_bytes: float | None = None  # per transition, where another codec was chosen in another trial

    def need(self, transitions: int) -> int:
        """Bytes for so many transitions, in the smallest form that was measured."""
        return min(self.raw_need(transitions), self._compressed_need(transitions, segments=1))

    def most(self, transitions: int) -> int:
        """An upper bound: the ratio gets worse, and the worker is as far behind as it may be."""
        raw = int(self.raw_need(transitions) * (1 + _RATIO_SPREAD))
        worse = replace(self, compressed_bytes=self.most_compressed_bytes or self.compressed_bytes)
        return min(raw, int(worse._compressed_need(transitions, segments=_MOST_RAW_SEGMENTS) * (1 + _RATIO_SPREAD)))

    def raw_need(self, transitions: int) -> int:
        """Bytes for so many transitions if nothing is compressed."""
        return int(self.raw_bytes * transitions) + self.fixed_bytes

    def _compressed_need(self, transitions: int, segments: int) -> int:
        if self.compressed_bytes is None:
            return self.raw_need(transitions)
        # The worker seals a segment faster than training fills the next one: one is raw, and it is full at the peak.
        segment = min(self.segment_bytes, int(self.raw_bytes * transitions) // SEGMENTS_OF_A_CAPACITY)
        return int(self.compressed_bytes * transitions) + segments * segment + self.sealing_bytes


@dataclass(frozen=True, slots=True)
class PhasePart:
    """One thing that takes memory."""

    name: str
    nbytes: int
    how: str  # exact, measured, traced, estimate
    most_bytes: int  # upper bound; the same where it is exact

    @classmethod
    def exact(cls, name: str, nbytes: int) -> PhasePart:
        """Return a part that is known to the byte."""
        return cls(name, nbytes, "exact", nbytes)

    @classmethod
    def measured(cls, name: str, nbytes: int, spread: float) -> PhasePart:
        """Return a part that was measured, and may be larger by a share of itself."""
        return cls(name, nbytes, "measured", int(nbytes * (1 + spread)))


@dataclass(frozen=True, slots=True)
class RunPhase:
    """One phase of a run."""

    name: str
    parts: tuple[PhasePart, ...]
    happens: bool = True  # False: worked out for information, and no part of this run

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def most_bytes(self) -> int:
        """Upper bound of all parts."""
        return sum(part.most_bytes for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        sums = {"name": self.name, "bytes": self.nbytes, "most_bytes": self.most_bytes, "happens": self.happens}
        return sums | {"parts": [asdict(part) for part in self.parts]}


class UpdateBytes(NamedTuple):
    """Bytes of an update at one batch size."""

    weights: int
    settled: int  # weights, gradients and the optimizer's state: what stays between updates
    settled_heap: int  # the part of it in smaller blocks
    mapped: int  # at the peak, in blocks of their own
    heap: int  # at the peak, in smaller blocks
    live: int  # the most tensors that were alive at once, without what a CPU's convolutions copy: a GPU's need

    @property
    def peak(self) -> int:
        """Bytes at the peak, in blocks of every size."""
        return self.mapped + self.heap


class HeapGrowth(NamedTuple):
    """What real updates with a batch took."""

    batch: int
    nbytes: int  # by which they stretched the process
    traced: UpdateBytes  # with the same batch
    kept: int = 0  # by which it was still larger after one of them, at most
    fixed: int = 0  # of both: what does not grow with the batch, beside what a trace sees


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProbe:
    """Host memory of a short real training with Stable-Baselines3, measured in its own process."""

    constructed_bytes: int  # peak resident bytes until the model was constructed
    trained_bytes: int  # peak resident bytes of the updates
    kept_bytes: int  # resident bytes between updates; the maximum, where several were read
    buffer_bytes: int  # resident bytes of Stable-Baselines3's buffer, as far as the training filled it
    copied_bytes: int  # bytes of the flattened copy that a rollout buffer of Stable-Baselines3 made
    env_process_bytes: Sequence[int] = ()  # unique bytes of each process of the vector environment


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What was found out about this machine, this environment and these networks."""

    libraries: int = 0
    libraries_anonymous: int = 0  # after the imports: what a process that was not forked cannot share
    traced_batch: int = 0
    traced: UpdateBytes | None = None
    traced_twice: UpdateBytes | None = None
    growth: HeapGrowth | None = None
    env_first: int | None = None  # None: no environment was made
    env_first_anonymous: int = 0
    env_each: int = 0
    probe: TrainingProbe | None = None
    vram_context: int | None = None

    def networks(self, batch: int) -> UpdateBytes | None:
        """Return the trace for a batch; between and beyond the two that were traced, on the line through them."""
        if self.traced is None or self.traced_twice is None or batch == self.traced_batch:
            return self.traced
        share = batch / self.traced_batch - 1
        pairs = zip(self.traced, self.traced_twice, strict=True)
        return UpdateBytes(*(max(int(once + (twice - once) * share), 0) for once, twice in pairs))


def host_phases(spec: Spec, measured: MeasuredCosts, holdall: HoldallNeed | None = None) -> list[RunPhase]:
    """Work out host memory by phase; with holdall's memory in place of Stable-Baselines3's buffer if given."""
    layout = spec.layout()
    on_gpu = spec.device.startswith("cuda")
    networks = None if on_gpu else measured.networks(spec.batch)
    around = _libraries_and_environments(spec, measured)
    weights = [] if networks is None else [PhasePart.exact("network weights", networks.weights)]
    settled = [] if networks is None else [_kept_between_updates(networks)]
    buffer = _buffer(spec, holdall)
    infos = 0 if holdall else layout.object_bytes
    objects = [PhasePart.exact("infos of the buffer", infos)] if infos else []
    copies = 0 if holdall else layout.flatten_bytes
    steady = (*around, *settled, buffer)
    update, kept = _update(spec, networks, measured, copies)
    # A rollout is collected and copied while the heap is as large as the update before left it.
    between = (*steady, kept) if spec.on_policy and kept.nbytes else steady
    phases = [RunPhase("construct", (*around, *weights, *objects)), RunPhase("collect", between)]
    if spec.on_policy:
        phases.append(RunPhase("flatten", (*between, PhasePart.exact("rollout, copied", copies))))
    phases += [RunPhase("train", (*steady, update)), RunPhase("save", between)]
    if not spec.on_policy:
        loaded = buffer if holdall else PhasePart.exact("replay buffer, loaded", layout.nbytes)
        phases.append(RunPhase("load", (*around, *settled, loaded), spec.saves_buffer))
    return phases


def vram_phases(spec: Spec, measured: MeasuredCosts) -> list[RunPhase]:
    """Work out a GPU's memory by phase; empty where the run uses none."""
    networks = measured.networks(spec.batch)
    if not spec.device.startswith("cuda") or networks is None:
        return []
    context, how = measured.vram_context, "measured"
    if context is None:
        context, how = _CONTEXT_BYTES, "estimate"
    base = PhasePart("CUDA context and libraries", context, how, int(1.1 * context))
    activations = networks.live - networks.settled
    used, kept = int(_CONVOLUTION_SPREAD * activations), int(_POOL_SPREAD * activations) + 128 * MIB
    pool = PhasePart("batch, activations and workspace", used + _BLAS_BYTES, "traced", kept + _BLAS_BYTES)
    return [
        RunPhase("construct", (base, PhasePart.exact("network weights", networks.weights))),
        RunPhase("train", (base, _kept_between_updates(networks), pool)),
    ]


def checkpoint_bytes(spec: Spec, measured: MeasuredCosts) -> int:
    """Bytes on disk of one checkpoint; a buffer is written whole, however empty it is."""
    networks = measured.traced
    # Weights and the optimizer's two moments, not the gradients.
    model = 0 if networks is None else networks.settled - networks.weights
    return model + (spec.layout().nbytes if spec.saves_buffer and not spec.on_policy else 0)


def process_bytes(spec: Spec, measured: MeasuredCosts) -> int:
    """Bytes that the vector environment's processes add to the machine's, by how they start."""
    if spec.vec_env == "dummy":
        return 0
    env = measured.env_first_anonymous
    if spec.method == "fork":
        return spec.num_envs * (_FORKED_BYTES + env)
    fresh = measured.libraries_anonymous
    if spec.method == "forkserver" and spec.preloads:
        return spec.num_envs * (_PRELOADED_BYTES + env) + fresh + _SERVER_BYTES
    servers = 2 if spec.method == "forkserver" else 1
    return spec.num_envs * (fresh + env) + servers * _SERVER_BYTES


def shared_bytes(spec: Spec) -> int:
    """Bytes in /dev/shm; Stable-Baselines3's own processes send observations through pipes and take none."""
    if spec.vec_env != "shared":
        return 0
    leaves = leaves_of(spec.observation, "obs")
    return sum(-(-spec.num_envs * leaf.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for leaf in leaves)


def _libraries_and_environments(spec: Spec, measured: MeasuredCosts) -> list[PhasePart]:
    """Libraries and environments: what is there in every phase."""
    if measured.probe is not None:
        return _probed_libraries(measured.probe, measured)
    libraries = measured.libraries
    parts = [PhasePart.measured("interpreter and libraries", libraries, _LIBRARIES_SPREAD)]
    if spec.device.startswith("cuda") and measured.vram_context is None:
        parts.append(PhasePart("CUDA's libraries", _CUDA_HOST_BYTES, "estimate", _MOST_CUDA_HOST_BYTES))
    if spec.vec_env != "dummy":
        name = f"{counted(spec.num_envs, 'process', 'processes')} ({spec.method})"
        parts.append(PhasePart.measured(name, process_bytes(spec, measured), _PROCESSES_SPREAD))
    elif measured.env_first is not None:
        size = measured.env_first + (spec.num_envs - 1) * measured.env_each
        parts.append(PhasePart.measured(counted(spec.num_envs, "environment"), size, _PROCESSES_SPREAD))
    return parts


def _probed_libraries(probe: TrainingProbe, measured: MeasuredCosts) -> list[PhasePart]:
    weights = 0 if measured.traced is None else measured.traced.weights
    held = max(probe.constructed_bytes - weights, 0)
    parts = [PhasePart.measured("interpreter, libraries, environments", held, _PROBED_SPREAD)]
    if probe.env_process_bytes:
        name = counted(len(probe.env_process_bytes), "process", "processes")
        parts.append(PhasePart.measured(name, sum(probe.env_process_bytes), _PROBED_SPREAD))
    return parts


def _buffer(spec: Spec, holdall: HoldallNeed | None) -> PhasePart:
    layout = spec.layout()
    if holdall is None:
        name = "rollout buffer" if spec.on_policy else "replay buffer"
        return PhasePart.exact(name, layout.resident_bytes(spec.total_timesteps))
    filled = min(spec.total_timesteps or layout.transitions, layout.transitions)
    how = "measured" if holdall.steps else "estimate"
    need, most = holdall.need(filled), holdall.most(filled)
    if spec.holdall_budget is not None:  # a budget counts everything but batches
        need, most = (min(size, spec.holdall_budget + holdall.fixed_bytes) for size in (need, most))
    return PhasePart("holdall's memory", need, how, most)


def _kept_between_updates(networks: UpdateBytes) -> PhasePart:
    # The optimizer's own temporaries come on top for a moment; a large MLP's peak was 1 % above the sum.
    most = networks.settled + networks.settled // 20
    return PhasePart("weights, gradients, optimizer", networks.settled, "exact", most)


def _update(
    spec: Spec, networks: UpdateBytes | None, measured: MeasuredCosts, copies: int
) -> tuple[PhasePart, PhasePart]:
    """Return what an update holds beyond what stays between updates, and what the heap keeps of it until the next."""
    flat = copies if copies < MAPPED_FROM else 0  # freed after the flattening, but the heap stays as large
    # One batch of observations as the buffer returns it, before it becomes tensors.
    gathered = spec.batch * spec.observation_bytes * (1 if spec.on_policy else 2)
    if (probe := measured.probe) is not None:
        settled = 0 if networks is None else networks.settled - networks.weights
        known = probe.constructed_bytes + probe.buffer_bytes + settled
        kept = max(probe.kept_bytes - known, 0)
        size = max(probe.trained_bytes - known, 0) + max(flat - probe.copied_bytes, 0)
        return PhasePart.measured(_UPDATE, size, _UPDATE_SPREAD), PhasePart.measured(_KEPT, kept, _UPDATE_SPREAD)
    if networks is None:
        return PhasePart("batch", 2 * gathered, "estimate", 4 * gathered), PhasePart.exact(_KEPT, 0)
    mapped, churn = _beside_settled(networks)
    if measured.growth is None:
        kept, most_kept = int(_HEAP_SPREAD * (churn + gathered)), int(_MOST_HEAP_SPREAD * (churn + gathered))
        most_kept += int(_MOST_HOLES * networks.settled_heap) + _ROOM_BYTES
        size, most = max(mapped + kept, 2 * gathered) + flat, int(1.15 * mapped) + most_kept + 2 * flat
        return PhasePart(_UPDATE, size, "traced", most), PhasePart(_KEPT, kept, "traced", most_kept)
    how = "measured" if measured.growth.batch == spec.batch else "traced"
    size, kept = _scaled_growth(networks, measured.growth, is_same=how == "measured")
    most, most_kept = (int((1 + _GROWTH_SPREAD) * one) + _ROOM_BYTES for one in (size + flat, kept))
    return PhasePart(_UPDATE, size + flat, how, most), PhasePart(_KEPT, kept, how, most_kept)


def _beside_settled(networks: UpdateBytes) -> tuple[int, int]:
    """Return what an update has beside what stays, in blocks of their own and in smaller ones."""
    mapped = networks.mapped - (networks.settled - networks.settled_heap)
    return max(mapped, 0), max(networks.heap - networks.settled_heap, 0)


def _scaled_growth(networks: UpdateBytes, growth: HeapGrowth, *, is_same: bool) -> tuple[int, int]:
    """Return what an update holds beside what stays, and what the heap keeps of that when the update is over.

    Both come from what real updates took. Those of a smaller batch say how much a heap is larger than what lives in it.
    """
    mapped, churn = _beside_settled(networks)
    mapped_then, churn_then = _beside_settled(growth.traced)
    held, kept = (max(size - growth.traced.settled, 0) for size in (growth.nbytes, growth.kept))
    if is_same or churn_then < MIB:
        return max(held, mapped + churn), kept
    times, fixed = churn / churn_then, max(growth.fixed, 0)
    heap, kept = max(held - mapped_then - fixed, churn_then), max(kept - fixed, 0)
    return mapped + fixed + int(heap * times), fixed + int(kept * times)


class FitVerdict(IntEnum):
    """Whether a run fits; the value is the command's exit code."""

    FITS = 0
    TIGHT = 1
    DOES_NOT_FIT = 2

    def __str__(self) -> str:
        return {0: "fits", 1: "tight", 2: "does not fit"}[self.value]


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What there is to fit into."""

    memory: tuple[Limit, ...]  # the smallest first
    vram: Limit | None = None
    disk: Limit | None = None
    shared_memory: Limit | None = None
    largest_mapping: int | None = None

    @property
    def limit_bytes(self) -> int:
        """Host memory that the run may take."""
        return self.memory[0].free_bytes


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """One need against one limit."""

    what: str
    need_bytes: int
    most_bytes: int
    limit: Limit

    @property
    def verdict(self) -> FitVerdict:
        """Compare the two."""
        if self.need_bytes > self.limit.free_bytes:
            return FitVerdict.DOES_NOT_FIT
        return FitVerdict.FITS if self.most_bytes <= self.limit.free_bytes else FitVerdict.TIGHT

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        data = {"what": self.what, "need_bytes": self.need_bytes, "most_bytes": self.most_bytes}
        limit = {"limit": self.limit.name, "free_bytes": self.limit.free_bytes}
        return data | limit | {"verdict": str(self.verdict)}


def largest_phase(phases: Sequence[RunPhase]) -> RunPhase:
    """Return the phase that decides."""
    return max((phase for phase in phases if phase.happens), key=lambda phase: phase.most_bytes)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that the arithmetic needs beside the spec; every answer of a plan is worked out by these methods."""

    measured: MeasuredCosts
    limits: MachineLimits
    need: HoldallNeed | None  # what holdall's memory would need; None: not known

    def phases(self, spec: Spec, *, holdall: bool) -> list[RunPhase]:
        """Work out the host's memory by phase, with holdall's memory or with Stable-Baselines3's buffer."""
        return host_phases(spec, self.measured, self.need if holdall else None)

    def need_bytes(self, spec: Spec, *, holdall: bool) -> int:
        """Bytes of the largest phase."""
        return max(phase.nbytes for phase in self.phases(spec, holdall=holdall) if phase.happens)

    def checks(self, spec: Spec, *, holdall: bool) -> list[LimitCheck]:
        """Compare every need of a run with its limit."""
        limits, theirs = self.limits, not holdall or self.need is None  # theirs: Stable-Baselines3's buffer is used
        worst = largest_phase(self.phases(spec, holdall=holdall))
        need = self.need_bytes(spec, holdall=holdall)
        found = [LimitCheck(f"memory, {worst.name}", need, worst.most_bytes, limits.memory[0])]
        if limits.largest_mapping is not None and theirs:
            array = max(spec.layout().arrays, key=lambda array: array.nbytes)
            whole = Limit("memory and swap, for one array", limits.largest_mapping, limits.largest_mapping)
            found.append(LimitCheck(f"array {array.name}", array.nbytes, array.nbytes, whole))
        gpu = vram_phases(spec, self.measured)
        if gpu and limits.vram is not None:
            most = largest_phase(gpu)
            found.append(LimitCheck(f"GPU memory, {most.name}", most.nbytes, most.most_bytes, limits.vram))
        if limits.shared_memory is not None and (size := shared_bytes(spec)):
            found.append(LimitCheck("shared memory", size, size, limits.shared_memory))
        if limits.disk is not None and theirs and (size := checkpoint_bytes(spec, self.measured)):
            found.append(LimitCheck("one checkpoint", size, size, limits.disk))
        return found

    def verdict(self, spec: Spec, *, holdall: bool) -> FitVerdict:
        """Return the worst of all checks."""
        return max(check.verdict for check in self.checks(spec, holdall=holdall))

    def fits(self, spec: Spec, *, holdall: bool) -> bool:
        """Whether a run fits for sure."""
        return self.verdict(spec, holdall=holdall) is FitVerdict.FITS

    def within(self, limit_bytes: int) -> PlanInputs:
        """Return the same with less host memory."""
        return replace(self, limits=replace(self.limits, memory=(Limit("profile", limit_bytes, limit_bytes),)))
