import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from holdall.tools.demo import FIELD_PX, VIEW_PX, CameraRover, Observation


def drive(seed: int, steps: int) -> list[tuple[Observation, float, bool, bool]]:
    rover = CameraRover()
    rover.action_space.seed(seed)
    seen = [(rover.reset(seed=seed)[0], 0.0, False, False)]
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = rover.step(rover.action_space.sample())
        seen.append((observation, reward, terminated, truncated))
        if terminated or truncated:
            seen.append((rover.reset()[0], 0.0, False, False))
    return seen


def test_the_rover_passes_the_checks_of_gymnasium() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(CameraRover(), skip_render_check=True)  # The check of renderings needs a registered environment.


def test_one_seed_gives_the_same_episodes() -> None:
    for first, second in zip(drive(3, 200), drive(3, 200), strict=True):
        assert first[0]["camera"].tobytes() == second[0]["camera"].tobytes()
        assert first[0]["state"].tobytes() == second[0]["state"].tobytes()
        assert first[1:] == second[1:]


def test_two_seeds_give_different_episodes() -> None:
    first = drive(3, 5)
    second = drive(4, 5)
    assert any(a[0]["state"].tobytes() != b[0]["state"].tobytes() for a, b in zip(first, second, strict=True))


def test_random_actions_lead_to_both_kinds_of_endings() -> None:
    seen = drive(0, 6_000)
    assert any(terminated for _, _, terminated, _ in seen)
    assert any(truncated for _, _, _, truncated in seen)
    assert not any(terminated and truncated for _, _, terminated, truncated in seen)


def test_driving_to_the_beacon_terminates_with_a_reward() -> None:
    rover = CameraRover()
    rover.reset(seed=1)
    terminated = truncated = False
    reward = 0.0
    while not (terminated or truncated):
        position, _, _, beacon, _ = rover.get_state()
        towards = np.subtract(beacon, position)
        _, reward, terminated, truncated, _ = rover.step((towards / np.abs(towards).max() * 0.5).astype(np.float32))
    assert terminated
    assert reward == 1.0


@pytest.mark.parametrize("corner", [(0.0, 0.0), (FIELD_PX - 1.0, FIELD_PX - 1.0), (0.0, FIELD_PX - 1.0)])
def test_the_view_keeps_its_shape_at_the_fence(corner: tuple[float, float]) -> None:
    rover = CameraRover()
    rover.reset(seed=1)
    _, *others = rover.get_state()
    rover.set_state([list(corner), *others])
    assert rover.render().shape == (VIEW_PX, VIEW_PX, 3)


def test_a_returned_observation_does_not_change_later() -> None:
    rover = CameraRover()
    first, _ = rover.reset(seed=1)
    before = first["camera"].copy()
    rover.step(np.ones(2, np.float32))
    assert np.array_equal(first["camera"], before)


def test_a_rover_with_a_restored_state_drives_the_same_way() -> None:
    first = CameraRover()
    second = CameraRover()
    first.reset(seed=3)
    second.reset(seed=4)
    for _ in range(7):
        first.step(np.array([0.3, -1.0], np.float32))
    second.set_state(first.get_state())
    for _ in range(60):
        one, other = (rover.step(np.array([-0.2, 0.9], np.float32)) for rover in (first, second))
        assert np.array_equal(one[0]["camera"], other[0]["camera"])
        assert one[1:4] == other[1:4]
