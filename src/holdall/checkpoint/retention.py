"""Writers of checkpoints, and retention: which checkpoints and files are kept.

`CheckpointWriter` is the contract of a directory and of an object store that checkpoints are written to. `collect`
removes the checkpoints that are no longer kept, and the files that no checkpoint names.

Guarantee: nothing is removed that a checkpoint names, or that a save in progress may name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from holdall.checkpoint.manifest import (
    MOST_FORMAT_BYTES,
    SUM_LINE_BYTES,
    CheckpointReader,
    Manifest,
    decode,
    manifest_name,
    require_whole,
    signed,
)
from holdall.errors import CheckpointError, DamageError, FencedError, NewerFormatError
from holdall.store.records import Buffer

_MAX_OUTLINES = 64
"""Manifests that a reader remembers without their records."""


class NewFile(Protocol):
    """A file of records that is being written. It is invisible to readers until it is finished."""

    name: str
    nbytes: int

    def write(self, data: Buffer) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Give the file its name. It is durable, at the latest, when the next manifest is committed."""

    def abandon(self) -> None:
        """Delete the file."""


class CheckpointWriter(ABC):
    """The only writer of the checkpoints of one place."""

    url: str
    writer_id: str
    reader: CheckpointReader

    @abstractmethod
    def new_file(self) -> NewFile:
        """Start a file of records."""

    def is_there(self) -> bool:
        """Return whether the place that was opened still exists and was not replaced."""
        return True

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Commit a checkpoint of finished files.

        Raise FencedError if its number is taken, and CheckpointError if a file that it names is missing or too short.
        Nothing is committed then.
        """

    @abstractmethod
    def unclaimed(self) -> tuple[dict[str, int], set[str]]:
        """Return the sizes of all files of records, and the names of those that no save in progress can name."""

    @abstractmethod
    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove files. Missing files are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release the place for other writers."""

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` complete checkpoints, and files that no checkpoint names.

        Files that only removed checkpoints name are removed at once. Other files that no checkpoint names are kept
        while a save in progress may still name them. Files are listed before manifests, so that a file which is named
        meanwhile is kept.

        Args:
            keep: None, for shards: keep the checkpoints that the manifest above names or will name.
            in_use: Files that are kept in any case.

        Returns:
            Bytes of the removed files.
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
    """Return the checkpoints to keep, and those to remove by number. Their records are left out.

    The last `keep` complete checkpoints, and all newer ones, are kept. Checkpoints of a shard are kept if a manifest
    above names them, or if they are newer than all that are named, because a save over shards may be about to name
    them. A damaged manifest is None and is removed. Raise an error for one that cannot be read, or that has a newer
    format, because the files that it names are unknown.
    """
    above = _above(reader)
    numbers = reader.numbers()
    stays = set(numbers)
    if above is not None:
        shards = [shard for number in above.numbers() for shard in above.manifest(number).shards]
        named = {shard.number for shard in shards if shard.folder == reader.shard_folder}
        stays = {number for number in numbers if number in named or number > max(named, default=0)}
        keep = None
    kept: list[Manifest] = []
    stale: dict[int, Manifest | None] = {}
    whole = 0  # Complete checkpoints so far.
    sizes = reader.file_sizes()
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
            continue  # Another process removed it meanwhile.
        if found is not None and number in stays and (keep is None or whole < keep):
            kept.append(found)
            whole += _is_whole(found, reader, sizes)
        else:
            stale[number] = found
    return kept, stale


def _above(reader: CheckpointReader) -> CheckpointReader | None:
    """Return the place of the memory that a shard belongs to, or None if `reader` is not the place of a shard."""
    if reader.shard_folder is None:
        return None
    top = reader.top()
    is_place = bool(top.numbers()) or top.read("FORMAT", MOST_FORMAT_BYTES) is not None
    return top if is_place else None


def outline(reader: CheckpointReader, number: int) -> Manifest:
    """Return a manifest, perhaps without its records. One that was read or written before is not parsed again."""
    while reader.committed:
        _remember(reader, *reader.committed.popleft())
    raw, name = reader.raw_manifest(number)
    sum_line, known = reader.outlines.get(number, (b"", None))
    if known is not None and raw.endswith(sum_line) and raw == signed(raw[:-SUM_LINE_BYTES]):
        return known
    return _remember(reader, raw, decode(raw, name, number))


def _remember(reader: CheckpointReader, raw: bytes, manifest: Manifest) -> Manifest:
    """Remember a manifest by its checksum, without its records. Return the manifest."""
    brief = replace(manifest, segments=(), blocks=(), dictionaries={}, attached={})
    known = {**reader.outlines, manifest.number: (raw[-SUM_LINE_BYTES:], brief)}
    reader.outlines = dict(sorted(known.items())[-_MAX_OUTLINES:])
    return manifest


def _is_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> bool:
    try:
        require_whole(manifest, reader, sizes)
    except (DamageError, CheckpointError):
        return False
    return True


def commit_unique(target: CheckpointWriter, manifest: Manifest, find_number: Callable[[], int]) -> Manifest:
    """Commit the checkpoint and return its manifest, which has a higher number if a cancelled save took this one.

    An object store may complete the last request of a cancelled save after this save chose its number. `find_number`
    then returns the number after it. It raises FencedError if another writer made that checkpoint.
    """
    try:
        target.commit(manifest)
    except FencedError:
        manifest = replace(manifest, number=find_number())
        target.commit(manifest)
    return manifest
