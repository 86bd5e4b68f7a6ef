"""Parts of a replay buffer of holdall's: its fields as NumPy arrays, and n-step returns.

Stable-Baselines3's buffers show their fields as plain arrays, and code around them indexes these, compares them and
averages them. A SlotArray gives what the plain array would give, for every key that NumPy takes. What is gathered is a
copy: where NumPy returns a view, the copy is read-only, so a write that could not reach the buffer is an error.

Returns over several steps are added up in Stable-Baselines3's order of operations, so that no bit differs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np
import stable_baselines3
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from holdall import ReplayMemory
from holdall.batch import Batch
from holdall.errors import ArgumentError
from holdall.schema import require_count

ReadRows = Callable[[NDArray[np.int64]], NDArray[Any]]
WriteRows = Callable[[NDArray[np.int64], NDArray[Any]], None]

_COMBINE: dict[str, Any] = {"min": np.minimum, "max": np.maximum, "any": np.logical_or, "all": np.logical_and}
"""Reductions that give the same bits in whatever pieces they are made; sums of whole numbers do, too."""
_ELEMENTS_AT_ONCE = 2**20
_READ_AT_ONCE_BYTES = 8 * 2**20
"""Observations gathered in one go when an array is read, so that reading all rewards takes no memory for all images."""
_WARNS_OF_STEPS = (2, 9, 1)
"""From this version on Stable-Baselines3 itself warns that it ignores a model's `n_steps`."""
_FRAMES_TO_MODEL = 4
"""Calls between a model that makes its buffer and the buffer's constructor: those of subclasses, at most."""


class SlotArray(NDArrayOperatorsMixin):
    """One field as an array of (slots, environments, *shape) that exists only when it is read.

    Args:
        shape: Shape of the whole; the first `row_axes` axes count rows.
        dtype: Of what is read.
        ids_of: Transition ids by flat positions over the row axes; -1 where there is none.
        read: Rows of given ids.
        rows_at_once: Most ids that are read in one go: reading takes memory for all fields, not this one alone.
        write: Takes ids and their new rows; None if the field cannot be written to.
        row_axes: 2 for slots and environments, 1 where these lie in one axis.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any],
        ids_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], read: ReadRows, rows_at_once: int,
        write: WriteRows | None = None, row_axes: int = 2,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.dtype = name, shape, dtype
        self._ids_of, self._read, self._write = ids_of, read, write
        self._rows_at_once, self._row_axes = rows_at_once, row_axes

    def flattened(self) -> SlotArray:
        """Return the same field with slots and environments in one axis, environment by environment."""
        slots, lanes, *inner = self.shape

        def ids_of(places: NDArray[np.int64]) -> NDArray[np.int64]:
            lane, slot = np.divmod(places, slots)
            return self._ids_of(slot * lanes + lane)

        shape = (slots * lanes, *inner)
        return SlotArray(self.name, shape, self.dtype, ids_of, self._read, self._rows_at_once, row_axes=1)

    @property
    def ndim(self) -> int:
        """Axes, those of the rows among them."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a plain array would take; `report()` says what is held."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        step = max(1, self._rows_at_once // prod(self.shape[1 : self._row_axes]))
        for begin in range(0, len(self), step):
            yield from self[begin : begin + step]

    def __contains__(self, value: Any) -> bool:
        return bool(np.any(self == value))

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if any(part is None for part in parts) and all(
            part is None or part is ... or _is_basic(part) for part in parts
        ):
            # New axes alone change nothing about what is gathered.
            rest = tuple(part for part in parts if part is not None)
            along = tuple(slice(None) if isinstance(part, slice) else part for part in parts if not _is_integer(part))
            widened = np.asarray(self[rest])[along]
            widened.flags.writeable = False
            return widened
        split = self._split(parts)
        if split is None:
            return self._elements(key)
        outer, inner, is_view = split
        positions = self._positions_at(outer)
        rows = self._rows(positions)
        rows.flags.writeable = not is_view
        return rows[(*[slice(None)] * np.ndim(positions), *inner)]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._write is None:
            raise ArgumentError(
                f"{self.name}[...] = ... was tried, and stored {self.name} cannot be changed; only dones and timeouts "
                "of a replay buffer can. Call reset() and add the steps again"
            )
        if not np.isin(np.asarray(value), (0, 1)).all():
            raise ArgumentError(f"{self.name}[...] = {value!r} was tried; {self.name} are flags, write 0 or 1")
        written = np.full(self.shape, -1, self.dtype)
        written[key] = value
        positions = np.flatnonzero(written >= 0)
        ids, rows = self._ids_of(positions), written.reshape(-1)[positions]
        held = ids >= 0
        if rows[~held].any():
            raise ArgumentError(
                f"{self.name}[{key!r}] = {value!r} was tried, and {int(np.count_nonzero(~held))} of these slots hold "
                "no transition; add transitions first"
            )
        self._write(ids[held], rows[held])

    def copy(self, order: Any = "C") -> NDArray[Any]:
        """Return the plain array."""
        return np.array(self, order=order)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name} is gathered when it is read, so it is always a copy")
        whole = self._rows(self._positions())
        whole = whole if dtype is None else whole.astype(dtype, copy=False)
        whole.flags.writeable = bool(copy)
        return whole

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **settings: Any) -> Any:
        given = [np.asarray(one) if isinstance(one, SlotArray) else one for one in inputs]
        if not any(isinstance(one, SlotArray) for one in out):
            return getattr(ufunc, method)(*given, **settings, **({"out": out} if out else {}))
        target: SlotArray = out[0]
        target[...] = getattr(ufunc, method)(*given, **settings)
        return target

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else getattr(np.ndarray, name, None)
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self._call, name) if callable(found) else getattr(np.asarray(self), name)

    def __dlpack__(self, **settings: Any) -> Any:
        """Hand the plain array to torch, which would read this one row by row."""
        return np.array(self).__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return np.empty(0).__dlpack_device__()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain array."""
        return np.asarray, (np.array(self),)

    def __repr__(self) -> str:
        return f"SlotArray({self.name}, shape={self.shape}, dtype={self.dtype})"

    def _call(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the plain array; what can be made of pieces exactly is, so that it takes little memory."""
        wanted = {key: value for key, value in settings.items() if value is not None}
        whole_numbers = self.dtype.kind in "biu" and name in {"sum", "mean"}
        if (name in _COMBINE or whole_numbers) and not args and not wanted and self.size:
            return self._reduced(name)
        return getattr(np.asarray(self), name)(*args, **settings)

    def _reduced(self, name: str) -> Any:
        rows = prod(self.shape[: self._row_axes])
        pieces = (range(rows)[begin : begin + self._rows_at_once] for begin in range(0, rows, self._rows_at_once))
        method = "sum" if name == "mean" else name
        results = [getattr(self._rows(np.array(piece)), method)() for piece in pieces]
        if name in _COMBINE:
            return _COMBINE[name].reduce(results)
        total = np.add.reduce(results)
        return total if name == "sum" else np.float64(total) / self.size

    def _positions(self) -> NDArray[np.int64]:
        rows = self.shape[: self._row_axes]
        return np.arange(prod(rows)).reshape(rows)

    def _positions_at(self, outer: tuple[Any, ...]) -> Any:
        """Return the flat positions that keys of the row axes pick."""
        if not all(isinstance(part, slice | int | np.integer) for part in outer):
            return self._positions()[outer]
        picked: Any = np.int64(0)
        for count, part in zip(self.shape[: self._row_axes], outer, strict=True):
            along = range(count)[part]
            picked = np.add.outer(picked * count, np.array(along, np.int64))
        return picked

    def _split(self, key: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], bool] | None:
        """Split a key into what picks rows and what picks inside a row, and whether NumPy would return a view.

        None if rows and their insides cannot be picked one after the other.
        """
        parts = self._spelled_out(key)
        if parts is None:
            return None
        outer: list[Any] = []
        axes = 0
        while axes < self._row_axes:
            part = parts.pop(0)
            outer.append(part)
            axes += _axes_of(part)
        has_arrays = not all(_is_basic(part) for part in outer)
        # There NumPy may move the axes of arrays to the front, past a slice that comes before them.
        may_move = has_arrays and isinstance(outer[0], slice) and not all(isinstance(part, slice) for part in parts)
        if axes > self._row_axes or may_move or not all(_is_basic(part) for part in parts):
            return None
        return tuple(outer), tuple(parts), not has_arrays

    def _spelled_out(self, parts: tuple[Any, ...]) -> list[Any] | None:
        """Return a key with one part for every axis, where an ellipsis or nothing stands for all of several."""
        if any(part is None or _axes_of(part) == 0 for part in parts if part is not ...):
            return None
        missing = self.ndim - sum(_axes_of(part) for part in parts if part is not ...)
        dots = [number for number, part in enumerate(parts) if part is ...]
        if missing < 0 or len(dots) > 1:
            return None
        at = dots[0] if dots else len(parts)
        return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]

    def _elements(self, key: Any) -> Any:
        """Pick element by element, for keys that mix rows and their insides: NumPy itself says which ones these are."""
        inner = self.shape[self._row_axes :]
        of_rows = self._positions().reshape(*self.shape[: self._row_axes], *[1] * len(inner))
        rows = np.asarray(np.broadcast_to(of_rows, self.shape)[key])
        places = np.asarray(np.broadcast_to(np.arange(prod(inner)).reshape(inner), self.shape)[key])
        found: NDArray[Any] = np.empty(np.shape(rows), self.dtype)
        flat = found.reshape(-1)
        for begin in range(0, flat.size, _ELEMENTS_AT_ONCE):
            some = slice(begin, begin + _ELEMENTS_AT_ONCE)
            wanted, which = np.unique(rows.flat[some], return_inverse=True)
            flat[some] = self._rows(wanted).reshape(len(wanted), -1)[which, places.flat[some]]
        return found[()]

    def _rows(self, positions: Any) -> NDArray[Any]:
        """Gather rows for an array of positions of any shape."""
        flat = np.atleast_1d(positions).reshape(-1)
        ids = self._ids_of(flat)
        inner = self.shape[self._row_axes :]
        rows = np.zeros((len(flat), *inner), self.dtype)
        held = np.flatnonzero(ids >= 0)
        for begin in range(0, len(held), self._rows_at_once):
            some = held[begin : begin + self._rows_at_once]
            rows[some] = self._read(ids[some]).reshape(len(some), *inner)
        return rows.reshape((*np.shape(positions), *inner))


def _is_integer(part: Any) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool)


def _is_basic(part: Any) -> bool:
    return isinstance(part, slice) or _is_integer(part)


def _axes_of(part: Any) -> int:
    """Count the axes that a part of a key stands for; 0 for what NumPy itself must sort out."""
    if part is None or isinstance(part, bool | np.bool_) or (isinstance(part, np.ndarray) and part.ndim == 0):
        return 0
    if _is_basic(part):
        return 1
    try:
        array = np.asarray(part)
    except ValueError:
        return 0
    return array.ndim if array.dtype.kind == "b" else min(array.ndim, 1)


class SlotArrays:
    """An attribute that is a SlotArray, or a dict of them, made whenever it is read; assigning to it writes to it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, _: type | None = None) -> Any:
        return self if buffer is None else self._make(buffer)

    def __set__(self, buffer: Any, value: Any) -> None:
        array = self._make(buffer)
        if isinstance(array, dict):
            raise ArgumentError(
                f"{self._name} = ... was tried, and stored {self._name} cannot be changed; call reset() and add the "
                "steps again"
            )
        array[...] = value


class BufferArrays:
    """The part of a replay buffer that shows its fields as arrays; slots that were never written to read as zeros."""

    memory: ReplayMemory
    buffer_size: int
    n_envs: int
    action_dim: int
    _is_dict: bool
    _obs_specs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    _action_dtype: np.dtype[Any]
    _ids: Callable[..., NDArray[np.int64]]

    observations: Any = SlotArrays(lambda buffer: buffer._observed("observations", lambda batch: batch.obs))
    next_observations: Any = SlotArrays(
        lambda buffer: buffer._observed("next_observations", lambda batch: batch.next_obs)
    )
    actions: Any = SlotArrays(
        lambda buffer: buffer._slots("actions", (buffer.action_dim,), buffer._action_dtype, lambda batch: batch.action)
    )
    rewards: Any = SlotArrays(lambda buffer: buffer._numbers("rewards", lambda batch: batch.reward))
    dones: Any = SlotArrays(lambda buffer: buffer._numbers("dones", _done_flags, buffer._write_dones))
    timeouts: Any = SlotArrays(
        lambda buffer: buffer._numbers("timeouts", lambda batch: batch.truncated, buffer._write_timeouts)
    )

    def _ids_in_slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = self._ids(*np.divmod(positions, self.n_envs))
        return np.where(ids >= self.memory.first_id, ids, -1)

    def _write_dones(self, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        cut = self.memory.gather(ids).truncated
        self.memory.set_flags(ids, rows.astype(np.bool_) ^ cut, cut)

    def _write_timeouts(self, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        done, cut = _done_flags(self.memory.gather(ids)), rows.astype(np.bool_)
        self.memory.set_flags(ids, done ^ cut, cut)

    def _numbers(self, name: str, of: Any, write: Any = None) -> SlotArray:
        return self._slots(name, (), np.dtype(np.float32), of, write)

    def _observed(self, name: str, of: Any) -> Any:
        if not self._is_dict:
            shape, dtype = self._obs_specs[""]
            return self._slots(name, shape[1:], dtype, of)
        return {
            key: self._slots(name, shape[1:], dtype, lambda batch, key=key: of(batch)[key])
            for key, (shape, dtype) in self._obs_specs.items()
        }

    def _slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], of: Any, write: Any = None) -> SlotArray:
        def read(ids: NDArray[np.int64]) -> NDArray[Any]:
            batch: Batch = self.memory.gather(ids)
            return np.asarray(of(batch))

        whole = (self.buffer_size, self.n_envs, *shape)
        observed = sum(prod(shape[1:]) * dtype.itemsize for shape, dtype in self._obs_specs.values())
        rows_at_once = max(1, _READ_AT_ONCE_BYTES // max(1, 2 * observed))
        return SlotArray(name, whole, dtype, self._ids_in_slots, read, rows_at_once, write)


def _done_flags(batch: Batch) -> NDArray[np.bool_]:
    """Return what Stable-Baselines3 keeps as `dones`.

    It keeps two flags apart, done and cut by a time limit. An end that was no cut is stored as terminated, one that
    was as truncated; a cut without an end, which only writing to `timeouts` first can give, as both.
    """
    return np.asarray(batch.terminated ^ batch.truncated)


def flags_of(given: Any, shape: tuple[int, ...], name: str) -> NDArray[np.bool_]:
    """Return flags of all environments, which may come as bools, numbers or arrays of one."""
    flags = cast(given, shape, np.dtype(np.float32), name)
    if getattr(given, "dtype", None) != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise ArgumentError(f"{name} is {given}, and flags are 0 or 1; pass True or False for each environment")
    return np.asarray(flags != 0)


def cut_flags(infos: Any, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return which episodes a time limit has cut, by what infos say; None if they say it of none."""
    name = 'infos[...]["TimeLimit.truncated"]'
    try:
        given = [info.get("TimeLimit.truncated", False) for info in infos]
    except (AttributeError, TypeError) as error:
        raise ArgumentError(
            f"infos is a {type(infos).__name__} that holds no dict for each environment ({error}); pass a list of "
            "dicts, or make the buffer with handle_timeout_termination=False"
        ) from error
    return flags_of([0 if flag is None else flag for flag in given], shape, name) if any(given) else None


def cast(
    array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, *, reshapes: bool = False
) -> NDArray[Any]:
    """Do what assigning to one of Stable-Baselines3's arrays does to shape and dtype.

    Axes of length 1 may be missing, or too many. Axes in another order are an error, as they are there; actions alone
    are reshaped.
    """
    try:
        rows: NDArray[Any] = np.asarray(array)
        rows = rows if rows.dtype == dtype else rows.astype(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name} is a {type(array).__name__} that cannot be stored as {dtype} ({error}); pass an array"
        ) from error
    if rows.shape == shape:
        return rows
    is_same = [axis for axis in rows.shape if axis != 1] == [axis for axis in shape if axis != 1]
    try:
        return rows.reshape(shape) if is_same or reshapes else np.broadcast_to(rows, shape)
    except ValueError as error:
        raise ArgumentError(
            f"{name} has shape {rows.shape}, expected {shape}: {shape[0]} environments, then what the space says; "
            "pass an array of that shape"
        ) from error


def warn_of_ignored_steps(buffer: str, *, takes_steps: bool) -> None:
    """Warn if the model that makes a buffer wants n-step returns: it sets them up in buffers of its own only.

    Args:
        buffer: The name of its class, whose constructor calls this.
        takes_steps: Whether it takes `n_steps` itself.
    """
    if _version() >= _WARNS_OF_STEPS:
        return
    frame = sys._getframe(2)
    for _ in range(_FRAMES_TO_MODEL):
        model = frame.f_locals.get("self")
        if isinstance(model, OffPolicyAlgorithm) and getattr(model, "n_steps", 1) > 1:
            line = f'replay_buffer_kwargs={{"n_steps": {model.n_steps}, "gamma": {model.gamma}}}'
            remedy = f"write {line}" if takes_steps else "it has one-step returns only"
            warnings.warn(
                f"n_steps={model.n_steps} is ignored: Stable-Baselines3 does not pass it to a replay_buffer_class, "
                f"here {buffer}; {remedy}",
                UserWarning,
                stacklevel=2,
            )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in stable_baselines3.__version__.split(".")[:3] if part.isdigit())


def require_steps(n_steps: int) -> int:
    """Refuse n-step returns where Stable-Baselines3's algorithms do not know them."""
    if require_count("n_steps", n_steps, 1) > 1 and "discounts" not in ReplayBufferSamples._fields:
        raise ArgumentError(
            f"n_steps ({n_steps}) above 1 needs Stable-Baselines3 2.7, whose algorithms know the discounts of such "
            f"returns; this is {stable_baselines3.__version__}: run 'pip install -U stable-baselines3'"
        )
    return n_steps


def n_step_returns(
    rewards: NDArray[np.float32], ends: NDArray[np.bool_], gamma: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Add up the rewards of each row until its first end, in Stable-Baselines3's order of operations.

    Args:
        rewards: (batch, n), of the steps from some transitions on.
        ends: (batch, n): last steps of episodes, and the newest step.

    Returns:
        Returns and discounts, (batch, 1); and how many steps lie between the first and the last, (batch,).
    """
    n = ends.shape[1]
    last = np.where(ends.any(axis=1), ends.argmax(axis=1), n - 1)
    counts = np.arange(n).reshape(1, -1) <= last[:, None]
    powers = gamma ** np.arange(n, dtype=np.float32).reshape(1, -1)
    returns = (rewards * powers * counts).sum(axis=1, keepdims=True)
    discounts = gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)
    return returns, discounts, last
