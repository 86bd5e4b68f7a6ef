"""RolloutMemory: on-policy experience, allocated once, each frame stored once.

The flow, one stage a file:

    add         -> schema (check) -> storage.rollout (flat rows, or slices)
    finish      -> native (advantages, in place)
    minibatches -> places, shuffled -> storage.rollout (gather) -> delivery.to_device (batch)

Invariant: a minibatch holds bit for bit what `add` was given. `reset` allocates nothing and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import RolloutBatch
from holdall.delivery import DeviceRollout, Gather, MinibatchDelivery, is_on_device
from holdall.errors import ArgumentError, ClosedError
from holdall.native import chosen_kernels, estimate_advantages
from holdall.report import LIVING, FieldReport, MemoryReport
from holdall.sampling import RolloutSequences, childs_generator, generator_of
from holdall.schema import Array, Leaf, Schema, as_array, fit_flags, fit_reward, on_host, require_count, require_number
from holdall.storage import FinalObservations, RolloutFields, gather_padded, gather_rows, new_ring

_FLOAT32 = np.dtype(np.float32)
_ESTIMATES = ("value", "log_prob", "advantage", "returns")
_MASK = Leaf("mask", (), np.dtype(np.bool_))


class _Progress(NamedTuple):
    """How far a rollout is: replaced in one step, so that an interrupt leaves the one before or the next."""

    steps: int = 0
    is_observed: bool = False  # whether the observations of the step to come are written already
    is_finished: bool = False
    rollout: int = 0  # its number: `reset` begins another
    is_stale: bool = False  # what the one before left has still to be cleared


class RolloutMemory:
    """Memory for rollouts of `num_steps` steps in `num_envs` lanes, for PPO, A2C and their kin.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple.
        action_space: The same.
        num_steps: Most steps of a rollout, in every lane.
        num_envs: Lanes: the leading axis of everything that is added.
        device: None for NumPy minibatches; "cpu" or "cuda" for torch tensors there.
        compress: None keeps frames raw; "speed", "balanced" or "memory" compresses them as they come, so that reading
            them costs at most 1.2, 2 or 4 times as much.
        extras: Further fields per step, by name: recurrent states, action masks.
        seed: Seeds the order of minibatches.

    Only one thread may use it at a time.
    """

    fork_lock = None  # see `Tracked`

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        num_steps: int,
        num_envs: int = 1,
        *,
        device: str | None = None,
        compress: str | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        require_count("num_steps", num_steps)
        require_count("num_envs", num_envs)
        self.schema = Schema.of(observation_space, action_space, extras, num_envs)
        self.num_steps, self.num_envs = num_steps, num_envs
        self._delivery = MinibatchDelivery(device, self.schema.leaves)
        self._generator = generator_of(seed)
        leaves = self.schema.observation.leaves
        self._frames: RolloutFields | None = RolloutFields(leaves, num_steps, num_envs, compress, chosen_kernels())
        self._final = FinalObservations(leaves)
        self._action = [new_ring(num_steps, num_envs, leaf) for leaf in self.schema.action.leaves]
        self._extras = [new_ring(num_steps, num_envs, leaf) for leaf in self.schema.extras.leaves]
        self._estimates = {name: new_ring(num_steps, num_envs, Leaf(name, (), _FLOAT32)) for name in _ESTIMATES}
        self._ends = new_ring(num_steps, num_envs, Leaf("", (), _FLOAT32))
        self._reward: Array | None = None
        self._valid: NDArray[np.bool_] | None = None
        self._resident: DeviceRollout | None = None  # of steps that are born on the device
        self._now = _Progress()
        LIVING.add(self)

    def observe(self, obs: Any) -> None:
        """Write the observations of the step to come; `add` then takes None for them.

        For environments that write the next observations over the last ones, in memory that is shared with their
        workers: `obs` is read here, once, and may change afterwards.
        """
        frames = self._open()
        self._require_room()
        if self._now.is_observed:
            raise ArgumentError("observe was called twice for one step; call add(None, ...) in between")
        if self._is_resident(obs):
            self._resident.observe(self._now.steps, obs)  # type: ignore[union-attr]  # made just now
        else:
            frames.write(self._now.steps, self.schema.observation.flatten(obs, (self.num_envs,), "obs"))
        self._now = self._now._replace(is_observed=True)

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        value: Any,
        log_prob: Any,
        extras: Mapping[str, Any] | None = None,
        final_obs: Any = None,
        valid: Any = None,
    ) -> None:
        """Add one step; every array has a leading axis of `num_envs`.

        Args:
            obs: What the policy saw; None if `observe` was given it.
            value: Of `obs`, float32; a tensor or an array, as `log_prob`.
            final_obs: Where `truncated` is set, the true final observation of the episode, which is not the next
                one's first; in other lanes it is not looked at. May be None if no lane was truncated.
            valid: Lanes marked False made no step (the one after an episode's end in Gymnasium's next-step autoreset);
                they are in no minibatch.
        """
        frames, lanes = self._open(), (self.num_envs,)
        self._require_room()
        schema, step = self.schema, self._now.steps
        if (obs is None) != self._now.is_observed:
            given = "obs is None, but observe was not called" if obs is None else "obs is given, but so was observe's"
            raise ArgumentError(f"{given}; give the observations of a step once, to observe or to add")
        if self._is_resident(obs):
            arguments = (action, reward, terminated, truncated, value, log_prob, extras, final_obs, valid)
            self._resident.add(step, obs, *arguments)  # type: ignore[union-attr]  # made just now
            self._now = self._now._replace(steps=step + 1, is_observed=False, is_finished=False)
            return
        observations = None if obs is None else schema.observation.flatten(obs, lanes, "obs")
        actions = schema.action.flatten(action, lanes, "action")
        others = schema.extras.flatten({} if extras is None else extras, lanes, "extras")
        rewards = fit_reward(reward, lanes, None if self._reward is None else self._reward.dtype)
        values, log_probs = _fit_floats(value, lanes, "value"), _fit_floats(log_prob, lanes, "log_prob")
        ended = fit_flags(terminated, lanes, "terminated")
        cut = fit_flags(truncated, lanes, "truncated")
        made = None if valid is None else fit_flags(valid, lanes, "valid")
        bootstrapped = (cut & ~ended).nonzero()[0]
        final = self._fit_final(final_obs, bootstrapped)
        if self._reward is None:
            self._delivery.target.require(Leaf("reward", (), rewards.dtype))
            self._reward = new_ring(self.num_steps, self.num_envs, Leaf("reward", (), rewards.dtype))
        self._final.drop_from(step * self.num_envs)  # of an `add` that was interrupted
        if observations is not None:
            frames.write(step, observations)
        for rows, new in zip([*self._action, *self._extras], [*actions, *others], strict=True):
            rows[step] = new
        self._reward[step] = rewards
        self._estimates["value"][step], self._estimates["log_prob"][step] = values, log_probs
        np.logical_or(ended, cut, out=self._ends[step])
        if final is not None:
            self._final.append(step * self.num_envs + bootstrapped, final)
        self._mark_valid(step, made)
        self._now = _Progress(step + 1, rollout=self._now.rollout)

    def final_obs(self) -> Any:
        """Return the final observations of all truncated episodes, in the order in which they were cut.

        Their values are what `finish` wants as `final_values`.
        """
        self._open()
        if self._resident is not None:
            return self._resident.final_obs()
        self._final.drop_from(self._now.steps * self.num_envs)  # of an `add` that was interrupted
        leaves = self.schema.observation.leaves
        fields = [(leaf, partial(self._final.gather, i)) for i, leaf in enumerate(leaves)]
        return self.schema.observation.build(self._delivery.deliver(np.arange(len(self._final)), fields))

    def finish(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95, final_values: Any = None) -> None:
        """Estimate advantages and returns of the steps added so far.

        Args:
            last_values: Values of the observations behind the last step, one per lane; where an episode ended with it,
                they are not looked at.
            final_values: Values of `final_obs()`, one per truncated episode; None if there is none.
        """
        frames, steps = self._open(), self._now.steps
        if steps == 0:
            raise ArgumentError("finish was called before add; add steps first")
        self._final.drop_from(steps * self.num_envs)  # of an `add` that was interrupted
        require_number("gamma", gamma, 0, 1)
        require_number("gae_lambda", gae_lambda, 0, 1)
        if self._resident is not None:
            self._resident.finish(steps, last_values, float(gamma), float(gae_lambda), final_values)
            self._now = self._now._replace(is_finished=True)
            return
        last = np.ascontiguousarray(_fit_floats(last_values, (self.num_envs,), "last_values"))
        if final_values is None and len(self._final):
            raise ArgumentError(
                f"final_values is None, but {len(self._final)} episodes were truncated; an advantage there needs the "
                "value of the true final observation, so pass final_values=value_of(memory.final_obs())"
            )
        final = _fit_floats([] if final_values is None else final_values, (len(self._final),), "final_values")
        self._now = self._now._replace(is_finished=False)
        advantage, value = self._estimates["advantage"][:steps], self._estimates["value"][:steps]
        returns, ends = self._estimates["returns"][:steps], self._ends[:steps]
        with np.errstate(all="ignore"):  # an infinite reward makes infinite advantages, and that is the caller's affair
            if self._reward is not None:
                advantage[:] = self._reward[:steps]
            advantage.reshape(-1)[self._final.ids] += np.float32(gamma) * final
            estimate_advantages(advantage, value, ends, last, float(gamma), float(gae_lambda), advantage, returns)
        frames.drain()
        self._now = self._now._replace(is_finished=True)

    def minibatches(self, batch_size: int, epochs: int = 1) -> Iterator[RolloutBatch]:
        """Return minibatches of single steps, every step once an epoch, in a new order each time.

        The last one of an epoch is smaller if `batch_size` does not divide the steps.
        """
        self._require_finished(batch_size, epochs)
        return self._minibatches(batch_size, epochs, self._now.rollout)

    def sequences(self, batch_size: int, epochs: int = 1, length: int | None = None) -> Iterator[RolloutBatch]:
        """Return minibatches of whole sequences, for recurrent networks: (sequences, time, ...) with a mask.

        A sequence is a lane's steps within one episode, cut after `length` steps. Sequences come in a new order each
        epoch, as many at a time as have at most `batch_size` steps together; one that is longer comes alone.
        """
        self._require_finished(batch_size, epochs)
        if length is not None:
            require_count("length", length)
        steps = self._now.steps
        ends = self._ends[:steps] != 0 if self._resident is None else self._resident.ends(steps)
        cut = RolloutSequences.of(ends, self._held(), length or steps)
        return self._sequences(cut, batch_size, epochs, self._now.rollout)

    def reset(self) -> None:
        """Forget the rollout; its memory is that of the next one."""
        self._open()
        self._now = _Progress(rollout=self._now.rollout + 1, is_stale=True)
        self._empty()

    def _empty(self) -> None:
        """Empty the memory of a rollout that was forgotten; an interrupt leaves the rest of it to the next call."""
        if self._frames is not None:
            self._frames.reset()
        self._delivery.release_large()
        if self._valid is not None:
            self._valid[:] = True
        if self._resident is not None:
            self._resident.reset()
        self._now = self._now._replace(is_stale=False)

    def __len__(self) -> int:
        """Count the steps held, over all lanes, without lanes that made none."""
        self._open()
        return int(np.count_nonzero(self._held()))

    @property
    def is_full(self) -> bool:
        """Whether `num_steps` steps were added."""
        return self._now.steps == self.num_steps

    @property
    def fill(self) -> float:
        """How full the rollout is, of 1."""
        return self._now.steps / self.num_steps

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field, against plain arrays."""
        frames = self._open()
        if self._resident is not None:
            fields = self._resident.report(self._now.steps)
            return MemoryReport(transitions=len(self), fields=tuple(fields), segments=1, staging_bytes=0)
        final = FieldReport("final_obs", 0, 0, self._final.nbytes, self._final.nbytes, "whole observations")
        sums = {"transitions": len(self), "staging_bytes": self._delivery.nbytes}
        steps = self._now.steps
        flat = [(name, 0 if rows is None else rows[:steps].nbytes) for name, rows in self._flat().items()]
        return frames.report(steps, flat, [final], **sums)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array that the memory holds, by field, for a watch that asks where they lie."""
        if self._frames is None:
            return []
        flat = [(name, rows) for name, rows in self._flat().items() if rows is not None]
        final = [("final_obs", rows) for rows in self._final.arrays()]
        return [*self._frames.arrays(), *flat, *final, *(("staging", block) for block in self._delivery.arrays())]

    def _flat(self) -> dict[str, Array | None]:
        """Return the plain arrays, by name."""
        flat = {"reward": self._reward, "ends": self._ends, **self._estimates}
        for kind, leaves, rows in (
            ("action", self.schema.action.leaves, self._action),
            ("extras", self.schema.extras.leaves, self._extras),
        ):
            flat |= {f"{kind}.{leaf.name}" if leaf.name else kind: r for leaf, r in zip(leaves, rows, strict=True)}
        return flat

    def close(self) -> None:
        """Free everything; minibatches that were handed out stay as they are."""
        if self._frames is not None:
            self._frames.close()
        self._frames = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _minibatches(self, batch_size: int, epochs: int, rollout: int) -> Iterator[RolloutBatch]:
        self._require_rollout(rollout)
        places = np.flatnonzero(self._held())
        for _ in range(epochs):
            order = self._generator.permutation(places)
            for first in range(0, len(order), batch_size):
                self._require_rollout(rollout)
                yield self._batch(order[first : first + batch_size], None)

    def _sequences(self, cut: RolloutSequences, batch_size: int, epochs: int, rollout: int) -> Iterator[RolloutBatch]:
        for _ in range(epochs):
            for places in cut.batches(batch_size, self._generator):
                self._require_rollout(rollout)
                yield self._batch(places.reshape(-1), places.shape)

    def _batch(self, places: NDArray[np.int64], shape: tuple[int, ...] | None) -> RolloutBatch:
        """Gather the steps at `places`, in an order of `shape` if that is given."""
        schema = self.schema
        if self._resident is not None:
            delivered = self._resident.gather(places, padded=shape is not None)
        else:
            delivered = self._delivery.deliver(places, self._gathers(padded=shape is not None))
        if shape is not None:
            delivered = [array.reshape(*shape, *array.shape[1:]) for array in delivered]
            places = places.reshape(shape)
        parts = iter(delivered)
        return RolloutBatch(
            obs=schema.observation.build([next(parts) for _ in schema.observation.leaves]),
            action=schema.action.build([next(parts) for _ in schema.action.leaves]),
            extras=schema.extras.build([next(parts) for _ in schema.extras.leaves]),
            reward=next(parts),
            **{name: next(parts) for name in _ESTIMATES},
            ids=places,
            mask=None if shape is None else next(parts),
        )

    def _gathers(self, padded: bool) -> list[tuple[Leaf, Gather]]:
        """Return how every field of a minibatch is gathered, in the order in which `_batch` takes them."""
        fields: list[tuple[Leaf, Gather]] = [
            (leaf, partial(self._open().gather, field)) for field, leaf in enumerate(self.schema.observation.leaves)
        ]
        gather = gather_padded if padded else gather_rows
        flat = [*self._action, *self._extras, *([] if self._reward is None else [self._reward])]
        fields += [(Leaf("", r.shape[2:], r.dtype), partial(gather, r)) for r in (*flat, *self._estimates.values())]
        if padded:
            fields.append((_MASK, lambda places, out: np.greater_equal(places, 0, out=out)))
        return fields

    def _is_resident(self, obs: Any) -> bool:
        """Whether steps live on the device; the first observations say so."""
        target = self._delivery.target
        if self._resident is None and self._now.steps == 0 and target.is_remote and is_on_device(target, obs):
            self._resident = DeviceRollout(target, self.schema, self.num_steps)
        return self._resident is not None

    def _fit_final(self, final_obs: Any, lanes: NDArray[np.int64]) -> list[Array] | None:
        """Return the final observations of the given lanes, checked."""
        if not len(lanes):
            return None
        if final_obs is None:
            raise ArgumentError(
                f"truncated is set in lane {int(lanes[0])}, but final_obs is None; pass the true final observations, "
                "which are next_obs in next-step autoreset and info['final_obs'] in same-step autoreset"
            )
        return [rows[lanes] for rows in self.schema.observation.flatten(final_obs, (self.num_envs,), "final_obs")]

    def _mark_valid(self, step: int, made: NDArray[np.bool_] | None) -> None:
        if made is not None and self._valid is None:
            self._valid = np.ones((self.num_steps, self.num_envs), np.bool_)
        if self._valid is not None:
            self._valid[step] = True if made is None else made

    def _held(self) -> NDArray[np.bool_]:
        """Return which lanes made a step: (steps, lanes)."""
        if self._resident is not None:
            return self._resident.held(self._now.steps)
        if self._valid is None:
            return np.ones((self._now.steps, self.num_envs), np.bool_)
        return self._valid[: self._now.steps]

    def _open(self) -> RolloutFields:
        if self._frames is None:
            raise ClosedError("the memory was closed; make a new RolloutMemory")
        if self._now.is_stale:
            self._empty()
        return self._frames

    def after_fork(self) -> None:
        """In a child, draw minibatches in another order than the parent."""
        self._generator = childs_generator(self._generator)

    def _require_room(self) -> None:
        if self.is_full:
            raise ArgumentError(
                f"the rollout has all its num_steps ({self.num_steps}); call finish, use its minibatches, and reset"
            )

    def _require_finished(self, batch_size: int, epochs: int) -> None:
        require_count("batch_size", batch_size)
        require_count("epochs", epochs)
        self._require_rollout(self._now.rollout)

    def _require_rollout(self, number: int) -> None:
        """Refuse to read a rollout that was not finished, or was forgotten since it was asked for."""
        self._open()
        if not self._now.is_finished:
            raise ArgumentError("the rollout has no advantages yet; call finish before minibatches, and after each add")
        if number != self._now.rollout:
            raise ArgumentError(
                "these minibatches are of a rollout that reset has forgotten; call minibatches or sequences again, "
                "after finish"
            )


def _fit_floats(value: Any, shape: tuple[int, ...], argument: str) -> NDArray[np.float32]:
    """Return a network's output, an array or a tensor of (n,) or (n, 1) float32, as an array of `shape`."""
    host = as_array(on_host(value), argument)
    if host.size == 0 and shape == (0,):
        return np.empty(0, np.float32)
    if host.dtype != np.float32:
        raise ArgumentError(
            f"{argument} has dtype {host.dtype}, estimates are float32; pass them as the network gave them"
        )
    if host.shape not in {shape, (*shape, 1)}:
        raise ArgumentError(f"{argument} has shape {host.shape}, expected {shape}; pass one number each")
    return np.asarray(host.reshape(shape))
