"""Memories whose data is born on a device: arguments that are tensors there, samplers, and batches that never leave it.

In:  the arguments of an `add`; draws.  Out: checked ticks of tensors; batches on the device.
Invariant: nothing is cast, and a value that does not fit is refused before anything is written. Adding and drawing
uniformly wait for nothing that the device does. What NStep, Sequence and Prioritized draw on the device is what they
would draw on the host of the same first steps, to the last bit; only the random numbers are others, since a device
draws them. Samplers that are not known here draw on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, require_in_range
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
from holdall.delivery.device_fields import byte_rows, windows_of
from holdall.delivery.device_loops import INVALID, TERMINATED, TRUNCATED, RowsOnDevice
from holdall.delivery.device_rings import DeviceRings
from holdall.errors import ArgumentError
from holdall.sampling import NStep, Prioritized, Sequence, Uniform, checked_priorities, require_enough
from holdall.schema import Leaf, Schema, Tree, channels_remedy, dtype_remedy
from holdall.storage import Store, Tick

if TYPE_CHECKING:
    import torch

_CUDA_IN_DLPACK = 2
_MOST = 1e280
"""Scaled priorities up to this can be added up for any memory."""


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
        return byte_rows(self.torch, self._fit(leaf, value, leading, argument, "one row per id").detach().contiguous())

    def leaves(self, tree: Tree, value: Any, argument: str) -> list[Any]:
        """Return the tensors of one nested argument, lanes first."""
        return tree.flatten(value, (self._schema.num_envs,), argument, self._fit)

    def leaf(self, leaf: Leaf, value: Any, argument: str) -> torch.Tensor:
        """Return one argument, lanes first."""
        return cast("torch.Tensor", self._fit(leaf, value, (self._schema.num_envs,), argument))

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

    def _fit(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str, axes: str = "the lanes") -> Any:
        called = f"{argument}[{leaf.name!r}]" if leaf.name else argument
        tensor = self.tensor(value, called)
        if (kind := self._kinds.get(leaf.dtype)) is None:
            kind = self._kinds[leaf.dtype] = torch_dtype(self.torch, leaf.dtype)
        if tensor.dtype != kind:
            remedy = dtype_remedy(
                str(tensor.dtype).removeprefix("torch."),
                leaf.dtype,
                f"{called}.to({kind})",
                is_float=tensor.is_floating_point(),
                is_reward=argument == "reward",
            )
            raise ArgumentError(f"{called} has dtype {tensor.dtype}, expected {kind}. holdall never casts. {remedy}")
        if tensor.shape != leading + leaf.shape:
            remedy = channels_remedy(tuple(tensor.shape), leaf.shape, "torch") or "pass a tensor of that shape"
            raise ArgumentError(
                f"{called} has shape {tuple(tensor.shape)}, expected {leading + leaf.shape}: {axes}, then the "
                f"space's {leaf.shape}; {remedy}"
            )
        return tensor


def rings_on(fit: TensorFit, schema: Schema, ticks: int, limit: int | None, steps: Tick | None) -> SavedRings:
    """Allocate all that a memory takes on its device; say what would fit if that is too much.

    Args:
        steps: The first ones, which show how observations are cut; None if rows that were saved will do so.
    """
    windows = None if steps is None else windows_of(schema, steps)
    return SavedRings(fit.torch, fit.device, schema, ticks + 1, windows, limit)


# ---------------------------------------------------------------- samplers


class DeviceDraw(NamedTuple):
    """The recipe of a batch, on the device."""

    ids: torch.Tensor  # (batch,) or (batch, time)
    weights: torch.Tensor
    last_ids: torch.Tensor | None = None
    reward: torch.Tensor | None = None
    discount: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def draws_on_device(sampler: Any) -> bool:
    """Whether a sampler is one that this module knows."""
    by = getattr(sampler, "by", sampler)
    is_known = sampler is by or type(sampler) is NStep or (type(sampler) is Sequence and sampler.stride == 1)
    return is_known and type(by) in {Uniform, Prioritized}


class DeviceSampler:
    """Draws for one sampler over one memory's rings; under the memory's lock."""

    def __init__(self, sampler: Any, rings: DeviceRings, capacity: int) -> None:
        self._sampler, self._rings = sampler, rings
        by = getattr(sampler, "by", sampler)
        self.priorities = DevicePriorities(by, rings, capacity) if type(by) is Prioritized else None

    def draw(self, count: int, seed: int) -> DeviceDraw:
        """Draw a recipe."""
        rings, sampler = self._rings, self._sampler
        if self.priorities is None:
            ids, weights = rings.loops.draw_ids(count, seed), rings.torch.ones(count, device=rings.device)
        else:
            ids, weights = self.priorities.draw(count, seed)
        if type(sampler) is NStep:
            return self._returns(ids, weights, sampler)
        if type(sampler) is Sequence:
            return self._sequences(ids, weights, sampler)
        return DeviceDraw(ids, weights)

    def update(self, ids: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set priorities, one a row of a batch; of sequences those of their first steps."""
        sampler = self._sampler
        if type(sampler) is Sequence and ids.ndim > 1:
            ids = ids[:, sampler.burn_in]
        if self.priorities is not None:
            self.priorities.update(ids, priorities)

    def _steps_around(
        self, ids: torch.Tensor, first: int, stop: int, *, crossing: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See `steps_around` of `sampling`."""
        rings, torch = self._rings, self._rings.torch
        lowest, behind = rings.bounds()
        steps = ids[:, None] + rings.lanes * torch.arange(first, stop, device=rings.device)
        real = steps >= lowest if first < 0 else steps < behind
        inside = torch.where(real, steps, ids[:, None])
        flags = rings.flag_bytes(inside)
        real &= (flags & INVALID) == 0
        if crossing or first == stop:
            return inside, real
        goes_on = (flags & (TERMINATED | TRUNCATED)) == 0
        if first < 0:
            real = (real & goes_on).flip(1)
        else:
            real[:, 1:] &= goes_on[:, :-1]
        real = real.to(torch.uint8).cumprod(dim=1, dtype=torch.uint8).bool()
        return inside, real.flip(1) if first < 0 else real

    def _returns(self, ids: torch.Tensor, weights: torch.Tensor, sampler: NStep) -> DeviceDraw:
        rings, torch = self._rings, self._rings.torch
        steps, real = self._steps_around(ids, 0, sampler.n, crossing=False)
        rewards = rings.reward_rows(steps)
        dtype = torch_dtype(torch, np.result_type(rings.reward_dtype, np.float32))
        powers = [sampler.gamma**k for k in range(sampler.n + 1)]
        several = (1,) * (rewards.ndim - 2)
        nothing = rings.constant(("nothing", dtype), [-0.0], dtype)
        counted = torch.where(real.reshape(*real.shape, *several), rewards.to(dtype), nothing)
        weights_of = rings.constant(("powers", sampler.gamma, sampler.n, dtype), powers[:-1], dtype)
        terms = counted * weights_of.reshape(-1, *several)
        total = terms[:, 0].clone()
        for k in range(1, sampler.n):  # in this order, as on the host
            total += terms[:, k]
        used = real.sum(dim=1)
        discounts = rings.constant(("discounts", sampler.gamma, sampler.n), powers, torch.float32)
        return DeviceDraw(ids, weights, ids + (used - 1) * rings.lanes, total, discounts[used])

    def _sequences(self, ids: torch.Tensor, weights: torch.Tensor, sampler: Sequence) -> DeviceDraw:
        torch = self._rings.torch
        sides = (
            self._steps_around(ids, first, stop, crossing=sampler.crossing)
            for first, stop in ((-sampler.burn_in, 0), (0, sampler.length))
        )
        steps, real = (torch.cat(both, dim=1) for both in zip(*sides, strict=True))
        return DeviceDraw(self._padded(steps, real), weights, mask=real)

    def _padded(self, steps: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Repeat the nearest real step before what is none, or the first behind it."""
        torch = self._rings.torch
        place = torch.arange(steps.shape[1], device=steps.device).expand_as(steps)
        last = torch.where(real, place, -1).cummax(dim=1).values
        first = real.to(torch.uint8).argmax(dim=1, keepdim=True)
        return steps.gather(1, torch.where(last < 0, first, last))


class DevicePriorities:
    """The scaled priorities of a `Prioritized` sampler, on the device; the sampler on the host keeps the settings."""

    def __init__(self, sampler: Prioritized, rings: DeviceRings, capacity: int) -> None:
        self._sampler, self._rings, self._capacity = sampler, rings, capacity
        torch, device = rings.torch, rings.device
        state = sampler.state()
        # One slot more than ids: what is not to be written goes there.
        self._scaled = torch.zeros(capacity + 1, dtype=torch.float64, device=device)
        if len(state["scaled"]):
            self._scaled[:-1] = torch.from_numpy(np.array(state["scaled"]))
        self._highest = torch.tensor(float(state["highest"]), dtype=torch.float64, device=device)
        self._next_id = int(state["next_id"])
        self._refused = torch.zeros((), dtype=torch.bool, device=device)
        self._generator = torch.Generator(device)

    def draw(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ids in proportion to their scaled priorities; return them and their weights."""
        torch = self._rings.torch
        self._catch_up()
        sums = self._scaled[:-1].cumsum(0)
        random = {"dtype": torch.float64, "device": sums.device, "generator": self._generator.manual_seed(seed)}
        points = torch.rand(count, **random) * sums[-1]
        # Rounding may leave a point on the total itself: the last slot that holds a number is meant then.
        points = torch.minimum(points, torch.nextafter(sums[-1], torch.zeros_like(sums[-1])))
        slots = torch.searchsorted(sums, points, right=True)
        # A device adds up in any order. Where slots hold 0, sums may grow by a rounding error, and a point fall there.
        found = self._scaled[slots]
        slots = torch.where(found > 0, slots, slots[found.argmax(0, keepdim=True)])
        found = self._scaled[slots]
        shares = (found.min() / found).to(torch.float32)
        newest = self._rings.next_id - 1
        ids = newest - (newest - slots) % self._capacity
        return ids, shares**self._sampler.beta

    def update(self, ids: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set priorities; of equal ids the last one counts, and ids that were evicted are ignored.

        What is no finite number of at least 0 is not set. This call does not wait to see it: `bring_back` raises the
        error.
        """
        rings, torch = self._rings, self._rings.torch
        if ids.ndim != 1 or ids.shape != priorities.shape or ids.is_floating_point():
            raise ArgumentError(
                f"priorities has shape {tuple(priorities.shape)} for ids of shape {tuple(ids.shape)} and {ids.dtype}; "
                "pass one for every row drawn"
            )
        if not len(ids):
            return
        self._catch_up()
        given = priorities.detach().to(device=rings.device, dtype=torch.float64)
        scaled = (given + self._sampler.floor) ** self._sampler.alpha
        wrong = ~((given >= 0) & (scaled <= _MOST)) | (ids >= rings.next_id)
        if rings.invalid is not None:
            wrong |= (ids >= rings.first_id) & ((rings.flag_bytes(ids) & INVALID) != 0)
        self._refused |= wrong.any()
        kept = ~wrong & (ids >= rings.first_id)
        order = torch.sort(ids, stable=True).indices
        ordered = ids[order]
        is_last = torch.ones_like(kept)
        is_last[:-1] = ordered[1:] != ordered[:-1]
        slots = torch.where(is_last & kept[order], ordered % self._capacity, self._capacity)
        self._scaled[slots] = scaled[order]
        self._highest = torch.maximum(self._highest, torch.where(kept, scaled, 0.0).max())

    def _catch_up(self) -> None:
        """Give transitions that were added since the last call the highest priority so far."""
        rings, torch = self._rings, self._rings.torch
        first, end = max(self._next_id, rings.first_id), rings.next_id
        if first >= end:
            return
        for begin, stop in _runs(first, end, self._capacity):
            self._scaled[begin:stop] = self._highest
        if rings.invalid is not None:
            ids = torch.arange(first, end, device=rings.device)
            none = (rings.flag_bytes(ids) & INVALID) != 0
            slots = ids % self._capacity
            self._scaled[slots] = torch.where(none, 0.0, self._scaled[slots])
        self._next_id = end

    def bring_back(self) -> None:
        """Have the sampler on the host know what is known here, or raise what an `update` refused; waits for it."""
        if bool(self._refused):
            self._refused.zero_()
            raise ArgumentError(
                "update_priorities ignored invalid entries. Priorities must be finite and at least 0. Ids must be of "
                "transitions that were added, and not with valid=False. Check what was passed to update_priorities."
            )
        scaled = self._scaled[:-1].cpu().numpy()
        state = {"scaled": scaled, "highest": float(self._highest), "next_id": self._next_id}
        self._sampler.restore(state | {"beta": self._sampler.beta})


def _runs(first: int, end: int, length: int) -> list[tuple[int, int]]:
    """Return the one or two runs of slots that ids [first, end) take in a ring."""
    first = max(first, end - length)
    begin, stop = first % length, (end - 1) % length + 1
    return [(begin, stop)] if begin < stop else [(begin, length), (0, stop)]


# ---------------------------------------------------------------- batches


class ResidentBatches(Batches):
    """Makes batches of rows that are on their device already."""

    def __init__(self, schema: Schema, rings: DeviceRings, capacity: int) -> None:
        self._rings, self._capacity = rings, capacity
        self._deliver(schema)
        self._sampler: tuple[Any, DeviceSampler] | None = None
        self._counted = (0, 0)  # transitions, and the first id held when they were counted

    def _deliver(self, schema: Schema) -> None:
        """Make batches of a schema's fields."""
        self._schema, self._form = schema, BatchForm(schema)

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """Draw a batch on the device, if the sampler's draws can be made there; under the memory's lock."""
        self._require_some(count, store)
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

    def _require_some(self, count: int, store: Store) -> None:
        """Refuse to draw if no lane made a transition; waits for the device only if that may be."""
        known, counted_at = self._counted
        if self._rings.invalid is not None and known <= (first := store.held[0]) - counted_at:
            self._counted = store.transitions, first
            require_enough(count, self._counted[0], 1)

    def recipe(self, sampler: Any, count: int, generator: np.random.Generator) -> Draw | None:
        """Draw by priorities, which only the device knows, if the sampler has some; waits for the device."""
        there = self._on_device(sampler)
        if there is None or there.priorities is None:
            return None
        draw = there.draw(count, int(generator.integers(2**63)))
        return Draw(*cast("Any", (None if tensor is None else tensor.cpu().numpy() for tensor in draw)))

    def update_priorities(self, sampler: Any, ids: Any, priorities: Any) -> bool:
        """Set priorities on the device, if the sampler draws there; return whether."""
        there = self._on_device(sampler)
        if there is None or there.priorities is None:
            return False
        torch, device = self._rings.torch, self._rings.device
        if not any(isinstance(given, torch.Tensor) for given in (ids, priorities)):  # nothing to wait for
            ids, priorities = checked_priorities(sampler, ids, priorities)
            sampler.require(ids, priorities)
        there.update(torch.as_tensor(ids, device=device), torch.as_tensor(priorities, device=device))
        return True

    def bring_back(self) -> None:
        """Have the sampler on the host know what its twin on the device knows, before it is saved or copied."""
        if self._sampler is not None and self._sampler[1].priorities is not None:
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
        return cast("torch.Tensor", self._rings.torch.from_numpy(np.array(array)).to(self._rings.device))

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
