"""RolloutBuffer: Stable-Baselines3's rollout buffers, Box and Dict alike, each frame stored once.

In:  what PPO and A2C add.  Out: the minibatches that its own buffers would return.
Invariant: the same seed draws the same steps from NumPy's global generator in the same order, advantages are
estimated in the same order of operations, and the tensors are equal bit for bit, so the weights are.
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

from holdall.delivery import Gather, MinibatchDelivery
from holdall.errors import ArgumentError
from holdall.native import chosen_kernels, estimate_advantages
from holdall.report import MemoryReport
from holdall.sb3.buffer_parts import SlotArray, cast
from holdall.schema import Leaf, require_count
from holdall.storage import RolloutFields

_FLOAT32 = np.dtype(np.float32)
_ESTIMATES = ("values", "log_probs", "advantages", "returns")
_READ_AT_ONCE_BYTES = 8 * 2**20


class RolloutBuffer(buffers.DictRolloutBuffer):
    """Drop-in for Stable-Baselines3's `RolloutBuffer` and `DictRolloutBuffer`.

    `PPO("CnnPolicy", env, rollout_buffer_class=holdall.sb3.RolloutBuffer)`

    `observations` is gathered when it is read; all other arrays are plain ones. As there, each array may be written to
    or exchanged for another one, until the next `reset`; `observations` may only be exchanged.

    Args:
        compress: See `holdall.RolloutMemory`; through `rollout_buffer_kwargs`.
    """

    _compress: str | None = None
    _shown: tuple[Any, ...]  # the arrays that `_fields` gather from
    _fields: list[tuple[Leaf, Gather]]

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
        # Past its parents, whose constructors each know one kind of space.
        super(buffers.RolloutBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self._allocate()
        self.reset()

    def arrays(self) -> list[tuple[str, NDArray[Any]]]:
        """Return every array that the buffer holds, by field, for a watch that asks where they lie."""
        return [*self._frames.arrays(), *self._plain(), *(("staging", block) for block in self._delivery.arrays())]

    @property
    def fill(self) -> float:
        """How full the rollout is, of 1."""
        return self.pos / self.buffer_size

    def reset(self) -> None:
        """Forget the rollout; its memory is that of the next one."""
        self._frames.reset()
        self._delivery.release_large()
        self._show_arrays()
        self._shown, self._fields = (), []
        self._is_written = True
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
        rows = [self._cast(leaf, obs) for leaf in self._leaves]
        if self._is_written:
            self._frames.write(pos, rows)
        shown: Any = self.observations
        if not (all(map(is_, shown.values(), self._stored.values())) if self._is_dict else shown is self._stored[""]):
            for leaf, given in self._exchanged():
                given[pos] = rows[self._leaves.index(leaf)]
        self.actions[pos] = action.reshape((self.n_envs, self.action_dim))
        self.rewards[pos] = reward
        self.episode_starts[pos] = episode_start
        self.values[pos] = value.detach().cpu().numpy().flatten()
        self.log_probs[pos] = log_prob.detach().cpu().numpy()
        self.pos = pos + 1
        if self.pos == self.buffer_size:
            self.full = True
            self._frames.drain()

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: NDArray[Any]) -> None:
        """Estimate advantages and returns, as Stable-Baselines3 does, in place."""
        names = ("rewards", "values", "advantages", "returns")
        is_own = self.episode_starts is self._own_starts and all(
            getattr(self, name) is self._rows[name] for name in names
        )
        is_own = is_own and last_values.dtype is th.float32
        if not is_own or type(self.gamma) not in {int, float} or type(self.gae_lambda) not in {int, float}:
            # NumPy computes with scalars of its own types, and with arrays of others, in their precision.
            super().compute_returns_and_advantage(last_values, dones)
            return
        self._starts[self.buffer_size] = dones
        last = last_values.detach().cpu().numpy().flatten()
        rewards, values, advantages, returns = (self._rows[name] for name in names)
        ends = self._starts[1:]
        estimate_advantages(rewards, values, ends, last, self.gamma, self.gae_lambda, advantages, returns)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield minibatches, in the order of Stable-Baselines3's own buffers."""
        steps = self.buffer_size * self.n_envs
        if not self.full:
            raise ArgumentError(
                f"get was called after {self.pos} of {self.buffer_size} steps; minibatches are made of whole rollouts, "
                "so add the others before"
            )
        size = steps if batch_size is None else require_count("batch_size", batch_size)
        indices = np.random.permutation(steps)  # noqa: NPY002  its generator
        if not self.generator_ready:
            self._flatten_arrays()
            self.generator_ready = True
        for first in range(0, steps, size):
            yield self._get_samples(indices[first : first + size])

    def _get_samples(self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        if type(self).to_torch is not RolloutBuffer.to_torch or "to_torch" in self.__dict__:  # a user's own
            kind: Any = buffers.DictRolloutBuffer if self._is_dict else buffers.RolloutBuffer
            return kind._get_samples(self, batch_inds, env)
        delivered = self._delivery.deliver(batch_inds, self._fields_shown())
        seen, (actions, *estimates) = delivered[: len(self._leaves)], delivered[len(self._leaves) :]
        if not self._is_dict:
            return RolloutBufferSamples(seen[0], actions, *estimates)
        observations = {leaf.name: tensor for leaf, tensor in zip(self._leaves, seen, strict=True)}
        return DictRolloutBufferSamples(observations, actions, *estimates)

    def _fields_shown(self) -> list[tuple[Leaf, Gather]]:
        """Return how every field of a minibatch is gathered; kept until an array is exchanged for another one."""
        observed: Any = tuple(self.observations.values()) if self._is_dict else (self.observations,)
        shown = (*observed, self.actions, self.values, self.log_probs, self.advantages, self.returns)
        if len(shown) == len(self._shown) and all(map(is_, shown, self._shown)):
            return self._fields
        fields = [self._observed_field(number, leaf) for number, leaf in enumerate(self._leaves)]
        for name in self._flat:
            rows = np.asarray(getattr(self, name))
            shape = rows.shape[1:] if name == "actions" else ()
            if rows.size != self.buffer_size * self.n_envs * prod(shape):
                raise ArgumentError(
                    f"{name} has shape {rows.shape}, and the rollout has {self.buffer_size} steps of {self.n_envs} "
                    "environments; assign an array of the shape that it had"
                )
            # Actions are handed over as float32, whatever they are.
            leaf = Leaf(name, shape, _FLOAT32 if name == "actions" else rows.dtype)
            fields.append((leaf, partial(_gather_rows, rows.reshape(-1, *shape))))
        if all(map(is_, shown, (*self._stored_flat.values(), *self._flat.values()))):
            self._shown, self._fields = shown, fields
        return fields

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        sums: dict[str, Any] = {
            "transitions": self.pos * self.n_envs,
            "staging_bytes": self._delivery.nbytes,
        }
        flat = [(name, rows[: self.pos].nbytes) for name, rows in self._plain()]
        return self._frames.report(self.pos if self._is_written else 0, flat, **sums)

    def _plain(self) -> list[tuple[str, NDArray[Any]]]:
        """Return the plain arrays, by name."""
        given = [(f"observations.{leaf.name}".rstrip("."), rows) for leaf, rows in self._exchanged()]
        return [*given, *self._rows.items(), ("episode_starts", self._starts)]

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """Put environments before steps and both into one axis; observations stay where they are."""
        return arr.flattened() if isinstance(arr, SlotArray) else buffers.BaseBuffer.swap_and_flatten(arr)

    def __getstate__(self) -> dict[str, Any]:
        """Return the rollout as the plain arrays that it shows."""
        made = {"_frames", "_delivery", "_rows", "_flat", "_starts", "_own_starts", "_stored", "_stored_flat", "_shown",
                "_fields"}  # fmt: skip
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with plain arrays until the next `reset`."""
        self.__dict__.update(state)
        self._allocate()
        self._is_written = False
        if "observations" not in state:  # pickled by a version that left the rollout behind
            self.reset()

    def _allocate(self) -> None:
        """Make everything that a rollout needs, once."""
        self._is_dict = isinstance(self.observation_space, spaces.Dict)
        self._leaves = tuple(self._leaves_of())
        self._frames = RolloutFields(self._leaves, self.buffer_size, self.n_envs, self._compress, chosen_kernels())
        device = "cpu" if self.device.type == "cpu" else str(self.device)
        self._delivery = MinibatchDelivery(device, list(self._leaves))
        lanes = (self.buffer_size, self.n_envs)
        self._rows = {name: np.zeros(lanes, np.float32) for name in ("rewards", *_ESTIMATES)}
        self._rows["actions"] = np.zeros((*lanes, self.action_dim), self.action_space.dtype)
        self._flat = {name: self.swap_and_flatten(self._rows[name]).copy() for name in ("actions", *_ESTIMATES)}
        self._starts = np.zeros((self.buffer_size + 1, self.n_envs), np.float32)  # the last row: after the rollout
        self._own_starts = self._starts[: self.buffer_size]
        self._stored = {leaf.name: self._observed(field, leaf) for field, leaf in enumerate(self._leaves)}
        self._stored_flat = {name: stored.flattened() for name, stored in self._stored.items()}
        self._shown, self._fields = (), []

    def _leaves_of(self) -> list[Leaf]:
        """Shape and dtype of every observation key, as Stable-Baselines3 stores it."""
        space: Any = self.observation_space  # a Dict there, any space here; and so its shapes
        shapes: Any = self.obs_shape
        if self._is_dict:
            return [Leaf(key, tuple(shape), np.dtype(space[key].dtype)) for key, shape in shapes.items()]
        return [Leaf("", tuple(shapes), np.dtype(space.dtype))]

    def _show_arrays(self) -> None:
        """Show the arrays under the names that algorithms, callbacks and subclasses read."""
        for name, rows in self._rows.items():
            rows.fill(0)
            setattr(self, name, rows)
        self._starts.fill(0)
        self.episode_starts = self._own_starts
        shown: Any = dict(self._stored) if self._is_dict else self._stored[""]
        self.observations = shown

    def _flatten_arrays(self) -> None:
        """Show the arrays as Stable-Baselines3 does from a rollout's first minibatch on: environment by environment."""
        for name, flat in self._flat.items():
            rows = getattr(self, name)
            if rows is self._rows[name]:
                swapped = rows.swapaxes(0, 1)
                flat.reshape(swapped.shape)[...] = swapped
                setattr(self, name, flat)
            else:
                setattr(self, name, self.swap_and_flatten(rows))
        shown: Any = self._stored_flat | {leaf.name: self.swap_and_flatten(rows) for leaf, rows in self._exchanged()}
        self.observations = shown if self._is_dict else shown[""]

    def _exchanged(self) -> list[tuple[Leaf, Any]]:
        """Return the observations that somebody put in the place of the stored ones."""
        shown: Any = self.observations if self._is_dict else {"": self.observations}
        return [
            (leaf, shown[leaf.name])
            for leaf in self._leaves
            if shown[leaf.name] is not self._stored[leaf.name] and shown[leaf.name] is not self._stored_flat[leaf.name]
        ]

    def _observed_field(self, number: int, leaf: Leaf) -> tuple[Leaf, Gather]:
        """Return how one key's observations are gathered: from where they are stored, or from what is shown instead."""
        shown: Any = self.observations if self._is_dict else {"": self.observations}
        if shown[leaf.name] is self._stored_flat[leaf.name]:
            return leaf, partial(self._gather_observations, number)
        rows = np.asarray(shown[leaf.name])
        return Leaf(leaf.name, rows.shape[1:], rows.dtype), partial(_gather_rows, rows)

    def _observed(self, field: int, leaf: Leaf) -> SlotArray:
        def read(places: NDArray[np.int64]) -> NDArray[Any]:
            rows = np.empty((len(places), *leaf.shape), leaf.dtype)
            self._frames.drain()
            self._frames.gather(field, np.ascontiguousarray(places), rows)
            return rows

        def id_of_place(places: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(places < self.pos * self.n_envs, places, -1)

        shape = (self.buffer_size, self.n_envs, *leaf.shape)
        rows_at_once = max(1, _READ_AT_ONCE_BYTES // max(1, leaf.nbytes))
        return SlotArray("observations", shape, leaf.dtype, id_of_place, read, rows_at_once)

    def _cast(self, leaf: Leaf, obs: Any) -> NDArray[Any]:
        """Do what assigning to one of Stable-Baselines3's arrays does to shape and dtype."""
        if not self._is_dict:
            return cast(obs, (self.n_envs, *leaf.shape), leaf.dtype, "obs")
        if leaf.name not in obs:
            raise ArgumentError(f"obs has no {leaf.name!r}; pass a dict with the keys {list(self._stored)}")
        return cast(obs[leaf.name], (self.n_envs, *leaf.shape), leaf.dtype, f"obs[{leaf.name!r}]")

    def _gather_observations(self, field: int, batch_inds: NDArray[np.int64], out: NDArray[Any]) -> None:
        lane, step = np.divmod(batch_inds, self.buffer_size)
        self._frames.gather(field, step * self.n_envs + lane, out)


def _gather_rows(rows: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    out[:] = rows[places]
