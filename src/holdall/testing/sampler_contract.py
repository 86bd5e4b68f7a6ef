"""The rules of a sampler, as a test class."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.errors import ArgumentError, DamageError
from holdall.memory import ReplayMemory
from holdall.sampling import Held, Sampler
from holdall.store.states import encode_state
from holdall.testing.oracle import OracleMemory, assert_same_bits, stack_rows
from holdall.testing.rules import require, require_raises

_LANES = 3
_CAPACITY = 60


class SamplerContract:
    """The rules of `holdall.sampling.Sampler`. Override `make_sampler`.

    The sampler draws from `OracleMemory.held()`, which raises for ids that are not held, and from a `ReplayMemory`.
    Episodes end at random, some entries are not valid, old transitions are evicted, and flags are overwritten.
    """

    observation_space: spaces.Space[Any] = spaces.Dict(
        {
            "observation": spaces.Box(0, 255, (4, 8, 8), np.uint8),
            "achieved_goal": spaces.Box(-1, 1, (2,), np.float32),
            "desired_goal": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    action_space: spaces.Space[Any] = spaces.Discrete(5)
    batch_size = 16

    def make_sampler(self) -> Sampler:
        """Return a new sampler. Every call returns one with the same settings."""
        raise NotImplementedError("Override make_sampler, and return the sampler that is tested.")

    def test_only_held_and_valid_transitions_are_drawn(self) -> None:
        """The sampler is tested while the memory fills, after it wrapped around, and after flags were overwritten."""
        sampler = self.make_sampler()
        generator = np.random.default_rng(0)
        for tick, oracle in enumerate(self._oracles(seed=1)):
            if tick % 10 == 9:
                ids = oracle.ids[::4]
                oracle.set_flags(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_))
            if tick > 5:
                draw = self._draw(sampler, oracle.held(), generator)
                for drawn in (draw.ids, draw.last_ids, None if draw.goals is None else draw.goals.ids):
                    wrong_ids = [] if drawn is None else np.setdiff1d(drawn, oracle.ids).tolist()
                    require(not wrong_ids, f"tick {tick}: {wrong_ids} are drawn, but not held or not valid")

    def test_a_draw_has_as_many_rows_as_asked_for(self) -> None:
        """Ids are int64, weights are finite float32 numbers above 0, and other arrays have one entry per row."""
        *_, oracle = self._oracles(seed=2)
        sampler = self.make_sampler()
        generator = np.random.default_rng(0)
        for count in (1, self.batch_size, 2 * _CAPACITY):
            draw = sampler.draw(oracle.held(), count, generator)
            require(draw.ids.dtype == np.int64 and draw.ids.shape[0] == count, f"ids have shape {draw.ids.shape}")
            require(draw.weights.dtype == np.float32 and draw.weights.shape == (count,), "weights: one float32 a row")
            require(bool(np.isfinite(draw.weights).all() and (draw.weights > 0).all()), f"weights: {draw.weights}")
            for name in ("last_ids", "reward", "discount"):
                rows = getattr(draw, name)
                require(rows is None or rows.shape == (count,), f"{name} has no row for every id")
            require(draw.mask is None or draw.mask.shape == draw.ids.shape, "mask has another shape than ids")

    def test_one_seed_gives_one_sequence(self) -> None:
        """Two samplers with the same history and equal generators make the same draws."""
        samplers = (self.make_sampler(), self.make_sampler())
        generators = (np.random.default_rng(7), np.random.default_rng(7))
        for oracle in self._oracles(seed=3):
            first, second = map(self._draw, samplers, (oracle.held(), oracle.held()), generators)
            _require_same(first, second, "two samplers with one seed")

    def test_a_restored_sampler_goes_on_exactly(self) -> None:
        """`state` contains everything that later draws depend on, and can be saved without pickle."""
        sampler = self.make_sampler()
        generator = np.random.default_rng(8)
        for tick, oracle in enumerate(self._oracles(seed=4)):
            self._draw(sampler, oracle.held(), generator)
            if tick % 7 == 0:
                other = self.make_sampler()
                state = sampler.state()
                encode_state(state, [], "the sampler's state")
                other.restore({name: np.array(value) if np.ndim(value) else value for name, value in state.items()})
                first = self._draw(sampler, oracle.held(), copy.deepcopy(generator))
                second = self._draw(other, oracle.held(), copy.deepcopy(generator))
                _require_same(first, second, "a sampler and its restored copy")

    def test_the_state_of_another_sampler_is_refused(self) -> None:
        """`restore` raises DamageError, because a state may come from a file."""
        require_raises(DamageError, lambda: self.make_sampler().restore({"written_by": np.arange(3)}), "restore")

    def test_a_memory_returns_what_was_added_and_goes_on_after_loading(self) -> None:
        """`sample` returns the rows of the oracle. A loaded memory draws the same batches as the saved memory."""
        oracle = OracleMemory(_CAPACITY, _LANES)
        with ReplayMemory(
            self.observation_space, self.action_space, _CAPACITY, _LANES, seed=5, sampler=self.make_sampler()
        ) as memory:
            for step, valid in self._steps(30, seed=5):
                memory.add(**step, valid=valid)
                oracle.add(**step, valid=valid)
            ids = memory.batch_source.draw(self.batch_size).ids.reshape(-1)
            assert_same_bits(memory.gather(ids), oracle.gather(ids))
            with tempfile.TemporaryDirectory() as folder:
                memory.save(folder).result()
                with ReplayMemory.load(folder, sampler=self.make_sampler()) as loaded:
                    for _ in range(3):
                        assert_same_bits(loaded.sample(self.batch_size), memory.sample(self.batch_size))

    def _oracles(self, seed: int) -> Iterator[OracleMemory]:
        """Yield the same oracle after every tick. The oracle wraps around twice."""
        oracle = OracleMemory(_CAPACITY, _LANES)
        for step, valid in self._steps(50, seed):
            oracle.add(**step, valid=valid)
            yield oracle

    def _steps(self, ticks: int, seed: int) -> Iterator[tuple[dict[str, Any], NDArray[np.bool_]]]:
        """Yield steps of a synthetic environment with finite rewards, each with the argument `valid` of `add`."""
        generator = np.random.default_rng(seed)
        self.observation_space.seed(seed)
        self.action_space.seed(seed)
        for tick in range(ticks):
            obs, next_obs, action = (
                stack_rows([space.sample() for _ in range(_LANES)])
                for space in (self.observation_space, self.observation_space, self.action_space)
            )
            ends = generator.random((2, _LANES)) < 0.1
            reward = generator.normal(size=_LANES).astype(np.float32)
            step = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
            valid = generator.random(_LANES) < (0.8 if tick else 1.1)  # All lanes of the first tick are valid.
            yield step | {"terminated": ends[0] & ~ends[1], "truncated": ends[1]}, valid

    def _draw(self, sampler: Sampler, held: Held, generator: np.random.Generator) -> Draw:
        """Draw, and report priorities if the sampler learns from them."""
        draw = sampler.draw(held, self.batch_size, generator)
        learn = getattr(sampler, "update_priorities", None)
        if learn is not None:
            ids = draw.ids[:4]
            with suppress(ArgumentError):  # A sampler may have priorities only with some settings.
                learn(held, ids, 1.0 + ids.reshape(len(ids), -1)[:, -1] % 5)
        return draw


def _require_same(first: Draw, second: Draw, what: str) -> None:
    """Compare all arrays of two draws."""
    for name in ("ids", "weights", "last_ids", "reward", "discount", "mask"):
        one = getattr(first, name)
        other = getattr(second, name)
        require((one is None) == (other is None), f"{what}: only one draw has {name}")
        if one is not None:
            require(one.tobytes() == other.tobytes(), f"{what}: {name} differ: {one} and {other}")
    goals = [None if draw.goals is None else draw.goals.ids.tolist() for draw in (first, second)]
    require(goals[0] == goals[1], f"{what}: goals differ: {goals}")
