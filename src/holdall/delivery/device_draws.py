"""Samplers on a device: what NStep, Sequence and Prioritized draw, without a wait for the host.

In:  rings on a device, and the samplers that a user made.  Out: recipes whose arrays are tensors there.
Invariant: a recipe is what the sampler would make on the host of the same first steps, to the last bit; only the random
numbers are others, since a device draws them. Samplers that are not known here draw on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdall.delivery.device_loops import INVALID, TERMINATED, TRUNCATED
from holdall.delivery.device_rings import DeviceRings
from holdall.errors import ArgumentError
from holdall.sampling import NStep, Prioritized, Sequence, Uniform

if TYPE_CHECKING:
    import torch

_MOST = 1e280
"""Scaled priorities up to this can be added up for any memory."""


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
    if type(by) not in {Uniform, Prioritized}:
        return False
    return sampler is by or type(sampler) is NStep or (type(sampler) is Sequence and sampler.stride == 1)


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
        dtype = torch.promote_types(rewards.dtype, torch.float32)
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
        generator = self._generator.manual_seed(seed)
        points = torch.rand(count, dtype=torch.float64, device=sums.device, generator=generator) * sums[-1]
        # Rounding may leave a point on the total itself: the last slot that holds a number is meant then.
        points = torch.minimum(points, torch.nextafter(sums[-1], torch.zeros_like(sums[-1])))
        slots = torch.searchsorted(sums, points, right=True)
        found = self._scaled[slots]
        shares = (found.min() / found).to(torch.float32)
        newest = self._rings.next_id - 1
        ids = newest - (newest - slots) % self._capacity
        return ids, shares**self._sampler.beta

    def update(self, ids: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set priorities; of equal ids the last one counts, and ids that have left are passed over.

        What is no finite number of at least 0 is not set, and the next call of any kind raises an error: this one does
        not wait to see it.
        """
        rings, torch = self._rings, self._rings.torch
        if ids.ndim != 1 or ids.shape != priorities.shape:
            raise ArgumentError(
                f"priorities has shape {tuple(priorities.shape)} for ids of shape {tuple(ids.shape)}; pass one for "
                "every row drawn"
            )
        self._catch_up()
        given = priorities.detach().to(device=rings.device, dtype=torch.float64)
        scaled = (given + self._sampler.floor) ** self._sampler.alpha
        sound = (given >= 0) & (scaled <= _MOST)
        self._refused |= (~sound).any() | (ids >= rings.next_id).any()
        kept = sound & (ids >= rings.first_id) & (ids < rings.next_id)
        order = torch.sort(ids, stable=True).indices
        ordered = ids[order]
        is_last = torch.ones_like(kept)
        is_last[:-1] = ordered[1:] != ordered[:-1]
        slots = torch.where(is_last & kept[order], ordered % self._capacity, self._capacity)
        self._scaled[slots] = scaled[order]
        self._highest = torch.maximum(self._highest, torch.where(kept, scaled, 0.0).max())

    def require_sound(self) -> None:
        """Raise what an `update` had to refuse; waits for the device."""
        if bool(self._refused):
            self._refused.zero_()
            raise ArgumentError("priorities held a number that is not finite or below 0, or an id that was never added")

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
        """Have the sampler on the host know what is known here; waits for the device."""
        scaled = self._scaled[:-1].cpu().numpy()
        state = {"scaled": scaled, "highest": float(self._highest), "next_id": self._next_id}
        self._sampler.restore(state | {"beta": self._sampler.beta})


def _runs(first: int, end: int, length: int) -> list[tuple[int, int]]:
    """Return the one or two runs of slots that ids [first, end) take in a ring."""
    first = max(first, end - length)
    begin, stop = first % length, (end - 1) % length + 1
    return [(begin, stop)] if begin < stop else [(begin, length), (0, stop)]
