"""TrajectoryBuffer on the CPU: every update gives the bits of torch.cat, in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdall.elegantrl import TrajectoryBuffer
from holdall.errors import ArgumentError


def make_trajectories(lengths: list[int], seed: int = 0, state: tuple[int, ...] = (7,)) -> list[list[torch.Tensor]]:
    """Return trajectories as ElegantRL's workers do: states, rewards, masks, actions, noises."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn((steps, *state), generator=generator),
            torch.randn((steps,), generator=generator),
            torch.rand((steps,), generator=generator) < 0.9,
            torch.randint(0, 5, (steps, 1), generator=generator),
            torch.randn((steps, 3), generator=generator),
        ]
        for steps in lengths
    ]


def concatenate(traj_list: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], int, float]:
    """Concatenate trajectories as ElegantRL's own list does."""
    items = [torch.cat(item, dim=0) for item in map(list, zip(*traj_list, strict=True))]
    return items, items[1].shape[0], items[1].mean().item()


@pytest.mark.parametrize("lengths", [[5], [4, 9, 1], [3, 0, 2], [200, 300]])
def test_an_update_gives_the_bits_of_torch_cat(lengths: list[int]) -> None:
    buffer = TrajectoryBuffer("cpu")
    given = make_trajectories(lengths)
    expected, steps, mean = concatenate(given)
    assert buffer.update_buffer(given) == (steps, mean)
    assert len(buffer) == 5
    assert all(torch.equal(ours, plain) for ours, plain in zip(buffer, expected, strict=True))
    assert [tensor.dtype for tensor in buffer] == [tensor.dtype for tensor in expected]
    states, rewards, masks, actions, noises = buffer
    assert states.shape == (sum(lengths), 7)
    assert all(tensor.is_contiguous() for tensor in (rewards, masks, actions, noises))


def test_updates_that_fit_stay_in_the_same_memory() -> None:
    """Updates of the same total length keep the tensors, and shorter ones keep the memory."""
    buffer = TrajectoryBuffer("cpu")
    buffer.update_buffer(make_trajectories([40, 60]))
    tensors = list(buffer)
    place = buffer[0].data_ptr()
    held = buffer.nbytes
    for seed, lengths in enumerate([[40, 60], [60, 40], [10, 10, 80]]):
        given = make_trajectories(lengths, seed)
        buffer.update_buffer(given)
        assert all(ours is before for ours, before in zip(buffer, tensors, strict=True))
        assert torch.equal(buffer[4], concatenate(given)[0][4])
    buffer.update_buffer(make_trajectories([30, 20]))
    assert (buffer[0].data_ptr(), buffer.nbytes) == (place, held)


def test_longer_trajectories_grow_the_memory_geometrically() -> None:
    buffer = TrajectoryBuffer("cpu")
    sizes = set()
    for steps in range(100, 1_000, 10):
        given = make_trajectories([steps])
        buffer.update_buffer(given)
        assert torch.equal(buffer[0], given[0][0])
        sizes.add(buffer.nbytes)
    assert len(sizes) <= 8


def test_the_first_update_takes_no_more_than_its_tensors() -> None:
    buffer = TrajectoryBuffer("cpu")
    given = make_trajectories([1_000, 24], state=(4, 12))
    buffer.update_buffer(given)
    assert buffer.nbytes <= sum(tensor.nbytes for tensor in buffer) + 5 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: [], "empty"),
        (lambda given: [given[0], given[1][:3]], r"\[5, 3\] items"),
        (lambda given: [[tensor] for tensor, *_ in given], "states and rewards"),
        (lambda given: [given[0], [given[1][0].double(), *given[1][1:]]], r"traj_list\[1\]\[0\]"),
        (lambda given: [given[0], [given[1][0][:, :3], *given[1][1:]]], r"shape \(9, 3\)"),
        (lambda given: [given[0], [given[1][0].to("meta"), *given[1][1:]]], "is on meta"),
    ],
)
def test_trajectories_that_do_not_fit_together_are_refused(change: Any, message: str) -> None:
    buffer = TrajectoryBuffer("cpu")
    given = make_trajectories([4, 9])
    buffer.update_buffer(given)
    with pytest.raises(ArgumentError, match=message):
        buffer.update_buffer(change(given))
    assert torch.equal(buffer[0], concatenate(given)[0][0])


def test_tensors_that_carry_gradients_are_copied_without_them() -> None:
    buffer = TrajectoryBuffer("cpu")
    given = make_trajectories([4, 5])
    for trajectory in given:
        trajectory[0].requires_grad_()
    buffer.update_buffer(given)
    assert torch.equal(buffer[0], concatenate(given)[0][0])
    assert not buffer[0].requires_grad


@pytest.mark.parametrize("device", ["abacus", "cuda:99" if not torch.cuda.is_available() else "abacus"])
def test_unknown_and_missing_devices_are_refused(device: str) -> None:
    with pytest.raises(ArgumentError, match="device"):
        TrajectoryBuffer(device)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "traj_list is a NoneType"),
        ([None], "traj_list is a list that holds no trajectories"),
        ([[np.zeros((4, 2)), np.zeros(4)]], r"traj_list\[0\]\[0\] is a ndarray, not a tensor"),
    ],
)
def test_values_that_are_not_trajectories_are_refused_and_change_nothing(given: Any, says: str) -> None:
    buffer = TrajectoryBuffer("cpu")
    buffer.update_buffer([[torch.ones(4, 2), torch.ones(4)]])
    with pytest.raises(ArgumentError, match=says):
        buffer.update_buffer(given)
    assert [tensor.sum().item() for tensor in buffer] == [8, 4]


def test_rewards_may_be_whole_numbers() -> None:
    buffer = TrajectoryBuffer("cpu")
    assert buffer.update_buffer([[torch.ones(4, 2), torch.tensor([1, 2, 3, 4])]]) == (4, 2.5)
    assert buffer[1].tolist() == [1, 2, 3, 4]
