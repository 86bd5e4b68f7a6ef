"""Manifests: one immutable file per checkpoint, which names everything that belongs to it; and those at one url.

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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from holdall.background import Waiting
from holdall.errors import ArgumentError, CheckpointError, DamageError, FencedError, NewerFormatError
from holdall.schema import count_of, malformed_refused, require_path, text_of
from holdall.storage import SegmentFile, parsed, unparsed

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


def _shard_of(folder: Any, number: Any, commit: Any, *counts: Any) -> ShardEntry:
    transitions, nbytes = (count_of(count) for count in counts)
    return ShardEntry(text_of(folder, SHARD_FOLDER), count_of(number), text_of(commit, _HEX32), transitions, nbytes)


def _in_order(runs: Any) -> Any:
    """Return runs of ticks that follow each other without a gap, or refuse them."""
    for before, after in itertools.pairwise(runs):
        if before.first_tick + before.ticks != after.first_tick:
            raise ValueError(f"ticks {before.first_tick + before.ticks} to {after.first_tick} are missing")
    return runs


MOST_FORMAT_BYTES, _MOST_OUTLINES = 4096, 64
LEASE_S = 3600.0
"""For so long, a file that no manifest names may belong to a save under way, and stays."""


def new_writer_id() -> str:
    """Name a writer: without it, one that comes after a crash would use the same names again."""
    return secrets.token_hex(8)


def data_names(writer_id: str) -> Iterator[str]:
    """Name files of records, one after another."""
    return (f"{writer_id}-{sequence:016x}.seg" for sequence in itertools.count(1))


def format_text() -> bytes:
    """Return the content of FORMAT."""
    return signed(json.dumps({"format": FORMAT, "min_reader": VERSION, "version": VERSION}, sort_keys=True).encode())


class Losses(list[OSError]):
    """What was damaged or gone: inside of `with`, errors that say so are noted, and end no more than the block.

    All others go on. What they are about could be had: with permission, with more open files, with a newer holdall.
    """

    def __enter__(self) -> Losses:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if isinstance(error, NewerFormatError | FencedError) or not isinstance(error, DamageError | CheckpointError):
            return False
        if isinstance(error, CheckpointError) and error.errno not in (None, errno.ENOENT):
            return False
        self.append(error.with_traceback(None))  # which would keep what was read from being freed
        return True


class CheckpointReader(ABC):
    """The checkpoints at one url, to be read: in a directory, or below a prefix of an object store."""

    kind, check = "file", "check the path"
    waiting: Waiting | None = None  # for a server that may not answer; who gives it up ends all reading

    def __init__(self, url: str) -> None:
        self.url = url
        self.outlines = Outlines()

    @abstractmethod
    def names(self, folder: str) -> Iterable[str]:
        """List a folder."""

    @abstractmethod
    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Read a file whole; None if it is not there, DamageError if it has more bytes than that."""

    @abstractmethod
    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""

    @abstractmethod
    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records, to be read by position; return it and its bytes."""

    @abstractmethod
    def below(self, folder: str) -> CheckpointReader:
        """Return the checkpoints of one shard."""

    @abstractmethod
    def top(self) -> CheckpointReader:
        """Return the checkpoints two folders above."""

    def reopened(self) -> CheckpointReader:
        """Return the same checkpoints, with a waiting of their own."""
        return self

    @property
    def shard_folder(self) -> str | None:
        """The folder in which these checkpoints stand, if it is a shard's."""
        folder = "/".join(re.split(r"[/\\]", self.url)[-2:])
        return folder if SHARD_FOLDER.fullmatch(folder) else None

    def above(self) -> CheckpointReader | None:
        """Return the checkpoints whose manifests may name those here; None if these are no shard's."""
        top = None if self.shard_folder is None else self.top()
        return top if top is not None and (top.numbers() or top.read("FORMAT", MOST_FORMAT_BYTES) is not None) else None

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        return sorted(
            (int(name[:16]) for name in self.names("manifests") if MANIFEST_NAME.fullmatch(name)), reverse=True
        )

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; DamageError if it is none, CheckpointError if it is not there."""
        return decode(*self._manifest(number), number)

    def outline(self, number: int) -> Manifest:
        """Read a manifest, perhaps without its records."""
        return self.outlines.of(*self._manifest(number), number)

    def _manifest(self, number: int) -> tuple[bytes, str]:
        """Return a manifest's bytes and name."""
        name = f"manifests/{manifest_name(number)}"
        raw = self.read(name, MOST_MANIFEST_BYTES)
        if raw is None:
            raise CheckpointError(f"{self.url} has no checkpoint {number}; {self.check}")
        return raw, f"{self.url}/{name}"

    def newest(self, numbers: Iterable[int]) -> Manifest | None:
        """Return the first of some manifests, newest first, that is one: any file may bear any number."""
        for number in numbers:
            with Losses():
                return self.manifest(number)
        return None

    def require(self, text: bytes | None = None) -> bool:
        """Refuse a url that holds no checkpoints, or newer ones; return whether FORMAT is as it should be.

        Manifests say what they are as well: where there are some, a FORMAT that is damaged or gone is a warning.

        Args:
            text: Of FORMAT, if it was read already.
        """
        with Losses() as lost:
            self._require_format(text or self.read("FORMAT", MOST_FORMAT_BYTES))
        if lost and not self.numbers():
            raise lost[0]
        if lost:
            _LOG.warning(
                "%s: FORMAT is damaged or gone; its manifests say what it holds, and the next save writes it again",
                self.url,
            )
        return not lost

    def _require_format(self, raw: bytes | None) -> None:
        if raw is None:
            missing = f"{self.url} holds no checkpoints: there is no FORMAT {self.kind} in it; {self.check}"
            raise CheckpointError(missing)
        try:
            words = parsed(signed_text(raw))
            known = words["format"] == FORMAT and type(words["min_reader"]) is int
        except (DamageError, ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise DamageError(f"{self.url}: its FORMAT file is damaged, or none of holdall's; choose another place")
        if words["min_reader"] > VERSION:
            raise NewerFormatError(
                f"{self.url} needs a reader of version {words['min_reader']}, this one has {VERSION}; upgrade it"
            )


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
