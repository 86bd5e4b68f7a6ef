"""The report of a probe: the objects that a command had built when it was stopped, as dataclasses and as JSON.

The command's process writes the report, and holdall's process reads it. Reading creates only dataclasses of plain
values, so a report cannot run code.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_FLATTENED = frozenset({"observations", "actions", "values", "log_probs", "advantages", "returns"})
"""Arrays that `RolloutBuffer.get` of Stable-Baselines3 flattens with a copy, one array after the other."""

Plain = dict[str, Any]
"""Settings by name: numbers, strings, booleans, None, and lists and dicts of these."""


@dataclass(frozen=True)
class FoundArray:
    """A NumPy, torch or JAX array."""

    name: str
    """Attribute or variable, such as `observations` or `next_observations.image`."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str = "cpu"
    is_on_disk: bool = False
    """Whether a file backs the array, as in `numpy.memmap`."""
    resident_bytes: int = 0
    """Bytes of the array's pages that are in RAM. Pages that were never written are not in RAM."""


@dataclass(frozen=True)
class FoundBuffer:
    """An object with experience: a buffer of a library, an owner of large arrays, a deque or a list."""

    owner: str
    """Variable or attribute that refers to the object, such as `model.replay_buffer`."""
    class_name: str
    kind: str
    """`replay`, `rollout`, `arrays`, `deque` or `list`."""
    nbytes: int
    """Bytes when the buffer is full. If the capacity of a list is unknown: bytes now."""
    rows: int | None
    """Vectorised steps, or items of a deque, that fit. None: unknown."""
    n_envs: int
    nbytes_now: int
    """Bytes that are allocated now. Untouched pages of an array count."""
    items_now: int
    """Rows or items that are filled."""
    arrays: tuple[FoundArray, ...] = ()
    is_exact: bool = True
    """Whether `nbytes` is exact. False: it was computed from sampled items or from another buffer's arrays."""
    settings: Plain = field(default_factory=dict)
    """Plain attributes of the object, such as `optimize_memory_usage`."""

    @property
    def transitions(self) -> int | None:
        """Return the transitions that fit, or None if that is unknown."""
        return None if self.rows is None else self.rows * self.n_envs

    @property
    def package(self) -> str:
        """Return the top-level package of the buffer's class; empty for variables."""
        return self.class_name.partition(".")[0]

    @property
    def is_sb3(self) -> bool:
        """Return whether the buffer is one of Stable-Baselines3 or sb3-contrib."""
        return self.package in {"stable_baselines3", "sb3_contrib"}

    @property
    def flattened_bytes(self) -> int:
        """Return the bytes of the largest array that Stable-Baselines3 copies to flatten a rollout.

        A rollout of one environment or of one step is flattened without a copy.
        """
        if self.kind != "rollout" or 1 in {self.n_envs, self.rows}:
            return 0
        return max((array.nbytes for array in self.arrays if array.name.partition(".")[0] in _FLATTENED), default=0)

    @property
    def bytes_on(self) -> dict[str, int]:
        """Return the bytes by device. Arrays in files are counted under `disk`."""
        if not self.arrays:
            return {"cpu": self.nbytes}
        sizes: dict[str, int] = {}
        for array in self.arrays:
            place = "disk" if array.is_on_disk else array.device
            sizes[place] = sizes.get(place, 0) + array.nbytes
        rest = self.nbytes - sum(sizes.values())
        sizes["cpu"] = sizes.get("cpu", 0) + rest
        return sizes


@dataclass(frozen=True)
class FoundMemory:
    """A memory of holdall, by itself or inside one of holdall's buffers."""

    owner: str
    class_name: str
    """The buffer's class if a buffer contains the memory, such as `holdall.sb3.replay.ReplayBuffer`."""
    capacity: int
    n_envs: int
    budget: str | int | None
    """As passed: `"8GiB"`, bytes, `"auto"` or None."""
    prefer: str
    spill_dir: str | None
    store_device: str | None
    transitions: int
    held_bytes: int
    disk_bytes: int
    plain_bytes: int
    """Bytes that a plain layout would take for these transitions."""


@dataclass(frozen=True)
class FoundCallback:
    """A callback of Stable-Baselines3."""

    class_name: str
    settings: Plain
    is_passed: bool
    """Whether `learn` was given the callback, directly or inside another callback."""
    shares_env: bool = False
    """Whether the callback evaluates on the environment that a model is trained on."""

    @property
    def kind(self) -> str:
        """Return the name of the class without its module."""
        return self.class_name.rpartition(".")[2]

    def count(self, name: str) -> int | None:
        """Return a setting that is a positive whole number, or None."""
        return _get_positive(self.settings, name)


@dataclass(frozen=True)
class FoundModel:
    """A model of Stable-Baselines3 or sb3-contrib."""

    class_name: str
    policy_class: str
    settings: Plain
    """Plain attributes, such as `batch_size` and `learning_starts`; schedules as their first value."""
    n_envs: int
    device: str
    observation_space: Plain | None
    action_space: Plain | None
    total_timesteps: int | None
    """Argument of `learn`; None if the command was stopped elsewhere."""
    parameter_bytes: int
    buffer_owner: str
    """`owner` of the buffer or memory that belongs to this model; empty if there is none."""
    base_class: str = ""
    """The class of Stable-Baselines3 or sb3-contrib that the model's class is, or derives from."""
    environment: FoundEnvironment | None = None
    """The environment that the model is trained on."""
    is_on_policy: bool = False
    """Whether the model collects rollouts."""

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm, such as `SAC`, also for a subclass of it."""
        return (self.base_class or self.class_name).rpartition(".")[2]

    def count(self, name: str) -> int | None:
        """Return a setting that is a positive whole number, or None."""
        return _get_positive(self.settings, name)

    @property
    def rollout_transitions(self) -> int | None:
        """Return the transitions of one rollout, or None if the model collects none."""
        steps = self.count("n_steps")
        return steps * self.n_envs if self.is_on_policy and steps else None

    @property
    def train_freq(self) -> tuple[int, str] | None:
        """Return the number and unit (`step` or `episode`) between two phases of updates; None for on-policy models."""
        value = self.settings.get("train_freq")
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], int):
            return value[0], str(value[1])
        return (value, "step") if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def run_steps(self) -> int | None:
        """Return the steps of a run that starts from zero; None if unknown, or if the model was trained before.

        A resumed run has made steps before this call of `learn`, so `total_timesteps` is not the length of the run.
        """
        return None if self.settings.get("num_timesteps") else self.total_timesteps


@dataclass(frozen=True)
class FoundEnvironment:
    """One environment or vector environment, with its wrappers."""

    class_names: tuple[str, ...]
    """The outermost wrapper first."""
    env_id: str
    n_envs: int
    observation_space: Plain | None
    action_space: Plain | None
    settings: Plain
    """Plain attributes of all wrappers, such as `n_stack`; outer wrappers have precedence."""
    start_method: str = ""
    """Start method of the worker processes; empty if there are none."""
    nbytes_each: int = 0
    """Bytes of Python objects and arrays of one environment; 0 if environments run in processes of their own."""


@dataclass(frozen=True)
class FoundOptimizer:
    """An optimizer of torch."""

    class_name: str
    parameter_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class FoundProcess:
    """A process of the command, read from outside."""

    pid: int
    name: str
    unique_bytes: int
    is_reporter: bool


@dataclass(frozen=True)
class FailedAllocation:
    """An allocation that failed."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    library: str
    is_exact: bool
    """False where the library's message has a rounded size."""


@dataclass(frozen=True)
class StoredSteps:
    """Memory that holdall needs for steps of this run."""

    steps: int
    """Transitions that were played or recorded."""
    raw_bytes: float
    """Bytes per transition without compression. Slices that observations share, such as frames, are stored once."""
    compressed_bytes: float | None
    """Bytes per transition with compression; None if it was not measured."""
    worst_bytes: float | None
    """The largest `compressed_bytes` of several trials."""
    working_bytes: int
    """Bytes of the process that belong to no transition: batches, tables, codecs."""


@dataclass(frozen=True)
class MeasuredUpdate:
    """A real update, measured in the command's process."""

    batch_size: int
    peak_bytes: int
    """Growth of the resident set at the peak of the update."""
    kept_bytes: int
    """Growth that stayed after the update."""
    gpu_peak_bytes: int = 0
    gpu_reserved_bytes: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Report of the objects that a command had built when it was stopped."""

    stopped_by: str
    """The event that stopped the command, in words."""
    trigger: str
    """Name of the trigger, `error`, `exit`, `timeout`, `memory` or `killed`."""
    after_s: float = 0.0
    """Seconds from the start of the command to the stop."""
    error: str | None = None
    """Traceback or message, if the command failed."""
    allocation: FailedAllocation | None = None
    models: tuple[FoundModel, ...] = ()
    callbacks: tuple[FoundCallback, ...] = ()
    buffers: tuple[FoundBuffer, ...] = ()
    memories: tuple[FoundMemory, ...] = ()
    arrays: tuple[FoundArray, ...] = ()
    """Large arrays that belong to no buffer."""
    environments: tuple[FoundEnvironment, ...] = ()
    optimizers: tuple[FoundOptimizer, ...] = ()
    processes: tuple[FoundProcess, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the libraries that were imported."""
    env_steps: int = 0
    resident_bytes: int = 0
    """Resident set of the process that reported, before the inspection."""
    peak_bytes: int = 0
    """Largest resident set of that process until then."""
    probe_bytes: int = 0
    """Bytes of the resident set that the probe itself took, for copies of added steps."""
    update: MeasuredUpdate | None = None
    stored: StoredSteps | None = None
    notes: tuple[str, ...] = ()
    """Sentences about everything that could not be read or measured."""
    output: str = ""
    """The last lines that the command printed."""

    @property
    def learning_models(self) -> tuple[FoundModel, ...]:
        """Return the models that `learn` was called for, or all models if there is none."""
        return tuple(model for model in self.models if model.total_timesteps is not None) or self.models

    @property
    def passed_callbacks(self) -> list[FoundCallback]:
        """Return the callbacks that `learn` was given, directly or inside another callback."""
        return [callback for callback in self.callbacks if callback.is_passed]

    def find_buffer(self, model: FoundModel) -> FoundBuffer | None:
        """Return the buffer of a model, or None if the model has none or has one of holdall's memories."""
        return next((buffer for buffer in self.buffers if buffer.owner == model.buffer_owner), None)

    def find_memory(self, model: FoundModel) -> FoundMemory | None:
        """Return holdall's memory that belongs to a model, or None."""
        return next((memory for memory in self.memories if memory.owner == model.buffer_owner), None)

    @property
    def is_ready(self) -> bool:
        """Return whether the command was about to train when it was stopped."""
        return self.trigger not in {"error", "exit", "timeout", "memory", "killed"}

    def as_json(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Read a snapshot that `as_json` wrote. Raise ValueError or TypeError for any other text."""
        return _read(cls, json.loads(text))


def _get_positive(settings: Plain, name: str) -> int | None:
    """Return a setting that is a positive whole number, or None."""
    value = settings.get(name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None


def _read(cls: type[T], data: Any) -> T:
    """Return an instance of the dataclass `cls`. Unknown names are ignored."""
    if not isinstance(data, dict):
        raise TypeError(f"{cls.__name__} must be an object, not {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    names = [one.name for one in fields(cls) if one.name in data]  # type: ignore[arg-type]
    return cls(**{name: _convert(hints[name], data[name]) for name in names})


def _convert(hint: Any, value: Any) -> Any:
    """Return a JSON value as the type that an annotation names."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        choices = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
        return _convert(choices[0], value) if len(choices) == 1 else value
    if is_dataclass(hint):
        return _read(typing.cast("type[Any]", hint), value)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, one) for one in value)
    return value
