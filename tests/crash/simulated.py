"""A disk in memory, and the states in which a power cut can leave it.

`SimulatedDisk` records the calls of `FileSystem`. `after_power_cuts` yields the disks that a cut after any of these
calls can leave.

The model is that of the ALICE study of crash consistency, with more possible states: each change of a directory that no
fsync of the directory followed has happened or not, independently of all others. The bytes of a file that were not
synced are lost, zero, torn or complete, see `FATES`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdall.checkpoint.directory_blobs import DiskEntry, FileSystem
from holdall.store.records import Buffer

ROOT = Path("/disk")
FATES = ("lost", "zero", "half zero", "one byte", "half", "all but one byte", "complete")
"""States of the unsynced bytes of a file after a cut."""


@dataclass(slots=True)
class Node:
    """A file's bytes."""

    content: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class Call:
    """One call that changes the disk."""

    what: str
    path: Path | None = None
    target: Path | None = None
    node: Node | None = None
    data: bytes = b""


@dataclass(slots=True)
class _Handle:
    node: Node
    path: Path


class SimulatedDisk(FileSystem):
    """A disk that records every call.

    Args:
        ignored: Calls without effect, each as the name of the call and a part of the path.
    """

    def __init__(self, ignored: tuple[tuple[str, str], ...] = ()) -> None:
        self.files: dict[Path, Node] = {}
        self.directories: set[Path] = {ROOT, *ROOT.parents}
        self.calls: list[Call] = []
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(3)
        self._locked: dict[Path, str] = {}
        self._ignored = ignored

    def make_directory(self, path: Path) -> bool:
        if path in self.directories:
            return False
        self._require_directory(path.parent)
        self.directories.add(path)
        self.calls.append(Call("mkdir", path))
        return True

    def create(self, path: Path) -> int:
        self._require_directory(path.parent)
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        node = Node()
        self.files[path] = node
        self.calls.append(Call("create", path, node=node))
        return self._add_handle(node, path)

    def write(self, file: int, data: Buffer) -> None:
        handle = self._handles[file]
        raw = bytes(data)
        handle.node.content += raw
        self.calls.append(Call("write", node=handle.node, data=raw))

    def sync(self, file: int) -> None:
        handle = self._handles[file]
        if not self._ignores("sync", handle.path):
            self.calls.append(Call("sync", node=handle.node))

    def close(self, file: int) -> None:
        del self._handles[file]

    def rename(self, old: Path, new: Path) -> None:
        self.files[new] = self.files.pop(old)
        self.calls.append(Call("rename", old, new, self.files[new]))

    def link(self, old: Path, new: Path) -> None:
        if new in self.files:
            raise FileExistsError(errno.EEXIST, "exists", str(new))
        self.files[new] = self.files[old]
        self.calls.append(Call("link", old, new, self.files[new]))

    def unlink(self, path: Path) -> None:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path))
        del self.files[path]
        self.calls.append(Call("unlink", path))

    def sync_directory(self, path: Path) -> None:
        if not self._ignores("sync_directory", path):
            self.calls.append(Call("sync_directory", path))

    def list(self, path: Path) -> list[DiskEntry]:
        if path in self.files:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        self._require_directory(path)
        files = [DiskEntry(child.name, len(node.content)) for child, node in self.files.items() if child.parent == path]
        return files + [DiskEntry(child.name, None) for child in self.directories if child.parent == path != child]

    def is_link(self, path: Path) -> bool:
        return False

    def is_same_file(self, file: int, path: Path) -> bool:
        return True

    def open(self, path: Path) -> int:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path))
        return self._add_handle(self.files[path], path)

    def read(self, file: int, start: int, nbytes: int) -> bytes:
        return bytes(self._handles[file].node.content[start : start + nbytes])

    def lock(self, path: Path, owner: str) -> int | None:
        if path in self._locked:
            return None
        self._locked[path] = owner
        return self._add_handle(Node(), path)

    def read_owner(self, path: Path) -> str:
        return self._locked.get(path, "")

    def unlock(self, file: int) -> None:
        self._locked.pop(self._handles.pop(file).path, None)

    def mark(self, name: str) -> None:
        """Record that something was acknowledged at this moment."""
        self.calls.append(Call("mark", data=name.encode()))

    def _add_handle(self, node: Node, path: Path) -> int:
        number = next(self._numbers)
        self._handles[number] = _Handle(node, path)
        return number

    def _require_directory(self, path: Path) -> None:
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))

    def _ignores(self, call: str, path: Path) -> bool:
        return any(call == name and part in str(path) for name, part in self._ignored)


def after_power_cuts(
    calls: list[Call], before: SimulatedDisk | None = None, most_at_a_cut: int = 512, seed: int = 0
) -> Iterator[tuple[int, SimulatedDisk]]:
    """Yield every disk that a cut after any number of calls may leave. If there are too many, yield random ones.

    Args:
        before: The disk before the first of `calls`. All of it was synced.
    """
    generator = random.Random(seed)
    durable = _Durable(before)
    for cut in range(len(calls) + 1):
        issued = calls[:cut]
        names, bytes_left = _find_unsynced(issued)
        durable.advance(issued, min([*names, *bytes_left.values(), cut]))
        synced = _synced_bytes(issued)
        variants = [FATES] * len(bytes_left)
        count = (1 << len(names)) * len(FATES) ** len(variants)
        if count <= most_at_a_cut:
            choices: Any = itertools.product(itertools.product((False, True), repeat=len(names)), *variants)
        else:
            choices = (_random_choice(generator, len(names), variants) for _ in range(most_at_a_cut))
        seen = set()
        for happened, *fates in choices:
            lost = {index for index, done in zip(names, happened, strict=True) if not done}
            disk = durable.followed_by(issued, lost, dict(zip(bytes_left, fates, strict=True)), synced)
            key = _fingerprint(disk)
            if key not in seen:
                seen.add(key)
                yield cut, disk


def _random_choice(generator: random.Random, names: int, variants: Sequence[tuple[str, ...]]) -> tuple[Any, ...]:
    # Mostly all changes or none, with a few exceptions, because protocols get these states wrong.
    base = generator.random() < 0.5
    odd = generator.choice([0.1, 0.3, 0.5])
    happened = tuple(base ^ (generator.random() < odd) for _ in range(names))
    return (happened, *(generator.choice(fates) for fates in variants))


def _find_unsynced(issued: list[Call]) -> tuple[list[int], dict[int, int]]:
    """Return the calls whose names were not synced, and by node, the first call whose bytes were not synced."""
    names: list[int] = []
    dirty: dict[int, int] = {}
    for index, call in enumerate(issued):
        if call.what == "sync_directory":
            names = [i for i in names if _directory_of(issued[i]) != call.path]
        elif call.what in {"create", "rename", "link", "unlink", "mkdir"}:
            names.append(index)
        elif call.what == "write":
            dirty.setdefault(id(call.node), index)
        elif call.what == "sync":
            dirty.pop(id(call.node), None)
    return names, dirty


def _directory_of(call: Call) -> Path:
    path = call.target or call.path
    return path.parent if path is not None else Path()


class _Durable:
    """The state after the first calls, which a cut cannot undo. It is computed once for many cuts."""

    def __init__(self, before: SimulatedDisk | None) -> None:
        self._done = 0
        self._files: dict[Path, int] = {}  # Identity of the node by path.
        self._contents: dict[int, bytes] = {}
        self._directories: set[Path] = SimulatedDisk().directories
        if before is not None:
            self._directories = set(before.directories)
            self._files = {path: id(node) for path, node in before.files.items()}
            self._contents = {id(node): bytes(node.content) for node in before.files.values()}

    def advance(self, issued: list[Call], upto: int) -> None:
        """Apply the calls before number `upto`, which a cut cannot undo any more."""
        for call in issued[self._done : upto]:
            if call.what == "write":
                self._contents[id(call.node)] = self._contents.get(id(call.node), b"") + call.data
            self._apply_name(call, self._files, self._directories)
        self._done = max(self._done, upto)

    @staticmethod
    def _apply_name(call: Call, files: dict[Path, int], directories: set[Path]) -> None:
        if call.path is None:
            return
        if call.what == "mkdir":
            directories.add(call.path)
        elif call.what == "unlink":
            files.pop(call.path, None)
        elif call.what in {"create", "link", "rename"}:
            if call.what == "rename":
                files.pop(call.path, None)
            files[call.target or call.path] = id(call.node)

    def followed_by(
        self, issued: list[Call], lost: set[int], fate_of: dict[int, str], synced: dict[int, int]
    ) -> SimulatedDisk:
        """Return the disk after the later calls, except for the names that are lost.

        Args:
            lost: Numbers of the calls whose names are lost.
            fate_of: Fate of the unsynced bytes, by node.
            synced: Number of synced bytes, by node.
        """
        disk = SimulatedDisk()
        disk.directories = set(self._directories)
        files = dict(self._files)
        contents = dict(self._contents)
        for index in range(self._done, len(issued)):
            call = issued[index]
            if call.what == "write":
                contents[id(call.node)] = contents.get(id(call.node), b"") + call.data
            if index not in lost:
                self._apply_name(call, files, disk.directories)
        for key, fate in fate_of.items():
            contents[key] = _apply_fate(contents[key], fate, synced.get(key, 0))
        known = disk.directories | set(ROOT.parents)
        reached = {folder for folder in known if set(folder.parents) <= known}
        nodes: dict[int, Node] = {}
        for path, key in files.items():
            if path.parent in reached:
                disk.files[path] = nodes.setdefault(key, Node(bytearray(contents.get(key, b""))))
        return disk


def _synced_bytes(issued: list[Call]) -> dict[int, int]:
    written: dict[int, int] = {}
    synced: dict[int, int] = {}
    for call in issued:
        if call.what == "write":
            written[id(call.node)] = written.get(id(call.node), 0) + len(call.data)
        elif call.what == "sync":
            synced[id(call.node)] = written.get(id(call.node), 0)
    return synced


def _apply_fate(content: bytes, fate: str, safe: int) -> bytes:
    loose = len(content) - safe
    kept = {"lost": 0, "zero": 0, "half zero": loose // 2, "one byte": 1, "half": loose // 2}.get(fate, loose)
    if fate == "all but one byte":
        kept = loose - 1
    return content[: safe + kept] + (bytes(loose - kept) if "zero" in fate else b"")


def _fingerprint(disk: SimulatedDisk) -> bytes:
    summary = hashlib.blake2b(digest_size=16)
    for path in sorted(disk.files):
        summary.update(str(path).encode() + b"\0" + bytes(disk.files[path].content) + b"\0")
    summary.update("\0".join(sorted(map(str, disk.directories))).encode())
    return summary.digest()
