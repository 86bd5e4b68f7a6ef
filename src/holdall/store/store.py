"""The store: every transition that is held, each field stored in the form that costs least.

    append -> Writer.append                    one native call, if the arguments need no conversion
    read   -> Reader.gather                    one native call

`append` writes one tick. When the open segment is full, the store closes it, decides how the next one is laid out, and
asks `placement` which blocks to compress, to move to disk or to evict. `read` returns rows by transition id.

Guarantee: `read(ids)` returns, bit for bit, what was written under these ids, in whatever form it is stored by then.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall._native import FULL, UNCHECKED, WRITTEN, Block, Catalog, Coded, Reader, Segment, Writer
from holdall.errors import DamageError, TransitionIdError
from holdall.schema import Array, Schema
from holdall.store import placement
from holdall.store.columns import Columns
from holdall.store.compactor import Compactor, Encode
from holdall.store.placement import BlockState, Budget, Form
from holdall.store.step import Step, check_step
from holdall.store.tuning import Tuning
from holdall.store.windows import Window, WindowScout

Layout = tuple[Any, ...]

_SHARED: Layout = ("shared",)
_PAIRED: Layout = ("paired",)
_MAX_EXCEPTION_SHARE = 0.5
"""Share of next observations stored apart from which on it is cheaper to store all of them."""
_MAX_BROKEN_SHARE = 0.5
"""Share of transitions that do not follow a window from which on another window is searched for."""
_ASSUMED_REWARD_BYTES = 8


class Store:
    """Every field of every transition of one memory.

    `append` and `read` may be called from any thread, because each of them changes or reads what is held in one native
    call. A lock guards only the work between two segments.

    Attributes:
        columns: Numbers of the columns and of their outputs.
        reward_dtype: Dtype of all rewards, which the first one sets. None before it.
    """

    def __init__(
        self,
        schema: Schema,
        capacity_ticks: int,
        tuning: Tuning,
        budget: Budget,
        encode: Encode,
        *,
        max_kept_bytes: int = 0,
    ) -> None:
        self.columns = Columns(schema)
        self.reward_dtype: np.dtype[Any] | None = None
        self._schema = schema
        self._tuning = tuning
        self._budget = budget
        self._compactor = Compactor(encode, tuning, budget.max_queued_bytes)
        self._roll_lock = threading.RLock()  # Re-entrant, because a signal handler may add, too.
        leaves = schema.observation.leaves
        self._windows = [Window.whole(leaf) for leaf in leaves]
        self._layouts = [
            self._windows[i].layout() if leaf.nbytes > tuning.small_field_bytes else _SHARED
            for i, leaf in enumerate(leaves)
        ]
        self._scouts = {
            i: WindowScout(leaf, tuning) for i, leaf in enumerate(leaves) if leaf.nbytes > tuning.tiny_field_bytes
        }
        self._is_searching = any(scout.is_searching for scout in self._scouts.values())
        sliced = {i for i, layout in enumerate(self._layouts) if layout[0] == "sliced"}
        tick_bytes = schema.num_envs * self.columns.row_bytes(sliced, _ASSUMED_REWARD_BYTES)
        self._writer = Writer(
            self.columns.native(),
            self.columns.groups(),
            schema.num_envs,
            capacity_ticks,
            tuning.segment_ticks(capacity_ticks, tick_bytes, budget.max_segment_bytes),
            budget.max_segment_bytes,
            self._native_layouts(),
        )
        self._reader = Reader(max_kept_bytes)

    # ---------------------------------------------------------------- which transitions are held

    @property
    def catalog(self) -> Catalog:
        """What is held right now."""
        return self._writer.catalog

    @property
    def first_id(self) -> int:
        """The oldest transition id that is held."""
        return self._writer.first_tick * self._schema.num_envs

    @property
    def next_id(self) -> int:
        """The id of the transition that is written next."""
        return self._writer.next_tick * self._schema.num_envs

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        catalog = self._writer.catalog
        return (catalog.next_tick - catalog.first_tick) * self._schema.num_envs - catalog.invalid_count

    # ---------------------------------------------------------------- writing

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write one tick, or raise ArgumentError and write nothing.

        Waits first if too many blocks are still uncompressed.
        """
        step: tuple[Any, ...] = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        outcome = self._writer.append(*step)
        while outcome != WRITTEN:
            if outcome == UNCHECKED:
                step = self._check((self._schema.num_envs,), step)
            elif outcome == FULL:
                self._roll()
                self._compactor.wait_for_room()
            outcome = self._writer.append(*step)
        if self._is_searching:
            self._search_windows(step)

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write whole trajectories: the arguments of `append` with a leading time axis.

        All arguments are checked before the first step is written. Every step is written completely or not at all.
        """
        given = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        steps = self._check((len(reward), self._schema.num_envs), given)
        written = 0
        while written < len(steps.reward):
            count = self._writer.extend(steps, written)
            for position in range(written, min(written + count, written + self._tuning.scout_max_pairs)):
                if self._is_searching:
                    self._search_windows(self._cut(steps, position))
            written += count
            if written < len(steps.reward):
                self._roll()
                self._compactor.wait_for_room()

    def rewrite(self, ids: NDArray[np.int64], extra: int, rows: Array) -> None:
        """Overwrite the rows of extra number `extra`. Raise TransitionIdError if an id is not held."""
        try:
            self._writer.rewrite(ids, self.columns.first_extra + extra, rows)
        except IndexError as error:
            raise TransitionIdError(str(error)) from None

    def evict(self, before_tick: int) -> None:
        """Drop all transitions of ticks before `before_tick`."""
        self._writer.evict(before_tick)

    def _check(self, leading: tuple[int, ...], step: tuple[Any, ...]) -> Step:
        """Return a step as the writer takes it. The first step sets the dtype of rewards."""
        checked = check_step(self._schema, leading, self.reward_dtype, *step)
        if self.reward_dtype is None:
            with self._roll_lock:
                if self.reward_dtype is None:
                    self._writer.set_type(self.columns.reward, int(checked.reward.dtype.num))
                    self.reward_dtype = checked.reward.dtype
        if checked.reward.dtype != self.reward_dtype:  # Another thread set it meanwhile.
            return check_step(self._schema, leading, self.reward_dtype, *step)
        return checked

    @staticmethod
    def _cut(steps: Step, position: int) -> tuple[Any, ...]:
        """Return the observations of one step of several, in the places that they have in a step."""
        obs = tuple(array[position] for array in steps.obs)
        next_obs = tuple(array[position] for array in steps.next_obs)
        return (obs, None, None, next_obs, None, None, None, None)

    # ---------------------------------------------------------------- reading

    def read(self, ids: NDArray[np.int64], outputs: tuple[int, ...]) -> tuple[Array, ...]:
        """Return the rows of `ids`, one array per output of `Columns`. Raise TransitionIdError if an id is not held."""
        try:
            return self._reader.gather(self._writer.catalog, ids, outputs)
        except IndexError as error:
            raise TransitionIdError(str(error)) from None
        except ValueError as error:
            raise DamageError(f"A transition cannot be read: {error}.") from error

    # ---------------------------------------------------------------- between two segments

    def _roll(self) -> None:
        """Close the open segment and start the next one with the layouts that fit its data."""
        with self._roll_lock:
            closed = self._writer.catalog.segments[-1]
            if closed.ticks == 0:
                return
            self._adapt_layouts(closed)
            self._writer.roll(self._native_layouts())
            self._balance()

    def _balance(self) -> None:
        """Compare what is held with the budget, and start the work that brings it back within the budget.

        Everything here is derived from the catalog. If an interrupt stops it half-way, the next call decides again.
        """
        catalog = self._writer.catalog
        blocks, states = describe_blocks(catalog)
        plan = placement.plan([*states, *describe_rows(catalog)], 0, self._budget)
        if plan.evict_before_tick is not None:
            self._writer.evict(plan.evict_before_tick)
        self._compactor.forget(blocks)
        self._compactor.submit(blocks[position] for position in plan.to_compress)

    def _adapt_layouts(self, closed: Segment) -> None:
        """Choose other layouts for fields whose last segment did not share what the layout expects."""
        transitions = closed.ticks * self._schema.num_envs
        for i, part in enumerate(closed.parts[: len(self._layouts)]):
            if part.kind == "shared" and part.exceptions > _MAX_EXCEPTION_SHARE * transitions:
                self._layouts[i] = _PAIRED
            is_broken = part.kind == "sliced" and part.broken > _MAX_BROKEN_SHARE * transitions
            has_no_window = self._windows[i].count == 1 or is_broken
            if has_no_window and i in self._scouts:
                self._scouts[i].end_segment()
        self._is_searching = any(scout.is_searching for scout in self._scouts.values())

    def _search_windows(self, step: tuple[Any, ...]) -> None:
        """Show a tick to all scouts. Use the windows that they find from the next segment on."""
        leading = (self._schema.num_envs,)
        obs = self._leaves_of(step[0], "obs")
        next_obs = self._leaves_of(step[3], "next_obs")
        has_found = False
        for i, scout in self._scouts.items():
            shape = (*leading, *self._schema.observation.leaves[i].shape)
            if not scout.look(obs[i].reshape(shape), next_obs[i].reshape(shape)):
                continue
            if scout.window is not None and scout.window != self._windows[i]:
                self._windows[i] = scout.window
                self._layouts[i] = scout.window.layout()
                has_found = True
        self._is_searching = any(scout.is_searching for scout in self._scouts.values())
        if has_found:
            self._roll()

    def _leaves_of(self, observation: Any, argument: str) -> Any:
        """Return the arrays of an observation that the writer accepted, in leaf order."""
        if isinstance(observation, tuple):
            return observation
        return self._schema.observation.flatten(observation, (self._schema.num_envs,), argument)

    def _native_layouts(self) -> tuple[Layout | None, ...]:
        others = self.columns.flags + 1 - len(self._layouts)
        return (*self._layouts, *[None] * others)

    def wait_idle(self) -> None:
        """Wait until every block that was submitted for compression is compressed."""
        self._compactor.wait_idle()

    def close(self) -> None:
        """Stop the compactor. Nothing may be written after this."""
        self._compactor.close()

    def describe(self, leaf: int) -> str:
        """Return how observation leaf number `leaf` is stored, for reports."""
        layout = self._layouts[leaf]
        if layout == _SHARED:
            return "each observation once"
        if layout == _PAIRED:
            return "observations and next observations in full"
        return self._windows[leaf].describe()


def describe_blocks(catalog: Catalog) -> tuple[list[Block], list[BlockState]]:
    """Return every block of a catalog once, and what placement has to know of it."""
    ticks: dict[Block, tuple[int, int]] = {}
    for segment in catalog.segments:
        end_tick = segment.first_tick + segment.ticks
        for part in segment.parts:
            if part.block is not None:
                first_tick, _ = ticks.get(part.block, (segment.first_tick, end_tick))
                ticks[part.block] = (first_tick, end_tick)
    states = [_describe_block(block, first_tick, end_tick) for block, (first_tick, end_tick) in ticks.items()]
    return list(ticks), states


def _describe_block(block: Block, first_tick: int, end_tick: int) -> BlockState:
    form = block.form
    raw_bytes = block.slice_count * block.slice_bytes
    if isinstance(form, Coded):
        return BlockState(first_tick, end_tick, raw_bytes, form.nbytes, Form.CODED)
    return BlockState(first_tick, end_tick, raw_bytes, is_open=block.is_open)


def describe_rows(catalog: Catalog) -> list[BlockState]:
    """Return what placement has to know of the rows and logs of every segment."""
    last = catalog.segments[-1]
    return [
        BlockState(
            segment.first_tick,
            segment.first_tick + segment.ticks,
            sum(part.nbytes for part in segment.parts),
            form=Form.ROWS,
            is_open=segment is last,
        )
        for segment in catalog.segments
    ]
