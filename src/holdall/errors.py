"""Every error that holdall raises on purpose.

    HoldallError
    ├── ArgumentError (ValueError)       a value that an argument cannot take
    ├── SpaceError (TypeError)           a space that cannot be stored bit for bit
    ├── TransitionIdError (IndexError)   an id that was never added, is evicted, or is not valid
    ├── ClosedError (RuntimeError)       use after close()
    ├── DamageError (OSError)            stored bytes that are damaged or cannot be read
    │   └── NewerFormatError             stored bytes in the format of a later version of holdall
    ├── CheckpointError (OSError)        a checkpoint that cannot be written, or does not exist
    │   ├── BlobMissingError             a blob that does not exist
    │   └── FencedError                  another writer took over the place of the checkpoint
    │       └── LockedError              another writer already holds the lock of the place
    ├── ShardError (RuntimeError)        a shard that does not answer, or memory that cannot be shared
    ├── WatchError (OSError)             a process that cannot be watched
    └── MissingPackageError (ImportError) an optional package that this call needs

Each message names the argument, its value, the rule and the remedy.
"""


class HoldallError(Exception):
    """Base class of all errors that holdall raises on purpose."""


class ArgumentError(HoldallError, ValueError):
    """An argument has a value, shape or dtype that it cannot take."""


class SpaceError(HoldallError, TypeError):
    """A space, or a leaf of one, cannot be stored bit for bit."""


class TransitionIdError(HoldallError, IndexError):
    """No transition with this id is held."""


class ClosedError(HoldallError, RuntimeError):
    """The memory was closed."""


class _StorageError(HoldallError, OSError):
    """Base class of errors that may have an `errno`."""

    def __str__(self) -> str:
        """Return the message without the `errno`, which `OSError` would put before it."""
        return self.strerror or super().__str__()


class DamageError(_StorageError):
    """Stored bytes are damaged. None of them was returned."""


class NewerFormatError(DamageError):
    """Stored bytes have a format that this version does not know. They were not changed."""


class CheckpointError(_StorageError):
    """A checkpoint could not be written or found. Earlier checkpoints were not changed."""


class FencedError(CheckpointError):
    """Another writer took over the place of the checkpoint."""


class LockedError(FencedError):
    """Another writer holds the lock of a place."""


class BlobMissingError(CheckpointError):
    """A blob does not exist."""


class ShardError(HoldallError, RuntimeError):
    """A shard does not answer, or it refused a call."""


class WatchError(_StorageError):
    """A process cannot be read, or a file of the watch cannot be written."""


class MissingPackageError(HoldallError, ImportError):
    """This call needs an optional package that is not installed."""
