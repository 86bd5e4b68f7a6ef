"""DeviceRollout: the steps of one rollout on a torch device.

    add     -> TensorCheck -> rows                    does not wait for the device
    finish  -> advantages, from the last step to the first
    gather  -> index_select

`RolloutMemory` checks the order of the calls. Every call may be repeated if it was interrupted.

Guarantee: minibatches have, bit for bit, the values that were passed to `add`. Advantages equal those of the host to
the last bit, because the same products and sums are computed in the same order, each of them rounded on its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.delivery.device import find_device
from holdall.delivery.staging import Staging, torch_dtype
from holdall.delivery.words import as_words, choose_word, from_words
from holdall.device.arguments import TensorCheck
from holdall.errors import ArgumentError
from holdall.report import FieldReport, field_name
from holdall.rollout_step import ESTIMATES, RolloutStep
from holdall.schema import Leaf, Schema

_NUMBER = Leaf("", (), np.dtype(np.float32))
_FLAG = Leaf("", (), np.dtype(np.bool_))
_FIRST_FINAL_STEPS = 4
"""Steps for whose final observations there is room at first, if every lane is truncated in each of them."""


class DeviceRollout:
    """The steps of one rollout. The next rollout overwrites them."""

    def __init__(self, schema: Schema, num_steps: int, device: torch.device) -> None:
        self._schema = schema
        self._num_steps = num_steps
        self._lanes = schema.num_envs
        self._device = find_device(str(device))
        self._check = TensorCheck(schema, self._device)
        self._staging = Staging(self._device)
        self._reward: torch.Tensor | None = None  # Allocated at the first step, whose rewards set the dtype.
        self._valid: torch.Tensor | None = None  # None: every lane made every step.
        try:
            self._allocate()
        except torch.OutOfMemoryError as error:
            raise ArgumentError(
                f"num_steps ({num_steps}) with num_envs ({self._lanes}) needs more memory than {self._device} has "
                f"({error}). Use fewer steps or environments, or pass arrays of the host to add."
            ) from error

    def _allocate(self) -> None:
        """Allocate all memory that has a fixed size."""
        schema = self._schema
        self._obs = [self._new_rows(leaf) for leaf in schema.observation.leaves]
        self._actions = [self._new_rows(leaf) for leaf in schema.action.leaves]
        self._extras = [self._new_rows(leaf) for leaf in schema.extras.leaves]
        self._estimates = {name: self._new_rows(_NUMBER) for name in ESTIMATES}
        self._ends = self._new_rows(_NUMBER)  # 1 where an episode ended with the step.
        self._final = _FinalRows(schema.observation.leaves, self._num_steps, self._lanes, self._device)
        # Steps with a truncated episode whose final observation was not given.
        self._is_missing = torch.zeros(self._num_steps, dtype=torch.bool, device=self._device)

    def _new_rows(self, leaf: Leaf) -> torch.Tensor:
        shape = (self._num_steps, self._lanes, *leaf.shape)
        return torch.zeros(shape, dtype=torch_dtype(leaf.dtype), device=self._device)

    @torch.no_grad()
    def observe(self, step: int, obs: Any) -> None:
        """Write the observations of a step."""
        self._write_observations(step, self._check.check_leaves(self._schema.observation, obs, "obs"))

    def _write_observations(self, step: int, rows: list[torch.Tensor]) -> None:
        for stored, new in zip(self._obs, rows, strict=True):
            stored[step].copy_(new)

    @torch.no_grad()
    def add(self, step: int, given: RolloutStep) -> None:
        """Write step number `step`. If a part of `given` does not fit, raise ArgumentError and write nothing.

        `finish` raises the error about missing final
        observations, because only the device knows which episodes were truncated.
        """
        check = self._check
        schema = self._schema
        observations = None if given.obs is None else check.check_leaves(schema.observation, given.obs, "obs")
        actions = check.check_leaves(schema.action, given.action, "action")
        extras = check.check_leaves(schema.extras, {} if given.extras is None else given.extras, "extras")
        rewards = self._check_reward(given.reward)
        is_terminated = check.check_leaf(_FLAG, given.terminated, "terminated")
        is_truncated = check.check_leaf(_FLAG, given.truncated, "truncated")
        values = self._check_numbers(given.value, self._lanes, "value")
        log_probs = self._check_numbers(given.log_prob, self._lanes, "log_prob")
        final = None
        if given.final_obs is not None:
            final = check.check_leaves(schema.observation, given.final_obs, "final_obs")
        is_valid = None if given.valid is None else check.check_leaf(_FLAG, given.valid, "valid")
        if self._reward is None:
            self._reward = self._new_rows(Leaf("", (), check.find_numpy_dtype(rewards)))
        is_cut = is_truncated & ~is_terminated
        if final is None:
            self._is_missing[step] = is_cut.any()
            self._final.skip(step)
        else:
            self._is_missing[step].fill_(False)
            self._final.append(step, is_cut, final)
        if observations is not None:
            self._write_observations(step, observations)
        for stored, new in zip([*self._actions, *self._extras], [*actions, *extras], strict=True):
            stored[step].copy_(new)
        self._reward[step].copy_(rewards)
        self._estimates["value"][step].copy_(values)
        self._estimates["log_prob"][step].copy_(log_probs)
        self._ends[step].copy_(is_terminated | is_truncated)
        if is_valid is not None and self._valid is None:
            self._valid = torch.ones((self._num_steps, self._lanes), dtype=torch.bool, device=self._device)
        if self._valid is not None:
            self._valid[step].copy_(torch.ones_like(is_cut) if is_valid is None else is_valid)

    def _check_reward(self, value: Any) -> torch.Tensor:
        """Return the rewards of a step. The first ones set the dtype."""
        rewards = self._check.as_tensor(value, "reward")
        known = rewards if self._reward is None else self._reward
        return self._check.check_leaf(Leaf("", (), self._check.find_numpy_dtype(known)), rewards, "reward")

    def _check_numbers(self, value: Any, count: int, argument: str) -> torch.Tensor:
        """Return the output of a network, (n,) or (n, 1) float32, as (n,)."""
        numbers = self._check.as_tensor(value, argument).detach()
        if numbers.dtype != torch.float32:
            raise ArgumentError(
                f"{argument} has dtype {numbers.dtype}, estimates are float32; pass them as the network gave them"
            )
        if tuple(numbers.shape) not in {(count,), (count, 1)}:
            raise ArgumentError(
                f"{argument} has shape {tuple(numbers.shape)}, expected ({count},); pass one number each"
            )
        return numbers.reshape(count)

    def final_obs(self, steps: int) -> Any:
        """Return the final observations of all truncated episodes. Waits for the device to know how many there are."""
        self._require_final(steps)
        return self._schema.observation.build(self._final.read(steps))

    def _require_final(self, steps: int) -> None:
        if bool(self._is_missing[:steps].any()):
            raise ArgumentError(
                "truncated was set in a step whose final_obs is None; pass the true final observations, which are "
                "next_obs in next-step autoreset and info['final_obs'] in same-step autoreset"
            )

    @torch.no_grad()
    def finish(self, steps: int, last_values: Any, gamma: float, gae_lambda: float, final_values: Any) -> None:
        """Estimate advantages and returns of the first `steps` steps."""
        self._require_final(steps)
        count = self._final.count(steps)
        if final_values is None and count:
            raise ArgumentError(
                f"final_values is None, but {count} episodes were truncated; an advantage there needs the value of the "
                "true final observation, so pass final_values=value_of(memory.final_obs())"
            )
        last = self._check_numbers(last_values, self._lanes, "last_values")
        rewards = torch.zeros((steps, self._lanes), device=self._device)
        if self._reward is not None:
            rewards.copy_(self._reward[:steps])
        if count:
            final = self._check_numbers(final_values, count, "final_values")
            rewards.view(-1)[self._final.find_places(steps)] += float(np.float32(gamma)) * final
        self._estimate(steps, rewards, last, gamma, gae_lambda)

    def _estimate(self, steps: int, rewards: torch.Tensor, last: torch.Tensor, gamma: float, gae_lambda: float) -> None:
        """Compute what `holdall._native.estimate_advantages` computes, in the same order."""
        values = self._estimates["value"][:steps]
        advantages = self._estimates["advantage"][:steps]
        continues = 1.0 - self._ends[:steps]
        next_values = torch.cat([values[1:], last.unsqueeze(0)])
        ahead = next_values * float(np.float32(gamma)) * continues
        deltas = rewards + ahead - values
        decays = continues * float(np.float32(gamma * gae_lambda))
        later = torch.zeros_like(last)
        for step in range(steps - 1, -1, -1):
            later = torch.add(deltas[step], decays[step] * later, out=advantages[step])
        torch.add(advantages, values, out=self._estimates["returns"][:steps])

    def find_ends(self, steps: int) -> NDArray[np.bool_]:
        """Return where episodes ended: (steps, lanes)."""
        return np.asarray(self._ends[:steps].cpu().numpy() != 0)

    def find_valid(self, steps: int) -> NDArray[np.bool_]:
        """Return which lanes made a step: (steps, lanes)."""
        if self._valid is None:
            return np.ones((steps, self._lanes), np.bool_)
        return np.asarray(self._valid[:steps].cpu().numpy())

    def gather(self, places: NDArray[np.int64], *, padded: bool) -> list[torch.Tensor]:
        """Return rows of all fields: observations, actions, extras, the reward, `ESTIMATES`, and a mask if `padded`.

        If `padded`, places may be negative: their rows are zeros, and the mask is False.
        """
        wanted = self._staging.send([places])[0]
        is_real = wanted >= 0
        rows = wanted.clamp(min=0) if padded else wanted
        reward = [] if self._reward is None else [self._reward]
        picked = []
        for stored in (*self._obs, *self._actions, *self._extras, *reward, *self._estimates.values()):
            cells = self._num_steps * self._lanes
            words = as_words(stored, cells, choose_word(stored.nbytes // cells)).index_select(0, rows)
            if padded:
                words = torch.where(is_real.unsqueeze(1), words, 0)
            picked.append(from_words(words, stored.dtype, (len(words), *stored.shape[2:])))
        return [*picked, is_real] if padded else picked

    def reset(self) -> None:
        """Forget the rollout. The next rollout uses the same memory."""
        if self._valid is not None:
            self._valid.fill_(True)

    def report(self, steps: int) -> list[FieldReport]:
        """Return the bytes of every field on the device."""
        rows: dict[str, torch.Tensor] = {}
        schema = self._schema
        for prefix, leaves, stored in (
            ("obs", schema.observation.leaves, self._obs),
            ("action", schema.action.leaves, self._actions),
            ("extras", schema.extras.leaves, self._extras),
        ):
            rows |= {field_name(prefix, leaf.name): tensor for leaf, tensor in zip(leaves, stored, strict=True)}
        if self._reward is not None:
            rows["reward"] = self._reward
        rows |= {"ends": self._ends, **self._estimates}
        finding = f"rows on {self._device}"
        fields = []
        for name, tensor in rows.items():
            fields.append(FieldReport(name, 0, 0, tensor.nbytes, tensor[:steps].nbytes, finding))
        return [*fields, FieldReport("final_obs", 0, 0, self._final.nbytes, self._final.nbytes, finding)]


class _FinalRows:
    """Final observations of truncated episodes, in the order of steps and lanes.

    Only the device knows which lanes were truncated. It stores the rows of these lanes one after another, and writes
    the rows of all other lanes to the last row, which is never read.
    """

    def __init__(self, leaves: tuple[Leaf, ...], num_steps: int, lanes: int, device: torch.device) -> None:
        self._lanes = lanes
        self._room = _FIRST_FINAL_STEPS * lanes
        self._known = (0, 0)  # A step, and the number of rows before it, which the host knows.
        self._rows = [
            torch.zeros((self._room + 1, *leaf.shape), dtype=torch_dtype(leaf.dtype), device=device) for leaf in leaves
        ]
        self._places = torch.zeros(self._room + 1, dtype=torch.int64, device=device)
        self._lane_numbers = torch.arange(lanes, device=device)
        self._counts = torch.zeros(num_steps + 1, dtype=torch.int64, device=device)  # Rows before every step.

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(rows.nbytes for rows in self._rows) + self._places.nbytes + self._counts.nbytes

    def skip(self, step: int) -> None:
        """Store nothing for a step."""
        self._counts[step + 1] = self._counts[step]

    def append(self, step: int, is_wanted: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Store the rows of the lanes where `is_wanted`."""
        self._reserve(step)
        ranks = is_wanted.cumsum(0)
        positions = torch.where(is_wanted, self._counts[step] + ranks - 1, self._room)
        for stored, new in zip(self._rows, rows, strict=True):
            stored[positions] = new
        self._places[positions] = step * self._lanes + self._lane_numbers
        self._counts[step + 1] = self._counts[step] + ranks[-1]

    def _reserve(self, step: int) -> None:
        """Make room for all lanes of a step. Wait for the device only if there may be no room."""
        known_step, count = self._known
        if step < known_step:  # A new rollout has begun.
            known_step = 0
            count = 0
            self._known = (0, 0)
        if count + (step - known_step + 1) * self._lanes <= self._room:
            return
        count = self.count(step)
        self._known = (step, count)
        if count + self._lanes > self._room:
            room = 2 * self._room + self._lanes
            self._rows = [self._lengthen(rows, room) for rows in self._rows]
            self._places = self._lengthen(self._places, room)
            self._room = room

    def _lengthen(self, rows: torch.Tensor, room: int) -> torch.Tensor:
        longer = rows.new_zeros((room + 1, *rows.shape[1:]))
        longer[: self._room] = rows[: self._room]
        return longer

    def count(self, steps: int) -> int:
        """Return the number of rows of the first `steps` steps. Waits for the device."""
        return int(self._counts[steps])

    def read(self, steps: int) -> list[torch.Tensor]:
        """Return copies of the rows of every leaf."""
        count = self.count(steps)
        return [rows[:count].clone() for rows in self._rows]

    def find_places(self, steps: int) -> torch.Tensor:
        """Return `step * lanes + lane` of every row."""
        return self._places[: self.count(steps)]
