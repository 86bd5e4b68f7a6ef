"""Manifests: they are read as they were written, and malformed ones are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdall.checkpoint import open_reader
from holdall.checkpoint.manifest import (
    BlockEntry,
    Manifest,
    Ref,
    SegmentEntry,
    decode,
    encode,
    manifest_name,
)
from holdall.errors import DamageError

FILE = "0123456789abcdef-0000000000000001.seg"
REF = Ref(FILE, 10, 20, "a" * 32)
MANIFEST = Manifest(
    number=7,
    commit="b" * 32,
    writer_id="c" * 16,
    time=1.5,
    first_tick=3,
    next_tick=9,
    capacity_ticks=6,
    transitions=11,
    schema={"num_envs": 2},
    files={FILE: 100},
    state=REF,
    segments=(SegmentEntry(0, 4, REF, (0,)), SegmentEntry(4, 5, REF, ())),
    blocks=(BlockEntry(REF, 8),),
    dictionaries={"d" * 32: REF},
    attached={"agents/agent_0.pth": (REF,)},
)


def add_checksum(words: dict[str, Any]) -> bytes:
    text = json.dumps(words).encode()
    return text + b"\nsha256:" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def encode_words() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(MANIFEST).split(b"\nsha256:")[0])
    return found


def test_every_field_of_a_manifest_is_read_back() -> None:
    assert decode(encode(MANIFEST), "m") == MANIFEST


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    """The checksum covers the whole manifest."""
    raw = encode(MANIFEST)
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1
        with pytest.raises(DamageError):
            decode(bytes(damaged), "m")
        with pytest.raises(DamageError):
            decode(raw[:position], "m")


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a name that leaves the place": lambda w: w["files"].__setitem__(0, ["../../etc/passwd", 100]),
    "a name with a slash": lambda w: w["files"].__setitem__(0, ["a/" + FILE, 100]),
    "a negative size": lambda w: w["files"].__setitem__(0, [FILE, -1]),
    "a size that is not a whole number": lambda w: w["files"].__setitem__(0, [FILE, 1.5]),
    "a record after the end of its file": lambda w: w["state"].__setitem__(2, 1000),
    "a record in an unknown file": lambda w: w["state"].__setitem__(0, 1),
    "a malformed digest": lambda w: w["state"].__setitem__(3, "xyz"),
    "an unknown block": lambda w: w["segments"][0].__setitem__(2, [1]),
    "a gap between segments": lambda w: w["segments"][1].__setitem__(0, 5),
    "a segment without ticks": lambda w: w["segments"][1].__setitem__(1, 0),
    "a segment without a record": lambda w: w["segments"][1].__delitem__(3),
    "an attachment that leaves its folder": lambda w: w["attached"].__setitem__("../x", []),
    "a hidden attachment": lambda w: w["attached"].__setitem__(".ssh/id", []),
    "a negative number of transitions": lambda w: w.__setitem__("transitions", -1),
    "a number that is a bool": lambda w: w.__setitem__("number", True),
    "no schema": lambda w: w.__setitem__("schema", []),
    "a missing key": lambda w: w.pop("segments"),
    "another format": lambda w: w.__setitem__("format", "pickle"),
    "a newer version": lambda w: w.__setitem__("version", 2),
    "an unknown feature": lambda w: w.__setitem__("features", ["encrypted"]),
    "segments that are not a list": lambda w: w.__setitem__("segments", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_malformed_manifest_with_a_matching_checksum_is_refused(change: str) -> None:
    """A manifest may come from a stranger."""
    changed = encode_words()
    CHANGES[change](changed)
    with pytest.raises(DamageError):
        decode(add_checksum(changed), "m")


def write_manifest(folder: Path, raw: bytes, number: int = 7) -> None:
    """Write a manifest to its place in a folder."""
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests" / manifest_name(number)).write_bytes(raw)


def test_a_manifest_is_read_again_if_its_bytes_change(tmp_path: Path) -> None:
    """The reader remembers manifests, but notices damage and another manifest with the same number."""
    reader = open_reader(tmp_path)
    raw = encode(MANIFEST)
    write_manifest(tmp_path, raw)
    assert reader.manifest(7) == MANIFEST
    for damaged in (raw[:-1], raw[:50] + b"?" + raw[51:], raw[: len(raw) // 2] + raw[-73:], b""):
        write_manifest(tmp_path, damaged)
        with pytest.raises(DamageError, match=r"Manifest .*7\.json"):
            reader.manifest(7)
    other = replace(MANIFEST, commit="e" * 32)
    write_manifest(tmp_path, encode(other))
    assert reader.manifest(7) == other
    write_manifest(tmp_path, raw, number=8)
    with pytest.raises(DamageError, match="copy of manifest 7"):
        reader.manifest(8)


def test_unknown_keys_are_ignored() -> None:
    """A later version may add keys. A key that readers must know is listed as a feature."""
    assert decode(add_checksum(encode_words() | {"mood": "fine"}), "m") == MANIFEST
