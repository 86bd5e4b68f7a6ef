"""Checkpoints: a memory on disk or in an object store, complete or not at all.

    save -> write (a snapshot becomes records) -> directory | object_store (files, then the manifest, which commits)
    load -> manifest (the newest complete one) -> records, checked when they are read

A place (a directory, or a prefix of an object store) has

    FORMAT                      name and version of the format
    manifests/NUMBER.json       one file per checkpoint, see manifest.py
    segments/WRITER-NUMBER.seg  files of records, see store/records.py and store/format.py
    shards/00003/               checkpoints of one shard, a place like any other

Interface for memories:

    Savers().save(take_snapshot, url, attach, keep, mirror, progress) -> SaveHandle
    Savers().save_every(memory, url, seconds, transitions, keep, mirror) -> Autosave, with stop()
    Savers().adopt(restored), .after_fork(), .close(timeout)
    MemorySnapshot(store=StoreState, schema=schema_words(...), capacity_ticks=..., state={...})
    load_memory(cls, url, settings, sampler, capacity, num_envs, recover, timeout) -> memory
        calls cls(schema, None, capacity, **settings) and memory.take_over(restored, sampler)
    Restored: .fill(store), .state, .keeps_ids, .fetch, .attached

A shard saves with keep=None to `shard_url(url, number)`, and puts `runs_state(...)` into its state as "runs". The
learner saves a `ShardsSnapshot` to `url`. `read_checkpoint(manifest, reader, capacity_ticks)` returns a `Restored` for
a shard.

Other modules: `attached` (a trainer's own files), `autosave`, `mirror`, `fetch` (blocks in an object store),
`retention` (which checkpoints are kept), `damage` (verification and recovery), `streams` (shards and other numbers of
lanes).
"""

from holdall.checkpoint.attached import Attached, attached_files
from holdall.checkpoint.autosave import Autosave
from holdall.checkpoint.blobs import BlobStore, Lease, describe_process, has_exclusive_create, open_blobs
from holdall.checkpoint.damage import Damage, find_damage
from holdall.checkpoint.directory import FileSystem
from holdall.checkpoint.load import Restored, load_memory, load_newest, read_checkpoint, read_saved_state
from holdall.checkpoint.manifest import LOAD_S, CheckpointReader, Manifest, require_whole
from holdall.checkpoint.objects import FileObjects, Objects, Slots, objects_at
from holdall.checkpoint.places import open_reader, open_writer
from holdall.checkpoint.save import Checkpoint, MemorySnapshot, Progress, SaveHandle, Savers
from holdall.checkpoint.streams import (
    ShardsSnapshot,
    Streams,
    collect_all,
    runs_of,
    runs_state,
    shard_url,
    trajectories,
)
from holdall.checkpoint.urls import is_remote, normalized_url
