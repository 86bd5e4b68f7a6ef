"""The rules of `ReplayMemory`, as a test class. Memories pass it in every form in which they can store transitions."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, ClosedError, TransitionIdError
from holdall.memory import ReplayMemory
from holdall.sampling import Prioritized
from holdall.space_leaves import stored_space
from holdall.testing.memory_contract import COMPARED, MemoryContract
from holdall.testing.oracle import OracleMemory, as_array, assert_same_bits, map_leaves
from holdall.testing.rules import require, require_raises
from holdall.testing.streams import LeafPlan, Mishaps, Stream, StreamStep

_LOAD_SETTINGS = ("budget", "prefer", "spill_dir", "device", "store_device", "_tuning")
_BATCH = 16
_MIN_BATCHES = 50
"""Minimum number of batches that a thread reads while another thread adds."""


class ReplayMemoryContract(MemoryContract):
    """All promises of `ReplayMemory`, for one form in which it can store transitions, such as compressed or on disk.

    Override `settings` to return the constructor's arguments that choose the form. Override `check_form`, so that the
    tests fail if the memory silently stores another form.
    """

    memory_class: type[ReplayMemory] = ReplayMemory
    may_drop_early = False
    """Whether a budget may evict transitions before the capacity is reached."""

    def settings(self) -> Mapping[str, Any]:
        """Return arguments of the constructor, except spaces, capacity and lanes."""
        return {}

    def check_form(self, memory: ReplayMemory) -> None:
        """Raise AssertionError unless `memory`, which was filled twice, stores its data in the form that is tested."""

    def make_memory(self, stream: Stream, **more: Any) -> ReplayMemory:
        """Return an empty memory with the settings of this form and with `more`."""
        return self.memory_class(
            stream.observation_space,
            stream.action_space,
            self.capacity,
            self.num_envs,
            extras=stream.extras or None,
            **{**self.settings(), **more},
        )

    def add(self, memory: Any, step: StreamStep, valid: NDArray[np.bool_] | None = None) -> None:
        """Add one tick."""
        memory.add(**step.arguments(), valid=valid)

    def extend(self, memory: Any, steps: StreamStep) -> None:
        """Add whole trajectories."""
        memory.extend(**steps.arguments())

    def gather(self, memory: Any, ids: NDArray[np.int64]) -> dict[str, Any]:
        """Return the fields of transitions, with extras."""
        batch = memory.gather(ids)
        return {name: getattr(batch, name) for name in (*COMPARED, "extras")}

    def streams(self) -> Iterator[Stream]:
        """Yield the streams of every contract, and nested spaces of several dtypes with extras."""
        yield from super().streams()
        yield self.nested_stream()

    def nested_stream(self) -> Stream:
        """Return a stream of nested observations and actions with NaN payloads, and of extras."""
        observation = spaces.Dict(
            {
                "camera": stored_space((6, 5, 3), np.dtype("u1")),
                "history": stored_space((4, 7), np.dtype("f4")),
                "parts": spaces.Tuple((stored_space((), np.dtype("i2")), stored_space((3,), np.dtype("f8")))),
            }
        )
        action = spaces.Dict({"grip": spaces.Discrete(3), "move": stored_space((2,), np.dtype("f4"))})
        extras = {"hidden": stored_space((9,), np.dtype("f4")), "flag": stored_space((), np.dtype("?"))}
        plans = [LeafPlan(), LeafPlan(axis=0, padding="first")]
        mishaps = Mishaps(ends=0.1, silent_resets=0.05, skipped_steps=0.05, foreign_next=0.05)
        return Stream(observation, action, self.num_envs, plans=plans, mishaps=mishaps, extras=extras)

    # ---------------------------------------------------------------- the form

    def test_every_held_transition_comes_back_in_its_last_form(self) -> None:
        """`gather` is compared with the oracle after all background work, when the data has the form to test."""
        for stream in self.streams():
            with self.make_memory(stream) as memory:
                oracle = OracleMemory(self.capacity, self.num_envs)
                for _ in range(self._count_ticks()):
                    self._add_tick(memory, oracle, stream)
                memory.store.wait_idle()
                self.check_form(memory)
                self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)

    # ---------------------------------------------------------------- adding

    def test_extend_adds_what_add_would_add(self) -> None:
        """This also holds for a trajectory that is longer than the capacity."""
        for stream in self.streams():
            for count in (1, 7, 2 * self._count_ticks()):
                with self.make_memory(stream) as memory:
                    oracle = OracleMemory(self.capacity, self.num_envs)
                    for _ in range(2):
                        steps = stream.ticks(count)
                        self.extend(memory, steps)
                        oracle.extend(**steps.arguments())
                    self._follow_evictions(memory, oracle)
                    self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)

    def test_entries_that_are_not_valid_are_not_transitions(self) -> None:
        """Such entries are neither counted nor drawn, and `gather` refuses them."""
        generator = np.random.default_rng(3)
        stream = self.nested_stream()
        with self.make_memory(stream, seed=1) as memory:
            oracle = OracleMemory(self.capacity, self.num_envs)
            for _ in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream, generator.random(self.num_envs) < 0.6)
                require(len(memory) == len(oracle), f"len is {len(memory)}, but {len(oracle)} transitions are held")
            ids, _ = self.sample(memory, len(oracle))
            require(bool(np.isin(ids, oracle.ids).all()), "an entry was drawn that is not a transition")
            invalid = np.setdiff1d(np.arange(oracle.first_id, oracle.next_id), oracle.ids)
            self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)
            require_raises(TransitionIdError, partial(memory.gather, invalid[:1]), "gather of an invalid entry")

    def test_added_arrays_stay_the_callers(self) -> None:
        """Changing the arrays after `add` changes no transition."""
        stream = self.nested_stream()
        with self.make_memory(stream) as memory:
            oracle = OracleMemory(self.capacity, self.num_envs)
            for _ in range(8):
                step = stream.tick()
                oracle.add(**step.arguments())
                self.add(memory, step)
                map_leaves(_overwrite, step.arguments())
            self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)

    def test_wrong_arguments_leave_the_memory_as_it_was(self) -> None:
        """A missing key, another shape, dtype or number of lanes raise ArgumentError, and nothing is written."""
        stream = self.nested_stream()
        with self.make_memory(stream) as memory:
            oracle = OracleMemory(self.capacity, self.num_envs)
            for _ in range(5):
                self._add_tick(memory, oracle, stream)
            for what, wrong in _wrong_arguments(stream.tick()):
                require_raises(ArgumentError, partial(memory.add, **wrong), f"add with {what}")
                require(memory.next_id == oracle.next_id, f"add with {what} wrote something")
            for _ in range(5):
                self._add_tick(memory, oracle, stream)
            self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)

    # ---------------------------------------------------------------- rewriting

    def test_update_rewrites_extras_and_nothing_else(self) -> None:
        """If an id occurs twice, its last row counts."""
        generator = np.random.default_rng(5)
        stream = self.nested_stream()
        with self.make_memory(stream) as memory:
            oracle = OracleMemory(self.capacity, self.num_envs)
            for tick in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream)
                if tick % 9 == 8:
                    ids = generator.choice(oracle.ids, 12)
                    rows = generator.normal(size=(12, 9)).astype(np.float32)
                    memory.update(ids, hidden=rows)
                    oracle.update(ids, hidden=rows)
                    self._compare(self.gather(memory, oracle.ids), oracle, oracle.ids)

    def test_a_priority_of_zero_is_never_drawn(self) -> None:
        """New transitions are drawn, although nobody has set their priority."""
        stream = self.nested_stream()
        with self.make_memory(stream, sampler=Prioritized(), seed=2) as memory:
            oracle = OracleMemory(self.capacity, self.num_envs)
            for _ in range(12):
                self._add_tick(memory, oracle, stream)
            ids = oracle.ids
            memory.update_priorities(ids, (ids % 2).astype(np.float64))
            for _ in range(20):
                drawn, rows = self.sample(memory, _BATCH)
                self._compare(rows, oracle, drawn)
                require(bool((drawn % 2 == 1).all()), f"ids {drawn} were drawn, and one of them has priority 0")
            self._add_tick(memory, oracle, stream)
            newest = range(oracle.next_id - self.num_envs, oracle.next_id)
            drawn = np.concatenate([self.sample(memory, _BATCH)[0] for _ in range(20)])
            require(bool(np.isin(newest, drawn).all()), "a new transition was not drawn once in 20 batches")

    # ---------------------------------------------------------------- drawing

    def test_one_seed_gives_one_sequence_of_batches(self) -> None:
        """A loader that makes batches ahead gives the same sequence.

        Streams are skipped where a budget dropped different ticks, because that depends on the speed of compression.
        """
        for stream in self.streams():
            first = self.make_memory(stream, seed=11)
            second = self.make_memory(stream, seed=11)
            with first, second:
                for _ in range(self._count_ticks()):
                    step = stream.tick()
                    self.add(first, step)
                    self.add(second, step)
                if self.may_drop_early and first.first_id != second.first_id:
                    continue
                batches = second.loader(_BATCH, prefetch=2)
                for _ in range(4):
                    assert_same_bits(_on_host(next(batches)), _on_host(first.sample(_BATCH)))

    def test_threads_read_what_another_thread_added(self) -> None:
        """One thread adds and wraps the memory around while another one gathers."""
        stream = self.nested_stream()
        steps = [stream.tick() for _ in range(3 * self._count_ticks())]
        oracle = OracleMemory(len(steps) * self.num_envs, self.num_envs)
        for step in steps:
            oracle.add(**step.arguments())
        errors: list[BaseException] = []
        has_ended = threading.Event()

        def read(memory: ReplayMemory) -> None:
            generator = np.random.default_rng(0)
            batches = 0
            while batches < _MIN_BATCHES or not has_ended.is_set():
                batches += 1
                ids = generator.integers(memory.first_id, memory.next_id, _BATCH)
                try:
                    rows = self.gather(memory, ids)
                except TransitionIdError:  # A transition was evicted meanwhile.
                    continue
                try:
                    self._compare(rows, oracle, ids)
                except AssertionError as error:
                    errors.append(error)
                    return

        with self.make_memory(stream) as memory:
            self.add(memory, steps[0])
            reader = threading.Thread(target=read, args=(memory,))
            reader.start()
            try:
                for step in steps[1:]:
                    self.add(memory, step)
            finally:
                has_ended.set()
                reader.join()
        if errors:
            raise errors[0]

    # ---------------------------------------------------------------- leaving and closing

    def test_a_checkpoint_continues_with_the_same_batches(self) -> None:
        """`load` returns what was saved, and `sample` then draws what the saved memory draws."""
        for stream in self.streams():
            with tempfile.TemporaryDirectory() as folder, self.make_memory(stream, seed=4) as memory:
                oracle = OracleMemory(self.capacity, self.num_envs)
                for _ in range(self._count_ticks()):
                    self._add_tick(memory, oracle, stream)
                memory.sample(_BATCH)
                memory.save(folder).result()
                settings = {name: value for name, value in self.settings().items() if name in _LOAD_SETTINGS}
                with self.memory_class.load(folder, **settings) as loaded:
                    self._require_same_content(loaded, memory, oracle)

    def test_a_pickle_continues_with_the_same_batches(self) -> None:
        """The restored memory and the memory that was pickled draw the same batches."""
        for stream in self.streams():
            with self.make_memory(stream, seed=4) as memory:
                oracle = OracleMemory(self.capacity, self.num_envs)
                for _ in range(self._count_ticks()):
                    self._add_tick(memory, oracle, stream)
                with pickle.loads(pickle.dumps(memory)) as restored:
                    self._require_same_content(restored, memory, oracle)

    def test_a_closed_memory_says_so(self) -> None:
        """Batches that were returned before stay as they were."""
        stream = self.nested_stream()
        memory = self.make_memory(stream)
        oracle = OracleMemory(self.capacity, self.num_envs)
        for _ in range(5):
            self._add_tick(memory, oracle, stream)
        batch = memory.sample(4)
        expected = oracle.gather(np.array(batch.ids.tolist()))
        memory.close()
        memory.close()
        step = stream.tick()
        calls: dict[str, Callable[[], object]] = {
            "add": partial(self.add, memory, step),
            "sample": partial(memory.sample, 4),
            "gather": partial(memory.gather, [0]),
            "len": partial(len, memory),
        }
        for name, call in calls.items():
            require_raises(ClosedError, call, name)
        self._compare({name: getattr(batch, name) for name in COMPARED}, oracle, expected.ids)

    # ---------------------------------------------------------------- helpers

    def _add_tick(
        self, memory: Any, oracle: OracleMemory, stream: Stream, valid: NDArray[np.bool_] | None = None
    ) -> None:
        step = stream.tick()
        self.add(memory, step, valid)
        oracle.add(**step.arguments(), valid=valid)
        self._follow_evictions(memory, oracle)

    def _follow_evictions(self, memory: Any, oracle: OracleMemory) -> None:
        """Drop from the oracle what a budget dropped early. Without a budget, both hold the same ids."""
        if self.may_drop_early:
            oracle.evict(memory.first_id)
        held = (memory.first_id, memory.next_id, len(memory))
        expected = (oracle.first_id, oracle.next_id, len(oracle))
        require(held == expected, f"first_id, next_id and len are {held}, expected {expected}")

    def _require_same_content(self, other: ReplayMemory, memory: ReplayMemory, oracle: OracleMemory) -> None:
        """Compare a memory that was restored with its original."""
        ids = oracle.ids[oracle.ids >= other.first_id]
        if not self.may_drop_early:
            require(len(other) == len(oracle), f"{len(other)} of {len(oracle)} transitions were restored")
        self._compare(self.gather(other, ids), oracle, ids)
        if other.first_id == memory.first_id:
            for _ in range(3):
                assert_same_bits(_on_host(other.sample(_BATCH)), _on_host(memory.sample(_BATCH)))


def _on_host(batch: Any) -> Any:
    """Return the fields of a batch as arrays."""
    names = (*COMPARED, "extras", "ids", "weights")
    return map_leaves(as_array, {name: getattr(batch, name) for name in names})


def _overwrite(array: NDArray[Any]) -> None:
    """Change every element of an array in place."""
    array.reshape(-1).view(np.uint8)[:] ^= 1


def _wrong_arguments(step: StreamStep) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description and arguments of `add` that do not fit the spaces of `ReplayMemoryContract.nested_stream`."""
    right = step.arguments()
    without_camera = {key: value for key, value in step.obs.items() if key != "camera"}
    yield "a missing key", right | {"obs": without_camera}
    yield "an unknown key", right | {"obs": step.obs | {"depth": step.obs["camera"]}}
    yield "another shape", right | {"next_obs": step.next_obs | {"camera": step.obs["camera"][:, :-1]}}
    yield "another dtype", right | {"obs": step.obs | {"camera": step.obs["camera"] / 255}}
    yield "fewer lanes", right | {"action": map_leaves(lambda rows: rows[:-1], step.action)}
    yield "more rewards", right | {"reward": np.append(step.reward, step.reward)}
    yield "flags of another shape", right | {"terminated": step.terminated[:-1]}
    yield "no extras", right | {"extras": None}
    yield "an unknown extra", right | {"extras": step.extras | {"value": step.reward}}
