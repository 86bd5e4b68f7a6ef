"""`PrioritizedReplayBuffer` draws by priority, and returns the weights of the rows."""

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

from .comparison import Task, make_learning, train
from .environments import ARM, VECTOR, Wander, make_dict_space
from .pair import Case, assert_same_batch, call_seeded, make_steps

HAS_STEPS = hasattr(buffers, "NStepReplayBuffer")  # From 2.7 on.


def fill(kind: Any = PrioritizedReplayBuffer, space: Any = VECTOR, lanes: int = 2, **how: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3 also seeds it before it makes a buffer.
    buffer = kind(80, space, ARM, device="cpu", n_envs=lanes, **how)
    stream = make_steps(Case(space, ARM, lanes), np.random.default_rng(0))
    for _ in range(60):
        buffer.add(*next(stream))
    return buffer


@pytest.mark.parametrize("space", [VECTOR, make_dict_space((3, 40, 40))], ids=["box", "dict"])
@pytest.mark.parametrize("n_steps", [1, 3] if HAS_STEPS else [1])
def test_rows_are_those_of_the_plain_buffer(space: Any, n_steps: int) -> None:
    """The plain buffer has the same rows, and draws others."""
    buffer = fill(space=space, n_steps=n_steps)
    plain = fill(ReplayBuffer, space, n_steps=n_steps)
    samples = buffer.sample(50)
    expected = plain._gather_samples(samples.ids, None)
    assert_same_batch(expected, type(expected)(*samples[: len(expected)]))


def test_priorities_decide_which_rows_are_drawn_and_how_they_are_weighted() -> None:
    """The TD errors have the shape (batch, 1) and a gradient, as those of a network."""
    buffer = fill(alpha=1.0, beta=1.0)
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
    """The seed of the memory is drawn from Stable-Baselines3's generator."""
    drawn = [call_seeded(7, fill).sample(40).ids.tolist() for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_loaded_buffer_draws_by_the_saved_priorities(tmp_path: Path) -> None:
    """It draws the batches that the saved buffer draws."""
    buffer = fill()
    buffer.update_priorities(buffer.sample(60).ids, np.linspace(0, 5, 60))
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    loaded = load_from_pkl(tmp_path / "buffer.pkl")
    assert loaded.sampler is loaded.memory.sampler
    for _ in range(5):
        assert loaded.sample(30).ids.tolist() == buffer.sample(30).ids.tolist()


def test_resetting_forgets_priorities() -> None:
    """The buffer has a new memory afterwards."""
    buffer = fill()
    buffer.sample(10)
    buffer.reset()
    stream = make_steps(Case(VECTOR, ARM, 2), np.random.default_rng(0))
    buffer.add(*next(stream))
    assert set(buffer.sample(2).ids.tolist()) <= {0, 1}


def test_an_algorithm_without_priorities_can_train_from_it() -> None:
    """Without an update of priorities, all rows are drawn equally often. The observations are Dicts."""
    task = Task(partial(Wander, make_dict_space()), "SAC", "MultiInputPolicy", lanes=2)
    model = train(
        task.make_model(PrioritizedReplayBuffer, replay_buffer_kwargs={"n_steps": 2 if HAS_STEPS else 1}),
        make_learning(80),
    )
    assert model._n_updates > 20
