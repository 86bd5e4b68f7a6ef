"""Checkpoints from a stranger, whose sums are right and whose words are not: refused, or read within bounds."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall import HoldallError, ReplayMemory
from holdall.checkpoint.directory import DirectoryReader
from holdall.checkpoint.manifest import Ref, signed, signed_text
from holdall.storage.records import MAGIC, PREAMBLE

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


def mutated(value: Any, generator: random.Random) -> Any:
    """Change one thing anywhere in a tree of JSON."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        key = generator.choice(sorted(value))
        if generator.random() < 0.1:
            return {name: child for name, child in value.items() if name != key}
        return value | {key: mutated(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        index = generator.randrange(len(value))
        return [*value[:index], mutated(value[index], generator), *value[index + 1 :]]
    if type(value) is int and generator.random() < 0.5:
        return value + generator.choice([-1, 1, 1000, -value, value])
    return generator.choice(ODD)


def rewritten(raw: bytes, generator: random.Random) -> bytes:
    """Change a record's head, or a tree in it, and make every sum right again."""
    head_bytes = PREAMBLE.unpack(raw[:32])[1]
    head, body = json.loads(raw[32 : 32 + head_bytes]), raw[32 + head_bytes :]
    if head["kind"] == "state" and generator.random() < 0.8:
        start = sum(part["bytes"] for part in head["parts"] if part["name"] != "tree")
        tree = json.dumps(mutated(json.loads(body[start:]), generator)).encode()
        body = body[:start] + tree
        for part in head["parts"]:
            if part["name"] == "tree":
                part |= {"bytes": len(tree), "crc32": zlib.crc32(tree)}
    else:
        head = mutated(head, generator)
    words = json.dumps(head).encode()
    start_bytes = struct.pack("<8sIIQ", MAGIC, len(words), zlib.crc32(words), len(body))
    return start_bytes + struct.pack("<II", zlib.crc32(start_bytes), 0) + words + body


def renamed(words: Any, old: list[Any], new: list[Any]) -> Any:
    """Name another record wherever one is named."""
    if isinstance(words, dict):
        return {key: renamed(child, old, new) for key, child in words.items()}
    if isinstance(words, list):
        if words[-4:] == old:
            return [*words[:-4], *new]
        return [renamed(child, old, new) for child in words]
    return words


def forge(run: Path, generator: random.Random) -> str:
    """Put a changed record in place of one of a checkpoint's; or change the manifest itself."""
    name = run / "manifests" / "0000000000000001.json"
    words = json.loads(signed_text(name.read_bytes()))
    if generator.random() < 0.3:
        name.write_bytes(signed(json.dumps(mutated(words, generator)).encode()))
        return "manifest"
    refs: list[Ref] = DirectoryReader(run).manifest(1).refs
    ref = generator.choice(refs)
    with (run / "segments" / ref.file).open("rb") as file:
        file.seek(ref.start)
        raw = file.read(ref.nbytes)
    changed = rewritten(raw, generator)
    forged = "f" * 16 + "-" + "0" * 15 + "1.seg"
    (run / "segments" / forged).write_bytes(changed)
    files = [entry[0] for entry in words["files"]]
    head_bytes = PREAMBLE.unpack(changed[:32])[1]
    digest = hashlib.sha256(changed[: 32 + head_bytes]).hexdigest()[:32]
    old, new = [files.index(ref.file), ref.start, ref.nbytes, ref.digest], [len(files), 0, len(changed), digest]
    words = renamed(words, old, new)
    words["files"].append([forged, len(changed)])
    name.write_bytes(signed(json.dumps(words).encode()))
    return str(json.loads(raw[32 : 32 + PREAMBLE.unpack(raw[:32])[1]])["kind"])


@pytest.mark.parametrize("forgeries", [120, pytest.param(3_000, marks=pytest.mark.nightly)])
def test_words_that_make_no_sense_are_refused_or_harmless(tmp_path: Path, forgeries: int) -> None:
    """No crash, no other error than holdall's, and nothing allocated that a file only claims."""
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
    assert seen >= {"manifest", "rows", "state"}
