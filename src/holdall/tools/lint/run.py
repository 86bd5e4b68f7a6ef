"""What rules read: a training run as far as it is known, the machine that it is compared with, the bytes of its buffer.

In:  what was read from a script, a hyperparameter file or a live model; this machine, or what the user says of another.
Out: values, the algorithm's arguments and defaults, settings with their place; limits; the layout of the buffer.
Invariant: a value that is not certain is UNKNOWN, or names every candidate; no rule sees a guess. Memory is the
smallest total of RAM and every enclosing control group; a budget replaces both. Where the action space is not known,
its bytes are left out and the size is a lower bound.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from holdall.errors import HoldallError
from holdall.machine import control_groups, disk, shared_memory
from holdall.schema import Leaf
from holdall.threads import usable_cores
from holdall.tools.lint.finding import SourceRange
from holdall.tools.plan import spec
from holdall.tools.plan.spec import ALGORITHM_CLASSES, Algorithm

# The names that rl-baselines3-zoo gives to files and folders.
_MOST_VARIANTS = 4
_SIZES = {"buffer_size", "n_steps", "replay_buffer_class", "optimize_memory_usage", "replay_buffer_kwargs"}
_ZOO_NAMES = {name.lower(): name for name in ALGORITHM_CLASSES} | {"ppo_lstm": "RecurrentPPO"}


_SQUARE = 64  # pixels of a side, from which on a square is taken for a picture
_PICTURE = re.compile(r"frame|image|img|screen|pixel", re.IGNORECASE)


class Unknown:
    """The value is not known from the file."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several values: a loop over constants, a search space, the branches of a condition."""

    values: tuple[object, ...]
    conditions: tuple[str, ...] = field(default=(), compare=False)  # when each of them holds; empty: always


@dataclass(frozen=True, slots=True)
class KnownLength:
    """A sequence of known length whose items are not constants."""

    length: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Something of another module, or a class or function of this one, by its full name: `numpy.uint8`."""

    dotted: str

    @property
    def last(self) -> str:
        """The name without its modules."""
        return self.dotted.rpartition(".")[2]


def whole(value: object) -> int | None:
    """Return a known whole number (1e6 is one), or None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


class NotKnownError(Exception):
    """What has to be known for an answer is not."""


def known(value: object) -> int:
    """Return a whole number; NotKnownError if it is none, or not known."""
    number = whole(value)
    if number is None:
        raise NotKnownError
    return number


def candidates(value: object) -> tuple[int, ...]:
    """Return every whole number that the value can be; none if one of them is not known."""
    values = value.values if isinstance(value, OneOf) else (value,)
    numbers = [whole(one) for one in values]
    return () if None in numbers else tuple(number for number in numbers if number is not None)


def algorithm_by_import(dotted: str) -> Algorithm | None:
    """Return the algorithm that a full name such as `stable_baselines3.PPO` means."""
    package, _, rest = dotted.partition(".")
    return ALGORITHM_CLASSES.get(rest.rpartition(".")[2]) if package in {"stable_baselines3", "sb3_contrib"} else None


def algorithm_by_zoo_name(word: str) -> Algorithm | None:
    """Return the algorithm that a file or key calls `ppo` or `PPO`."""
    return ALGORITHM_CLASSES.get(_ZOO_NAMES.get(word.lower(), ""))


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one argument, and where it stands."""

    value: object
    place: SourceRange
    is_given: bool = True  # False: the library's default
    divisors: tuple[int, ...] | None = None  # what its expression divides by; None: there is no expression to read


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """An observation or action space, as leaves; bounds where they are known."""

    leaves: tuple[Leaf, ...]
    is_dict: bool
    place: SourceRange
    bounds: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    counts: tuple[int, ...] = ()  # of a discrete space: how many values each of its numbers has
    is_whole: bool = True  # False: there are further leaves, which are not known

    @property
    def nbytes(self) -> int:
        """Bytes of one value of the whole space."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """Numbers in one value of the whole space."""
        return sum(prod(leaf.shape) for leaf in self.leaves)

    @property
    def images(self) -> tuple[Leaf, ...]:
        """The leaves that Stable-Baselines3 takes for images: three axes, uint8, 0 to 255."""
        return tuple(leaf for leaf in self.leaves if len(leaf.shape) == 3 and leaf.dtype == np.uint8)

    def stacked(self, count: int) -> SpaceInfo:
        """Return the space of `count` values side by side along the last axis."""
        wide = [replace(leaf, shape=(*leaf.shape[:-1], leaf.shape[-1] * count)) for leaf in self.leaves if leaf.shape]
        return replace(self, leaves=tuple(wide))


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of a run."""

    count: object = UNKNOWN
    vector: str = ""  # "single", "dummy", "subproc", "async"; empty: not known
    start_method: object = None  # of subprocesses; None: the library's choice
    observation: SpaceInfo | None = None  # None: not known
    action: SpaceInfo | None = None
    stack: int = 1  # frames side by side in one observation, as far as wrappers say
    episode_steps: object = UNKNOWN  # the time limit
    place: SourceRange | None = None
    origin: object = field(default=None, repr=False)  # the same for the same object; None where that is not known
    is_lazy: bool = False  # a stack's frames are objects that it shares with the stacks around it
    env_id: str = ""
    returned: SpaceInfo | None = None  # what reset and step return, where that is not what is declared
    autoreset: str | None = field(default=None, repr=False)  # how a vector of Gymnasium resets, where that is known

    @property
    def number(self) -> int | None:
        """How many, if known: 1 or more."""
        number = whole(self.count)
        return number if number is not None and number > 0 else None


@dataclass(frozen=True, slots=True)
class Callback:
    """A callback: its class and its arguments."""

    kind: str
    settings: Mapping[str, Setting]
    place: SourceRange
    environments: Environments | None = None  # those it evaluates on

    def value(self, name: str) -> object:
        """The value of an argument that was given; UNKNOWN otherwise."""
        return self.settings[name].value if name in self.settings else UNKNOWN


@dataclass(frozen=True, slots=True)
class LearnCall:
    """One call of `learn`."""

    total_timesteps: Setting
    callbacks: tuple[Callback, ...]
    place: SourceRange
    repeats_model: bool = False  # in a loop that the model is made before
    reset_num_timesteps: object = True


@dataclass(frozen=True, slots=True)
class ConfiguredRun:
    """A model and what it is trained with."""

    title: str
    algorithm: Algorithm
    given: Mapping[str, Setting]
    environments: Environments
    learns: tuple[LearnCall, ...]
    place: SourceRange
    has_more: bool = False  # further arguments were passed that could not be read
    condition: str = ""  # under which the model is made so
    picked: frozenset[str] = frozenset()  # arguments that have several values: two of them may never meet

    def setting(self, name: str) -> Setting:
        """What an argument is: given, the default, or UNKNOWN."""
        if name in self.given:
            return self.given[name]
        if self.has_more or name not in self.algorithm.defaults:
            return Setting(UNKNOWN, self.place, is_given=False)
        return Setting(self.algorithm.defaults[name], self.place, is_given=False)

    def value(self, name: str) -> object:
        """The value of an argument."""
        return self.setting(name).value

    def whole(self, name: str) -> int | None:
        """The value of an argument as a whole number, if it is certain."""
        return whole(self.value(name))

    def count(self, name: str) -> int | None:
        """The value of an argument as a number of things, if it is certain: 1 or more."""
        number = self.whole(name)
        return number if number is not None and number > 0 else None

    def place_of(self, *names: str) -> SourceRange:
        """Where the first of these arguments that was given stands, or else the run."""
        return next((self.given[name].place for name in names if name in self.given), self.place)

    @property
    def total_timesteps(self) -> int | None:
        """The steps of its one call of `learn`; None if there are several, or it is not known."""
        if len(self.learns) != 1 or self.learns[0].repeats_model:
            return None
        steps = whole(self.learns[0].total_timesteps.value)
        return steps if steps is not None and steps > 0 else None

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The callbacks of all calls of `learn`."""
        return tuple(callback for learn in self.learns for callback in learn.callbacks)

    @property
    def variants(self) -> tuple[ConfiguredRun, ...]:
        """The run once for every value of its arguments: those of a search, or of the branches that set them."""
        counts = self.environments.count
        found = [self]
        is_search = isinstance(counts, OneOf) and not any(counts.conditions)  # all of them happen, one after the other
        if isinstance(counts, OneOf) and is_search and not self.algorithm.on_policy:  # M14 is about rollouts
            found = [replace(self, environments=replace(self.environments, count=one)) for one in counts.values]
        elif isinstance(counts, OneOf) and not is_search and counts.conditions[0] == "":  # what holds by default
            found = [replace(self, environments=replace(self.environments, count=counts.values[0]))]
        for name, setting in sorted(self.given.items(), key=lambda one: one[0] not in _SIZES):  # what memory depends on
            if isinstance(setting.value, OneOf) and len(found) <= _MOST_VARIANTS:
                found = [run.chosen(name, at) for run in found for at in range(len(setting.value.values))]
        return tuple(found)

    def chosen(self, name: str, at: int) -> ConfiguredRun:
        """Return the run with one of the values that an argument may have."""
        setting = self.given[name]
        if not isinstance(setting.value, OneOf):
            return self
        given = {**self.given, name: replace(setting, value=setting.value.values[at])}
        text = setting.value.conditions[at] if setting.value.conditions else ""
        both = " and ".join(dict.fromkeys(filter(None, (self.condition, text))))
        return replace(self, given=given, condition=both, picked=self.picked | {name})


@dataclass(frozen=True, slots=True)
class StoredField:
    """One thing that a buffer keeps of every transition."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of one transition's."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_image(self) -> bool:
        """Whether it looks like a picture, or a stack of them."""
        sides = sorted(self.shape)
        if len(sides) == 2:
            return sides[0] >= 32 and (sides[0] == sides[1] >= _SQUARE or bool(_PICTURE.search(self.name)))
        return len(sides) >= 3 and sides[-1] >= 32 and sides[-2] >= 24 and sides[0] <= 16


@dataclass(frozen=True, slots=True)
class PlainBuffer:
    """A buffer that is no part of a model of Stable-Baselines3."""

    title: str
    rows: int | None
    nbytes: int  # once it is full
    fields: tuple[StoredField, ...]
    place: SourceRange
    condition: str = ""
    library: str = ""  # cleanrl, sb3, torchrl, tianshou; empty: the program's own
    is_container: bool = False  # a deque or list of objects
    is_buffer: bool = False  # False: arrays that may be something else
    is_on_gpu: bool = False
    is_on_disk: bool = False
    is_exact: bool = True
    stack: int = 1

    @property
    def repeated_bytes(self) -> int:
        """Bytes that hold what is there already: next observations, and frames of stacks."""
        if self.is_container or self.rows is None:
            return 0
        largest = max(self.fields, key=lambda one: one.nbytes, default=None)
        if largest is None:
            return 0
        alike = [one for one in self.fields if (one.shape, one.dtype) == (largest.shape, largest.dtype)]
        copies = min(len(alike), 2)
        share = 1 - 1 / (copies * self.stack)
        return int(self.rows * largest.nbytes * copies * share)


_UNITS = ((10**9, "GB", 2**30, "GiB"), (10**6, "MB", 2**20, "MiB"), (10**3, "kB", 2**10, "KiB"))
NO_ACTION = Leaf("", (0,), np.dtype(np.uint8))


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule may compare a configuration with; None stands for what is not known."""

    cores: int
    ram_bytes: int
    limit_bytes: int
    limit_name: str
    vram_bytes: int | None = None
    shm_bytes: int | None = None
    disk_bytes: int | None = None
    python: tuple[int, int] = (3, 11)
    sb3: spec.Version | None = None

    @property
    def is_contained(self) -> bool:
        """Whether a control group allows less than the machine has."""
        return self.limit_bytes < self.ram_bytes and self.limit_name.startswith("control group")


def detect_machine(
    budget_bytes: int | None = None, vram_bytes: int | None = None, sb3: spec.Version | None = None
) -> Machine:
    """Describe this machine; what the caller says goes before what is found."""
    ram = int(psutil.virtual_memory().total)
    limits = [(ram, "RAM"), *((group.total_bytes, group.name) for group in control_groups())]
    limit, name = min(limits) if budget_bytes is None else (budget_bytes, "the budget")
    shm, free = shared_memory(), disk(Path.cwd())
    return Machine(
        cores=usable_cores(),
        ram_bytes=max(ram, limit),
        limit_bytes=limit,
        limit_name=name,
        vram_bytes=vram_bytes,
        shm_bytes=shm.total_bytes if shm else None,
        disk_bytes=free.free_bytes if free else None,
        python=sys.version_info[:2],
        sb3=sb3 or spec.installed_version(),
    )


def sized(count: float) -> str:
    """Write bytes in decimal and in binary units: `42.63 GB (39.70 GiB)`."""
    for size, name, binary, binary_name in _UNITS:
        if abs(count) >= size:
            return f"{count / size:,.2f} {name} ({count / binary:,.2f} {binary_name})"
    return f"{count:,.0f} B"


def percent(part: float, of: float) -> str:
    """Write a share: `83 %`."""
    return f"{100 * part / of:.0f} %"


@dataclass(frozen=True, slots=True)
class BufferNeed:
    """What a run's buffer takes."""

    layout: spec.BufferLayout
    resident_bytes: int  # once as full as this run makes it
    peak_bytes: int  # while a rollout is flattened; the same where nothing is
    is_exact: bool  # False: a lower bound
    is_certain: bool  # False: the run may be too short to fill it

    @property
    def words(self) -> str:
        """`takes`, or `takes at least`."""
        return "takes" if self.is_exact else "takes at least"


def buffer_need(run: ConfiguredRun, machine: Machine) -> BufferNeed | None:
    """Return what the buffer of a run takes, or None if that is not known."""
    observation, count = run.environments.observation, run.environments.number
    counts = run.environments.count
    if count is None and not run.algorithm.on_policy:  # a replay buffer has the same size with any number
        count = next(filter(None, map(whole, counts.values)), 1) if isinstance(counts, OneOf) else 1
    if observation is None or count is None:
        return None
    try:
        layout = _layout(run, observation, count, machine.sb3)
    except HoldallError:  # Stable-Baselines3 refuses it too; other rules say so
        return None
    if layout is None:
        return None
    # A rollout is always collected to its end; a replay buffer holds what there was to add.
    steps = None if run.algorithm.on_policy else run.total_timesteps
    resident, is_certain = layout.resident_bytes(steps), run.algorithm.on_policy or steps is not None
    is_known = run.environments.action is not None and observation.is_whole
    is_exact = is_known and run.algorithm.has_plain_buffer  # others keep masks, or states
    return BufferNeed(layout, resident, resident + layout.flatten_bytes, is_exact, is_certain)


def buffer_of(run: ConfiguredRun, machine: Machine) -> PlainBuffer | None:
    """Return the buffer of a run as any other; None if it is not known."""
    needed = buffer_need(run, machine)
    if needed is None:
        return None
    layout, name = needed.layout, "rollout" if run.algorithm.on_policy else "replay buffer"
    fields = tuple(StoredField(one.name, one.shape[2:], one.dtype) for one in layout.arrays)
    return PlainBuffer(
        title=f"the {name}", rows=layout.transitions, nbytes=layout.nbytes, fields=fields,
        place=run.place_of("buffer_size", "n_steps"), library="rollout" if run.algorithm.on_policy else "model",
        is_buffer=True, is_exact=needed.is_exact, stack=run.environments.stack,
    )  # fmt: skip


def _layout(
    run: ConfiguredRun, observation: SpaceInfo, count: int, sb3: spec.Version | None
) -> spec.BufferLayout | None:
    """Lay out the run's buffer; None where a size is not known, or the class is not Stable-Baselines3's."""
    steps = run.count("n_steps")
    given = run.value("rollout_buffer_class" if run.algorithm.on_policy else "replay_buffer_class")
    action = run.environments.action.leaves[0] if run.environments.action else NO_ACTION
    if steps is None:
        return None
    kind = spec.default_class(run.algorithm.on_policy, observation.is_dict, steps)
    if run.algorithm.on_policy:
        if given is not None:
            return None
        return spec.rollout_buffer(observation.leaves, action, steps, count, buffer_class=kind, sb3=sb3)
    if isinstance(given, Reference) and given.dotted.startswith("stable_baselines3"):
        kind, given = given.last, None
    if kind.startswith("Her") and not observation.is_dict:
        return None  # Stable-Baselines3 refuses it
    size, optimised = run.count("buffer_size"), run.value("optimize_memory_usage")
    kwargs = {} if (extra := run.value("replay_buffer_kwargs")) is None else extra
    if size is None or given is not None or not isinstance(optimised, bool) or not isinstance(kwargs, dict):
        return None
    options: dict[str, Any] = {"buffer_class": kind, "optimize_memory_usage": optimised, "sb3": sb3}
    options["handle_timeout_termination"] = kwargs.get("handle_timeout_termination", True) is not False
    return spec.replay_buffer(observation.leaves, action, size, count, **options)
