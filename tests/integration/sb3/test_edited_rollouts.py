"""Arrays of a rollout that are written to, replaced, copied or pickled behave as in SB3's buffer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common import buffers
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from holdall.errors import ArgumentError
from holdall.sb3 import RolloutBuffer
from holdall.sb3.contrib import MaskableRolloutBuffer, equip

from .comparison import list_learned_tensors
from .environments import ARM, BUTTONS, VECTOR, Wander, repeat
from .pair import assert_same_batch, assert_same_bits, call_seeded

Edit = Callable[[Any], None]
STEPS = 16
LANES = 3
KEYS = spaces.Dict({"state": spaces.Box(-1, 1, (4,), np.float32), "speed": spaces.Box(-1, 1, (2,), np.float32)})


class EditCallback(BaseCallback):
    """Edits the rollout at its end, or before the step number `step` is added."""

    def __init__(self, edit: Edit, step: int | None) -> None:
        super().__init__()
        self._edit = edit
        self._step = step

    def _on_step(self) -> bool:
        if self.model.rollout_buffer.pos == self._step:  # type: ignore[attr-defined]  # On-policy algorithms have one.
            self._edit(self.model.rollout_buffer)  # type: ignore[attr-defined]  # See above.
        return True

    def _on_rollout_end(self) -> None:
        if self._step is None:
            self._edit(self.model.rollout_buffer)  # type: ignore[attr-defined]  # See above.


def make_scaling(name: str, factor: float = 3.0, dtype: Any = None) -> Edit:
    """Return an edit that replaces an array by one that is computed from it."""

    def edit(buffer: Any) -> None:
        rows = getattr(buffer, name)
        setattr(buffer, name, ((rows - rows.mean()) * factor).astype(dtype or rows.dtype))

    return edit


def make_in_place_edit(name: str) -> Edit:
    def edit(buffer: Any) -> None:
        rows = getattr(buffer, name)
        rows *= 0.5
        rows[1:, 0] += 1

    return edit


def replace_observations(buffer: Any) -> None:
    buffer.observations = np.asarray(buffer.observations) * np.float32(0.5) + 1


def replace_one_key(buffer: Any) -> None:
    buffer.observations["state"] = np.asarray(buffer.observations["state"]) * np.float32(0.5)


def assign_tensor(buffer: Any) -> None:
    buffer.advantages = torch.as_tensor(buffer.advantages) * 2


END: dict[str, Edit] = {
    **{
        f"{name} assigned": make_scaling(name)
        for name in ("advantages", "returns", "values", "log_probs", "rewards", "actions")
    },
    **{f"{name} in place": make_in_place_edit(name) for name in ("advantages", "returns", "values", "log_probs")},
    "float64 advantages": make_scaling("advantages", dtype=np.float64),
    "episode starts assigned": make_scaling("episode_starts", 0.0),
    "observations assigned": replace_observations,
    "a tensor assigned": assign_tensor,
}
BEFORE: dict[str, Edit] = {
    **{f"{name} assigned": make_scaling(name, 0.5) for name in ("rewards", "values", "advantages", "returns")},
    "float64 rewards": make_scaling("rewards", dtype=np.float64),
    "episode starts assigned": make_scaling("episode_starts", 0.0),
    "observations assigned": replace_observations,
    "rewards in place": make_in_place_edit("rewards"),
}


def train(
    kind: type[buffers.RolloutBuffer] | None,
    edit: Edit,
    step: int | None,
    space: Any = VECTOR,
    policy: str = "MlpPolicy",
) -> dict[str, bytes]:
    vec_env = DummyVecEnv(repeat(partial(Wander, space, ARM), LANES))
    model = PPO(
        policy,
        vec_env,
        n_steps=STEPS,
        batch_size=STEPS,
        n_epochs=2,
        rollout_buffer_class=kind,
        seed=5,
        device="cpu",
        policy_kwargs={"net_arch": [8]},
        learning_rate=0.01,
        normalize_advantage=False,
        clip_range_vf=0.2,
    )
    model.learn(2 * STEPS * LANES, callback=EditCallback(edit, step))
    return dict(list_learned_tensors(model))  # type: ignore[arg-type]  # It accepts any algorithm.


def assert_same_effect(edit: Edit, step: int | None, **task: Any) -> dict[str, bytes]:
    expected = train(None, edit, step, **task)
    got = train(RolloutBuffer, edit, step, **task)
    assert [name for name in expected if got[name] != expected[name]] == []
    return got


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("edit", END, ids=str)
def test_an_edit_at_the_end_of_a_rollout_has_sb3s_effect(edit: str) -> None:
    """The weights are those of SB3. If SB3 still reads the array, they differ from the weights without the edit."""
    got = assert_same_effect(END[edit], None)
    if edit.split(maxsplit=1)[0] not in {"rewards", "episode"}:
        assert got != train(RolloutBuffer, lambda _: None, None)


@pytest.mark.parametrize("edit", BEFORE, ids=str)
def test_an_edit_within_a_rollout_has_sb3s_effect(edit: str) -> None:
    assert_same_effect(BEFORE[edit], 7)


def test_one_key_of_a_dict_may_be_exchanged() -> None:
    for step in (None, 7):
        assert_same_effect(replace_one_key, step, space=KEYS, policy="MultiInputPolicy")


def test_stored_observations_cannot_be_written_to() -> None:
    """Without the error, the write would have no effect."""
    ours = fill(RolloutBuffer, VECTOR)
    with pytest.raises(ArgumentError, match="observations"):
        ours.observations[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        ours.observations[0][0] = 0


def test_an_array_of_another_shape_is_refused() -> None:
    ours = fill(RolloutBuffer, VECTOR)
    next(ours.get(5))
    ours.advantages = np.zeros(7, np.float32)
    with pytest.raises(ArgumentError, match=r"advantages has shape \(7,\)"):
        next(ours.get(5))


def fill(kind: Any, space: spaces.Space[Any], steps: int = STEPS, buffer: Any = None) -> Any:
    """Add steps to a new buffer of `kind`, or to `buffer`. The steps are the same for every kind."""
    generator = np.random.default_rng(steps)
    buffer = buffer or kind(STEPS, space, ARM, device="cpu", gae_lambda=0.9, n_envs=LANES)
    space.seed(3)
    for _ in range(steps):
        drawn = [space.sample() for _ in range(LANES)]
        obs: Any = (
            np.stack(drawn) if space is VECTOR else {key: np.stack([one[key] for one in drawn]) for key in drawn[0]}
        )
        action = generator.standard_normal((LANES, 2), np.float32)
        reward, value, log_prob = generator.standard_normal((3, LANES), np.float32)
        start = generator.random(LANES) < 0.2
        buffer.add(obs, action, reward, start, torch.from_numpy(value), torch.from_numpy(log_prob))
    if buffer.full:
        buffer.compute_returns_and_advantage(torch.ones(LANES), np.zeros(LANES))
    return buffer


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
}


def assert_same_rollout(expected: Any, got: Any) -> None:
    assert (got.pos, got.full, got.generator_ready) == (expected.pos, expected.full, expected.generator_ready)
    for name in ("actions", "rewards", "values", "log_probs", "advantages", "returns", "episode_starts"):
        assert_same_bits(getattr(expected, name), getattr(got, name), name)
    theirs = expected.observations
    ours = got.observations
    for key in theirs if isinstance(theirs, dict) else [None]:
        assert_same_bits(theirs if key is None else theirs[key], ours if key is None else ours[key], f"seen {key}")
    if got.full:
        for one, other in zip(
            call_seeded(2, lambda: list(expected.get(7))), call_seeded(2, lambda: list(got.get(7))), strict=True
        ):
            assert_same_batch(one, other)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("space", [VECTOR, KEYS], ids=["Box", "Dict"])
@pytest.mark.parametrize("steps", [0, 9, STEPS])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_copy_has_the_rollout(how: str, space: Any, steps: int, drawn: bool) -> None:
    """The copy is made before or after minibatches were drawn. More steps and another rollout can be added to it."""
    plain = buffers.RolloutBuffer if space is VECTOR else buffers.DictRolloutBuffer
    sides = [fill(kind, space, steps) for kind in (plain, RolloutBuffer)]
    if drawn and steps == STEPS:
        for side in sides:
            call_seeded(1, lambda side=side: list(side.get(5)))
    expected, got = (COPIES[how](side) for side in sides)
    assert_same_rollout(expected, got)
    assert_same_rollout(expected, COPIES[how](got))
    assert got.report().transitions == steps * LANES
    for side in (expected, got):
        if steps < STEPS:
            fill(None, space, STEPS - steps, side)
    assert_same_rollout(expected, got)
    for side in (expected, got):
        side.reset()
        fill(None, space, STEPS, side)
    assert_same_rollout(expected, got)
    assert not any(field.name.startswith("observations") for field in got.report().fields), (
        "plain copies of the observations must be deleted"
    )
    # The original does not change with its copy.
    assert sides[1].pos == steps


def test_observations_have_sb3s_shape_once_minibatches_were_drawn() -> None:
    """They have one axis, in which each environment's steps are consecutive."""
    sides = [fill(kind, VECTOR) for kind in (buffers.RolloutBuffer, RolloutBuffer)]
    for side in sides:
        next(side.get(5))
    assert_same_bits(sides[0].observations, sides[1].observations, "observations")
    assert_same_bits(sides[0].observations[[3, 1]], sides[1].observations[[3, 1]], "rows")
    assert sides[1].observations[..., 0].shape == (STEPS * LANES,)


@pytest.mark.parametrize("algorithm", [MaskablePPO, RecurrentPPO])
def test_edits_have_sb3_contribs_effect(algorithm: Any) -> None:
    edit = make_scaling("advantages")
    learnt = []
    for ours in (False, True):
        vec_env = DummyVecEnv(repeat(partial(Wander, VECTOR, BUTTONS), LANES))
        how: dict[str, Any] = {"n_steps": STEPS, "batch_size": STEPS, "n_epochs": 1, "seed": 5, "device": "cpu"}
        how |= {"policy_kwargs": {"net_arch": [8]}, "normalize_advantage": False}
        if algorithm is MaskablePPO:
            how["rollout_buffer_class"] = MaskableRolloutBuffer if ours else None
            model: Any = MaskablePPO("MlpPolicy", vec_env, **how)
        else:
            how["policy_kwargs"]["lstm_hidden_size"] = 8
            model = RecurrentPPO("MlpLstmPolicy", vec_env, **how)
            model = equip(model) if ours else model
        model.learn(
            2 * STEPS * LANES,
            callback=EditCallback(edit, None),
            **({"use_masking": False} if algorithm is MaskablePPO else {}),
        )
        learnt.append(dict(list_learned_tensors(model)))
        again = pickle.loads(pickle.dumps(model.rollout_buffer))
        assert again.pos == model.rollout_buffer.pos
        assert_same_bits(model.rollout_buffer.observations, again.observations, "observations")
    assert learnt[0] == learnt[1]


def test_the_report_counts_the_flattened_copies() -> None:
    """Minibatches are drawn from copies of actions and estimates, which the buffer keeps in addition to the arrays."""
    rollout = fill(RolloutBuffer, VECTOR, STEPS)
    names = ("actions", "rewards", "values", "log_probs", "advantages", "returns", "episode_starts")
    arrays = {id(getattr(rollout, name)): getattr(rollout, name) for name in names}
    call_seeded(1, lambda: list(rollout.get(5)))
    arrays |= {id(getattr(rollout, name)): getattr(rollout, name) for name in names}
    shown = sum(field.row_bytes for field in rollout.report().fields if not field.name.startswith("obs"))
    assert shown >= sum(array.nbytes for array in arrays.values())
