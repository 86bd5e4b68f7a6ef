"""`PrioritizedReplayBuffer`: draws by priority, and hands out what a loss has to be weighted with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common import buffers
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from holdall.sb3 import PrioritizedReplayBuffer, ReplayBuffer

from .comparison import Task, learn, trained
from .environments import ARM, VECTOR, Wander, dict_space
from .pair import Case, assert_same_batch, seeded, steps

HAS_STEPS = hasattr(buffers, "NStepReplayBuffer")  # from 2.7 on


def filled(kind: Any = PrioritizedReplayBuffer, space: Any = VECTOR, lanes: int = 2, **how: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002  as Stable-Baselines3 does before it makes a buffer
    buffer = kind(80, space, ARM, device="cpu", n_envs=lanes, **how)
    stream = steps(Case(space, ARM, lanes), np.random.default_rng(0))
    for _ in range(60):
        buffer.add(*next(stream))
    return buffer


@pytest.mark.parametrize("space", [VECTOR, dict_space((3, 40, 40))], ids=["box", "dict"])
@pytest.mark.parametrize("n_steps", [1, 3] if HAS_STEPS else [1])
def test_rows_are_those_of_the_plain_buffer(space: Any, n_steps: int) -> None:
    """Only which rows are drawn differs."""
    buffer = filled(space=space, n_steps=n_steps)
    plain = filled(ReplayBuffer, space, n_steps=n_steps)
    samples = buffer.sample(50)
    expected = plain._gather_samples(samples.ids, None)
    assert_same_batch(expected, type(expected)(*samples[: len(expected)]))


def test_priorities_decide_what_is_drawn_and_weights_say_how_much() -> None:
    """TD errors as they come out of a network: (batch, 1), with a gradient."""
    buffer = filled(alpha=1.0, beta=1.0)
    ids = np.arange(buffer.memory.first_id, buffer.memory.next_id)
    errors = torch.where(torch.from_numpy(ids % 4 == 0), 30.0, 0.01).reshape(-1, 1).requires_grad_()
    buffer.update_priorities(ids, errors.abs())
    samples = buffer.sample(400)
    assert (samples.ids % 4 == 0).mean() > 0.98
    assert samples.weights.shape == (400, 1)
    assert samples.weights.max() == 1
    buffer.sampler.beta = 0.0
    assert set(buffer.sample(100).weights.reshape(-1).tolist()) == {1.0}


def test_one_seed_gives_one_training() -> None:
    """The memory's own generator is seeded from Stable-Baselines3's."""
    drawn = [seeded(7, filled).sample(40).ids.tolist() for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_saved_priorities_draw_on(tmp_path: Path) -> None:
    """A loaded buffer draws what the saved one would have."""
    buffer = filled()
    buffer.update_priorities(buffer.sample(60).ids, np.linspace(0, 5, 60))
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    loaded = load_from_pkl(tmp_path / "buffer.pkl")
    assert loaded.sampler is loaded.memory.sampler
    for _ in range(5):
        assert loaded.sample(30).ids.tolist() == buffer.sample(30).ids.tolist()


def test_resetting_forgets_priorities() -> None:
    """And a new memory begins."""
    buffer = filled()
    buffer.sample(10)
    buffer.reset()
    stream = steps(Case(VECTOR, ARM, 2), np.random.default_rng(0))
    buffer.add(*next(stream))
    assert set(buffer.sample(2).ids.tolist()) <= {0, 1}


def test_algorithms_take_it() -> None:
    """Without being told of priorities they learn from even draws, in Dict spaces too."""
    task = Task(partial(Wander, dict_space()), "SAC", "MultiInputPolicy", lanes=2)
    model = trained(
        task.model(PrioritizedReplayBuffer, replay_buffer_kwargs={"n_steps": 2 if HAS_STEPS else 1}), learn(80)
    )
    assert model._n_updates > 20
