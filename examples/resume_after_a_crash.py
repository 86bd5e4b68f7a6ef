# /// script
# dependencies = ["holdall[sb3]"]
# ///
"""A training that can be killed at any moment: start it again, and it continues from its newest checkpoint.

    python examples/resume_after_a_crash.py [STEPS]

A checkpoint has the model, the optimizer, the generators and the whole replay memory; each save writes only new data.
"""

import sys
from pathlib import Path

from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env

from holdall.sb3 import CheckpointCallback, ReplayBuffer, resume  # 1

RUN = Path("runs/pendulum")
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
env = make_vec_env("Pendulum-v1")
if RUN.exists():
    model = resume(RUN, env)  # 2
    print(f"resumed at step {model.num_timesteps}, with {len(model.replay_buffer.memory):,} transitions")
else:
    model = SAC("MlpPolicy", env, buffer_size=100_000, replay_buffer_class=ReplayBuffer)
callback = CheckpointCallback(max(steps // 4, 1), RUN, keep=2)  # 3
model.learn(steps, callback=callback, reset_num_timesteps=False)
print(f"done at step {model.num_timesteps}")
