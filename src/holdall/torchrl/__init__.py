"""TorchRL's replay buffers over a memory: `HoldallStorage` takes the place of LazyTensorStorage.

fields.py says which key of a TensorDict lies where in the memory; storage.py maps TorchRL's positions to transitions.
"""

from holdall.errors import MissingPackageError

try:
    import torchrl  # noqa: F401  what all of this is for
except ImportError as error:
    raise MissingPackageError("holdall.torchrl needs torchrl; run \"pip install 'holdall[torchrl]'\"") from error

from holdall.torchrl.fields import StoredTensor
from holdall.torchrl.storage import HoldallStorage

__all__ = ["HoldallStorage", "StoredTensor"]
