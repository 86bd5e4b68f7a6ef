"""Retention: which checkpoints and files are kept. Only the writer that holds the lock removes anything.

Guarantee: a file is removed only if no checkpoint names it. Manifests are removed before the files that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from holdall.checkpoint.blobs import Lease, describe_process
from holdall.checkpoint.manifest import Manifest, manifest_name
from holdall.checkpoint.reader import MANIFESTS, SEGMENTS, CheckpointReader, Loss, require_whole, try_read
from holdall.errors import BlobMissingError, DamageError, NewerFormatError

OnProgress = Callable[[int, int], None]
"""Called with the number of files removed so far, and the number of files to remove."""


def collect(
    reader: CheckpointReader,
    lease: Lease,
    keep: int | None,
    in_use: Iterable[str] = (),
    on_progress: OnProgress = lambda _done, _all: None,
) -> int:
    """Keep the last `keep` complete checkpoints. Remove older ones, and the files that no checkpoint names any more.

    Args:
        lease: Lock of the place. No save is in progress besides that of the caller.
        keep: None, for shards: keep the checkpoints that a manifest of the whole memory names or may soon name.
        in_use: Names of further files that are kept.

    Returns:
        Bytes of the removed files.
    """
    sizes = reader.file_sizes()
    kept, stale = choose(reader, keep)
    named = set(in_use).union(*(manifest.files for manifest in kept))
    lease.check()
    for number in stale:
        reader.blobs.delete(MANIFESTS + manifest_name(number))
    unnamed = sorted(sizes.keys() - named)
    for number, name in enumerate(unnamed, 1):
        reader.blobs.delete(SEGMENTS + name)
        on_progress(number, len(unnamed))
    return sum(sizes[name] for name in unnamed)


def choose(reader: CheckpointReader, keep: int | None) -> tuple[list[Manifest], list[int]]:
    """Return the checkpoints to keep, and the numbers of those to remove.

    The last `keep` complete checkpoints are kept, and also incomplete ones that are newer than the oldest of these. If
    fewer than `keep` are complete, all are kept.
    For a shard whose whole memory has manifests, `keep` is ignored. Its checkpoints are kept if a manifest of the whole
    memory names them, or if they are newer than all that are named, because a save over shards may be about to name
    them.
    A damaged manifest is among those to remove. Raise an error for a manifest that cannot be read, or that has a newer
    format, because the files that it names are unknown. For a shard, also raise an error if a manifest of the whole
    memory is damaged, because the checkpoints that it names are unknown.
    """
    listed = reader.manifest_sizes()
    numbers = sorted(listed, reverse=True)
    candidates = set(numbers)
    whole = reader.open_whole()
    if whole is not None and (keep is None or whole.numbers()):
        named = _list_named(whole, reader.shard_folder)
        candidates = {number for number in numbers if number in named or number > max(named, default=0)}
        keep = None
    kept: list[Manifest] = []
    stale: list[int] = []
    complete = 0
    sizes = reader.file_sizes()
    for number in numbers:
        manifest = _read_or_none(reader, number, listed[number])
        if manifest is not None and number in candidates and (keep is None or complete < keep):
            kept.append(manifest)
            if _is_whole(manifest, reader, sizes):
                complete += 1
        else:
            stale.append(number)
    return kept, stale


def collect_all(reader: CheckpointReader, keep: int, on_progress: OnProgress = lambda _done, _all: None) -> int:
    """Lock a place and remove all but its last `keep` checkpoints, also those of shards. Return the bytes removed."""
    kept, stale = choose(reader, keep)
    manifests = [*kept, *(_read_or_none(reader, number) for number in stale)]
    folders = {shard.folder for manifest in manifests if manifest is not None for shard in manifest.shards}
    freed = 0
    for place in (reader, *(reader.open_shard(folder) for folder in sorted(folders))):
        lease = place.blobs.lock(f"checkpoint gc, {describe_process()}")
        try:
            freed += collect(place, lease, keep, on_progress=on_progress)
        finally:
            lease.release()
    return freed


def remove_newer(reader: CheckpointReader, number: int) -> None:
    """Lock a place and remove its checkpoints after `number`. Do nothing if checkpoint `number` does not exist.

    Files that no checkpoint names any more are removed by the next save.
    """
    if not _list_newer(reader, number):
        return
    lease = reader.blobs.lock(f"roll back to checkpoint {number}, {describe_process()}")
    try:
        for newer in _list_newer(reader, number):  # Another process may have saved or removed some before the lock.
            reader.blobs.delete(MANIFESTS + manifest_name(newer))
    finally:
        lease.release()


def _list_newer(reader: CheckpointReader, number: int) -> list[int]:
    """Return the numbers of the checkpoints after `number`. Empty if checkpoint `number` does not exist."""
    numbers = reader.numbers()
    return numbers[: numbers.index(number)] if number in numbers else []


def _list_named(whole: CheckpointReader, folder: str | None) -> set[int]:
    """Return the numbers of the checkpoints in a shard's `folder` that the manifests of the whole memory name."""
    sizes = whole.manifest_sizes()
    shards = [shard for number, nbytes in sizes.items() for shard in whole.manifest(number, nbytes).shards]
    return {shard.number for shard in shards if shard.folder == folder}


def _read_or_none(reader: CheckpointReader, number: int, nbytes: int | None = None) -> Manifest | None:
    """Return a manifest, or None if it is damaged or was removed meanwhile."""
    try:
        return reader.manifest(number, nbytes)
    except BlobMissingError:
        return None
    except DamageError as error:
        if isinstance(error, NewerFormatError) or error.errno is not None:
            raise
        return None


def _is_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> bool:
    return not isinstance(try_read(partial(require_whole, manifest, reader, sizes)), Loss)
