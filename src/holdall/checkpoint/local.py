"""Places on a disk: the order of calls after which a checkpoint survives a power cut.

    data files   temporary name, write, fsync, rename        manifest   temporary name, write, fsync,
    segments/    fsync of the directory, once                           link to its number, fsync of manifests/

Only then is the checkpoint acknowledged; only after that is anything removed, manifests before
the files that they name, with an fsync of manifests/ in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdall.checkpoint.filesystem import Buffer, FileSystem
from holdall.checkpoint.manifest import (
    DATA_NAME,
    MANIFEST_NAME,
    MOST_MANIFEST_BYTES,
    Manifest,
    decode,
    encode,
    manifest_name,
)
from holdall.checkpoint.place import MOST_FORMAT_BYTES, data_name, format_text, new_epoch, require_format
from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.experience.disk.segment_file import SegmentFile

_TEMPORARY = ".tmp"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalLibrary:
    """Checkpoints in a directory, to be read."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.root = root
        self._disk = disk or FileSystem()

    def require(self) -> None:
        """Refuse a directory that holds no checkpoints."""
        raw = self._read("FORMAT", MOST_FORMAT_BYTES, f"{self.url} holds no checkpoints: there is no FORMAT file in it")
        require_format(raw, self.url)

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        names = self._disk.names(self.root / "manifests")
        return sorted((int(name[:16]) for name in names if MANIFEST_NAME.fullmatch(name)), reverse=True)

    def manifest(self, number: int) -> Manifest:
        """Read a manifest."""
        name = manifest_name(number)
        raw = self._read(f"manifests/{name}", MOST_MANIFEST_BYTES, f"{self.url} has no checkpoint {number}")
        manifest = decode(raw, f"{self.url}/manifests/{name}")
        if manifest.number != number:
            raise DamageError(f"manifest {self.url}/manifests/{name} says that it is number {manifest.number}")
        return manifest

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""
        folder = self.root / "segments"
        sizes = {}
        for name in self._disk.names(folder):
            if DATA_NAME.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # collected by its writer just now
                    sizes[name] = self._disk.size(folder / name)
        return sizes

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records."""
        path = self.root / "segments" / name
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(error.errno, f"{path} cannot be opened ({error.strerror})") from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return SegmentFile(path, descriptor, is_temporary=False), os.fstat(descriptor).st_size

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def _read(self, name: str, most_bytes: int, missing: str) -> bytes:
        try:
            file = self._disk.open(self.root / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{missing}; check the path") from error
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} cannot be read ({error}); check its permissions") from error
        try:
            raw = self._disk.read_at(file, 0, most_bytes + 1)
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} cannot be read ({error})") from error
        finally:
            self._disk.close(file)
        if len(raw) > most_bytes:
            raise DamageError(f"{self.url}/{name} has more than {most_bytes} bytes, which none of holdall's has")
        return raw


class LocalFile:
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


class LocalPlace:
    """A directory that this writer holds.

    Args:
        root: The directory; made if it is not there.
    """

    behind_bytes = 64 * 2**20

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.epoch = new_epoch()
        self._disk = disk or FileSystem()
        self._root = root
        self._segments, self._manifests = root / "segments", root / "manifests"
        self._sequence = 0
        self.library = LocalLibrary(root, self._disk)
        with told(self.url, "opened for writing"):
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

    def new_file(self) -> LocalFile:
        """Begin a file of records."""
        self._sequence += 1
        return LocalFile(self._disk, self._segments / data_name(self.epoch, self._sequence))

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
        path = self._segments / data_name(self.epoch, self._sequence)
        try:
            self._disk.link(file.path, path)
        except OSError as error:
            if error.errno in _NO_LINKS | {errno.EXDEV, errno.ENOENT}:
                return None
            raise
        return path.name, self._disk.size(path)

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; when this returns, it survives a power cut."""
        name = manifest_name(manifest.number)
        final, temporary = self._manifests / name, self._manifests / f"{name}.{self.epoch}{_TEMPORARY}"
        self._disk.sync_directory(self._segments)
        file = self._disk.create(temporary)
        try:
            try:
                self._disk.write(file, encode(manifest))
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            self._publish(temporary, final)
        finally:
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
        self._disk.sync_directory(self._manifests)

    def collect(self, keep: int, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` whole checkpoints, and the files that none of them nor `in_use` names."""
        numbers, kept, named = self.library.numbers(), 0, set(in_use)
        stale = []
        for number in numbers:
            if kept >= keep:
                stale.append(number)
                continue
            try:
                named.update(self.library.manifest(number).files)
                kept += 1
            except DamageError:
                stale.append(number)
        for number in stale:
            self._disk.unlink(self._manifests / manifest_name(number))
        self._disk.sync_directory(self._manifests)
        freed = 0
        for name, nbytes in self.library.file_sizes().items():
            if name not in named:
                self._disk.unlink(self._segments / name)
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

    def _require_format(self) -> None:
        if "FORMAT" in self._disk.names(self._root):
            self.library.require()
            return
        temporary = self._root / f"FORMAT.{self.epoch}{_TEMPORARY}"
        file = self._disk.create(temporary)
        try:
            self._disk.write(file, format_text())
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        self._disk.rename(temporary, self._root / "FORMAT")
        self._disk.sync_directory(self._root)

    def _sweep(self) -> None:
        """Remove what a writer that died left behind under temporary names."""
        for folder in (self._root, self._segments, self._manifests):
            for name in self._disk.names(folder):
                if name.endswith(_TEMPORARY):
                    self._disk.unlink(folder / name)

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


@contextlib.contextmanager
def told(url: str, what: str) -> Iterator[None]:
    """Turn what the operating system says into an error that names the place and the remedy."""
    try:
        yield
    except (CheckpointError, DamageError):
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk")
        raise CheckpointError(
            error.errno,
            f"{url} could not be {what} ({error.strerror or error}); {remedy}. Earlier checkpoints are intact",
        ) from error


_REMEDIES = {
    errno.ENOSPC: "free some room on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free some of the quota, or keep fewer checkpoints",
    errno.EROFS: "it is read-only: choose another place",
    errno.EACCES: "allow this user to write there, or choose another place",
    errno.EPERM: "allow this user to write there, or choose another place",
    errno.EIO: "the disk fails: choose another one",
}
