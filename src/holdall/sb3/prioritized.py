"""Prioritized experience replay for Stable-Baselines3: a buffer that draws by priority, and a DQN that learns from it.

In:  what its algorithms add, and TD errors.  Out: its samples, with ids and weights beside them; weighted updates.
Invariant: with alpha 0, buffer and algorithm draw and learn what Stable-Baselines3's own do, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from holdall.errors import ArgumentError
from holdall.sampling import Prioritized
from holdall.sb3.replay import ReplayBuffer
from holdall.schema import on_host, require_number


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
        """Put weights and ids beside samples; those of Stable-Baselines3 2.6 have no discounts."""
        return cls(**({"discounts": None} | samples._asdict()), weights=weights, ids=ids)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws transitions in proportion to their priorities.

    `PrioritizedDQN` learns from it. In a `train` of your own, multiply the loss by `weights`, and pass the TD errors to
    `update_priorities(samples.ids, errors)`.

    Args:
        args: As in `ReplayBuffer`: buffer_size, observation_space, action_space, device, n_envs, ...
        alpha: See `holdall.Prioritized`. With 0, draws are those of `ReplayBuffer`, and weights are 1.
        beta: The same; it can be changed later, as `buffer.sampler.beta`.
        settings: As in `ReplayBuffer`: n_steps, gamma, budget, prefer, spill_dir, prefetch.
    """

    on_sample: Callable[[PrioritizedSamples], object] | None = None
    """Called with every batch that `sample` returns."""

    def __init__(self, *args: Any, alpha: float = 0.6, beta: float = 0.4, **settings: Any) -> None:
        self._alpha, self._beta = alpha, beta
        super().__init__(*args, **settings)

    @property
    def sampler(self) -> Prioritized:
        """The memory's sampler."""
        sampler: Any = self.memory.sampler  # a Prioritized: `_own_draws` and `resume` pass one
        return sampler  # type: ignore[no-any-return]  # see above

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions in proportion to their priorities."""
        if self._is_delivered(env):
            samples: PrioritizedSamples = self._delivered(batch_size)
        else:
            ids, weights = self._drawn_with_weights(batch_size)
            found: ReplayBufferSamples | DictReplayBufferSamples = self._samples(ids, env)
            samples = PrioritizedSamples.of(found, self._tensor(weights.reshape(-1, 1)), ids)
        if self.on_sample is not None:
            self.on_sample(samples)
        return samples

    def _drawn_with_weights(self, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if self.sampler.alpha == 0:
            return self._drawn(batch_size), np.ones(batch_size, np.float32)
        draw = self.memory.draw(batch_size)
        return draw.ids, draw.weights

    def _next_recipe(self, batch_size: int) -> Draw:
        ids, weights = self._drawn_with_weights(batch_size)
        return replace(self._recipe(ids), weights=weights)

    def _samples_on_device(self, batch: Batch) -> Any:
        return PrioritizedSamples.of(super()._samples_on_device(batch), batch.weights.reshape(-1, 1), batch.ids)

    def update_priorities(self, ids: NDArray[np.int64], priorities: Any) -> None:
        """Set the priorities of a batch, such as the sizes of its TD errors; see `ReplayMemory`."""
        self.memory.update_priorities(ids, np.asarray(on_host(priorities)).reshape(-1))

    def _own_draws(self) -> dict[str, Any]:
        # Stable-Baselines3 seeds NumPy's global generator before it makes the buffer.
        before = np.random.get_state()  # noqa: NPY002  as everything else here
        seed = int(np.random.randint(2**31))  # noqa: NPY002  likewise
        if self._alpha == 0:  # draws come from that generator, and begin where they do without priorities
            np.random.set_state(before)  # noqa: NPY002  likewise
        return {"sampler": Prioritized(self._alpha, self._beta), "seed": seed}


class PrioritizedReplay(OffPolicyAlgorithm):
    """Mix-in: an algorithm of the DQN family that learns from prioritized draws.

    `class PrioritizedQRDQN(PrioritizedReplay, QRDQN): ...`

    `train` is the algorithm's own. While it runs, the gradient that reaches the network is multiplied by the weight of
    its row, which is what a weighted loss gives, and the TD errors of every batch become its priorities. The logged
    loss is the one before weights.

    Args:
        args: As in the algorithm.
        alpha: How uneven draws are, see `holdall.Prioritized`; 0 gives the algorithm without priorities, bit for bit.
        beta: How much of it the weights correct: from this number up to 1 at the end of training; or a function of the
            progress that remains, from 1 to 0, as Stable-Baselines3's schedules are.
        settings: As in the algorithm. `replay_buffer_kwargs` may have what `PrioritizedReplayBuffer` takes; `n_steps`
            becomes the buffer's.
    """

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: float | Callable[[float], float] = 0.4, **settings: Any
    ) -> None:
        self.alpha, self.beta = alpha, beta if callable(beta) else require_number("beta", beta, 0)
        super().__init__(*args, **settings)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Do the algorithm's own updates, weighted; keep the TD errors as priorities."""
        buffer: Any = self.replay_buffer  # somebody may have loaded another one
        _require_priorities("replay_buffer", type(buffer))
        remaining = self._current_progress_remaining
        buffer.sampler.beta = self.beta(remaining) if callable(self.beta) else 1 - (1 - self.beta) * remaining
        drawn: list[PrioritizedSamples] = []
        following: list[th.Tensor] = []

        def keep(network: Any, inputs: Any, values: th.Tensor) -> None:
            following[:] = [values]

        def weigh(network: Any, inputs: Any, values: th.Tensor) -> None:
            if not values.requires_grad:  # such as a double DQN that asks which action is best
                return
            samples = drawn.pop()
            weights = samples.weights.reshape(-1, *[1] * (values.ndim - 1))
            values.register_hook(lambda gradient: gradient * weights)  # type: ignore[no-untyped-call]  # torch's
            buffer.update_priorities(samples.ids, self.td_errors(samples, values.detach(), following.pop()).abs())

        network, target = self._networks()
        hooks = [target.register_forward_hook(keep), network.register_forward_hook(weigh)]
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
            values: What the network returned for `samples.observations`: (batch, actions), or (batch, quantiles,
                actions), of which the mean counts.
            following: What the target network returned for `samples.next_observations`.
        """
        now, then = (each if each.ndim == 2 else each.mean(dim=1) for each in (values, following))
        discounts = self.gamma if samples.discounts is None else samples.discounts
        target = samples.rewards + (1 - samples.dones) * discounts * then.max(dim=1, keepdim=True).values
        return target - now.gather(1, samples.actions.long())

    def _networks(self) -> tuple[th.nn.Module, th.nn.Module]:
        """Return the network that learns, and its target."""
        for name in ("q_net", "quantile_net"):
            if hasattr(self, name):
                return getattr(self, name), getattr(self, f"{name}_target")
        raise ArgumentError(
            f"{type(self).__name__} has neither a q_net nor a quantile_net: PrioritizedReplay is for algorithms of the "
            "DQN family; elsewhere weigh the loss by hand, with PrioritizedReplayBuffer and samples.weights"
        )

    def _setup_model(self) -> None:
        kind = self.replay_buffer_class or PrioritizedReplayBuffer
        _require_priorities("replay_buffer_class", kind)
        with made_with(self, kind, alpha=self.alpha):
            super()._setup_model()
        self._networks()  # an algorithm without any is refused before it trains


class PrioritizedDQN(PrioritizedReplay, DQN):
    """DQN with prioritized experience replay: `PrioritizedDQN("CnnPolicy", env, alpha=0.6, beta=0.4)`."""


@contextmanager
def made_with(model: OffPolicyAlgorithm, kind: type[buffers.ReplayBuffer], **settings: Any) -> Iterator[None]:
    """While a model is set up: give it a buffer of this kind, and its `n_steps` to the buffer.

    Args:
        settings: Of the buffer; what the model's own `replay_buffer_kwargs` say comes before them.
    """
    asked, n_steps = model.replay_buffer_kwargs, getattr(model, "n_steps", 1)
    if n_steps > 1:
        settings |= {"n_steps": n_steps, "gamma": model.gamma}
        model.n_steps = 1  # else Stable-Baselines3 warns that the buffer does not get it
    model.replay_buffer_class, model.replay_buffer_kwargs = kind, settings | asked
    try:
        yield
    finally:
        model.replay_buffer_kwargs = asked
        if n_steps > 1:
            model.n_steps = n_steps


def _require_priorities(name: str, kind: type) -> None:
    if not issubclass(kind, PrioritizedReplayBuffer):
        raise ArgumentError(
            f"{name} ({kind.__module__}.{kind.__name__}) knows no priorities; leave replay_buffer_class out, or, for a "
            "loaded buffer, write model.replay_buffer = PrioritizedReplayBuffer.copy_of(model.replay_buffer)"
        )
