"""Manifests: one immutable file per checkpoint, which names all of its records.

A manifest is JSON with sorted keys, followed by a line with its SHA-256.

Guarantee: `decode` checks the SHA-256, every name and every number. A file that does not pass is not a checkpoint.
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

from holdall.checkpoint.data_file import DataFile
from holdall.errors import CheckpointError, DamageError, FencedError, NewerFormatError
from holdall.schema import count_of, malformed_refused, text_of
from holdall.store.records import dump_json, parse_json

FORMAT = "holdall checkpoint"
VERSION = 1
SHARDS = "shards"
KNOWN_FEATURES = frozenset([SHARDS])
"""Features beyond version 1 that this reader knows. A manifest with other features is refused."""

MOST_MANIFEST_BYTES = 64 * 2**20
DATA_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.seg")
SHARD_FOLDER = re.compile(r"shards/[0-9]{5}")
MANIFEST_NAME = re.compile(r"[0-9]{16}\.json")
ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}(/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}){0,15}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_WRITER_ID = re.compile(r"[0-9a-f]{16}")
_MAX_CAPACITY_TICKS = 2**40
SUM_LINE_BYTES = len("\nsha256:") + 64 + 1

_LOG = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of a record, and the first half of the SHA-256 of its preamble and head."""

    file: str
    start: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment: the records of its parts, and the numbers of its blocks.

    Parts in a later record replace those of an earlier one. A second record has parts that were rewritten after the
    first one was saved.
    """

    first_tick: int
    ticks: int
    refs: tuple[Ref, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """The record of a block, and how many of its first bytes are read when the checkpoint is loaded."""

    ref: Ref
    index_bytes: int


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The checkpoint of one shard, in its own folder below the manifest that names it."""

    folder: str  # Like shards/00003.
    number: int
    commit: str
    transitions: int
    nbytes: int


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
        found += [ref for segment in self.segments for ref in segment.refs]
        return found + [block.ref for block in self.blocks]


def manifest_name(number: int) -> str:
    """Return the file name of manifest `number`."""
    return f"{number:016d}.json"


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as bytes."""
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
        "segments": [
            [s.first_tick, s.ticks, list(s.blocks), [packed(ref) for ref in s.refs]] for s in manifest.segments
        ],
        "blocks": [[block.index_bytes, *packed(block.ref)] for block in manifest.blocks],
        "dictionaries": {name: packed(ref) for name, ref in manifest.dictionaries.items()},
        "attached": {name: [packed(ref) for ref in refs] for name, refs in manifest.attached.items()},
    }
    if manifest.shards:
        words[SHARDS] = [[s.folder, s.number, s.commit, s.transitions, s.nbytes] for s in manifest.shards]
    text = signed(dump_json(words))
    if len(text) > MOST_MANIFEST_BYTES:
        raise CheckpointError(
            f"checkpoint {manifest.number} names {len(manifest.refs)} records, more than a manifest can; lower capacity"
        )
    return text


def signed(text: bytes) -> bytes:
    """Return `text` followed by a line with its SHA-256."""
    return text + b"\nsha256:" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def signed_text(raw: bytes) -> bytes:
    """Return the text of `signed`. Raise DamageError if the SHA-256 does not match."""
    text = raw[:-SUM_LINE_BYTES]
    if raw != signed(text):
        raise DamageError("its checksum does not fit; it was cut short or damaged")
    return text


def decode(raw: bytes, name: str, number: int | None = None) -> Manifest:
    """Return the manifest of `raw`. Raise DamageError if it is not one, or not number `number`."""
    try:
        with malformed_refused("its text"):
            words = parse_json(signed_text(raw))
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

    blocks = tuple(BlockEntry(unpacked(ref), count_of(index_bytes)) for index_bytes, *ref in words["blocks"])
    segments = tuple(
        SegmentEntry(
            count_of(first),
            count_of(ticks),
            tuple(unpacked(ref) for ref in refs),
            tuple(count_of(block, len(blocks) - 1) for block in numbers),
        )
        for first, ticks, numbers, refs in words["segments"]
    )
    if not all(segment.refs and segment.ticks for segment in segments):
        raise ValueError("a segment has no record or no ticks")
    capacity_ticks = count_of(words["capacity_ticks"], _MAX_CAPACITY_TICKS)
    if capacity_ticks < 1:
        raise ValueError("its capacity is 0")
    if not isinstance(words["schema"], dict):
        raise TypeError("its schema is no object")
    return Manifest(
        number=count_of(words["number"]),
        commit=text_of(words["commit"], _HEX32),
        writer_id=text_of(words["epoch"], _WRITER_ID),
        time=float(words["time"]),
        first_tick=count_of(words["first_tick"]),
        next_tick=count_of(words["next_tick"]),
        capacity_ticks=capacity_ticks,
        schema=words["schema"],
        files=files,
        state=unpacked(words["state"]),
        segments=_in_order(segments),
        blocks=blocks,
        dictionaries={text_of(name, _HEX32): unpacked(ref) for name, ref in words["dictionaries"].items()},
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
    """Return runs of ticks. Raise ValueError unless they follow each other without gaps."""
    for before, after in itertools.pairwise(runs):
        if before.first_tick + before.ticks != after.first_tick:
            raise ValueError(f"ticks {before.first_tick + before.ticks} to {after.first_tick} are missing")
    return runs


MOST_FORMAT_BYTES = 4096
LOAD_S = 30.0
"""Seconds that `load`, and commands that read, wait for an answer of an object store."""
SAY_AFTER_S = 10.0
LEASE_S = 3600.0
"""Seconds for which a file that no manifest names is kept, because a save in progress may name it."""


def new_writer_id() -> str:
    """Return a random name of a writer. A writer after a crash then never uses a file name again."""
    return secrets.token_hex(8)


def data_names(writer_id: str) -> Iterator[str]:
    """Yield the names of a writer's files of records."""
    return (f"{writer_id}-{sequence:016x}.seg" for sequence in itertools.count(1))


def format_text() -> bytes:
    """Return the content of the FORMAT file."""
    return signed(json.dumps({"format": FORMAT, "min_reader": VERSION, "version": VERSION}, sort_keys=True).encode())


class Losses(list[OSError]):
    """A list of errors about damaged or missing data. As a context manager, it collects such an error of its block.

    Other errors are raised, because the data could be read with other permissions, more open files, or a newer holdall.
    """

    def __enter__(self) -> Losses:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if isinstance(error, NewerFormatError | FencedError) or not isinstance(error, DamageError | CheckpointError):
            return False
        if isinstance(error, CheckpointError) and error.errno not in (None, errno.ENOENT):
            return False
        self.append(error.with_traceback(None))  # A traceback would keep the data alive that was read.
        return True


class Waiting:
    """The progress of a job that may have to wait for a server. Any thread may give the job up.

    Attributes:
        url: Place that the job reads or writes.
        limit_s: Seconds without progress after which the job fails.
        reason: Why there is no answer yet, for messages.
    """

    def __init__(self, url: str, limit_s: float = math.inf) -> None:
        self.url = url
        self.limit_s = limit_s
        self.reason = ""
        self._given_up = threading.Event()
        self._moved_at = time.monotonic()
        self._said_at = -math.inf

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End all waiting, also future waiting, until `begin`."""
        self._given_up.set()

    def begin(self) -> None:
        """Start a job that has not been given up."""
        self._given_up.clear()
        self.got_on()

    def got_on(self) -> None:
        """Record progress."""
        self.reason = ""
        self._moved_at = time.monotonic()

    def pause(self, seconds: float) -> bool:
        """Wait before the next attempt. Return whether the job was given up meanwhile."""
        return self._given_up.wait(max(0.0, min(seconds, self._moved_at + self.limit_s - time.monotonic())))

    def stuck_since(self, began: float) -> float:
        """Return the time of the last progress, or `began` if that is later."""
        return max(began, self._moved_at)

    def require(self) -> None:
        """Raise CheckpointError if the job was given up, or made no progress for `limit_s` seconds."""
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
        """Log once what the job waits for, if it has waited since `began` for more than `SAY_AFTER_S` seconds."""
        now = time.monotonic()
        if self._said_at < began <= now - SAY_AFTER_S:
            self._said_at = now
            _LOG.warning("still waiting after %.0f s: %s", SAY_AFTER_S, what)


class CheckpointReader(ABC):
    """Reader of the checkpoints of one place: a directory, or a prefix of an object store."""

    kind, check = "file", "check the path"
    waiting: Waiting | None = None  # for a server that may not answer; who gives it up ends all reading

    def __init__(self, url: str) -> None:
        self.url = url
        self.outlines: dict[int, tuple[bytes, Manifest]] = {}  # see `files.outline`
        self.committed: deque[tuple[bytes, Manifest]] = deque(maxlen=8)  # by the writer that this reader belongs to

    @abstractmethod
    def names(self, folder: str) -> Iterable[str]:
        """Return the names in a folder."""

    @abstractmethod
    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return the content of a file, or None if it does not exist. Raise DamageError if it is larger."""

    @abstractmethod
    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of all files of records, by name."""

    @abstractmethod
    def open(self, name: str) -> tuple[DataFile, int]:
        """Open a file of records. Return the file and its size."""

    @abstractmethod
    def below(self, folder: str) -> CheckpointReader:
        """Return the reader of one shard's checkpoints."""

    @abstractmethod
    def top(self) -> CheckpointReader:
        """Return the reader of the checkpoints two folders above."""

    def reopened(self) -> CheckpointReader:
        """Return a reader of the same place that waits independently of this one."""
        return self

    @property
    def shard_folder(self) -> str | None:
        """The folder of these checkpoints if they belong to a shard, or None."""
        folder = "/".join(re.split(r"[/\\]", self.url)[-2:])
        return folder if SHARD_FOLDER.fullmatch(folder) else None

    def numbers(self) -> list[int]:
        """Return the numbers of all manifests, newest first."""
        return sorted(
            (int(name[:16]) for name in self.names("manifests") if MANIFEST_NAME.fullmatch(name)), reverse=True
        )

    def manifest(self, number: int) -> Manifest:
        """Return a manifest. Raise DamageError if it is damaged, and CheckpointError if it does not exist."""
        return decode(*self.raw_manifest(number), number)

    def raw_manifest(self, number: int) -> tuple[bytes, str]:
        """Return the content and the name of a manifest."""
        name = f"manifests/{manifest_name(number)}"
        raw = self.read(name, MOST_MANIFEST_BYTES)
        if raw is None:
            raise CheckpointError(f"{self.url} has no checkpoint {number}; {self.check}")
        return raw, f"{self.url}/{name}"

    def newest(self, numbers: Iterable[int]) -> Manifest | None:
        """Return the first of `numbers` whose manifest is not damaged, or None."""
        for number in numbers:
            with Losses():
                return self.manifest(number)
        return None

    def require(self, text: bytes | None = None) -> bool:
        """Raise an error if the place has no checkpoints, or newer ones. Return whether FORMAT is intact.

        Every manifest has the format, too. If there are manifests, a damaged or missing FORMAT only causes a warning.
        `text` is the content of FORMAT if it was read already.
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
            words = parse_json(signed_text(raw))
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
    """Raise CheckpointError unless all files of a manifest and of its shards exist with all their bytes."""
    require_files(manifest, sizes)
    for shard in manifest.shards:
        below = reader.below(shard.folder)
        require_files(shard_manifest(below, shard), below.file_sizes())


def shard_manifest(reader: CheckpointReader, shard: ShardEntry) -> Manifest:
    """Return the manifest of a shard. Raise DamageError if it is not the one that the manifest above names."""
    manifest = reader.manifest(shard.number)
    if manifest.commit != shard.commit:
        raise DamageError(f"{reader.url} holds another checkpoint {shard.number} than the manifest above names")
    return manifest


def require_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    """Raise CheckpointError unless all files of a manifest exist with all their bytes."""
    for name, nbytes in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"checkpoint {manifest.number} needs the file {name}, which is not there")
        if sizes[name] < nbytes:
            raise CheckpointError(
                f"checkpoint {manifest.number} needs {nbytes} bytes of the file {name}, which has {sizes[name]}"
            )
