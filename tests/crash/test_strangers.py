"""Forged checkpoints with correct checksums and wrong claims are refused, or read within bounds."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from gymnasium import spaces

from holdall import HoldallError, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.manifest import Ref, append_checksum, strip_checksum
from holdall.schema import Schema
from holdall.store.columns import Columns
from holdall.store.format import read_block, read_parts
from holdall.store.records import MAGIC, Record, read_record, reader_of
from holdall.store.states import read_state

PREAMBLE = struct.Struct("<8sIIQII")
MANIFEST = Path("manifests") / "0000000000000002.json"

ODD: list[Any] = [
    None,
    -1,
    0,
    1,
    7,
    2**31,
    2**40,
    2**62,
    "x",
    "../x",
    "<f8",
    "O",
    [],
    {},
    [0],
    [[]],
    True,
    1.5,
    {"$array": 0},
]


def mutate(value: Any, generator: random.Random) -> Any:
    """Change one value anywhere in a tree of JSON."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        key = generator.choice(sorted(value))
        if generator.random() < 0.1:
            return {name: child for name, child in value.items() if name != key}
        return value | {key: mutate(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        index = generator.randrange(len(value))
        return [*value[:index], mutate(value[index], generator), *value[index + 1 :]]
    if type(value) is int and generator.random() < 0.5:
        return value + generator.choice([-1, 1, 1000, -value, value])
    return generator.choice(ODD)


def rewrite_record(raw: bytes, generator: random.Random) -> bytes:
    """Change the head of a record, or a tree in it, and correct every checksum."""
    head_bytes = PREAMBLE.unpack(raw[:32])[1]
    head = json.loads(raw[32 : 32 + head_bytes])
    body = raw[32 + head_bytes :]
    if head["kind"] == "state" and generator.random() < 0.8:
        described = head["arrays"][-1]
        assert described["name"] == "tree"
        start = len(body) - described["bytes"]
        old = body[start:]
        if "raw_bytes" in described:
            old = zstandard.ZstdDecompressor().decompress(old)
            del described["raw_bytes"]
        tree = json.dumps(mutate(json.loads(old), generator)).encode()
        body = body[:start] + tree
        described |= {"bytes": len(tree), "crc32": zlib.crc32(tree)}
    else:
        head = mutate(head, generator)
    words = json.dumps(head).encode()
    start_bytes = struct.pack("<8sIIQ", MAGIC, len(words), zlib.crc32(words), len(body))
    return start_bytes + struct.pack("<II", zlib.crc32(start_bytes), 0) + words + body


def rename_record(words: Any, old: list[Any], new: list[Any]) -> Any:
    """Replace the name of a record everywhere in `words`."""
    if isinstance(words, dict):
        return {key: rename_record(child, old, new) for key, child in words.items()}
    if isinstance(words, list):
        if words[-4:] == old:
            return [*words[:-4], *new]
        return [rename_record(child, old, new) for child in words]
    return words


def forge(run: Path, generator: random.Random) -> str:
    """Replace a record of the checkpoint by a changed one, or change the manifest."""
    name = run / MANIFEST
    words = json.loads(strip_checksum(name.read_bytes()))
    if generator.random() < 0.3:
        name.write_bytes(append_checksum(json.dumps(mutate(words, generator)).encode()))
        return "manifest"
    found = open_reader(run).manifest(2)
    ref = found.state if generator.random() < 0.3 else generator.choice(found.refs)
    with (run / "segments" / ref.file).open("rb") as file:
        file.seek(ref.start)
        raw = file.read(ref.nbytes)
    replace_record(run, ref, rewrite_record(raw, generator))
    return str(json.loads(raw[32 : 32 + PREAMBLE.unpack(raw[:32])[1]])["kind"])


def replace_record(run: Path, ref: Ref, changed: bytes) -> None:
    """Write a record to a new file, and change the manifest so that it names this record in place of `ref`."""
    name = run / MANIFEST
    words = json.loads(strip_checksum(name.read_bytes()))
    forged = "f" * 16 + "-" + "0" * 15 + "1.seg"
    (run / "segments" / forged).write_bytes(changed)
    files = [entry[0] for entry in words["files"]]
    head_bytes = PREAMBLE.unpack(changed[:32])[1]
    digest = hashlib.sha256(changed[: 32 + head_bytes]).hexdigest()[:32]
    old = [files.index(ref.file), ref.start, ref.nbytes, ref.digest]
    new = [len(files), 0, len(changed), digest]
    words = rename_record(words, old, new)
    words["files"].append([forged, len(changed)])
    name.write_bytes(append_checksum(json.dumps(words).encode()))


@pytest.mark.parametrize("forgeries", [120, pytest.param(3_000, marks=pytest.mark.nightly)])
def test_forged_records_and_manifests_are_refused_or_harmless(tmp_path: Path, forgeries: int) -> None:
    """Loading them neither crashes nor raises another error than holdall's."""
    golden = Path(__file__).parents[1] / "format" / "v1"
    generator = random.Random(forgeries)
    seen = set()
    for number in range(forgeries):
        run = tmp_path / str(number)
        shutil.copytree(golden, run)
        seen.add(forge(run, generator))
        try:
            with ReplayMemory.load(run, capacity=240) as memory:
                memory.gather(np.arange(memory.first_id, min(memory.next_id, memory.first_id + 50)))
        except HoldallError:
            pass
        shutil.rmtree(run)
    assert seen >= {"manifest", "segment", "block", "state"}


def compress_zeros(nbytes: int) -> bytes:
    """Return `nbytes` compressed zeros."""
    compressor = zstandard.ZstdCompressor().compressobj(size=nbytes)
    piece = bytes(2**20)
    return b"".join([*(compressor.compress(piece) for _ in range(nbytes // len(piece))), compressor.flush()])


def make_record(kind: str, fields: dict[str, Any], arrays: dict[str, bytes]) -> bytes:
    """Return a record whose arrays are compressed zeros, except for "tree"."""
    described = []
    for name, content in arrays.items():
        words = {"name": name, "bytes": len(content), "crc32": zlib.crc32(content)}
        described.append(words if name == "tree" else words | {"raw_bytes": BOMB})
    head = json.dumps(fields | {"kind": kind, "arrays": described}).encode()
    body = b"".join(arrays.values())
    start = struct.pack("<8sIIQ", MAGIC, len(head), zlib.crc32(head), len(body))
    return start + struct.pack("<II", zlib.crc32(start), 0) + head + body


def require_refusal_within(max_bytes: int, act: Callable[[], Any], message: str) -> None:
    """Require that `act` raises an error before it allocates `max_bytes`."""
    tracemalloc.start()
    try:
        with pytest.raises(HoldallError, match=message):
            act()
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()


BOMB = 2**29
COLUMNS = Columns(Schema.of(spaces.Box(0, 255, (8,), np.uint8), spaces.Discrete(2), None, 1, ()))


def test_the_arrays_of_a_record_are_added_up_before_one_is_decompressed() -> None:
    """The record has less than a megabyte, and claims twenty arrays of half a gigabyte."""
    bomb = compress_zeros(BOMB)
    raw = make_record("state", {"count": 20}, {str(i): bomb for i in range(20)} | {"tree": b"{}"})
    assert len(raw) < 2**20
    require_refusal_within(2**24, lambda: read_record(reader_of(raw), 0, len(raw)), "more than a record can have")


CLAIMS: dict[str, tuple[dict[str, Any], str, Callable[[Record, Any], Any]]] = {
    "segment": (
        {"first_tick": 0, "ticks": 9, "lanes": 1, "blocks": 0, "parts": [{"column": 0, "kind": "shared"}]},
        "0.rows",
        lambda record, read: read_parts(record, read, COLUMNS, [], None),
    ),
    "block": (
        {"slices": 9, "codec": {"group": 1}, "dictionary": None},
        "units",
        lambda record, read: read_block(record, read, {}),
    ),
    "state": ({"count": 2**40}, "0", read_state),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_an_array_that_claims_an_impossible_size_is_not_decompressed(kind: str) -> None:
    fields, name, read_it = CLAIMS[kind]
    raw = make_record(kind, fields, {name: compress_zeros(BOMB)})
    read = reader_of(raw)
    require_refusal_within(2**24, lambda: read_it(read_record(read, 0, len(raw)), read), "at byte 0|Corrupt data")


def test_a_checkpoint_that_claims_too_much_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    """Its state is a few kilobytes that claim gigabytes."""
    shutil.copytree(Path(__file__).parents[1] / "format" / "v1", tmp_path / "run")
    bomb = compress_zeros(BOMB)
    state = open_reader(tmp_path / "run").manifest(2).state
    changed = make_record("state", {"count": 20}, {str(i): bomb for i in range(20)} | {"tree": b"{}"})
    replace_record(tmp_path / "run", state, changed)
    require_refusal_within(2**26, lambda: ReplayMemory.load(tmp_path / "run"), "more than a record can have")


@pytest.mark.parametrize(
    "value", [b"[]", *(pytest.param(value, marks=pytest.mark.nightly) for value in (b"{}", b"0", b'"ab"', b'{"":0}'))]
)
def test_a_manifest_of_many_small_values_is_refused_before_it_is_parsed(tmp_path: Path, value: bytes) -> None:
    """The manifest has 63 MiB, and its values would take gigabytes."""
    shutil.copytree(Path(__file__).parents[1] / "format" / "v1", tmp_path / "run")
    name = tmp_path / "run" / MANIFEST
    count = 63 * 2**20 // (len(value) + 1)
    name.write_bytes(append_checksum(b'{"mood":[' + b",".join([value]) + (b"," + value) * (count - 1) + b"]}"))
    require_refusal_within(400 * 2**20, lambda: open_reader(tmp_path / "run").manifest(2), "more values")


def test_the_head_of_a_record_with_many_small_values_is_refused() -> None:
    """The head has less than 16 MiB, which is allowed, but too many values."""
    head = b'{"kind":"segment","arrays":[],"x":[' + b",".join([b"[]"] * 5_000_000) + b"]}"
    start = struct.pack("<8sIIQ", MAGIC, len(head), zlib.crc32(head), 0)
    raw = start + struct.pack("<II", zlib.crc32(start), 0) + head
    require_refusal_within(2**26, lambda: read_record(reader_of(raw), 0, len(raw)), "more values")
