# /// script
# dependencies = ["holdall[sb3]"]
# ///
"""SAC on a camera and a vector (Dict observations): every frame is stored once, and the weights are the same.

    python examples/sac_camera_dict.py [STEPS]

With Stable-Baselines3's own buffer this capacity would take 4.2 GB.
"""

import sys

from stable_baselines3 import SAC

from holdall.sb3 import ReplayBuffer  # 1
from holdall.tools.demo import CameraRover

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
model = SAC(
    "MultiInputPolicy",
    CameraRover(),
    buffer_size=100_000,
    replay_buffer_class=ReplayBuffer,  # 2
    learning_starts=100,
    batch_size=64,
    policy_kwargs={"net_arch": [64, 64]},
    verbose=1,
)
model.learn(steps)
print(model.replay_buffer.memory.report())  # 3
