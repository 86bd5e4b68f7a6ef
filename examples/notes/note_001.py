"""A hand-written buffer of market windows. Saving it took more memory than there was, so saving was switched off.

`holdall lint` reads this file. It has the mistakes of the note, and is not meant to be run.
"""

import gzip
import pickle
import threading
from collections import deque

BUFFER_SIZE = 50_000


class Trainer:
    def __init__(self, env, agent):
        self.env = env
        self.agent = agent
        self.replay_buffer = deque(maxlen=BUFFER_SIZE)

    def collect(self, steps):
        state, _ = self.env.reset()
        for _ in range(steps):
            action = self.agent.act(state)
            next_state, reward, terminated, truncated, _ = self.env.step(action)
            self.replay_buffer.append((state, action, reward, next_state, terminated or truncated))
            state = next_state

    def save_buffer(self, path):
        with gzip.open(path, "wb") as file:
            pickle.dump(self.replay_buffer, file)

    def upload_buffer(self, bucket):
        bucket.put(gzip.compress(pickle.dumps(self.replay_buffer)))

    def save_in_background(self, path):
        threading.Thread(target=self.save_buffer, args=(path,), daemon=True).start()
