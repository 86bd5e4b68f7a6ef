"""Rollouts that are born on a device, and stay there: steps, advantages and minibatches.

In:  tensors on the device, step by step.  Out: advantages there, and minibatches of rows that are picked there.
Invariant: what is estimated is what the host would estimate, to the last bit: every product and sum is rounded by
itself, in the same order. Adding a step waits for nothing that the device does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.batches import Delivery
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import torch_dtype
from holdall.delivery.device_loops import device_program
from holdall.delivery.resident import TensorFit
from holdall.errors import ArgumentError
from holdall.report import FieldReport
from holdall.schema import Leaf, Schema

if TYPE_CHECKING:
    import torch

ESTIMATES = ("value", "log_prob", "advantage", "returns")
_FLOAT32 = np.dtype(np.float32)
_FLAG = Leaf("", (), np.dtype(np.bool_))
_FIRST_FINAL_STEPS = 4
"""Steps in which every lane may be cut before the host asks how many really were."""
_WARP = 32


class DeviceRollout:
    """The steps of one rollout on a device; `RolloutMemory` checks the order of calls."""

    def __init__(self, delivery: Delivery, schema: Schema, num_steps: int) -> None:
        self.fit = TensorFit(delivery, schema)
        self._torch, self._schema = delivery.torch, schema
        self._steps, self._lanes, self._cells = num_steps, schema.num_envs, num_steps * schema.num_envs
        self._obs = [self._rows(leaf) for leaf in schema.observation.leaves]
        self._others = [self._rows(leaf) for leaf in (*schema.action.leaves, *schema.extras.leaves)]
        self._estimates = {name: self._rows(Leaf(name, (), _FLOAT32)) for name in ESTIMATES}
        self._ends = self._rows(Leaf("", (), _FLOAT32))
        self._valid: torch.Tensor | None = None
        self._reward: torch.Tensor | None = None
        self._estimate = advantages_on(self._torch, self.fit.device)
        self._final = _FinalRows(self._torch, self.fit.device, schema.observation.leaves, self._lanes)
        self._is_missing = self._torch.zeros((), dtype=self._torch.bool, device=self.fit.device)

    def _rows(self, leaf: Leaf) -> torch.Tensor:
        kind = torch_dtype(self._torch, leaf.dtype)
        rows: torch.Tensor = self._torch.zeros(
            (self._steps, self._lanes, *leaf.shape), dtype=kind, device=self.fit.device
        )
        return rows

    def observe(self, step: int, obs: Any) -> None:
        """Write the observations of a step."""
        self._write_observations(step, self.fit.leaves(self._schema.observation, obs, "obs"))

    def _write_observations(self, step: int, rows: list[torch.Tensor]) -> None:
        for kept, new in zip(self._obs, rows, strict=True):
            kept[step].copy_(new)

    def add(
        self, step: int, obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any, value: Any, log_prob: Any,
        extras: Any, final_obs: Any, valid: Any,
    ) -> None:  # fmt: skip
        """Write one step; nothing is written if an argument does not fit."""
        fit, schema = self.fit, self._schema
        observed = None if obs is None else fit.leaves(schema.observation, obs, "obs")
        others = fit.leaves(schema.action, action, "action")
        others += fit.leaves(schema.extras, {} if extras is None else extras, "extras")
        rewards = fit.rewards(reward, None if self._reward is None else self._reward.dtype)
        ended, cut = fit.leaf(_FLAG, terminated, "terminated"), fit.leaf(_FLAG, truncated, "truncated")
        values, log_probs = (
            fit.leaf(Leaf("", (), _FLOAT32), given.detach() if hasattr(given, "detach") else given, name)
            for given, name in ((value, "value"), (log_prob, "log_prob"))
        )
        final = None if final_obs is None else fit.leaves(schema.observation, final_obs, "final_obs")
        made = None if valid is None else fit.leaf(_FLAG, valid, "valid")
        if self._reward is None:
            self._reward = self._torch.zeros((self._steps, self._lanes), dtype=rewards.dtype, device=fit.device)
        bootstrapped = cut & ~ended
        if final is None:
            self._is_missing |= bootstrapped.any()
        else:
            self._final.append(step * self._lanes, bootstrapped, final)
        if observed is not None:
            self._write_observations(step, observed)
        for kept, new in zip(self._others, others, strict=True):
            kept[step].copy_(new)
        self._reward[step].copy_(rewards)
        self._estimates["value"][step].copy_(values)
        self._estimates["log_prob"][step].copy_(log_probs)
        self._ends[step].copy_(ended | cut)
        if made is not None and self._valid is None:
            self._valid = self._torch.ones((self._steps, self._lanes), dtype=self._torch.bool, device=fit.device)
        if self._valid is not None:
            self._valid[step] = True if made is None else made

    def final_obs(self) -> Any:
        """Return the final observations of truncated episodes; waits for the device to know how many there are."""
        self._require_final()
        return self._schema.observation.build(self._final.rows())

    def _require_final(self) -> None:
        if bool(self._is_missing):
            raise ArgumentError(
                "truncated was set in a step whose final_obs is None; pass the true final observations, which are "
                "next_obs in next-step autoreset and info['final_obs'] in same-step autoreset"
            )

    def finish(self, steps: int, last_values: Any, gamma: float, gae_lambda: float, final_values: Any) -> None:
        """Estimate advantages and returns of the steps added so far."""
        self._require_final()
        count = self._final.count()
        if final_values is None and count:
            raise ArgumentError(
                f"final_values is None, but {count} episodes were truncated; an advantage there needs the value of the "
                "true final observation, so pass final_values=value_of(memory.final_obs())"
            )
        last = self.fit.leaf(Leaf("", (), _FLOAT32), last_values.detach(), "last_values").contiguous()
        advantage = self._estimates["advantage"][:steps]
        if self._reward is not None:
            advantage.copy_(self._reward[:steps])
        if count:
            final = self.fit.tensor(final_values.detach(), "final_values")
            if final.shape != (count,) or final.dtype != self._torch.float32:
                raise ArgumentError(
                    f"final_values has shape {tuple(final.shape)} and dtype {final.dtype}, expected ({count},) and "
                    "torch.float32: one for each of memory.final_obs()"
                )
            places = self._final.places()
            flat = self._estimates["advantage"].view(-1)
            flat[places] = flat[places] + self._torch.tensor(gamma, dtype=final.dtype, device=final.device) * final
        self._estimate(
            advantage, self._estimates["value"][:steps], self._ends[:steps], last, gamma, gae_lambda,
            self._estimates["returns"][:steps],
        )  # fmt: skip

    def ends(self, steps: int) -> NDArray[np.bool_]:
        """Copy to the host in which steps episodes ended."""
        return np.asarray(self._ends[:steps].cpu().numpy() != 0)

    def held(self, steps: int) -> NDArray[np.bool_]:
        """Copy to the host which lanes made a step."""
        if self._valid is None:
            return np.ones((steps, self._lanes), np.bool_)
        return np.asarray(self._valid[:steps].cpu().numpy())

    def gather(self, places: NDArray[np.int64], *, padded: bool) -> list[Any]:
        """Pick rows of every field, in the order of a minibatch; where a place is negative, zeros."""
        there = self._torch.from_numpy(np.array(places)).to(self.fit.device, non_blocking=True)
        wanted = there.clamp(min=0) if padded else there
        real = there >= 0 if padded else None
        reward = [] if self._reward is None else [self._reward]
        picked = []
        for rows in (*self._obs, *self._others, *reward, *self._estimates.values()):
            row = rows.view(self._cells, *rows.shape[2:]).index_select(0, wanted)
            if real is not None:
                row = self._torch.where(real.view(-1, *[1] * (row.ndim - 1)), row, row.new_zeros(()))
            picked.append(row)
        return picked if real is None else [*picked, real]

    def reset(self) -> None:
        """Forget the rollout; its memory is that of the next one."""
        self._final.clear()
        self._is_missing.zero_()
        if self._valid is not None:
            self._valid.fill_(True)

    def report(self, steps: int) -> list[FieldReport]:
        """Account for the bytes on the device."""
        rows = {f"obs.{i}" if i else "obs": rows for i, rows in enumerate(self._obs)}
        rows |= {f"other.{i}": rows for i, rows in enumerate(self._others)} | self._estimates
        note = f"flat rows on {self.fit.device}"
        return [FieldReport(name, 0, 0, r.nbytes, r[:steps].nbytes, note) for name, r in rows.items()]


class _FinalRows:
    """Final observations of truncated episodes, in the order in which they were cut.

    Which lanes were cut only the device knows, so it puts their rows side by side itself; one row more than fit takes
    what is not wanted.
    """

    def __init__(self, torch: Any, device: torch.device, leaves: tuple[Leaf, ...], lanes: int) -> None:
        self._torch, self._lanes = torch, lanes
        self._room = _FIRST_FINAL_STEPS * lanes
        self._most = 0  # rows that may be there
        kinds = [torch_dtype(torch, leaf.dtype) for leaf in leaves]
        self._rows = [
            torch.zeros((self._room + 1, *leaf.shape), dtype=kind, device=device)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        self._places = torch.zeros(self._room + 1, dtype=torch.int64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def append(self, first_place: int, wanted: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Keep the rows of wanted lanes."""
        if self._most + self._lanes > self._room:
            self._most = self.count()
            if self._most + self._lanes > self._room:
                self._grow()
        order = wanted.cumsum(0)
        slots = self._torch.where(wanted, self._count + order - 1, self._room)
        for kept, new in zip(self._rows, rows, strict=True):
            kept[slots] = new
        self._places[slots] = first_place + self._torch.arange(self._lanes, device=slots.device)
        self._count += order[-1]
        self._most += self._lanes

    def _grow(self) -> None:
        room = 2 * self._room + self._lanes
        self._rows, (self._places,) = (
            [self._longer(rows, room) for rows in some] for some in (self._rows, [self._places])
        )
        self._room = room

    def _longer(self, rows: torch.Tensor, room: int) -> torch.Tensor:
        longer = rows.new_zeros((room + 1, *rows.shape[1:]))
        longer[: self._room] = rows[: self._room]
        return longer

    def count(self) -> int:
        """How many there are; waits for the device."""
        return int(self._count)

    def rows(self) -> list[torch.Tensor]:
        """Return the rows of every leaf."""
        count = self.count()
        return [rows[:count].clone() for rows in self._rows]

    def places(self) -> torch.Tensor:
        """Return step * lanes + lane of every row."""
        return cast("torch.Tensor", self._places[: self.count()])

    def clear(self) -> None:
        """Forget all rows."""
        self._count.zero_()
        self._most = 0


class _Rollout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("advantages", "values", "ends", "last_values", "returns")),
        ("steps", ctypes.c_int64), ("lanes", ctypes.c_int64), ("gamma", ctypes.c_float), ("decay", ctypes.c_float),
    ]  # fmt: skip


Estimate = Callable[..., None]
"""Takes rewards, which become advantages, values, ends, last values, gamma, lambda, and where returns go."""


def advantages_on(torch: Any, device: torch.device) -> Estimate:
    """Return the loop that estimates advantages on a device, all of whose arrays are (steps, lanes) and float32."""
    if device.type == "cuda":
        try:
            launch = device_program(torch, device).kernel("estimate_advantages")
        except CudaProgramError:
            return _estimate_advantages
    else:
        return _estimate_advantages

    def estimate(
        advantages: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, last: torch.Tensor, gamma: float,
        gae_lambda: float, returns: torch.Tensor,
    ) -> None:  # fmt: skip
        steps, lanes = advantages.shape
        addresses = (tensor.data_ptr() for tensor in (advantages, values, ends, last, returns))
        task = _Rollout(*addresses, steps, lanes, gamma, np.float32(gamma * gae_lambda))
        stream = torch.cuda.current_stream(device).cuda_stream
        launch((-(-lanes // _WARP), 1), (_WARP, 1), stream, task)

    return estimate


def _estimate_advantages(
    advantages: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, last: torch.Tensor, gamma: float,
    gae_lambda: float, returns: torch.Tensor,
) -> None:  # fmt: skip
    """Do the same in operations of torch, step by step, in the order of the loop in C."""
    steps = len(advantages)
    discount, decay = (advantages.new_tensor(number) for number in (gamma, gamma * gae_lambda))
    for t in range(steps - 1, -1, -1):
        going = 1.0 - ends[t]
        ahead = discount * (last if t == steps - 1 else values[t + 1]) * going
        delta = advantages[t] + ahead - values[t]
        carried = decay * going * (advantages[t + 1] if t < steps - 1 else 0.0)
        advantages[t] = delta + carried
        returns[t] = advantages[t] + values[t]
