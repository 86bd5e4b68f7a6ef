# /// script
# dependencies = ["holdall[ray,sb3]", "ale-py", "opencv-python-headless"]
# ///
"""Ape-X on Atari: two actors feed two shards, and a DQN learner draws from both by priority.

    python examples/ape_x.py [UPDATES]

Actors send compressed blocks of frames, and the learner decodes them. `limit` has them wait for each other, so that a
transition is drawn 8 times, about, however fast either is.
"""

import sys

import ale_py
import gymnasium as gym
import ray
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3 import DQN
from stable_baselines3.common.logger import configure
from torch.nn import functional

import holdall.ray.sb3


def make_env() -> gym.Env:
    """Make an environment, here for its spaces and in every actor to play in."""
    gym.register_envs(ale_py)
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env), 4)


class ApeX(DQN):
    """DQN whose losses are weighted and whose errors are told."""

    def train(self, gradient_steps: int, batch_size: int = 32) -> None:
        """Learn from batches that were drawn by priority."""
        for _ in range(gradient_steps):
            data = self.replay_buffer.sample(batch_size)
            with torch.no_grad():
                best = self.q_net(data.next_observations).argmax(dim=1, keepdim=True)
                value = self.q_net_target(data.next_observations).gather(1, best)
                target = data.rewards + (1 - data.dones) * self.gamma * value
            current = self.q_net(data.observations).gather(1, data.actions.long())
            loss = (data.weights * functional.smooth_l1_loss(current, target, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.update_priorities(data.ids, (current - target).abs())
        self._n_updates += gradient_steps


updates = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
actors, batch = 2, 32
if not ray.is_initialized():
    ray.init(include_dashboard=False)
model = ApeX(
    "CnnPolicy",
    make_env(),
    buffer_size=100_000,
    replay_buffer_class=holdall.ray.sb3.ReplayBuffer,  # 1
    replay_buffer_kwargs={  # 2
        "shards": 2,
        "sampler": holdall.Prioritized(),
        "limit": holdall.ray.RateLimit(samples_per_insert=8, min_size=256, tolerance=4096),
    },
)
model.set_logger(configure(None, []))
memory = model.replay_buffer.memory
make_act = holdall.ray.sb3.epsilon_greedy(model, actors)
with holdall.ray.collect(make_env, actors, memory, make_act, num_cpus=0.5) as collection:  # 3
    for update in range(updates):
        model.train(1, batch)
        if update % 100 == 0:
            collection.send(holdall.ray.sb3.weights_of(model))
            model.q_net_target.load_state_dict(model.q_net.state_dict())
            print(update, "updates,", sum(each.steps for each in collection.progress()), "steps")
print(memory.report())
memory.close()
ray.shutdown()
