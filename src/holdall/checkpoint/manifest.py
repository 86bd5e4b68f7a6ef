"""Manifests: one immutable file per checkpoint, which names everything that belongs to it.

In:  what was written, and where.  Out: canonical JSON and a line with its sha256; and back.
Invariant: what is decoded was checked: the sum, every name, every number against its neighbours.
A manifest that does not pass is no checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.json_state import count_of, malformed_refused, text_of
from holdall.storage import SegmentFile
from holdall.units import require_path

FORMAT = "holdall checkpoint"
VERSION = 1
SHARDS = "shards"
KNOWN_FEATURES = frozenset([SHARDS])
"""What a reader must understand beyond version 1; a manifest that asks for more is refused."""

MOST_MANIFEST_BYTES = 64 * 2**20
DATA_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.seg")
SHARD_FOLDER = re.compile(r"shards/[0-9]{5}")
MANIFEST_NAME = re.compile(r"[0-9]{16}\.json")
ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}(/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}){0,15}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WRITER_ID = re.compile(r"[0-9a-f]{16}")
_SUM_LINE_BYTES = len("\nsha256:") + 64 + 1


@dataclass(frozen=True, slots=True)
class Ref:
    """One record: its file, its first byte, its length, and the first half of the sha256 of preamble and head."""

    file: str
    start: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of ticks and the record that holds it."""

    first_tick: int
    ticks: int
    ref: Ref


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment: its logs, and which of the manifest's blocks its fields name."""

    first_tick: int
    ticks: int
    ref: Ref
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block of slices, in one record, or in several if it was still being filled."""

    slice_bytes: int
    slices: int
    refs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The checkpoint of one shard, which lies in a folder of its own below the manifest that names it."""

    folder: str  # shards/00003
    number: int
    commit: str
    transitions: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint: of one memory, or of the shards that it names."""

    number: int
    commit: str  # names this very attempt to write it
    writer_id: str  # names the writer
    time: float  # seconds since 1970, for people
    first_tick: int
    next_tick: int
    capacity_ticks: int
    schema: dict[str, Any]
    files: dict[str, int]  # bytes by name of every file that holds a record named below
    state: Ref
    rows: tuple[Chunk, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    blocks: tuple[BlockEntry, ...] = ()
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # by the sha256 of their content
    attached: dict[str, tuple[Ref, ...]] = field(default_factory=dict)  # a trainer's own files, in pieces
    shards: tuple[ShardEntry, ...] = ()

    @property
    def refs(self) -> list[Ref]:
        """All records that belong to the checkpoint."""
        found = [self.state, *self.dictionaries.values()]
        found += [ref for refs in self.attached.values() for ref in refs]
        found += [chunk.ref for chunk in self.rows] + [segment.ref for segment in self.segments]
        return found + [ref for block in self.blocks for ref in block.refs]


def shard_folder(shard: int) -> str:
    """Name the folder of a shard's own checkpoints."""
    return f"shards/{shard:05d}"


def manifest_name(number: int) -> str:
    """Name the manifest of a number."""
    return f"{number:016d}.json"


def encode(manifest: Manifest) -> bytes:
    """Write a manifest."""
    position = {name: index for index, name in enumerate(manifest.files)}

    def packed(ref: Ref) -> list[Any]:
        return [position[ref.file], ref.start, ref.nbytes, ref.digest]

    words = {
        "format": FORMAT,
        "version": VERSION,
        "features": [SHARDS] if manifest.shards else [],
        "number": manifest.number,
        "commit": manifest.commit,
        "epoch": manifest.writer_id,
        "time": manifest.time,
        "first_tick": manifest.first_tick,
        "next_tick": manifest.next_tick,
        "capacity_ticks": manifest.capacity_ticks,
        "schema": manifest.schema,
        "files": [[name, nbytes] for name, nbytes in manifest.files.items()],
        "state": packed(manifest.state),
        "rows": [[chunk.first_tick, chunk.ticks, *packed(chunk.ref)] for chunk in manifest.rows],
        "segments": [[s.first_tick, s.ticks, list(s.blocks), *packed(s.ref)] for s in manifest.segments],
        "blocks": [[b.slice_bytes, b.slices, [packed(ref) for ref in b.refs]] for b in manifest.blocks],
        "dictionaries": {name: packed(ref) for name, ref in manifest.dictionaries.items()},
        "attached": {name: [packed(ref) for ref in refs] for name, refs in manifest.attached.items()},
    }
    if manifest.shards:
        words[SHARDS] = [[s.folder, s.number, s.commit, s.transitions, s.nbytes] for s in manifest.shards]
    return signed(json.dumps(words, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def signed(text: bytes) -> bytes:
    """Put the sum of a text behind it."""
    return text + b"\nsha256:" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def signed_text(raw: bytes) -> bytes:
    """Return a text whose sum fits."""
    text = raw[:-_SUM_LINE_BYTES]
    if raw != signed(text):
        raise DamageError("its checksum does not fit; it was cut short or damaged")
    return text


def decode(raw: bytes, name: str, number: int | None = None) -> Manifest:
    """Read a manifest, or say why it is none; `number` is the one that its name has."""
    try:
        with malformed_refused("its text"):
            words = json.loads(signed_text(raw))
            _require_readable(words)
            manifest = _decoded(words)
    except DamageError as error:
        raise DamageError(f"manifest {name}: {error}") from error
    if number not in (None, manifest.number):
        raise DamageError(f"manifest {name} says that it is number {manifest.number}")
    return manifest


def numbers_of(names: Iterable[str]) -> list[int]:
    """Return the numbers of the manifests among some file names, newest first."""
    return sorted((int(name[:16]) for name in names if MANIFEST_NAME.fullmatch(name)), reverse=True)


def _require_readable(words: Any) -> None:
    if words["format"] != FORMAT:
        raise DamageError(f"it is of the format {words['format']!r}, none of holdall's")
    unknown = sorted(set(words["features"]) - KNOWN_FEATURES)
    if words["version"] != VERSION or unknown:
        wants = f"version {words['version']!r}" + (f" with {', '.join(map(str, unknown))}" if unknown else "")
        raise DamageError(f"it is of {wants}, and this holdall reads version {VERSION}; upgrade it")


def _decoded(words: Any) -> Manifest:
    files = {text_of(name, DATA_NAME): count_of(nbytes) for name, nbytes in words["files"]}
    names = list(files)

    def unpacked(packed: Any) -> Ref:
        index, start, nbytes, digest = packed
        ref = Ref(names[count_of(index)], count_of(start), count_of(nbytes), text_of(digest, _HEX32))
        if ref.start + ref.nbytes > files[ref.file]:
            raise ValueError(f"a record of {ref.file} ends behind its file")
        return ref

    blocks = tuple(
        BlockEntry(count_of(slice_bytes), count_of(slices), tuple(unpacked(ref) for ref in refs))
        for slice_bytes, slices, refs in words["blocks"]
    )
    segments = tuple(
        SegmentEntry(
            count_of(first), count_of(ticks), unpacked(ref), tuple(count_of(b, len(blocks) - 1) for b in numbers)
        )
        for first, ticks, numbers, *ref in words["segments"]
    )
    rows = tuple(Chunk(count_of(first), count_of(ticks), unpacked(ref)) for first, ticks, *ref in words["rows"])
    if not isinstance(words["schema"], dict):
        raise TypeError("its schema is no object")
    return Manifest(
        number=count_of(words["number"]),
        commit=text_of(words["commit"], _HEX32),
        writer_id=text_of(words["epoch"], _WRITER_ID),
        time=float(words["time"]),
        first_tick=count_of(words["first_tick"]),
        next_tick=count_of(words["next_tick"]),
        capacity_ticks=count_of(words["capacity_ticks"]),
        schema=words["schema"],
        files=files,
        state=unpacked(words["state"]),
        rows=_in_order(rows),
        segments=_in_order(segments),
        blocks=blocks,
        dictionaries={text_of(name, _SHA256): unpacked(ref) for name, ref in words["dictionaries"].items()},
        attached={
            text_of(name, ATTACHMENT_NAME): tuple(unpacked(ref) for ref in refs)
            for name, refs in words["attached"].items()
        },
        shards=tuple(_shard_of(*shard) for shard in words.get(SHARDS, [])),
    )


def _shard_of(folder: Any, number: Any, commit: Any, transitions: Any, nbytes: Any) -> ShardEntry:
    return ShardEntry(
        text_of(folder, SHARD_FOLDER),
        count_of(number),
        text_of(commit, _HEX32),
        count_of(transitions),
        count_of(nbytes),
    )


def _in_order(runs: Any) -> Any:
    """Return runs of ticks that follow each other without a gap, or refuse them."""
    for before, after in itertools.pairwise(runs):
        if before.first_tick + before.ticks != after.first_tick:
            raise ValueError(f"ticks {before.first_tick + before.ticks} to {after.first_tick} are missing")
    return runs


MOST_FORMAT_BYTES = 4096

Buffer = bytes | bytearray | memoryview


class NewFile(Protocol):
    """A file of records that is being written; nobody sees it before it is finished."""

    name: str
    nbytes: int

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""

    def settle(self) -> None:
        """Bring what was written so far to the disk, where that spares time later."""

    def finish(self) -> None:
        """Make it durable under its name, at the latest when the next manifest is committed."""

    def abandon(self) -> None:
        """Throw it away."""


class CheckpointReader(Protocol):
    """Checkpoints to be read."""

    url: str

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; DamageError if it is none, CheckpointError if it is not there."""

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""

    def require(self) -> None:
        """Refuse a url that holds no checkpoints, or of a version to come."""

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records, to be read by position; return it and its bytes."""

    def reopened(self) -> CheckpointReader:
        """Return the same checkpoints; `interrupt` does not end reading them."""

    def below(self, folder: str) -> CheckpointReader:
        """Return the checkpoints of one shard."""

    def above(self) -> CheckpointReader | None:
        """Return the checkpoints whose manifests may name those here; None if these are no shard's."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""


class CheckpointWriter(Protocol):
    """Checkpoints that this writer alone writes to."""

    url: str
    writer_id: str
    behind_bytes: int
    """Bytes from which on a file that is written behind the memory is finished before the next commit."""

    @property
    def reader(self) -> CheckpointReader:
        """What is there, to be read."""

    def new_file(self) -> NewFile:
        """Begin a file of records."""

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Take over a file of records that takes no more, without copying it; return its name here and its bytes.

        None where that cannot be done. The file is durable at the latest when the next manifest is committed.
        """

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; FencedError if its number is taken."""

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` checkpoints, and the files that nothing names; return their bytes.

        None keeps what the manifest of a memory over shards names, or will name: for the shards themselves.
        """

    def close(self) -> None:
        """Let another writer in."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""


def next_number(reader: CheckpointReader, last: int, writer_id: str) -> int:
    """Return the number of a writer's next checkpoint.

    A writer whose number was taken by another stops for good: what it wrote may have been collected meanwhile.

    Args:
        last: The newest number when the writer came, or its own last one.
        writer_id: The writer's name.
    """
    newest = max(reader.numbers(), default=0)
    if newest > last and reader.manifest(newest).writer_id != writer_id:
        raise FencedError(
            f"{reader.url} holds checkpoint {newest}, which another writer made since {last}; save to a place of its "
            "own, or load what is there"
        )
    return max(newest, last) + 1


def kept_and_stale(reader: CheckpointReader, keep: int | None) -> tuple[list[Manifest], list[int]]:
    """Return the checkpoints that stay, the last `keep` that can be read, and the numbers of those that go.

    Those of a shard stay for as long as a manifest above names them, whatever `keep` says. Newer ones than the newest
    that is named stay too: a save over shards is about to name them.

    Args:
        keep: None: what a manifest above does not name, or will.
    """
    above, numbers = reader.above(), reader.numbers()
    stays = set(numbers)
    if above is not None:
        shards = [shard for number in above.numbers() for shard in above.manifest(number).shards]
        named = {shard.number for shard in shards if reader.url.endswith(f"/{shard.folder}")}
        stays = {number for number in numbers if number in named or number > max(named, default=0)}
        keep = None
    kept: list[Manifest] = []
    for number in numbers:
        if number in stays and (keep is None or len(kept) < keep):
            with contextlib.suppress(DamageError):
                kept.append(reader.manifest(number))
    return kept, sorted(set(numbers) - {manifest.number for manifest in kept})


def new_writer_id() -> str:
    """Name a writer: without it, one that comes after a crash would use the same names again."""
    return secrets.token_hex(8)


def data_name(writer_id: str, sequence: int) -> str:
    """Name a file of records."""
    return f"{writer_id}-{sequence:016x}.seg"


def format_text() -> bytes:
    """Return the content of FORMAT."""
    words = {"format": FORMAT, "min_reader": VERSION, "version": VERSION}
    return signed(json.dumps(words, sort_keys=True).encode())


def require_format(raw: bytes, url: str) -> None:
    """Refuse a url that is none of holdall's, or newer than this reader."""
    try:
        words = json.loads(signed_text(raw))
        known = words["format"] == FORMAT
        readable = known and type(words["min_reader"]) is int and words["min_reader"] <= VERSION
    except (DamageError, ValueError, KeyError, TypeError, RecursionError):
        known = readable = False
    if not known:
        raise DamageError(f"{url}: its FORMAT file is damaged, or none of holdall's; choose another place")
    if not readable:
        raise DamageError(f"{url} needs a reader of version {words['min_reader']}, this one has {VERSION}; upgrade it")


def require_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> None:
    """Refuse a manifest whose files, or whose shards' files, are not all there in full."""
    require_files(manifest, sizes)
    for shard in manifest.shards:
        below = reader.below(shard.folder)
        require_files(shard_manifest(below, shard), below.file_sizes())


def shard_manifest(reader: CheckpointReader, shard: ShardEntry) -> Manifest:
    """Read the manifest of a shard, which must be the very one that the manifest above names."""
    manifest = reader.manifest(shard.number)
    if manifest.commit != shard.commit:
        raise DamageError(f"{reader.url} holds another checkpoint {shard.number} than the manifest above names")
    return manifest


def require_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    """Refuse a manifest whose files are not all there, in full."""
    for name, nbytes in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"checkpoint {manifest.number} needs the file {name}, which is not there")
        if sizes[name] < nbytes:
            raise CheckpointError(
                f"checkpoint {manifest.number} needs {nbytes} bytes of the file {name}, which has {sizes[name]}"
            )


SCHEMES = ("s3://", "gs://", "az://")


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a url names a prefix of an object store."""
    return isinstance(url, str) and url.startswith(SCHEMES)


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return what a url or a path names, in one way of writing it."""
    text = require_path("url", url)
    if is_remote(text):
        return text.rstrip("/")
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  # links are not followed
