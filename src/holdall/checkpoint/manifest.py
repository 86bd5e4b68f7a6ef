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
import math
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdall.errors import CheckpointError, DamageError, FencedError, NewerFormatError
from holdall.schema import count_of, malformed_refused, text_of
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
SUM_LINE_BYTES = len("\nsha256:") + 64 + 1

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
    text = raw[:-SUM_LINE_BYTES]
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


MOST_FORMAT_BYTES = 4096
LOAD_S = 30.0
"""How long `load`, and commands that read, wait for an object store that does not answer."""
SAY_AFTER_S = 10.0
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


class Waiting:
    """What a job waits for, and since when; who does not want to wait any longer gives it up.

    Args:
        url: What the job reads or writes.
        limit_s: Seconds without an answer after which the job is given up; infinite: never.
    """

    def __init__(self, url: str, limit_s: float = math.inf) -> None:
        self.url, self.limit_s = url, limit_s
        self.reason = ""  # why there is no answer yet
        self._given_up = threading.Event()
        self._moved_at, self._said_at = time.monotonic(), -math.inf

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants to wait any longer."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End all waiting, and what is about to wait."""
        self._given_up.set()

    def begin(self) -> None:
        """Begin a job that nobody has given up."""
        self._given_up.clear()
        self.got_on()

    def got_on(self) -> None:
        """Note that the job got on."""
        self.reason = ""
        self._moved_at = time.monotonic()

    def pause(self, seconds: float) -> bool:
        """Wait before the next try; return whether the job was given up meanwhile."""
        return self._given_up.wait(max(0.0, min(seconds, self._moved_at + self.limit_s - time.monotonic())))

    def stuck_since(self, began: float) -> float:
        """Return when the job last got on, or `began` if that is later."""
        return max(began, self._moved_at)

    def require(self) -> None:
        """Raise if the job was given up, or is stuck for longer than it may be."""
        if time.monotonic() - self._moved_at > self.limit_s:
            raise CheckpointError(
                errno.ETIMEDOUT,
                f"{self.url} was given up after {self.limit_s:g} s: {self.reason or 'it does not get on'}; check the "
                "url and the endpoint, or give it a longer timeout",
            )
        if self.is_given_up:
            what = f"did not answer before the save was cancelled ({self.reason})" if self.reason else "was cancelled"
            raise CheckpointError(f"{self.url} {what}, or the memory closed")

    def remind(self, began: float, what: str) -> None:
        """Say in the log, once, what has been waited for since `began`, if that takes long."""
        now = time.monotonic()
        if self._said_at < began <= now - SAY_AFTER_S:
            self._said_at = now
            _LOG.warning("still waiting after %.0f s: %s", SAY_AFTER_S, what)


class CheckpointReader(ABC):
    """The checkpoints at one url, to be read: in a directory, or below a prefix of an object store."""

    kind, check = "file", "check the path"
    waiting: Waiting | None = None  # for a server that may not answer; who gives it up ends all reading

    def __init__(self, url: str) -> None:
        self.url = url
        self.outlines: dict[int, tuple[bytes, Manifest]] = {}  # see `files.outline`
        self.committed: deque[tuple[bytes, Manifest]] = deque(maxlen=8)  # by the writer that this reader belongs to

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

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        return sorted(
            (int(name[:16]) for name in self.names("manifests") if MANIFEST_NAME.fullmatch(name)), reverse=True
        )

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; DamageError if it is none, CheckpointError if it is not there."""
        return decode(*self.raw_manifest(number), number)

    def raw_manifest(self, number: int) -> tuple[bytes, str]:
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
