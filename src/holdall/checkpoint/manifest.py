"""Manifests: one immutable file per checkpoint, which names everything that belongs to it.

In:  what was written, and where.  Out: canonical JSON and a line with its sha256; and back.
Invariant: what is decoded was checked: the sum, every name, every number against its neighbours.
A manifest that does not pass is no checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdall.errors import ArgumentError, CheckpointError, DamageError, FencedError, NewerFormatError
from holdall.storage import parsed, unparsed
from holdall.units import count_of as counted
from holdall.units import malformed_refused, require_path, text_of

if TYPE_CHECKING:
    from holdall.checkpoint.file_system import CheckpointReader

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

_LOG = logging.getLogger("holdall")


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
    text = signed(unparsed(words))
    if len(text) > MOST_MANIFEST_BYTES:
        raise CheckpointError(
            f"checkpoint {manifest.number} names {len(manifest.refs)} records, more than a manifest can; lower capacity"
        )
    return text


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
            words = parsed(signed_text(raw))
            _require_readable(words)
            manifest = _decoded(words)
    except DamageError as error:
        raise type(error)(f"manifest {name}: {error}") from error
    if number not in (None, manifest.number):
        raise DamageError(f"manifest {name} says that it is number {manifest.number}")
    return manifest


class Outlines:
    """Manifests without their records, of checkpoints that were read or written before: all that collecting needs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, Manifest]] = {}  # by number, with the line of the sum

    def of(self, raw: bytes, name: str, number: int) -> Manifest:
        """Return what `decode` does, but perhaps its outline, if these very bytes are known: parsing takes long."""
        sum_line, known = self._known.get(number, (b"", None))
        if known is not None and raw.endswith(sum_line) and raw == signed(raw[:-_SUM_LINE_BYTES]):
            return known
        return self.remember(raw, decode(raw, name, number))

    def remember(self, raw: bytes, manifest: Manifest) -> Manifest:
        """Know a manifest by its bytes, and return it."""
        outline = replace(manifest, rows=(), segments=(), blocks=(), dictionaries={}, attached={})
        known = {**self._known, manifest.number: (raw[-_SUM_LINE_BYTES:], outline)}
        self._known = dict(sorted(known.items())[-_MOST_OUTLINES:])
        return manifest


def numbers_of(names: Iterable[str]) -> list[int]:
    """Return the numbers of the manifests among some file names, newest first."""
    return sorted((int(name[:16]) for name in names if MANIFEST_NAME.fullmatch(name)), reverse=True)


def _require_readable(words: Any) -> None:
    if words["format"] != FORMAT:
        raise DamageError(f"it is of the format {words['format']!r}, none of holdall's")
    unknown = sorted(set(words["features"]) - KNOWN_FEATURES)
    if type(words["version"]) is not int or words["version"] < 1:
        raise DamageError(f"it is of version {words['version']!r}, which is none")
    if words["version"] != VERSION or unknown:
        wants = f"version {words['version']!r}" + (f" with {', '.join(map(str, unknown))}" if unknown else "")
        raise NewerFormatError(f"it is of {wants}, and this holdall reads version {VERSION}; upgrade it")


def _decoded(words: Any) -> Manifest:
    files = {text_of(name, DATA_NAME): counted(nbytes) for name, nbytes in words["files"]}
    names = list(files)

    def unpacked(packed: Any) -> Ref:
        index, start, nbytes, digest = packed
        ref = Ref(names[counted(index)], counted(start), counted(nbytes), text_of(digest, _HEX32))
        if ref.start + ref.nbytes > files[ref.file]:
            raise ValueError(f"a record of {ref.file} ends behind its file")
        return ref

    blocks = tuple(
        BlockEntry(counted(slice_bytes), counted(slices), tuple(unpacked(ref) for ref in refs))
        for slice_bytes, slices, refs in words["blocks"]
    )
    segments = tuple(
        SegmentEntry(counted(first), counted(ticks), unpacked(ref), tuple(counted(b, len(blocks) - 1) for b in numbers))
        for first, ticks, numbers, *ref in words["segments"]
    )
    rows = tuple(Chunk(counted(first), counted(ticks), unpacked(ref)) for first, ticks, *ref in words["rows"])
    if not isinstance(words["schema"], dict):
        raise TypeError("its schema is no object")
    return Manifest(
        number=counted(words["number"]),
        commit=text_of(words["commit"], _HEX32),
        writer_id=text_of(words["epoch"], _WRITER_ID),
        time=float(words["time"]),
        first_tick=counted(words["first_tick"]),
        next_tick=counted(words["next_tick"]),
        capacity_ticks=counted(words["capacity_ticks"]),
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


def _shard_of(folder: Any, number: Any, commit: Any, *counts: Any) -> ShardEntry:
    transitions, nbytes = (counted(count) for count in counts)
    return ShardEntry(text_of(folder, SHARD_FOLDER), counted(number), text_of(commit, _HEX32), transitions, nbytes)


def _in_order(runs: Any) -> Any:
    """Return runs of ticks that follow each other without a gap, or refuse them."""
    for before, after in itertools.pairwise(runs):
        if before.first_tick + before.ticks != after.first_tick:
            raise ValueError(f"ticks {before.first_tick + before.ticks} to {after.first_tick} are missing")
    return runs


MOST_FORMAT_BYTES, MOST_NUMBER, _MOST_OUTLINES = 4096, 10**16 - 1, 64
LEASE_S = 3600.0
"""For so long, a file that no manifest names may belong to a save under way, and stays."""

Buffer = bytes | bytearray | memoryview


def is_lost(error: OSError) -> bool:
    """Whether an error says that something is damaged or gone, so that an older checkpoint is the best there is.

    Not so where it could be had: with permission, with more open files, with a newer version of holdall.
    """
    if isinstance(error, DamageError):
        return not isinstance(error, NewerFormatError)
    return error.errno in (None, errno.ENOENT) and not isinstance(error, FencedError)


def newest_manifest(reader: CheckpointReader, numbers: Iterable[int]) -> Manifest | None:
    """Return the first of some manifests, newest first, that is one: any file may bear any number."""
    for number in numbers:
        try:
            return reader.manifest(number)
        except (DamageError, CheckpointError) as error:
            if not is_lost(error):
                raise
    return None


def last_number(reader: CheckpointReader) -> int:
    """Return the number of the newest checkpoint; 0 if there is none."""
    found = newest_manifest(reader, reader.numbers())
    return 0 if found is None else found.number


def next_number(reader: CheckpointReader, last: int, writer_id: str) -> int:
    """Return the number of a writer's next checkpoint.

    A writer whose number was taken by another stops for good: what it wrote may have been collected meanwhile.

    Args:
        last: The newest number when the writer came, or its own last one.
        writer_id: The writer's name.
    """
    numbers = reader.numbers()
    found = newest_manifest(reader, (number for number in numbers if number > last))
    if found is not None and found.writer_id != writer_id:
        raise FencedError(
            f"{reader.url} holds checkpoint {found.number}, which another writer made since {last}; save to a place of "
            "its own, or load what is there"
        )
    number = 1 + (last if found is None else found.number)
    while number in numbers:
        number += 1
    if number > MOST_NUMBER:
        raise CheckpointError(
            f"{reader.url} holds checkpoint {number - 1}, the last that there is; save to a place of its own"
        )
    return number


def kept_and_stale(reader: CheckpointReader, keep: int | None) -> tuple[list[Manifest], dict[int, Manifest | None]]:
    """Return outlines of checkpoints that stay, the last `keep` that are whole and all since, and of those that go.

    Those of a shard stay for as long as a manifest above names them, whatever `keep` says. Newer ones than the newest
    that is named stay too: a save over shards is about to name them. What is damaged goes, and is None. If one cannot
    be read, or is of a newer format, an error says so: nobody knows what it names.

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
    stale: dict[int, Manifest | None] = {}
    whole, sizes = 0, reader.file_sizes()
    for number in numbers:
        try:
            found: Manifest | None = reader.outline(number)
        except DamageError as error:
            if isinstance(error, NewerFormatError) or error.errno is not None:
                raise
            found = None
        except CheckpointError:
            if number in reader.numbers():
                raise
            continue  # another collector removed it just now
        if found is not None and number in stays and (keep is None or whole < keep):
            kept.append(found)
            whole += _is_whole(found, reader, sizes)
        else:
            stale[number] = found
    return kept, stale


def new_writer_id() -> str:
    """Name a writer: without it, one that comes after a crash would use the same names again."""
    return secrets.token_hex(8)


def data_name(writer_id: str, sequence: int) -> str:
    """Name a file of records."""
    return f"{writer_id}-{sequence:016x}.seg"


def format_text() -> bytes:
    """Return the content of FORMAT."""
    return signed(json.dumps({"format": FORMAT, "min_reader": VERSION, "version": VERSION}, sort_keys=True).encode())


def require_format(reader: CheckpointReader, read: Callable[[], bytes]) -> bool:
    """Refuse a url that is none of holdall's, or newer than this reader; return whether FORMAT is as it should be.

    Manifests say what they are as well: where there are some, a FORMAT that is damaged or gone is a warning.
    """
    try:
        _require_known(read(), reader.url)
    except (DamageError, CheckpointError) as error:
        if not is_lost(error) or not reader.numbers():
            raise
        _LOG.warning(
            "%s: FORMAT is damaged or gone; its manifests say what it holds, and the next save writes it again",
            reader.url,
        )
        return False
    return True


def _require_known(raw: bytes, url: str) -> None:
    try:
        words = parsed(signed_text(raw))
        known = words["format"] == FORMAT and type(words["min_reader"]) is int
    except (DamageError, ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise DamageError(f"{url}: its FORMAT file is damaged, or none of holdall's; choose another place")
    if words["min_reader"] > VERSION:
        raise NewerFormatError(
            f"{url} needs a reader of version {words['min_reader']}, this one has {VERSION}; upgrade it"
        )


def _is_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> bool:
    try:
        require_whole(manifest, reader, sizes)
    except (DamageError, CheckpointError):
        return False
    return True


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


SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://?(.*)", re.DOTALL)


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a url names a prefix of an object store."""
    found = _URL.fullmatch(os.fspath(url))
    return found is not None and "://" in os.fspath(url) and found[1].lower() in SCHEMES


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return what a url or a path names, in one way of writing it; refuse what looks like a url and is none here."""
    text = require_path("url", url)
    found = _URL.fullmatch(text)
    if found is None or (found[1].lower() not in SCHEMES and "://" not in text):
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  # links are not followed
    scheme, rest = found[1].lower(), found[2].strip("/")
    if scheme not in SCHEMES or "://" not in text or not rest:
        raise ArgumentError(
            f"url ({text!r}) names no bucket; pass a directory, or a str like s3://bucket/run, gs://bucket/run or "
            "az://container/run"
        )
    return f"{scheme}://{rest}"
