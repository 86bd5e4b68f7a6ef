"""Checkpoints in a directory of this machine; and `open_reader`, which reads those of an object store as well.

In:  files of records and manifests, written and read through `FileSystem`.  Out: a checkpoint, complete or not at all.
Invariant: only names of the format's own pattern are read and removed, and no link is followed. What is acknowledged
was there in full, in the directory that bears the name. Damage, what may not be read and what is not there are three
different errors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdall.background import LOAD_S, Waiting
from holdall.checkpoint.file_system import FileSystem, disk_errors_explained, read_error, remedy
from holdall.checkpoint.manifest import (
    DATA_NAME,
    LEASE_S,
    MANIFEST_NAME,
    MOST_FORMAT_BYTES,
    MOST_MANIFEST_BYTES,
    SHARD_FOLDER,
    Buffer,
    Manifest,
    Outlines,
    data_name,
    decode,
    encode,
    format_text,
    is_remote,
    kept_and_stale,
    manifest_name,
    new_writer_id,
    normalized_url,
    numbers_of,
    require_format,
    require_whole,
)
from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.storage import SegmentFile

if TYPE_CHECKING:
    from holdall.checkpoint.file_system import CheckpointReader

_TEMPORARY = ".tmp"
_TEMPORARY_NAMES = {
    ".": re.compile(r"FORMAT\.[0-9a-f]{16}\.tmp"),
    "segments": re.compile(DATA_NAME.pattern + r"\.tmp"),
    "manifests": re.compile(MANIFEST_NAME.pattern + r"\.[0-9a-f]{16}\.tmp"),
}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryReader:
    """Checkpoints in a directory, to be read."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.root = root
        self._disk = disk or FileSystem()
        self.outlines = Outlines()

    def require(self) -> bool:
        """Refuse a directory that holds no checkpoints; return whether FORMAT says that it does."""
        missing = f"{self.url} holds no checkpoints: there is no FORMAT file in it"
        return require_format(self, lambda: self._read("FORMAT", MOST_FORMAT_BYTES, missing))

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        return numbers_of(self.names("manifests"))

    def names(self, folder: str) -> list[str]:
        """List one of the folders, which must be one."""
        path = self.root / folder
        try:
            self.require_no_link(folder)
            return self._disk.names(path)
        except NotADirectoryError as error:
            if folder == ".":
                return []
            raise DamageError(f"{path} is no folder; remove it, or choose another place") from error
        except (CheckpointError, DamageError):
            raise
        except OSError as error:
            raise CheckpointError(error.errno, f"{path} cannot be read ({error.strerror}); {remedy(error)}") from error

    def require_no_link(self, *folders: str) -> None:
        """Refuse folders that stand elsewhere: what lies there is another's."""
        for path in [self.root / folder for folder in folders if folder != "."]:
            if self._disk.is_link(path):
                raise DamageError(f"{path} is a link, which is not followed; put the folder itself there")

    def manifest(self, number: int) -> Manifest:
        """Read a manifest."""
        return decode(*self._manifest(number), number)

    def outline(self, number: int) -> Manifest:
        """Read a manifest, perhaps without its records."""
        return self.outlines.of(*self._manifest(number), number)

    def _manifest(self, number: int) -> tuple[bytes, str]:
        """Return a manifest's bytes and name."""
        name = manifest_name(number)
        raw = self._read(f"manifests/{name}", MOST_MANIFEST_BYTES, f"{self.url} has no checkpoint {number}")
        return raw, f"{self.url}/manifests/{name}"

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""
        sizes: dict[str, int] = {}
        for name in filter(DATA_NAME.fullmatch, self.names("segments")):
            with contextlib.suppress(DamageError):  # reading it raises the error
                sizes |= self.size_of(name)
        return sizes

    def size_of(self, name: str) -> dict[str, int]:
        """Return the bytes of a file of records by its name; nothing if it is not there, or no file."""
        path = self.root / "segments" / name
        try:
            return {name: self._disk.size(path)}
        except (FileNotFoundError, NotADirectoryError, DamageError):
            return {}
        except OSError as error:
            raise read_error(path, error) from error

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records."""
        path = self.root / "segments" / name
        try:
            descriptor = self._disk.open(path)
        except OSError as error:
            raise read_error(path, error) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return SegmentFile(path, descriptor, is_temporary=False), os.fstat(descriptor).st_size

    def reopened(self) -> DirectoryReader:
        """Return the same checkpoints; `interrupt` does not end reading them."""
        return self

    def below(self, folder: str) -> DirectoryReader:
        """Return the checkpoints of one shard."""
        self.require_no_link("shards", folder)
        return DirectoryReader(self.root / folder, self._disk)

    def above(self) -> DirectoryReader | None:
        """Return the checkpoints whose manifests may name those here."""
        top = self.root.parent.parent
        if not SHARD_FOLDER.fullmatch(f"{self.root.parent.name}/{self.root.name}"):
            return None
        above = DirectoryReader(top, self._disk)
        return above if "FORMAT" in above.names(".") or above.numbers() else None

    def wait_on(self) -> None:
        """Nothing is waited for."""

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def _read(self, name: str, most_bytes: int, missing: str) -> bytes:
        try:
            file = self._disk.open(self.root / name)
            try:
                raw = self._disk.read_at(file, 0, most_bytes + 1)
            finally:
                self._disk.close(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{missing}; check the path") from error
        except OSError as error:
            raise read_error(self.root / name, error) from error
        if len(raw) > most_bytes:
            raise DamageError(f"{self.url}/{name} has more than {most_bytes} bytes, which none of holdall's has")
        return raw


class DirectoryFile:
    """A file of records under a temporary name."""

    def __init__(self, disk: FileSystem, path: Path) -> None:
        self.name = path.name
        self.nbytes = 0
        self._disk = disk
        self._path = path
        self._temporary = path.with_name(path.name + _TEMPORARY)
        self._file: int | None = disk.create(self._temporary)

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""
        if self._file is None:
            raise CheckpointError(f"{self._path} was written to after it was finished; report this")
        self._disk.write(self._file, data)
        self.nbytes += memoryview(data).nbytes

    def settle(self) -> None:
        """Sync what was written so far."""
        if self._file is not None:
            self._disk.sync(self._file)

    def finish(self) -> None:
        """Sync it and give it its name; the name is durable with the next commit."""
        if self._file is not None:
            self._disk.sync(self._file)
            self._close()
            self._disk.rename(self._temporary, self._path)

    def abandon(self) -> None:
        """Throw it away, as far as the disk still lets us."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self._temporary)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)


class DirectoryWriter:
    """A directory that this writer holds.

    Args:
        root: The directory; made if it is not there.
    """

    behind_bytes = 64 * 2**20

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.writer_id = new_writer_id()
        self._disk = disk or FileSystem()
        self._root = root
        self._segments, self._manifests = root / "segments", root / "manifests"
        self._sequence = 0
        self.reader = DirectoryReader(root, self._disk)
        with disk_errors_explained(self.url, "opened for writing"):
            if SHARD_FOLDER.fullmatch(f"{root.parent.name}/{root.name}"):
                DirectoryReader(root.parent.parent, self._disk).require_no_link("shards", f"shards/{root.name}")
            self.reader.require_no_link("segments", "manifests")
            for parent in reversed(root.parents):
                self._make_directory(parent)
            for folder in (root, self._segments, self._manifests):
                self._make_directory(folder)
            self._lock: int | None = self._take_lock()
            try:
                self._require_format()
                self._sweep()
            except BaseException:
                self.close()
                raise

    def new_file(self) -> DirectoryFile:
        """Begin a file of records."""
        self._sequence += 1
        return DirectoryFile(self._disk, self._segments / data_name(self.writer_id, self._sequence))

    def is_there(self) -> bool:
        """Whether the directory that bears the name is the one that was opened: it may have been removed."""
        return self._lock is not None and self._disk.is_locked(self._lock, self._root / "LOCK")

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Give a file of this disk a second name here; its bytes are synced first."""
        try:
            found = self._disk.open(file.path)
        except OSError:
            return None  # it lies elsewhere, or somebody took its name away
        try:
            if not self._disk.is_same(found, file.descriptor):
                return None
            self._disk.sync(found)
        finally:
            self._disk.close(found)
        self._sequence += 1
        path = self._segments / data_name(self.writer_id, self._sequence)
        try:
            self._disk.link(file.path, path)
        except OSError as error:
            if error.errno in _NO_LINKS | {errno.EXDEV, errno.ENOENT}:
                return None
            raise
        return path.name, self._disk.size(path)

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; when this returns, it survives a power cut.

        All that it names is looked for first: somebody may have removed it since it was written.
        """
        name = manifest_name(manifest.number)
        final, temporary = self._manifests / name, self._manifests / f"{name}.{self.writer_id}{_TEMPORARY}"
        self._disk.sync_directory(self._segments)
        self._require_all(manifest)
        raw, file = encode(manifest), self._disk.create(temporary)
        try:
            try:
                self._disk.write(file, raw)
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            self._publish(temporary, final)
        finally:
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
        self._disk.sync_directory(self._manifests)
        self.reader.outlines.remember(raw, manifest)

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` whole checkpoints, and the files that none of them nor `in_use` names.

        Files of other writers that no manifest names stay for a while: a save may be about to.
        """
        kept, stale = kept_and_stale(self.reader, keep)
        named = set(in_use).union(*(manifest.files for manifest in kept))
        finished = {name for manifest in stale.values() if manifest is not None for name in manifest.files}
        for number in stale:
            with contextlib.suppress(FileNotFoundError, DamageError):  # no file: another's, whatever it is
                self._disk.size(self._manifests / manifest_name(number))
                self._disk.unlink(self._manifests / manifest_name(number))
        self._disk.sync_directory(self._manifests)
        freed = 0
        for name, nbytes in self.reader.file_sizes().items():
            path, is_own = self._segments / name, name in finished or name.startswith(self.writer_id)
            if name not in named and (is_own or self._disk.age_s(path) > LEASE_S):
                self._disk.unlink(path)
                freed += nbytes
        return freed

    def close(self) -> None:
        """Let another writer in."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._disk.unlock(lock)

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def _make_directory(self, path: Path) -> None:
        if self._disk.make_directory(path):
            self._disk.sync_directory(path.parent)

    def _take_lock(self) -> int:
        lock = self._disk.lock(self._root / "LOCK")
        if lock is None:
            raise FencedError(
                f"{self.url} is held by another writer, in this process or another; save to a place of its own, or "
                "close that memory first"
            )
        return lock

    def _require_all(self, manifest: Manifest) -> None:
        """Refuse a manifest that names what is not there, or a directory that is another by now."""
        if not self.is_there():
            raise CheckpointError(f"{self.url} was removed while it was saved to; nothing was committed, save again")
        try:
            sizes = {name: nbytes for each in manifest.files for name, nbytes in self.reader.size_of(each).items()}
            require_whole(manifest, self.reader, sizes)
        except (CheckpointError, DamageError) as error:
            raise CheckpointError(
                error.errno or errno.ENOENT,
                f"{self.url}: {error}; somebody removed or changed it, so nothing was committed. The next save writes "
                "it again",
            ) from error

    def _require_format(self) -> None:
        path, is_there = self._root / "FORMAT", "FORMAT" in self.reader.names(".")
        if (is_there or self.reader.numbers()) and self.reader.require():
            return
        temporary = self._root / f"FORMAT.{self.writer_id}{_TEMPORARY}"
        file = self._disk.create(temporary)
        try:
            self._disk.write(file, format_text())
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        if is_there:
            self._disk.size(path)  # refuses what is no file
            self._disk.unlink(path)
        self._disk.rename(temporary, path)
        self._disk.sync_directory(self._root)

    def _sweep(self) -> None:
        """Remove what writers that died left behind under temporary names."""
        for folder, pattern in _TEMPORARY_NAMES.items():
            for name in filter(pattern.fullmatch, self.reader.names(folder)):
                path = self._root / folder / name
                with contextlib.suppress(FileNotFoundError, DamageError):  # no file: another's, whatever it is
                    self._disk.size(path)
                    if self._disk.age_s(path) > LEASE_S:
                        self._disk.unlink(path)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the manifest its number, which only one writer can."""
        try:
            self._disk.link(temporary, final)
        except FileExistsError as error:
            raise FencedError(
                f"{final} is there already: another writer saves to {self.url}; save to a place of its own"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without links: renaming is as atomic, and the lock keeps others out.
            if final.name in self._disk.names(final.parent):
                raise FencedError(f"{final} is there already: another writer saves to {self.url}") from error
            self._disk.rename(temporary, final)


def open_reader(
    url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, timeout: float = LOAD_S
) -> CheckpointReader:
    """Return the checkpoints at a url or path, to be read.

    Args:
        cache_dir: Where what is read of an object store lies meanwhile; None: where temporary files do.
        timeout: An object store that does not answer for so many seconds is given up.
    """
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_store import ObjectStoreReader  # noqa: PLC0415  not for a local path
        from holdall.checkpoint.objects import Objects  # noqa: PLC0415

        return ObjectStoreReader(Objects(location, Waiting(location, timeout)), cache_dir)
    return DirectoryReader(Path(location))
