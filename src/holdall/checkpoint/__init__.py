"""Checkpoints: a memory on disk or in an object store, complete or not at all.

    save -> write (a snapshot becomes records) -> directory | object_store (files, then the manifest: the commit)
    load -> manifest (the newest that is whole) -> records, checked when they are read

Beside this way stand `attached` (a trainer's own files), `autosave` (checkpoints at intervals, and their mirror),
`files` (which of them stay), `damage` (what is left of a damaged checkpoint) and `streams`: a memory over shards saves
the same way; it and other numbers of lanes are loaded through it.
"""

from holdall.checkpoint.attached import Attached, attached_files
from holdall.checkpoint.autosave import autosaved, the_rest_of
from holdall.checkpoint.damage import damages
from holdall.checkpoint.directory import FileSystem
from holdall.checkpoint.load import Loading, Restored, is_remote, newest, normalized_url, open_reader, restored
from holdall.checkpoint.manifest import LOAD_S, CheckpointReader, Manifest, require_whole
from holdall.checkpoint.objects import FileObjects, Objects, Slots, objects_at
from holdall.checkpoint.save import Checkpoint, Progress, SaveHandle, Savers, Snapshot, checked_save, open_writer
from holdall.checkpoint.streams import (
    ShardsSnapshot,
    Streams,
    collect_all,
    restored_state,
    runs_of,
    runs_state,
    shard_url,
    trajectories,
)
from holdall.checkpoint.write import RowsKey
