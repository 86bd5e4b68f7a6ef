"""ReplayMemory: exact off-policy experience in a fraction of the memory.

The flow, one stage a file:

    add -> schema (check) -> ring (small fields) | window -> slices -> segment (large fields)
    sample -> sampling (ids) -> ring | segment (places) -> kernels (copy) -> assemble (batch)

Invariant: `gather(ids)` returns bit for bit what `add` was given. An argument that does not
fit is refused before anything is written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.errors import ArgumentError, ClosedError, TransitionIdError
from holdall.experience.assemble import Delivery, ObservationAssembler
from holdall.experience.kernels import chosen_kernels
from holdall.experience.ring import ObservationRing, QuickTick, as_bytes, new_ring
from holdall.experience.segment import Segments
from holdall.experience.window import WindowScout
from holdall.report import FieldReport, MemoryReport
from holdall.sampling.draw import Held, Sampler
from holdall.sampling.uniform import Uniform
from holdall.schema import Array, Leaf, Schema, fit_flags, fit_reward

_TINY_BYTES = 256
"""Observation fields up to this size always lie in a flat ring: nothing beats it."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in a flat ring, unless a window is found in their first steps."""

_FLAG = Leaf("", (), np.dtype(np.bool_))


class ReplayMemory:
    """Replay memory for `num_envs` lanes that advance together.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple.
        action_space: The same.
        capacity: Transitions over all lanes; rounded down to whole ticks, see `capacity`.
        num_envs: Lanes: the leading axis of everything that is added.
        device: None for NumPy batches; "cpu" or "cuda" for torch tensors there.
        seed: Seeds the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: How `sample` draws; `Uniform()` by default.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        capacity: int = 1_000_000,
        num_envs: int = 1,
        *,
        device: str | None = None,
        seed: int | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        _require_count("num_envs", num_envs, 1)
        _require_count("capacity", capacity, num_envs)
        self._schema = Schema.of(observation_space, action_space, extras, num_envs)
        self._lanes = num_envs
        self._leading = (num_envs,)
        self._capacity_ticks = capacity // num_envs
        self._ring_ticks = self._capacity_ticks + 1
        self._generator = np.random.default_rng(seed)
        self._sampler: Sampler = sampler or Uniform()
        self._lock = threading.Lock()
        self._closed = False
        self._next_tick = 0
        observed = self._schema.observation.leaves
        self._delivery = Delivery(
            device, [*observed, *self._schema.action.leaves, *self._schema.extras.leaves]
        )
        kernels = chosen_kernels()
        self._assembler = ObservationAssembler(kernels)
        self._large = [i for i, leaf in enumerate(observed) if leaf.nbytes > _SMALL_BYTES]
        self._segments = Segments(
            kernels, [observed[i] for i in self._large], num_envs, self._capacity_ticks
        )
        self._small = {
            i: ObservationRing(leaf, num_envs, self._ring_ticks)
            for i, leaf in enumerate(observed)
            if leaf.nbytes <= _SMALL_BYTES
        }
        self._scouts = {
            i: WindowScout(leaf)
            for i, leaf in enumerate(observed)
            if _TINY_BYTES < leaf.nbytes <= _SMALL_BYTES
        }
        self._actions = [self._ring(leaf) for leaf in self._schema.action.leaves]
        self._extras = [self._ring(leaf) for leaf in self._schema.extras.leaves]
        self._reward: Array | None = None
        self._reward_dtype: np.dtype[Any] | None = None
        self._terminated = self._ring(_FLAG)
        self._truncated = self._ring(_FLAG)
        self._invalid: Array | None = None
        self._invalid_count = 0
        self._quick: QuickTick | None = None

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
        """Add one transition per lane; every array has a leading axis of `num_envs`.

        Args:
            next_obs: The true next observation: at the end of an episode its final one, not the
                first of the next episode.
            valid: Lanes marked False made no transition (the step after an episode's end in
                Gymnasium's next-step autoreset); they are never sampled and not counted.
        """
        quick = self._quick
        if (
            quick is not None
            and extras is None
            and valid is None
            and quick.fits(obs, action, reward, next_obs, terminated, truncated)
        ):
            with self._lock:
                if self._quick is quick:
                    quick.write(self._next_tick, obs, action, reward, next_obs, terminated, truncated)
                    self._next_tick += 1
                    return
        schema, leading = self._schema, self._leading
        observed = schema.observation.flatten(obs, leading, "obs")
        following = schema.observation.flatten(next_obs, leading, "next_obs")
        acted = schema.action.flatten(action, leading, "action")
        ended = fit_flags(terminated, leading, "terminated")
        cut = fit_flags(truncated, leading, "truncated")
        more = schema.extras.flatten({} if extras is None else extras, leading, "extras")
        valid = None if valid is None else fit_flags(valid, leading, "valid")
        with self._lock:
            self._require_open()
            rewarded = fit_reward(reward, leading, self._reward_dtype)
            self._write(observed, following, acted, rewarded, ended, cut, more, valid)

    def extend(
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
        """Add whole trajectories: the same as `add`, with a leading time axis before the lanes.

        Everything is checked before the first step is written.
        """
        schema = self._schema
        leading = (_length_of(reward), self._lanes)
        observed = schema.observation.flatten(obs, leading, "obs")
        following = schema.observation.flatten(next_obs, leading, "next_obs")
        acted = schema.action.flatten(action, leading, "action")
        ended = fit_flags(terminated, leading, "terminated")
        cut = fit_flags(truncated, leading, "truncated")
        more = schema.extras.flatten({} if extras is None else extras, leading, "extras")
        valid = None if valid is None else fit_flags(valid, leading, "valid")
        with self._lock:
            self._require_open()
            rewarded = fit_reward(reward, leading, self._reward_dtype)
            for t in range(leading[0]):
                self._write(
                    [array[t] for array in observed],
                    [array[t] for array in following],
                    [array[t] for array in acted],
                    rewarded[t],
                    ended[t],
                    cut[t],
                    [array[t] for array in more],
                    None if valid is None else valid[t],
                )

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        _require_count("batch_size", batch_size, 1)
        with self._lock:
            self._require_open()
            if batch_size > self._count():
                raise ArgumentError(
                    f"batch_size ({batch_size}) is more than the {self._count()} transitions held; "
                    "add more first, or draw a smaller batch"
                )
            draw = self._sampler.draw(self._held(), batch_size, self._generator)
            parts = self._read(draw.ids)
        return self._build(draw.ids, draw.weights, *parts)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        wanted = _as_ids(ids)
        with self._lock:
            self._require_open()
            self._require_held(wanted)
            parts = self._read(wanted)
        return self._build(wanted, np.ones(len(wanted), np.float32), *parts)

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        with self._lock:
            return self._count()

    @property
    def capacity(self) -> int:
        """Most transitions that are held: whole ticks, over all lanes."""
        return self._capacity_ticks * self._lanes

    @property
    def num_envs(self) -> int:
        """Lanes."""
        return self._lanes

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._first_tick * self._lanes

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._next_tick * self._lanes

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field, against the plain layout."""
        with self._lock:
            return self._report()

    def close(self) -> None:
        """Free everything; batches that were handed out stay as they are."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._quick = None
            self._assembler.crew.dismiss()
            self._segments = Segments(chosen_kernels(), [], self._lanes, 1)
            self._small, self._actions, self._extras = {}, [], []
            self._reward = self._invalid = None
            self._terminated = self._truncated = np.empty((0, self._lanes), np.bool_)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(
        self,
        observed: list[Array],
        following: list[Array],
        acted: list[Array],
        rewarded: Array,
        ended: Array,
        cut: Array,
        more: list[Array],
        valid: Array | None,
    ) -> None:
        """Write one checked tick."""
        tick = self._next_tick
        slot = tick % self._ring_ticks
        for i, ring in self._small.items():
            ring.write(tick, observed[i], following[i])
        if self._large:
            lanes = self._lanes
            self._segments.append(
                tick,
                [as_bytes(observed[i], lanes) for i in self._large],
                [as_bytes(following[i], lanes) for i in self._large],
            )
        for row, value in zip(self._actions, acted, strict=True):
            row[slot] = value
        for row, value in zip(self._extras, more, strict=True):
            row[slot] = value
        if self._reward is None:
            self._reward_dtype = rewarded.dtype
            self._reward = self._ring(Leaf("reward", (), rewarded.dtype))
        self._reward[slot] = rewarded
        self._terminated[slot] = ended
        self._truncated[slot] = cut
        if valid is not None or self._invalid is not None:
            self._mark_valid(tick, slot, valid)
        self._next_tick = tick + 1
        if self._large and self._next_tick > self._capacity_ticks:
            self._segments.evict_before(self._first_tick)
        if self._scouts:
            self._scout(observed, following)
        self._quick = self._quick_tick()

    def _quick_tick(self) -> QuickTick | None:
        """Offer the short way to write a tick, if one flat observation and action are all."""
        flat = len(self._small) == len(self._actions) == 1 and not self._large
        if self._scouts or not flat or self._extras or self._reward is None or self._invalid is not None:
            return None
        if self._quick is not None:
            return self._quick
        (observation,) = self._small.values()
        return QuickTick(
            observation, self._actions[0], self._reward, self._terminated, self._truncated
        )

    def _mark_valid(self, tick: int, slot: int, valid: Array | None) -> None:
        """Keep count of the lanes that made no transition."""
        if self._invalid is None:
            self._invalid = self._ring(_FLAG)
        if tick >= self._capacity_ticks:
            leaving = self._invalid[(tick - self._capacity_ticks) % self._ring_ticks]
            self._invalid_count -= int(np.count_nonzero(leaving))
        self._invalid[slot] = False if valid is None else ~valid
        self._invalid_count += int(np.count_nonzero(self._invalid[slot]))

    def _scout(self, observed: list[Array], following: list[Array]) -> None:
        """Look for windows in small fields; where one is found, move the field to segments."""
        for i, scout in tuple(self._scouts.items()):
            scout.look(as_bytes(observed[i], self._lanes), as_bytes(following[i], self._lanes))
            if not scout.done and self._segments.can_adopt(self._next_tick):
                continue
            del self._scouts[i]
            if scout.finding is None or not self._segments.can_adopt(self._next_tick):
                continue
            ring = self._small.pop(i)
            field = self._segments.adopt(ring.leaf, scout.finding, self._next_tick)
            self._large.append(i)
            for tick in range(self._next_tick):
                ids = np.arange(tick * self._lanes, (tick + 1) * self._lanes)
                obs, next_obs = ring.read(ids, self._flat_slots(ids), self._flat_slots(ids, 1))
                rows = as_bytes(obs, self._lanes), as_bytes(next_obs, self._lanes)
                self._segments.replay(field, tick, *rows)

    def _read(self, ids: NDArray[np.int64]) -> tuple[Any, ...]:
        """Copy the small fields of `ids`, and find the large ones; under the lock."""
        slot, next_slot = self._flat_slots(ids), self._flat_slots(ids, 1)
        small = {i: ring.read(ids, slot, next_slot) for i, ring in self._small.items()}
        places = self._segments.places(*np.divmod(ids, self._lanes)) if self._large else None
        acted = [_take(ring, slot) for ring in self._actions]
        more = [_take(ring, slot) for ring in self._extras]
        rewarded = (
            np.empty(0, np.float32) if self._reward is None else _take(self._reward, slot)
        )
        ended, cut = _take(self._terminated, slot), _take(self._truncated, slot)
        return small, places, list(self._large), acted, more, rewarded, ended, cut

    def _build(
        self,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        small: dict[int, tuple[Array, Array]],
        places: Any,
        large: list[int],
        acted: list[Array],
        more: list[Array],
        rewarded: Array,
        ended: Array,
        cut: Array,
    ) -> Batch:
        """Copy the large fields, outside the lock, and make the batch."""
        leaves = self._schema.observation.leaves
        pairs = dict(small)
        for field, i in enumerate(large):
            pairs[i] = self._assembler.assemble(places, field, leaves[i])
        hand_over = self._delivery.hand_over
        schema = self._schema
        return Batch(
            obs=schema.observation.build([hand_over(pairs[i][0]) for i in range(len(leaves))]),
            action=schema.action.build([hand_over(array) for array in acted]),
            reward=hand_over(rewarded),
            next_obs=schema.observation.build([hand_over(pairs[i][1]) for i in range(len(leaves))]),
            terminated=hand_over(ended),
            truncated=hand_over(cut),
            extras=schema.extras.build([hand_over(array) for array in more]),
            ids=ids,
            weights=hand_over(weights),
        )

    def _report(self) -> MemoryReport:
        held = (self._next_tick - self._first_tick) * self._lanes
        touched = min(self._next_tick, self._ring_ticks) * self._lanes
        schema = self._schema
        fields = [
            self._report_observation(i, leaf, held, touched)
            for i, leaf in enumerate(schema.observation.leaves)
        ]
        flat = [("action", leaf) for leaf in schema.action.leaves]
        flat += [("extras", leaf) for leaf in schema.extras.leaves]
        if self._reward is not None:
            flat.append(("", Leaf("reward", (), self._reward.dtype)))
        flat += [("", replace(_FLAG, name=name)) for name in ("terminated", "truncated")]
        if self._invalid is not None:
            flat.append(("", replace(_FLAG, name="valid")))
        fields += [
            FieldReport(
                name=_name(prefix, leaf),
                slice_bytes=0,
                log_bytes=0,
                row_bytes=touched * leaf.nbytes,
                plain_bytes=held * leaf.nbytes,
                finding="flat rows",
            )
            for prefix, leaf in flat
        ]
        return MemoryReport(
            transitions=self._count(),
            fields=tuple(fields),
            staging_bytes=self._assembler.staging.nbytes,
            segments=self._segments.count if self._large else 0,
        )

    def _report_observation(self, i: int, leaf: Leaf, held: int, touched: int) -> FieldReport:
        name, plain = _name("obs", leaf), 2 * held * leaf.nbytes
        if i in self._small:
            ring = self._small[i]
            rows = touched * leaf.nbytes * (1 if ring.is_shared else 2)
            return FieldReport(name, 0, 0, rows + ring.apart_bytes, plain, ring.describe(held))
        field = self._large.index(i)
        slices, log = self._segments.field_bytes(field)
        cursors = touched * self._segments.cursor_bytes
        finding = self._segments.describe(field)
        return FieldReport(name, slices, log + cursors, 0, plain, finding)

    def _ring(self, leaf: Leaf) -> Array:
        return new_ring(self._ring_ticks, self._lanes, leaf)

    def _flat_slots(self, ids: NDArray[np.int64], ticks_later: int = 0) -> NDArray[np.int64]:
        """Where the rows of `ids` stand in a ring whose tick and lane axes are one."""
        return (ids + ticks_later * self._lanes) % (self._ring_ticks * self._lanes)

    @property
    def _first_tick(self) -> int:
        return max(0, self._next_tick - self._capacity_ticks)

    def _held(self) -> Held:
        """Describe to a sampler what it may draw."""
        invalid = self._invalid if self._invalid_count else None

        def are_valid(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
            return np.asarray(~_take(invalid, self._flat_slots(ids)))

        return Held(self.first_id, self.next_id, None if invalid is None else are_valid)

    def _count(self) -> int:
        return (self._next_tick - self._first_tick) * self._lanes - self._invalid_count

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the memory was closed; make a new ReplayMemory")

    def _require_held(self, ids: NDArray[np.int64]) -> None:
        outside = (ids < self.first_id) | (ids >= self.next_id)
        if outside.any():
            raise TransitionIdError(
                f"ids holds {int(ids[outside][0])}, but ids {self.first_id} to {self.next_id - 1} "
                "are held; older ones were evicted, newer ones not added yet"
            )
        are_valid = self._held().are_valid
        if are_valid is not None and not (valid := are_valid(ids)).all():
            raise TransitionIdError(
                f"ids holds {int(ids[~valid][0])}, which was added with valid=False: that lane "
                "made no transition in that tick"
            )


def _name(prefix: str, leaf: Leaf) -> str:
    return ".".join(part for part in (prefix, leaf.name) if part)


def _take(ring: Array, slot: NDArray[np.int64]) -> Array:
    return ring.reshape(-1, *ring.shape[2:]).take(slot, axis=0)


def _require_count(argument: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(
            f"{argument} ({value!r}) must be a whole number of at least {least}"
        )


def _length_of(reward: Any) -> int:
    shape = np.shape(reward)
    if not shape:
        raise ArgumentError("reward is a scalar; extend takes arrays with a leading time axis")
    return shape[0]


def _as_ids(ids: Any) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"ids has shape {array.shape} and dtype {array.dtype}; pass a flat array of integers"
        )
    return array.astype(np.int64)
