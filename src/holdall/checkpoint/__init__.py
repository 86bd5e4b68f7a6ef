"""Checkpoints: saved copies of a memory in a directory or an object store. A checkpoint is complete or does not exist.

    save -> write a snapshot as records in blobs, then create the manifest, which commits them
    load -> find the newest complete manifest; check and read blocks when they are sampled

A place (a directory, or a prefix of an object store) contains

    manifests/NUMBER.json       one blob per checkpoint, see manifest.py
    segments/WRITER-NUMBER.seg  blobs of records, see store/records.py and store/format.py
    shards/00003/               checkpoints of one shard, a place like any other
    LOCK                        held by the only writer

| module    | subject |
| --------- | ------- |
| blobs     | `BlobStore`: the five operations on which everything else is built |
| directory_blobs, object_blobs | the two implementations of `BlobStore` |
| manifest  | the text that names all records of a checkpoint |
| reader    | lists the checkpoints of a place and opens their files |
| save      | writes a snapshot as blobs and a manifest |
| savers    | for each place, the thread that writes one checkpoint after another; `SaveHandle` |
| load      | builds a memory from a manifest |
| read_only | opens a checkpoint as a dataset that several processes read |
| retention | chooses the checkpoints to keep, and removes the others |
| mirror    | copies of a directory's checkpoints in an object store |
| fetch, data_file | blocks that are read on demand |
| damage    | verification and recovery |
| streams   | loads checkpoints of shards, and changes the number of lanes |
| attached | a trainer's own files in a checkpoint |
| autosave | saves at intervals |
| jobs, waiting | background threads; progress and cancelling of their jobs |
| urls | paths and URLs of places |

The docstring of streams.py describes how the shards of a memory are saved and loaded.
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
from holdall.checkpoint.load import Loading, Restored, load_newest, read_checkpoint, read_saved_state
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
