"""Random calls of random memories, compared with a plain list, bit for bit."""

from __future__ import annotations

import gc
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from holdall import ArgumentError, ReplayMemory, TransitionIdError
from holdall.batch import Batch
from holdall.schema import Schema
from holdall.store.budget import count_tick_bytes
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, Stream, assert_same_bits
from holdall.testing.oracle import map_leaves
from holdall.testing.strategies import streams

KEPT_BATCHES = 3
PATIENCE_S = 90
QUICK_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None  # A sync takes no time there.

seeds = st.integers(0, 2**32 - 1)


class MemoryAgainstOracle(RuleBasedStateMachine):
    """Every row that is read from the memory is the oracle's."""

    @initialize(
        stream=streams(),
        capacity_ticks=st.one_of(st.integers(1, 20), st.integers(20, 300)),
        remainder=st.integers(0, 4),
        threads=st.sampled_from([1, 2, 8]),
        block_bytes=st.sampled_from([1, 30_000, 200_000, 2**24]),
        segments_per_capacity=st.sampled_from([1, 4, 16]),
        min_segment_ticks=st.sampled_from([1, 4, 64]),
        small_field_bytes=st.sampled_from([16, 4096]),
        ticks_before=st.sampled_from([0, 8, 20, 50, 100]),
        budget=st.sampled_from(["auto", None, "limit"]),
        limit_ticks=st.sampled_from([8, 40, 400]),
        spills=st.booleans(),
        available_bytes=st.sampled_from([0, 16_000, 160_000, 2**30]),
        prefer=st.sampled_from(["speed", "balanced", "memory"]),
        seed=seeds,
    )
    def begin(
        self,
        stream: Stream,
        capacity_ticks: int,
        remainder: int,
        threads: int,
        block_bytes: int,
        segments_per_capacity: int,
        min_segment_ticks: int,
        small_field_bytes: int,
        ticks_before: int,
        budget: str | None,
        limit_ticks: int,
        spills: bool,
        available_bytes: int,
        prefer: str,
        seed: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("HOLDALL_THREADS", str(threads))
        # With small limits, segments are closed, compressed, moved to disk and evicted within a few ticks.
        tuning = Tuning(
            block_bytes=block_bytes,
            segments_per_capacity=segments_per_capacity,
            min_segment_ticks=min_segment_ticks,
            small_field_bytes=small_field_bytes,
            tiny_field_bytes=min(small_field_bytes, 256),
            segments_per_limit=2,
            segments_in_transit=1,
            available_bytes=available_bytes,
            bytes_per_thread=1_000,
        )
        self.drops_early = budget == "limit"  # Rows of small fields are never moved to disk.
        self.folder = Path(tempfile.mkdtemp(dir=QUICK_DISK)) if spills else None
        self.stream = stream
        lanes = stream.num_envs
        capacity = capacity_ticks * lanes + remainder % lanes
        self.memory = ReplayMemory(
            stream.observation_space,
            stream.action_space,
            capacity,
            lanes,
            budget=limit_ticks * _count_tick_bytes(stream) if budget == "limit" else budget,
            prefer=prefer,
            spill_dir=self.folder,
            seed=seed,
            extras=stream.extras,
            _tuning=tuning,
        )
        self.oracle = OracleMemory(capacity, lanes)
        self.kept: list[tuple[Batch, Batch]] = []
        self.extend(ticks_before, seed, with_valid=False)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        try:
            if len(self.oracle):
                assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))
            self.memory.close()
            for batch, expected in self.kept:
                assert_same_bits(batch, expected)
            if self.folder is not None:
                _require_empty(self.folder)
        finally:
            self.patch.undo()
            if self.folder is not None:
                shutil.rmtree(self.folder)

    @rule(seed=seeds, with_valid=st.sampled_from([False, False, True]))
    def add(self, seed: int, with_valid: bool) -> None:
        given = self.stream.tick().arguments()
        if with_valid:
            given["valid"] = np.random.default_rng(seed).random(self.stream.num_envs) < 0.7
        self.oracle.add(**given)
        copies = _copy_in_random_layouts(given, seed)
        self.memory.add(**copies)
        map_leaves(_overwrite, copies)

    @rule(count=st.integers(0, 40), seed=seeds, with_valid=st.sampled_from([False, False, False, True]))
    def extend(self, count: int, seed: int, with_valid: bool) -> None:
        given = self.stream.ticks(count).arguments()
        if with_valid:
            given["valid"] = np.random.default_rng(seed).random((count, self.stream.num_envs)) < 0.7
        self.oracle.extend(**given)
        copies = _copy_in_random_layouts(given, seed)
        self.memory.extend(**copies)
        map_leaves(_overwrite, copies)

    @precondition(lambda self: len(self.oracle) > 0)
    @rule(count=st.integers(0, 60), seed=seeds)
    def gather(self, count: int, seed: int) -> None:
        ids = np.random.default_rng(seed).choice(self.oracle.ids, count)
        self._check(self.memory.gather(ids), ids)

    @precondition(lambda self: len(self.oracle) > 0)
    @rule(share=st.floats(0, 1))
    def sample(self, share: float) -> None:
        count = min(60, max(1, int(share * len(self.oracle))))
        batch = self.memory.sample(count)
        assert batch.ids.shape == (count,)
        self._check(batch, batch.ids)

    @rule(offset=st.integers(1, 10_000), before=st.booleans())
    def refuse_ids_not_held(self, offset: int, before: bool) -> None:
        oracle = self.oracle
        refused = oracle.first_id - offset if before else oracle.next_id + offset - 1
        held = oracle.ids[:3]
        with pytest.raises(TransitionIdError, match=rf"ids holds {refused}\b"):
            self.memory.gather(np.append(held, refused))

    @rule(seed=seeds)
    def refuse_invalid_entries(self, seed: int) -> None:
        oracle = self.oracle
        invalid = np.setdiff1d(np.arange(oracle.first_id, oracle.next_id), oracle.ids)
        if invalid.size:
            refused = int(np.random.default_rng(seed).choice(invalid))
            with pytest.raises(TransitionIdError, match=rf"ids holds {refused}, .*valid=False"):
                self.memory.gather([refused])

    @precondition(lambda self: len(self.oracle) > 0)
    @rule(count=st.integers(0, 5), seed=seeds)
    def set_flags(self, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        ids = generator.choice(self.oracle.ids, count)
        flags = generator.random((2, count)) < 0.5
        self.oracle.set_flags(ids, *flags)
        self.memory.set_flags(ids, *flags)
        self._check(self.memory.gather(ids), ids)

    @precondition(lambda self: len(self.oracle) > 0 and self.stream.extras)
    @rule(count=st.integers(0, 30), seed=seeds, all_columns=st.booleans())
    def update(self, count: int, seed: int, all_columns: bool) -> None:
        """Rewrite some extras of some transitions. An id may occur several times."""
        generator = np.random.default_rng(seed)
        ids = generator.choice(self.oracle.ids, count)
        names = list(self.stream.extras)
        rows = self._new_extras(count, names if all_columns else [names[seed % len(names)]])
        if generator.random() < 0.5:  # Values that do not fit into narrow parts.
            rows = map_leaves(lambda array: _change_bits(array, generator), rows)
        self.oracle.update(ids, **rows)
        copies = _copy_in_random_layouts((ids, rows), seed)
        self.memory.update(copies[0], **copies[1])
        map_leaves(_overwrite, copies)
        if self.drops_early:  # Rows of extras that grew may not fit the budget.
            self._evict_early()
            ids = ids[ids >= self.oracle.first_id]
        self._check(self.memory.gather(ids), ids)

    @precondition(lambda self: self.stream.extras)
    @rule(offset=st.integers(1, 10_000), before=st.booleans(), fault=st.sampled_from(["ids", "axis", "dtype", "name"]))
    def refuse_updates(self, offset: int, before: bool, fault: str) -> None:
        """A refused update writes no row and no column."""
        oracle = self.oracle
        names = list(self.stream.extras)
        ids = oracle.ids[:3]
        refused = "ids"
        rows = self._new_extras(len(ids), names)
        if fault == "ids":
            ids = np.append(ids, oracle.first_id - offset if before else oracle.next_id + offset - 1)
            rows = self._new_extras(len(ids), names)
        elif fault == "name":
            refused = "unknown"
            rows["unknown"] = np.zeros(len(ids))
        else:
            refused = names[-1]
            bad = _spoil(rows[names[-1]], fault, 0)
            rows[names[-1]] = bad
        with pytest.raises((ArgumentError, TransitionIdError), match=rf"^{refused}\b"):
            self.memory.update(ids, **rows)
        if len(oracle):
            self._check(self.memory.gather(oracle.ids), oracle.ids)

    def _new_extras(self, count: int, names: list[str]) -> dict[str, Any]:
        """Return rows of some extras that a stream like this one could have made."""
        ticks = self.stream.ticks(-(-count // self.stream.num_envs) or 1).arguments()["extras"]
        return {name: np.concatenate(ticks[name])[:count] for name in names}

    @rule(
        field=st.sampled_from(["obs", "action", "reward", "next_obs", "terminated", "truncated", "extras"]),
        fault=st.sampled_from(["lanes", "axis", "dtype", "nest"]),
        extending=st.booleans(),
    )
    def refuse_wrong_arguments(self, field: str, fault: str, extending: bool) -> None:
        given = (self.stream.ticks(3) if extending else self.stream.tick()).arguments()
        if field == "reward" and fault == "dtype" and self.oracle.next_id == 0:
            return  # The first add sets the dtype.
        bad = _spoil(given.get(field, {}), fault, 1 if extending else 0)
        if bad is None:
            return
        given[field] = bad
        self.memory.store.wait_idle()  # Compression in the background changes the report, too.
        before = self.memory.report().as_dict()
        with pytest.raises(ArgumentError, match=rf"^{field}\b"):
            (self.memory.extend if extending else self.memory.add)(**given)
        assert self.memory.report().as_dict() == before

    @rule()
    def check_report(self) -> None:
        report = self.memory.report()
        assert report.transitions == len(self.oracle)
        kinds = [(f.slice_bytes, f.log_bytes, f.row_bytes, f.plain_bytes) for f in report.fields]
        assert min(map(min, kinds)) >= 0
        assert report.total_bytes == sum(sum(kind[:3]) for kind in kinds)
        assert " -" not in str(report), "no figure of the report is negative"

    @rule()
    def wait_for_the_compactor(self) -> None:
        self.memory.store.wait_idle()

    @rule()
    def replace_by_a_pickle(self) -> None:
        self.memory = pickle.loads(pickle.dumps(self.memory, protocol=5))

    @precondition(lambda self: len(self.oracle) > 0)
    @rule()
    def gather_everything(self) -> None:
        self._check(self.memory.gather(self.oracle.ids), self.oracle.ids)

    @invariant()
    def counts_are_exact(self) -> None:
        if self.drops_early:
            self._evict_early()
        assert len(self.memory) == len(self.oracle)
        assert self.memory.first_id == self.oracle.first_id
        assert self.memory.next_id == self.oracle.next_id

    def _evict_early(self) -> None:
        """Evict from the oracle the transitions that did not fit the budget."""
        self.memory.store.wait_idle()
        first_id = self.memory.first_id
        assert first_id >= self.oracle.first_id, "first_id never decreases"
        self.oracle.evict(first_id)

    def _check(self, batch: Batch, ids: NDArray[np.int64]) -> None:
        expected = self.oracle.gather(ids)
        assert_same_bits(batch, expected)
        self.kept = [*self.kept, (batch, expected)][-KEPT_BATCHES:]


def _count_tick_bytes(stream: Stream) -> int:
    """Return the bytes of one tick if nothing is shared."""
    schema = Schema.of(stream.observation_space, stream.action_space, stream.extras, stream.num_envs)
    return count_tick_bytes(schema)


def _require_empty(folder: Path) -> None:
    """Wait until the workers of deleted memories have removed their folders."""
    end = time.monotonic() + PATIENCE_S
    gc.collect()
    while left := list(folder.iterdir()):
        assert time.monotonic() < end, f"deleted memories left {left}"
        time.sleep(0.01)


def _copy_in_random_layouts(given: Any, seed: int) -> Any:
    """Copy arrays, each into a random memory layout."""
    generator = np.random.default_rng(seed)

    def lay_out(array: Any) -> Any:
        return LAYOUTS[generator.integers(len(LAYOUTS))](array)

    return map_leaves(lay_out, given)


def _insert_gaps(array: Any) -> Any:
    spread = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    spread[..., ::2] = array
    return spread[..., ::2]


def _move_channels_last(array: Any) -> Any:
    if array.ndim < 4:
        return array.copy()
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -3, -1)), -1, -3)


def _misalign(array: Any) -> Any:
    shifted = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    shifted[...] = array
    return shifted


LAYOUTS: list[Callable[[Any], Any]] = [
    lambda array: array.copy(),
    lambda array: array.copy(order="F"),
    _move_channels_last,
    _insert_gaps,
    _misalign,
    lambda array: array[::-1].copy()[::-1],
    lambda array: array[..., ::-1].copy()[..., ::-1],
]


def _change_bits(array: Any, generator: np.random.Generator) -> Any:
    """Return float32 rows with other bits in some rows. Rows of another dtype stay as they are."""
    if array.dtype != np.float32:
        return array
    words = array.view(np.uint32)
    is_changed = generator.random(len(array)) < 0.3
    words[is_changed] ^= generator.integers(1, 2**32, words[is_changed].shape, np.uint32)
    return words.view(np.float32)


def _overwrite(array: Any) -> None:
    array[...] = 1


def _spoil(value: Any, fault: str, lane_axis: int) -> Any:
    """Return `value` with a fault in its last leaf, or None if it cannot have this fault."""
    if isinstance(value, dict | tuple):
        if fault == "nest":
            return np.zeros(3)
        children = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        if not children:
            return None
        key, child = children[-1]
        bad = _spoil(child, fault, lane_axis)
        if isinstance(value, dict):
            return bad if bad is None else {**value, key: bad}
        return bad if bad is None else (*value[:-1], bad)
    if fault == "lanes":
        return np.concatenate([value, value], axis=lane_axis)
    if fault == "axis":
        return value[..., None]
    if fault == "dtype":
        return np.zeros(value.shape, np.float64 if value.dtype != np.float64 else np.float32)
    return {"unknown": value}


# Hypothesis needs this time to shrink a failure.
TestMemoryAgainstOracle = pytest.mark.timeout(900)(MemoryAgainstOracle.TestCase)
TestMemoryAgainstOracle.settings = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    max_examples=settings.default.max_examples if settings.default else 150,
    stateful_step_count=30,
)
