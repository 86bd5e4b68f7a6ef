"""holdall's own samplers, codecs and memories keep the contracts that it ships, and a broken rule is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import holdall
from holdall.batch import Draw
from holdall.sampling import Held, Sampler
from holdall.testing import CodecContract, MemoryContract, SamplerContract, Stream
from holdall.testing.oracle import map_leaves
from holdall.testing.streams import StreamStep


def reward_for(achieved: Any, desired: Any, _extras: Any) -> Any:
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
        return holdall.Hindsight("future", 4, reward_for)


class TestPrioritizedHindsight(SamplerContract):
    def make_sampler(self) -> Sampler:
        return holdall.Hindsight("final", 2, reward_for, by=holdall.Prioritized())


class TestCodecs(CodecContract):
    """holdall's own codecs."""


class TestReplayMemory(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        return holdall.ReplayMemory(stream.observation_space, stream.action_space, self.capacity, self.num_envs)


class TestMemoryOnADevice(MemoryContract):
    """On the CPU. tests/gpu has the same for a GPU."""

    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, store_device="cpu")


class TestTensorsOnADevice(TestMemoryOnADevice):
    """The same, with tensors in place of arrays."""

    def add(self, memory: Any, step: StreamStep) -> None:
        given = {name: value for name, value in step.arguments().items() if value is not None}
        memory.add(**map_leaves(lambda array: torch.from_numpy(np.array(array)), given))


class TestBatchesOnADevice(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, device="cpu")


# ---------------------------------------------------------------- broken on purpose


class Evicted(holdall.Uniform):
    """Remembers what it drew, and draws it again when it is long gone."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        drawn = super().draw(held, count, generator)
        self.drawn += drawn.ids.tolist()
        return Draw(np.array(self.drawn[:count]), drawn.weights)


class Invalid(holdall.Uniform):
    """Draws lanes that made no transition."""

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
    """Leaves the priorities out of its state."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "scaled": np.sign(state["scaled"])})


class Gullible(holdall.Uniform):
    """Takes any state."""

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
    """Each rule would be noticed."""
    contract = SamplerContract()
    contract.make_sampler = kind  # type: ignore[method-assign]  # as a subclass would
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


BROKEN_CODECS = [
    (FirstSliceTwice, "test_every_dtype_and_shape_comes_back_bit_for_bit"),
    (FirstSliceTwice, "test_any_slices_can_be_read"),
    (Trusting, "test_a_slice_that_is_not_in_the_block_is_refused"),
    (Trusting, "test_damage_in_a_file_is_always_noticed"),
    (Careless, "test_damaged_bytes_are_an_error_or_bytes_of_the_right_size"),
]


@pytest.mark.parametrize(("kind", "rule"), BROKEN_CODECS)
def test_a_codec_that_breaks_a_rule_fails_it(kind: type[Any], rule: str) -> None:
    """Each rule would be noticed."""
    with pytest.raises(AssertionError):
        getattr(kind(), rule)()


def test_a_memory_that_loses_a_bit_fails_its_contract() -> None:
    """The rule would be noticed."""

    class Careless(TestReplayMemory):
        def gather(self, memory: Any, ids: Any) -> dict[str, Any]:
            rows = super().gather(memory, ids)
            rows["reward"] = np.where(rows["reward"] == 0, np.float32(0), rows["reward"])  # loses the sign of -0.0
            return rows

    with pytest.raises(AssertionError):
        Careless().test_every_held_transition_comes_back_bit_for_bit()
