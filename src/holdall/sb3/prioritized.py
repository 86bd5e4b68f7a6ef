"""Prioritized experience replay for Stable-Baselines3: a buffer that draws by priority, and a DQN that learns from it.

Guarantee: with alpha 0, buffer and algorithm draw and learn the same as Stable-Baselines3's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3 import DQN
from stable_baselines3.common import buffers
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from holdall.batch import Batch, Draw
from holdall.checks import require_number
from holdall.errors import ArgumentError
from holdall.sampling import Prioritized
from holdall.sb3.batch_path import BatchPath
from holdall.sb3.replay import ReplayBuffer
from holdall.schema import move_to_host


class PrioritizedSamples(NamedTuple):
    """Stable-Baselines3's samples, with weights for the loss and ids for `update_priorities`."""

    observations: Any
    actions: th.Tensor
    next_observations: Any
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor  # (batch, 1)
    ids: NDArray[np.int64]  # for `update_priorities`

    @classmethod
    def of(cls, samples: Any, weights: th.Tensor, ids: NDArray[np.int64]) -> PrioritizedSamples:
        """Add weights and ids to samples. Samples of Stable-Baselines3 2.6 have no discounts."""
        return cls(**({"discounts": None} | samples._asdict()), weights=weights, ids=ids)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws transitions in proportion to their priorities.

    `PrioritizedDQN` learns from it. In a `train` of your own, multiply the loss by `weights`, and pass the TD errors to
    `update_priorities(samples.ids, errors)`.

    Args:
        args: As in `ReplayBuffer`: buffer_size, observation_space, action_space, device, n_envs, ...
        alpha: See `holdall.Prioritized`. With 0, draws are those of `ReplayBuffer`, and weights are 1.
        beta: See `holdall.Prioritized`. It can be changed later, as `buffer.sampler.beta`.
        settings: As in `ReplayBuffer`: n_steps, gamma, budget, prefer, spill_dir, prefetch.

    Examples:
        >>> from holdall.sb3 import PrioritizedReplayBuffer
        >>> buffer = PrioritizedReplayBuffer(1_000, env.observation_space, env.action_space, "cpu", alpha=0.6, beta=0.4)
    """

    on_sample: Callable[[PrioritizedSamples], object] | None = None
    """Called with every batch that `sample` returns."""

    def __init__(self, *args: Any, alpha: float = 0.6, beta: float = 0.4, **settings: Any) -> None:
        self._alpha = alpha
        self._beta = beta
        super().__init__(*args, **settings)

    @property
    def sampler(self) -> Prioritized:
        """The memory's sampler."""
        sampler: Any = self.memory.sampler  # A Prioritized: `_choose_sampler` and `resume` pass one.
        return sampler  # type: ignore[no-any-return]

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions in proportion to their priorities."""
        samples: PrioritizedSamples = self._draw_samples(batch_size, env)
        if self.on_sample is not None:
            self.on_sample(samples)
        return samples

    def _draw_samples(self, batch_size: int, env: VecNormalize | None) -> Any:
        path = self._choose_path(env)
        if path is BatchPath.DEVICE:
            return super()._draw_samples(batch_size, env)
        draw = self._draw(batch_size, env)
        samples: ReplayBufferSamples | DictReplayBufferSamples = self._make_samples(draw, path, env)
        return PrioritizedSamples.of(samples, self._to_tensor(draw.weights.reshape(-1, 1)), draw.ids)

    def _make_device_samples(self, batch: Batch) -> Any:
        return PrioritizedSamples.of(super()._make_device_samples(batch), batch.weights.reshape(-1, 1), batch.ids)

    def _draw(self, batch_size: int, env: VecNormalize | None = None) -> Draw:
        """Draw a batch by priority."""
        if self.sampler.alpha == 0:
            return super()._draw(batch_size, env)
        drawn = self.memory.batch_source.draw(batch_size)
        return self._make_draw(drawn.ids, env, drawn.weights)

    def update_priorities(self, ids: NDArray[np.int64], priorities: Any) -> None:
        """Set the priorities of a batch, as `ReplayMemory.update_priorities` does."""
        self.memory.update_priorities(ids, np.asarray(move_to_host(priorities)).reshape(-1))

    def _choose_sampler(self) -> dict[str, Any]:
        # Stable-Baselines3 seeds NumPy's global generator before it makes the buffer.
        before = np.random.get_state()  # noqa: NPY002  Stable-Baselines3's generator
        seed = int(np.random.randint(2**31))  # noqa: NPY002  Stable-Baselines3's generator
        if self._alpha == 0:
            # Draws use this generator. They begin with the same state as without priorities.
            np.random.set_state(before)  # noqa: NPY002  Stable-Baselines3's generator
        return {"sampler": Prioritized(self._alpha, self._beta), "seed": seed}


class PrioritizedReplay(OffPolicyAlgorithm):
    """Mix-in: an algorithm of the DQN family that learns from prioritized draws.

    `train` is the algorithm's own. While it runs, the gradient of every row is multiplied by the row's weight, which
    equals a weighted loss, and the TD errors of a batch become the priorities of its transitions. The logged loss is
    not weighted.

    Args:
        args: As in the algorithm.
        alpha: How much priorities count, see `holdall.Prioritized`. 0 gives the algorithm without priorities, bit for
            bit.
        beta: How much of the bias the weights correct. A number is increased to 1 at the end of training. A function
            gets the remaining progress, from 1 to 0, as Stable-Baselines3's schedules do.
        settings: As in the algorithm. `replay_buffer_kwargs` may have the settings of `PrioritizedReplayBuffer`.
            `n_steps` is passed to the buffer.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from holdall.sb3 import PrioritizedReplay
        >>> class PrioritizedDQN(PrioritizedReplay, DQN):
        ...     pass
        >>> _ = PrioritizedDQN("MlpPolicy", env, alpha=0.6, beta=0.4).learn(50)
    """

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: float | Callable[[float], float] = 0.4, **settings: Any
    ) -> None:
        self.alpha = alpha
        self.beta = beta if callable(beta) else require_number("beta", beta, 0)
        super().__init__(*args, **settings)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Do the algorithm's own updates with weighted gradients, and set the priorities to the TD errors."""
        buffer: Any = self.replay_buffer  # A user may have loaded a buffer of another class.
        _require_priorities("replay_buffer", type(buffer))
        remaining = self._current_progress_remaining
        buffer.sampler.beta = self.beta(remaining) if callable(self.beta) else 1 - (1 - self.beta) * remaining
        drawn: list[PrioritizedSamples] = []
        following: list[th.Tensor] = []

        def record_following(network: Any, inputs: Any, values: th.Tensor) -> None:
            following[:] = [values]

        def weigh(network: Any, inputs: Any, values: th.Tensor) -> None:
            if not values.requires_grad:  # For example, a double DQN chooses the best next action with this network.
                return
            samples = drawn.pop()
            weights = samples.weights.reshape(-1, *[1] * (values.ndim - 1))
            values.register_hook(lambda gradient: gradient * weights)  # type: ignore[no-untyped-call]  # torch's
            buffer.update_priorities(samples.ids, self.td_errors(samples, values.detach(), following.pop()).abs())

        network, target = self._find_networks()
        hooks = [target.register_forward_hook(record_following), network.register_forward_hook(weigh)]
        buffer.on_sample = drawn.append
        try:
            super().train(gradient_steps, batch_size)
        finally:
            buffer.on_sample = None
            for hook in hooks:
                hook.remove()
        self.logger.record("train/beta", buffer.sampler.beta)

    def td_errors(self, samples: PrioritizedSamples, values: th.Tensor, following: th.Tensor) -> th.Tensor:
        """Return the TD error of every row, (batch, 1).

        Args:
            values: Output of the network for `samples.observations`, (batch, actions) or (batch, quantiles, actions).
                The mean over quantiles counts.
            following: Output of the target network for `samples.next_observations`.
        """
        discounts = self.gamma if samples.discounts is None else samples.discounts
        next_values = _average_quantiles(following).max(dim=1, keepdim=True).values
        target = samples.rewards + (1 - samples.dones) * discounts * next_values
        return target - _average_quantiles(values).gather(1, samples.actions.long())

    def _find_networks(self) -> tuple[th.nn.Module, th.nn.Module]:
        """Return the network that learns, and its target."""
        for name in ("q_net", "quantile_net"):
            if hasattr(self, name):
                return getattr(self, name), getattr(self, f"{name}_target")
        raise ArgumentError(
            f"{type(self).__name__} has neither a q_net nor a quantile_net. PrioritizedReplay is for algorithms of the "
            "DQN family. For others, use PrioritizedReplayBuffer and multiply the loss by samples.weights."
        )

    def _setup_model(self) -> None:
        kind = self.replay_buffer_class or PrioritizedReplayBuffer
        _require_priorities("replay_buffer_class", kind)
        with use_buffer_class(self, kind, alpha=self.alpha):
            super()._setup_model()
        self._find_networks()  # Refuse an algorithm without such networks before it trains.


class PrioritizedDQN(PrioritizedReplay, DQN):
    """DQN with prioritized experience replay.

    Examples:
        >>> from holdall.sb3 import PrioritizedDQN
        >>> _ = PrioritizedDQN("MlpPolicy", env, alpha=0.6, beta=0.4).learn(50)
    """


@contextmanager
def use_buffer_class(model: OffPolicyAlgorithm, kind: type[buffers.ReplayBuffer], **settings: Any) -> Iterator[None]:
    """Within the context, a model is set up with a buffer of class `kind`, and `n_steps` is passed to the buffer.

    Args:
        settings: Settings of the buffer. Those of the model's own `replay_buffer_kwargs` take precedence.
    """
    asked = model.replay_buffer_kwargs
    n_steps = getattr(model, "n_steps", 1)
    if n_steps > 1:
        settings |= {"n_steps": n_steps, "gamma": model.gamma}
        model.n_steps = 1  # Otherwise Stable-Baselines3 warns that it does not pass `n_steps` to the buffer.
    model.replay_buffer_class = kind
    model.replay_buffer_kwargs = settings | asked
    try:
        yield
    finally:
        model.replay_buffer_kwargs = asked
        if n_steps > 1:
            model.n_steps = n_steps


def _require_priorities(name: str, kind: type) -> None:
    if not issubclass(kind, PrioritizedReplayBuffer):
        raise ArgumentError(
            f"{name} ({kind.__module__}.{kind.__name__}) has no priorities. Leave replay_buffer_class out, or, for a "
            "loaded buffer, write model.replay_buffer = PrioritizedReplayBuffer.copy_of(model.replay_buffer)."
        )


def _average_quantiles(values: th.Tensor) -> th.Tensor:
    """Return values as (batch, actions)."""
    return values if values.ndim == 2 else values.mean(dim=1)
