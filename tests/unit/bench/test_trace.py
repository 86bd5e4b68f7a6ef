from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.errors import ArgumentError
from holdall.tools.bench.trace import Trace

from .traces import LENGTHS, frame, write


def test_a_trace_plays_the_recorded_steps_and_the_final_observation_of_every_episode(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz")
    trace = Trace.load(tmp_path / "trace.npz")
    steps = list(trace.steps())
    assert len(steps) == len(trace) == sum(LENGTHS)
    number = 0
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            seen = steps[sum(LENGTHS[:episode]) + step]
            for got, at in ((seen.obs, number), (seen.next_obs, number + 1)):
                image = np.moveaxis(frame(at, is_dict=True)["image"], -1, 0)
                assert np.array_equal(got["image"], image[None])
                assert np.array_equal(got["speed"], frame(at, is_dict=True)["speed"][None])
            ends = step == length - 1
            assert seen.terminated.tolist() == [ends and episode % 2 == 0]
            assert seen.truncated.tolist() == [ends and episode % 2 == 1]
            assert seen.reward.tolist() == [number + 1]
            number += 1
        number += 1


def test_stacked_frames_repeat_the_first_one_after_a_reset(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz", is_dict=False, stack=4)
    trace = Trace.load(tmp_path / "trace.npz")
    assert trace.observation_space.shape == (4, 6, 6)
    steps = list(trace.steps())
    assert [int(screen[1, 1]) for screen in steps[0].obs[0]] == [0, 0, 0, 0]
    assert [int(screen[1, 1]) for screen in steps[4].next_obs[0]] == [2, 3, 4, 5]
    assert [int(screen[1, 1]) for screen in steps[5].obs[0]] == [6, 6, 6, 6]


def test_spaces_are_those_of_the_arrays(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz")
    trace = Trace.load(tmp_path / "trace.npz")
    assert trace.observation_space["image"].shape == (3, 6, 6)  # type: ignore[index]  # a Dict
    assert trace.action_space.n == 4  # type: ignore[attr-defined]  # a Discrete


@pytest.mark.parametrize(
    "broken",
    [
        {"ep": np.array([[0, 99]])},
        {"ep": np.zeros((0, 2), np.int64)},
        {"ep": np.array([[-1, 12]])},
        {"ep": np.array([3, 4])},
        {"reward": np.zeros(3)},
        {"meta": np.array("nonsense")},
        {"meta": np.array('{"stack": 4}')},
        {"meta": np.array('{"stack": 0}')},
        {"f_image": np.zeros((2, 6, 6, 3), np.uint8)},
        {"f_image": np.array(["a"] * 40)},
        {"action": None},
    ],
)
def test_a_file_whose_parts_do_not_fit_together_is_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    write(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as whole:
        arrays = {name: whole[name] for name in whole.files} | broken
    np.savez(tmp_path / "broken.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ArgumentError, match="is not a valid trace"):
        Trace.load(tmp_path / "broken.npz")


@pytest.mark.parametrize("content", [None, b"", b"not a zip"])
def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot be read"):
        Trace.load(tmp_path / "trace.npz")


def test_objects_in_a_file_are_never_unpickled(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as whole:
        arrays: dict[str, Any] = {name: whole[name] for name in whole.files}
    arrays["f_image"] = np.array([object()] * 40)
    np.savez(tmp_path / "evil.npz", **arrays)
    with pytest.raises(ArgumentError, match="cannot be read"):
        Trace.load(tmp_path / "evil.npz")
