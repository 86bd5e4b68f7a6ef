# /// script
# dependencies = ["holdall[sb3]"]
# ///
"""Hindsight experience replay: observations are stored once, and goals are replaced when a batch is drawn.

python examples/her_bit_flipping.py [STEPS]
"""

import sys

from stable_baselines3 import DQN
from stable_baselines3.common.envs import BitFlippingEnv

from holdall.sb3 import HerReplayBuffer  # 1

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
model = DQN(
    "MultiInputPolicy",
    BitFlippingEnv(n_bits=8, continuous=False, max_steps=8),
    replay_buffer_class=HerReplayBuffer,  # 2
    replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},  # 3
    learning_starts=64,
    verbose=1,
)
model.learn(steps)
print(model.replay_buffer.memory.report())
