"""The contract of a sampler: what it sees of a memory, and what it returns.

In:  the ids that are held, and the fields that every transition has.  Out: the recipe of a batch.
A sampler of single transitions (Uniform, Prioritized) can be passed as `by` to one that builds on single transitions
(NStep, Sequence, Hindsight). docs/samplers.md shows how to write one; `holdall.testing` has its contract tests.

In its second half what a memory does with its sampler and its generator: makes them, saves them, goes on with them.
Invariant: every number of a saved state comes back as it was. Whole numbers beyond 53 bits and NaN are written in
hexadecimal, since JSON's readers cut or refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_number
from holdall.batch import Draw, Validity, ids_of_any_shape, require_held
from holdall.errors import ArgumentError, CheckpointError, DamageError, TransitionIdError
from holdall.sampling.row_order import LANE, Flags, Ids, RowOrder
from holdall.schema import as_array, count_of, dtype_name, dtype_of
from holdall.storage import Buffer, CompressedParts, Read, Record, array_of, parsed, require_kind, unparsed

State = dict[str, Any]
"""Arrays and plain numbers by name."""


class SmallFields(Validity, Protocol):
    """The fields of a transition other than observations, read for arrays of held ids of any shape."""

    @property
    def flags_changed(self) -> int:
        """How often flags were set again after they were added."""

    def are_ends(self, ids: Ids) -> Flags:
        """Return which ids are the last of their episodes: terminated or truncated."""

    def rewards(self, ids: Ids) -> NDArray[Any]:
        """Return the rewards, in their own dtype."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a memory holds at the moment of a draw: the ids from `first_id` up to `next_id` - 1.

    The step after transition i in the same lane is i + `lanes`, unless `order` says which it is. `capacity` is the
    most ids that are ever held, so that no two held ids are equal modulo `capacity`.
    """

    first_id: int
    next_id: int
    lanes: int
    capacity: int
    fields: SmallFields
    only: Callable[[Held, Ids], Flags] | None = None
    order: RowOrder | None = None

    def limited(self, only: Callable[[Held, Ids], Flags]) -> Held:
        """Return the same, of which only some ids may be drawn."""
        return replace(self, only=only)

    @property
    def allows_all(self) -> bool:
        """Whether every id may be drawn."""
        return self.only is None and self.fields.all_valid

    def allows(self, ids: Ids) -> Flags:
        """Return which of some held ids may be drawn."""
        valid = self.fields.are_valid(ids)
        return valid if self.only is None else valid & self.only(self, ids)

    def steps(self, ids: Ids, first: int, stop: int) -> tuple[Ids, Flags]:
        """Return the steps `first` to `stop` - 1 after each of `ids`, (ids, steps), and which are held.

        All lie behind `ids`, or all before them: `first` is at least 0, or `stop` at most 0.
        """
        away = np.arange(first, stop)
        if self.order is not None:
            return self.order.at(self.order.places(ids)[:, None] + away)
        steps = ids[:, None] + self.lanes * away
        return steps, steps < self.next_id if first >= 0 else steps >= self.first_id

    def places(self, ids: Ids) -> Ids:
        """Return the places of held ids, see `LANE`."""
        if self.order is not None:
            return self.order.places(ids)
        tick, lane = np.divmod(ids, self.lanes)
        return np.asarray(lane * LANE + tick)

    def at(self, places: Ids) -> tuple[Ids, Flags]:
        """Return the ids at places, and which of them are held."""
        if self.order is not None:
            return self.order.at(places)
        lane, tick = np.divmod(places, LANE)
        ids = tick * self.lanes + lane
        return ids, (ids >= self.first_id) & (ids < self.next_id)

    def pieces(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first and last place held of the lane of each id, as far as no step between is missing."""
        if self.order is not None:
            return self.order.pieces(ids)
        lane = ids % self.lanes * LANE
        return lane + self.first_id // self.lanes, lane + (self.next_id // self.lanes - 1)

    def without_past(self, first_id: int) -> Ids:
        """Return ids that may have lost the step before them since `first_id` was the first one held."""
        if self.order is not None:
            return self.order.without_past(first_id)
        return np.arange(self.first_id, min(self.first_id + self.lanes, self.next_id))

    def require(self, ids: Ids) -> None:
        """Refuse ids, of any shape, that are not held or of a lane that made no transition."""
        require_held(ids, self.first_id, self.next_id, self.fields)

    def require_drawn(self, draw: Draw) -> None:
        """Refuse a recipe that names something else than what is held."""
        if not isinstance(draw, Draw):
            raise ArgumentError(f"draw ({draw!r}) is no recipe; pass what `draw` of a memory or a sampler returned")
        for ids in (draw.ids, draw.last_ids, None if draw.goals is None else draw.goals.ids):
            if ids is not None:
                self.require(ids)


class Sampler(Protocol):
    """Draws batches. The memory calls it under its lock, so it must not call the memory.

    One sampler belongs to one memory. It may have more than the three methods below:

    * `update_priorities(held, ids, priorities)`, if it learns from the caller: see `PrioritySampler`.
    * `resize(capacity, first_id)`, if its state depends on the memory's capacity: `load` calls it after `restore`.
    * `reward_fn`, an attribute, if it relabels goals: functions are not saved, so `load` uses this one for batches
      that were drawn before the save.
    """

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows, with replacement."""

    def state(self) -> State:
        """Return everything that later draws depend on, except the memory and the generator.

        Only arrays and plain numbers, so that it can be saved without pickle. It leaves out the constructor's settings,
        unless they can change later.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; the next draws are the ones that the saved sampler would have made."""


class PrioritySampler(Sampler, Protocol):
    """A sampler that learns from the caller how useful it is to draw a transition again."""

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set priorities; ignore ids that are no longer held."""


class Stateless:
    """A sampler whose draws depend on nothing but the memory and the generator."""

    def state(self) -> State:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing; refuse the state of another kind of sampler."""
        if state:
            raise DamageError(
                f"the saved state of a sampler holds {sorted(state)}, but {type(self).__name__} has none: another kind "
                "of sampler wrote it; pass one of that kind"
            )


_OWN_SAMPLERS: dict[type, tuple[str, ...] | None] = {}
"""See `own_sampler`: the settings of each, None if they are not saved."""
_Class = TypeVar("_Class", bound=type)


def own_sampler(*settings: str, is_saved: bool = True) -> Callable[[_Class], _Class]:
    """Mark a class of holdall's own: its tests show that it draws only what is held; the draws of others are checked.

    Args:
        settings: What a checkpoint holds of such a sampler besides its state.
        is_saved: False for one that cannot be made of them, such as one with a function.
    """

    def mark(kind: _Class) -> _Class:
        _OWN_SAMPLERS[kind] = settings if is_saved else None
        return kind

    return mark


_TRIES = 50
"""Rounds of drawing again, before all ids that may be drawn are listed, which takes longer the larger the memory is."""


@own_sampler()
class Uniform(Stateless):
    """Draw every transition with the same probability."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids; those that may not be drawn are drawn again."""
        ids = generator.integers(held.first_id, held.next_id, size=count)
        if not held.allows_all:
            ids = _drawn_again(ids, held, generator)
        return Draw(ids, np.ones(count, np.float32))


def _drawn_again(ids: Ids, held: Held, generator: np.random.Generator) -> Ids:
    """Replace ids that may not be drawn; all others stay equally likely."""
    for _ in range(_TRIES):
        missed = np.flatnonzero(~held.allows(ids))
        if missed.size == 0:
            return ids
        ids[missed] = generator.integers(held.first_id, held.next_id, size=missed.size)
    missed = np.flatnonzero(~held.allows(ids))
    everything = np.arange(held.first_id, held.next_id)
    allowed = everything[held.allows(everything)]
    if allowed.size == 0:
        raise ArgumentError("none of the transitions held may be drawn by this sampler; add more first")
    ids[missed] = generator.choice(allowed, missed.size)
    return ids


# ---------------------------------------------------------------- a memory's sampler

_MOST_SAVED_STEPS = 2**20
"""Of a return or a sequence that a checkpoint asks for: every draw takes memory for them."""


def required_sampler(sampler: Any) -> Sampler:
    """Return a memory's sampler, `Uniform()` for None, or say why it is none."""
    chosen = Uniform() if sampler is None else sampler
    methods = (getattr(chosen, name, None) for name in ("draw", "state", "restore"))
    if isinstance(chosen, type) or not all(map(callable, methods)):
        raise ArgumentError(
            f"sampler ({sampler!r}) has no draw, state and restore of its own; pass an object, such as Uniform() or "
            "Prioritized()"
        )
    made: Sampler = chosen
    return made


_HALF = 2
"""Bytes of a number in half precision."""


def require_enough(count: int, transitions: int, least: int) -> None:
    """Refuse to draw `count` rows of a memory that holds less than `least` transitions."""
    if transitions < least:
        raise ArgumentError(
            f"batch_size ({count}) is more than the {transitions} transitions held; add more first, or draw a smaller "
            "batch"
        )


def drawn_from(sampler: Sampler, held: Held, count: int, generator: np.random.Generator) -> Draw:
    """Draw `count` rows; refuse the recipe of a user's sampler if it names what is not held."""
    draw = sampler.draw(held, count, generator)
    if type(sampler) not in _OWN_SAMPLERS:
        held.require_drawn(draw)
    return draw


def set_priorities(sampler: Sampler, held: Held, ids: Any, priorities: Any) -> None:
    """Check priorities that a caller learned, and give them to a sampler that has some."""
    updated: Any = sampler
    checked = checked_priorities(sampler, ids, priorities)
    updated.update_priorities(held, *checked)


def checked_priorities(sampler: Sampler, ids: Any, priorities: Any) -> tuple[Ids, NDArray[Any]]:
    """Return ids and priorities that a caller passed as arrays; refuse them where the sampler has no priorities."""
    if not hasattr(sampler, "update_priorities"):
        raise ArgumentError(
            f"update_priorities was called, but the memory's sampler ({type(sampler).__name__}) has no "
            "priorities; construct the memory with sampler=Prioritized(...)"
        )
    values = priorities.detach().cpu() if hasattr(priorities, "detach") else priorities
    if hasattr(values, "is_floating_point") and values.is_floating_point() and values.itemsize == _HALF:
        values = values.float()  # bfloat16 is a dtype that NumPy does not have
    wanted = ids_of_any_shape(ids)
    if wanted.size and wanted.min() < 0:
        raise TransitionIdError(f"ids holds {wanted.min()}, but the first id ever is 0; pass the ids of a batch")
    return wanted, as_array(values, "priorities")


def sampler_words(sampler: Sampler) -> dict[str, Any]:
    """Name a sampler's class and, where they are plain values, all of its settings."""
    words: dict[str, Any] = {"kind": type(sampler).__name__}
    names = _OWN_SAMPLERS.get(type(sampler))
    if names is not None:
        by = {"by": sampler_words(sampler.by)} if hasattr(sampler, "by") else {}
        if all("settings" in inner for inner in by.values()):
            words |= {"settings": {name: getattr(sampler, name) for name in names}, **by}
    return words


def sampler_to_resume(sampler: Sampler | None, saved: Mapping[str, Any], *, goes_on: bool) -> Sampler:
    """Return the sampler of a memory that was saved with one; for None, one with the saved settings.

    Args:
        saved: What `sampler_words` returned, and perhaps the state.
        goes_on: Whether the saved state belongs to the memory as it is now.
    """
    if sampler is not None:
        return required_sampler(sampler)
    kind = saved["kind"]
    if kind == Uniform.__name__ or ("settings" in saved and (goes_on or saved.get("state") == {})):
        return _rebuilt(saved)
    why = "its settings are not in it" if goes_on else "its priorities do not fit the lanes or shards"
    raise ArgumentError(
        f"sampler was not given, and the checkpoint was saved with {kind}: {why}; pass sampler={kind}(...), or another "
        "one to begin without what it had learned"
    )


def resume(sampler: Sampler, saved: Mapping[str, Any], capacity: int, first_id: int) -> bool:
    """Let a sampler continue from `sampler_state`, if it is of the kind that was saved; return whether it is.

    Args:
        capacity: Of the memory that it continues in, which holds the ids from `first_id` on.
    """
    if type(sampler).__name__ != saved["kind"]:
        return False
    sampler.restore(saved["state"])
    resize: Callable[[int, int], None] | None = getattr(sampler, "resize", None)
    if resize is not None:
        resize(capacity, first_id)
    return True


def _rebuilt(saved: Mapping[str, Any]) -> Sampler:
    """Make a sampler of holdall's of what `sampler_words` returned; settings that are none of its own are damage."""
    own = {kind.__name__: kind for kind, settings in _OWN_SAMPLERS.items() if settings is not None}
    by = {"by": _rebuilt(saved["by"])} if "by" in saved else {}
    try:
        made: Any = own[saved["kind"]](**saved.get("settings", {}), **by)
    except (ArgumentError, KeyError, TypeError) as error:
        raise DamageError(f"the saved settings of the sampler make no sense ({error}); pass sampler=") from error
    steps = max(getattr(made, name, 0) for name in ("n", "length", "burn_in"))
    if steps > _MOST_SAVED_STEPS:
        raise DamageError(f"the saved sampler takes {steps} steps, more than {_MOST_SAVED_STEPS}; pass sampler=")
    sampler: Sampler = made
    return sampler


# ---------------------------------------------------------------- generators

_KNOWN = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return all that the next draws of a generator depend on."""
    state = generator.bit_generator.state
    if state["bit_generator"] not in _KNOWN:
        raise CheckpointError(
            f"the memory draws from a {state['bit_generator']}, which cannot be saved; seed it with a number, or pass "
            f"a generator over one of {', '.join(_KNOWN)}"
        )
    return dict(state)


def restored_generator(state: Any) -> np.random.Generator:
    """Make a generator that goes on where the saved one stood."""
    try:
        bits = getattr(np.random, _KNOWN[_KNOWN.index(state["bit_generator"])])(0)
        bits.state = state
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(f"the saved generator makes no sense ({error}); load an older checkpoint") from error
    return np.random.Generator(bits)


def generator_of(seed: Any) -> np.random.Generator:
    """Make a generator of a seed."""
    try:
        given: Any = "True or False" if isinstance(seed, bool) else seed
        return np.random.default_rng(given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"seed ({seed!r}) is none that NumPy takes ({error}); pass None or a whole number of at least 0"
        ) from error


def childs_generator(generator: np.random.Generator) -> np.random.Generator:
    """Return a generator for a forked child: another one in every child, the same in every run of the same program.

    A child begins with a copy of its parent's generator; its draws would be those of the parent and of all siblings.
    """
    words = generator.integers(0, 2**32, 8, np.uint32)
    return np.random.default_rng([*words.tolist(), fork_number()])


# ---------------------------------------------------------------- what draws depend on, as a record

_STATE = "state"
_SAFE = 2**53
_MOST_DEPTH = 32


def encode_state(value: Any, arrays: list[NDArray[Any]], what: str, depth: int = 0) -> Any:
    """Return what JSON can hold; arrays are appended to `arrays` and named by their place there."""
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{what} is nested deeper than {_MOST_DEPTH}; make it flatter")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise CheckpointError(f"{what} has keys that are no text, or begin with $; name them otherwise")
        return {key: encode_state(child, arrays, f"{what}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode_state(child, arrays, what, depth + 1) for child in value]
    if isinstance(value, np.ndarray):
        return _array_words(value, arrays, "$array", what)
    if isinstance(value, bytes):
        return _array_words(np.frombuffer(value, np.uint8), arrays, "$bytes", what)
    return _scalar_words(value.item() if isinstance(value, np.generic) else value, what)


def _array_words(value: NDArray[Any], arrays: list[NDArray[Any]], kind: str, what: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise CheckpointError(f"{what} holds an array of {value.dtype}; only numbers can be saved")
    arrays.append(np.asarray(value, value.dtype.newbyteorder("<")))
    return {kind: len(arrays) - 1, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def _scalar_words(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_SAFE < value < _SAFE else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": value.hex()}
    raise CheckpointError(f"{what} holds a {type(value).__name__}; numbers, text, arrays, dicts and lists can be saved")


def decode_state(value: Any, arrays: Mapping[int, bytes | NDArray[np.uint8]], depth: int = 0) -> Any:
    """Return what `encode_state` was given; lists stand for tuples too."""
    if depth > _MOST_DEPTH:
        raise DamageError("a saved state is nested too deeply to be one of holdall's")
    if isinstance(value, list):
        return [decode_state(child, arrays, depth + 1) for child in value]
    if not isinstance(value, dict):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$bytes" in value:
        return bytes(arrays[value["$bytes"]])
    if "$array" in value:
        rows = np.frombuffer(arrays[value["$array"]], dtype_of(value["dtype"]))
        return rows.reshape([int(length) for length in value["shape"]]).copy()
    return {key: decode_state(child, arrays, depth + 1) for key, child in value.items()}


def pack_state(state: Mapping[str, Any]) -> list[Buffer]:
    """Return a tree of numbers, text and arrays as a record."""
    arrays: list[NDArray[Any]] = []
    words = encode_state(state, arrays, "the memory's state")
    parts = CompressedParts()
    for number, array in enumerate(arrays):
        parts.put(str(number), array)
    parts.content["tree"] = unparsed(words)
    return parts.packed(_STATE, {"sizes": [array.nbytes for array in arrays]})


def unpack_state(record: Record, read: Read) -> dict[str, Any]:
    """Read a tree back."""
    require_kind(record, _STATE, read)
    sizes = [count_of(nbytes) for nbytes in record.head["sizes"]]
    arrays = {i: array_of(record, str(i), read, np.dtype(np.uint8), (nbytes,)) for i, nbytes in enumerate(sizes)}
    tree = decode_state(parsed(record.part("tree", read)), arrays)
    if not isinstance(tree, dict):
        raise DamageError(f"the state at byte {record.start} is no tree")
    return tree
