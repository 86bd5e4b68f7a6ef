"""Attached files: a trainer's own files, saved in the same commit as a memory and read when they are requested.

Guarantee: the name of an attached file, used as a path below a folder, never leads outside that folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdall.checkpoint.manifest import ATTACHMENT_NAME, Manifest, Ref
from holdall.errors import ArgumentError, CheckpointError
from holdall.store.records import MAX_RECORD_BYTES, Buffer, Read, Record, pack_record

if TYPE_CHECKING:
    from holdall.checkpoint.load import RecordFiles

_PIECE_BYTES = 8 * 2**20
_FILE = "file"


def check_files(attach: Any) -> dict[str, Path | bytes]:
    """Return the files to attach by name. Raise ArgumentError if a name or a content cannot be saved."""
    if not isinstance(attach, Mapping):
        raise ArgumentError(f"attach ({attach!r}) must map names to bytes or paths. Pass a dict.")
    return {_check_name(name): _check_content(name, content) for name, content in attach.items()}


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not ATTACHMENT_NAME.fullmatch(name):
        raise ArgumentError(
            f"attach has the name {name!r}. Use letters, digits, '_', '-', '.', and '/' between path components. "
            "Components may not start with '-' or '.'. A name has at most 16 components of at most 255 characters."
        )
    return name


def _check_content(name: str, content: Any) -> Path | bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, str | os.PathLike):
        path = Path(content)
        if path.is_file():
            return path
        raise ArgumentError(f"attach[{name!r}] ({str(path)!r}) is not a file. Write it first, or pass its bytes.")
    raise ArgumentError(f"attach[{name!r}] has the type {type(content).__name__}. Pass bytes or the path of a file.")


def read_pieces(content: Path | bytes) -> Iterator[bytes]:
    """Yield a file in pieces. An empty file has one piece."""
    if isinstance(content, bytes):
        pieces = [content[start : start + _PIECE_BYTES] for start in range(0, len(content), _PIECE_BYTES)]
        yield from pieces or [b""]
        return
    try:
        with content.open("rb") as file:
            yield file.read(_PIECE_BYTES)
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise CheckpointError(
            error.errno, f"The attached file {content} cannot be read ({error.strerror}). Write it before save."
        ) from error


def pack_file(content: bytes) -> list[Buffer]:
    """Return a piece of an attached file as a record."""
    return pack_record(_FILE, {}, {"content": content}, is_compressed=False)


def unpack_file(record: Record, read: Read) -> bytes:
    """Return the piece of an attached file that a record contains."""
    record.require_kind(_FILE)
    return record.read_bytes("content", read, MAX_RECORD_BYTES)


@dataclass(eq=False)
class Attached(Mapping[str, bytes]):
    """The files that were saved with a memory, by name. A file is read when it is requested."""

    files: RecordFiles | None = None
    refs: Mapping[str, tuple[Ref, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> bytes:
        return b"".join(self._pieces(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)

    def open(self) -> None:
        """Open all files. Files in a directory then stay readable after another process has removed them."""
        for refs in self.refs.values():
            for ref in refs:
                if self.files is not None:
                    self.files.open(ref.file)

    def extract(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write an attached file to `path`, piece by piece."""
        with Path(path).open("wb") as file:
            for piece in self._pieces(name):
                file.write(piece)

    def _pieces(self, name: str) -> Iterator[bytes]:
        for ref in self.refs[name]:
            if self.files is not None:
                record, ahead = self.files.read_record(ref)
                yield unpack_file(record, ahead.read)


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest checkpoint, without loading the memory."""
    from holdall.checkpoint.load import RecordFiles, load_newest  # noqa: PLC0415  load.py imports this module
    from holdall.checkpoint.reader import open_reader  # noqa: PLC0415

    reader = open_reader(url)

    def build(manifest: Manifest) -> Attached:
        attached = Attached(RecordFiles(reader, manifest.files), manifest.attached)
        attached.open()
        return attached

    return load_newest(reader, build)
