"""Checkpoints: a memory on disk or in an object store, complete or not at all.

snapshot -> records in data files -> manifest (the commit) -> collect what nothing names

A memory over shards saves the same way, see `streams`.
"""

from holdall.checkpoint.background import Arrival, Autosave, Checkpoint, Progress, SaveHandle, SaveInterval
from holdall.checkpoint.load import Attached, Restored, restored, restored_state
from holdall.checkpoint.manifest import CheckpointReader, Manifest, ShardEntry, require_whole, shard_manifest
from holdall.checkpoint.save import ShardsSnapshot, Snapshot
from holdall.checkpoint.saver import Saver, Savers, checked_attachments
from holdall.checkpoint.source import (
    Loading,
    attached_files,
    collect_all,
    damages,
    newest,
    normalized_url,
    open_reader,
    open_writer,
    shard_url,
)
from holdall.checkpoint.streams import Streams, WriterRun, runs_of, runs_state, trajectories

__all__ = [
    "Arrival", "Attached", "Autosave", "Checkpoint", "CheckpointReader", "Loading", "Manifest", "Progress",
    "Restored", "SaveHandle", "SaveInterval", "Saver", "Savers", "ShardEntry", "ShardsSnapshot", "Snapshot", "Streams",
    "WriterRun", "attached_files", "checked_attachments", "collect_all", "damages", "newest", "normalized_url",
    "open_reader", "open_writer", "require_whole", "restored", "restored_state", "runs_of", "runs_state",
    "shard_manifest", "shard_url", "trajectories",
]  # fmt: skip
