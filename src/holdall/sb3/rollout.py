"""RolloutBuffer: Stable-Baselines3's rollout buffers for Box and Dict observations, with each frame stored once.

Guarantee: one seed gives the same weights, bit for bit, as Stable-Baselines3's own buffers. Steps are drawn from the
global generator of NumPy in the same order, and advantages are computed with the same operations.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from math import prod
from operator import is_
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from holdall._native import estimate_advantages
from holdall.checks import require_count
from holdall.delivery.minibatches import Field, new_minibatches
from holdall.errors import ArgumentError
from holdall.report import FieldReport, MemoryReport
from holdall.rollout_fields import new_rollout_fields
from holdall.sb3.casts import cast
from holdall.sb3.slot_arrays import SlotArray
from holdall.schema import Leaf

_FLOAT32 = np.dtype(np.float32)
_ESTIMATES = ("values", "log_probs", "advantages", "returns")
_MAX_READ_BYTES = 8 * 2**20
"""Maximum number of bytes of observations that one call gathers when `observations` is read."""


class RolloutBuffer(buffers.DictRolloutBuffer):
    """Drop-in for Stable-Baselines3's `RolloutBuffer` and `DictRolloutBuffer`.

    `PPO("CnnPolicy", env, rollout_buffer_class=holdall.sb3.RolloutBuffer)`

    `observations` is gathered when it is read. All other fields are plain arrays, which may be written to. As in
    Stable-Baselines3, each field may be replaced by another array until the next `reset`.

    Args:
        compress: See `holdall.RolloutMemory`. Pass it through `rollout_buffer_kwargs`.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from holdall.sb3 import RolloutBuffer
        >>> _ = PPO("MlpPolicy", env, n_steps=64, rollout_buffer_class=RolloutBuffer).learn(64)
    """

    _compress: str | None = None
    _minibatch_fields: list[Field]  # Fields of a minibatch. Empty: not known yet.
    _minibatch_arrays: tuple[Any, ...]  # The arrays that `_minibatch_fields` read.

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        compress: str | None = None,
    ) -> None:
        self._compress = self._compress if compress is None else compress
        # The constructors of the two parent classes accept one kind of space each, so they are skipped.
        super(buffers.RolloutBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self._allocate()
        self.reset()

    # ---------------------------------------------------------------- collecting

    def reset(self) -> None:
        """Forget the rollout. The next rollout is stored in the same memory."""
        self._fields.reset()
        self._minibatches.release()
        self._expose_arrays()
        self._minibatch_arrays = ()
        self._minibatch_fields = []
        self._stores_observations = True
        self.generator_ready = False
        super(buffers.RolloutBuffer, self).reset()

    def add(
        self,
        obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        episode_start: NDArray[Any],
        value: th.Tensor,
        log_prob: th.Tensor,
    ) -> None:
        """Add one step per environment."""
        pos = self.pos
        if pos >= self.buffer_size:
            raise ArgumentError(
                f"add was called after all {self.buffer_size} steps of the rollout; call reset() before the next one"
            )
        rows = [self._cast_observation(leaf, obs) for leaf in self._leaves]
        if self._stores_observations:
            self._fields.write(pos, rows)
        for number, replaced in self._find_replaced().items():
            replaced[pos] = rows[number]
        self.actions[pos] = action.reshape((self.n_envs, self.action_dim))
        self.rewards[pos] = reward
        self.episode_starts[pos] = episode_start
        self.values[pos] = value.detach().cpu().numpy().flatten()
        self.log_probs[pos] = log_prob.detach().cpu().numpy()
        self.pos = pos + 1
        if self.pos == self.buffer_size:
            self.full = True
            self._fields.finish()

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: NDArray[Any]) -> None:
        """Estimate advantages and returns in place, with the operations of Stable-Baselines3."""
        if not self._can_estimate(last_values):
            super().compute_returns_and_advantage(last_values, dones)
            return
        self._starts[self.buffer_size] = dones
        last = last_values.detach().cpu().numpy().flatten()
        rows = self._rows
        estimate_advantages(
            rows["rewards"],
            rows["values"],
            self._starts[1:],
            last,
            self.gamma,
            self.gae_lambda,
            rows["advantages"],
            rows["returns"],
        )

    def _can_estimate(self, last_values: th.Tensor) -> bool:
        """Return whether the native function gives the same bits as Stable-Baselines3's code.

        If a number is a NumPy scalar or an array has another dtype, NumPy computes in another precision.
        """
        names = ("rewards", "values", "advantages", "returns")
        has_own_arrays = all(getattr(self, name) is self._rows[name] for name in names)
        has_own_starts = self.episode_starts is self._own_starts
        has_python_numbers = type(self.gamma) in {int, float} and type(self.gae_lambda) in {int, float}
        return has_own_arrays and has_own_starts and has_python_numbers and last_values.dtype is th.float32

    def _cast_observation(self, leaf: Leaf, obs: Any) -> NDArray[Any]:
        """Return one key of an observation as assigning it to an array of Stable-Baselines3 would store it."""
        shape = (self.n_envs, *leaf.shape)
        if not self._is_dict:
            return cast(obs, shape, leaf.dtype, "obs")
        if leaf.name not in obs:
            raise ArgumentError(f"obs has no {leaf.name!r}; pass a dict with the keys {list(self._stored)}")
        return cast(obs[leaf.name], shape, leaf.dtype, f"obs[{leaf.name!r}]")

    # ---------------------------------------------------------------- minibatches

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield minibatches, in the order of Stable-Baselines3's own buffers."""
        steps = self.buffer_size * self.n_envs
        if not self.full:
            raise ArgumentError(
                f"get was called after {self.pos} of {self.buffer_size} steps; minibatches are made of whole rollouts, "
                "so add the others before"
            )
        size = steps if batch_size is None else require_count("batch_size", batch_size)
        indices = np.random.permutation(steps)  # noqa: NPY002  Stable-Baselines3 uses the global generator.
        if not self.generator_ready:
            self._flatten_arrays()
            self.generator_ready = True
        for first in range(0, steps, size):
            yield self._get_samples(indices[first : first + size])

    def _get_samples(self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        has_own_conversion = type(self).to_torch is not RolloutBuffer.to_torch or "to_torch" in self.__dict__
        if has_own_conversion:
            kind: Any = buffers.DictRolloutBuffer if self._is_dict else buffers.RolloutBuffer
            return kind._get_samples(self, batch_inds, env)
        delivered = self._minibatches.deliver(batch_inds, self._find_minibatch_fields())
        observed = delivered[: len(self._leaves)]
        actions, *estimates = delivered[len(self._leaves) :]
        if not self._is_dict:
            return RolloutBufferSamples(observed[0], actions, *estimates)
        observations = {leaf.name: tensor for leaf, tensor in zip(self._leaves, observed, strict=True)}
        return DictRolloutBufferSamples(observations, actions, *estimates)

    def _find_minibatch_fields(self) -> list[Field]:
        """Return the fields of a minibatch. Keep them for the next minibatch if no array was replaced."""
        observed = tuple(self._get_observations().values())
        arrays = (*observed, self.actions, self.values, self.log_probs, self.advantages, self.returns)
        if len(arrays) == len(self._minibatch_arrays) and all(map(is_, arrays, self._minibatch_arrays)):
            return self._minibatch_fields
        fields = [self._make_observation_field(number, leaf) for number, leaf in enumerate(self._leaves)]
        fields += [self._make_row_field(name) for name in self._flat]
        if all(map(is_, arrays, (*self._stored_flat.values(), *self._flat.values()))):
            self._minibatch_arrays = arrays
            self._minibatch_fields = fields
        return fields

    def _make_observation_field(self, number: int, leaf: Leaf) -> Field:
        """Return the field that reads one observation key: the stored observations, or the array that replaced them."""
        shown = self._get_observations()[leaf.name]
        if shown is self._stored_flat[leaf.name]:
            return Field(leaf, partial(self._gather_observations, number))
        rows = np.asarray(shown)
        return Field(Leaf(leaf.name, rows.shape[1:], rows.dtype), partial(_gather_rows, rows))

    def _make_row_field(self, name: str) -> Field:
        """Return the field that reads an array of actions or estimates."""
        rows = np.asarray(getattr(self, name))
        shape = rows.shape[1:] if name == "actions" else ()
        if rows.size != self.buffer_size * self.n_envs * prod(shape):
            raise ArgumentError(
                f"{name} has shape {rows.shape}, and the rollout has {self.buffer_size} steps of {self.n_envs} "
                "environments; assign an array of the shape that it had"
            )
        # Stable-Baselines3 hands over actions as float32.
        leaf = Leaf(name, shape, _FLOAT32 if name == "actions" else rows.dtype)
        return Field(leaf, partial(_gather_rows, rows.reshape(-1, *shape)))

    def _gather_observations(self, field: int, batch_inds: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy observations to `out`. `batch_inds` number the steps environment by environment."""
        lane, step = np.divmod(batch_inds, self.buffer_size)
        self._fields.gather(field, step * self.n_envs + lane, out)

    # ---------------------------------------------------------------- arrays

    def _allocate(self) -> None:
        """Allocate the memory of a rollout, which all rollouts use."""
        self._is_dict = isinstance(self.observation_space, spaces.Dict)
        self._leaves = tuple(self._make_leaves())
        self._fields = new_rollout_fields(self._leaves, self.buffer_size, self.n_envs, self._compress)
        device = "cpu" if self.device.type == "cpu" else str(self.device)
        self._minibatches = new_minibatches(device, self._leaves)
        leading = (self.buffer_size, self.n_envs)
        self._rows = {name: np.zeros(leading, np.float32) for name in ("rewards", *_ESTIMATES)}
        self._rows["actions"] = np.zeros((*leading, self.action_dim), self.action_space.dtype)
        # Copies of these arrays with one leading axis, environment by environment.
        self._flat = {name: self.swap_and_flatten(self._rows[name]).copy() for name in ("actions", *_ESTIMATES)}
        # `episode_starts`. The additional last row is for the step after the rollout.
        self._starts = np.zeros((self.buffer_size + 1, self.n_envs), np.float32)
        self._own_starts = self._starts[: self.buffer_size]
        self._stored = {leaf.name: self._make_slot_array(number, leaf) for number, leaf in enumerate(self._leaves)}
        self._stored_flat = {name: stored.flattened() for name, stored in self._stored.items()}
        self._minibatch_arrays = ()
        self._minibatch_fields = []

    def _make_leaves(self) -> list[Leaf]:
        """Return shape and dtype of every observation key, as Stable-Baselines3 stores it."""
        space: Any = self.observation_space
        shapes: Any = self.obs_shape
        if self._is_dict:
            return [Leaf(key, tuple(shape), np.dtype(space[key].dtype)) for key, shape in shapes.items()]
        return [Leaf("", tuple(shapes), np.dtype(space.dtype))]

    def _make_slot_array(self, number: int, leaf: Leaf) -> SlotArray:
        """Return the stored observations of one key as an array that is gathered when it is read."""

        def read(places: NDArray[np.int64]) -> NDArray[Any]:
            rows = np.empty((len(places), *leaf.shape), leaf.dtype)
            self._fields.gather(number, np.ascontiguousarray(places), rows)
            return rows

        def find_ids(places: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(places < self.pos * self.n_envs, places, -1)

        shape = (self.buffer_size, self.n_envs, *leaf.shape)
        max_rows = max(1, _MAX_READ_BYTES // max(1, leaf.nbytes))
        return SlotArray("observations", shape, leaf.dtype, find_ids, read, max_rows)

    def _expose_arrays(self) -> None:
        """Fill all arrays with zeros. Assign them to the attributes that algorithms, callbacks and subclasses read."""
        for name, rows in self._rows.items():
            rows.fill(0)
            setattr(self, name, rows)
        self._starts.fill(0)
        self.episode_starts = self._own_starts
        self._set_observations(self._stored)

    def _flatten_arrays(self) -> None:
        """Flatten all arrays environment by environment, as Stable-Baselines3 does before the first minibatch."""
        for name, flat in self._flat.items():
            rows = getattr(self, name)
            if rows is self._rows[name]:
                swapped = rows.swapaxes(0, 1)
                flat.reshape(swapped.shape)[...] = swapped
                setattr(self, name, flat)
            else:
                setattr(self, name, self.swap_and_flatten(rows))
        shown: dict[str, Any] = dict(self._stored_flat)
        for number, rows in self._find_replaced().items():
            shown[self._leaves[number].name] = self.swap_and_flatten(rows)
        self._set_observations(shown)

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """Put environments before steps, and both into one axis. Stored observations are not copied."""
        if isinstance(arr, SlotArray):
            return arr.flattened()
        return buffers.BaseBuffer.swap_and_flatten(arr)

    def _get_observations(self) -> dict[str, Any]:
        """Return the attribute `observations` as a dict."""
        shown: Any = self.observations
        return shown if self._is_dict else {"": shown}

    def _set_observations(self, shown: dict[str, Any]) -> None:
        attribute: Any = dict(shown) if self._is_dict else shown[""]
        self.observations = attribute

    def _find_replaced(self) -> dict[int, Any]:
        """Return the arrays that a user assigned in place of stored observations, by the number of their leaf."""
        shown = self._get_observations()
        replaced = {}
        for number, leaf in enumerate(self._leaves):
            array = shown[leaf.name]
            if array is not self._stored[leaf.name] and array is not self._stored_flat[leaf.name]:
                replaced[number] = array
        return replaced

    # ---------------------------------------------------------------- state

    @property
    def fill(self) -> float:
        """The share of the rollout that was added."""
        return self.pos / self.buffer_size

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        rows: dict[str, NDArray[Any]] = {**self._rows, "episode_starts": self._starts}
        for number, replaced in self._find_replaced().items():
            rows[f"observations.{self._leaves[number].name}".rstrip(".")] = replaced
        plain = []
        for name, array in rows.items():
            plain_bytes = array[: self.pos].nbytes
            copy_bytes = self._flat[name].nbytes if name in self._flat else 0
            plain.append(FieldReport(name, 0, 0, plain_bytes + copy_bytes, plain_bytes, "flat rows"))
        observed = self._fields.report(self.pos if self._stores_observations else 0)
        return MemoryReport(
            transitions=self.pos * self.n_envs,
            fields=(*observed, *plain),
            staging_bytes=self._minibatches.nbytes,
            segments=1,
            backlog=self._fields.backlog,
            failure=self._fields.failure,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the rollout as plain arrays."""
        omitted = {
            "_fields",
            "_flat",
            "_minibatch_arrays",
            "_minibatch_fields",
            "_minibatches",
            "_own_starts",
            "_rows",
            "_starts",
            "_stored",
            "_stored_flat",
        }
        return {name: value for name, value in self.__dict__.items() if name not in omitted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the rollout. Its observations are plain arrays until the next `reset`."""
        self.__dict__.update(state)
        self._allocate()
        self._stores_observations = False


def _gather_rows(rows: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    out[:] = rows[places]
