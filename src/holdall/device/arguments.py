"""Checks of the arguments of `add` for a memory on a device, and their conversion to tensors in leaf order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from holdall.delivery.drawn_rows import list_arrays, map_arrays
from holdall.delivery.staging import Staging, torch_dtype
from holdall.device.tensors import TensorStep
from holdall.errors import ArgumentError
from holdall.schema import Leaf, Schema, Tree, lacks_lane_axis, suggest_axis_order, suggest_dtype
from holdall.store.step import RawStep, Step, check_step

_CUDA_IN_DLPACK = (2, 10)
"""What DLPack calls devices of CUDA and of ROCm."""
_FLAG = Leaf("", (), np.dtype(np.bool_))


def is_device_data(value: Any, device: torch.device) -> bool:
    """Return whether the first array of a nested value is on a device. Otherwise it is an array of the host.

    Tensors on the CPU count as arrays of the host, unless `device` is the CPU. Tensors on another device than `device`
    count as data on a device, so that the later error names both devices.
    """
    while isinstance(value, Mapping | tuple) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    if isinstance(value, np.ndarray):
        return False
    if isinstance(value, torch.Tensor):
        return value.device.type == device.type or value.device.type != "cpu"
    dlpack = getattr(value, "__dlpack_device__", None)
    return dlpack is not None and device.type == "cuda" and dlpack()[0] in _CUDA_IN_DLPACK


class TensorCheck:
    """Checks of arguments for a memory on one device. They cast nothing, and do not wait for the device."""

    def __init__(self, schema: Schema, device: torch.device) -> None:
        self._schema = schema
        self._device = device
        self._staging = Staging(device)
        self._dtypes = {leaf.dtype: torch_dtype(leaf.dtype) for leaf in schema.leaves}
        self._find_reward_leaf = cache(schema.reward_leaf)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory through which arrays of the host are copied."""
        return self._staging.nbytes

    def check_tick(self, reward_dtype: np.dtype[Any] | None, given: tuple[Any, ...]) -> TensorStep:
        """Return the arguments of `add`, without an axis of time. Raise ArgumentError."""
        return self._check((self._schema.num_envs,), reward_dtype, given)

    def check_ticks(self, reward_dtype: np.dtype[Any] | None, given: tuple[Any, ...]) -> TensorStep:
        """Return the arguments of `extend`. Raise ArgumentError."""
        return self._check((len(given[2]), self._schema.num_envs), reward_dtype, given)

    def _check(
        self, leading: tuple[int, ...], reward_dtype: np.dtype[Any] | None, given: tuple[Any, ...]
    ) -> TensorStep:
        """Check tensors, or check arrays and copy them to the device."""
        if is_device_data(given[0], self._device):
            return self._check_tensors(leading, reward_dtype, *given)
        step = check_step(self._schema, leading, reward_dtype, RawStep(*given))
        return self.send(step)

    def send(self, step: Step) -> TensorStep:
        """Return a copy of `step` on the device. Its arrays were checked."""
        given = step._replace(extras=step.extras or ())
        tensors = iter(self._staging.send(list_arrays(given)))
        sent = map_arrays(given, lambda _: next(tensors))
        return TensorStep(**sent._asdict())

    def send_array(self, array: Any) -> torch.Tensor:
        """Return a copy of one array on the device."""
        return self._staging.send([np.asarray(array)])[0]

    def _check_tensors(
        self,
        leading: tuple[int, ...],
        reward_dtype: np.dtype[Any] | None,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> TensorStep:
        schema = self._schema
        rewards = self.as_tensor(reward, "reward")
        dtype = self.find_numpy_dtype(rewards) if reward_dtype is None else reward_dtype
        return TensorStep(
            obs=tuple(schema.observation.flatten(obs, leading, "obs", self.fit)),
            action=tuple(schema.action.flatten(action, leading, "action", self.fit)),
            reward=self.fit(self._find_reward_leaf(dtype), rewards, leading, "reward"),
            next_obs=tuple(schema.observation.flatten(next_obs, leading, "next_obs", self.fit)),
            terminated=self.fit(_FLAG, terminated, leading, "terminated"),
            truncated=self.fit(_FLAG, truncated, leading, "truncated"),
            extras=tuple(schema.extras.flatten({} if extras is None else extras, leading, "extras", self.fit)),
            valid=None if valid is None else self.fit(_FLAG, valid, leading, "valid"),
        )

    def check_leaves(self, tree: Tree, value: Any, argument: str) -> list[torch.Tensor]:
        """Return a nested argument as tensors, one per leaf, lanes first."""
        return tree.flatten(value, (self._schema.num_envs,), argument, self.fit)

    def check_leaf(self, leaf: Leaf, value: Any, argument: str) -> torch.Tensor:
        """Return an argument that is one leaf as a tensor, lanes first."""
        return self.fit(leaf, value, (self._schema.num_envs,), argument)

    def check_rows(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> torch.Tensor:
        """Return new rows of a leaf, one per id."""
        return self.fit(leaf, value, leading, argument, "one row per id")

    def find_numpy_dtype(self, tensor: torch.Tensor) -> np.dtype[Any]:
        """Return NumPy's counterpart of the dtype of rewards."""
        try:
            dtype: np.dtype[Any] = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        except TypeError as error:
            raise ArgumentError(
                f"reward has dtype {tensor.dtype}, which NumPy does not have. Pass rewards of dtype float32."
            ) from error
        return dtype

    def as_tensor(self, value: Any, argument: str) -> torch.Tensor:
        """Return a value as a tensor on the device. Raise ArgumentError if it is a tensor on another device."""
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
                value = torch.utils.dlpack.from_dlpack(value)
            else:
                value = torch.from_numpy(np.array(value)).to(self._device)
        tensor: torch.Tensor = value
        if tensor.device != self._device:
            raise ArgumentError(
                f"{argument} is on {tensor.device}, but the memory is on {self._device}. Pass "
                f"{argument}.to('{self._device}')."
            )
        return tensor

    def fit(
        self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str, axes: str = "the lanes"
    ) -> torch.Tensor:
        """Return `value` as a tensor of shape `leading + leaf.shape`. Raise ArgumentError."""
        is_tensor = isinstance(value, torch.Tensor) and value.device == self._device
        tensor = value if is_tensor else self.as_tensor(value, leaf.describe(argument))
        dtype = self._dtypes.get(leaf.dtype)
        if dtype is None:
            dtype = torch_dtype(leaf.dtype)
            self._dtypes[leaf.dtype] = dtype
        if tensor.requires_grad:
            tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == dtype and shape == leading + leaf.shape:
            return tensor
        name = leaf.describe(argument)
        if tensor.dtype != dtype:
            remedy = suggest_dtype(
                str(tensor.dtype).removeprefix("torch."),
                leaf.dtype,
                f"{name}.to({dtype})",
                is_float=tensor.is_floating_point(),
                is_reward=argument == "reward",
            )
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, expected {dtype}. holdall never casts. {remedy}")
        if lacks_lane_axis(shape, leading, leaf.shape) and axes == "the lanes":
            return tensor.reshape(leading + leaf.shape)
        remedy = suggest_axis_order(shape, leaf.shape, "torch") or "pass a tensor of that shape"
        raise ArgumentError(
            f"{name} has shape {shape}, expected {leading + leaf.shape}: {axes}, then the space's {leaf.shape}; "
            f"{remedy}"
        )
