"""Stable-Baselines3's buffer and holdall's, with the same steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from holdall.sb3 import ReplayBuffer

from .environments import draw

Step = tuple[Any, Any, NDArray[Any], NDArray[Any], NDArray[Any], list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """The spaces of a test, and the form of its observations."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any] = field(default_factory=lambda: spaces.Box(-1, 1, (2,), np.float32))
    lanes: int = 1
    stacked: bool = False  # The first axis is a window that shifts by one in each step.
    transposed: bool = False  # Images are views of arrays whose channels are last.
    given_as: str | None = None  # Dtype of the given observations. None: the space's.

    def __str__(self) -> str:
        kinds = [kind for kind in ("stacked", "transposed") if getattr(self, kind)]
        given = [] if self.given_as is None else [f"as {self.given_as}"]
        return " ".join(
            [_describe_space(self.observation), _describe_space(self.action), f"{self.lanes} lanes", *kinds, *given]
        )


class Pair:
    """Stable-Baselines3's buffer and holdall's, which must behave the same."""

    def __init__(self, case: Case, buffer_size: int = 70, seed: int = 3, **settings: Any) -> None:
        is_dict = isinstance(case.observation, spaces.Dict)
        plain_class: type[PlainReplayBuffer] = DictReplayBuffer if is_dict else PlainReplayBuffer
        of_plain: dict[str, Any] = {"device": "cpu", "n_envs": case.lanes} | settings
        of_plain.pop("optimize_memory_usage", None)  # It has another meaning in Stable-Baselines3.
        of_ours: dict[str, Any] = {"device": "cpu", "n_envs": case.lanes} | settings
        self.case = case
        self.plain = plain_class(buffer_size, case.observation, case.action, **of_plain)
        self.ours = ReplayBuffer(buffer_size, case.observation, case.action, **of_ours)
        self.steps = make_steps(case, np.random.default_rng(seed))

    def feed(self, ticks: int) -> None:
        """Add the next steps to both. Overwrite the arrays afterwards, as environments do."""
        for _ in range(ticks):
            step = next(self.steps)
            self.plain.add(*copy.deepcopy(step))
            given = copy.deepcopy(step)
            self.ours.add(*given)
            _overwrite(given)

    def assert_same_samples(self, batch: int = 64, draws: int = 3, env: VecNormalize | None = None) -> None:
        """Draw from both with the same seed and compare every tensor."""
        for seed in range(draws):
            assert_same_batch(
                call_seeded(seed, lambda: self.plain.sample(batch, env=env)),
                call_seeded(seed, lambda: self.ours.sample(batch, env=env)),
            )

    def assert_same_arrays(self) -> None:
        """Compare position, size and all arrays."""
        assert (self.ours.pos, self.ours.full, self.ours.size()) == (self.plain.pos, self.plain.full, self.plain.size())
        for name, theirs, ours in self.list_arrays():
            assert_same_bits(theirs, np.asarray(ours), name)

    def list_arrays(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of every array, Stable-Baselines3's array and holdall's."""
        for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
            theirs = getattr(self.plain, name)
            ours = getattr(self.ours, name)
            if isinstance(theirs, dict):
                assert theirs.keys() == ours.keys()
                yield from ((f"{name}[{key!r}]", theirs[key], ours[key]) for key in theirs)
            else:
                yield name, theirs, ours


def make_steps(case: Case, rng: np.random.Generator) -> Iterator[Step]:
    """Yield steps with terminations, time limits, and restarts without an end."""
    first = [_observe(case, rng, None) for _ in range(case.lanes)]
    while True:
        after = [_observe(case, rng, seen) for seen in first]
        done = rng.random(case.lanes) < 0.15
        cut = done & (rng.random(case.lanes) < 0.5)
        reward = rng.normal(size=case.lanes).astype(np.float32)
        action = np.stack([np.asarray(draw(case.action, rng)) for _ in range(case.lanes)])
        infos = [{"TimeLimit.truncated": bool(was_cut)} if rng.random() < 0.7 or was_cut else {} for was_cut in cut]
        yield _batch(case, first), _batch(case, after), action, reward, done, infos
        is_restarted = done | (rng.random(case.lanes) < 0.04)
        first = [
            _observe(case, rng, None) if begins else seen for begins, seen in zip(is_restarted, after, strict=True)
        ]


def assert_same_batch(expected: Any, got: Any) -> None:
    """Compare two named tuples of tensors, or of dicts of them."""
    assert type(expected) is type(got)
    for name in expected._fields:
        theirs = getattr(expected, name)
        ours = getattr(got, name)
        if theirs is None:
            assert ours is None
        elif isinstance(theirs, dict):
            assert list(theirs) == list(ours)
            for key in theirs:
                assert_same_tensor(theirs[key], ours[key], f"{name}.{key}")
        else:
            assert_same_tensor(theirs, ours, name)


def assert_same_tensor(expected: torch.Tensor, got: torch.Tensor, name: str) -> None:
    """Compare device, dtype, shape, layout in memory and bits."""
    assert (got.device, got.dtype) == (expected.device, expected.dtype), name
    assert got.stride() == expected.stride() or expected.numel() == 0, name
    if got.is_floating_point():
        assert got.data_ptr() % 64 == 0, f"{name} is not aligned like a tensor of torch"
    assert_same_bits(expected.numpy(), got.numpy(), name)


def assert_same_bits(expected: Any, got: Any, name: str) -> None:
    """Compare shape, dtype and every byte, so that NaN payloads and signs of zeros count."""
    theirs = np.asarray(expected)
    ours = np.asarray(got)
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    assert ours.tobytes() == theirs.tobytes(), name


def call_seeded(seed: int, act: Any) -> Any:
    """Call `act` after seeding the generator of Stable-Baselines3."""
    np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3's generator.
    return act()


def _observe(case: Case, rng: np.random.Generator, before: Any) -> Any:
    """Draw an observation that follows `before`, or a first one."""
    fresh = draw(case.observation, rng)
    if not case.stacked or isinstance(fresh, dict):
        return fresh
    if before is None:
        return np.repeat(fresh[:1], len(fresh), axis=0)
    return np.concatenate([before[1:], fresh[:1]])


def _batch(case: Case, lanes: list[Any]) -> Any:
    if isinstance(lanes[0], dict):
        return {key: _convert(case, np.stack([lane[key] for lane in lanes])) for key in lanes[0]}
    return _convert(case, np.stack(lanes))


def _convert(case: Case, batch: NDArray[Any]) -> NDArray[Any]:
    if case.transposed and batch.ndim == 4:
        batch = np.ascontiguousarray(batch.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        assert not batch.flags.c_contiguous
    if case.given_as is not None:
        batch = batch.astype(case.given_as) * 1.1
    return batch


def _overwrite(step: Step) -> None:
    obs, next_obs, action, reward, done, infos = step
    for array in [*_list_arrays(obs), *_list_arrays(next_obs), action, reward, done]:
        array[...] = 1
    infos.clear()


def _list_arrays(obs: Any) -> list[NDArray[Any]]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def _describe_space(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return "Dict"
    return f"{type(space).__name__}{space.shape}{space.dtype}"
