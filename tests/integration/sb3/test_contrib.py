"""With one seed, sb3-contrib's maskable and recurrent PPO learn the same with holdall's buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from holdall.errors import ArgumentError

from .comparison import SmallExtractor, list_learned_tensors
from .environments import BUTTONS, VECTOR, Stacked, Wander, make_dict_space, repeat

sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib, an extra of its own")
contrib: Any = pytest.importorskip("holdall.sb3.contrib")

STEPS = 32
LANES = 2

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of:UserWarning")


def mask_actions(environment: Any) -> NDArray[np.bool_]:
    """Forbid one of three buttons, another one from step to step."""
    mask = np.ones(3, np.bool_)
    mask[environment.steps % 3] = False
    return mask


class MaskedWander(Wander):
    action_masks = mask_actions


class MaskedStacked(Stacked):
    action_masks = mask_actions


def assert_same_learning(plain: Any, ours: Any) -> None:
    """Train both models from one seed, and compare every bit. Their first weights are equal, too."""
    for model in (plain, ours):
        model.set_random_seed(7)
        model.learn(4 * STEPS * LANES)
    assert plain._n_updates > 10
    assert dict(list_learned_tensors(plain)) == dict(list_learned_tensors(ours))


def make_settings(policy: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {"n_steps": STEPS, "batch_size": 20, "n_epochs": 3, "seed": 3, "device": "cpu"}
    extractor = {} if policy.startswith("Mlp") else {"features_extractor_class": SmallExtractor}
    return chosen | {"policy_kwargs": {"net_arch": [8], **extractor}}


@pytest.mark.parametrize(
    ("environment", "policy", "kind"),
    [
        (partial(MaskedWander, VECTOR, BUTTONS), "MlpPolicy", "MaskableRolloutBuffer"),
        (partial(MaskedStacked, BUTTONS, max_steps=50), "CnnPolicy", "MaskableRolloutBuffer"),
        (partial(MaskedWander, make_dict_space(), BUTTONS), "MultiInputPolicy", "MaskableDictRolloutBuffer"),
    ],
    ids=["vector", "stack", "dict"],
)
def test_maskable_ppo_gives_the_same_weights(environment: Any, policy: str, kind: str) -> None:
    def make_model(buffer_class: Any) -> Any:
        vec_env = DummyVecEnv(repeat(environment, LANES))
        return sb3_contrib.MaskablePPO(policy, vec_env, rollout_buffer_class=buffer_class, **make_settings(policy))

    assert_same_learning(make_model(None), make_model(getattr(contrib, kind)))


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        (partial(Wander, VECTOR, BUTTONS), "MlpLstmPolicy"),
        (partial(Stacked, BUTTONS, max_steps=50), "CnnLstmPolicy"),
        (partial(Wander, make_dict_space(), BUTTONS), "MultiInputLstmPolicy"),
    ],
    ids=["vector", "stack", "dict"],
)
@pytest.mark.parametrize("compress", [None, pytest.param("balanced", marks=pytest.mark.nightly)])
def test_recurrent_ppo_gives_the_same_weights(environment: Any, policy: str, compress: str | None) -> None:
    def make_model() -> Any:
        chosen = make_settings(policy)
        chosen["policy_kwargs"] |= {"lstm_hidden_size": 8}
        return sb3_contrib.RecurrentPPO(policy, DummyVecEnv(repeat(environment, LANES)), **chosen)

    plain = make_model()
    ours = contrib.equip(make_model(), compress)
    assert isinstance(ours.rollout_buffer, contrib.RolloutBuffer)
    assert_same_learning(plain, ours)


def test_a_second_equip_is_refused() -> None:
    vec_env = DummyVecEnv([partial(Wander, spaces.Box(-1, 1, (3,)), BUTTONS)])
    model = contrib.equip(
        sb3_contrib.RecurrentPPO("MlpLstmPolicy", vec_env, n_steps=STEPS, batch_size=16, device="cpu")
    )
    with pytest.raises(ArgumentError, match="RecurrentRolloutBuffer"):
        contrib.equip(model)
