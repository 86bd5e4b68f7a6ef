"""RolloutMemory: on-policy experience that is allocated once, with each frame stored once.

`RolloutMemory` checks the order of the calls and makes minibatches. The steps are stored by `HostRollout`, or by
`DeviceRollout` if observations are tensors on the memory's device.

Guarantee: a minibatch has, bit for bit, what `add` was given. `reset` allocates nothing and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import RolloutBatch
from holdall.checks import require_count, require_number
from holdall.delivery.minibatches import new_minibatches
from holdall.errors import ArgumentError, ClosedError, HoldallError
from holdall.memory_registry import MEMORIES, Hooks, PressureCheck
from holdall.report import FieldReport, MemoryReport
from holdall.rollout_host import HostRollout
from holdall.rollout_sequences import RolloutSequences
from holdall.rollout_step import ESTIMATES, RolloutStep
from holdall.sampling import new_generator
from holdall.schema import MAX_LANES, Schema
from holdall.store.tuning import Tuning

_CLOSED = "The memory was closed. Make a new RolloutMemory."
_FORKED = (
    "The memory was made before this process was forked, and belongs to the parent. Make a new RolloutMemory here."
)


class _Steps(Protocol):
    """The steps of a rollout, on the host or on a device."""

    def observe(self, step: int, obs: Any) -> None: ...

    def add(self, step: int, given: RolloutStep) -> None: ...

    def final_obs(self, steps: int) -> Any: ...

    def finish(self, steps: int, last_values: Any, gamma: float, gae_lambda: float, final_values: Any) -> None: ...

    def find_ends(self, steps: int) -> NDArray[np.bool_]: ...

    def find_valid(self, steps: int) -> NDArray[np.bool_]: ...

    def gather(self, places: NDArray[np.int64], *, padded: bool) -> list[Any]: ...

    def reset(self) -> None: ...

    def report(self, steps: int) -> list[FieldReport]: ...


class _Progress(NamedTuple):
    """State of a rollout. It is replaced in one assignment, so an interrupt cannot split a change."""

    steps: int = 0  # Number of steps that were added.
    is_observed: bool = False  # Whether the observations of the next step are already written.
    is_finished: bool = False  # Whether advantages were estimated after the last step.
    rollout: int = 0  # Number of the rollout. `reset` begins another one.
    is_stale: bool = False  # Whether `reset` has not yet cleared the steps of the rollout before.


class RolloutMemory:
    """Memory for rollouts of `num_steps` steps in `num_envs` lanes, for PPO, A2C and similar algorithms.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple.
        action_space: Any of these spaces.
        num_steps: Maximum number of steps of a rollout in every lane.
        num_envs: Number of lanes, which is the leading axis of everything that is added.
        device: None for NumPy minibatches; "cpu" or "cuda" for torch tensors there.
        compress: None stores raw frames. "speed", "balanced" or "memory" compresses them while steps are added, so that
            reading them takes at most about 1.8, 2 or 4 times as long.
        extras: Further fields per step, by name, such as recurrent states or action masks.
        seed: Seeds the order of minibatches.

    Only one thread may use it at a time.

    Examples:
        >>> spaces = envs.single_observation_space, envs.single_action_space
        >>> rollout = holdall.RolloutMemory(*spaces, num_steps=8, num_envs=2)
        >>> obs, _ = envs.reset(seed=0)
        >>> zeros = np.zeros(2, np.float32)
        >>> while not rollout.is_full:
        ...     action = envs.action_space.sample()
        ...     obs, reward, terminated, truncated, _ = envs.step(action)
        ...     rollout.add(obs, action, reward, terminated, truncated, value=zeros, log_prob=zeros, final_obs=obs)
        >>> rollout.finish(zeros, gamma=0.99, gae_lambda=0.95)
        >>> [batch.advantage.shape for batch in rollout.minibatches(batch_size=8, epochs=1)]
        [(8,), (8,)]
    """

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
        _tuning: Tuning | None = None,
    ) -> None:
        self.num_steps = require_count("num_steps", num_steps)
        self.num_envs = require_count("num_envs", num_envs, most=MAX_LANES)
        self.schema = Schema.of(observation_space, action_space, extras, self.num_envs)
        self._minibatch_maker = new_minibatches(device, self.schema.leaves)
        self._generator = new_generator(seed)
        try:
            self._host = HostRollout(self.schema, self.num_steps, compress, self._minibatch_maker, _tuning)
        except HoldallError:
            raise
        except (MemoryError, OverflowError, ValueError) as error:
            raise ArgumentError(
                f"num_steps ({self.num_steps}) takes more address space than this machine gives ({error}). Lower it."
            ) from error
        # The storage of the steps: a `DeviceRollout` if the first observations are tensors on the device.
        self._steps: _Steps = self._host
        self._progress = _Progress()
        self._closed_reason = ""
        MEMORIES.add(self, _HOOKS)

    def observe(self, obs: Any) -> None:
        """Write the observations of the next step. `add` then takes None for them.

        For environments that overwrite their observations in memory that is shared with their workers: `obs` is read
        here, once, and may change afterwards.
        """
        self._require_open()
        self._require_room()
        if self._progress.is_observed:
            raise ArgumentError("observe was called twice for one step; call add(None, ...) in between")
        self._choose_device(obs)
        self._steps.observe(self._progress.steps, obs)
        self._progress = self._progress._replace(is_observed=True)

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
        """Add one step. Every array has a leading axis of `num_envs`.

        Args:
            obs: Observations for which the policy chose `action`. None if `observe` was given them.
            value: Values of `obs`, float32. A tensor or an array, as `log_prob`.
            final_obs: Where `truncated` is set, the true final observation of the episode, which is not the first
                observation of the next one. Other lanes are ignored. May be None if no lane was truncated.
            valid: False marks lanes that made no step, such as the step after the end of an episode in Gymnasium's
                next-step autoreset. They are in no minibatch.
        """
        self._require_open()
        self._require_room()
        if obs is None and not self._progress.is_observed:
            raise ArgumentError(
                "obs is None, but observe was not called; give the observations of a step once, to observe or to add"
            )
        if obs is not None and self._progress.is_observed:
            raise ArgumentError(
                "obs is given, but observe was called for this step; give the observations of a step once, to observe "
                "or to add"
            )
        self._choose_device(obs)
        step = self._progress.steps
        given = RolloutStep(obs, action, reward, terminated, truncated, value, log_prob, extras, final_obs, valid)
        self._steps.add(step, given)
        self._progress = _Progress(step + 1, rollout=self._progress.rollout)

    def final_obs(self) -> Any:
        """Return the final observations of all truncated episodes, in the order in which the episodes ended.

        `finish` takes their values as `final_values`.
        """
        self._require_open()
        return self._steps.final_obs(self._progress.steps)

    def finish(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95, final_values: Any = None) -> None:
        """Estimate advantages and returns of the steps added so far.

        Args:
            last_values: Values of the observations after the last step, one per lane. Ignored where an episode ended
                with that step.
            final_values: Values of `final_obs()`, one per truncated episode. None if there is none.
        """
        self._require_open()
        if self._progress.steps == 0:
            raise ArgumentError("finish was called before add; add steps first")
        require_number("gamma", gamma, 0, 1)
        require_number("gae_lambda", gae_lambda, 0, 1)
        before = self._progress
        # An interrupt can leave advantages that are estimated only in part.
        self._progress = before._replace(is_finished=False)
        try:
            self._steps.finish(before.steps, last_values, float(gamma), float(gae_lambda), final_values)
        except ArgumentError:
            self._progress = before  # Arguments are checked before the first advantage is written.
            raise
        self._progress = before._replace(is_finished=True)

    def minibatches(self, batch_size: int, epochs: int = 1) -> Iterator[RolloutBatch]:
        """Return minibatches of single steps, with every step once per epoch, in a new order each time.

        The last minibatch of an epoch is smaller if `batch_size` does not divide the number of steps.
        """
        self._require_batches(batch_size, epochs)
        return self._make_minibatches(batch_size, epochs, self._progress.rollout)

    def sequences(self, batch_size: int, epochs: int = 1, length: int | None = None) -> Iterator[RolloutBatch]:
        """Return minibatches of whole sequences, for recurrent networks: (sequences, time, ...) with a mask.

        A sequence has consecutive steps of one lane within one episode, at most `length` of them. The order of the
        sequences is new in each epoch. The sequences of a minibatch have at most `batch_size` steps together, unless it
        is a single sequence.
        """
        self._require_batches(batch_size, epochs)
        if length is not None:
            require_count("length", length)
        steps = self._progress.steps
        sequences = RolloutSequences.cut(self._steps.find_ends(steps), self._steps.find_valid(steps), length or steps)
        return self._make_sequences(sequences, batch_size, epochs, self._progress.rollout)

    def reset(self) -> None:
        """Begin a new rollout in the same memory."""
        self._require_open()
        self._progress = _Progress(rollout=self._progress.rollout + 1, is_stale=True)
        self._clear_stale()

    def __len__(self) -> int:
        """Return the number of steps over all lanes. Lanes with `valid=False` do not count."""
        self._require_open()
        return int(np.count_nonzero(self._steps.find_valid(self._progress.steps)))

    @property
    def is_full(self) -> bool:
        """Whether `num_steps` steps were added."""
        return self._progress.steps == self.num_steps

    @property
    def fill(self) -> float:
        """Fraction of `num_steps` that was added, from 0 to 1."""
        return self._progress.steps / self.num_steps

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field, against plain arrays."""
        self._require_open()
        return MemoryReport(
            transitions=len(self),
            fields=tuple(self._steps.report(self._progress.steps)),
            staging_bytes=self._minibatch_maker.nbytes,
            segments=1,
            backlog=self._host.fields.backlog,
            failure=self._host.fields.failure,
        )

    def close(self) -> None:
        """Free everything. Minibatches that were returned stay valid."""
        if self._closed_reason:
            return
        self._host.fields.close()
        self._release(_CLOSED)

    def _set_pressure_check(self, check: PressureCheck | None) -> None:
        """Do nothing: a rollout has a fixed size."""

    def _close_in_child(self) -> None:
        """Close the memory in a forked child. Called there, by its only thread."""
        if not self._closed_reason:
            self._release(_FORKED)

    def _release(self, reason: str) -> None:
        self._closed_reason = reason
        del self._steps
        del self._host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_minibatches(self, batch_size: int, epochs: int, rollout: int) -> Iterator[RolloutBatch]:
        self._require_rollout(rollout)
        places = np.flatnonzero(self._steps.find_valid(self._progress.steps))
        for _ in range(epochs):
            order = self._generator.permutation(places)
            for first in range(0, len(order), batch_size):
                self._require_rollout(rollout)
                yield self._gather(order[first : first + batch_size], None)

    def _make_sequences(
        self, sequences: RolloutSequences, batch_size: int, epochs: int, rollout: int
    ) -> Iterator[RolloutBatch]:
        for _ in range(epochs):
            for places in sequences.iterate_batches(batch_size, self._generator):
                self._require_rollout(rollout)
                yield self._gather(places.reshape(-1), places.shape)

    def _gather(self, places: NDArray[np.int64], shape: tuple[int, ...] | None) -> RolloutBatch:
        """Return the steps at `places`. If `shape` is given, return sequences of this shape, with a mask."""
        schema = self.schema
        delivered = self._steps.gather(places, padded=shape is not None)
        if shape is not None:
            delivered = [array.reshape(*shape, *array.shape[1:]) for array in delivered]
            places = places.reshape(shape)
        parts = iter(delivered)
        return RolloutBatch(
            obs=schema.observation.build([next(parts) for _ in schema.observation.leaves]),
            action=schema.action.build([next(parts) for _ in schema.action.leaves]),
            extras=schema.extras.build([next(parts) for _ in schema.extras.leaves]),
            reward=next(parts),
            **{name: next(parts) for name in ESTIMATES},
            ids=places,
            mask=None if shape is None else next(parts),
        )

    def _choose_device(self, obs: Any) -> None:
        """Store steps on the device from now on if the first observations of a memory are there."""
        device = self._minibatch_maker.device
        if device is None or obs is None or self._progress.steps > 0 or self._steps is not self._host:
            return
        # These modules import torch.
        from holdall.device.arguments import is_device_data  # noqa: PLC0415
        from holdall.device.rollout import DeviceRollout  # noqa: PLC0415

        if is_device_data(obs, device):
            self._steps = DeviceRollout(self.schema, self.num_steps, device)

    def _clear_stale(self) -> None:
        """Clear the steps of the rollout before."""
        self._steps.reset()
        self._progress = self._progress._replace(is_stale=False)

    def _require_open(self) -> None:
        if self._closed_reason:
            raise ClosedError(self._closed_reason)
        if self._progress.is_stale:  # `reset` was interrupted.
            self._clear_stale()

    def _require_room(self) -> None:
        if self.is_full:
            raise ArgumentError(
                f"the rollout has all its num_steps ({self.num_steps}); call finish, use its minibatches, and reset"
            )

    def _require_batches(self, batch_size: int, epochs: int) -> None:
        require_count("batch_size", batch_size)
        require_count("epochs", epochs)
        self._require_rollout(self._progress.rollout)

    def _require_rollout(self, number: int) -> None:
        """Raise ArgumentError unless the rollout is finished and has this number."""
        self._require_open()
        if not self._progress.is_finished:
            raise ArgumentError("the rollout has no advantages yet; call finish before minibatches, and after each add")
        if number != self._progress.rollout:
            raise ArgumentError(
                "these minibatches are of a rollout that ended with reset; call minibatches or sequences again, after "
                "finish"
            )


_HOOKS = Hooks(RolloutMemory._set_pressure_check, RolloutMemory._close_in_child)
