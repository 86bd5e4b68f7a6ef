"""Memories whose data is born on a device: arguments that are tensors there, and batches that never leave it.

In:  the arguments of an `add`; draws.  Out: checked ticks of tensors; batches on the device.
Invariant: nothing is cast, and a value that does not fit is refused before anything is written. Adding and drawing
uniformly wait for nothing that the device does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.batches import (
    Batches,
    BatchForm,
    BatchJob,
    Delivery,
    DrawnRows,
    ReadyJob,
    goal_leaves,
    rewards_for,
)
from holdall.delivery.device import torch_dtype
from holdall.delivery.device_checkpoint import SavedRings
from holdall.delivery.device_draws import DeviceSampler, draws_on_device
from holdall.delivery.device_fields import byte_rows, windows_of
from holdall.delivery.device_loops import RowsOnDevice
from holdall.delivery.device_rings import DeviceRings
from holdall.errors import ArgumentError
from holdall.sampling import Uniform
from holdall.schema import Leaf, Schema, Tree, require_in_range
from holdall.storage import Store, Tick

if TYPE_CHECKING:
    import torch

_CUDA_IN_DLPACK = 2


def is_on_device(delivery: Delivery, value: Any) -> bool:
    """Whether the first array of a nested value is a tensor, or something torch can see as one, on that device."""
    while isinstance(value, Mapping | tuple) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    device = delivery.torch_device
    if device is None or isinstance(value, np.ndarray):
        return False
    if isinstance(value, delivery.torch.Tensor):
        return bool(value.device.type == device.type)
    dlpack = getattr(value, "__dlpack_device__", None)
    return dlpack is not None and device.type == "cuda" and dlpack()[0] == _CUDA_IN_DLPACK


class TensorFit:
    """Checks the arguments of an `add` for a memory on one device."""

    def __init__(self, delivery: Delivery, schema: Schema) -> None:
        self.torch, self._schema = delivery.torch, schema
        device = self.torch.device(delivery.torch_device)
        if device.type == "cuda" and device.index is None:
            device = self.torch.device("cuda", self.torch.cuda.current_device())
        self.device: torch.device = device
        self._kinds = {leaf.dtype: torch_dtype(self.torch, leaf.dtype) for leaf in schema.leaves}

    def tick(
        self, leading: tuple[int, ...], reward_dtype: np.dtype[Any] | None,
        obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any, extras: Any, valid: Any,
    ) -> Tick:  # fmt: skip
        """Return all arguments as tensors on the device."""
        schema, flag = self._schema, Leaf("", (), np.dtype(np.bool_))
        rewards = self.tensor(reward, "reward")
        dtype = self.numpy_dtype(rewards) if reward_dtype is None else reward_dtype
        return Tick(
            obs=schema.observation.flatten(obs, leading, "obs", self._fit),
            action=schema.action.flatten(action, leading, "action", self._fit),
            reward=self._fit(schema.reward_leaf(dtype), rewards, leading, "reward"),
            next_obs=schema.observation.flatten(next_obs, leading, "next_obs", self._fit),
            terminated=self._fit(flag, terminated, leading, "terminated"),
            truncated=self._fit(flag, truncated, leading, "truncated"),
            extras=schema.extras.flatten({} if extras is None else extras, leading, "extras", self._fit),
            valid=None if valid is None else self._fit(flag, valid, leading, "valid"),
        )

    def rows(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> torch.Tensor:
        """Return the bytes of rows of a leaf, one per id."""
        tensor: torch.Tensor = self._fit(leaf, value, leading, argument, "one row per id")
        return byte_rows(self.torch, tensor.detach().contiguous())

    def leaves(self, tree: Tree, value: Any, argument: str) -> list[Any]:
        """Return the tensors of one nested argument, lanes first."""
        return tree.flatten(value, (self._schema.num_envs,), argument, self._fit)

    def leaf(self, leaf: Leaf, value: Any, argument: str) -> torch.Tensor:
        """Return one argument, lanes first."""
        tensor: torch.Tensor = self._fit(leaf, value, (self._schema.num_envs,), argument)
        return tensor

    def rewards(self, value: Any, kind: torch.dtype | None) -> torch.Tensor:
        """Return rewards; those of the first step say of which dtype."""
        rewards = self.tensor(value, "reward")
        dtype = self.numpy_dtype(rewards) if kind is None else self.numpy_dtype(self.torch.empty(0, dtype=kind))
        return self.leaf(Leaf("", (), dtype), rewards, "reward")

    def numpy_dtype(self, tensor: torch.Tensor) -> np.dtype[Any]:
        """Return NumPy's name of a tensor's dtype."""
        try:
            dtype: np.dtype[Any] = self.torch.empty(0, dtype=tensor.dtype).numpy().dtype
        except TypeError as error:
            raise ArgumentError(f"reward has dtype {tensor.dtype}, which NumPy does not know; pass float32") from error
        return dtype

    def tensor(self, value: Any, called: str) -> torch.Tensor:
        """Return a value as a tensor on the device."""
        module = self.torch
        if not isinstance(value, module.Tensor):
            if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
                value = module.from_dlpack(value)
            else:
                value = module.from_numpy(np.ascontiguousarray(value)).to(self.device)
        if value.device != self.device:
            raise ArgumentError(
                f"{called} is on {value.device}, the memory's data is on {self.device}; pass it "
                f"as {called}.to('{self.device}')"
            )
        return cast("torch.Tensor", value)

    def _fit(
        self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str, axes: str = "the lanes"
    ) -> Any:  # fmt: skip
        called = f"{argument}[{leaf.name!r}]" if leaf.name else argument
        tensor = self.tensor(value, called)
        if (kind := self._kinds.get(leaf.dtype)) is None:
            kind = self._kinds[leaf.dtype] = torch_dtype(self.torch, leaf.dtype)
        if tensor.dtype != kind:
            raise ArgumentError(
                f"{called} has dtype {tensor.dtype}, expected {kind}; holdall never casts, so pass {called}.to({kind})"
            )
        if tensor.shape != leading + leaf.shape:
            raise ArgumentError(
                f"{called} has shape {tuple(tensor.shape)}, expected {leading + leaf.shape}: {axes}, then the "
                f"space's {leaf.shape}; pass a tensor of that shape"
            )
        return tensor


def rings_on(fit: TensorFit, schema: Schema, ticks: int, limit: int | None, steps: Tick | None) -> SavedRings:
    """Allocate all that a memory takes on its device; say what would fit if that is too much.

    Args:
        steps: The first ones, which show how observations are cut; None if rows that were saved will do so.
    """
    windows = None if steps is None else windows_of(schema, steps)
    return SavedRings(fit.torch, fit.device, schema, ticks + 1, windows, limit)


class ResidentBatches(Batches):
    """Makes batches of rows that are on their device already."""

    def __init__(self, schema: Schema, rings: DeviceRings, capacity: int) -> None:
        self._rings, self._capacity = rings, capacity
        self._deliver(schema)
        self._sampler: tuple[Any, DeviceSampler] | None = None

    def _deliver(self, schema: Schema) -> None:
        """Make batches of a schema's fields."""
        self._schema, self._form = schema, BatchForm(schema)

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """Draw a batch on the device, if the sampler's draws can be made there; under the memory's lock."""
        seed = int(generator.integers(2**63))
        if type(sampler) is Uniform:
            found = self._rings.loops.draw(count, seed)
            return self._batch(found, found.ids, found.ones)
        there = self._on_device(sampler)
        if there is None:
            return None
        draw = there.draw(count, seed)
        found = self._rings.loops.read(draw.ids.reshape(-1), draw.last_ids)
        if draw.reward is not None:
            found.rows[-1] = draw.reward
        return self._batch(found, draw.ids, draw.weights, draw.discount, draw.mask)

    def update_priorities(self, sampler: Any, ids: Any, priorities: Any) -> bool:
        """Set priorities on the device, if the sampler draws there; return whether."""
        there = self._on_device(sampler)
        if there is None or there.priorities is None:
            return False
        torch, device = self._rings.torch, self._rings.device
        there.update(torch.as_tensor(ids, device=device), torch.as_tensor(priorities, device=device))
        return True

    def bring_back(self) -> None:
        """Have the sampler on the host know what its twin on the device knows, before it is saved."""
        if self._sampler is not None and self._sampler[1].priorities is not None:
            self._sampler[1].priorities.require_sound()
            self._sampler[1].priorities.bring_back()

    def _on_device(self, sampler: Any) -> DeviceSampler | None:
        if not draws_on_device(sampler):
            return None
        if self._sampler is None or self._sampler[0] is not sampler:
            self._sampler = (sampler, DeviceSampler(sampler, self._rings, self._capacity))
        return self._sampler[1]

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`; the rows are copied here, in the order of the stream."""
        goals = draw.goals
        for ids in (draw.ids, draw.last_ids, None if goals is None else goals.ids):
            if ids is not None:
                require_in_range(ids.reshape(-1), *store.held)
        found = self._gathered(draw.ids, draw.last_ids)
        outcomes = None if goals is None else self._gathered(goals.ids, None)
        return DrawnRows(found, None, outcomes)  # type: ignore[arg-type]  # rows on the device in place of rows

    def _gathered(self, ids: NDArray[np.int64], last_ids: NDArray[np.int64] | None) -> RowsOnDevice:
        rings = self._rings
        return rings.loops.read(rings.to_device(ids), None if last_ids is None else rings.to_device(last_ids))

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return ReadyJob(partial(self.make, draw, drawn))

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        found: Any = drawn.rows
        if draw.goals is not None:
            found = self._relabelled(draw, found, drawn.outcomes)
        elif draw.reward is not None:
            found = found._replace(
                rows=[*found.rows[:-1], self._to_device(draw.reward.reshape(-1, *self._schema.reward_shape))]
            )
        of_draw = (draw.weights, draw.discount, draw.mask)
        return self._batch(found, draw.ids, *(None if array is None else self._to_device(array) for array in of_draw))

    def _batch(self, found: RowsOnDevice, ids: Any, *of_draw: Any) -> Batch:
        """Show rows as a batch, with weights and what else a draw has."""
        observed, shape = len(self._schema.observation.leaves), tuple(ids.shape)
        actions = observed + len(self._schema.action.leaves)
        rows, following, flags = found.rows, found.next_obs, [found.terminated, found.truncated]
        if len(shape) > 1:  # sequences, which were read row by row
            rows, following, flags = (
                [tensor.view(*shape, *tensor.shape[1:]) for tensor in some] for some in (rows, following, flags)
            )
        leaves = rows[:observed], rows[observed:actions], following, rows[actions:-1]
        return self._form.batch(leaves, rows[-1], *flags, ids, *of_draw)

    def _to_device(self, array: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rings.torch.from_numpy(np.array(array)).to(self._rings.device)
        return tensor

    def _relabelled(self, draw: Draw, found: RowsOnDevice, outcomes: Any) -> RowsOnDevice:
        """Put other goals into rows; the reward function is the caller's, on the host."""
        goals = draw.goals
        if goals is None or not goals.rows.size:
            return found
        achieved, desired = goal_leaves(self._schema, goals)
        rows, goal = self._to_device(goals.rows), outcomes.next_obs[achieved]
        found.rows[desired][rows] = goal
        found.next_obs[desired][rows] = goal
        first = len(self._schema.observation.leaves) + len(self._schema.action.leaves)
        extras = [extra[rows].cpu().numpy() for extra in found.rows[first:-1]]
        reached = found.next_obs[achieved][rows].cpu().numpy()
        rewards = rewards_for(self._schema, goals, reached, goal.cpu().numpy(), extras)
        found.rows[-1][rows] = self._to_device(rewards).to(found.rows[-1].dtype)
        return found

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        self._rings.loops.keep(batches)
