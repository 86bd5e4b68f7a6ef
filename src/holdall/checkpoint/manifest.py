"""Manifests: one immutable file per checkpoint, which names all of its records.

A manifest is JSON with sorted keys, followed by a line with its SHA-256.

Guarantee: `decode` checks the SHA-256, every name and every number. A file that does not pass is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdall.checks import read_count, read_text, refuse_malformed
from holdall.errors import CheckpointError, DamageError, NewerFormatError
from holdall.store.records import dump_json, parse_json

FORMAT = "holdall checkpoint"
VERSION = 1
SHARDS = "shards"
KNOWN_FEATURES = frozenset([SHARDS])
"""Features beyond version 1 that this reader knows. A manifest with other features is refused."""

MAX_MANIFEST_BYTES = 64 * 2**20
DATA_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.seg")
SHARD_FOLDER = re.compile(r"shards/[0-9]{5}")
MANIFEST_NAME = re.compile(r"[0-9]{16}\.json")
ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}(/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}){0,15}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_WRITER_ID = re.compile(r"[0-9a-f]{16}")
_MAX_CAPACITY_TICKS = 2**40
CHECKSUM_LINE_BYTES = len("\nsha256:") + 64 + 1


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of a record, and the first half of the SHA-256 of its preamble and head."""

    file: str
    start: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment of a checkpoint."""

    first_tick: int
    ticks: int
    ref: Ref  # Record of the parts.
    blocks: tuple[int, ...]  # Positions of the segment's blocks in `Manifest.blocks`.


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block of a checkpoint."""

    ref: Ref
    index_bytes: int  # Bytes from the start of the record that are read when the checkpoint is loaded.


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The checkpoint of one shard, in its own folder below the place of the whole memory."""

    folder: str  # Like shards/00003.
    number: int  # Number of the shard's checkpoint.
    commit: str  # `Manifest.commit` of the shard's checkpoint.
    transitions: int
    nbytes: int  # Bytes of all files of the shard's checkpoint.


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint of one memory, or of the shards that it names."""

    number: int
    commit: str  # Random name of this attempt to write the checkpoint.
    writer_id: str  # Random name of the writer.
    time: float  # Seconds since 1970, for people.
    first_tick: int
    next_tick: int
    capacity_ticks: int
    transitions: int  # Those of its shards included. Entries that were added with `valid=False` do not count.
    schema: dict[str, Any]
    files: dict[str, int]  # Bytes by name of every file that has a record of the checkpoint.
    state: Ref
    segments: tuple[SegmentEntry, ...] = ()
    blocks: tuple[BlockEntry, ...] = ()
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # By name.
    attached: dict[str, tuple[Ref, ...]] = field(default_factory=dict)  # Attached files by name, in pieces.
    shards: tuple[ShardEntry, ...] = ()

    @property
    def refs(self) -> list[Ref]:
        """All records of the checkpoint."""
        found = [self.state, *self.dictionaries.values()]
        found += [ref for refs in self.attached.values() for ref in refs]
        found += [segment.ref for segment in self.segments]
        return found + [block.ref for block in self.blocks]


def manifest_name(number: int) -> str:
    """Return the file name of manifest `number`."""
    return f"{number:016d}.json"


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as bytes."""
    position = {name: index for index, name in enumerate(manifest.files)}

    def pack_ref(ref: Ref) -> list[Any]:
        return [position[ref.file], ref.start, ref.nbytes, ref.digest]

    words = {
        "format": FORMAT,
        "version": VERSION,
        "features": [SHARDS] if manifest.shards else [],
        "number": manifest.number,
        "commit": manifest.commit,
        "writer": manifest.writer_id,
        "time": manifest.time,
        "first_tick": manifest.first_tick,
        "next_tick": manifest.next_tick,
        "capacity_ticks": manifest.capacity_ticks,
        "transitions": manifest.transitions,
        "schema": manifest.schema,
        "files": [[name, nbytes] for name, nbytes in manifest.files.items()],
        "state": pack_ref(manifest.state),
        "segments": [
            [segment.first_tick, segment.ticks, list(segment.blocks), *pack_ref(segment.ref)]
            for segment in manifest.segments
        ],
        "blocks": [[block.index_bytes, *pack_ref(block.ref)] for block in manifest.blocks],
        "dictionaries": {name: pack_ref(ref) for name, ref in manifest.dictionaries.items()},
        "attached": {name: [pack_ref(ref) for ref in refs] for name, refs in manifest.attached.items()},
    }
    if manifest.shards:
        words[SHARDS] = [[s.folder, s.number, s.commit, s.transitions, s.nbytes] for s in manifest.shards]
    text = append_checksum(dump_json(words))
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"Checkpoint {manifest.number} has {len(manifest.refs)} records, which is more than a manifest can name. "
            "Lower capacity."
        )
    return text


def append_checksum(text: bytes) -> bytes:
    """Return `text` followed by a line with its SHA-256."""
    return text + b"\nsha256:" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def strip_checksum(raw: bytes) -> bytes:
    """Return the text before the line with its SHA-256. Raise DamageError if the SHA-256 does not match."""
    text = raw[:-CHECKSUM_LINE_BYTES]
    if raw != append_checksum(text):
        raise DamageError("The checksum does not match: the file is damaged or cut short.")
    return text


def decode(raw: bytes, name: str, number: int | None = None) -> Manifest:
    """Return the manifest in `raw`. Raise DamageError, which names `name`, if it is malformed or has another number."""
    try:
        with refuse_malformed("The text"):
            words = parse_json(strip_checksum(raw))
            _require_readable(words)
            manifest = _build_manifest(words)
    except DamageError as error:
        raise type(error)(f"Manifest {name} cannot be used. {error}") from error
    if number not in (None, manifest.number):
        raise DamageError(f"Manifest {name} is a copy of manifest {manifest.number}.")
    return manifest


def _require_readable(words: Any) -> None:
    if words["format"] != FORMAT:
        raise DamageError(f"The format is {words['format']!r} instead of {FORMAT!r}.")
    unknown = sorted(set(words["features"]) - KNOWN_FEATURES)
    if type(words["version"]) is not int or words["version"] < 1:
        raise DamageError(f"The version is {words['version']!r}. Versions are positive integers.")
    if words["version"] != VERSION or unknown:
        extra = f" with {', '.join(map(str, unknown))}" if unknown else ""
        raise NewerFormatError(
            f"It has format version {words['version']!r}{extra}. This version of holdall reads version {VERSION}. "
            "Upgrade holdall."
        )


def _build_manifest(words: Any) -> Manifest:
    files = {read_text(name, DATA_NAME): read_count(nbytes) for name, nbytes in words["files"]}
    names = list(files)

    def unpack_ref(packed: Any) -> Ref:
        index, start, nbytes, digest = packed
        ref = Ref(names[read_count(index)], read_count(start), read_count(nbytes), read_text(digest, _HEX32))
        if ref.start + ref.nbytes > files[ref.file]:
            raise ValueError(f"a record of {ref.file} ends after its file")
        return ref

    blocks = tuple(BlockEntry(unpack_ref(ref), read_count(index_bytes)) for index_bytes, *ref in words["blocks"])
    segments = tuple(
        SegmentEntry(
            read_count(first),
            read_count(ticks),
            unpack_ref(ref),
            tuple(read_count(block, len(blocks) - 1) for block in numbers),
        )
        for first, ticks, numbers, *ref in words["segments"]
    )
    if not all(segment.ticks for segment in segments):
        raise ValueError("a segment has no ticks")
    _require_order(segments)
    capacity_ticks = read_count(words["capacity_ticks"], _MAX_CAPACITY_TICKS)
    if capacity_ticks < 1:
        raise ValueError("the capacity is 0")
    if not isinstance(words["schema"], dict):
        raise TypeError("the schema must be an object")
    return Manifest(
        number=read_count(words["number"]),
        commit=read_text(words["commit"], _HEX32),
        writer_id=read_text(words["writer"], _WRITER_ID),
        time=float(words["time"]),
        first_tick=read_count(words["first_tick"]),
        next_tick=read_count(words["next_tick"]),
        capacity_ticks=capacity_ticks,
        transitions=read_count(words["transitions"]),
        schema=words["schema"],
        files=files,
        state=unpack_ref(words["state"]),
        segments=segments,
        blocks=blocks,
        dictionaries={read_text(name, _HEX32): unpack_ref(ref) for name, ref in words["dictionaries"].items()},
        attached={
            read_text(name, ATTACHMENT_NAME): tuple(unpack_ref(ref) for ref in refs)
            for name, refs in words["attached"].items()
        },
        shards=tuple(_read_shard(*shard) for shard in words.get(SHARDS, [])),
    )


def _read_shard(folder: Any, number: Any, commit: Any, transitions: Any, nbytes: Any) -> ShardEntry:
    return ShardEntry(
        read_text(folder, SHARD_FOLDER),
        read_count(number),
        read_text(commit, _HEX32),
        read_count(transitions),
        read_count(nbytes),
    )


def _require_order(segments: tuple[SegmentEntry, ...]) -> None:
    """Raise ValueError unless segments follow each other without gaps."""
    for before, after in itertools.pairwise(segments):
        if before.first_tick + before.ticks != after.first_tick:
            raise ValueError(f"ticks {before.first_tick + before.ticks} to {after.first_tick} are missing")


def new_writer_id() -> str:
    """Return a random name for a writer. File names contain it, so a writer never reuses those of an earlier one."""
    return secrets.token_hex(8)


def generate_file_names(writer_id: str) -> Iterator[str]:
    """Yield the names of a writer's files of records, in the order in which they are created."""
    return (f"{writer_id}-{sequence:016x}.seg" for sequence in itertools.count(1))


def require_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    """Raise CheckpointError unless all files of a manifest exist with all their bytes.

    A file may be longer than the manifest says, because the manifest has the place of every record in it.
    """
    for name, nbytes in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"Checkpoint {manifest.number} is missing file {name!r}.")
        if sizes[name] < nbytes:
            raise CheckpointError(
                f"Checkpoint {manifest.number} needs {nbytes} bytes of file {name!r}, which has {sizes[name]}."
            )
