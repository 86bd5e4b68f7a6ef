"""Drop-ins for sb3-contrib: rollouts with action masks or recurrent states, and prioritized QR-DQN.

Guarantee: MaskablePPO and RecurrentPPO get the minibatches that their own buffers would return. Masks, recurrent
states, padding and draws are sb3-contrib's own code. Only observations and advantages come from `RolloutBuffer`, so one
seed gives the same weights, bit for bit.
"""

from __future__ import annotations

from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.sb3.prioritized import PrioritizedReplay
from holdall.sb3.rollout import RolloutBuffer

try:
    from sb3_contrib import QRDQN, RecurrentPPO
    from sb3_contrib.common.maskable import buffers as maskable
    from sb3_contrib.common.recurrent import buffers as recurrent
except ImportError as error:
    raise MissingPackageError(
        "holdall.sb3.contrib needs sb3-contrib; run \"pip install 'holdall[contrib]'\""
    ) from error


_SETTINGS = (
    "buffer_size",
    "observation_space",
    "action_space",
    "hidden_state_shape",
    "device",
    "gae_lambda",
    "gamma",
    "n_envs",
)


class _CompressOption:
    """Mix-in: a constructor that accepts `compress` and passes all other arguments to sb3-contrib's constructor."""

    def __init__(self, *args: Any, compress: str | None = None, **kwargs: Any) -> None:
        self._compress = compress
        super().__init__(*args, **kwargs)


class MaskableRolloutBuffer(_CompressOption, maskable.MaskableRolloutBuffer, RolloutBuffer):  # type: ignore[misc]  # It accepts more than SB3.
    """Drop-in for MaskablePPO with Box observations, as `rollout_buffer_class`.

    Examples:
        >>> from sb3_contrib import MaskablePPO
        >>> from sb3_contrib.common.envs import InvalidActionEnvDiscrete
        >>> from holdall.sb3.contrib import MaskableRolloutBuffer
        >>> masked = InvalidActionEnvDiscrete(dim=4, n_invalid_actions=2)
        >>> _ = MaskablePPO("MlpPolicy", masked, n_steps=64, rollout_buffer_class=MaskableRolloutBuffer).learn(64)
    """


class MaskableDictRolloutBuffer(_CompressOption, maskable.MaskableDictRolloutBuffer, RolloutBuffer):
    """Drop-in for MaskablePPO with Dict observations, as `rollout_buffer_class`."""


class RecurrentRolloutBuffer(_CompressOption, recurrent.RecurrentRolloutBuffer, RolloutBuffer):  # type: ignore[misc]  # It accepts more than SB3.
    """Drop-in for RecurrentPPO with Box observations, which `equip` gives to a model."""


class RecurrentDictRolloutBuffer(_CompressOption, recurrent.RecurrentDictRolloutBuffer, RolloutBuffer):  # type: ignore[misc]  # It accepts more than SB3.
    """Drop-in for RecurrentPPO with Dict observations, which `equip` gives to a model."""


class PrioritizedQRDQN(PrioritizedReplay, QRDQN):
    """QR-DQN with prioritized experience replay. Priorities are the errors of the mean over quantiles.

    Examples:
        >>> from holdall.sb3.contrib import PrioritizedQRDQN
        >>> _ = PrioritizedQRDQN("MlpPolicy", env, alpha=0.6, beta=0.4).learn(50)
    """


def equip(model: RecurrentPPO, compress: str | None = None) -> RecurrentPPO:
    """Replace the buffer of a RecurrentPPO, which accepts no `rollout_buffer_class`, by holdall's. Return the model.

    Examples:
        >>> from sb3_contrib import RecurrentPPO
        >>> from holdall.sb3.contrib import equip
        >>> _ = equip(RecurrentPPO("MlpLstmPolicy", env, n_steps=32)).learn(32)
    """
    plain = model.rollout_buffer
    if type(plain) is recurrent.RecurrentDictRolloutBuffer:
        kind: Any = RecurrentDictRolloutBuffer
    elif type(plain) is recurrent.RecurrentRolloutBuffer:
        kind = RecurrentRolloutBuffer
    else:
        raise ArgumentError(f"model has a {type(plain).__name__}. Pass a RecurrentPPO as its constructor made it.")
    settings = {name: getattr(plain, name) for name in _SETTINGS}
    model.rollout_buffer = kind(**settings, compress=compress)
    return model
