"""Files of checkpoints: who writes them, and how they are kept in order.

    adopted    files of the disk tier get a second name, and are not copied
    compacted  records of many small files are copied to one
    collected  checkpoints that are not kept any more are removed, and files that none names

In:  a directory or a store, and the records that a memory has there.  Out: the same records, perhaps in other files;
bytes that were freed.
Invariant: nothing is removed that a checkpoint names, or that a save under way is about to name.
"""

from __future__ import annotations

import errno
import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from holdall.checkpoint.manifest import (
    MOST_FORMAT_BYTES,
    SUM_LINE_BYTES,
    CheckpointReader,
    Manifest,
    Ref,
    decode,
    manifest_name,
    require_whole,
    signed,
)
from holdall.errors import CheckpointError, DamageError, NewerFormatError
from holdall.storage import Buffer, Codec, Extent, SegmentFile, SliceBlock, unpack

if TYPE_CHECKING:
    from holdall.checkpoint.directory import FileSystem
    from holdall.checkpoint.load import RecordFiles
    from holdall.checkpoint.write import RecordWriter, SavedRecords

_MOST_OUTLINES = 64
_FILES_LEFT = 96
"""Files whose records stay where they are when there are too many."""
_WORTH_IT = 0.5
"""The share of a file of the disk tier that has to be wanted for it to be taken over."""
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What giving a file a second name ends with where the file system does not do that."""


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


class CheckpointWriter(ABC):
    """Checkpoints that this writer alone writes to."""

    url: str
    writer_id: str
    reader: CheckpointReader
    behind_bytes: int
    """Bytes from which on a file that is written behind the memory is finished before the next commit."""

    @abstractmethod
    def new_file(self) -> NewFile:
        """Begin a file of records."""

    def is_there(self) -> bool:
        """Whether what was opened still stands under its name: nobody removed it, or put another in its stead."""
        return True

    def adopt(self, _file: SegmentFile) -> tuple[str, int] | None:
        """Take over a file of records that takes no more, without copying it; return its name here and its bytes.

        None where that cannot be done. The file is durable at the latest when the next manifest is committed.
        """
        return None

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; FencedError if its number is taken.

        CheckpointError if something that it names is not there in full: then there is no such checkpoint.
        """

    @abstractmethod
    def unclaimed(self) -> tuple[dict[str, int], set[str]]:
        """Return the bytes of all files of records, and those of them that no save under way can be about to name."""

    @abstractmethod
    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove files; some may be gone already."""

    @abstractmethod
    def close(self) -> None:
        """Let another writer in."""

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` whole checkpoints, and the files that nothing names; return their bytes.

        Files that only checkpoints name that go are removed at once: nobody names these again. Others stay for as long
        as a save may be about to name them. Files are listed first, and manifests after them: what is named meanwhile
        stays.

        Args:
            keep: None: what the manifest of a memory over shards names, or will name; for the shards themselves.
            in_use: Files that stay, whether a manifest names them or not.
        """
        found, unclaimed = self.unclaimed()
        kept, stale = kept_and_stale(self.reader, keep)
        named = set(in_use).union(*(manifest.files for manifest in kept))
        unclaimed |= found.keys() & {name for manifest in filter(None, stale.values()) for name in manifest.files}
        self.remove("manifests", [manifest_name(number) for number in stale])
        gone = sorted(unclaimed - named)
        self.remove("segments", gone)
        return sum(found[name] for name in gone)


def kept_and_stale(reader: CheckpointReader, keep: int | None) -> tuple[list[Manifest], dict[int, Manifest | None]]:
    """Return outlines of checkpoints that stay, the last `keep` that are whole and all since, and of those that go.

    Those of a shard stay for as long as a manifest above names them, whatever `keep` says. Newer ones than the newest
    that is named stay too: a save over shards is about to name them. What is damaged goes, and is None. If one cannot
    be read, or is of a newer format, an error says so: nobody knows what it names.

    Args:
        keep: None: what a manifest above does not name, or will.
    """
    above, numbers = _above(reader), reader.numbers()
    stays = set(numbers)
    if above is not None:
        shards = [shard for number in above.numbers() for shard in above.manifest(number).shards]
        named = {shard.number for shard in shards if shard.folder == reader.shard_folder}
        stays = {number for number in numbers if number in named or number > max(named, default=0)}
        keep = None
    kept: list[Manifest] = []
    stale: dict[int, Manifest | None] = {}
    whole, sizes = 0, reader.file_sizes()
    for number in numbers:
        try:
            found: Manifest | None = outline(reader, number)
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


def _above(reader: CheckpointReader) -> CheckpointReader | None:
    """Return the checkpoints whose manifests may name those of a reader; None if these are no shard's."""
    top = None if reader.shard_folder is None else reader.top()
    return top if top is not None and (top.numbers() or top.read("FORMAT", MOST_FORMAT_BYTES) is not None) else None


def outline(reader: CheckpointReader, number: int) -> Manifest:
    """Return a manifest; one whose bytes were read or written before without its records, since parsing takes long."""
    while reader.committed:
        _remember(reader, *reader.committed.popleft())
    raw, name = reader.raw_manifest(number)
    sum_line, known = reader.outlines.get(number, (b"", None))
    if known is not None and raw.endswith(sum_line) and raw == signed(raw[:-SUM_LINE_BYTES]):
        return known
    return _remember(reader, raw, decode(raw, name, number))


def _remember(reader: CheckpointReader, raw: bytes, manifest: Manifest) -> Manifest:
    """Know a manifest by the line of its sum, without its records, and return it."""
    brief = replace(manifest, rows=(), segments=(), blocks=(), dictionaries={}, attached={})
    known = {**reader.outlines, manifest.number: (raw[-SUM_LINE_BYTES:], brief)}
    reader.outlines = dict(sorted(known.items())[-_MOST_OUTLINES:])
    return manifest


def _is_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> bool:
    try:
        require_whole(manifest, reader, sizes)
    except (DamageError, CheckpointError):
        return False
    return True


def _adoptable(blocks: Iterable[SliceBlock]) -> list[tuple[SegmentFile, list[tuple[SliceBlock, Extent]]]]:
    """Return the files of the disk tier of which most is wanted, and what is wanted of each."""
    found: dict[int, tuple[SegmentFile, list[tuple[SliceBlock, Extent]]]] = {}
    for block in blocks:
        extent = block.extent
        if extent is not None and extent.record_start >= 0 and not extent.file.is_growing:
            found.setdefault(id(extent.file), (extent.file, []))[1].append((block, extent))
    return [
        (file, wanted)
        for file, wanted in found.values()
        if not file.is_awaited
        and sum(extent.nbytes for _, extent in wanted) >= _WORTH_IT * os.fstat(file.descriptor).st_size
    ]


def has_linked(disk: FileSystem, file: SegmentFile, path: Path) -> bool:
    """Give a file of this disk a second name, if that can be done; its bytes are synced first."""
    try:
        found = disk.open(file.path)
    except OSError:
        return False  # it lies elsewhere, or somebody took its name away
    try:
        if not disk.is_same(found, file.descriptor):
            return False
        disk.sync(found)
    finally:
        disk.close(found)
    try:
        disk.link(file.path, path)
    except OSError as error:
        if error.errno in NO_LINKS | {errno.EXDEV, errno.ENOENT}:
            return False
        raise
    return True


def adopt(blocks: Iterable[SliceBlock], target: CheckpointWriter, fresh: SavedRecords) -> list[Codec]:
    """Take over files of this disk in which full blocks lie, most of them spilled; return these blocks' codecs."""
    codecs = []
    for file, wanted in _adoptable(blocks):
        adopted = target.adopt(file)
        if adopted is None:
            continue
        name, nbytes = adopted
        fresh.files[name] = nbytes
        for block, extent in wanted:
            record = unpack(file.read, extent.record_start, nbytes)
            head = file.read(record.start, record.nbytes - sum(part.nbytes for part in record.parts.values()))
            fresh.blocks[block] = (Ref(name, record.start, record.nbytes, hashlib.sha256(head).hexdigest()[:32]),)
            codecs += [] if block.sealed is None else [block.sealed.codec]
    return codecs


def compact(saved: SavedRecords, fresh: SavedRecords, reader: CheckpointReader, writer: RecordWriter) -> None:
    """Copy the records of the smallest files to `writer`; `fresh` names where all of them lie then."""
    from holdall.checkpoint.load import RecordFiles  # noqa: PLC0415  reading comes after writing

    used: Counter[str] = Counter()
    for ref in set(saved.refs()):
        used[ref.file] += ref.nbytes
    smallest = {name for name, _ in used.most_common()[_FILES_LEFT:]}
    files = RecordFiles(reader)
    moved = {ref: _copied(files, ref, writer) for ref in dict.fromkeys(saved.refs()) if ref.file in smallest}

    def now(*refs: Ref) -> tuple[Ref, ...]:
        return tuple(moved.get(ref, ref) for ref in refs)

    for number, (key, chunk) in saved.rows.items():
        fresh.rows.setdefault(number, (key, replace(chunk, ref=now(chunk.ref)[0])))
    fresh.logs |= {first: now(ref)[0] for first, ref in saved.logs.items()}
    fresh.dictionaries |= {name: now(ref)[0] for name, ref in saved.dictionaries.items()}
    for block, refs in list(saved.blocks.items()):
        fresh.blocks[block] = now(*refs)
    for block_key, filled in list(saved.filling.items()):
        fresh.filling[block_key] = filled._replace(refs=now(*filled.refs))


def _copied(files: RecordFiles, ref: Ref, writer: RecordWriter) -> Ref:
    record, file = files.record(ref)
    head_bytes = record.nbytes - sum(part.nbytes for part in record.parts.values())
    raw = memoryview(file.read(ref.start, ref.nbytes))
    return writer.append([raw[:32], raw[32:head_bytes], raw[head_bytes:]])
