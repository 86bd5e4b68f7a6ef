"""holdall's own samplers, codecs and memories pass the contracts, and every contract finds broken rules."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import ReplayBuffer as OriginalReplayBuffer

import holdall
from holdall._native import Coded, Raw
from holdall.batch import Batch, Draw
from holdall.errors import ArgumentError
from holdall.sampling import Held, Sampler
from holdall.sb3 import ReplayBuffer as SB3ReplayBuffer
from holdall.store.tuning import Tuning
from holdall.testing import CodecContract, ReplayContract, ReplayMemoryContract, SamplerContract, Stream
from holdall.testing.oracle import map_leaves
from holdall.testing.streams import StreamStep


def compute_reward(achieved: Any, desired: Any, _extras: Any) -> Any:
    return -np.abs(achieved - desired).sum(axis=-1)


class TestUniform(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Uniform()


class TestPrioritized(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Prioritized(alpha=0.7, beta=0.5)


class TestNStep(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.NStep(3, 0.9)


class TestPrioritizedNStep(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.NStep(3, 0.9, by=holdall.Prioritized())


class TestSequence(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Sequence(4, burn_in=2, stride=2)


class TestPrioritizedStridedSequence(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Sequence(4, burn_in=2, stride=3, by=holdall.Prioritized())


class TestPrioritizedCrossingSequence(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Sequence(4, burn_in=2, crossing=True, by=holdall.Prioritized())


class TestHindsight(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Hindsight("future", 4, compute_reward)


class TestPrioritizedHindsight(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Hindsight("final", 2, compute_reward, by=holdall.Prioritized())


class TestCodecs(CodecContract):
    """holdall's own codecs."""


SMALL = Tuning(
    block_bytes=2_000,
    segments_per_capacity=16,
    min_segment_ticks=1,
    small_field_bytes=16,
    tiny_field_bytes=16,
    min_packed_rows=8,
    segments_per_limit=2,
    segments_in_transit=1,
)
"""Segments of a few ticks, so that a memory of 90 transitions has closed blocks."""


class TestReplayMemory(ReplayMemoryContract):
    """With the default settings, nothing is compressed."""

    def check_form(self, memory: holdall.ReplayMemory) -> None:
        assert list_forms(memory) <= {Raw}


class TestCompressedMemory(ReplayMemoryContract):
    def settings(self) -> Mapping[str, Any]:
        return {"budget": None, "_tuning": SMALL}

    def check_form(self, memory: holdall.ReplayMemory) -> None:
        assert Coded in list_forms(memory)


class TestSpilledMemory(ReplayMemoryContract):
    """All blocks are on disk."""

    @pytest.fixture(autouse=True)
    def _use_folder(self, tmp_path: Path) -> None:
        self._folder = tmp_path

    def settings(self) -> Mapping[str, Any]:
        return {"budget": None, "spill_dir": self._folder, "_tuning": SMALL}

    def check_form(self, memory: holdall.ReplayMemory) -> None:
        assert memory.disk_bytes > 0


class TestBoundedMemory(ReplayMemoryContract):
    """A limit within which only small observations fit."""

    may_drop_early = True

    def check_form(self, memory: holdall.ReplayMemory) -> None:
        assert memory.report().total_bytes <= 65_536
        leaves = {leaf.shape for leaf in memory.schema.observation.leaves}
        assert memory.report().dropped_early > 0 or leaves in ({(4, 12, 12)}, {(5,)})

    def settings(self) -> Mapping[str, Any]:
        return {"budget": 65_536, "_tuning": SMALL}


class TestMemoryOnADevice(ReplayMemoryContract):
    """The device is the CPU. tests/gpu has this test for a GPU."""

    def settings(self) -> Mapping[str, Any]:
        return {"store_device": "cpu"}


class TestTensorsOnADevice(TestMemoryOnADevice):
    """The arguments of `add` are tensors."""

    def add(self, memory: Any, step: StreamStep, valid: Any = None) -> None:
        memory.add(**to_tensors(step), valid=valid)

    def extend(self, memory: Any, steps: StreamStep) -> None:
        memory.extend(**to_tensors(steps))


class TestBatchesOnADevice(ReplayMemoryContract):
    def settings(self) -> Mapping[str, Any]:
        return {"device": "cpu"}


class TestStableBaselines3(ReplayContract):
    def make_buffers(self, stream: Stream) -> tuple[Any, Any]:
        spaces = (stream.observation_space, stream.action_space)
        settings: dict[str, Any] = {"device": "cpu", "n_envs": self.num_envs}
        return (
            SB3ReplayBuffer(self.capacity, *spaces, **settings),
            OriginalReplayBuffer(self.capacity, *spaces, **settings),
        )

    def add(self, buffer: Any, step: StreamStep) -> None:
        ends = step.terminated | step.truncated
        infos = [{"TimeLimit.truncated": bool(truncated)} for truncated in step.truncated]
        buffer.add(step.obs, step.next_obs, step.action, step.reward, ends, infos)

    def sample(self, buffer: Any, count: int, seed: int) -> dict[str, Any]:
        np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3 draws from NumPy's global generator
        return {name: part for name, part in buffer.sample(count)._asdict().items() if part is not None}


class TestCompressedStableBaselines3(TestStableBaselines3):
    def make_buffers(self, stream: Stream) -> tuple[Any, Any]:
        _, original = super().make_buffers(stream)
        spaces = (stream.observation_space, stream.action_space)
        return SB3ReplayBuffer(self.capacity, *spaces, device="cpu", n_envs=self.num_envs, budget=None), original


def list_forms(memory: holdall.ReplayMemory) -> set[type]:
    """Return the types of the forms of all closed blocks."""
    parts = [part for segment in memory.host_store.catalog.segments for part in segment.parts]
    return {type(part.block.form) for part in parts if part.block is not None and not part.block.is_open}


def to_tensors(step: StreamStep) -> Any:
    """Return the arguments of `add` as tensors."""
    return map_leaves(lambda array: torch.from_numpy(np.array(array)), step.arguments())


# ---------------------------------------------------------------- classes that break a rule


class Evicted(holdall.Uniform):
    """Draws its first ids again, also when they were evicted."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        drawn = super().draw(held, count, generator)
        self.drawn += drawn.ids.tolist()
        return Draw(np.array(self.drawn[:count]), drawn.weights)


class Invalid(holdall.Uniform):
    """Draws invalid entries, too."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        return Draw(generator.integers(held.first_id, held.next_id, count), np.ones(count, np.float32))


class TooFew(holdall.Uniform):
    """Returns one row less."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        drawn = super().draw(held, count, generator)
        return Draw(drawn.ids[1:], drawn.weights[1:])


class OwnGenerator(holdall.Uniform):
    """Draws from a generator that nobody seeded."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        return super().draw(held, count, np.random.default_rng())


class Forgetful(holdall.Prioritized):
    """Restores all priorities as equal."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "scaled": np.sign(state["scaled"])})


class Gullible(holdall.Uniform):
    """Accepts any state."""

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


BROKEN_SAMPLERS = [
    (Evicted, "test_only_held_and_valid_transitions_are_drawn"),
    (Invalid, "test_only_held_and_valid_transitions_are_drawn"),
    (TooFew, "test_a_draw_has_as_many_rows_as_asked_for"),
    (OwnGenerator, "test_one_seed_gives_one_sequence"),
    (OwnGenerator, "test_a_memory_returns_what_was_added_and_goes_on_after_loading"),
    (Forgetful, "test_a_restored_sampler_goes_on_exactly"),
    (Gullible, "test_the_state_of_another_sampler_is_refused"),
]


@pytest.mark.parametrize(("kind", "rule"), BROKEN_SAMPLERS)
def test_a_sampler_that_breaks_a_rule_fails_it(kind: type[Any], rule: str) -> None:
    contract = SamplerContract()
    contract.make_sampler = kind  # type: ignore[method-assign]  # A subclass would define it.
    with pytest.raises(AssertionError):
        getattr(contract, rule)()


class FirstSliceTwice(CodecContract):
    """Returns the first slice in place of the last one."""

    def decode(self, coded: Any, first: int, count: int) -> Any:
        rows = super().decode(coded, first, count)
        if first + count == coded.slice_count and count > 1:
            rows[-1] = rows[0]
        return rows


class Trusting(CodecContract):
    """Returns zeros for damaged slices."""

    def decode(self, coded: Any, first: int, count: int) -> Any:
        try:
            return super().decode(coded, first, count)
        except (ValueError, IndexError, OverflowError):
            return np.zeros((1, coded.slice_bytes), np.uint8)


class Careless(CodecContract):
    """Fails with an error of its own where bytes are damaged."""

    def decode(self, coded: Any, first: int, count: int) -> Any:
        try:
            return super().decode(coded, first, count)
        except (ValueError, IndexError) as error:
            raise AssertionError("crashed") from error


class WrongBit(ReplayMemoryContract):
    """Returns one wrong bit in every reward."""

    def gather(self, memory: Any, ids: Any) -> dict[str, Any]:
        rows = super().gather(memory, ids)
        rows["reward"] = (rows["reward"].view(np.uint32) ^ 1).view(np.float32)
        return rows


class CutShort(holdall.ReplayMemory):
    """Adds all steps of a trajectory but the last one."""

    def extend(self, *given: Any, **named: Any) -> None:
        super().extend(*given, **map_leaves(lambda rows: rows[:-1], named))


class AllValid(holdall.ReplayMemory):
    """Ignores `valid`."""

    def add(self, *given: Any, **named: Any) -> None:
        super().add(*given, **(named | {"valid": None}))


class Lenient(holdall.ReplayMemory):
    """Accepts arguments that do not fit."""

    def add(self, *given: Any, **named: Any) -> None:
        with suppress(ArgumentError):
            super().add(*given, **named)


class ReadOnly(holdall.ReplayMemory):
    """Rewrites nothing."""

    def update(self, ids: Any, /, **columns: Any) -> None:
        pass

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        pass


class Unseeded(holdall.ReplayMemory):
    """Draws other rows every time."""

    def sample(self, batch_size: int) -> Batch:
        return self.gather(np.random.default_rng().integers(self.first_id, self.next_id, batch_size))


class Open(holdall.ReplayMemory):
    """Is never closed."""

    def close(self, timeout: float = 0) -> None:
        pass


BROKEN_MEMORIES = [
    (CutShort, "test_extend_adds_what_add_would_add"),
    (AllValid, "test_entries_that_are_not_valid_are_not_transitions"),
    (Lenient, "test_wrong_arguments_leave_the_memory_as_it_was"),
    (ReadOnly, "test_update_rewrites_extras_and_nothing_else"),
    (ReadOnly, "test_a_priority_of_zero_is_never_drawn"),
    (Unseeded, "test_one_seed_gives_one_sequence_of_batches"),
    (Unseeded, "test_a_checkpoint_continues_with_the_same_batches"),
    (Unseeded, "test_a_pickle_continues_with_the_same_batches"),
    (Open, "test_a_closed_memory_says_so"),
]


@pytest.mark.parametrize(("kind", "rule"), BROKEN_MEMORIES)
def test_a_memory_that_breaks_a_rule_fails_it(kind: type[holdall.ReplayMemory], rule: str) -> None:
    contract = ReplayMemoryContract()
    contract.memory_class = kind
    with pytest.raises(AssertionError):
        getattr(contract, rule)()


class WrongReward(TestStableBaselines3):
    """Returns other rewards than the framework's buffer."""

    def sample(self, buffer: Any, count: int, seed: int) -> dict[str, Any]:
        batch = super().sample(buffer, count, seed)
        return batch | {"rewards": batch["rewards"] * (1 if isinstance(buffer, SB3ReplayBuffer) else 2)}


class ReusedBatch(TestStableBaselines3):
    """Overwrites the last batch when a step is added."""

    batch: Mapping[str, Any] = {}

    def add(self, buffer: Any, step: StreamStep) -> None:
        super().add(buffer, step)
        for part in self.batch.values():
            part.zero_()

    def sample(self, buffer: Any, count: int, seed: int) -> dict[str, Any]:
        self.batch = super().sample(buffer, count, seed)
        return dict(self.batch)


BROKEN_CONTRACTS = [
    (FirstSliceTwice, "test_every_dtype_and_shape_comes_back_bit_for_bit"),
    (FirstSliceTwice, "test_any_slices_can_be_read"),
    (Trusting, "test_a_slice_that_is_not_in_the_block_is_refused"),
    (Trusting, "test_damage_in_a_file_is_always_noticed"),
    (Careless, "test_damaged_bytes_are_an_error_or_bytes_of_the_right_size"),
    (WrongBit, "test_every_held_transition_comes_back_bit_for_bit"),
    (WrongBit, "test_every_held_transition_comes_back_in_its_last_form"),
    (WrongBit, "test_added_arrays_stay_the_callers"),
    (WrongBit, "test_threads_read_what_another_thread_added"),
    (WrongReward, "test_one_seed_draws_the_rows_of_the_frameworks_buffer"),
    (ReusedBatch, "test_a_batch_belongs_to_the_caller"),
    (WrongReward, "test_added_arrays_stay_the_callers"),
    (WrongReward, "test_a_pickled_buffer_continues_as_the_frameworks_does"),
]


@pytest.mark.parametrize(("kind", "rule"), BROKEN_CONTRACTS)
def test_a_codec_memory_or_drop_in_that_breaks_a_rule_fails_it(kind: type[Any], rule: str) -> None:
    with pytest.raises(AssertionError):
        getattr(kind(), rule)()
