"""The recipe of a batch, which a sampler makes, the batch, which belongs to the caller, and the ids that both name.

Invariant: holdall never writes to a batch again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError, TransitionIdError
from holdall.schema import as_array


class RewardFunction(Protocol):
    """Rewards of transitions towards other goals, as Gymnasium's `compute_reward`; arrays in, an array out."""

    def __call__(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any], /) -> Any:
        """Return a reward per row; `info` holds the rows' extras."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Rows of a batch that are relabelled, as if another goal had been pursued.

    `desired_key` of `obs` and `next_obs` becomes what `achieved_key` of the next observation of
    transition `ids` shows, and the reward is what `reward_fn` returns.
    """

    rows: NDArray[np.int64]  # positions in the batch
    ids: NDArray[np.int64]  # transitions whose outcome becomes the goal, one per row
    achieved_key: str
    desired_key: str
    reward_fn: RewardFunction


@dataclass(frozen=True, slots=True)
class Draw:
    """The recipe of a batch: transition ids in its order, and what else is known of each row.

    Whatever is None is read under `ids`. Two axes of ids, (batch, time), make a batch of sequences.
    """

    ids: NDArray[np.int64]  # (batch,) or (batch, time); all of them held
    weights: NDArray[np.float32]  # (batch,)
    last_ids: NDArray[np.int64] | None = None  # where next_obs, terminated and truncated are read
    reward: NDArray[Any] | None = None
    discount: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None  # like ids; False for padding
    goals: Goals | None = None


def of_ids(ids: NDArray[np.int64]) -> Draw:
    """Return the recipe of a plain batch of given transitions."""
    return Draw(ids, np.ones(len(ids), np.float32))


@dataclass(frozen=True, slots=True)
class Batch:
    """Transitions side by side: every array has the batch as its first axis.

    `obs`, `next_obs`, `action` and `extras` have the nesting of their spaces. Arrays are
    NumPy's, or torch tensors on the memory's device. `ids` are NumPy's, since they are handed
    back to the memory and not to a network; where a device draws, they are a tensor there. In a
    batch of sequences time is the second axis of everything but `weights`.
    """

    obs: Any
    action: Any
    reward: Any  # (batch,)
    next_obs: Any
    terminated: Any  # (batch,) bool
    truncated: Any  # (batch,) bool
    extras: dict[str, Any]
    ids: NDArray[np.int64]  # (batch,)
    weights: Any  # (batch,) float32, importance weights; ones where all draws are equal
    discount: Any = None  # (batch,) float32, of the value of next_obs; None where it is the agent's own gamma
    mask: Any = None  # (batch, time) bool, False for padding; None where there are no sequences

    def __len__(self) -> int:
        return len(self.ids)

    def jax(self) -> Batch:
        """Return the same as arrays of JAX, where JAX computes by default; `ids` stay as they are.

        Tensors that are on that device are handed over by DLPack, without a copy. JAX makes 32 bits of 64 unless
        `jax_enable_x64` is set: integers that fit are taken, anything else is refused.
        """
        return replace(self, **{name: _to_jax(getattr(self, name), name) for name in _HANDED_TO_JAX})


_HANDED_TO_JAX = tuple(field.name for field in fields(Batch) if field.name != "ids")


def _to_jax(value: Any, name: str) -> Any:
    """Return a nested value with every array in it as one of JAX."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _to_jax(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_jax(part, f"{name}[{i}]") for i, part in enumerate(value))
    try:
        import jax  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  only for those who ask for it
    except ImportError as error:
        raise MissingPackageError(
            "A batch of JAX arrays needs jax, which is not installed. Run \"pip install 'holdall[jax]'\"."
        ) from error
    wide = str(value.dtype).removeprefix("torch.") in {"float64", "int64", "uint64"}
    config: Any = jax.config
    if wide and not config.jax_enable_x64:
        value = _in_32_bits(value, name)
    on_host = isinstance(value, np.ndarray) or value.device.type == "cpu"
    if on_host and jax.default_backend() != "cpu":
        return jax.device_put(np.asarray(value))
    return jax.dlpack.from_dlpack(value)


def _in_32_bits(value: Any, name: str) -> Any:
    """Return integers of 64 bits as 32, signed or not as before, if that changes none."""
    if isinstance(value, np.ndarray):
        narrow = value.astype(f"{value.dtype.kind}4") if value.dtype.kind in "iu" else None
        is_same = narrow is not None and bool((narrow == value).all())
    elif value.is_floating_point():
        is_same, narrow = False, None
    elif str(value.dtype) == "torch.uint64":  # torch does not compare these with others
        torch = import_torch()
        wide = value.view(torch.int64)
        is_same, narrow = bool((wide >> 32 == 0).all()), wide.int().view(torch.uint32)
    else:
        narrow = value.int()
        is_same = bool((narrow == value).all())
    if not is_same:
        raise ArgumentError(
            f"{name} has dtype {value.dtype}, of which JAX would keep 32 bits; call "
            "jax.config.update('jax_enable_x64', True), or store it in 32 bits"
        )
    return narrow


def device_of_jax() -> str | None:
    """Return the device on which torch can fill arrays for JAX; None where that is the host."""
    try:
        import jax  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  only for those who ask for it
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
    """Return torch, for those who ask for tensors."""
    try:
        import torch  # noqa: PLC0415  heavy, and only for those who ask for tensors
    except ImportError as error:
        raise MissingPackageError(
            "device is given, but torch is not installed; run \"pip install 'holdall[torch]'\" "
            "or use device=None for NumPy arrays"
        ) from error
    return torch


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Steps of a rollout: a minibatch of single steps, or of whole sequences.

    Arrays of a minibatch have shape (batch, ...), those of sequences (sequences, time, ...), with zeros
    behind each sequence's end. They are NumPy's, or torch tensors on the memory's device, but for `ids`.
    """

    obs: Any
    action: Any
    reward: Any
    value: Any  # float32, as `log_prob`, `advantage` and `returns`
    log_prob: Any
    advantage: Any
    returns: Any
    extras: dict[str, Any]
    ids: NDArray[np.int64]  # step * num_envs + lane; -1 behind a sequence's end
    mask: Any = None  # of sequences: True where there is a step

    def __len__(self) -> int:
        return len(self.ids)


# ---------------------------------------------------------------- ids


def as_ids(ids: Any) -> NDArray[np.int64]:
    """Return `ids` as a flat array of transition ids, or say why it is not one."""
    array = as_array(ids, "ids")
    if array.shape == (0,):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"ids has shape {array.shape} and dtype {array.dtype}; pass a flat array of integers, such as ids[mask]"
        )
    if array.dtype == np.uint64 and (most := int(array.max())) > np.iinfo(np.int64).max:
        raise TransitionIdError(f"ids holds {most}, more than were ever added; ask for ids below next_id")
    return array.astype(np.int64)


def ids_of_any_shape(ids: Any) -> NDArray[np.int64]:
    """Return `ids` as an array of transition ids, or say why it is not one."""
    array = as_array(ids, "ids")
    return as_ids(array.reshape(-1)).reshape(array.shape)


class Validity(Protocol):
    """Which transitions are real."""

    @property
    def all_valid(self) -> bool:
        """Whether every lane made a transition in every tick held."""

    def are_valid(self, ids: NDArray[np.int64], /) -> NDArray[np.bool_]:
        """Return which of some held ids are real: lanes added with valid=False made no transition."""


def require_in_range(ids: NDArray[np.int64], first_id: int, next_id: int) -> None:
    """Refuse ids, of any shape, that are not held."""
    if ids.size and not first_id <= ids.min() <= ids.max() < next_id:
        outside = (ids < first_id) | (ids >= next_id)
        raise TransitionIdError(
            f"ids holds {int(ids[outside][0])}, but only ids from first_id ({first_id}) up to, and without, "
            f"next_id ({next_id}) are held: older ones were evicted, newer ones not added yet; ask for those"
        )


def require_held(ids: NDArray[np.int64], first_id: int, next_id: int, validity: Validity) -> None:
    """Refuse ids, of any shape, that are not held or of a lane that made no transition."""
    require_in_range(ids, first_id, next_id)
    if not validity.all_valid and not (valid := validity.are_valid(ids)).all():
        raise TransitionIdError(
            f"ids holds {int(ids[~valid][0])}, which was added with valid=False: that lane "
            "made no transition in that tick; leave it out"
        )
