"""One seed, one policy: sb3-contrib's maskable and recurrent PPO learn the same with holdall's buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from holdall.errors import ArgumentError

from .comparison import Glance, learned
from .environments import BUTTONS, VECTOR, Stacked, Wander, dict_space, each

sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib, an extra of its own")
contrib: Any = pytest.importorskip("holdall.sb3.contrib")

STEPS = 32
LANES = 2

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of:UserWarning")


def allowed(environment: Any) -> NDArray[np.bool_]:
    """Forbid one of three buttons, another one from step to step."""
    mask = np.ones(3, np.bool_)
    mask[environment._steps % 3] = False
    return mask


class MaskedWander(Wander):
    action_masks = allowed


class MaskedStacked(Stacked):
    action_masks = allowed


def assert_same_learning(plain: Any, ours: Any) -> None:
    """Train both from one seed, which the policies' weights had too, and compare every bit."""
    for model in (plain, ours):
        model.set_random_seed(7)
        model.learn(4 * STEPS * LANES)
    assert plain._n_updates > 10
    assert dict(learned(plain)) == dict(learned(ours))


def settings(policy: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {"n_steps": STEPS, "batch_size": 20, "n_epochs": 3, "seed": 3, "device": "cpu"}
    extractor = {} if policy.startswith("Mlp") else {"features_extractor_class": Glance}
    return chosen | {"policy_kwargs": {"net_arch": [8], **extractor}}


@pytest.mark.parametrize(
    ("environment", "policy", "kind"),
    [
        (partial(MaskedWander, VECTOR, BUTTONS), "MlpPolicy", "MaskableRolloutBuffer"),
        (partial(MaskedStacked, BUTTONS, max_steps=50), "CnnPolicy", "MaskableRolloutBuffer"),
        (partial(MaskedWander, dict_space(), BUTTONS), "MultiInputPolicy", "MaskableDictRolloutBuffer"),
    ],
    ids=["vector", "stack", "dict"],
)
def test_maskable_ppo_gives_the_same_weights(environment: Any, policy: str, kind: str) -> None:
    def model(buffer_class: Any) -> Any:
        vec_env = DummyVecEnv(each(environment, LANES))
        return sb3_contrib.MaskablePPO(policy, vec_env, rollout_buffer_class=buffer_class, **settings(policy))

    assert_same_learning(model(None), model(getattr(contrib, kind)))


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        (partial(Wander, VECTOR, BUTTONS), "MlpLstmPolicy"),
        (partial(Stacked, BUTTONS, max_steps=50), "CnnLstmPolicy"),
        (partial(Wander, dict_space(), BUTTONS), "MultiInputLstmPolicy"),
    ],
    ids=["vector", "stack", "dict"],
)
@pytest.mark.parametrize("compress", [None, pytest.param("balanced", marks=pytest.mark.nightly)])
def test_recurrent_ppo_gives_the_same_weights(environment: Any, policy: str, compress: str | None) -> None:
    def model() -> Any:
        chosen = settings(policy)
        chosen["policy_kwargs"] |= {"lstm_hidden_size": 8}
        return sb3_contrib.RecurrentPPO(policy, DummyVecEnv(each(environment, LANES)), **chosen)

    plain = model()
    ours = contrib.equip(model(), compress)
    assert isinstance(ours.rollout_buffer, contrib.RolloutBuffer)
    assert_same_learning(plain, ours)


def test_a_model_is_equipped_once() -> None:
    vec_env = DummyVecEnv([partial(Wander, spaces.Box(-1, 1, (3,)), BUTTONS)])
    model = contrib.equip(
        sb3_contrib.RecurrentPPO("MlpLstmPolicy", vec_env, n_steps=STEPS, batch_size=16, device="cpu")
    )
    with pytest.raises(ArgumentError, match="RecurrentRolloutBuffer"):
        contrib.equip(model)
