"""Checkpoints: a memory on disk or in an object store, complete or not at all.

    save -> a snapshot becomes records in blobs; a manifest, created last, commits them
    load -> the newest complete manifest; blocks are checked and read when they are sampled

A place (a directory, or a prefix of an object store) has

    manifests/NUMBER.json       one blob per checkpoint, see manifest.py
    segments/WRITER-NUMBER.seg  blobs of records, see store/records.py and store/format.py
    shards/00003/               checkpoints of one shard, a place like any other
    LOCK                        held by the only writer

| module    | subject |
| --------- | ------- |
| blobs     | `BlobStore`: the five operations on which everything else is built; directory_blobs, object_blobs |
| manifest  | the text that names all records of a checkpoint |
| reader    | which checkpoints there are |
| save      | a snapshot becomes blobs and a manifest |
| savers    | the thread of each place that writes one checkpoint after another; `SaveHandle` |
| load      | a manifest becomes a memory |
| read_only | a manifest becomes a dataset that several processes read |
| retention | which checkpoints are kept |
| mirror    | copies of a directory's checkpoints in an object store |
| fetch, data_file | blocks that are read on demand |
| damage    | verification and recovery |
| streams   | shards, and other numbers of lanes |
| attached, autosave, jobs, waiting, urls | a trainer's own files; saves at intervals; threads; cancelling; paths |

A shard saves with keep=None to `shard_url(url, number)`, and puts `runs_state(...)` into its state as "runs". The
learner saves a `ShardsSnapshot` to `url`. `read_checkpoint(manifest, reader, capacity_ticks)` returns a `Restored` for
a shard.
"""

from holdall.checkpoint.attached import Attached, attached_files
from holdall.checkpoint.autosave import Autosave
from holdall.checkpoint.blobs import (
    BlobStore,
    Lease,
    check_name,
    describe_process,
    has_exclusive_create,
    open_blobs,
)
from holdall.checkpoint.damage import Damage, find_damage
from holdall.checkpoint.directory_blobs import DirectoryBlobs, FileSystem
from holdall.checkpoint.load import Restored, load_memory, load_newest, read_checkpoint, read_saved_state
from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.read_only import find_writer, open_read_only
from holdall.checkpoint.reader import LOAD_S, CheckpointReader, open_reader, require_whole
from holdall.checkpoint.retention import collect_all, remove_newer
from holdall.checkpoint.save import MemorySnapshot
from holdall.checkpoint.savers import Checkpoint, Progress, SaveHandle, Savers
from holdall.checkpoint.streams import (
    ShardsSnapshot,
    Streams,
    runs_of,
    runs_state,
    shard_url,
    trajectories,
)
from holdall.checkpoint.urls import is_remote, normalized_url
from holdall.checkpoint.waiting import Waiting
