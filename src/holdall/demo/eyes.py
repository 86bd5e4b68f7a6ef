"""The demo's network: enough to learn from a camera and a vector, quick on two cores."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

PATCH_PX = 12  # what the network sees at once


class SmallEyes(BaseFeaturesExtractor):
    """One wide convolution and the state vector."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=32 + observation_space["state"].shape[0])
        channels, height, width = observation_space["camera"].shape  # SB3 has moved the channels to the front
        patches = (height // PATCH_PX) * (width // PATCH_PX)
        self.look = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 8, kernel_size=PATCH_PX, stride=PATCH_PX),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * patches, 32),
            torch.nn.ReLU(),
        )

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Join what the camera shows with the state."""
        return torch.cat([self.look(observations["camera"]), observations["state"]], dim=1)
