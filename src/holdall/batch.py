"""Draws, batches and transition ids.

A sampler returns a `Draw`: the ids of a batch, and what replaces stored fields. A memory reads the fields of these ids
and returns a `Batch`. The batch belongs to the caller: holdall never writes to its arrays again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError, TransitionIdError
from holdall.schema import as_array

Ids = NDArray[np.int64]
"""Transition ids."""
Flags = NDArray[np.bool_]
"""One boolean per id or step."""


class RewardFunction(Protocol):
    """Function that computes rewards for other goals, such as Gymnasium's `compute_reward`. It takes arrays."""

    def __call__(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any], /) -> Any:
        """Return one reward per row. `info` has the extras of the rows."""


@dataclass(frozen=True, slots=True)
class Goals:
    """The rows of a batch that get another goal.

    In `obs` and `next_obs` of these rows, `desired_key` becomes the goal that transition `ids` achieved: `achieved_key`
    of its `next_obs`. The reward becomes the result of `reward_fn`.
    """

    # Rows of the batch.
    rows: Ids
    # Transitions whose outcomes become the goals, one per entry of `rows`.
    ids: Ids
    # Key of the observation that has the achieved goal.
    achieved_key: str
    # Key of the observation that has the desired goal.
    desired_key: str
    reward_fn: RewardFunction


@dataclass(frozen=True, slots=True)
class Draw:
    """The recipe of a batch: the transition ids in the order of the batch, and values that replace stored fields.

    Fields that are None are read from the transitions in `ids`. Ids of shape (batch, time) give a batch of sequences.
    """

    # (batch,) or (batch, time). All of these transitions are held.
    ids: Ids
    # (batch,) importance weights.
    weights: NDArray[np.float32]
    # (batch,) transitions whose `next_obs`, `terminated` and `truncated` are read.
    last_ids: Ids | None = None
    # (batch, ...) rewards.
    reward: NDArray[Any] | None = None
    # (batch,) discounts of the value of `next_obs`.
    discount: NDArray[np.float32] | None = None
    # Same shape as `ids`. False for padding.
    mask: Flags | None = None
    # Rows that get another goal.
    goals: Goals | None = None

    @classmethod
    def from_ids(cls, ids: Ids) -> Draw:
        """Return the draw of a plain batch of the transitions `ids`, all with weight 1."""
        return cls(ids, np.ones(len(ids), np.float32))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of transitions. The first axis of every array is the batch.

    `obs`, `next_obs`, `action` and `extras` are nested like their spaces. Arrays are NumPy arrays, or torch tensors on
    the memory's device. `ids` is a NumPy array, because callers pass it back to the memory and not to a network. Only a
    memory with `store_device` may draw ids on the device, and then returns them as a tensor. In a batch of sequences,
    time is the second axis of every array except `weights`.

    Examples:
        >>> batch = memory.sample(32)
        >>> batch.obs.shape, batch.action.shape, batch.ids.shape
        ((32, 4), (32,), (32,))
    """

    obs: Any
    action: Any
    reward: Any  # (batch,)
    next_obs: Any
    terminated: Any  # (batch,) bool
    truncated: Any  # (batch,) bool
    extras: dict[str, Any]
    ids: Ids  # (batch,)
    weights: Any  # (batch,) float32 importance weights; all 1 unless the sampler corrects for uneven draws
    discount: Any = None  # (batch,) float32 discount of the value of next_obs; None: use the gamma of the agent
    mask: Any = None  # (batch, time) bool, False for padding; None if the batch has no sequences

    def __len__(self) -> int:
        return len(self.ids)

    def jax(self) -> Batch:
        """Return the batch with JAX arrays on JAX's default device. `ids` stays as it is.

        Tensors on that device are passed by DLPack, without a copy. JAX has no dtypes of 64 bits unless
        `jax_enable_x64` is set. Without it, integers that fit into 32 bits are converted, and other values of 64 bits
        raise ArgumentError.
        """
        return replace(self, **{name: _convert_to_jax(getattr(self, name), name) for name in _JAX_FIELDS})


_JAX_FIELDS = tuple(field.name for field in fields(Batch) if field.name != "ids")


def _convert_to_jax(value: Any, name: str) -> Any:
    """Convert every array in a nested value to a JAX array."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _convert_to_jax(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_convert_to_jax(part, f"{name}[{i}]") for i, part in enumerate(value))
    try:
        import jax  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  an optional package
    except ImportError as error:
        raise MissingPackageError(
            "A batch of JAX arrays needs jax, which is not installed. Run \"pip install 'holdall[jax]'\"."
        ) from error
    has_64_bits = str(value.dtype).removeprefix("torch.") in {"float64", "int64", "uint64"}
    config: Any = jax.config
    if has_64_bits and not config.jax_enable_x64:
        value = _narrow_to_32_bits(value, name)
    is_on_host = isinstance(value, np.ndarray) or value.device.type == "cpu"
    if is_on_host and jax.default_backend() != "cpu":
        return jax.device_put(np.asarray(value))
    return jax.dlpack.from_dlpack(value)


def _narrow_to_32_bits(value: Any, name: str) -> Any:
    """Return integers of 64 bits as int32 or uint32. Raise ArgumentError for floats, or if an integer does not fit."""
    narrow = _convert_to_32_bits(value)
    if narrow is None:
        raise ArgumentError(
            f"{name} has dtype {value.dtype}, and JAX would keep only 32 bits of each value. Call "
            "jax.config.update('jax_enable_x64', True), or store the field with 32 bits."
        )
    return narrow


def _convert_to_32_bits(value: Any) -> Any:
    """Return integers of 64 bits as int32 or uint32. Return None for floats, or if an integer does not fit."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            return None
        narrow: Any = value.astype(f"{value.dtype.kind}4")
        return narrow if (narrow == value).all() else None
    if value.is_floating_point():
        return None
    if str(value.dtype) == "torch.uint64":  # torch cannot compare uint64 with other dtypes.
        torch = import_torch()
        wide = value.view(torch.int64)
        return wide.int().view(torch.uint32) if bool((wide >> 32 == 0).all()) else None
    narrow = value.int()
    return narrow if bool((narrow == value).all()) else None


def find_jax_device() -> str | None:
    """Return the device on which torch can fill arrays for JAX. None means the host."""
    try:
        import jax  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  an optional package
    except ImportError as error:
        raise MissingPackageError(
            "device='jax' needs jax, which is not installed. Run \"pip install 'holdall[jax]'\", or use device=None "
            "for NumPy arrays."
        ) from error
    if jax.default_backend() == "cpu":
        return None
    try:
        return "cuda" if import_torch().cuda.is_available() else None
    except MissingPackageError:
        return None


def import_torch() -> Any:
    """Return the package torch. Raise MissingPackageError if it is not installed."""
    try:
        import torch  # noqa: PLC0415  an optional package
    except ImportError as error:
        raise MissingPackageError(
            "device is given, but torch is not installed. Run \"pip install 'holdall[torch]'\", or use device=None for "
            "NumPy arrays."
        ) from error
    return torch


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Steps of a rollout: a minibatch of single steps, or of sequences.

    Arrays have shape (batch, ...) for single steps. For sequences they have shape (sequences, time, ...), with zeros
    after the end of each sequence. They are NumPy arrays, or torch tensors on the memory's device. `ids` is always a
    NumPy array.

    Examples:
        >>> rollout = holdall.RolloutMemory(env.observation_space, env.action_space, num_steps=4, num_envs=1)
        >>> obs, _ = env.reset(seed=0)
        >>> while not rollout.is_full:
        ...     rollout.add(obs, 0, 1.0, False, False, value=np.zeros(1, np.float32), log_prob=np.zeros(1, np.float32))
        >>> rollout.finish(np.zeros(1, np.float32))
        >>> for batch in rollout.minibatches(batch_size=2, epochs=1):
        ...     assert batch.obs.shape == (2, 4) and batch.advantage.shape == (2,)
    """

    obs: Any
    action: Any
    reward: Any
    value: Any  # float32, like `log_prob`, `advantage` and `returns`
    log_prob: Any
    advantage: Any
    returns: Any
    extras: dict[str, Any]
    ids: Ids  # step * num_envs + lane; -1 after the end of a sequence
    mask: Any = None  # (sequences, time) bool, False after the end of a sequence; None for single steps

    def __len__(self) -> int:
        return len(self.ids)


# ---------------------------------------------------------------- ids


def check_ids(ids: Any) -> Ids:
    """Return `ids` as a flat int64 array. Raise ArgumentError unless they are a flat array of integers."""
    array = as_array(ids, "ids")
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"ids has shape {array.shape} and dtype {array.dtype}. Pass a flat array of integers, such as ids[mask]."
        )
    if array.dtype == np.uint64:
        highest = int(array.max())
        if highest > np.iinfo(np.int64).max:
            raise TransitionIdError(f"ids holds {highest}, but ids are below 2**63. Pass ids below next_id.")
    return array.astype(np.int64)


def check_ids_of_any_shape(ids: Any) -> Ids:
    """Return `ids` as an int64 array of the same shape. Raise ArgumentError unless they are integers."""
    array = as_array(ids, "ids")
    return check_ids(array.reshape(-1)).reshape(array.shape)


class Validity(Protocol):
    """Which of the held ids are transitions. Entries added with `valid=False` are not. This never changes for an id."""

    @property
    def all_valid(self) -> bool:
        """Whether every held id is a transition."""

    def are_valid(self, ids: Ids, /) -> Flags:
        """Return which of the held `ids` are transitions."""


def require_in_range(ids: Ids, first_id: int, next_id: int) -> None:
    """Raise TransitionIdError unless all `ids`, of any shape, are held."""
    if not ids.size:
        return
    if first_id <= ids.min() and ids.max() < next_id:
        return
    is_outside = (ids < first_id) | (ids >= next_id)
    raise TransitionIdError(
        f"ids holds {int(ids[is_outside][0])}, but the memory holds the ids from first_id ({first_id}) to next_id "
        f"({next_id}) - 1. Lower ids were evicted, higher ids were not added yet. Pass ids that are held."
    )


def require_held(ids: Ids, first_id: int, next_id: int, validity: Validity) -> None:
    """Raise TransitionIdError unless all `ids`, of any shape, are held and are transitions."""
    require_in_range(ids, first_id, next_id)
    if validity.all_valid:
        return
    is_valid = validity.are_valid(ids)
    if not is_valid.all():
        raise TransitionIdError(
            f"ids holds {int(ids[~is_valid][0])}, which was added with valid=False and is not a transition. Leave that "
            "id out."
        )
