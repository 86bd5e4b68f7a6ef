"""LeRobot's replay buffer over a memory: exact images as 8-bit words, right next states, checkpoints that resume.

replay_buffer.py has the buffer, drawn_batches.py the batches that iterators draw ahead, images.py stores float32 images
as 8-bit words, datasets.py converts LeRobot's datasets, and learner.py makes LeRobot's learner use the buffer:
`python -m holdall.lerobot --config_path ...`.
"""

from holdall.errors import MissingPackageError

try:
    import torch as _torch  # noqa: F401  It is needed by all modules of this package.
except ImportError as error:
    raise MissingPackageError("holdall.lerobot needs torch; run \"pip install 'holdall[torch]'\"") from error

from holdall.lerobot.drawn_batches import BatchTransition
from holdall.lerobot.learner import install
from holdall.lerobot.replay_buffer import ReplayBuffer

__all__ = ["BatchTransition", "ReplayBuffer", "install"]
