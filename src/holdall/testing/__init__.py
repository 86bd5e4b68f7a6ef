"""For your own tests: an oracle, streams of synthetic experience, and contracts as test classes.

    class TestMySampler(holdall.testing.SamplerContract):
        def make_sampler(self):
            return MySampler()

Subclass `SamplerContract`, `CodecContract` or `MemoryContract` to hold a sampler, a codec or a memory of your own to
the rules of holdall's, which pass the same classes. pytest collects the subclass and runs every rule; plain `unittest`
works too, with `unittest.TestCase` as second base. Everything is compared with the oracle, bit for bit. Nothing here
imports pytest. `holdall.testing.strategies` needs Hypothesis and is imported by name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import storage
from holdall.batch import Draw
from holdall.errors import ArgumentError, DamageError
from holdall.replay import ReplayMemory
from holdall.sampling import Held, Sampler, encode_state
from holdall.schema import Bytes, Leaf
from holdall.space_leaves import stored_space
from holdall.testing.oracle import OracleMemory, as_array, assert_same_bits, stack_rows
from holdall.testing.streams import DTYPES, LeafPlan, Mishaps, Stream, StreamStep, random_rows

__all__ = [
    "CodecContract", "LeafPlan", "MemoryContract", "Mishaps", "OracleMemory", "SamplerContract", "Stream", "as_array",
    "assert_same_bits", "random_rows",
]  # fmt: skip

_LANES = 3
_CAPACITY = 60


class SamplerContract:
    """The rules of `holdall.sampling.Sampler`; override `make_sampler`.

    The sampler draws from `OracleMemory.held()`, which raises for ids that are not held, and from a `ReplayMemory`.
    Episodes end at random, some lanes make no transition, old transitions are evicted, flags are set again.
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
        """Return a new sampler; every call returns one with the same settings."""
        raise NotImplementedError("override make_sampler: return the sampler that is tested")

    def test_only_held_and_valid_transitions_are_drawn(self) -> None:
        """While the memory fills, after it wrapped around, and after flags were set again."""
        sampler, generator = self.make_sampler(), np.random.default_rng(0)
        for tick, oracle in enumerate(self._oracles(seed=1)):
            if tick % 10 == 9:
                ids = oracle.ids[::4]
                oracle.set_flags(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_))
            if tick > 5:
                draw = self._draw(sampler, oracle.held(), generator)
                for drawn in (draw.ids, draw.last_ids, None if draw.goals is None else draw.goals.ids):
                    strangers = [] if drawn is None else np.setdiff1d(drawn, oracle.ids).tolist()
                    _require(not strangers, f"tick {tick}: {strangers} are drawn, but not held or not valid")

    def test_a_draw_has_as_many_rows_as_asked_for(self) -> None:
        """Ids are int64, weights are finite float32 numbers above 0, and the rest has the same rows."""
        *_, oracle = self._oracles(seed=2)
        sampler, generator = self.make_sampler(), np.random.default_rng(0)
        for count in (1, self.batch_size, 2 * _CAPACITY):
            draw = sampler.draw(oracle.held(), count, generator)
            _require(draw.ids.dtype == np.int64 and draw.ids.shape[0] == count, f"ids have shape {draw.ids.shape}")
            _require(draw.weights.dtype == np.float32 and draw.weights.shape == (count,), "weights: one float32 a row")
            _require(bool(np.isfinite(draw.weights).all() and (draw.weights > 0).all()), f"weights: {draw.weights}")
            for name in ("last_ids", "reward", "discount"):
                rows = getattr(draw, name)
                _require(rows is None or rows.shape == (count,), f"{name} has no row for every id")
            _require(draw.mask is None or draw.mask.shape == draw.ids.shape, "mask has another shape than ids")

    def test_one_seed_gives_one_sequence(self) -> None:
        """Two samplers with the same history and the same generator draw the same."""
        samplers = (self.make_sampler(), self.make_sampler())
        generators = (np.random.default_rng(7), np.random.default_rng(7))
        for oracle in self._oracles(seed=3):
            first, second = map(self._draw, samplers, (oracle.held(), oracle.held()), generators)
            _require_same(first, second, "two samplers with one seed")

    def test_a_restored_sampler_goes_on_exactly(self) -> None:
        """`state` holds all that later draws depend on, and can be saved without pickle."""
        sampler, generator = self.make_sampler(), np.random.default_rng(8)
        for tick, oracle in enumerate(self._oracles(seed=4)):
            self._draw(sampler, oracle.held(), generator)
            if tick % 7 == 0:
                other, again = self.make_sampler(), np.random.default_rng(0)
                again.bit_generator.state = generator.bit_generator.state
                state = sampler.state()
                encode_state(state, [], "the sampler's state")
                other.restore({name: np.array(value) if np.ndim(value) else value for name, value in state.items()})
                later = np.random.default_rng(0)
                later.bit_generator.state = generator.bit_generator.state
                _require_same(
                    self._draw(sampler, oracle.held(), again), self._draw(other, oracle.held(), later), "a restored one"
                )

    def test_the_state_of_another_sampler_is_refused(self) -> None:
        """With a DamageError: it may come from a file."""
        _require_raises(DamageError, lambda: self.make_sampler().restore({"written_by": np.arange(3)}), "restore")

    def test_a_memory_returns_what_was_added_and_goes_on_after_loading(self) -> None:
        """`sample` returns the oracle's rows; a loaded memory draws what the saved one would have drawn."""
        oracle = OracleMemory(_CAPACITY, _LANES)
        with ReplayMemory(
            self.observation_space, self.action_space, _CAPACITY, _LANES, seed=5, sampler=self.make_sampler()
        ) as memory:
            for step, valid in self._steps(30, seed=5):
                memory.add(**step, valid=valid)
                oracle.add(**step, valid=valid)
            ids = memory.draw(self.batch_size).ids.reshape(-1)
            assert_same_bits(memory.gather(ids), oracle.gather(ids))
            with tempfile.TemporaryDirectory() as folder:
                memory.save(folder).result()
                with ReplayMemory.load(folder, sampler=self.make_sampler()) as loaded:
                    for _ in range(3):
                        assert_same_bits(loaded.sample(self.batch_size), memory.sample(self.batch_size))

    def _oracles(self, seed: int) -> Iterator[OracleMemory]:
        """Yield one oracle after every tick; it wraps around twice."""
        oracle = OracleMemory(_CAPACITY, _LANES)
        for step, valid in self._steps(50, seed):
            oracle.add(**step, valid=valid)
            yield oracle

    def _steps(self, ticks: int, seed: int) -> Iterator[tuple[dict[str, Any], NDArray[np.bool_]]]:
        """Yield steps of a made-up environment with finite rewards, and which lanes made a transition."""
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
            valid = generator.random(_LANES) < (0.8 if tick else 1.1)  # the first tick is whole: something is held
            yield step | {"terminated": ends[0] & ~ends[1], "truncated": ends[1]}, valid

    def _draw(self, sampler: Sampler, held: Held, generator: np.random.Generator) -> Draw:
        """Draw, and report priorities if the sampler learns from them."""
        draw = sampler.draw(held, self.batch_size, generator)
        learn = getattr(sampler, "update_priorities", None)
        if learn is not None:
            ids = draw.ids[:4]
            with suppress(ArgumentError):  # a sampler may have priorities only with some settings
                learn(held, ids, 1.0 + ids.reshape(len(ids), -1)[:, -1] % 5)
        return draw


class CodecContract:
    """The rules of `holdall.storage.blocks.Coder`; override `make_coder`, and `codecs` to test codecs of your own."""

    shapes: tuple[tuple[int, ...], ...] = ((), (5,), (12, 17), (3, 9, 11), (10, 12, 3))

    def make_coder(self) -> storage.Coder:
        """Return the coder that is tested."""
        raise NotImplementedError("override make_coder: return the coder that is tested")

    def codecs(self, leaf: Leaf) -> Iterable[storage.Codec]:
        """Yield the codecs that are tested on whole observations of `leaf`: holdall's own candidates, by default."""
        whole = storage.Transform(leaf.nbytes)
        yield storage.Codec(storage.Method.STORED, 0, whole)
        yield storage.Codec(storage.Method.ZSTD, 3, whole, storage.Dictionary(b"frames of a film " * 30))
        yield storage.Codec(storage.Method.ZSTD, 3, whole, group=4)
        yield from storage.candidates(leaf, storage.Window.whole(leaf))

    def test_every_dtype_and_shape_comes_back_bit_for_bit(self) -> None:
        """Zeros, smooth values, few values and noise with NaN payloads, all slices in order."""
        for coder, slices, sealed in self._cases():
            if sealed.count != len(slices):
                raise AssertionError(f"{sealed.codec}: {sealed.count} slices of {len(slices)} are held")
            _require_slices(coder, sealed, slices, np.arange(len(slices)))

    def test_any_slices_can_be_read_in_any_order(self) -> None:
        """One, none, some of them twice; also by a coder that adopts what another one sealed."""
        other = self.make_coder()
        for coder, slices, sealed in self._cases(DTYPES[5:8]):
            for numbers in ([8, 0, 3, 3, 0, 5], [4], []):
                _require_slices(coder, sealed, slices, np.array(numbers, np.int64))
                _require_slices(other, other.adopt(sealed.coded), slices, np.array(numbers, np.int64))

    def test_what_does_not_shrink_takes_no_more_than_its_own_bytes(self) -> None:
        """Besides the offsets and the palette."""
        for _, slices, sealed in self._cases(contents=("noise",)):
            beside = sealed.coded.offsets.nbytes + sealed.coded.palette.nbytes
            _require(
                sealed.nbytes <= slices.nbytes + beside, f"{sealed.codec}: {slices.nbytes} grew to {sealed.nbytes}"
            )

    def test_a_coder_for_many_blocks_seals_the_same_bytes(self) -> None:
        """`keeping` only saves time."""
        keeping = self.make_coder().keeping()
        for _, slices, sealed in self._cases(DTYPES[5:6]):
            kept = keeping.seal(slices, sealed.codec)
            _require(kept is not None, f"{sealed.codec}: `keeping` does not seal it")
            assert_same_bits(None if kept is None else kept.coded.data, sealed.coded.data)

    def test_a_slice_that_is_not_in_the_block_is_refused(self) -> None:
        """With a DamageError: numbers may come from a file."""
        for coder, slices, sealed in self._cases(DTYPES[5:6]):
            for number in (-1, len(slices), 2**40):
                _require_damage(coder, sealed.coded, np.array([0, number]), f"slice {number}")

    def test_offsets_outside_of_the_data_are_refused(self) -> None:
        """And offsets that go back."""
        for coder, slices, sealed in self._cases(DTYPES[5:6]):
            for wrong in (0, 2**32 - 1):
                offsets = sealed.coded.offsets.copy()
                offsets[-1] = wrong
                last = np.array([len(slices) - 1])
                _require_damage(coder, replace(sealed.coded, offsets=offsets), last, f"offset {wrong}")

    def test_damaged_bytes_are_an_error_or_bytes_of_the_right_size(self) -> None:
        """Compressors do not notice every flipped bit; but nothing crashes, and nothing is written elsewhere."""
        generator = np.random.default_rng(0)
        for coder, slices, sealed in self._cases(DTYPES[5:10:2]):
            for _ in range(4):
                data = _damaged(np.asarray(sealed.coded.data), generator)
                with suppress(DamageError):
                    _decoded(coder, replace(sealed.coded, data=data), np.arange(len(slices)))

    def test_damage_in_a_file_is_always_noticed(self) -> None:
        """Units in files have checksums: wrong bytes are never returned."""
        generator = np.random.default_rng(1)
        for coder, slices, sealed in self._cases(DTYPES[5:10:2]):
            data, numbers = np.asarray(sealed.coded.data), np.arange(len(slices))
            checks = coder.checksums(data, sealed.coded.offsets)
            whole = _decoded(coder, replace(sealed.coded, data=_in_file(data, checks)), numbers)
            _require(whole.tobytes() == slices.tobytes(), f"{sealed.codec}: a file gives other bytes than memory")
            damaged = data.copy()
            damaged[generator.integers(len(damaged))] ^= 1 << int(generator.integers(8))
            _require_damage(coder, replace(sealed.coded, data=_in_file(damaged, checks)), numbers, "a damaged file")

    def _cases(
        self, dtypes: Iterable[np.dtype[Any]] = DTYPES, contents: Iterable[str] = ("zeros", "smooth", "few", "noise")
    ) -> Iterator[tuple[storage.Coder, Bytes, storage.SealedSlices]]:
        """Yield slices of every kind, as they were and as the coder sealed them; what it refuses is left out."""
        coder, generator = self.make_coder(), np.random.default_rng(2)
        for dtype in dtypes:
            for shape in self.shapes:
                leaf = Leaf("slice", shape, dtype)
                codecs = list(self.codecs(leaf))
                for content in contents:
                    slices = _slices(leaf, content, generator)
                    for codec in codecs:
                        sealed = coder.seal(slices, codec)
                        if sealed is not None:
                            yield coder, slices, sealed


class MemoryContract:
    """What a memory promises, against the oracle; for a memory of your own, or an adapter to a framework.

    Override `make_memory`; and, where the framework has other words, `add` and `gather`.
    """

    capacity = 90
    num_envs = 3

    def make_memory(self, stream: Stream) -> Any:
        """Return an empty memory of `capacity` transitions for the spaces and lanes of a stream."""
        raise NotImplementedError("override make_memory: return the memory that is tested")

    def add(self, memory: Any, step: StreamStep) -> None:
        """Add one tick."""
        memory.add(**step.arguments())

    def gather(self, memory: Any, ids: NDArray[np.int64]) -> dict[str, Any]:
        """Return fields of transitions by the names of `holdall.Batch`; those that are left out are not compared."""
        batch = memory.gather(ids)
        return {name: getattr(batch, name) for name in ("obs", "action", "reward", "next_obs")}

    def streams(self) -> Iterator[Stream]:
        """Yield what is added: frame stacks, vectors, images; with ends, silent resets and skipped steps."""
        stack, image, vector = (
            stored_space(shape, np.dtype(kind))
            for shape, kind in (((4, 12, 12), "u1"), ((9, 8, 3), "u1"), ((5,), "f4"))
        )
        stacked = [LeafPlan(axis=0, padding="first", content="table")]
        for mishaps in (Mishaps(), Mishaps(ends=0.2, silent_resets=0.1, skipped_steps=0.1, foreign_next=0.1)):
            for space, plans in ((stack, stacked), (image, []), (vector, [])):
                yield Stream(space, stored_space((2,), np.dtype("f4")), self.num_envs, plans=plans, mishaps=mishaps)

    def test_every_held_transition_comes_back_bit_for_bit(self) -> None:
        """While it fills, and after it wrapped around."""
        for stream in self.streams():
            memory, oracle = self.make_memory(stream), OracleMemory(self.capacity, self.num_envs)
            for tick in range(2 * self.capacity // self.num_envs):
                step = stream.tick()
                self.add(memory, step)
                oracle.add(**step.arguments())
                if tick % 11 == 0:
                    ids = np.random.default_rng(tick).permutation(oracle.ids)
                    expected = oracle.gather(ids)
                    for name, rows in self.gather(memory, ids).items():
                        assert_same_bits(rows, getattr(expected, name))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _require_raises(kind: type[Exception], act: Any, what: str) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"{what} raised no {kind.__name__}")


def _require_same(first: Draw, second: Draw, what: str) -> None:
    """Compare all arrays of two draws."""
    for name in ("ids", "weights", "last_ids", "reward", "discount", "mask"):
        one, other = getattr(first, name), getattr(second, name)
        _require((one is None) == (other is None), f"{what}: only one draw has {name}")
        if one is not None:
            _require(one.tobytes() == other.tobytes(), f"{what}: {name} differ: {one} and {other}")
    goals = [None if draw.goals is None else draw.goals.ids.tolist() for draw in (first, second)]
    _require(goals[0] == goals[1], f"{what}: goals differ: {goals}")


def _require_slices(
    coder: storage.Coder, sealed: storage.SealedSlices, slices: Bytes, numbers: NDArray[np.int64]
) -> None:
    if _decoded(coder, sealed.coded, numbers, sealed).tobytes() != slices[numbers].tobytes():
        raise AssertionError(f"{sealed.codec}: slices {numbers} came back changed")


def _require_damage(coder: storage.Coder, coded: storage.Coded, numbers: NDArray[np.int64], what: str) -> None:
    _require_raises(DamageError, lambda: _decoded(coder, coded, numbers), f"{coded.codec}, {what}: decode")


def _decoded(
    coder: storage.Coder,
    coded: storage.Coded,
    numbers: NDArray[np.int64],
    sealed: storage.SealedSlices | None = None,
    margin: int = 64,
) -> Bytes:
    """Decode slices into the middle of an array, and look whether anything was written around them."""
    room = np.full(2 * margin + len(numbers) * coded.codec.transform.slice_bytes, 7, np.uint8)
    out = room[margin:-margin].reshape(len(numbers), coded.codec.transform.slice_bytes)
    try:
        coder.decode(coder.adopt(coded) if sealed is None else sealed, numbers, out)
    finally:
        _require(bool((room[:margin] == 7).all() and (room[-margin:] == 7).all()), "decode wrote outside of its rows")
    return out


def _slices(leaf: Leaf, content: str, generator: np.random.Generator, count: int = 9) -> Bytes:
    """Make slices of whole observations, as rows of bytes."""
    noise = random_rows(leaf, (count,), generator)
    if content == "zeros":
        noise = np.zeros_like(noise)
    elif content == "few":
        noise = noise.reshape(-1)[generator.integers(0, min(3, noise.size), noise.shape)]
    rows: Bytes = np.ascontiguousarray(noise).reshape(count, -1).view(np.uint8)
    if content == "smooth":
        rows = generator.integers(0, 3, rows.shape).cumsum(axis=1).astype(np.uint8)
    return rows


def _damaged(data: Bytes, generator: np.random.Generator) -> Bytes:
    """Flip a bit, overwrite a stretch, or cut the end off."""
    damaged, first = data.copy(), int(generator.integers(len(data)))
    kind = generator.integers(3)
    if kind == 0:
        damaged[first] ^= 1 << int(generator.integers(8))
    elif kind == 1:
        damaged[first : first + 20] = generator.integers(0, 256, len(damaged[first : first + 20]))
    return damaged if kind < 2 else damaged[:first]


def _in_file(data: Bytes, checks: NDArray[np.uint32]) -> storage.Extent:
    descriptor, name = tempfile.mkstemp(suffix=".seg")
    os.write(descriptor, data.tobytes())
    return storage.Extent(storage.SegmentFile(Path(name), descriptor, is_temporary=True), 0, data.nbytes, checks)
