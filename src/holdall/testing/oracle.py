"""The oracle: a plain list of transitions that a memory under test is compared with.

The oracle takes the same calls as `ReplayMemory` and returns the batches that the memory must return, bit for bit. It
consists of plain loops over single transitions, copies every array that is added or read, and shares no code with the
memory under test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.errors import ArgumentError, TransitionIdError
from holdall.sampling import Held


class OracleTick(NamedTuple):
    """Copies of the arguments of one `add`. Every array has a leading lane axis."""

    obs: Any
    action: Any
    reward: NDArray[Any]
    next_obs: Any
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    extras: Any
    valid: NDArray[np.bool_]


_BATCH_FIELDS = [name for name in OracleTick._fields if name != "valid"]


class OracleMemory:
    """A list of ticks with the methods of `ReplayMemory`.

    Arguments are not checked, because the memory under test must refuse wrong ones. Samplers read the small fields of
    the oracle itself, see `holdall.sampling.SmallFields`.

    Args:
        capacity: Transitions over all lanes, rounded down to whole ticks.
        num_envs: Number of lanes, which is the leading axis of everything that is added.
    """

    def __init__(self, capacity: int, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self._ticks: deque[OracleTick] = deque(maxlen=capacity // num_envs)
        self._added = 0
        self.flags_changed = 0

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None = None,
        valid: Any = None,
    ) -> None:
        """Append copies of one tick. If the list is full, the oldest tick is removed."""
        given = (obs, action, reward, next_obs, terminated, truncated, {} if extras is None else extras)
        are_valid = np.ones(self.num_envs, np.bool_) if valid is None else valid
        self._ticks.append(OracleTick(*(map_leaves(np.array, value) for value in (*given, are_valid))))
        self._added += 1

    def extend(self, *given: Any, **named: Any) -> None:
        """Add whole trajectories, tick by tick: the arguments of `add`, every array with a leading time axis."""
        count = len(given[2] if len(given) > 2 else named["reward"])
        for t in range(count):
            positional, by_name = _take_rows((given, named), t)
            self.add(*positional, **by_name)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order. At least one tick must have been added."""
        wanted = np.asarray(ids, dtype=np.int64)
        places = [self.place(int(number)) for number in wanted]
        if not self._ticks:
            raise ArgumentError("The oracle has no transitions, so it cannot return any of ids. Add a tick first.")
        ticks = [tick for tick, _ in places] or [self._ticks[0]]
        lanes = [lane for _, lane in places]
        read = {name: _take_lanes([getattr(tick, name) for tick in ticks], lanes) for name in _BATCH_FIELDS}
        return Batch(**read, ids=wanted.copy(), weights=np.ones(len(wanted), np.float32))

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite `terminated` and `truncated` of transitions."""
        self.flags_changed += 1
        for number, ended, cut in zip(ids, terminated, truncated, strict=True):
            tick, lane = self.place(int(number))
            tick.terminated[lane] = ended
            tick.truncated[lane] = cut

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Overwrite extras, row by row. If an id occurs twice, its last row counts."""
        for k, number in enumerate(ids):
            tick, lane = self.place(int(number))
            for name, rows in columns.items():
                _put_row(tick.extras[name], rows, lane, k)

    def evict(self, first_id: int) -> None:
        """Drop the ticks before transition id `first_id`, as a memory with a budget does."""
        while self.first_id < first_id:
            self._ticks.popleft()

    def copy_newest(self, capacity: int) -> OracleMemory:
        """Return an oracle of another capacity that holds the newest ticks of this one. Ids stay the same."""
        copied = OracleMemory(capacity, self.num_envs)
        copied._ticks.extend(self._ticks)
        copied._added = self._added
        return copied

    def held(self) -> Held:
        """Return the view that samplers get of this memory. Reading an id that is not held raises TransitionIdError."""
        whole_ticks = (self._ticks.maxlen or 0) * self.num_envs
        return Held(self.first_id, self.next_id, self.num_envs, whole_ticks, self)

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        return sum(int(tick.valid.sum()) for tick in self._ticks)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return (self._added - len(self._ticks)) * self.num_envs

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._added * self.num_envs

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of all transitions that are held."""
        valid = [lane for tick in self._ticks for lane in tick.valid]
        return self.first_id + np.flatnonzero(np.array(valid, np.bool_))

    @property
    def all_valid(self) -> bool:
        """Whether every entry that is held is a transition."""
        return len(self) == self.next_id - self.first_id

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some held ids are transitions."""
        return self._read(ids, lambda tick, lane: tick.valid[lane], np.bool_)

    def are_ends(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which transitions are the last of their episodes."""
        return self._read(ids, lambda tick, lane: tick.terminated[lane] or tick.truncated[lane], np.bool_)

    def rewards(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rewards, in their own dtype."""
        return self._read(ids, lambda tick, lane: tick.reward[lane], None)

    def _read(self, ids: NDArray[np.int64], value: Callable[[OracleTick, int], Any], dtype: Any) -> NDArray[Any]:
        values = [value(*self._find_entry(number)) for number in np.ravel(ids).tolist()]
        return np.array(values, dtype).reshape(np.shape(ids))

    def _find_entry(self, number: int) -> tuple[OracleTick, int]:
        """Return the tick and the lane of an entry, which may be invalid. Raise TransitionIdError if it is not held."""
        first = self.first_id
        if not first <= number < self.next_id:
            raise TransitionIdError(f"ids holds {number}, but {first} to {self.next_id - 1} are held")
        index, lane = divmod(number - first, self.num_envs)
        return self._ticks[index], lane

    def place(self, number: int) -> tuple[OracleTick, int]:
        """Return the tick and the lane of a transition. Raise TransitionIdError if it is not held or not valid."""
        tick, lane = self._find_entry(number)
        if not tick.valid[lane]:
            raise TransitionIdError(f"ids holds {number}, which was added with valid=False")
        return tick, lane


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to every array in nested mappings, tuples and lists."""
    if isinstance(value, np.ndarray):  # The most frequent case.
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(change, child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map_leaves(change, child) for child in value)
    return change(value)


def assert_same_bits(batch: Any, expected: Any) -> None:
    """Raise AssertionError unless two values agree in nesting, dtypes, shapes and every byte.

    Args:
        batch: A `Batch`, or nested arrays or torch tensors.
        expected: A `Batch`, or nested arrays.
    """
    if isinstance(expected, Batch):
        for field in fields(Batch):
            _compare(getattr(batch, field.name), getattr(expected, field.name), field.name)
    else:
        _compare(batch, expected, "value")


def _compare(value: Any, expected: Any, path: str) -> None:
    if value is None or expected is None:
        if value is not expected:
            raise AssertionError(f"{path} is {type(value).__name__}, expected {type(expected).__name__}")
    elif isinstance(expected, Mapping):
        keys = list(value) if isinstance(value, Mapping) else type(value).__name__
        if keys != list(expected):
            raise AssertionError(f"{path} has {keys}, expected {list(expected)}")
        for key in expected:
            _compare(value[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, tuple):
        if not isinstance(value, tuple) or len(value) != len(expected):
            raise AssertionError(f"{path} is {type(value).__name__}, expected a tuple of {len(expected)}")
        for index, child in enumerate(expected):
            _compare(value[index], child, f"{path}[{index}]")
    else:
        _compare_arrays(as_array(value), np.asarray(expected), path)


def _compare_arrays(array: NDArray[Any], expected: NDArray[Any], path: str) -> None:
    if array.dtype != expected.dtype:
        raise AssertionError(f"{path} has dtype {array.dtype}, expected {expected.dtype}")
    if array.shape != expected.shape:
        raise AssertionError(f"{path} has shape {array.shape}, expected {expected.shape}")
    if array.tobytes() == expected.tobytes():
        return
    rows = len(expected) if expected.ndim else 1
    got, want = (np.frombuffer(both.tobytes(), np.uint8).reshape(rows, -1) for both in (array, expected))
    differing = np.flatnonzero((got != want).any(axis=1))
    row = int(differing[0])
    byte = int(np.flatnonzero(got[row] != want[row])[0])
    raise AssertionError(
        f"{path} differs in {differing.size} of {rows} rows; row {row}, byte {byte}: "
        f"{got[row, byte : byte + 8].tobytes().hex()}, expected {want[row, byte : byte + 8].tobytes().hex()}"
    )


def as_array(value: Any) -> NDArray[Any]:
    """Return an array, or a torch tensor of any device, as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _take_rows(value: Any, index: int) -> Any:
    """Return row `index` of nested arrays. None stays None."""
    return map_leaves(lambda array: None if array is None else np.asarray(array)[index], value)


def _take_lanes(values: Sequence[Any], lanes: Sequence[int]) -> Any:
    """Return row `lanes[i]` of `values[i]` for every i, stacked. All values have the same nesting."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _take_lanes([value[key] for value in values], lanes) for key in first}
    if isinstance(first, tuple):
        return tuple(_take_lanes([value[index] for value in values], lanes) for index in range(len(first)))
    rows = [array[lane : lane + 1] for array, lane in zip(values, lanes, strict=False)]
    return np.concatenate(rows or [first[:0]])


def _put_row(into: Any, rows: Any, lane: int, k: int) -> None:
    """Overwrite the row of a lane with row `k` of `rows`."""
    if isinstance(into, np.ndarray):
        into[lane] = as_array(rows)[k]
        return
    for key in into if isinstance(into, dict) else range(len(into)):
        _put_row(into[key], rows[key], lane, k)


def stack_rows(values: Sequence[Any]) -> Any:
    """Stack nested arrays along a new leading axis, leaf by leaf."""
    first = values[0]
    if isinstance(first, dict):
        return {key: stack_rows([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack_rows([value[index] for value in values]) for index in range(len(first)))
    return np.stack(values)


def n_step_batch(oracle: OracleMemory, ids: NDArray[np.int64], n: int, gamma: float) -> Batch:
    """Return the batch that `NStep(n, gamma)` must return for the first steps `ids`. All weights are 1."""
    runs = [steps_from(oracle, int(number), n) for number in ids]
    first = oracle.gather(ids)
    last = oracle.gather([run[-1] for run in runs])
    returns = [_discount_rewards(oracle.gather(run).reward, gamma) for run in runs]
    return replace(
        first,
        reward=np.array(returns, np.result_type(first.reward.dtype, np.float32)),
        next_obs=last.next_obs,
        terminated=last.terminated,
        truncated=last.truncated,
        discount=np.array([gamma ** len(run) for run in runs], np.float32),
    )


def steps_from(oracle: OracleMemory, first: int, count: int) -> list[int]:
    """Return at most `count` steps of an episode, starting with `first`."""
    run = [first]
    while len(run) < count and not ends(oracle, run[-1]) and is_held(oracle, run[-1] + oracle.num_envs):
        run.append(run[-1] + oracle.num_envs)
    return run


def is_held(oracle: OracleMemory, number: int) -> bool:
    """Return whether a transition is held."""
    try:
        oracle.place(number)
    except TransitionIdError:
        return False
    return True


def ends(oracle: OracleMemory, number: int) -> bool:
    """Return whether a transition is the last one of its episode."""
    tick, lane = oracle.place(number)
    return bool(tick.terminated[lane] or tick.truncated[lane])


def _discount_rewards(rewards: NDArray[Any], gamma: float) -> Any:
    dtype = np.result_type(rewards.dtype, np.float32).type
    total = dtype(rewards[0]) * dtype(1.0)
    for k in range(1, len(rewards)):
        total = total + dtype(rewards[k]) * dtype(gamma**k)
    return total
