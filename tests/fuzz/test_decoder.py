"""Damaged blocks give an error, or bytes of the right size, never a crash. No other memory is touched.

Neither LZ4 nor Zstandard notices every flipped bit, so wrong bytes may come back of a block in memory; units in files
have checksums for that. What must hold is that no length, offset, count or number that was read is trusted.

The blocks and their damages are in damaged_blocks.py, which also runs as a script in a process of its own. Nightly,
200,000 blocks are read under a sanitizer, which makes a read outside a block a crash. The seed is another one every
day; `HOLDALL_FUZZ_SEED` sets it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import holdall
from holdall._native import Coded, decode
from holdall.codec.codec import Codec, Method, Transform

from . import damaged_blocks
from .damaged_blocks import (
    BLOCKS,
    CLAIMS,
    COUNT,
    DAMAGES,
    SINGLES,
    WHOLE,
    Block,
    checks_of,
    damaged,
    make_coded,
    read_damaged,
)
from .sanitizer import build_sanitized, copy_package
from .seeds import rotating_seed

SCRIPT = Path(damaged_blocks.__file__)
CASES_IN_A_CHILD = 3_000
CASES_A_NIGHT = 200_000
CHILDREN_A_NIGHT = 8


# ---------------------------------------------------------------- the rules


def test_whole_blocks_are_read() -> None:
    """Without damage nothing is refused, so that what follows is about damage."""
    for block in BLOCKS:
        assert read_damaged(block) is not None


@pytest.mark.parametrize("kind", DAMAGES)
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_an_error_or_some_bytes(kind: str, number: int, seed: int) -> None:
    """Whatever was flipped, cut, zeroed or made up."""
    read_damaged(damaged(number, [kind], seed))


@pytest.mark.parametrize("kind", ["data", "checks", "file"])
@given(number=st.integers(0, len(BLOCKS) - 1), seed=st.integers(0, 2**32 - 1))
def test_damage_to_a_file_is_an_error_or_the_same_bytes(kind: str, number: int, seed: int) -> None:
    """Never others: what was read has the sum that it had when it was written, or it is not returned."""
    whole = replace(BLOCKS[number % len(BLOCKS)], in_file=True)
    whole.checks = checks_of(whole)
    block = replace(whole)
    DAMAGES[kind](block, np.random.default_rng(seed))
    if block.data.size < whole.data.size:
        block.cut = whole.data.size - block.data.size
        block.data = whole.data
    rows = read_damaged(block)
    assert rows is None or rows == read_damaged(whole)


@pytest.mark.parametrize("start", [1, COUNT - 1])
def test_offsets_that_go_back_or_beyond_the_data_are_refused(start: int) -> None:
    """Even where the bytes between them would make a slice."""
    for block in SINGLES:
        for wrong in (int(block.offsets[start + 1]) + 1, block.data.size + 1, 2**32 - 1):
            offsets = block.offsets.copy()
            offsets[start] = wrong
            assert read_damaged(replace(block, offsets=offsets, numbers=np.array([start]))) is None


@pytest.mark.parametrize("number", [-1, COUNT, COUNT + 1, 2**32, -(2**63)])
def test_a_slice_that_is_not_in_the_block_is_refused(number: int) -> None:
    for block in BLOCKS:
        with pytest.raises(IndexError, match=r"but the block has 12 slices"):
            decode(make_coded(block), number, 1)


@pytest.mark.parametrize("offsets", [0, 1, 2])
@pytest.mark.parametrize("group", [0, -1, 65, 1 << 20, 1 << 31, 1 << 40])
def test_a_unit_that_claims_to_be_large_is_refused_before_room_is_made_for_it(group: int, offsets: int) -> None:
    """Also if offsets and sums agree with it, or are missing."""
    for block in SINGLES:
        codec = replace(block.codec, group=group)
        nothing = np.zeros(offsets, np.uint32)
        with pytest.raises(ValueError, match=f"group={group}"):
            Coded(codec, COUNT, nothing, block.palette, block.data)


def test_a_slice_that_claims_to_be_large_takes_no_memory() -> None:
    """A few bytes can claim gigabytes. Only the bytes of a slice are allocated, whatever its header says."""
    codec = Codec(900, Method.ZSTANDARD, 3)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    claim = b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + bytes(23)
    for piece in (bomb, claim):
        data = np.frombuffer(piece, np.uint8)
        offsets = np.array([0, data.size], np.uint32)
        block = Block(codec, data, offsets, np.zeros(0, np.uint8), np.array([0]), count=1)
        tracemalloc.start()
        try:
            assert read_damaged(block) is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


# ---------------------------------------------------------------- in a process of its own


def run_child(kinds: list[str], cases: int, seed: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(kinds), str(cases), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
        env=os.environ | environment,
    )


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit {done.returncode}: " + "\n".join(done.stderr.splitlines()[-30:])


def test_damaged_blocks_do_not_crash_a_process() -> None:
    """Thousands of them."""
    done = run_child([WHOLE, *DAMAGES], CASES_IN_A_CHILD)
    assert done.returncode == 0, last_lines(done)


@pytest.fixture(scope="module")
def claimed() -> subprocess.CompletedProcess[str]:
    """One process for all of them, which applies each kind alone to 500 blocks."""
    return run_child(["/".join(CLAIMS)], 500)


@pytest.mark.parametrize("kind", CLAIMS)
def test_false_claims_do_not_crash_a_process(kind: str, claimed: subprocess.CompletedProcess[str]) -> None:
    """C goes by the transform and the palette's size, so both are checked before it does."""
    assert claimed.returncode == 0, last_lines(claimed)
    told = re.findall(rf"^damaged\(\d+, \['{kind}'(?:, '{kind}')*\], \d+\)$", claimed.stderr, re.MULTILINE)
    assert len(told) == 500


CHANGES = {
    "none": b"",
    "a count that does not end": b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    "more than there are": b"\x02\x00\x01\x07",
    "no length": b"\x01\x05",
    "behind the slice": b"\x01\x65\x01\x07",
    "beyond its end": b"\x01\x5a\x0b" + 11 * b"\x07",
    "far behind it": b"\x01\xff\xff\xff\xff\x7f\x01\x07",
    "far beyond it": b"\x01\x00\xff\xff\xff\xff\x7f\x07",
    "two that leave it together": b"\x02\x32\x01\x07\x32\x01\x07",
    "longer than the unit": b"\x01\x00\x09\x07",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_that_leave_their_slice_or_unit_are_refused(kind: str) -> None:
    """The first slice of a unit of three is whole. The second is what its changes say, or damaged."""
    first = np.arange(100, dtype=np.uint8)
    codec = Codec(100, group=3, transform=Transform.CHANGES)

    def read(noted: bytes, number: int) -> bytes | None:
        data = np.frombuffer(first.tobytes() + noted, np.uint8)
        offsets = np.array([0, len(data)], np.uint32)
        block = Block(codec, data, offsets, np.zeros(0, np.uint8), np.array([number]), count=3)
        return read_damaged(block)

    changed = first.copy()
    changed[[0, 99]] = 7
    assert read(b"\x02\x00\x01\x07\x62\x01\x07\x00", 1) == changed.tobytes()
    assert read(CHANGES[kind], 1) is None
    assert read(b"\x00" + CHANGES[kind], 2) is None


# ---------------------------------------------------------------- under a sanitizer


def first_seed() -> int:
    return rotating_seed() * CHILDREN_A_NIGHT


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that use a build in which the compiler checks every access and every sum."""
    return build_sanitized(copy_package(tmp_path_factory.mktemp("sanitized")))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("child", range(CHILDREN_A_NIGHT))
def test_a_sanitizer_finds_nothing(sanitized: dict[str, str], child: int) -> None:
    """Every day begins with another seed."""
    seed = first_seed() + child
    kinds = [*([WHOLE] if child == 0 else []), *DAMAGES, *CLAIMS]
    done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, seed=seed, **sanitized)
    assert done.returncode == 0, f"seed {seed}: {last_lines(done)}"


OLD_MISTAKES = {
    "a sum of two positions in a file overflows": (
        "_native/decode.c",
        " || b->file_start > INT64_MAX - b->data_bytes",
        "",
        r"signed integer overflow|OSError: \[Errno 22\]",  # Some positions only reach the system, which refuses them.
    ),
    "an unsound group passes": (
        "_native/coded.c",
        "return c->group >= 1 && c->group <= MAX_UNIT_SLICES && c->group * coded_bytes(form) <= INT32_MAX / 4;",
        "return c->group >= 1;",
        "MemoryError|AddressSanitizer|runtime error",
    ),
}
"""What was wrong once: a file of holdall's, what stands there now, what stood there, and what the fuzz says of it."""


@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_what_was_wrong_once_is_told_as_the_code_is_now(mistake: str) -> None:
    """Else a night finds out, or nobody."""
    file, now, _, _ = OLD_MISTAKES[mistake]
    text = (Path(holdall.__file__).parent / file).read_text(encoding="utf-8")
    assert text.count(now) == 1, f"{file} has changed; say what the mistake looks like now"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_a_night_would_find_what_was_wrong_once(tmp_path: Path, mistake: str) -> None:
    """Put back into a copy, each of them ends the run."""
    file, now, then, message = OLD_MISTAKES[mistake]
    package = copy_package(tmp_path)
    text = (package / file).read_text(encoding="utf-8")
    (package / file).write_text(text.replace(now, then), encoding="utf-8")
    environment = build_sanitized(package)
    first = first_seed()
    kinds = [*DAMAGES, *CLAIMS]
    for seed in range(first, first + CHILDREN_A_NIGHT):
        done = run_child(kinds, CASES_A_NIGHT // CHILDREN_A_NIGHT, seed=seed, **environment)
        if done.returncode != 0:
            break
    assert re.search(message, done.stderr), last_lines(done)
