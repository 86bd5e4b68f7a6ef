"""Ways to turn trajectories into tensors that were meant to save memory.

`holdall lint` reads this file. It has the mistakes of the note, and is not meant to be run.
"""

import gc

import torch


class PreallocatedBuffer(list):
    def __init__(self, device):
        super().__init__()
        self.device = device
        self._preallocated = None
        self._initialized = False

    def update_buffer(self, trajectories):
        joined = []
        for index in range(len(trajectories[0])):
            on_device = [trajectory[index].to(self.device, non_blocking=True) for trajectory in trajectories]
            joined.append(torch.cat(on_device, dim=0))
        self.clear()
        self.extend(joined)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gc.collect()


class ViewBuffer(list):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def update_buffer(self, trajectories):
        joined = []
        for index in range(len(trajectories[0])):
            items = torch.stack([trajectory[index] for trajectory in trajectories])
            joined.append(items.reshape(-1, *items.shape[2:]).to(self.device))
        self.clear()
        self.extend(joined)
