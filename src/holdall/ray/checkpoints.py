"""Saving a memory over shards, in the background of whoever asked for it.

In:  the shards.  Out: a checkpoint that names what each of them wrote.
Invariant: the manifest is written last; a save that fails leaves the checkpoints before as they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from holdall.checkpoint.handle import Checkpoint, SaveHandle
from holdall.errors import CheckpointError, HoldallError
from holdall.ray.saving import collect, write_manifest


def save(url: str, shards: Mapping[int, Any], words: Mapping[str, Any], keep: int) -> SaveHandle:
    """Have every shard write what is new, and then the manifest.

    Args:
        words: What the manifest says besides.
    """
    calls = {number: shard.save.remote(url) for number, shard in shards.items()}
    handle = SaveHandle(url, lambda: None)
    work = (handle, url, calls, words, keep)
    threading.Thread(target=_finish, args=work, name="holdall-save", daemon=True).start()
    return handle


def _finish(handle: SaveHandle, url: str, calls: Mapping[int, Any], words: Mapping[str, Any], keep: int) -> None:
    began = time.monotonic()
    try:
        written = {str(number): ray.get(call) for number, call in calls.items()}
        number = write_manifest(url, {**words, "shards": written})
        collect(url, keep)
    except HoldallError as error:
        handle.fail(error)
    except Exception as error:
        failed = CheckpointError(f"the checkpoint at {url} is not complete ({error}); the one before is; save again")
        failed.__cause__ = error
        handle.fail(failed)
    else:
        nbytes = sum(each["bytes_written"] for each in written.values())
        transitions = sum(each["transitions"] for each in written.values())
        handle.succeed(Checkpoint(url, number, nbytes, nbytes, transitions, time.monotonic() - began))
