"""The rows of a shard, and how they are drawn.

Row numbers only grow. A number names one transition for as long as the transition is held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall import sampling
from holdall.batch import Draw
from holdall.checkpoint import MemorySnapshot, Restored, runs_of, runs_state
from holdall.cluster.answer import Answer, pack_answer
from holdall.cluster.ids import index_in_life
from holdall.cluster.journal import LOADED_WRITER, Entry, Journal, Run
from holdall.cluster.messages import ShardCounters
from holdall.cluster.segment import ReceivedSegment, unpack_payload
from holdall.cluster.shard_store import ShardStore
from holdall.cluster.shared_block import BlockRows, OpenedBlocks, block_bytes, lay_out
from holdall.cluster.tuning import ClusterTuning
from holdall.delivery.drawn_rows import DrawnRows, read_goal
from holdall.errors import DamageError
from holdall.machine import available_bytes
from holdall.sampling import ComposedSampler, Held, Hindsight, Likelihood, RowOrder, Sampler, WriterRun
from holdall.schema import Bytes
from holdall.schema_json import schema_from_json
from holdall.store.view import View

_RAW_DIVISOR = 4
"""The shards of a machine use at most a quarter of its available memory for uncompressed blocks."""


class ShardDraw(NamedTuple):
    """Rows that were drawn and not read yet."""

    view: View
    draw: Draw
    scaled: NDArray[np.float64]  # Mass of each row: 1, or its scaled priority. See `Likelihood`.
    order: NDArray[np.int64] | None  # For each row, its position in the request. None: in the order of the request.


class ShardData:
    """All rows of a shard, its sampler and its generator.

    Not thread-safe: the shard holds its lock, except during `read`.

    Args:
        schema_json: The memory's schema, see `schema_to_json`.
        capacity: Rows that are held at most.
        shards_per_machine: Number of shards that share the cores and the memory of this machine.

    Attributes:
        inserted: Transitions ever accepted.
        changes: Changes of rows or priorities since the shard was started.
        mass: Sum of the masses of all rows, see `Likelihood`.
        store: The rows.
    """

    def __init__(
        self,
        schema_json: dict[str, Any],
        capacity: int,
        sampler: Sampler,
        generator: np.random.Generator,
        tuning: ClusterTuning,
        shards_per_machine: int = 1,
    ) -> None:
        self.schema_json = schema_json | {"num_envs": 1}
        self.capacity = capacity
        self.sampler = sampler
        self.generator = generator
        self.inserted = 0
        self.changes = 0
        self.mass = 0.0
        self.likelihood = Likelihood(sampler)
        self._tuning = tuning
        self._schema = schema_from_json(self.schema_json)
        self._threads = max(1, (os.cpu_count() or 1) // shards_per_machine)
        self._max_raw_bytes = available_bytes() // _RAW_DIVISOR // shards_per_machine
        self._blocks = OpenedBlocks()
        self._runs: deque[WriterRun] = deque()  # The runs of the rows that are held, oldest first.
        self._order = self._new_order()
        self.store = self._new_store(0)

    def start_at(self, first_row: int) -> None:
        """Drop all rows, and number the next row `first_row`."""
        self._runs.clear()
        self._order = self._new_order()
        self.store = self._new_store(first_row)
        self.mass = 0.0

    def _new_order(self) -> RowOrder | None:
        """Return an empty order of rows. Only samplers that follow episodes need one."""
        return RowOrder() if isinstance(self.sampler, ComposedSampler) else None

    def _new_store(self, first_row: int) -> ShardStore:
        return ShardStore(
            self._schema, self.capacity, first_row, self._threads, self._tuning.store, self._max_raw_bytes
        )

    @property
    def rows(self) -> range:
        """Rows that are held."""
        return range(self.store.first_row, self.store.next_row)

    # ---------------------------------------------------------------- rows that arrive

    def unpack(self, payload: bytes) -> ReceivedSegment:
        """Check and read a segment of a writer. Raise DamageError if it is not one of this memory."""
        return unpack_payload(payload, self.store.columns)

    def accept(self, entries: Iterable[Entry]) -> None:
        """Hold the rows of segments."""
        for entry in entries:
            self._adopt(entry)
        self._update_mass()

    def _adopt(self, entry: Entry) -> None:
        """Hold the rows of a segment. `mass` does not include them yet."""
        received = entry.segment or self.unpack(entry.payload)
        self.store.require_reward_dtype(received.reward_dtype)
        first_row = self.store.adopt(received.segment)
        run = entry.run or Run(entry.writer.hex(), received.first_tick, received.lanes)
        self._add_run(WriterRun(*run, first_row, received.rows))
        self.inserted += received.rows
        self.changes += 1

    def _add_run(self, run: WriterRun) -> None:
        self._runs.append(run)
        if self._order is not None:
            self._order.add(run, self.store.first_row)
        self._drop_old_runs()

    def _drop_old_runs(self) -> None:
        first_row = self.store.first_row
        while self._runs and self._runs[0].first_row + self._runs[0].rows <= first_row:
            self._runs.popleft()

    def replay(self, journal: Journal, *, retries: bool) -> None:
        """Take over a journal, and hold everything in it, see `Journal.open`."""
        for page in journal.open(retries=retries):
            if page.is_first:
                self.start_at(page.first_row)
            elif page.first_row != self.store.next_row:
                raise DamageError(
                    f"{journal.url} lacks the segments between rows {self.store.next_row} and {page.first_row}. Load a "
                    "checkpoint instead."
                )
            for entry in page.entries:
                self._adopt(entry)
        self.store.evict(journal.state.first_row)
        if self._order is not None:
            self._order.evict_before(self.store.first_row)
        # Without the number of the life, which the limiter would count as billions of transitions.
        self.inserted = index_in_life(self.store.next_row)
        if journal.priorities is not None:
            self._restore_priorities(journal.priorities)
        self._update_mass()

    def _restore_priorities(self, saved: dict[str, Any]) -> None:
        """Continue with the priorities of a journal, see `priorities`."""
        prioritized = self.likelihood.prioritized
        # Priorities that were scaled with other settings cannot be used.
        if prioritized is not None and saved["settings"] == [prioritized.alpha, prioritized.floor]:
            saved_sampler = {"kind": type(prioritized).__name__, "state": saved}
            sampling.resume_sampler(prioritized, saved_sampler, self.capacity, self.store.first_row)

    # ---------------------------------------------------------------- checkpoints

    def snapshot(self) -> MemorySnapshot:
        """Return everything that a checkpoint of the shard contains. Takes milliseconds."""
        self._drop_old_runs()
        state = {
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state()},
            "generator": sampling.get_generator_state(self.generator),
            "inserted": self.inserted,
            "runs": runs_state(self._runs),
        }
        store = self.store.snapshot()
        return MemorySnapshot(store, self.schema_json, self.capacity, state, coded_forms=self.store.coded_forms())

    def load(self, restored: Restored) -> None:
        """Hold the rows of a checkpoint, and continue to draw where it was saved. Blocks stay in their files."""
        entries = restored.entries
        self.start_at(entries[0].first_tick if entries else restored.manifest.next_tick)
        restored.fill(self.store)
        state = restored.state
        for run in runs_of(state["runs"]):
            self._add_run(run)
        self.inserted = int(state["inserted"])
        self.generator = sampling.restore_generator(state["generator"])
        sampling.resume_sampler(self.sampler, state["sampler"], self.capacity, self.store.first_row)
        self._update_mass()

    def write_loaded(self, journal: Journal, checkpoint: str, first_row: int) -> None:
        """Write the segments of a checkpoint to a journal.

        Args:
            checkpoint: Name of the checkpoint. The journal's state has it until all segments are written.
            first_row: First row that the journal lacks.
        """
        journal.state = replace(journal.state, loading=checkpoint)
        runs = {run.first_row: run for run in self._runs}
        first_missing = max(self.store.first_row, first_row)
        entries: list[Entry] = []  # Of the next slot.
        slot_row = first_missing
        for segment in self.store.list_segments():
            end_row = segment.first_tick + segment.ticks
            if end_row <= first_missing:
                continue
            if not entries:
                slot_row = segment.first_tick
            run = runs[segment.first_tick]
            payload = self.store.pack(segment)
            entries.append(Entry(LOADED_WRITER, 0, payload, run=Run(run.writer, run.first_tick, run.lanes)))
            is_full = sum(len(entry.payload) for entry in entries) >= self._tuning.slot_bytes
            if is_full or end_row == self.store.next_row:
                journal.append(entries, slot_row)
                entries = []
        journal.set_state(loading="", first_row=self.store.first_row)

    # ---------------------------------------------------------------- drawing

    def describe_held(self, view: View) -> Held:
        """Describe the rows of `view`, which are all rows that the shard holds now, for a sampler."""
        return Held(view.first_id, view.next_id, 1, self.capacity, view, order=self._order)

    def draw(self, count: int, goals: int, generator: np.random.Generator | None, *, is_near: bool) -> ShardDraw:
        """Draw `count` rows.

        Args:
            goals: How many of the rows get another goal.
            generator: None: the shard's own.
            is_near: Whether the learner is on this machine.
        """
        view = self.store.view()
        held = self.describe_held(view)
        chosen = self.generator if generator is None else generator
        if isinstance(self.sampler, Hindsight):
            drawn = self.sampler.draw(held, count, chosen, goals)
        else:
            drawn = self.sampler.draw(held, count, chosen)
        order = None
        if not is_near and not isinstance(self.sampler, ComposedSampler):
            order = np.argsort(drawn.ids, kind="stable")  # Rows of about the same time compress well together.
            drawn = Draw.from_ids(drawn.ids[order])
        return ShardDraw(view, drawn, self.likelihood.compute_masses(held, drawn.ids), order)

    def find(self, rows: NDArray[np.int64]) -> ShardDraw:
        """Return rows by their numbers. Raise TransitionIdError if one of them is not held."""
        view = self.store.view()
        self.describe_held(view).require_ids(rows)
        return ShardDraw(view, Draw.from_ids(rows), np.ones(len(rows)), None)

    def read(
        self, drawn: ShardDraw, counters: ShardCounters, *, is_near: bool, block: BlockRows | None = None
    ) -> Answer | bytes:
        """Read and pack the rows of a draw. Needs no lock, but only one thread may call it.

        Args:
            block: Where a learner on this machine wants the observations of single steps. None: in the answer.
        """
        draw = drawn.draw
        columns = self.store.columns
        memory = self._open_block(block) if is_near and block is not None else None
        if len(draw.ids) == 0:
            rows = self._empty_rows()
        elif memory is None or block is None:
            rows = DrawnRows.read(columns, draw, drawn.view)
        else:
            rows = self._read_to_block(drawn, memory, block)
        goal = None if draw.goals is None else read_goal(self._schema, columns, draw.goals, drawn.view)
        answer = Answer(counters, draw.ids, drawn.scaled, rows, draw.discount, draw.mask, goal, drawn.order)
        return answer if is_near else pack_answer(answer)

    def _empty_rows(self) -> DrawnRows:
        """Return no rows. A shard that never held any does not know the dtype of rewards."""
        schema = self._schema
        flags = np.empty(0, np.bool_)
        return DrawnRows(
            obs=[np.empty((0, *leaf.shape), leaf.dtype) for leaf in schema.observation.leaves],
            next_obs=[np.empty((0, *leaf.shape), leaf.dtype) for leaf in schema.observation.leaves],
            action=[np.empty((0, *leaf.shape), leaf.dtype) for leaf in schema.action.leaves],
            extras=[np.empty((0, *leaf.shape), leaf.dtype) for leaf in schema.extras.leaves],
            reward=np.empty((0, *schema.reward_shape), self.store.reward_dtype or np.float32),
            terminated=flags,
            truncated=flags,
        )

    def _open_block(self, block: BlockRows) -> Bytes | None:
        """Return the memory of a shared block, or None if it is out of reach."""
        return self._blocks.open(block.place, block_bytes(self._schema.observation.leaves, block.rows))

    def _read_to_block(self, drawn: ShardDraw, memory: Bytes, block: BlockRows) -> DrawnRows:
        """Write the observations of a draw to a shared block, and return the other fields."""
        columns = self.store.columns
        ids = drawn.draw.ids
        outputs = (*columns.obs_outputs, *columns.next_obs_outputs)
        if block.positions:
            obs, next_obs = lay_out(memory, self._schema.observation.leaves, block.rows)
            where = np.frombuffer(block.positions, np.int64)
            for target, source in zip((*obs, *next_obs), drawn.view.read(ids, outputs), strict=True):
                target[where] = source
        else:
            drawn.view.read(ids, outputs, memory)  # A reader lays arrays out as `lay_out` does.
        others = tuple(output for output in columns.batch_outputs if output not in outputs)
        *leaves, reward, terminated, truncated = drawn.view.read(ids, others)
        action_count = len(columns.action_outputs)
        return DrawnRows(
            obs=[],
            next_obs=[],
            action=leaves[:action_count],
            extras=leaves[action_count:],
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )

    # ---------------------------------------------------------------- priorities

    def _update_mass(self) -> None:
        """Give new rows their first priority, and compute `mass` again. Called after every change."""
        self.mass = self.likelihood.compute_total_mass(self.describe_held(self.store.view()))

    def update_priorities(self, rows: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        """Set the priorities of rows. Rows that were evicted are ignored."""
        sampler: Any = self.sampler
        sampler.update_priorities(self.describe_held(self.store.view()), rows, priorities)
        self.changes += 1
        self._update_mass()

    def raise_highest(self, scaled: float) -> None:
        """Give rows that arrive from now on at least the scaled priority `scaled`."""
        self.likelihood.raise_highest(self.describe_held(self.store.view()), scaled)
        self.changes += 1

    def priorities(self) -> dict[str, Any] | None:
        """Return the priorities for a journal, or None if there are none."""
        prioritized = self.likelihood.prioritized
        if prioritized is None or self.store.next_row == self.store.first_row:
            return None
        state = prioritized.state()
        used = state["scaled"][: self.store.next_row]  # A shard that was never full uses only these.
        return state | {"scaled": used, "settings": [prioritized.alpha, prioritized.floor]}
