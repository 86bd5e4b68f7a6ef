"""Samplers that draw on the device. The host does not wait for the device.

For the same first steps, `NStep` and `Sequence` return the same values as on the host, bit for bit. Only the random
numbers differ, because the device draws them. Uniform draws, n-step returns and sequences can be captured in a CUDA
graph: every replay draws from the transitions that are held at that moment, with torch's own generator.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from holdall.delivery.staging import torch_dtype
from holdall.device.tensors import Tensors
from holdall.errors import ArgumentError
from holdall.sampling import NStep, Prioritized, Sequence, Uniform

_MAX_SCALED = 1e280
"""Maximum scaled priority. The sum of any memory's priorities is then finite."""
_MAX_RANDOM = 2**63 - 1
_BATCHES_OF_WEIGHTS = 16
"""Number of batches whose weights are made by one operation, if all weights are 1."""


class SampledStore(Protocol):
    """The part of a store on a device that samplers use."""

    @property
    def tensors(self) -> Tensors:
        """All fields."""

    @property
    def device(self) -> torch.device:
        """The torch device."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""

    @property
    def first_id(self) -> int:
        """Lowest id that is held."""

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next tick."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The ids `first_id` and `next_id`."""

    @property
    def capacity(self) -> int:
        """Maximum number of ids that are held."""

    @property
    def all_valid(self) -> bool:
        """Whether every entry is a transition."""

    def compute_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `first_id` and `next_id` as tensors that every replay of a CUDA graph computes again."""


class DeviceDraw(NamedTuple):
    """A draw as tensors on the device, see `holdall.batch.Draw`."""

    ids: torch.Tensor
    weights: torch.Tensor
    last_ids: torch.Tensor | None = None
    reward: torch.Tensor | None = None
    discount: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def can_draw_on_device(sampler: Any) -> bool:
    """Return whether `DeviceSampler` can draw for `sampler`."""
    by = getattr(sampler, "by", sampler)
    is_composed = type(sampler) is NStep or (type(sampler) is Sequence and sampler.stride == 1)
    return (sampler is by or is_composed) and type(by) in {Uniform, Prioritized}


class DeviceSampler:
    """Version of a sampler that draws from a store on a device. Not thread-safe.

    Attributes:
        priorities: Priorities of the transitions. None for samplers without priorities.
    """

    def __init__(self, sampler: Any, store: SampledStore) -> None:
        self._sampler = sampler
        self._store = store
        self._generator = torch.Generator(store.device)
        self._constants: dict[Any, torch.Tensor] = {}
        self._weights: list[torch.Tensor] = []  # Weights of the next batches. Each of them is returned once.
        self._is_capturing = False
        by = getattr(sampler, "by", sampler)
        self.priorities = Priorities(by, store) if type(by) is Prioritized else None

    def draw(self, count: int, seed: int, *, is_capturing: bool) -> DeviceDraw:
        """Draw `count` rows. `is_capturing` says whether a CUDA graph is captured: then `seed` is ignored."""
        self._is_capturing = is_capturing
        generator = None if is_capturing else self._generator.manual_seed(seed)
        if self.priorities is not None:
            ids, weights = self.priorities.draw(count, generator)
        else:
            ids = self._draw_uniformly(count, generator)
            weights = self._take_weights(count)
        if type(self._sampler) is NStep:
            return self._add_returns(ids, weights, self._sampler)
        if type(self._sampler) is Sequence:
            return self._add_sequences(ids, weights, self._sampler)
        return DeviceDraw(ids, weights)

    def update(self, ids: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set priorities, one per row of a batch. The priority of a sequence belongs to its first step."""
        if type(self._sampler) is Sequence and ids.ndim > 1:
            ids = ids[:, self._sampler.burn_in]
        if self.priorities is not None:
            self.priorities.update(ids, priorities)

    def forget_weights(self) -> None:
        """Drop the weights that were made ahead. Call this before another stream uses the sampler."""
        self._weights = []

    def _take_weights(self, count: int) -> torch.Tensor:
        """Return the weights of a batch in which every transition is equally likely."""
        device = self._store.device
        if self._is_capturing:
            return torch.ones(count, device=device)
        if not self._weights or self._weights[-1].shape[0] != count:
            self._weights = list(torch.ones((_BATCHES_OF_WEIGHTS, count), device=device).unbind(0))
        return self._weights.pop()

    def _find_bounds(self) -> tuple[Any, Any]:
        """Return the first id, and the id after the last one: numbers, or tensors while a CUDA graph is captured."""
        if self._is_capturing:
            return self._store.compute_bounds()
        return self._store.bounds

    def _draw_uniformly(self, count: int, generator: torch.Generator | None) -> torch.Tensor:
        """Draw ids, every transition with the same probability."""
        store = self._store
        first, end = self._find_bounds()
        if store.all_valid:
            if isinstance(first, int):
                return torch.randint(first, end, (count,), generator=generator, device=store.device)
            numbers = torch.randint(_MAX_RANDOM, (count,), generator=generator, device=store.device)
            drawn: torch.Tensor = first + numbers % (end - first)
            return drawn
        return self._draw_valid(count, generator, first, end)

    def _draw_valid(self, count: int, generator: torch.Generator | None, first: Any, end: Any) -> torch.Tensor:
        """Draw ids of entries that are transitions: the n-th transition for a random n."""
        tensors = self._store.tensors
        cells = torch.arange(tensors.cells, device=self._store.device)
        ids = (end - 1) - ((end - 1) - cells) % tensors.cells
        is_valid = (ids >= first) & tensors.are_invalid(cells).logical_not()
        counts = is_valid.cumsum(0)
        numbers = torch.randint(_MAX_RANDOM, (count,), generator=generator, device=self._store.device) % counts[-1]
        chosen: torch.Tensor = ids.index_select(0, torch.searchsorted(counts, numbers, right=True))
        return chosen

    def _find_steps(
        self, ids: torch.Tensor, first: int, stop: int, *, crossing: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the steps around `ids`, and which of them are real. See `find_steps_around` in `holdall.sampling`."""
        store = self._store
        tensors = store.tensors
        lowest, end = self._find_bounds()
        steps = ids[:, None] + store.lanes * torch.arange(first, stop, device=store.device)
        is_real = steps >= lowest if first < 0 else steps < end
        inside = torch.where(is_real, steps, ids[:, None])
        cells = (inside % tensors.cells).view(-1)
        if tensors.has_masks:
            is_real &= tensors.are_invalid(cells).view(inside.shape).logical_not()
        if crossing or first == stop:
            return inside, is_real
        continues = tensors.are_ends(cells).view(inside.shape).logical_not()
        if first < 0:
            is_real = (is_real & continues).flip(1)
        else:
            is_real[:, 1:] &= continues[:, :-1]
        is_real = is_real.to(torch.uint8).cumprod(dim=1, dtype=torch.uint8).bool()
        return inside, is_real.flip(1) if first < 0 else is_real

    def _add_returns(self, ids: torch.Tensor, weights: torch.Tensor, sampler: NStep) -> DeviceDraw:
        """Add n-step returns to a draw. Discounted rewards are added up in the same order as on the host."""
        tensors = self._store.tensors
        steps, is_real = self._find_steps(ids, 0, sampler.n, crossing=False)
        stored = tensors.reward.read((steps % tensors.cells).view(-1))
        rewards = stored.view(*steps.shape, *stored.shape[1:])
        dtype = torch_dtype(np.result_type(tensors.plan.reward.dtype, np.float32))
        powers = [sampler.gamma**k for k in range(sampler.n + 1)]
        reward_axes = (1,) * (rewards.ndim - 2)
        # Adding -0.0 changes no sum, not even a sum of zeros.
        negative_zero = self._make_constant(("negative zero", dtype), [-0.0], dtype)
        counted = torch.where(is_real.reshape(*is_real.shape, *reward_axes), rewards.to(dtype), negative_zero)
        discounts = self._make_constant(("powers", sampler.gamma, sampler.n, dtype), powers[:-1], dtype)
        terms = counted * discounts.reshape(-1, *reward_axes)
        total = terms[:, 0].clone()
        for k in range(1, sampler.n):
            total += terms[:, k]
        used = is_real.sum(dim=1)
        discount = self._make_constant(("discounts", sampler.gamma, sampler.n), powers, torch.float32)
        return DeviceDraw(ids, weights, ids + (used - 1) * self._store.lanes, total, discount[used])

    def _add_sequences(self, ids: torch.Tensor, weights: torch.Tensor, sampler: Sequence) -> DeviceDraw:
        """Return the draw of the sequences around `ids`, padded at the ends of episodes."""
        before, is_real_before = self._find_steps(ids, -sampler.burn_in, 0, crossing=sampler.crossing)
        after, is_real_after = self._find_steps(ids, 0, sampler.length, crossing=sampler.crossing)
        steps = torch.cat([before, after], dim=1)
        is_real = torch.cat([is_real_before, is_real_after], dim=1)
        return DeviceDraw(_pad_steps(steps, is_real), weights, mask=is_real)

    def _make_constant(self, key: Any, values: list[float], dtype: torch.dtype) -> torch.Tensor:
        """Return numbers as a tensor. The tensor is made once per `key`."""
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, dtype=dtype, device=self._store.device)
        return self._constants[key]


def _pad_steps(steps: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Replace steps that are not real by the preceding real step, or else by the first real one."""
    positions = torch.arange(steps.shape[1], device=steps.device).expand_as(steps)
    last = torch.where(is_real, positions, -1).cummax(dim=1).values
    first = is_real.to(torch.uint8).argmax(dim=1, keepdim=True)
    return steps.gather(1, torch.where(last < 0, first, last))


class Priorities:
    """The scaled priorities of a `Prioritized` sampler, on the device. The sampler on the host keeps its settings.

    The priority of id i is stored at index i % capacity.
    """

    def __init__(self, sampler: Prioritized, store: SampledStore) -> None:
        self._sampler = sampler
        self._store = store
        self._capacity = store.capacity
        device = store.device
        state = sampler.state()
        # Priorities that are not set are written to the last element.
        self._scaled = torch.zeros(self._capacity + 1, dtype=torch.float64, device=device)
        if len(state["scaled"]):
            self._scaled[:-1] = torch.from_numpy(np.array(state["scaled"]))
        self._highest = torch.tensor(float(state["highest"]), dtype=torch.float64, device=device)
        self._next_id = int(state["next_id"])
        self._had_invalid = torch.zeros((), dtype=torch.bool, device=device)

    def draw(self, count: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ids in proportion to their scaled priorities. Return the ids and their weights."""
        self._catch_up()
        sums = self._scaled[:-1].cumsum(0)
        total = sums[-1]
        points = torch.rand(count, dtype=torch.float64, device=sums.device, generator=generator) * total
        # Rounding may make a point equal to the total. It then stands for the last index with a priority.
        points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
        indices = torch.searchsorted(sums, points, right=True)
        # A device adds up in any order, so rounding errors may increase sums at indices without a priority.
        found = self._scaled[indices]
        indices = torch.where(found > 0, indices, indices[found.argmax(0, keepdim=True)])
        found = self._scaled[indices]
        shares = (found.min() / found).to(torch.float32)
        newest = self._store.next_id - 1
        return newest - (newest - indices) % self._capacity, shares**self._sampler.beta

    def update(self, ids: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set priorities. Of equal ids the last one counts. Ids that were evicted are ignored.

        Invalid priorities and ids are ignored, too, because this call does not wait for the device. `bring_back` raises
        the error about them.
        """
        store = self._store
        if ids.ndim != 1 or ids.shape != priorities.shape or ids.is_floating_point():
            raise ArgumentError(
                f"priorities has shape {tuple(priorities.shape)} for ids of shape {tuple(ids.shape)} and dtype "
                f"{ids.dtype}. Pass one number for every row that was drawn."
            )
        if not len(ids):
            return
        self._catch_up()
        given = priorities.detach().to(device=store.device, dtype=torch.float64)
        scaled = (given + self._sampler.floor) ** self._sampler.alpha
        is_invalid = ~((given >= 0) & (scaled <= _MAX_SCALED)) | (ids >= store.next_id)
        is_held = ids >= store.first_id
        tensors = store.tensors
        if tensors.has_masks:
            is_invalid |= is_held & tensors.are_invalid(ids.clamp(min=0) % tensors.cells)
        self._had_invalid |= is_invalid.any()
        is_set = ~is_invalid & is_held
        order = torch.sort(ids, stable=True).indices
        ordered = ids[order]
        is_last = torch.ones_like(is_set)
        is_last[:-1] = ordered[1:] != ordered[:-1]
        indices = torch.where(is_last & is_set[order], ordered % self._capacity, self._capacity)
        self._scaled[indices] = scaled[order]
        self._highest = torch.maximum(self._highest, torch.where(is_set, scaled, 0.0).max())

    def _catch_up(self) -> None:
        """Give transitions that were added since the last call the highest priority that was ever set."""
        # New transitions overwrite evicted ones, so the priorities of evicted transitions need no reset.
        store = self._store
        first = max(self._next_id, store.first_id)
        end = store.next_id
        if first >= end:
            return
        ids = torch.arange(first, end, device=store.device)
        values = self._highest.expand(len(ids))
        if store.tensors.has_masks:
            values = torch.where(store.tensors.are_invalid(ids % store.tensors.cells), 0.0, values)
        self._scaled[ids % self._capacity] = values
        self._next_id = end

    def bring_back(self) -> None:
        """Copy the priorities to the sampler on the host. Waits for the device.

        Raise ArgumentError if a call of `update` had invalid entries.
        """
        if bool(self._had_invalid):
            self._had_invalid.zero_()
            raise ArgumentError(
                "update_priorities ignored invalid entries. Priorities must be finite and at least 0. Ids must be of "
                "transitions that were added, and not with valid=False. Check what was passed to update_priorities."
            )
        self._catch_up()
        state = {"scaled": self._scaled[:-1].cpu().numpy(), "highest": float(self._highest), "next_id": self._next_id}
        self._sampler.restore(state | {"beta": self._sampler.beta})
