"""Checkpoints: a memory on disk or in an object store, complete or not at all.

    save -> write (a snapshot becomes records) -> directory | object_store (files, then the manifest: the commit)
    load -> manifest (the newest that is whole) -> saved_records (checked when they are read)

A memory over shards saves the same way; it and other numbers of lanes are loaded through `streams`.
"""

from holdall.checkpoint.directory import open_reader
from holdall.checkpoint.file_system import CheckpointReader, FileObjects, FileSystem, Slots, objects_at
from holdall.checkpoint.load import Loading, Restored, attached_files, newest, restored, restored_state
from holdall.checkpoint.manifest import Manifest, is_remote, normalized_url, require_whole
from holdall.checkpoint.objects import Objects
from holdall.checkpoint.save import Checkpoint, Progress, SaveHandle, Savers, checked_save, open_writer
from holdall.checkpoint.saved_records import Attached, RowsKey, damages
from holdall.checkpoint.streams import Streams, collect_all, runs_of, runs_state, shard_url, trajectories
from holdall.checkpoint.write import ShardsSnapshot, Snapshot
