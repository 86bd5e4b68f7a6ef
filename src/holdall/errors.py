"""Every error that holdall raises on purpose.

    HoldallError
    ├── ArgumentError (ValueError)       a value that an argument cannot take
    ├── SpaceError (TypeError)           a space that cannot be stored bit for bit
    ├── TransitionIdError (IndexError)   an id that was never added, is evicted, or is not valid
    ├── ClosedError (RuntimeError)       use after close()
    ├── DamageError (OSError)            stored bytes that do not make sense
    ├── SpillError (OSError)             a disk tier that cannot be written to
    ├── CheckpointError (OSError)        a checkpoint that cannot be written, or is not there
    │   └── FencedError                  another writer has the place
class WatchError(HoldallError, OSError):
    """A process cannot be read, or what a watch needs cannot be written."""
