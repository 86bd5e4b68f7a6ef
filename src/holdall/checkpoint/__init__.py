"""Checkpoints: a memory on disk or in an object store, complete or not at all.

    save -> write (a snapshot becomes records) -> directory | object_store (files, then the manifest: the commit)
    load -> manifest (the newest that is whole) -> saved_records (checked when they are read)

A memory over shards saves the same way; it and other numbers of lanes are loaded through `streams`.
"""

from holdall.checkpoint.autosave import Autosave, BackgroundFetch, SaveInterval
from holdall.checkpoint.directory import FileSystem
from holdall.checkpoint.load import Loading, Restored, attached_files, newest, open_reader, restored, restored_state
from holdall.checkpoint.manifest import (
    CheckpointReader,
    Manifest,
    ShardEntry,
    is_remote,
    normalized_url,
    require_whole,
    shard_manifest,
)  # fmt: skip
from holdall.checkpoint.object_store import Objects
from holdall.checkpoint.save import (
    Checkpoint,
    Progress,
    SaveHandle,
    Saver,
    Savers,
    checked_attachments,
    collect_all,
    open_writer,
    shard_url,
)  # fmt: skip
from holdall.checkpoint.saved_memory import SavedMemory
from holdall.checkpoint.saved_records import Attached, RowsKey, damages
from holdall.checkpoint.streams import Streams, WriterRun, runs_of, runs_state, trajectories
from holdall.checkpoint.write import ShardsSnapshot, Snapshot

__all__ = [
    "Attached", "Autosave", "BackgroundFetch", "Checkpoint", "CheckpointReader", "FileSystem", "Loading", "Manifest",
    "Objects", "Progress", "Restored", "RowsKey", "SaveHandle", "SaveInterval", "SavedMemory", "Saver", "Savers",
    "ShardEntry", "ShardsSnapshot",
    "Snapshot", "Streams", "WriterRun", "attached_files", "checked_attachments", "collect_all", "damages", "is_remote",
    "newest", "normalized_url", "open_reader", "open_writer", "require_whole", "restored", "restored_state", "runs_of",
    "runs_state", "shard_manifest", "shard_url", "trajectories",
]  # fmt: skip
