"""LeRobot's replay buffer over a memory: exact images as 8-bit words, exact next states, checkpoints that resume.

replay_buffer.py    the buffer
layout.py           the fields of the memory in which transitions are stored
images.py           float32 images as 8-bit words
slot_tensor.py      a field that is read when it is indexed
drawn_batches.py    batches that iterators draw ahead
datasets.py         conversion of LeRobot's datasets
learner.py          LeRobot's learner with this buffer: `python -m holdall.lerobot --config_path ...`
"""

from holdall.errors import MissingPackageError

try:
    import torch as _torch  # noqa: F401  All modules of this package need torch.
except ImportError as error:
    raise MissingPackageError("holdall.lerobot needs torch; run \"pip install 'holdall[torch]'\"") from error

from holdall.lerobot.drawn_batches import BatchTransition
from holdall.lerobot.learner import install
from holdall.lerobot.replay_buffer import ReplayBuffer

__all__ = ["BatchTransition", "ReplayBuffer", "install"]
