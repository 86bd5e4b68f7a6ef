"""The demo's environment, a rover that looks for a beacon through its camera, and the results of the demo's parts.

In:  accelerations in [-1, 1], one per axis.  Out: a camera image (uint8, HWC) and a state vector (float32).
An episode terminates when the beacon is reached and is truncated after `max_steps`. The same seed gives the same
episodes. Only NumPy and Gymnasium are imported here, because plan measures the memory of this environment. `training`
runs one training in a process of its own. `holdall.cli.demo` runs the whole demo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

VIEW_PX = 84  # Side of the camera image.
FIELD_PX = 256  # Side of the field on which the rover drives.
BEACON_RADIUS_PX = 10
ROVER_RADIUS_PX = 4
TOP_SPEED_PX = 6.0
BEACON_COLOUR = (250, 210, 40)
ROVER_COLOUR = (40, 90, 250)

Observation = dict[str, Any]  # Arrays by the keys "camera" and "state".


class CameraRover(gym.Env[Observation, NDArray[np.float32]]):
    """A rover that drives to a beacon. Its camera is above the rover and shows a third of the field."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 gymnasium declares it this way

    def __init__(self, max_steps: int = 60, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (VIEW_PX, VIEW_PX, 3), np.uint8),
                "state": spaces.Box(-1.0, 1.0, (6,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.max_steps = max_steps
        self.render_mode = render_mode
        self._ground = _make_ground()
        self._position = np.zeros(2)  # Row and column in the field, in pixels.
        self._velocity = np.zeros(2)
        self._last_action = np.zeros(2)
        self._beacon = np.zeros(2)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Place the rover and the beacon at random, at some distance from each other."""
        super().reset(seed=seed, options=options)
        self._position = self.np_random.uniform(0.3, 0.7, 2) * FIELD_PX
        angle = self.np_random.uniform(0.0, 2.0 * np.pi)
        distance_px = self.np_random.uniform(20.0, 60.0)
        self._beacon = self._position + distance_px * np.array([np.sin(angle), np.cos(angle)])
        self._velocity = np.zeros(2)
        self._last_action = np.zeros(2)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Accelerate and move. The reward decreases with the distance to the beacon."""
        self._last_action = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self._velocity = np.clip(0.9 * self._velocity + self._last_action, -TOP_SPEED_PX, TOP_SPEED_PX)
        moved = self._position + self._velocity
        self._position = np.clip(moved, 0.0, FIELD_PX - 1.0)
        self._velocity[moved != self._position] = 0.0  # The fence stops the rover.
        self._steps += 1

        distance_px = float(np.hypot(*(self._beacon - self._position)))
        terminated = distance_px < BEACON_RADIUS_PX
        truncated = not terminated and self._steps >= self.max_steps
        reward = 1.0 if terminated else -distance_px / FIELD_PX
        return self._observe(), reward, terminated, truncated, {}

    def render(self) -> NDArray[np.uint8]:
        """Return the camera image."""
        return self._photograph()

    def get_state(self) -> list[list[float]]:
        """Return the state of the rover and the beacon, for a checkpoint in the middle of an episode."""
        state = (self._position, self._velocity, self._last_action, self._beacon, np.array([self._steps]))
        return [part.tolist() for part in state]

    def set_state(self, state: list[list[float]]) -> None:
        """Restore the state that `get_state` returned."""
        position, velocity, last_action, beacon, steps = state
        self._position = np.array(position)
        self._velocity = np.array(velocity)
        self._last_action = np.array(last_action)
        self._beacon = np.array(beacon)
        self._steps = int(steps[0])

    def _observe(self) -> Observation:
        state = (self._position / (FIELD_PX / 2) - 1.0, self._velocity / TOP_SPEED_PX, self._last_action)
        return {"camera": self._photograph(), "state": np.concatenate(state).astype(np.float32)}

    def _photograph(self) -> NDArray[np.uint8]:
        row, column = self._position.astype(int)
        # The ground is padded by half a view, so the corner of the view has the position of the rover in the field.
        view = self._ground[row : row + VIEW_PX, column : column + VIEW_PX].copy()
        centre = VIEW_PX // 2
        beacon_row, beacon_column = self._beacon.astype(int) - (row, column) + centre
        _paint_disc(view, int(beacon_row), int(beacon_column), BEACON_RADIUS_PX, BEACON_COLOUR)
        _paint_disc(view, centre, centre, ROVER_RADIUS_PX, ROVER_COLOUR)
        return view


def _make_ground() -> NDArray[np.uint8]:
    """Return the field, which is equal in every run: coarse hills with a fine grain, dark outside the fence."""
    rng = np.random.default_rng(0)
    # The axes are rows, columns and channels.
    hills = np.kron(rng.integers(60, 160, (16, 16, 3)), np.ones((FIELD_PX // 16, FIELD_PX // 16, 1), np.int64))
    grain = rng.integers(-12, 13, (FIELD_PX, FIELD_PX, 1))
    margin = VIEW_PX // 2
    field = np.clip(hills + grain, 0, 255).astype(np.uint8)
    return np.pad(field, ((margin, margin), (margin, margin), (0, 0)), constant_values=20)


def _paint_disc(view: NDArray[np.uint8], row: int, column: int, radius: int, colour: tuple[int, int, int]) -> None:
    """Paint the part of a disc that is inside `view`."""
    top = max(row - radius, 0)
    left = max(column - radius, 0)
    bottom = min(row + radius + 1, VIEW_PX)
    right = min(column + radius + 1, VIEW_PX)
    if top >= bottom or left >= right:
        return
    rows = np.arange(top - row, bottom - row)[:, None]
    columns = np.arange(left - column, right - column)
    view[top:bottom, left:right][rows**2 + columns**2 <= radius**2] = colour


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One training of the demo: some steps with updates, and then random actions that fill the buffer."""

    buffer: str
    steps: int
    transitions: int
    """Transitions of random actions, in addition to `steps`."""
    checkpoint: str = ""
    """Folder of the checkpoint that is saved half-way, or that is resumed. Empty: no checkpoint."""
    record: str = ""
    """File of the watch's record. Empty: the training is not watched."""
    is_resumed: bool = False
    limit_bytes: int | None = None
    """Memory limit that the page of the record shows."""
    buffer_kwargs: dict[str, Any] | None = None
    """Settings of a new buffer. A resumed buffer keeps its own."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Figures of one training, measured in its own process."""

    buffer: str
    bytes_per_transition: float  # Growth of the process's unique memory per transition, while the buffer was filled.
    peak_bytes: int  # Largest resident set of the process.
    steps_per_second: float  # Median over training steps, each with an environment step and an update.
    transitions: int  # Transitions held at the end.
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointFingerprint:
    """A checkpoint, and a hash of the batches that its memory draws next."""

    step: int
    batches_sha256: str
    seconds: float  # Seconds to save or to load.
    checkpoint_bytes: int
