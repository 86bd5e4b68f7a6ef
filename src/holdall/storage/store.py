"""The store: every field of every transition held, each where it costs least.

In:  checked ticks, in order.  Out: rows of small fields and places of large ones, by id.
Invariant: what is read under an id is, bit for bit, what was written under it.

Observation fields of a few bytes lie in flat rings, large ones in segments of unique slices;
those in between start in a ring and move if a window is found in their first steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, Schema, as_bytes
from holdall.storage.blocks import SealedSlices, SliceBlock
from holdall.storage.layout import WindowScout
from holdall.storage.records import SealedSegment, travelling
from holdall.storage.rings import FastDictTick, FastRows, FastTick, ObservationRing, new_ring
from holdall.storage.sealer import Sealer
from holdall.storage.segment import Segments
from holdall.storage.slices import Kernels, Places
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    FullBlock,
    RowChunk,
    StoreContent,
    Tick,
    chunk_ticks_of,
    is_settled,
    put_rows,
    rows_of,
)
from holdall.storage.spill import SpillFolder
from holdall.storage.tiers import Budget, Tiers

_TINY_BYTES = 256
"""Observation fields up to this size always lie in a flat ring: nothing beats it."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in a flat ring, unless a window is found in their first steps."""
_RINGS_OF_A_BUDGET = 8
"""A ring that takes more than this share of a budget in bytes is none: segments can be compressed and spilled."""
_FEWEST_TICKS = 2
"""What the smallest segment has to hold."""
_REWARD_BYTES = 8
_FLAG = Leaf("", (), np.dtype(np.bool_))

_LOG = logging.getLogger("holdall")


class Rows(NamedTuple):
    """What was read under some ids: copies of the small fields, places of the large ones."""

    small: dict[int, tuple[Array, Array]]  # by observation leaf: obs and next_obs
    large: tuple[int, ...]  # observation leaves whose places follow, in this order
    places: Places | None
    action: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    extras: list[Array]


class Store:
    """All fields of a memory. Not locked: the memory that owns it is.

    `write(tick)`, `read(ids)`, `freeze()`, `adopt(segment)`. A shard is a store of one lane that only adopts, in which
    a transition's id is the number of its row.

    Args:
        first_tick: Number of the first tick that will be held.
        large: Observation leaves that lie in segments, and always will; None: by their size and what is found.
    """

    def __init__(
        self,
        schema: Schema,
        capacity_ticks: int,
        kernels: Kernels,
        lock: threading.Lock,
        budget: Budget,
        folder: SpillFolder | None = None,
        *,
        first_tick: int = 0,
        large: Collection[int] | None = None,
    ) -> None:
        self.next_tick = self._begun_at = self._not_before = first_tick
        self.reward_dtype: np.dtype[Any] | None = None
        self.quick: FastTick | FastDictTick | None = None
        self._schema = schema
        self._lanes = schema.num_envs
        self._capacity_ticks = capacity_ticks
        self._ring_ticks = capacity_ticks + 1
        observed = dict(enumerate(schema.observation.leaves))
        self._small = {
            i: ObservationRing(leaf, self._lanes, self._ring_ticks)
            for i, leaf in observed.items()
            if (self._begins_small(leaf, budget) if large is None else i not in large)
        }
        self._scouts = {
            i: WindowScout(leaf)
            for i, leaf in observed.items()
            if i in self._small and leaf.nbytes > _TINY_BYTES and large is None
        }
        self._large = [i for i in observed if i not in self._small]
        self._coder = kernels.coder
        self._lock = lock
        self._folder = folder
        self._is_fit_known = budget.limit is None or folder is not None
        self.sealer = Sealer(kernels.coder, budget.cost_cap, budget.hands, self._take_back, folder)
        tiers = Tiers(self.sealer, spills=folder is not None, measures_early=not self._is_fit_known)
        leaves = [observed[i] for i in self._large]
        self._segments = Segments(kernels, leaves, self._lanes, capacity_ticks, tiers, budget, first_tick)
        self._segments.fixed_bytes = self._ring_bytes()
        tick_bytes = 2 * self._lanes * sum(leaf.nbytes for leaf in leaves)
        budget.require(self._segments.fixed_bytes, _FEWEST_TICKS * tick_bytes)
        self._action = [self._ring(leaf) for leaf in schema.action.leaves]
        self._extras = [self._ring(leaf) for leaf in schema.extras.leaves]
        self._reward: Array | None = None
        self._terminated = self._ring(_FLAG)
        self._truncated = self._ring(_FLAG)
        self._invalid: Array | None = None
        self._invalid_count = 0  # lanes that made no transition in the ticks from _counted_from on
        self._counted_from = first_tick
        self.flags_changed = 0
        self._frozen: list[FrozenRows] = []  # snapshots whose rows are still to be read
        self._versions: dict[int, int] = {}  # how often flags of a chunk of rows were set anew

    @property
    def first_tick(self) -> int:
        """Oldest tick held: by capacity, or by what fits the budget."""
        by_capacity = max(self._not_before, self.next_tick - self._capacity_ticks)
        return max(by_capacity, self._segments.first_tick) if self._large else by_capacity

    @property
    def transitions(self) -> int:
        """Transitions held, without lanes that made none."""
        return (self.next_tick - self.first_tick) * self._lanes - self._count_invalid()

    def write(self, tick: Tick) -> None:
        """Write one tick whose arrays were checked; the oldest leaves if the store is full."""
        now = self.next_tick
        slot = now % self._ring_ticks
        for frozen in self._frozen:
            frozen.before_ticks(now, now + 1)
        for i, ring in self._small.items():
            ring.write(now, tick.obs[i], tick.next_obs[i])
        if self._large:
            large = self._large
            self._write_large(now, [tick.obs[i] for i in large], [tick.next_obs[i] for i in large])
        for row, value in zip(self._action, tick.action, strict=True):
            row[slot] = value
        for row, value in zip(self._extras, tick.extras, strict=True):
            row[slot] = value
        self._reward_ring(tick.reward.dtype)[slot] = tick.reward
        self._terminated[slot] = tick.terminated
        self._truncated[slot] = tick.truncated
        if tick.valid is not None or self._invalid is not None:
            self._mark_valid(slot, tick.valid)
        self.next_tick = now + 1
        if self._scouts:
            self._scout(tick)
        self.quick = self._quick_tick()

    def require(self, segment: SealedSegment) -> None:
        """Refuse a segment that `adopt` would refuse."""
        dtype = segment.rows.columns["reward.0"].dtype
        if self.reward_dtype is not None and self.reward_dtype != dtype:
            raise ArgumentError(
                f"reward has dtype {dtype}, the first add had {self.reward_dtype}; holdall never casts, so have every "
                f"writer pass np.asarray(reward, dtype=np.{self.reward_dtype.name})"
            )
        if segment.large != tuple(self._large) or self._lanes not in (1, segment.lanes):
            raise ArgumentError(
                f"a segment of {segment.lanes} lanes whose leaves {segment.large} are large came to a store of "
                f"{self._lanes} lanes whose leaves {tuple(self._large)} are; make both of the same schema"
            )

    def adopt(self, segment: SealedSegment) -> int:
        """Take over a segment that was sealed elsewhere as the newest ticks; return the number of its first one.

        A store of one lane takes over the lanes of a segment one after another, tick by tick: row r of it becomes tick
        first + r. Its slices stay as they came. The oldest ticks leave if the store is full.
        """
        self.require(segment)
        if segment.lanes != self._lanes:
            segment = segment.in_one_lane()
        first, ticks = self.next_tick, segment.rows.ticks
        for frozen in self._frozen:
            frozen.before_ticks(first, first + ticks)
        for ring in self._small.values():
            ring.pair(max(self.first_tick, first + 2 - self._ring_ticks), first)
        self._count_invalid(first + ticks - self._capacity_ticks)  # while the ticks that leave are still there
        held = min(ticks, self._capacity_ticks)
        columns = {name: column[ticks - held :] for name, column in segment.rows.columns.items()}
        self._reward_ring(columns["reward.0"].dtype)
        if "invalid.0" in columns and self._invalid is None:
            self._invalid = self._ring(_FLAG)
        if self._invalid is not None:
            valid = np.zeros((held, self._lanes), np.bool_)
            self._invalid_count += int(np.count_nonzero(columns.setdefault("invalid.0", valid)))
        for name, row in self._columns().items():
            if not name.startswith("cursors."):
                put_rows(row, first + ticks - held, columns[name])
        if self._large:
            cursors = [columns[f"cursors.{i}"] for i in self._large]
            self._segments.adopt(first, ticks, segment.parts, cursors)
        self.next_tick = first + ticks
        self._segments.evict_before(self.next_tick - self._capacity_ticks)
        return first

    def segment_at(self, tick: int) -> SealedSegment:
        """Return the segment that holds a tick, from its first tick that is held on, as one that another can adopt.

        Walk over all of them by asking for `first_tick`, and then for the tick behind the last of each.
        """
        if self._large:
            found = self._segments.segment_at(tick)
            first, end = max(found.first_tick, self.first_tick), found.first_tick + found.ticks
            parts = tuple(travelling(part, self._coder) for part in found.parts)
        else:
            first, end, parts = tick, min(self.next_tick, tick + self.chunk_ticks), ()
        ids = np.arange(first * self._lanes, end * self._lanes)
        columns = {name: rows_of(ring, first, end) for name, ring in self._columns().items() if name != "invalid.0"}
        for i, ring in self._small.items():
            _, following = ring.read(ids, self._slots(ids), self._slots(ids, 1))
            columns[f"next.{i}"] = following.reshape(columns[f"obs.{i}"].shape)
        if not (valid := self.are_valid(ids)).all():
            columns["invalid.0"] = ~valid.reshape(end - first, self._lanes)
        order = sorted(range(len(parts)), key=lambda field: self._large[field])
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts[field] for field in order))

    def forget_before(self, tick: int) -> None:
        """Drop the ticks before one."""
        self._not_before = max(self._not_before, min(tick, self.next_tick))
        self._segments.evict_before(self._not_before)

    def read(self, ids: NDArray[np.int64]) -> Rows:
        """Copy the small fields of `ids`, all of them held, and find the large ones."""
        slot, next_slot = self._slots(ids), self._slots(ids, 1)
        large = tuple(self._large)
        return Rows(
            small={i: ring.read(ids, slot, next_slot) for i, ring in self._small.items()},
            large=large,
            places=self._segments.places(*np.divmod(ids, self._lanes)) if large else None,
            action=[_take(ring, slot) for ring in self._action],
            reward=self.rewards(ids),
            terminated=_take(self._terminated, slot),
            truncated=_take(self._truncated, slot),
            extras=[_take(ring, slot) for ring in self._extras],
        )

    def set_flags(self, ids: NDArray[np.int64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Overwrite how transitions ended."""
        self.flags_changed += 1
        for frozen in self._frozen:
            frozen.before_flags(ids // self._lanes)
        for number in np.unique(ids // (self._lanes * self.chunk_ticks)).tolist():
            self._versions[number] = self._versions.get(number, 0) + 1
        slot = self._slots(ids)
        self._terminated.reshape(-1)[slot] = terminated
        self._truncated.reshape(-1)[slot] = truncated

    @property
    def all_valid(self) -> bool:
        """Whether every lane made a transition in every tick held."""
        return self._count_invalid() == 0

    @property
    def capacity_that_fits(self) -> int | None:
        """Transitions that a budget in bytes holds without a disk tier; None if it is not known, or holds all."""
        ticks = self._segments.ticks_that_fit if self._large and self._folder is None else None
        return None if ticks is None or ticks >= self._capacity_ticks else ticks * self._lanes

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell real transitions from lanes that made none."""
        if self._invalid is None:
            return np.ones(ids.shape, np.bool_)
        return np.asarray(~_take(self._invalid, self._slots(ids)))

    def are_ends(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell the last transitions of episodes."""
        slot = self._slots(ids)
        return np.asarray(_take(self._terminated, slot) | _take(self._truncated, slot))

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, of any shape."""
        return np.empty(0, np.float32) if self._reward is None else _take(self._reward, self._slots(ids))

    @property
    def large_segments(self) -> Segments:
        """The segments of the large fields."""
        return self._segments

    @property
    def large_fields(self) -> int:
        """Fields that lie in segments."""
        return len(self._large)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy rewards and flags of `ids`, of any shape."""
        slot = self._slots(ids)
        return self.rewards(ids), _take(self._terminated, slot), _take(self._truncated, slot)

    @property
    def segments(self) -> int:
        """Segments held, the open one among them."""
        return self._segments.count if self._large else 0

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held = (self.next_tick - self.first_tick) * self._lanes
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        schema = self._schema
        observed = [
            self._report_observation(i, leaf, held, touched) for i, leaf in enumerate(schema.observation.leaves)
        ]
        flat = [replace(leaf, name=_name("action", leaf)) for leaf in schema.action.leaves]
        flat += [replace(leaf, name=_name("extras", leaf)) for leaf in schema.extras.leaves]
        if self.reward_dtype is not None:
            flat.append(Leaf("reward", (), self.reward_dtype))
        flat += [replace(_FLAG, name="terminated"), replace(_FLAG, name="truncated")]
        if self._invalid is not None:
            flat.append(replace(_FLAG, name="valid"))
        return observed + [
            FieldReport(
                name=leaf.name,
                slice_bytes=0,
                log_bytes=0,
                row_bytes=touched * leaf.nbytes,
                plain_bytes=held * leaf.nbytes,
                finding="flat rows",
            )
            for leaf in flat
        ]

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        schema = self._schema
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(schema.observation.leaves):
            small = self._small.get(i)
            held = self._segments.arrays(self._large.index(i)) if small is None else small.arrays()
            found += [(_name("obs", leaf), array) for array in held]
        found += [(_name("action", leaf), ring) for leaf, ring in zip(schema.action.leaves, self._action, strict=True)]
        found += [(_name("extras", leaf), ring) for leaf, ring in zip(schema.extras.leaves, self._extras, strict=True)]
        rest = ("reward", "terminated", "truncated", "invalid")
        found += [(name, ring) for name in rest for ring in self._rings()[name]]
        return found + [("spare", array) for array in self._segments.spare_arrays()]

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(self._segments.field_bytes(field).disk for field in range(len(self._large)))

    def close(self) -> None:
        """End the sealer and delete what was spilled."""
        self.sealer.stop()
        if self._folder is not None:
            self._folder.close()

    def state(self) -> dict[str, Any]:
        """Return all that is held, as plain arrays that share memory with the store."""
        # One place more than ticks were written: it holds the newest next observations.
        ticks = min(self.next_tick + 1, self._ring_ticks)
        return {
            "next_tick": self.next_tick,
            "invalid_count": self._count_invalid(),
            "counted_from": self._counted_from,
            "large": self._large,
            "scouts": self._scouts,
            "small": {i: ring.state(ticks) for i, ring in self._small.items()},
            "segments": self._segments.state(),
            "rings": {name: [ring[:ticks] for ring in rings] for name, rings in self._rings().items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned elsewhere, in a store as it was made."""
        leaves = self._schema.observation.leaves
        self.next_tick, self._invalid_count = state["next_tick"], state["invalid_count"]
        self._counted_from = state["counted_from"]
        self._large, self._scouts = state["large"], state["scouts"]
        self._small = {i: ring for i, ring in self._small.items() if i in state["small"]}
        for i, ring in self._small.items():
            ring.restore(state["small"][i])
        self._segments.restore(state["segments"], [leaves[i] for i in self._large])
        if state["rings"]["reward"]:
            self._reward_ring(state["rings"]["reward"][0].dtype)
        if state["rings"]["invalid"]:
            self._invalid = self._ring(_FLAG)
        for name, rings in self._rings().items():
            for rows, past in zip(rings, state["rings"][name], strict=True):
                rows[: len(past)] = past

    @property
    def chunk_ticks(self) -> int:
        """Ticks whose rows are written to a checkpoint as one chunk."""
        return chunk_ticks_of(sum(ring[0].nbytes for ring in self._columns().values()))

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return what is held now; `release` when its rows were read.

        Args:
            saved: Chunks of rows that are not needed, by number: the version and the columns in which they were saved.
        """
        columns = self._columns()
        chunk_ticks, names = self.chunk_ticks, tuple(columns)
        self._versions = {n: v for n, v in self._versions.items() if (n + 1) * chunk_ticks > self.first_tick}
        known = [
            number
            for number, (version, written) in saved.items()
            if version == self._versions.get(number, 0)
            and written == names
            and is_settled(number, chunk_ticks, self.next_tick)
        ]
        apart = {f"obs.{i}": ring.apart() for i, ring in self._small.items() if ring.is_shared}
        rows = FrozenRows(columns, apart, self.first_tick, self.next_tick, self._lanes, chunk_ticks, known)
        if rows.is_pending:
            self._frozen.append(rows)
            self.quick = None
        return FrozenStore(
            next_tick=self.next_tick,
            first_tick=self.first_tick,
            rows=rows,
            versions=dict(self._versions),
            large=list(self._large),
            segments=self._segments.freeze() if self._large else None,
            newest={
                i: ring.newest_next(self.next_tick)
                for i, ring in self._small.items()
                if ring.is_shared and self.next_tick
            },
            paired=[i for i, ring in self._small.items() if not ring.is_shared],
            scouts={str(i): scout.state() for i, scout in self._scouts.items()},
            reward_dtype=self.reward_dtype,
            has_invalid=self._invalid is not None,
            transitions=self.transitions,
        )

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are not known yet, newest first."""
        return self._segments.full_blocks(is_known) if self._large else []

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        rows.drop()
        self._frozen = [frozen for frozen in self._frozen if frozen is not rows]

    def thaw(self, content: StoreContent) -> None:
        """Take over what was saved, in a store as it was made; its rows follow with `take_rows`, oldest first."""
        leaves = self._schema.observation.leaves
        self._not_before, self.next_tick, self._large = content.first_tick, content.next_tick, list(content.large)
        self._small = {i: ring for i, ring in self._small.items() if i not in self._large}
        for i, ring in self._small.items():
            ring.refill(self.next_tick, content.newest.get(i), is_paired=i in content.paired)
        self._scouts = {i: scout for i, scout in self._scouts.items() if str(i) in content.scouts}
        for i, scout in self._scouts.items():
            scout.restore(content.scouts[str(i)])
        self._segments.thaw(content, [leaves[i] for i in self._large])
        if content.reward_dtype is not None:
            self._reward_ring(content.reward_dtype)
        if content.has_invalid:
            self._invalid = self._ring(_FLAG)
        self._counted_from = self.first_tick

    @property
    def row_layout(self) -> tuple[int, tuple[str, ...]]:
        """Ticks in a chunk of rows, and its columns."""
        return self.chunk_ticks, tuple(self._columns())

    def columns_like(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of one tick of every column."""
        return {name: (ring.shape[1:], ring.dtype) for name, ring in self._columns().items()}

    def take_rows(self, chunk: RowChunk) -> None:
        """Take over the rows of some ticks; those that this store would not hold any more are passed over."""
        first = max(chunk.first_tick, self.first_tick)
        skipped = first - chunk.first_tick
        if skipped >= chunk.ticks:
            return
        rows = {name: column[skipped:] for name, column in chunk.columns.items()}
        for name, ring in self._columns().items():
            if not name.startswith(("obs.", "next.")):
                put_rows(ring, first, rows[name])
        for i, small in self._small.items():
            apart = chunk.apart.get(f"obs.{i}")
            if apart is not None:
                kept = int(np.searchsorted(apart[0], first * self._lanes))
                apart = apart[0][kept:], apart[1][kept:]
            small.put(first, rows[f"obs.{i}"], rows.get(f"next.{i}"), apart)
        if self._invalid is not None:
            self._invalid_count += int(np.count_nonzero(rows["invalid.0"]))

    def _columns(self) -> dict[str, Array]:
        """All rings by name, those of observations and cursors too: what a chunk of rows consists of."""
        columns = {f"{name}.{i}": ring for name, rings in self._rings().items() for i, ring in enumerate(rings)}
        for i, small in self._small.items():
            columns |= {f"{kind}.{i}": ring for kind, ring in small.columns().items()}
        cursors = zip(self._large, self._segments.columns(), strict=True)
        return columns | {f"cursors.{i}": ring for i, ring in cursors}

    def _rings(self) -> dict[str, list[Array]]:
        """All flat rings but those of observations, by name."""
        return {
            "action": self._action,
            "extras": self._extras,
            "reward": [] if self._reward is None else [self._reward],
            "terminated": [self._terminated],
            "truncated": [self._truncated],
            "invalid": [] if self._invalid is None else [self._invalid],
        }

    def _report_observation(self, i: int, leaf: Leaf, held: int, touched: int) -> FieldReport:
        name, plain = _name("obs", leaf), 2 * held * leaf.nbytes
        if i in self._small:
            ring = self._small[i]
            rows = touched * leaf.nbytes * (1 if ring.is_shared else 2)
            kept = min(self.next_tick, self._capacity_ticks) * self._lanes  # also of ticks that left early
            return FieldReport(name, 0, 0, rows + ring.apart_bytes, plain, ring.describe(kept))
        field = self._large.index(i)
        found = self._segments.field_bytes(field)
        log = found.log + touched * self._segments.cursor_bytes
        finding = self._segments.describe(field)
        return FieldReport(name, found.raw + found.sealed, log, 0, plain, finding, found.sealed, found.disk)

    def _take_back(self, block: SliceBlock, sealed: SealedSlices | None) -> None:
        """Go on with a block that the sealer is done with; called by its thread."""
        with self._lock:
            self._segments.take_back(block, sealed)
            if self._is_fit_known or self._segments.ticks_that_fit is None:
                return
            self._is_fit_known = True
            fits = self.capacity_that_fits
        if fits is not None:
            _LOG.warning(
                "budget holds about %d of the %d transitions of this capacity: from then on the oldest leave early; "
                "raise budget, name a spill_dir, or lower capacity",
                fits,
                self._capacity_ticks * self._lanes,
            )

    def _begins_small(self, leaf: Leaf, budget: Budget) -> bool:
        """Whether a field lies in a ring, raw for the whole capacity, as long as no window is found."""
        ring_bytes = self._ring_ticks * self._lanes * leaf.nbytes
        fits = budget.limit is None or ring_bytes * _RINGS_OF_A_BUDGET <= budget.limit
        return leaf.nbytes <= (_SMALL_BYTES if fits else _TINY_BYTES)

    def _reward_ring(self, dtype: np.dtype[Any]) -> Array:
        """Return the ring of rewards, which the first one makes."""
        if self._reward is None:
            self.reward_dtype = dtype
            self._reward = self._ring(Leaf("", (), dtype))
        return self._reward

    def _ring_bytes(self) -> int:
        """What rings and cursors take once all of their rows were written."""
        schema = self._schema
        rows = sum(ring.leaf.nbytes * (1 if ring.is_shared else 2) for ring in self._small.values())
        rows += sum(leaf.nbytes for leaf in (*schema.action.leaves, *schema.extras.leaves))
        rows += _REWARD_BYTES + 3 * _FLAG.nbytes + self._segments.cursor_bytes * len(self._large)
        return self._ring_ticks * self._lanes * rows

    def _quick_tick(self) -> FastTick | FastDictTick | None:
        """Offer the short way to write a tick, unless fields are there that it does not know."""
        if self._frozen:  # the short way does not save what it is about to write over
            return None
        if self.quick is not None:
            return None if self._invalid is not None else self.quick
        known = len(self._action) == 1 and not self._extras and self._invalid is None
        if not known or self._scouts or self._reward is None:
            return None
        rows = FastRows(self._action[0], self._reward, self._terminated, self._truncated)
        tree = self._schema.observation
        fields = {i: ((self._lanes, *leaf.shape), leaf.dtype) for i, leaf in enumerate(tree.leaves)}
        if isinstance(tree.structure, int):
            write = self._small[0].write if self._small else self._write_one_large
            return FastTick(rows, *fields[0], write, fills_blocks=not self._small)
        keys = tree.keys
        if keys is None:
            return None
        return FastDictTick(
            rows,
            [(keys[i], *field) for i, field in fields.items()],
            [(keys[i], ring.write) for i, ring in self._small.items()],
            [keys[i] for i in self._large],
            self._write_large,
        )

    def _write_large(self, tick: int, obs: list[Array], next_obs: list[Array]) -> None:
        """Write the large fields, and drop the segments that leave with the oldest tick."""
        self._segments.append(tick, obs, next_obs)
        if tick >= self._capacity_ticks:
            self._segments.evict_before(tick + 1 - self._capacity_ticks)

    def _write_one_large(self, tick: int, obs: Array, next_obs: Array) -> None:
        """Do the same where there is one large field only."""
        self._segments.append_one(tick, obs, next_obs)
        if tick >= self._capacity_ticks:
            self._segments.evict_before(tick + 1 - self._capacity_ticks)

    def _mark_valid(self, slot: int, valid: Array | None) -> None:
        """Keep count of the lanes that made no transition."""
        if self._invalid is None:
            self._invalid = self._ring(_FLAG)
        self._count_invalid()  # while the ticks that left are still to be seen
        self._invalid[slot] = False if valid is None else ~valid
        self._invalid_count += int(np.count_nonzero(self._invalid[slot]))

    def _count_invalid(self, from_tick: int = 0) -> int:
        """Count the lanes of all ticks held, from one on, that made no transition."""
        first = max(self.first_tick, from_tick)
        if self._invalid is not None and first > self._counted_from:
            left = np.arange(self._counted_from, min(first, self.next_tick)) % self._ring_ticks
            self._invalid_count -= int(np.count_nonzero(self._invalid[left]))
        self._counted_from = max(first, self._counted_from)
        return self._invalid_count

    def _scout(self, tick: Tick) -> None:
        """Look for windows in rings; where one is found, move the field to the segments."""
        for i, scout in tuple(self._scouts.items()):
            scout.look(as_bytes(tick.obs[i], self._lanes), as_bytes(tick.next_obs[i], self._lanes))
            movable = self._segments.can_admit(self.next_tick)
            if scout.done or not movable:
                del self._scouts[i]
                if scout.finding is not None and movable:
                    self._move_to_segments(i, scout)

    def _move_to_segments(self, i: int, scout: WindowScout) -> None:
        if scout.finding is None:
            return
        ring = self._small.pop(i)
        field = self._segments.admit(ring.leaf, scout.finding, self.next_tick)
        self._large.append(i)
        self._segments.fixed_bytes = self._ring_bytes()
        for tick in range(self.next_tick):
            ids = np.arange(tick * self._lanes, (tick + 1) * self._lanes)
            obs, next_obs = ring.read(ids, self._slots(ids), self._slots(ids, 1))
            self._segments.replay(field, tick, obs, next_obs)

    def _ring(self, leaf: Leaf) -> Array:
        return new_ring(self._ring_ticks, self._lanes, leaf)

    def _slots(self, ids: NDArray[np.int64], ticks_later: int = 0) -> NDArray[np.int64]:
        """Where the rows of `ids` stand in a ring whose tick and lane axes are one."""
        return (ids + ticks_later * self._lanes) % (self._ring_ticks * self._lanes)


def _take(ring: Array, slot: NDArray[np.int64]) -> Array:
    return ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:]).take(slot, axis=0)


def _name(prefix: str, leaf: Leaf) -> str:
    return f"{prefix}.{leaf.name}" if leaf.name else prefix
