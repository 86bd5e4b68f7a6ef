"""Training from compressed memory gives the weights of Stable-Baselines3's own buffer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from holdall.sb3 import ReplayBuffer
from holdall.store.tuning import Tuning

from .comparison import Task, assert_same_learning, make_learning, train
from .environments import ARM, FRAME_PX, STACK, Stacked, Wander, make_dict_space

pytestmark = pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer:UserWarning")


class Film(Stacked):
    """`Stacked` with frames that can be compressed, because they are striped."""

    def _look(self) -> NDArray[np.uint8]:
        stripes = self.np_random.integers(0, 256, (FRAME_PX, 1, 1), np.uint8)
        newest = np.repeat(stripes, FRAME_PX, axis=1)
        if self.steps == 0:
            self._frames = np.repeat(newest, STACK, axis=-1)
        else:
            self._frames = np.concatenate([self._frames[..., 1:], newest], axis=-1)
        return self._frames


SMALL_SEGMENTS = Tuning(block_bytes=8_000)


def assert_same_from_compressed(task: Task, field: str) -> ReplayBuffer:
    """Train with either buffer. In the second half, ours draws from compressed segments."""
    compressed: list[int] = []

    def wait_for_compression(model: OffPolicyAlgorithm) -> None:
        if isinstance(model.replay_buffer, ReplayBuffer):
            model.replay_buffer.memory.store.wait_idle()
            reports = {report.name: report for report in model.replay_buffer.report().fields}
            compressed.append(reports[field].compressed_bytes)

    acts = (
        make_learning(110),
        wait_for_compression,
        make_learning(110, reset_num_timesteps=False),
        wait_for_compression,
    )
    kept: dict[str, Any] = {"replay_buffer_kwargs": {"budget": None, "prefer": "memory", "_tuning": SMALL_SEGMENTS}}
    plain = train(task.make_model(None), *acts)
    ours = train(task.make_model(ReplayBuffer, **kept), *acts)
    assert plain._n_updates > 50, "the training was too short for a comparison"
    assert all(compressed), compressed
    assert_same_learning(plain, ours)
    assert isinstance(ours.replay_buffer, ReplayBuffer)
    return ours.replay_buffer


def test_dqn_learns_the_same_from_compressed_frame_stacks() -> None:
    """The stacks are along the last axis, and Stable-Baselines3 transposes them."""
    buffer = assert_same_from_compressed(Task(Film, "DQN", "CnnPolicy"), "obs")
    report = buffer.report()
    assert report.failure == ""
    (obs,) = [field for field in report.fields if field.name == "obs"]
    assert obs.slice_bytes < obs.plain_bytes / 8


@pytest.mark.parametrize("lanes", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_sac_learns_the_same_from_compressed_cameras(lanes: int) -> None:
    """The Dict observations have a large image, a vector and a discrete key."""
    environment = partial(Wander, make_dict_space((40, 40, 3)), ARM)
    task = Task(environment, "SAC", "MultiInputPolicy", lanes=lanes)
    assert assert_same_from_compressed(task, "obs.camera").report().failure == ""


def test_ddpg_learns_the_same_while_segments_are_compressed_and_evicted() -> None:
    """The buffer becomes full, so blocks are evicted while others are compressed."""
    environment = partial(Wander, make_dict_space((40, 40, 3)), ARM)
    assert_same_from_compressed(Task(environment, "DDPG", "MultiInputPolicy", buffer_size=70), "obs.camera")
