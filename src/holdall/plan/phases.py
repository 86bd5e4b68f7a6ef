"""Memory by phase: construct, collect, flatten, train, save, load.

In:  a spec, what was measured on this machine, and whose buffer keeps the experience.
Out: the parts of every phase; the need of a run is the largest phase, not the sum.
Invariant: a part says how it is known; one that is not exact has an upper bound beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdall.plan.buffers import leaves_of
from holdall.plan.experience import Experience
from holdall.plan.spec import Spec

MIB = 2**20
_ALIGNMENT_BYTES = 64
_HEAP_SPREAD = 1.6
"""How much larger a heap is than what lives in it at most: freed blocks leave holes. Measured: 1.1 to 2.2."""
_MOST_HEAP_SPREAD = 2.5
_MAPPED_FROM = 32 * MIB
_FORKED_BYTES = 6 * MIB
"""What a forked process changes of the pages that it shares."""
_PRELOADED_BYTES = 10 * MIB
_SERVER_BYTES = 6 * MIB
"""An interpreter that only starts others: the fork server, the resource tracker."""
_CONTEXT_BYTES = 766 * MIB
"""A CUDA context with its kernels, where none can be measured: what an H200 showed with torch 2.11."""
_CUDA_HOST_BYTES = 1100 * MIB
"""What CUDA's libraries add to the host's memory, where they cannot be measured: likewise."""
_MOST_CUDA_HOST_BYTES = 1500 * MIB
_BLAS_BYTES = 65 * MIB
"""Workspace of the matrix products, taken from torch's pool once."""
_CONVOLUTION_SPREAD = 1.2
"""Convolutions on a GPU ask for workspace beside what they read and write. Measured: 1.1 to 1.8."""
_POOL_SPREAD = 2.1
"""torch's pool hands out whole blocks and keeps them. Measured: up to 2.0 times what is in use."""
_LIBRARIES_SPREAD = 0.05
_PROCESSES_SPREAD = 0.15
_PROBED_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory."""

    name: str
    nbytes: int
    how: str  # exact, measured, traced, estimate
    most_bytes: int  # upper bound; the same where it is exact

    @classmethod
    def exact(cls, name: str, nbytes: int) -> Part:
        """Return a part that is known to the byte."""
        return cls(name, nbytes, "exact", nbytes)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run."""

    name: str
    parts: tuple[Part, ...]
    happens: bool = True  # False: worked out for information, and no part of this run

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def most_bytes(self) -> int:
        """Upper bound of all parts."""
        return sum(part.most_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Traced:
    """An update's bytes at one batch size; the fields are those of `trace.Traced`."""

    weights: int
    settled: int
    settled_heap: int
    mapped: int
    heap: int
    live: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out about this machine, this environment and these networks."""

    libraries: int = 0
    libraries_anonymous: int = 0  # after the imports: what a process that was not forked cannot share
    traced_batch: int = 0
    traced: Traced | None = None
    traced_twice: Traced | None = None
    env_first: int | None = None  # None: no environment was made
    env_first_anonymous: int = 0
    env_each: int = 0
    probe: Mapping[str, Any] | None = None  # the answer of `update.measured`
    vram_context: int | None = None

    def networks(self, batch: int) -> Traced | None:
        """Return the trace for a batch; between and beyond the two that were traced, on the line through them."""
        if self.traced is None or self.traced_twice is None or batch == self.traced_batch:
            return self.traced
        share = batch / self.traced_batch - 1
        pairs = zip(_values(self.traced), _values(self.traced_twice), strict=True)
        return Traced(*(max(int(once + (twice - once) * share), 0) for once, twice in pairs))


def _values(traced: Traced) -> tuple[int, ...]:
    return traced.weights, traced.settled, traced.settled_heap, traced.mapped, traced.heap, traced.live


def host_phases(spec: Spec, measured: Measured, holdall: Experience | None = None) -> list[Phase]:
    """Work out host memory by phase; with holdall's memory in place of Stable-Baselines3's buffer if given."""
    layout = spec.layout()
    on_gpu = spec.device.startswith("cuda")
    networks = None if on_gpu else measured.networks(spec.batch)
    around = _around(spec, measured)
    weights = [] if networks is None else [Part.exact("network weights", networks.weights)]
    settled = [] if networks is None else [_settled(networks)]
    buffer = _buffer(spec, holdall)
    objects = [Part.exact("infos of the buffer", layout.object_bytes)] if layout.object_bytes and not holdall else []
    steady = [*around, *settled, buffer]
    phases = [Phase("construct", (*around, *weights, *objects)), Phase("collect", tuple(steady))]
    copies = 0 if holdall else layout.flatten_bytes
    if spec.on_policy:
        phases.append(Phase("flatten", (*steady, Part.exact("rollout, copied", copies))))
    phases.append(Phase("train", (*steady, *_update(spec, networks, measured, 0 if holdall else copies))))
    if spec.on_policy:
        return [*phases, Phase("save", tuple(steady))]
    loaded = buffer if holdall else Part.exact("replay buffer, loaded", layout.nbytes)
    return [*phases, Phase("save", tuple(steady)), Phase("load", (*around, *settled, loaded), spec.saves_buffer)]


def vram_phases(spec: Spec, measured: Measured) -> list[Phase]:
    """Work out a GPU's memory by phase; empty where the run uses none."""
    networks = measured.networks(spec.batch)
    if not spec.device.startswith("cuda") or networks is None:
        return []
    context = measured.vram_context
    known = _CONTEXT_BYTES if context is None else context
    base = Part("CUDA context and libraries", known, "estimate" if context is None else "measured", int(1.1 * known))
    activations = networks.live - networks.settled
    used, kept = int(_CONVOLUTION_SPREAD * activations), int(_POOL_SPREAD * activations) + 128 * MIB
    pool = Part("batch, activations and workspace", used + _BLAS_BYTES, "traced", kept + _BLAS_BYTES)
    return [
        Phase("construct", (base, Part.exact("network weights", networks.weights))),
        Phase("train", (base, _settled(networks), pool)),
    ]


def checkpoint_bytes(spec: Spec, measured: Measured) -> int:
    """Bytes on disk of one checkpoint; a buffer is written whole, however empty it is."""
    networks = measured.traced
    # Weights and the optimizer's two moments, not the gradients.
    model = 0 if networks is None else networks.settled - networks.weights
    return model + (spec.layout().nbytes if spec.saves_buffer and not spec.on_policy else 0)


def process_bytes(spec: Spec, measured: Measured) -> int:
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


def _around(spec: Spec, measured: Measured) -> list[Part]:
    """Libraries and environments: what is there in every phase."""
    if measured.probe is not None:
        return _probed_around(measured.probe, measured)
    libraries = measured.libraries
    parts = [_rough("interpreter and libraries", libraries, "measured", _LIBRARIES_SPREAD)]
    if spec.device.startswith("cuda") and measured.vram_context is None:
        parts.append(Part("CUDA's libraries", _CUDA_HOST_BYTES, "estimate", _MOST_CUDA_HOST_BYTES))
    if spec.vec_env != "dummy":
        name = f"{spec.num_envs} processes ({spec.method})"
        parts.append(_rough(name, process_bytes(spec, measured), "measured", _PROCESSES_SPREAD))
    elif measured.env_first is not None:
        size = measured.env_first + (spec.num_envs - 1) * measured.env_each
        parts.append(_rough(f"{spec.num_envs} environments", size, "measured", _PROCESSES_SPREAD))
    return parts


def _probed_around(probe: Mapping[str, Any], measured: Measured) -> list[Part]:
    weights = 0 if measured.traced is None else measured.traced.weights
    held = max(int(probe["constructed"]) - weights, 0)
    parts = [_rough("interpreter, libraries, environments", held, "measured", _PROBED_SPREAD)]
    if probe["processes"]:
        unique = sum(int(child["unique"]) for child in probe["processes"])
        parts.append(_rough(f"{len(probe['processes'])} processes", unique, "measured", _PROBED_SPREAD))
    return parts


def _buffer(spec: Spec, holdall: Experience | None) -> Part:
    layout = spec.layout()
    if holdall is None:
        name = "rollout buffer" if spec.on_policy else "replay buffer"
        return Part.exact(name, layout.resident_bytes(spec.total_timesteps))
    filled = min(spec.total_timesteps or layout.transitions, layout.transitions)
    how = "measured" if holdall.steps else "estimate"
    return Part("holdall's memory", holdall.need(filled), how, holdall.most(filled))


def _settled(networks: Traced) -> Part:
    return Part.exact("weights, gradients, optimizer", networks.settled)


def _update(spec: Spec, networks: Traced | None, measured: Measured, copies: int) -> list[Part]:
    """What an update holds beyond what stays between updates."""
    if measured.probe is not None:
        settled = 0 if networks is None else networks.settled - networks.weights
        known = int(measured.probe["constructed"]) + int(measured.probe["buffer_bytes"]) + settled
        return [_rough("batch and activations", max(int(measured.probe["trained"]) - known, 0), "measured", 0.1)]
    gathered = _gathered(spec)
    if networks is None:
        return [_rough("batch", 2 * gathered, "estimate", 1.0)]
    churn = max(networks.heap - networks.settled_heap, 0)
    mapped = max(networks.mapped - (networks.settled - networks.settled_heap), 0)
    if gathered < _MAPPED_FROM:
        churn += gathered
    if copies < _MAPPED_FROM:  # freed after the flattening, but the heap stays as large
        churn += copies
    size = max(mapped + int(_HEAP_SPREAD * churn), 2 * gathered)
    most = max(int(1.15 * mapped + _MOST_HEAP_SPREAD * churn), 2 * gathered) + 16 * MIB
    return [Part("batch and activations", size, "traced", most)]


def _gathered(spec: Spec) -> int:
    """Bytes of one batch of observations as the buffer hands it over, before it becomes tensors."""
    once = sum(leaf.nbytes for leaf in leaves_of(spec.observation, "obs"))
    return spec.batch * once * (1 if spec.on_policy else 2)


def _rough(name: str, nbytes: int, how: str, spread: float) -> Part:
    return Part(name, nbytes, how, int(nbytes * (1 + spread)))
