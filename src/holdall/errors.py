"""Every error that holdall raises on purpose.

    HoldallError
    ├── ArgumentError (ValueError)       a value that an argument cannot take
    ├── SpaceError (TypeError)           a space that cannot be stored bit for bit
    ├── TransitionIdError (IndexError)   an id that was never added, is evicted, or is not valid
    ├── ClosedError (RuntimeError)       use after close()
    ├── DamageError (OSError)            stored bytes that do not make sense, or cannot be read
    │   └── NewerFormatError             they make sense to a later version of holdall
    ├── SpillError (OSError)             a disk tier that cannot be written to
    ├── CheckpointError (OSError)        a checkpoint that cannot be written, or is not there
    │   ├── BlobMissingError             a blob that does not exist
    │   └── FencedError                  another writer has the place
    │       └── LockedError              and had it before this one came
    ├── ShardError (RuntimeError)        a shard that does not answer, or memory that cannot be shared out
    ├── WatchError (OSError)             a process that cannot be watched
    └── MissingPackageError (ImportError) an optional package that this call needs

Each message names the argument, its value, the rule and the remedy.
"""


class HoldallError(Exception):
    """Base of all errors raised by holdall."""


class ArgumentError(HoldallError, ValueError):
    """An argument has a value, shape or dtype that it cannot take."""


class SpaceError(HoldallError, TypeError):
    """A space, or a leaf of one, cannot be stored bit for bit."""


class TransitionIdError(HoldallError, IndexError):
    """A transition id names nothing that is held."""


class ClosedError(HoldallError, RuntimeError):
    """The memory was closed."""


class DamageError(HoldallError, OSError):
    """Stored bytes do not make sense; nothing of them was returned."""


class NewerFormatError(DamageError):
    """Stored bytes are of a format that this version does not know; they are left as they are."""


class SpillError(HoldallError, OSError):
    """The disk tier cannot be written to."""


class CheckpointError(HoldallError, OSError):
    """A checkpoint could not be written or found; the one before is as it was."""


class FencedError(CheckpointError):
    """Another writer has the place that a checkpoint was to be written to."""


class LockedError(FencedError):
    """Another writer holds the lock of a place."""


class BlobMissingError(CheckpointError):
    """A blob does not exist."""


class ShardError(HoldallError, RuntimeError):
    """A shard is needed and does not answer, or refused what was sent to it."""


class WatchError(HoldallError, OSError):
    """A process cannot be read, or what a watch needs cannot be written."""


class MissingPackageError(HoldallError, ImportError):
    """An optional package is needed for this call and is not installed."""
