"""Damage to a directory of checkpoints, as disks, people, other programs and strangers cause it.

Every function takes the directory, a folder outside of it, and a generator. It returns a description of the damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from holdall.checkpoint.manifest import append_checksum, strip_checksum
from holdall.store.records import MAGIC

Harm = Callable[[Path, Path, Random], str]
_STRANGERS = import_module("tests.crash.test_strangers")
mutate = _STRANGERS.mutate
rename_record = _STRANGERS.rename_record
rewrite_record = _STRANGERS.rewrite_record
PREAMBLE = _STRANGERS.PREAMBLE


def list_files(run: Path) -> list[Path]:
    """Return the regular files of a directory, those of shards too, in order."""
    found = (Path(top, name) for top, _folders, names in os.walk(run) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _choose_file(run: Path, generator: Random) -> Path:
    """Choose a file. Manifests are chosen more often than other files."""
    files = list_files(run) or [run / "nothing-else"]
    manifests = [path for path in files if path.parent.name == "manifests"]
    return generator.choice(manifests if manifests and generator.random() < 0.4 else files)


def _format_path(run: Path, path: Path) -> str:
    return str(path.relative_to(run))


# ---------------------------------------------------------------- disks


def remove(run: Path, _outside: Path, generator: Random) -> str:
    """Remove a file."""
    path = _choose_file(run, generator)
    path.unlink(missing_ok=True)
    return f"removed {_format_path(run, path)}"


def remove_many(run: Path, _outside: Path, generator: Random) -> str:
    """Remove a folder, all files of it, or the whole directory."""
    folder = generator.choice([run / "segments", run / "manifests", run])
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:  # An earlier damage may have put a FIFO there, and `rmtree` would wait for its other end.
        folder.unlink(missing_ok=True)
    if generator.random() < 0.5:
        folder.mkdir(exist_ok=True)
    return f"removed all of {folder.name}"


def swap(run: Path, _outside: Path, generator: Random) -> str:
    """Exchange the contents of two files."""
    one = _choose_file(run, generator)
    other = _choose_file(run, generator)
    if one.is_file() and other.is_file():
        first = one.read_bytes()
        second = other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    return f"swapped {_format_path(run, one)} and {_format_path(run, other)}"


def change_bytes(run: Path, _outside: Path, generator: Random) -> str:
    """Cut, add, zero or flip bytes of a file."""
    path = _choose_file(run, generator)
    if path.exists() and not path.is_file():
        return "nothing"  # Opening a pipe would wait for ever.
    raw = bytearray(path.read_bytes() if path.is_file() else b"")
    place = generator.randrange(len(raw) + 1)
    how = generator.choice(["cut", "emptied", "zeroed", "zeroed whole", "flipped", "grew", "overwritten"])
    match how:
        case "cut":
            del raw[place:]
        case "emptied":
            raw.clear()
        case "zeroed":
            stretch = slice(place, place + generator.choice([1, 40, 512, 4096]))
            raw[stretch] = bytes(len(raw[stretch]))
        case "zeroed whole":
            raw[:] = bytes(len(raw))
        case "grew":
            raw += generator.randbytes(generator.choice([1, 100, 5000]))
        case "overwritten":
            stretch = slice(place, place + generator.choice([4, 40, 512]))
            raw[stretch] = generator.randbytes(len(raw[stretch]))
        case _:
            for _ in range(generator.choice([1, 1, 8])):
                if raw:
                    raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
    path.write_bytes(raw)
    return f"{how} {_format_path(run, path)}"


# ---------------------------------------------------------------- people, and other programs


def replace_by_special_file(run: Path, outside: Path, generator: Random) -> str:
    """Replace a file or folder by a link, a pipe, a directory or a socket."""
    folders = [run / "segments", run / "manifests"]
    path = generator.choice(folders) if generator.random() < 0.2 else _choose_file(run, generator)
    if generator.random() < 0.15:
        path = run / "LOCK"
    return f"{_format_path(run, path)} is {_replace(path, outside, generator)}"


def _find_special_files(folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that are neither files, folders nor links."""
    found = [Path(folder) / name for name in names]
    return [path.name for path in found if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _replace(path: Path, outside: Path, generator: Random) -> str:
    raw = path.read_bytes() if path.is_file() else b""
    moved = outside / f"moved-{path.name}"
    if path.is_dir():
        if not moved.exists():
            # A copy of /dev/zero would never end, so special files are left out.
            shutil.copytree(path, moved, symlinks=True, ignore=_find_special_files)
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        moved.write_bytes(raw)
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = {
        "a link to the same outside": moved,
        "a link to a victim": outside / "victim.txt",
        "a link to nothing": outside / "made-by-mistake",
        "a link to itself": path,
        "a link to a folder": outside / "folder",
        "a link to /dev/zero": Path("/dev/zero"),
        "a link to /dev/full": Path("/dev/full"),
    }
    kind = generator.choice([*targets, "a pipe", "a folder", "a full folder", "a socket"])
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = Path.cwd()
        os.chdir(path.parent)  # The path of a socket must be short.
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.mkdir()
        if kind == "a full folder":
            (path / "own.txt").write_text("a user's own file")
    return kind


def add_foreign_file(run: Path, outside: Path, generator: Random) -> str:
    """Add a file or folder that is not holdall's. Some have names like holdall's."""
    folder = generator.choice([run, run / "segments", run / "manifests"])
    if not folder.is_dir():
        return "nothing"
    name = generator.choice(
        [
            "notes.txt",
            "own.tmp",
            ".tmp",
            "a b.json",
            "run.seg.tmp",
            "notes.tmp",
            "0000000000000001.json.tmp",
            "x" * 200,
        ]
    )
    path = folder / name
    if path.exists() or path.is_symlink():
        return "nothing"
    how = generator.choice(["file", "folder", "link", "link to a folder"])
    if how == "file":
        path.write_text("a user's own file")
    elif how == "folder":
        path.mkdir()
        (path / "own.txt").write_text("a user's own file")
    else:
        path.symlink_to(outside / ("victim.txt" if how == "link" else "folder"))
    return f"a foreign {how} {_format_path(run, path)}"


def add_numbered_manifest(run: Path, _outside: Path, generator: Random) -> str:
    """Add a manifest under another number, with content that is empty, invalid or copied."""
    folder = run / "manifests"
    manifests = [path for path in list_files(run) if path.parent == folder]
    if not manifests:
        return "nothing"
    number = generator.choice([0, 4, 17, 10**9, 10**16 - 2, 10**16 - 1])
    raw = generator.choice([b"", b"{}", append_checksum(b"{}"), generator.choice(manifests).read_bytes()])
    path = folder / f"{number:016d}.json"
    path.write_bytes(raw)
    return f"{_format_path(run, path)} has {len(raw)} bytes of another"


# ---------------------------------------------------------------- strangers: correct checksums, wrong claims


def _read_manifest(run: Path, generator: Random) -> tuple[Path, Any] | None:
    folders = [run, run, *sorted(run.glob("shards/*"))]
    folder = generator.choice(folders)
    for path in sorted((folder / "manifests").glob("*.json"), reverse=True)[generator.choice([0, 0, 0, 1]) :]:
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError, ValueError):
                words = json.loads(strip_checksum(path.read_bytes()))
                if isinstance(words, dict):
                    return path, words
    return None


def _write(path: Path, words: Any) -> None:
    path.write_bytes(append_checksum(json.dumps(words).encode()))


def forge_anything(run: Path, _outside: Path, generator: Random) -> str:
    """Change some values of a manifest to values of any type."""
    found = _read_manifest(run, generator)
    if found is None:
        return "nothing"
    path, words = found
    for _ in range(generator.choice([1, 1, 2, 4])):
        words = mutate(words, generator)
    _write(path, words)
    return f"forged {_format_path(run, path)}"


def _make_claims(words: Any, outside: Path, generator: Random) -> dict[str, Any]:
    deep: Any = []
    for _ in range(generator.choice([40, 900])):
        deep = [deep]
    escape = generator.choice([f"../../{outside.name}/victim.txt", "/etc/passwd", f"{outside}/x", "..", "a/../../x"])
    huge = generator.choice([2**31, 2**40, 2**53, 2**62, 2**63, 10**30])
    ref = words.get("state")
    lists = [key for key in ("segments", "blocks", "files") if words.get(key)]
    many = generator.choice(lists or ["files"])
    schema = words.get("schema")
    claims: dict[str, Any] = {
        "time": generator.choice([math.nan, math.inf, 1e300, -1e300, 1e18, "x"]),
        "version": generator.choice([2, 0, -1, 10**30, "1"]),
        "features": generator.choice([["x"], ["shards"], [[]], "shards", 7]),
        "number": generator.choice([0, -1, 2**53, 10**30, 1.0]),
        "capacity_ticks": generator.choice([0, 1, huge]),
        "first_tick": huge,
        "next_tick": generator.choice([0, huge]),
        "transitions": generator.choice([-1, 1.5, huge]),
        "files": generator.choice([[[escape, 1]], [], [["f" * 16 + "-" + "0" * 16 + ".seg", huge]]]),
        "attached": generator.choice([{escape: [ref]}, {"a": [ref] * 9}, {"x" * 300: []}]),
        "shards": generator.choice(
            [[[escape, 1, "0" * 32, 1, 1]], [["shards/00000", 1, "0" * 32, huge, huge]] * 3, [["shards/99999"]], deep]
        ),
        "blocks": generator.choice([[[huge, *(ref or [])]], [[1]], [[0, *(ref or [])]], []]),
        "segments": generator.choice([[], [[0, huge, [], [ref]]], [[0, 1, [0], []]], [[0, 1, [0] * 9, [ref] * 9]]]),
        "dictionaries": {"0" * 32: ref},
        many: (words.get(many) or [[]]) * generator.choice([2, 3_000]),
        "schema": generator.choice([deep, {}, mutate(schema, generator), _change_sizes(schema, generator)]),
        "epoch": escape,
        "state": generator.choice([[0, 0, huge, "0" * 32], [huge, 0, 0, "0" * 32], [], ref]),
    }
    key = generator.choice(sorted(claims))
    return {key: claims[key]} | ({"features": ["shards"]} if key == "shards" else {})


def _change_sizes(schema: Any, generator: Random) -> Any:
    """Change numbers in a schema, such as lanes and lengths of axes."""
    huge = generator.choice([0, -1, 3, 2**20, 2**31, 2**40])
    if isinstance(schema, dict):
        return {
            key: _change_sizes(child, generator) if generator.random() < 0.7 else child for key, child in schema.items()
        }
    if isinstance(schema, list):
        return [_change_sizes(child, generator) for child in schema]
    return huge if type(schema) is int else schema


def forge_claims(run: Path, outside: Path, generator: Random) -> str:
    """Let a manifest claim huge sizes, or paths outside of the directory."""
    found = _read_manifest(run, generator)
    if found is None:
        return "nothing"
    path, words = found
    claims = _make_claims(words, outside, generator)
    _write(path, words | claims)
    return f"forged {_format_path(run, path)}: {str(claims)[:120]}"


def forge_record(run: Path, _outside: Path, generator: Random) -> str:
    """Replace a record of the newest checkpoint, and let the manifest name the new record."""
    found = _read_manifest(run, generator)
    if found is None or not isinstance(found[1].get("files"), list):
        return "nothing"
    path, words = found
    try:
        index, start, nbytes, digest = _choose_ref(words, generator)
        file = path.parents[1] / "segments" / words["files"][index][0]
        raw = file.read_bytes()[start : start + nbytes] if file.is_file() else b""
        changed = _make_bomb(generator) if generator.random() < 0.03 else rewrite_record(raw, generator)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return "nothing"
    name = "f" * 16 + f"-{generator.getrandbits(60):016x}.seg"
    (path.parents[1] / "segments" / name).write_bytes(changed)
    head = changed[: 32 + PREAMBLE.unpack(changed[:32])[1]]
    new = [len(words["files"]), 0, len(changed), hashlib.sha256(head).hexdigest()[:32]]
    words = rename_record(words, [index, start, nbytes, digest], new)
    words["files"].append([name, len(changed)])
    _write(path, words)
    return f"forged a record of {len(changed)} bytes at {start} of {_format_path(run, path)}"


def _choose_ref(words: Any, generator: Random) -> list[Any]:
    refs = [words["state"], *(segment[3:] for segment in words["segments"])]
    refs += [block[1:] for block in words["blocks"]] + list(words["dictionaries"].values())
    return list(generator.choice(refs))


def _make_bomb(generator: Random) -> bytes:
    """Return a state of a few kilobytes that claims gigabytes, part by part."""
    zeros = zstandard.ZstdCompressor(level=1).compress(bytes(2**26))
    count = generator.choice([24, 60])
    arrays = {str(number): zeros for number in range(count)} | {"tree": b"{}"}
    described: list[dict[str, Any]] = [
        {"name": name, "bytes": len(array), "crc32": zlib.crc32(array)} for name, array in arrays.items()
    ]
    for words in described[:-1]:
        words["raw_bytes"] = 2**26
    head = json.dumps({"kind": "state", "count": count, "arrays": described}).encode()
    body = b"".join(arrays.values())
    start = struct.pack("<8sIIQ", MAGIC, len(head), zlib.crc32(head), len(body))
    return start + struct.pack("<II", zlib.crc32(start), 0) + head + body


HARMS: list[Harm] = [
    remove,
    remove_many,
    swap,
    change_bytes,
    change_bytes,
    change_bytes,
    replace_by_special_file,
    replace_by_special_file,
    add_foreign_file,
    add_numbered_manifest,
]
FORGERIES: list[Harm] = [forge_anything, forge_claims, forge_claims, forge_record, forge_record]
